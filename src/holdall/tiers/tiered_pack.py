"""A pack of dense tables whose hot rows live near the computation, on the device, and whose others live farther away.

The host holds every row, end to end, as a `DensePack` does: that is what checkpoints read and write. The device holds

    [ hot rows of table 1 | hot rows of table 2 | ... | room for other rows of a step | room for another step | ... ]

and each row has one owner at a time, so no update is lost and none is applied twice: hot rows belong to the device
until `flush` copies them home; a step's other rows are fetched before it and sent back after it, with their optimizer
state. Everything between (lookup, gradient, update) sees one storage on the device and row numbers into it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from holdall.batch import Ids
from holdall.dense_pack import DensePack
from holdall.errors import ConfigError
from holdall.tiers.far_rows import Beginnings, DiskRows, FarRows, LazyRows, unreserved
from holdall.tiers.lazy_tensor import LazyTensor
from holdall.tiers.renumbering import Renumbering
from holdall.tiers.transfer import Transfer


@dataclass
class Traffic:
    """Bytes moved between host and device, and what was looked up where."""

    fetched: int = 0
    """To the device: rows and their optimizer state."""
    sent_back: int = 0
    """To the host."""
    flushed: int = 0
    """Hot rows copied home or back, in slices: for checkpoints, never for a step."""
    looked_at: int = 0
    """To the device for lookups outside of steps, such as evaluations; not in `total`."""
    fetched_rows: int = 0
    lookups: int = 0
    hot_lookups: int = 0

    @property
    def total(self) -> int:
        return self.fetched + self.sent_back + self.flushed


@dataclass
class WorkingSet:
    """The rows outside the hot part of a step, distinct and ascending: row `rows[i]` is at place i of its room."""

    rows: Tensor
    """[U] int64 row numbers of the host's storage, where the ids are."""
    located: Tensor | None = None
    """[P, B] row numbers of the device's storage, as if the room were the first, for the ids of a one-hot batch."""
    names: Sequence[str] = ()
    """The tables of those P features."""
    room: int = 0
    forwarded: list[Forward] = field(default_factory=list)
    """Rows that another room holds, newer than the host's."""
    before: list[Tensor] | None = None
    """Rows and state as they were fetched, where only what changed is sent back."""

    @cached_property
    def host_rows(self) -> Tensor:
        """`rows` on the host; on a GPU this waits for it."""
        return self.rows.cpu()


@dataclass(frozen=True)
class Forward:
    """Places of a working set whose rows are to be taken from places of another one, once its step is done."""

    source: WorkingSet
    source_places: Tensor
    places: Tensor


class TieredPack(DensePack):
    """`host`'s tables with the first `hot_rows[name]` rows of each on `device`, and rooms for the rows of steps."""

    def __init__(
        self,
        host: DensePack,
        hot_rows: Mapping[str, int],
        device: torch.device | str,
        *,
        num_rooms: int = 1,
        folder: Path | None = None,
    ):
        for name in host.tables:
            if not 0 <= hot_rows[name] <= host.tables[name].num_rows:
                raise ConfigError(
                    f"table '{name}' cannot have {hot_rows[name]} hot rows: it has {host.tables[name].num_rows} rows"
                )
        self.host = host
        self.tables, self.starts = host.tables, host.starts
        self.far, self._new_far = _far_rows(host, folder)
        self.collects, self.gradients = False, []
        self.hot_rows = {name: hot_rows[name] for name in host.tables}
        self.near_starts: dict[str, int] = {}
        self.num_hot = 0
        for name, rows in self.hot_rows.items():
            self.near_starts[name] = self.num_hot
            self.num_hot += rows
        self.device = torch.device(device)
        self.num_rooms = num_rooms
        """Rooms for steps; there is one more, for lookups outside of steps."""
        self.room_rows = 0
        self.storage = torch.empty(self.num_hot, host.storage.shape[1], dtype=host.storage.dtype, device=self.device)
        self.slots: dict[str, Tensor] = {}
        self.far_slots: dict[str, FarRows] = {}
        self.renumbering: Renumbering | None = None
        """Where each id's row is, once rows have changed places; None while id and place are one."""
        self.traffic = Traffic()
        self.transfer = Transfer(self.device)
        self.working: WorkingSet | None = None
        self.all_hot = False
        """A promise that what is looked up now is hot: nothing is compared, so nothing waits for the device."""
        self.awaited: Callable[[], None] | None = None
        """Waits for the rows of `working`, while they may be on their way."""
        self.settle: Callable[[], None] = lambda: None
        """Waits until every row that was sent back is home; a pipeline that sends them back later sets it."""
        self._columns: dict[tuple[tuple[str, ...], torch.device], tuple[Tensor, Tensor, Tensor]] = {}
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

    def _saved(self, far: FarRows, name: str, initial: dict[str, Any]) -> LazyTensor:
        assert isinstance(self.far, LazyRows)
        start, num_rows = self.starts[name], self.tables[name].num_rows
        return LazyTensor(far, self.far.touched, start, num_rows, initial)

    def locate(self, ids: Tensor, names: Sequence[str], which: Tensor | None = None) -> Tensor:
        """Row numbers of the device's storage; the rows are there, or on their way (see `gather`)."""
        working = self.working
        if working is not None and working.located is not None and list(names) == working.names:
            return self._in_room(working.located.t(), working.room)
        hot, near, far = self._column_tensors(names, ids.device)
        if which is not None:
            hot, near, far = hot[which], near[which], far[which]
        places = ids if self.renumbering is None else self.renumbering.places(ids, far)
        found = near + places
        if self.all_hot:
            return found
        is_cold = places >= hot
        cold = (far + places)[is_cold]
        if working is None:  # nobody brought the rows: an evaluation, or a model called by hand
            self.settle()
            working = WorkingSet(torch.unique(cold), room=self.num_rooms)
            self.make_room(working.rows.numel())
            before = self.traffic.fetched
            self.bring(working)
            self.traffic.looked_at += self.traffic.fetched - before
            self.traffic.fetched = before
        found[is_cold] = self.num_hot + torch.searchsorted(working.rows, cold)
        return self._in_room(found, working.room)

    def _in_room(self, rows: Tensor, room: int) -> Tensor:
        """Row numbers as if the room were the first -> row numbers."""
        return rows if room == 0 else rows + (rows >= self.num_hot) * (room * self.room_rows)

    def gather(self, rows: Tensor, look_up: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """`look_up(storage, rows)`; while rows are on their way, the others first."""
        found = look_up(self.storage, rows)  # what stands for a row on its way is not looked at
        if self.awaited is not None:
            late = (rows >= self.num_hot).reshape(-1).nonzero()[:, 0]
            self.arrived()
            flat = found.view(-1, found.shape[-1])
            flat.index_copy_(0, late, look_up(self.storage, rows.reshape(-1).index_select(0, late)))
        return found

    def arrived(self) -> None:
        """Wait for the rows that are on their way; what went wrong on it is raised here."""
        if self.awaited is not None:
            awaited, self.awaited = self.awaited, None
            awaited()

    # --- rows of a step ----------------------------------------------------------------------------------------------

    def count_hot(self, ids: Ids, features: Mapping[str, str]) -> None:
        """Take note of a batch that needed hot rows only."""
        positions = [place for place, name in enumerate(features.values()) if name in self.tables]
        sizes = [ids.bag(position)[0].numel() for position in positions] if ids.offsets is not None else None
        lookups = len(positions) * ids.batch_size if sizes is None else sum(sizes)
        self.traffic.lookups += lookups
        self.traffic.hot_lookups += lookups

    def needed(self, ids: Ids, features: Mapping[str, str]) -> WorkingSet:
        """What a batch looks up outside the hot part, found where its ids are; on a GPU this waits for it."""
        names = [name for name in features.values() if name in self.tables]
        positions = [place for place, name in enumerate(features.values()) if name in self.tables]
        hot, near, far = self._column_tensors(names, ids.values.device)
        if ids.offsets is None:
            places = ids.values if len(positions) == ids.num_features else ids.values[positions]
            hot, near, far = hot[:, None], near[:, None], far[:, None]
        else:
            pieces = [ids.bag(position)[0] for position in positions]
            lengths = torch.tensor([piece.numel() for piece in pieces], device=ids.values.device)
            which = torch.repeat_interleave(lengths)
            places, hot, far = torch.cat(pieces), hot[which], far[which]
        self.traffic.lookups += places.numel()
        if self.renumbering is not None:
            self.renumbering.count(places, far)
            places = self.renumbering.places(places, far)
        is_cold = places >= hot
        cold = (far + places)[is_cold]
        self.traffic.hot_lookups += places.numel() - cold.numel()
        if ids.offsets is not None:
            return WorkingSet(torch.unique(cold))
        rows, inverse = torch.unique(cold, return_inverse=True)
        located = near + places
        located[is_cold] = self.num_hot + inverse
        return WorkingSet(rows, located, names)

    def bring(self, working: WorkingSet, *, keep: bool = False) -> None:
        """Copy the rows of a working set and their state from the host into its room, but for forwarded ones.

        With `keep`, remember them, so that `take_home` can add what changed instead of replacing what is there.
        """
        rows, host_rows, places = working.rows, working.host_rows, None
        if working.forwarded:
            mine = torch.ones(rows.numel(), dtype=torch.bool, device=rows.device)
            for forward in working.forwarded:
                mine[forward.places] = False
            places = mine.nonzero()[:, 0]
            rows = rows[places]
            host_rows = rows.cpu()
        if rows.numel():
            for far, room in zip(self.far_rows(), self._room(working), strict=True):
                self.traffic.fetched += self.transfer.fetch(far, host_rows, rows, room, places)
            self.traffic.fetched_rows += rows.numel()
        if keep:
            working.before = [room.clone() for room in self._room(working)]

    def take_forwarded(self, working: WorkingSet) -> None:
        """Copy the rows that other rooms hold, now that their steps are done."""
        for forward in working.forwarded:
            for there, here in zip(self._room(forward.source), self._room(working), strict=True):
                here.index_copy_(0, forward.places, there.index_select(0, forward.source_places))

    def take_home(self, working: WorkingSet) -> None:
        """Copy the rows of a working set, updated, to the host: or add what changed, where `bring` kept them."""
        if working.rows.numel() == 0:
            return
        for number, (far, room) in enumerate(zip(self.far_rows(), self._room(working), strict=True)):
            before = None if working.before is None else working.before[number]
            self.traffic.sent_back += self.transfer.send_back(far, working.host_rows, working.rows, room, before)

    def make_room(self, num_rows: int) -> None:
        """Rooms for so many rows each; they grow by a quarter more, so that they seldom have to.

        Nothing may be on its way, to or from any room.
        """
        if num_rows <= self.room_rows:
            return
        before, self.room_rows = self.room_rows, num_rows + num_rows // 4 + 16
        self.storage = self._grown(self.storage, before)
        self.slots = {slot: self._grown(state, before) for slot, state in self.slots.items()}

    def _grown(self, tensor: Tensor, before: int) -> Tensor:
        """A tensor with larger rooms that holds what this one holds, in rooms of `before` rows."""
        larger = tensor.new_zeros(self.num_hot + (self.num_rooms + 1) * self.room_rows, *tensor.shape[1:])
        larger[: self.num_hot].copy_(tensor[: self.num_hot])
        for room in range(self.num_rooms + 1 if before else 0):
            start, old = self.num_hot + room * self.room_rows, self.num_hot + room * before
            larger[start : start + before].copy_(tensor[old : old + before])
        return larger

    def near_tensors(self) -> list[Tensor]:
        """The device's weights and optimizer state."""
        return [self.storage, *self.slots.values()]

    def far_rows(self) -> list[FarRows]:
        """The host's weights and optimizer state, in the order of `near_tensors`."""
        return [self.far, *(self.far_slots[slot] for slot in self.slots)]

    def _room(self, working: WorkingSet) -> list[Tensor]:
        """The rows of a working set, weights and state, as views of its room."""
        start = self.num_hot + working.room * self.room_rows
        return [near[start : start + working.rows.numel()] for near in self.near_tensors()]

    # --- the hot part, home and back ---------------------------------------------------------------------------------

    def flush(self) -> None:
        """Copy the hot rows and their state home, a slice a table: the host then holds every row as it is now."""
        self.settle()
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
                    else:
                        here.copy_(far.read_slice(self.starts[name], self.starts[name] + rows))
                    self.traffic.flushed += here.nbytes

    def _column_tensors(self, names: Sequence[str], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Hot rows, start on the device and start on the host of each of these tables; kept, as `start_tensor`'s."""
        key = (tuple(names), device)
        if key not in self._columns:
            columns = (self.hot_rows, self.near_starts, self.starts)
            hot, near, far = (torch.tensor([column[name] for name in names], device=device) for column in columns)
            self._columns[key] = (hot, near, far)
        return self._columns[key]


def _far_rows(host: DensePack, folder: Path | None) -> tuple[FarRows, Callable[[str, Tensor], FarRows]]:
    """Where the rows of a pack live, and a function that makes room for more of the same, by name and shape.

    The storage of the pack itself; or, if it has none yet, memory or files (with a `folder`) of rows that take no place
    until they are touched.
    """
    if not host.storage.is_meta:
        return FarRows(host.storage), lambda name, like: FarRows(torch.zeros(like.shape, dtype=like.dtype))

    def new(name: str, like: Tensor) -> FarRows:
        if folder is None:
            return FarRows(unreserved(like.shape, like.dtype))
        return DiskRows(folder / f"{name}.rows", like.shape, like.dtype)

    tables = host.tables.values()
    seeds = [table.seed for table in tables if table.seed is not None]
    assert len(seeds) == len(host.tables), "every table draws a seed"
    beginnings = Beginnings(
        starts=torch.tensor([host.starts[name] for name in host.tables]),
        seeds=torch.tensor(seeds),
        stds=torch.tensor([table.init_std for table in tables]),
    )
    return LazyRows(new("weight", host.storage), beginnings), new
