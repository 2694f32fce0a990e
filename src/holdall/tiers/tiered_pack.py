"""A pack of dense tables whose hot rows live near the computation, on the device, and whose others live farther away.

The host holds every row, end to end, as a `DensePack` does: that is what checkpoints read and write. The device holds

    [ hot rows of table 1 | hot rows of table 2 | ... | room for other rows of a step | room for another step | ... ]

and each row has one owner at a time, so no update is lost and none is applied twice: hot rows belong to the device
until `flush` copies them home; a step's other rows are fetched before it and sent back after it, with their optimizer
state. Everything between (lookup, gradient, update) sees one storage on the device and row numbers into it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from holdall.common.errors import ConfigError
from holdall.data.batch import Ids, features_at
from holdall.embedding.dense_pack import DensePack
from holdall.kernels.host_rows import BUFFER_SHIFT, find_host_rows, find_in_buffers
from holdall.tiers.copy_mover import CopyMover
from holdall.tiers.host_rows import HostRows, LazyRows, stored_rows
from holdall.tiers.hot_refresh import HotRefresh
from holdall.tiers.kernel_mover import KernelIsFaster, KernelMover, always, chosen
from holdall.tiers.lazy_tensor import LazyTensor
from holdall.tiers.staging import grown, with_spare
from holdall.tiers.traffic import Traffic
from holdall.tiers.working_set import KernelSet, WorkingSet

REFILL_ROWS = 1 << 18
"""Hot rows that are brought at a time when a pack is filled."""


class TieredPack(DensePack):
    """`host`'s tables with the first `hot_rows[name]` rows of each on `device`, and rooms for the rows of steps."""

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
        for name in host.tables:
            if not 0 <= hot_rows[name] <= host.tables[name].num_rows:
                raise ConfigError(
                    f"table '{name}' cannot have {hot_rows[name]} hot rows: it has {host.tables[name].num_rows} rows"
                )
        self.host = host
        self.tables, self.starts = host.tables, host.starts
        self.far, self._new_far = stored_rows(host, folder)
        self.collects, self.gradients = False, []
        self.hot_rows = {name: hot_rows[name] for name in host.tables}
        self.near_starts: dict[str, int] = {}
        self.num_hot = 0
        for name, rows in self.hot_rows.items():
            self.near_starts[name] = self.num_hot
            self.num_hot += rows
        self.device = torch.device(device)
        self.num_buffers = num_buffers
        """Rooms for steps; there is one more, for lookups outside of steps."""
        self.room_rows = 0
        self.storage = torch.empty(self.num_hot, host.storage.shape[1], dtype=host.storage.dtype, device=self.device)
        self.slots: dict[str, Tensor] = {}
        self.far_slots: dict[str, HostRows] = {}
        self.renumbering: HotRefresh | None = None
        """Where each id's row is, once rows have changed places; None while id and place are one."""
        self.traffic = Traffic()
        self.transfer = CopyMover(self.device)
        self.moves = KernelMover(self) if chosen(fetch_by, self.far, self.device, kernel_is_faster) else None
        """Kernels that reach the host's rows; None where the host copies them (`transfer`)."""
        self.working: WorkingSet | None = None
        self.all_hot = False
        """A promise that what is looked up now is hot: nothing is compared, so nothing waits for the device."""
        self.synchronize: Callable[[], None] = lambda: None
        """Waits until every row that was sent back is home; a pipeline that sends them back later sets it."""
        self._columns: dict[tuple[tuple[str, ...], torch.device], tuple[Tensor, Tensor, Tensor]] = {}
        self._entered: dict[torch.Size, Tensor] = {}
        """Where located rows lie for kernels that are captured, by their shape."""
        self.refill()

    # --- what DensePack promises -------------------------------------------------------------------------------------

    def repack(self) -> None:
        """The tables' weights are views of the host's storage, where it has them, and must stay so."""
        if not self.lazy:
            self.host.collects = self.collects
            self.host.repack()

    def allocate_slots(self, make: Callable[[Tensor], dict[str, Tensor]]) -> dict[str, Tensor]:
        self.slots = make(self.storage)
        shapes = make(torch.empty(self.host.storage.shape, dtype=self.storage.dtype, device="meta"))
        self.far_slots = {slot: self._new_far(slot, state) for slot, state in shapes.items()}
        if self.moves is not None:
            self.moves.pin()
        return self.slots

    @property
    def lazy(self) -> bool:
        """Whether rows take no memory until they are touched: the tables' weights are then on no device."""
        return self.host.storage.is_meta

    def slot_views(self, name: str) -> dict[str, Any]:
        if self.lazy:
            return {slot: self._saved(state, name, {"std": 0.0, "seed": 0}) for slot, state in self.far_slots.items()}
        return {slot: self.host.view(state.tensor, name) for slot, state in self.far_slots.items()}

    def saved_weight(self, name: str) -> LazyTensor:
        """The rows of a lazy table, as a checkpoint keeps them."""
        table = self.tables[name]
        return self._saved(self.far, name, {"std": table.init_std, "seed": table.seed})

    def _saved(self, far: HostRows, name: str, initial: dict[str, Any]) -> LazyTensor:
        assert isinstance(self.far, LazyRows)
        start, num_rows = self.starts[name], self.tables[name].num_rows
        return LazyTensor(far, self.far.touched, start, num_rows, initial)

    def locate(self, ids: Tensor, names: Sequence[str], which: Tensor | None = None) -> Tensor:
        """Row numbers of the device's storage, where the rows are."""
        working = self.working
        if working is not None and working.located is not None and list(names) == list(working.names):
            return self._in_its_room(working) if working.entered is None else working.entered
        hot, near, far = self.column_tensors(names, ids.device)
        if which is not None:
            hot, near, far = hot[which], near[which], far[which]
        places = ids if self.renumbering is None else self.renumbering.places(ids, far)
        found = near + places
        if self.all_hot:
            return found
        is_cold = places >= hot
        cold = (far + places)[is_cold]
        if working is None:  # nobody brought the rows: an evaluation, or a model called by hand
            working = self._look_at(torch.unique(cold))
        found[is_cold] = self.num_hot + torch.searchsorted(working.rows, cold)
        return self._in_room(found, working.room)

    def _look_at(self, rows: Tensor) -> WorkingSet:
        """Rows in the room for lookups outside of steps."""
        self.synchronize()
        self.reserve(rows.numel())
        working = WorkingSet(rows) if self.moves is None else self.moves.of_rows(rows, rows.numel())
        working.room = self.num_buffers
        before = self.traffic.fetched
        self.bring(working)
        self.traffic.fetched = before
        self.traffic.looked_at += rows.numel() * self._row_bytes()
        return working

    def _in_room(self, rows: Tensor, room: int) -> Tensor:
        """Row numbers as if the room were the first -> row numbers."""
        return rows if room == 0 else rows + (rows >= self.num_hot) * (room * self.room_rows)

    def _in_its_room(self, working: WorkingSet) -> Tensor:
        assert working.located is not None
        return working.located if working.in_room else self._in_room(working.located, working.room)

    # --- rows of a step ----------------------------------------------------------------------------------------------

    def count_hot(self, ids: Ids, features: Mapping[str, str]) -> None:
        """Take note of a batch that needed hot rows only."""
        positions = [place for place, name in enumerate(features.values()) if name in self.tables]
        sizes = [ids.bag(position)[0].numel() for position in positions] if ids.offsets is not None else None
        lookups = len(positions) * ids.batch_size if sizes is None else sum(sizes)
        self.traffic.lookups += lookups
        self.traffic.hot_lookups += lookups

    def only_hot(self, ids: Ids, features: Mapping[str, str]) -> WorkingSet:
        """The working set of a batch that looks up hot rows only, which is not checked: it has no rows."""
        nothing = torch.empty(0, dtype=torch.int64, device=ids.values.device)
        if ids.offsets is not None:
            return WorkingSet(nothing)
        positions = [place for place, name in enumerate(features.values()) if name in self.tables]
        names = [name for name in features.values() if name in self.tables]
        _, near, _ = self.column_tensors(names, ids.values.device)
        places = features_at(ids.values, positions)
        return WorkingSet(nothing, (places + near[:, None]).t(), names)

    def needed(self, ids: Ids, features: Mapping[str, str], *, room: int = 0, again: bool = False) -> WorkingSet:
        """What a batch looks up outside the hot part, and is to have in a room; `again` if it was asked before.

        On a GPU this waits for it, unless kernels move the rows."""
        names = [name for name in features.values() if name in self.tables]
        positions = [place for place, name in enumerate(features.values()) if name in self.tables]
        columns = self.column_tensors(names, ids.values.device)
        if ids.offsets is None and self.moves is not None and self.renumbering is None:
            self.traffic.lookups += 0 if again else len(names) * ids.batch_size
            return self.moves.find(ids.values, positions, names, columns, room)
        if ids.offsets is None:
            places = features_at(ids.values, positions)
            starts = columns[2][:, None]
        else:
            pieces = [ids.bag(position)[0] for position in positions]
            lengths = torch.tensor([piece.numel() for piece in pieces], device=ids.values.device)
            which = torch.repeat_interleave(lengths)
            places, starts = torch.cat(pieces), columns[2][which]
        if not again:
            self.traffic.lookups += places.numel()
        if self.renumbering is not None:
            if not again:
                self.renumbering.count(places, starts)
            places = self.renumbering.places(places, starts)
        if ids.offsets is None and self.moves is not None:
            return self.moves.find(places, range(len(names)), names, columns, room, passing=True)
        if ids.offsets is None:
            rows, located, num_far = find_host_rows(places, torch.stack(columns, dim=1), self.num_hot)
            working = WorkingSet(rows, located, names)
        else:
            cold = (starts + places)[places >= columns[0][which]]
            rows, num_far = torch.unique(cold), cold.numel()
            working = WorkingSet(rows) if self.moves is None else self.moves.of_rows(rows, num_far)
        if not again:
            self.traffic.hot_lookups += places.numel() - num_far
        working.room = room
        return working

    def forward(self, working: WorkingSet, newest_first: Sequence[WorkingSet]) -> None:
        """Note which rows of a set the rooms of other steps hold, each from the newest that does."""
        if isinstance(working, KernelSet):
            assert self.moves is not None
            self.moves.forward(working, newest_first)
            self.moves.announce(working)
        elif newest_first:
            source = find_in_buffers(working.rows, [(other.room, other.rows) for other in reversed(newest_first)])
            held = (source >= 0).nonzero()[:, 0]
            if held.numel():
                working.source, working.held = source[held], held
                working.fetched = (source < 0).nonzero()[:, 0]

    def num_missing(self, working: WorkingSet) -> int:
        """How many rows the room of a set must have that it has not; on a GPU this may wait for it. 0: all fit."""
        if not isinstance(working, KernelSet):
            return working.rows.numel() if working.rows.numel() > self.room_rows else 0
        assert self.moves is not None
        far, rows, _ = working.numbers()
        if far > working.num_listed or rows > working.rows.numel():
            return self.moves.grow(working)
        return self.room_rows if working.rows.numel() != self.room_rows else 0  # found in rooms of another size

    def bring(self, working: WorkingSet) -> None:
        """Copy the rows of a working set and their state from the host into its room, but for those others hold."""
        if isinstance(working, KernelSet):
            assert self.moves is not None
            self.moves.fetch(working)
            return
        if working.rows.numel() > self.room_rows:
            return  # whoever computes the step sees that, and makes room
        rows = working.rows if working.fetched is None else working.rows[working.fetched]
        host_rows = working.host_rows if working.fetched is None else rows.cpu()
        if rows.numel():
            written = self.transfer.written(self.far, host_rows)
            self.traffic.fetched += 0 if written is None else written.num_bytes
            for far, room in zip(self.far_rows(), self.room(working), strict=True):
                self.traffic.fetched += self.transfer.fetch(far, host_rows, rows, room, working.fetched, written)
            self.traffic.fetched_rows += rows.numel()

    def take_forwarded(self, working: WorkingSet) -> None:
        """Copy the rows that other rooms hold, now that their steps are done."""
        if isinstance(working, KernelSet):
            assert self.moves is not None
            self.moves.take(working)
        elif working.source is not None and working.held is not None:
            rooms, places = working.source >> BUFFER_SHIFT, working.source & ((1 << BUFFER_SHIFT) - 1)
            there = self.num_hot + rooms * self.room_rows + places
            here = self.num_hot + working.room * self.room_rows + working.held
            for near in self.near_tensors():
                near.index_copy_(0, here, near.index_select(0, there))

    def enter(self, working: WorkingSet) -> None:
        """Begin the step of a working set, all of whose rows are in its room.

        On a GPU, where each lookup finds its row is copied to an address that is the same for every step: kernels that
        were captured in a graph read it there.
        """
        if working.located is not None and self.device.type == "cuda":
            shape = working.located.shape
            if shape not in self._entered:
                narrow = torch.int32 if self.storage.shape[0] < 2**31 else torch.int64
                self._entered[shape] = torch.empty(shape, dtype=narrow, device=self.device)
            working.entered = self._entered[shape].copy_(self._in_its_room(working))

    def write_back(self, working: WorkingSet) -> None:
        """Copy the rows of a working set, updated, to the host."""
        if isinstance(working, KernelSet):
            assert self.moves is not None
            self.moves.write_back(working)
            num_far, num_rows, num_held = working.numbers()
            if working.located is not None:
                self.traffic.hot_lookups += working.located.numel() - num_far
            self.traffic.fetched_rows += num_rows - num_held
            self.traffic.fetched += (num_rows - num_held) * self._row_bytes()
            self.traffic.sent_back += num_rows * self._row_bytes()
            return
        if working.rows.numel() == 0:
            return
        for far, room in zip(self.far_rows(), self.room(working), strict=True):
            self.traffic.sent_back += self.transfer.write_back(far, working.host_rows, working.rows, room)

    def _row_bytes(self) -> int:
        """Bytes of a row and its state."""
        return sum(near[:1].nbytes for near in self.near_tensors())

    def reserve(self, num_rows: int) -> None:
        """Rooms for so many rows each; they grow by a quarter more, so that they seldom have to.

        Nothing may be on its way, to or from any room.
        """
        if num_rows <= self.room_rows:
            return
        if self.moves is not None:
            self.moves.launches.forget()  # they are of the old rooms
        before, self.room_rows = self.room_rows, with_spare(num_rows)
        names, tensors = list(self.slots), self.near_tensors()
        self.storage, self.slots = self.storage[:0].clone(), {}
        self.storage, *slots = grown(tensors, self.num_hot, self.num_buffers + 1, (before, self.room_rows))
        self.slots = dict(zip(names, slots, strict=True))

    def near_tensors(self) -> list[Tensor]:
        """The device's weights and optimizer state."""
        return [self.storage, *self.slots.values()]

    def far_rows(self) -> list[HostRows]:
        """The host's weights and optimizer state, in the order of `near_tensors`."""
        return [self.far, *(self.far_slots[slot] for slot in self.slots)]

    def room(self, working: WorkingSet) -> list[Tensor]:
        """The rows of a working set, weights and state, as views of its room."""
        start = self.num_hot + working.room * self.room_rows
        return [near[start : start + working.rows.numel()] for near in self.near_tensors()]

    # --- the hot part, home and back ---------------------------------------------------------------------------------

    def flush(self) -> None:
        """Copy the hot rows and their state home, a slice a table: the host then holds every row as it is now."""
        self.synchronize()
        self._copy_hot(home=True)

    def refill(self) -> None:
        """Copy the hot rows and their state from the host, as after loading a checkpoint into it."""
        self._copy_hot(home=False)

    def _copy_hot(self, *, home: bool) -> None:
        with torch.no_grad():
            for far, near in zip(self.far_rows(), self.near_tensors(), strict=True):
                for name, rows in self.hot_rows.items():
                    here = near[self.near_starts[name] : self.near_starts[name] + rows]
                    if home:
                        far.write_slice(self.starts[name], here)
                        self.traffic.flushed += here.nbytes
                    else:
                        self.traffic.flushed += self._refill(far, here, self.starts[name])

    def _refill(self, far: HostRows, here: Tensor, start: int) -> int:
        """Copy rows from `start` on, a block at a time; the bytes moved.

        How lazy ones begin is worked out where they go: nothing is moved while none was ever written.
        """
        stop = start + here.shape[0]
        begins = isinstance(self.far, LazyRows) and not bool(self.far.touched[start:stop].any())
        if not begins and (self.device.type == "cpu" or not isinstance(far, LazyRows)):
            here.copy_(far.read_slice(start, stop))
            return here.nbytes
        for first in range(start, stop, REFILL_ROWS):
            rows = torch.arange(first, min(stop, first + REFILL_ROWS), device=self.device)
            block = here[first - start : first - start + REFILL_ROWS]
            stored = torch.zeros_like(block) if begins else far.tensor[first : first + rows.numel()].to(self.device)
            block.copy_(far.decode_(rows, stored))
        return 0 if begins else here.nbytes

    def column_tensors(self, names: Sequence[str], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Hot rows, start on the device and start on the host of each of these tables; kept, as `start_tensor`'s."""
        key = (tuple(names), device)
        if key not in self._columns:
            columns = (self.hot_rows, self.near_starts, self.starts)
            hot, near, far = (torch.tensor([column[name] for name in names], device=device) for column in columns)
            self._columns[key] = (hot, near, far)
        return self._columns[key]
