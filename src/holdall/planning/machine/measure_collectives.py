"""Measured seconds of all-reduce, all-to-all and all-gather by message size, between processes of torchrun."""

from __future__ import annotations

import os
import time

import numpy as np
import torch
import torch.distributed as dist

from holdall.planning.machine.hardware import CollectiveRates

SIZES = (1 << 8, 1 << 14, 1 << 18, 1 << 22, 1 << 25)
"""Bytes that every process sends."""


def measure_collectives(device: torch.device, sizes: tuple[int, ...] = SIZES) -> CollectiveRates | None:
    """Rates between the processes that torchrun started, the same on all ranks; None for one process."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size < 2 or not dist.is_available():
        return None
    started = not dist.is_initialized()
    if started:
        if device.type == "cuda":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        reduce, exchange, gather = {}, {}, {}
        for size in sizes:
            count = max(1, size // 4 // world_size) * world_size
            sent, received = torch.ones(count, device=device), torch.empty(count, device=device)
            repeats = 5 if size > 1 << 20 else 20  # short ones are noisy
            reduce[str(size)] = _slowest(lambda sent=sent: dist.all_reduce(sent), device, repeats)
            exchange[str(size)] = _slowest(
                lambda sent=sent, received=received: dist.all_to_all_single(received, sent),
                device,
                repeats,
            )
            # A W-th of the size, so that the gathered tensor is no larger than the other messages.
            part, parts = sent[: count // world_size], list(received.chunk(world_size))
            gather[str(part.nbytes)] = _slowest(
                lambda part=part, parts=parts: dist.all_gather(parts, part),
                device,
                repeats,
            )
        return CollectiveRates(dist.get_backend(), world_size, reduce, exchange, gather)
    finally:
        if started:
            dist.destroy_process_group()


def _slowest(run: object, device: torch.device, repeats: int) -> float:
    """Median over repeats of the seconds of the slowest rank."""
    assert callable(run)
    taken = []
    for _ in range(repeats + 1):
        dist.barrier()
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64, device=device)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        taken.append(float(seconds))
    return float(np.median(taken[1:]))
