"""Row mover that copies through pinned host memory: the host gathers rows, copies them in one piece, and scatters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from holdall.data.batch import features_at
from holdall.kernels.host_rows import BUFFER_SHIFT, find_host_rows, find_in_buffers
from holdall.tiers.host_rows import HostRows
from holdall.tiers.row_mover import FeatureTables, RowMover
from holdall.tiers.working_set import CopySet


@dataclass(frozen=True)
class WrittenRows:
    """The rows among those of a step that were ever written; the device computes initial values for the others."""

    host_rows: Tensor
    """[T] int64: their row numbers, on the host."""
    slots: Tensor
    """[T] int64: their positions among all rows of the step, on the device."""
    mask_bytes: int
    """Bytes moved to find `slots` on the device."""


class CopyMover(RowMover[CopySet]):
    """Mover by host copies, of rows in host memory or on disk.

    On a GPU copies go through pinned memory, on the current stream, and stored rows are decoded on the device.
    """

    fixed_addresses = False

    def find(self, places: Tensor, tables: FeatureTables, buffer: int, *, temporary: bool) -> CopySet:
        places = features_at(places, tables.positions)
        info = torch.stack((tables.hot, tables.device_starts, tables.host_starts), dim=1)
        rows, located, num_lookups = find_host_rows(places, info, self.pack.staging.num_hot)
        return CopySet(rows, located, tables.names, buffer, num_host_lookups=num_lookups)

    def working_set(self, rows: Tensor, num_lookups: int, buffer: int) -> CopySet:
        return CopySet(rows, buffer=buffer, num_host_lookups=num_lookups)

    def find_owners(self, working: CopySet, newest_first: Sequence[CopySet]) -> None:
        if not newest_first:
            return
        source = find_in_buffers(working.rows, [(other.buffer, other.rows) for other in reversed(newest_first)])
        owned = (source >= 0).nonzero()[:, 0]
        if owned.numel():
            working.source, working.owned = source[owned], owned
            working.unowned = (source < 0).nonzero()[:, 0]

    def required_rows(self, working: CopySet) -> int:
        num_rows = working.rows.numel()
        return num_rows if num_rows > self.pack.staging.buffer_rows else 0

    def fetch(self, working: CopySet, *, counted: bool = True) -> None:
        pack = self.pack
        if self.required_rows(working):
            return
        rows = working.rows if working.unowned is None else working.rows[working.unowned]
        host_rows = working.host_rows if working.unowned is None else rows.cpu()
        if rows.numel() == 0:
            return
        written = self._written(host_rows)
        moved = 0 if written is None else written.mask_bytes
        for host, buffer in zip(pack.host_tensors(), pack.buffer_views(working), strict=True):
            moved += self._fetch(host, host_rows, rows, buffer, working.unowned, written)
        if counted:
            pack.traffic.fetched += moved
            pack.traffic.fetched_rows += rows.numel()

    def _written(self, host_rows: Tensor) -> WrittenRows | None:
        """The rows among these that were ever written; None where all were, or that is not tracked."""
        touched, device = self.pack.host_rows.touched, self.pack.device
        if touched is None:
            return None
        mask = touched[host_rows]
        if bool(mask.all()):
            return None
        on_device = mask if device.type == "cpu" else mask.pin_memory().to(device, non_blocking=True)
        return WrittenRows(host_rows[mask], on_device.nonzero()[:, 0], mask.nbytes)

    def _fetch(
        self,
        host: HostRows,
        host_rows: Tensor,
        rows: Tensor,
        buffer: Tensor,
        slots: Tensor | None,
        written: WrittenRows | None,
    ) -> int:
        """Copy `host_rows` of `host` (`rows` on the device) into `slots` of `buffer`; the bytes moved.

        Only rows that were ever `written` are moved: zeros are stored for the others.
        """
        device = self.pack.device
        stored = host_rows if written is None else written.host_rows
        if device.type == "cpu":
            found = host.read(host_rows, out=buffer if slots is None else None)
        else:
            pinned = torch.empty(stored.numel(), *buffer.shape[1:], dtype=buffer.dtype, pin_memory=True)
            raw = host.read_raw(stored, out=pinned).to(device, non_blocking=True)
            if written is not None:
                raw = raw.new_zeros(rows.numel(), *buffer.shape[1:]).index_copy_(0, written.slots, raw)
            found = host.decode_(rows, raw)
        if slots is not None:
            buffer.index_copy_(0, slots, found)
        elif found is not buffer:
            buffer.copy_(found)
        return stored.numel() * found[:1].nbytes

    def forward(self, working: CopySet) -> None:
        if working.source is None or working.owned is None:
            return
        staging = self.pack.staging
        buffers, slots = working.source >> BUFFER_SHIFT, working.source & ((1 << BUFFER_SHIFT) - 1)
        source_rows = staging.num_hot + buffers * staging.buffer_rows + slots
        target_rows = staging.start(working.buffer) + working.owned
        for tensor in self.pack.device_tensors():
            tensor.index_copy_(0, target_rows, tensor.index_select(0, source_rows))

    def write_back(self, working: CopySet) -> None:
        if working.rows.numel() == 0:
            return
        for host, buffer in zip(self.pack.host_tensors(), self.pack.buffer_views(working), strict=True):
            self._write_back(host, working, buffer)
            self.pack.traffic.written_back += buffer.nbytes

    def _write_back(self, host: HostRows, working: CopySet, buffer: Tensor) -> None:
        if self.pack.device.type == "cpu":
            host.write(working.host_rows, buffer)
            return
        raw = host.encode(working.rows, buffer)
        pinned = torch.empty(raw.shape, dtype=raw.dtype, pin_memory=True)
        pinned.copy_(raw, non_blocking=True)
        torch.cuda.current_stream(self.pack.device).synchronize()
        host.write_raw(working.host_rows, pinned)

    def host_rows_added(self) -> None:
        """Nothing to do: rows are pinned as they are copied."""

    def buffers_replaced(self) -> None:
        """Nothing to do: no address is kept."""

    def configure(self, *, beside_steps: bool, graphs: bool) -> None:
        """Nothing to do: copies are the same beside steps, and are not captured."""
