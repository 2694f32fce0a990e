"""What steps that are CUDA graphs cost beyond the device's part of lookups, layers and updates; see `Captured`."""

from __future__ import annotations

import time

import numpy as np
import torch
from torch import Tensor

from holdall.kernels.path import HAS_TRITON
from holdall.placement.clock import Clock, captured, fit
from holdall.placement.hardware import Captured, Cost

TABLES = 26
SHAPES = ((1 << 16, 1 << 14), (1 << 20, 1 << 18), (1 << 20, 1 << 14), (1 << 20, 0))
"""Lookups, and far ones among them, that are timed."""
LAUNCHED = 20
"""Steps whose launches are timed together."""


def measure_captured(clock: Clock) -> Captured | None:
    """None where there is no GPU, or no kernels for it."""
    if clock.device.type != "cuda" or not HAS_TRITON:
        return None
    return Captured(find=_find(clock), launch_far=_launch_far(clock), launch_step=_launch_step(clock))


def _ids(lookups: int, far: int, device: torch.device) -> Tensor:
    """Ids [T, B], of which so many are 5 or more."""
    generator = np.random.default_rng(4)
    lookups = lookups // TABLES * TABLES
    ids = np.concatenate([np.zeros(lookups - far, np.int32), 5 + generator.integers(0, 1 << 22, far, dtype=np.int32)])
    return torch.from_numpy(generator.permutation(ids).reshape(TABLES, -1)).to(device)


def _find(clock: Clock) -> Cost:
    """`far_rows_triton.find`, by lookups and far ones."""
    seconds = []
    for lookups, far in SHAPES:
        find, _ = _finding(clock, lookups, far)
        seconds.append(clock.replayed(find))
    return fit(SHAPES, seconds)


def _finding(clock: Clock, lookups: int, far: int):  # type: ignore[no-untyped-def]
    from holdall.kernels import far_rows_triton

    ids = _ids(lookups, far, clock.device)
    info = torch.tensor([[5, 0, 0]] * TABLES, device=clock.device)
    located = torch.empty(ids.shape[1], ids.shape[0], dtype=torch.int32, device=clock.device)
    rows = torch.empty(max(16, far), dtype=torch.int64, device=clock.device)
    return lambda: far_rows_triton.find(ids, info, located, rows, far + far // 4 + 16, 0), rows


def _launch_far(clock: Clock) -> float:
    """The host's part of finding, fetching, taking over and sending back, of rows with one kind of state."""
    from holdall.kernels import far_rows_triton

    find, rows = _finding(clock, 1 << 14, 1 << 10)
    table = torch.zeros(1 << 12, 16, pin_memory=True)
    room = torch.zeros(rows.numel(), 16, device=clock.device)
    storage = torch.zeros(4 * rows.numel(), 16, device=clock.device)

    def step() -> None:
        counts = find().zero_()  # so that none is moved
        source = far_rows_triton.held_by(rows, counts, [(0, rows), (1, rows)])
        assert source is not None
        for home in (False, True):
            for _ in range(2):
                far_rows_triton.move(table, rows, counts, room, home=home)
        for _ in range(2):
            far_rows_triton.take(
                storage, source, counts, num_hot=0, room_rows=rows.numel(), own_room=2, num_rows=rows.numel()
            )

    return _host_seconds(step)


def _launch_step(clock: Clock) -> float:
    """The host's part of a step that is replayed: its batch to where the graph reads it, rates, the loss."""
    x, y = torch.zeros(16, device=clock.device), torch.zeros(16, device=clock.device)
    graph = captured(lambda: x.add_(y))
    assert graph is not None
    given = [torch.zeros(16).pin_memory() for _ in range(4)]

    def step() -> None:
        for one in given:
            x.copy_(one.to(clock.device, non_blocking=True))
        graph.replay()
        x.clone()

    return _host_seconds(step)


def _host_seconds(step) -> float:  # type: ignore[no-untyped-def]
    """Seconds of the host alone."""
    step()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(LAUNCHED):
        step()
    taken = (time.perf_counter() - start) / LAUNCHED
    torch.cuda.synchronize()
    return taken
