"""Which rows of a step are far, and who holds them, in plain torch; `far_rows_triton` finds them without waiting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

NOBODY = 1 << 62
"""In the place of a row's number where there is no row: above them all, so that sorting puts it last."""
ROOM_SHIFT = 40
"""Place p of room r is one number, r << ROOM_SHIFT | p."""


@dataclass(frozen=True)
class Initial:
    """How the rows of several tables that lie end to end begin; see `holdall.tables.initial_rows`."""

    starts: Tensor
    """[T] int64."""
    seeds: Tensor
    """[T] int64."""
    stds: Tensor
    """[T] float32."""
    quantiles: Tensor
    """[65,536] float32."""
    streams: tuple[int, int]
    """Where the generators of both hashes start (`hashing.stream` of 0 and 1)."""


def find(places: Tensor, info: Tensor, num_hot: int) -> tuple[Tensor, Tensor, int]:
    """Distinct far rows [U] int64, ascending; where each lookup finds its row, [B, T]; the number of far lookups.

    `places` [T, B] are within their tables. A line (hot rows, start on the device, start on the host) of `info` [T, 3]
    int64 is a table's: a place behind its hot rows is far. Hot rows are found at their row of the device's storage, far
    ones at `num_hot` and what follows. On a GPU this waits for it, twice.
    """
    hot, near, far = (column[None, :] for column in info.unbind(1))
    places = places.t()
    located = (near + places).contiguous()
    flat = (places >= hot).reshape(-1).nonzero()[:, 0]
    rows, inverse = torch.unique((far + places).reshape(-1)[flat], return_inverse=True)
    located.view(-1)[flat] = num_hot + inverse
    return rows, located, flat.numel()


def held_by(rows: Tensor, others: Sequence[tuple[int, Tensor]]) -> Tensor:
    """[U] int64: who holds each of `rows` [U], ascending, as room << ROOM_SHIFT | place; -1 if nobody does.

    `others` are rooms and the rows that each holds, ascending, oldest first: the newest that holds a row counts.
    """
    source = torch.full_like(rows, -1)
    for room, held in others:
        if held.numel():
            there = torch.searchsorted(held, rows).clamp_(max=held.numel() - 1)
            same = (held[there] == rows) & (rows != NOBODY)
            source = torch.where(same, there + (room << ROOM_SHIFT), source)
    return source
