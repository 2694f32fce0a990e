"""Rows between host and device: gathered where they lie, copied in one piece, scattered where they belong."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from holdall.tiers.host_rows import HostRows, LazyRows


@dataclass(frozen=True)
class Written:
    """Those among the rows of a step that were ever written; the device knows how the others begin."""

    host_rows: Tensor
    """[T] int64: their row numbers, on the host."""
    places: Tensor
    """[T] int64: where they are among all, on the device."""
    num_bytes: int
    """Bytes moved to tell the device."""


class CopyMover:
    """Copies rows to a device and back.

    On a GPU they go through page-locked memory, on the current stream, and what turns stored rows into values runs
    there.
    """

    def __init__(self, device: torch.device):
        self.device = device

    def written(self, far: HostRows, host_rows: Tensor) -> Written | None:
        """Which of these rows `far` was ever given; None where all were, or nobody knows."""
        if not isinstance(far, LazyRows):
            return None
        mask = far.touched[host_rows]
        if bool(mask.all()):
            return None
        near = mask if self.device.type == "cpu" else mask.pin_memory().to(self.device, non_blocking=True)
        return Written(host_rows[mask], near.nonzero()[:, 0], mask.nbytes)

    def fetch(
        self,
        far: HostRows,
        host_rows: Tensor,
        rows: Tensor,
        room: Tensor,
        places: Tensor | None,
        written: Written | None = None,
    ) -> int:
        """Rows `host_rows` of `far` (`rows` is the same on the device) into `room`, at `places`; the bytes moved.

        Only those that were ever `written` are moved: zeros are stored of the others.
        """
        stored = host_rows if written is None else written.host_rows
        if self.device.type == "cpu":
            found = far.read(host_rows, out=room if places is None else None)
        else:
            pinned = torch.empty(stored.numel(), *room.shape[1:], dtype=room.dtype, pin_memory=True)
            raw = far.read_raw(stored, out=pinned).to(self.device, non_blocking=True)
            if written is not None:
                raw = raw.new_zeros(rows.numel(), *room.shape[1:]).index_copy_(0, written.places, raw)
            found = far.decode_(rows, raw)
        if places is not None:
            room.index_copy_(0, places, found)
        elif found is not room:
            room.copy_(found)
        return stored.numel() * found[:1].nbytes

    def write_back(self, far: HostRows, host_rows: Tensor, rows: Tensor, room: Tensor) -> int:
        """`room` into rows `host_rows` of `far`; the bytes moved."""
        if self.device.type == "cpu":
            far.write(host_rows, room)
        else:
            raw = far.encode(rows, room)
            pinned = torch.empty(raw.shape, dtype=raw.dtype, pin_memory=True)
            pinned.copy_(raw, non_blocking=True)
            torch.cuda.current_stream(self.device).synchronize()
            far.write_raw(host_rows, pinned)
        return room.nbytes
