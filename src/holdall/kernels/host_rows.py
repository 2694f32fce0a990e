"""Distinct host rows of a batch and the staging buffers that have them, in plain torch.

`host_rows_triton` does the same on the device without waiting for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

NO_ROW = 1 << 62
"""Padding of lists of row numbers: above every row number, so that sorting puts it last."""
BUFFER_SHIFT = 40
"""Slot s of staging buffer b is one number, b << BUFFER_SHIFT | s."""


@dataclass(frozen=True)
class InitialRowParams:
    """Parameters of the initial values of the rows of concatenated tables; see `holdall.tables.initial_rows`."""

    starts: Tensor
    """[T] int64: first row of each table."""
    seeds: Tensor
    """[T] int64."""
    stds: Tensor
    """[T] float32."""
    quantiles: Tensor
    """[65,536] float32."""
    streams: tuple[int, int]
    """Initial states of the generators of both hashes (`hashing.stream` of 0 and 1)."""


def find_host_rows(places: Tensor, info: Tensor, num_hot: int) -> tuple[Tensor, Tensor, int]:
    """Distinct host rows [U] int64, ascending; the storage row of each lookup [B, T]; the number of host lookups.

    `places` [T, B] are row numbers within their tables. Line t of `info` [T, 3] int64 is (hot rows, first row on the
    device, first row on the host) of table t; rows behind the hot rows are on the host. Hot rows keep their row of the
    device's storage; the u-th distinct host row gets row `num_hot + u`. On a GPU this synchronizes twice.
    """
    hot, device_start, host_start = (column[None, :] for column in info.unbind(1))
    places = places.t()
    located = (device_start + places).contiguous()
    flat = (places >= hot).reshape(-1).nonzero()[:, 0]
    rows, inverse = torch.unique((host_start + places).reshape(-1)[flat], return_inverse=True)
    located.view(-1)[flat] = num_hot + inverse
    return rows, located, flat.numel()


def find_in_buffers(rows: Tensor, buffers: Sequence[tuple[int, Tensor]]) -> Tensor:
    """[U] int64: the staging buffer and slot of each of `rows` [U], as buffer << BUFFER_SHIFT | slot; -1 for none.

    `buffers` are (buffer, its rows, ascending), oldest first. Of several buffers with a row, the newest counts.
    """
    source = torch.full_like(rows, -1)
    for buffer, cached in buffers:
        if cached.numel():
            slot = torch.searchsorted(cached, rows).clamp_(max=cached.numel() - 1)
            same = (cached[slot] == rows) & (rows != NO_ROW)
            source = torch.where(same, slot + (buffer << BUFFER_SHIFT), source)
    return source
