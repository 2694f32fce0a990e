"""Rows between host and device: gathered where they lie, copied in one piece, scattered where they belong."""

from __future__ import annotations

import torch
from torch import Tensor

from holdall.tiers.far_rows import FarRows


class Transfer:
    """Copies rows to a device and back.

    On a GPU they go through page-locked memory, on the current stream, and what turns stored rows into values runs
    there.
    """

    def __init__(self, device: torch.device):
        self.device = device

    def fetch(self, far: FarRows, host_rows: Tensor, rows: Tensor, room: Tensor, places: Tensor | None) -> int:
        """Rows `host_rows` of `far` (`rows` is the same on the device) into `room`, at `places`; the bytes moved."""
        if self.device.type == "cpu":
            found = far.read(host_rows, out=room if places is None else None)
        else:
            pinned = torch.empty(host_rows.numel(), *room.shape[1:], dtype=room.dtype, pin_memory=True)
            found = far.decode_(rows, far.read_raw(host_rows, out=pinned).to(self.device, non_blocking=True))
        if places is not None:
            room.index_copy_(0, places, found)
        elif found is not room:
            room.copy_(found)
        return found.nbytes

    def send_back(self, far: FarRows, host_rows: Tensor, rows: Tensor, room: Tensor, before: Tensor | None) -> int:
        """`room` into rows `host_rows` of `far`, or its difference from `before` added to them; the bytes moved."""
        if before is not None:
            far.add(host_rows, (room - before).cpu())
        elif self.device.type == "cpu":
            far.write(host_rows, room)
        else:
            raw = far.encode(rows, room)
            pinned = torch.empty(raw.shape, dtype=raw.dtype, pin_memory=True)
            pinned.copy_(raw, non_blocking=True)
            torch.cuda.current_stream(self.device).synchronize()
            far.write_raw(host_rows, pinned)
        return room.nbytes
