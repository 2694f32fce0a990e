"""Pack of dense tables whose lookups find hot rows and the rows of the current step in one device storage.

Each row has one owner at a time, so no update is lost or applied twice. The device owns hot rows (`TieredStorage`); a
step owns its other rows, which a `RowMover` fetches into a staging buffer before the step and writes back after it,
with their optimizer state. Lookup, gradient and update see one storage on the device, and row numbers in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from holdall.data.batch import Ids, features_at
from holdall.embedding.dense_pack import DensePack
from holdall.tiers.choose_mover import KernelIsFaster, always, make_mover
from holdall.tiers.hot_refresh import HotRefresh
from holdall.tiers.row_mover import FeatureTables
from holdall.tiers.tiered_storage import TieredStorage
from holdall.tiers.working_set import WorkingSet


class TieredPack(TieredStorage):
    """Tiered storage with a mover of its rows: lookups, and the working sets of steps."""

    def __init__(
        self,
        host: DensePack,
        hot_rows: Mapping[str, int],
        device: torch.device | str,
        *,
        num_buffers: int = 1,
        folder: Path | None = None,
        fetch_by: str = "copy",
        kernel_is_faster: KernelIsFaster = always,
    ):
        super().__init__(host, hot_rows, device, num_buffers=num_buffers, folder=folder)
        self.mover = make_mover(self, fetch_by, kernel_is_faster)
        self.renumbering: HotRefresh | None = None
        """Map from ids to rows, once hot rows may be exchanged; None while the two are equal."""
        self.working: WorkingSet | None = None
        """That of the current step."""
        self.all_hot = False
        """Whether the current lookups are of hot rows only: nothing is compared, so nothing waits for the device."""
        self._columns: dict[tuple[tuple[str, ...], torch.device], tuple[Tensor, Tensor, Tensor]] = {}
        self._fixed_located: dict[torch.Size, Tensor] = {}
        """Located rows of the current step at a fixed address, by their shape."""
        self.refill()

    def allocate_slots(self, make: Callable[[Tensor], dict[str, Tensor]]) -> dict[str, Tensor]:
        slots = super().allocate_slots(make)
        self.mover.host_rows_added()
        return slots

    def reserve(self, num_rows: int) -> None:
        if num_rows > self.staging.buffer_rows:
            self.mover.buffers_replaced()
            super().reserve(num_rows)

    # --- lookups -----------------------------------------------------------------------------------------------------

    def locate(self, ids: Tensor, names: Sequence[str], which: Tensor | None = None) -> Tensor:
        """Row numbers of the device's storage."""
        working = self.working
        if working is not None and working.located is not None and list(names) == list(working.names):
            return self._located(working) if working.fixed_located is None else working.fixed_located
        hot, device_starts, host_starts = self._columns_of(tuple(names), ids.device)
        if which is not None:
            hot, device_starts, host_starts = hot[which], device_starts[which], host_starts[which]
        places = ids if self.renumbering is None else self.renumbering.places(ids, host_starts)
        found = device_starts + places
        if self.all_hot:
            return found
        is_cold = places >= hot
        cold = (host_starts + places)[is_cold]
        if working is None:  # outside of a step: an evaluation, or a model called by hand
            working = self._fetch_outside_steps(torch.unique(cold))
        found[is_cold] = self.staging.num_hot + torch.searchsorted(working.rows, cold)
        return self.staging.moved_to(working.buffer, found)

    def _located(self, working: WorkingSet) -> Tensor:
        """The located rows of a set, in its own buffer."""
        assert working.located is not None
        return working.located if working.located_in_buffer else self.staging.moved_to(working.buffer, working.located)

    def _fetch_outside_steps(self, rows: Tensor) -> WorkingSet:
        self.synchronize()
        self.reserve(rows.numel())
        working: WorkingSet = self.mover.working_set(rows, rows.numel(), self.staging.outside_steps)
        self.mover.fetch(working, counted=False)
        self.traffic.outside_steps += rows.numel() * self.row_bytes()
        return working

    def _columns_of(self, names: tuple[str, ...], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Hot rows, start on the device and start on the host of each of these tables; cached, as `start_tensor`'s."""
        if (names, device) not in self._columns:
            numbers = ([column[name] for name in names] for column in (self.hot_rows, self.device_starts, self.starts))
            hot, device_starts, host_starts = (torch.tensor(column, device=device) for column in numbers)
            self._columns[names, device] = (hot, device_starts, host_starts)
        return self._columns[names, device]

    def _tables_of(self, features: Mapping[str, str], device: torch.device) -> FeatureTables:
        positions = [position for position, name in enumerate(features.values()) if name in self.tables]
        names = tuple(name for name in features.values() if name in self.tables)
        return FeatureTables(positions, names, *self._columns_of(names, device))

    # --- steps -------------------------------------------------------------------------------------------------------

    def find(self, ids: Ids, features: Mapping[str, str], *, buffer: int = 0, again: bool = False) -> WorkingSet:
        """Working set of a batch, for a staging buffer; `traffic` is not counted if it was found before (`again`).

        On a GPU this waits for it, unless the mover has fixed addresses.
        """
        tables = self._tables_of(features, ids.values.device)
        looked_up = None
        if ids.offsets is None:
            num_lookups, places = len(tables.names) * ids.batch_size, ids.values
            if self.renumbering is not None:
                starts = tables.host_starts[:, None]
                looked_up = features_at(places, tables.positions) + starts
                places = self.renumbering.place[looked_up] - starts
                tables = tables._replace(positions=range(len(tables.names)))
            working = self.mover.find(places, tables, buffer, temporary=self.renumbering is not None)
        else:
            pieces = [ids.bag(position)[0] for position in tables.positions]
            lengths = torch.tensor([piece.numel() for piece in pieces], device=ids.values.device)
            which = torch.repeat_interleave(lengths)
            places, starts = torch.cat(pieces), tables.host_starts[which]
            num_lookups = places.numel()
            if self.renumbering is not None:
                looked_up = places + starts
                places = self.renumbering.place[looked_up] - starts
            cold = (starts + places)[places >= tables.hot[which]]
            working = self.mover.working_set(torch.unique(cold), cold.numel(), buffer)
        working.looked_up = looked_up
        if not again:
            self.traffic.lookups += num_lookups
            if working.num_host_lookups is not None:
                self.traffic.hot_lookups += num_lookups - working.num_host_lookups
        return working

    def begin_step(self, working: WorkingSet) -> None:
        """Let lookups read the rows of a working set, which are all in its staging buffer.

        Its lookups are counted here and not when it was found, since a checkpoint in between has only the steps before.
        On a GPU, located rows are copied to an address that is the same for every step: kernels that were captured in
        a graph read it.
        """
        self.working = working
        if self.renumbering is not None and working.looked_up is not None:
            self.renumbering.count(working.looked_up)
        if working.located is not None and self.device.type == "cuda":
            shape = working.located.shape
            if shape not in self._fixed_located:
                narrow = torch.int32 if self.storage.shape[0] < 2**31 else torch.int64
                self._fixed_located[shape] = torch.empty(shape, dtype=narrow, device=self.device)
            working.fixed_located = self._fixed_located[shape].copy_(self._located(working))

    def begin_hot_step(self, ids: Ids, features: Mapping[str, str]) -> None:
        """Begin the step of a batch of hot lookups only, which is not checked: its working set has no rows."""
        rows = torch.empty(0, dtype=torch.int64, device=ids.values.device)
        if ids.offsets is not None:
            self.begin_step(WorkingSet(rows))
            return
        tables = self._tables_of(features, ids.values.device)
        places = features_at(ids.values, tables.positions)
        self.begin_step(WorkingSet(rows, (places + tables.device_starts[:, None]).t(), tables.names))

    def end_step(self) -> None:
        self.working = None

    def count_hot(self, ids: Ids, features: Mapping[str, str]) -> None:
        """Count the lookups of a batch of hot lookups only."""
        positions = self._tables_of(features, ids.values.device).positions
        lookups = len(positions) * ids.batch_size
        if ids.offsets is not None:
            lookups = sum(ids.bag(position)[0].numel() for position in positions)
        self.traffic.lookups += lookups
        self.traffic.hot_lookups += lookups
