"""Rows of a step moved by kernels that read and write the host's memory: the host never learns which they are.

The host's memory is locked in its place for that (`pinned`), all of it. What a step's rows are, whether another room
holds them, fetching and sending them back are then a dozen launches that wait for nothing; the host reads one thing
back, some steps later: how many rows there were, and so whether they fitted. See `holdall.kernels.host_rows_triton`.

What a step notes of its rows is where that of the last step in its room was, so that the launches can be replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from holdall.common.errors import ConfigError
from holdall.common.memory import available_memory
from holdall.common.sizes import readable_bytes
from holdall.data.batch import features_at
from holdall.kernels.dispatch import HAS_TRITON, INTERPRETED
from holdall.kernels.host_rows import NO_ROW, InitialRowParams
from holdall.runtime.graph_cache import GraphCache, where
from holdall.tables.hashing import stream
from holdall.tables.initial_rows import quantiles
from holdall.tiers.host_rows import DiskRows, HostRows, InitialValues, LazyRows
from holdall.tiers.pinned_memory import pin
from holdall.tiers.staging import with_spare
from holdall.tiers.working_set import KernelSet, WorkingSet

if TYPE_CHECKING:
    from holdall.tiers.tiered_pack import TieredPack

TYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Types of rows that the kernels move."""


@dataclass(frozen=True)
class Notes:
    """What is known of the rows of a step, in memory of its room."""

    rows: Tensor
    located: Tensor
    """[L], for the lookups of the largest batch so far."""
    counts: Tensor
    source: Tensor
    seen: Tensor
    """The others as in `KernelSet`."""


class KernelMover:
    """What a `TieredPack` asks for its rows, where kernels can reach the host's."""

    def __init__(self, pack: TieredPack):
        self.pack = pack
        self.num_listed = 0
        """Far lookups of a batch that there is place for."""
        self.beside_steps = False
        """Whether rows move while steps compute; a pipeline that runs ahead sets it."""
        self._initial: InitialRowParams | None = None
        if isinstance(pack.far, LazyRows):
            self._initial = _initial(pack.far.beginnings, pack.device)
        self._info: dict[tuple[str, ...], Tensor] = {}
        self._notes: dict[int, Notes] = {}
        """By room."""
        self.launches = GraphCache(pack.device)
        self.pin()

    def pin(self) -> None:
        """Lock the host's rows and state in memory, those that are not yet."""
        if self.pack.device.type != "cuda":
            return
        for far in self.pack.far_rows():
            pin(far.tensor, far)
        if isinstance(self.pack.far, LazyRows):
            pin(self.pack.far.touched, self.pack.far)

    def find(
        self,
        values: Tensor,
        positions: Sequence[int],
        names: Sequence[str],
        columns: tuple[Tensor, Tensor, Tensor],
        room: int,
        *,
        passing: bool = False,
    ) -> KernelSet:
        """The working set of a batch; `names` are the tables of the features at `positions` of values [F, B], which are
        places, and `columns` as `TieredPack.column_tensors` gives them. `passing` values are nowhere in particular."""
        from holdall.kernels import host_rows_triton

        pack, key = self.pack, tuple(names)
        if key not in self._info:
            self._info[key] = torch.stack(columns, dim=1).contiguous()
        info, first, num_listed = self._info[key], pack.num_hot + room * pack.room_rows, self.num_listed
        samples = values.shape[1]
        notes = self._notes_of(room, samples * len(names))
        located = notes.located[: samples * len(names)].view(samples, len(names))

        def launch() -> None:
            places = features_at(values, positions)
            host_rows_triton.find_host_rows(places, info, located, notes.rows, notes.counts, num_listed, first)

        what = ("find", key, tuple(positions), values.stride(), num_listed, first)
        self.launches.run(None if passing else (what, where(values, located, notes.rows, notes.counts)), launch)
        return KernelSet(
            notes.rows,
            located,
            names,
            in_room=True,
            room=room,
            counts=notes.counts,
            num_listed=num_listed,
            stays=True,
        )

    def _notes_of(self, room: int, num_lookups: int) -> Notes:
        """Those of a room, with place for so many lookups."""
        pack = self.pack
        notes = self._notes.get(room)
        if notes is None or notes.rows.numel() != pack.room_rows or notes.located.numel() < num_lookups:
            narrow = torch.int32 if pack.storage.shape[0] < 2**31 else torch.int64
            rows = torch.empty(pack.room_rows, dtype=torch.int64, device=pack.device)
            located = torch.empty(num_lookups, dtype=narrow, device=pack.device)
            counts = torch.empty(3, dtype=torch.int32, device=pack.device)
            seen = torch.empty(3, dtype=torch.int32, pin_memory=counts.is_cuda)
            self._notes[room] = notes = Notes(rows, located, counts, torch.empty_like(rows), seen)
        return notes

    def of_rows(self, rows: Tensor, num_lookups: int) -> KernelSet:
        """The working set of rows that were found in another way."""
        padded = torch.full((self.pack.room_rows,), NO_ROW, dtype=torch.int64, device=self.pack.device)
        padded[: rows.numel()] = rows[: padded.numel()]
        counts = torch.tensor([num_lookups, rows.numel(), 0], dtype=torch.int32, device=self.pack.device)
        return KernelSet(padded, counts=counts, num_listed=max(self.num_listed, num_lookups))

    def _launch(self, what: Hashable, working: KernelSet, launch: Callable[[], None]) -> None:
        """Run the launches of a set, which are named by `what` and depend on nothing else but its room and tensors."""
        key = (what, working.room, where(working.rows, working.counts, working.source)) if working.stays else None
        self.launches.run(key, launch)

    def forward(self, working: KernelSet, newest_first: Sequence[WorkingSet]) -> None:
        """Note which rows other rooms hold."""
        from holdall.kernels import host_rows_triton

        rows, counts = working.rows, working.counts
        assert counts is not None
        others = [(other.room, other.rows) for other in reversed(newest_first) if other.rows.numel()]
        if not others or rows.numel() == 0:
            return
        source = self._notes[working.room].source if working.stays else torch.empty_like(rows)
        what = ("held", where(source, *(held for _, held in others)), tuple(room for room, _ in others))
        self._launch(what, working, lambda: host_rows_triton.find_in_buffers(rows, counts, others, source))
        working.source = source

    def announce(self, working: KernelSet) -> None:
        """Let the host know, when it comes to that, how many rows there are."""
        assert working.counts is not None
        on_gpu = working.counts.is_cuda
        if working.stays:
            working.seen = self._notes[working.room].seen
        else:
            working.seen = torch.empty(3, dtype=torch.int32, pin_memory=on_gpu)
        working.seen.copy_(working.counts, non_blocking=True)
        if on_gpu:
            working.counted = torch.cuda.current_stream(self.pack.device).record_event()

    def grow(self, working: KernelSet) -> int:
        """Make place for so many far lookups, and say how many rows the room must have."""
        far, rows, _ = working.numbers()
        if far > working.num_listed:
            self.num_listed = max(self.num_listed, with_spare(far))
            return far  # the rows of some were not counted, and there are no more than lookups
        return rows

    def fetch(self, working: KernelSet) -> None:
        """Rows and state from the host into the room of a set, but for those that other rooms hold."""
        self._move(working, home=False)

    def write_back(self, working: KernelSet) -> None:
        self._move(working, home=True)

    def _move(self, working: KernelSet, *, home: bool) -> None:
        far, rooms = [far.tensor for far in self.pack.far_rows()], self.pack.room(working)
        touched = self.pack.far.touched if isinstance(self.pack.far, LazyRows) and home else None
        what = ("move", home, self.beside_steps, where(touched, *far, *rooms))
        self._launch(what, working, lambda: self._move_all(far, rooms, touched, working, home=home))

    def _move_all(
        self, far: list[Tensor], rooms: list[Tensor], touched: Tensor | None, working: KernelSet, *, home: bool
    ) -> None:
        from holdall.kernels import host_rows_triton

        assert working.counts is not None
        for number, (there, here) in enumerate(zip(far, rooms, strict=True)):
            host_rows_triton.copy_rows(
                _wide(there),
                working.rows,
                working.counts,
                _wide(here),
                write_back=home,
                source=None if home else working.source,
                initial=self._initial if number == 0 else None,
                touched=touched if number == 0 else None,
                shape=host_rows_triton.BESIDE_STEPS if self.beside_steps else host_rows_triton.WHOLE_DEVICE,
            )

    def take(self, working: KernelSet) -> None:
        """Copy the rows that other rooms hold, now that their steps are done."""
        if working.source is not None:
            near = self.pack.near_tensors()
            self._launch(("take", where(*near)), working, lambda: self._take_all(near, working))

    def _take_all(self, near: list[Tensor], working: KernelSet) -> None:
        from holdall.kernels import host_rows_triton

        assert working.counts is not None
        assert working.source is not None
        for tensor in near:
            host_rows_triton.copy_between_buffers(
                _wide(tensor),
                working.source,
                working.counts,
                num_hot=self.pack.num_hot,
                buffer_rows=self.pack.room_rows,
                own_buffer=working.room,
                num_rows=working.rows.numel(),
            )


def _wide(rows: Tensor) -> Tensor:
    """Rows as [R, W]."""
    return rows if rows.ndim == 2 else rows[:, None]


def _initial(beginnings: InitialValues, device: torch.device) -> InitialRowParams:
    near = beginnings.to(device)
    return InitialRowParams(near.starts, near.seeds, near.stds, quantiles(device), (stream(0), stream(1)))


def why_not_by_kernels(far: HostRows, device: torch.device) -> str | None:
    """Why kernels on a device cannot move these rows; None when they can."""
    store = far.store if isinstance(far, LazyRows) else far
    if not HAS_TRITON:
        return "Triton is not installed (pip install 'holdall[triton]')"
    if device.type != "cuda" and not INTERPRETED:
        return f"the device is {device}"
    if isinstance(store, DiskRows):
        return "the rows are on disk"
    if far.tensor.dtype not in TYPES:
        return f"its kernels do not move rows of {far.tensor.dtype}"
    return None


KernelIsFaster = Callable[[int, int], bool]
"""Whether a kernel moves rows of so many bytes, so many of them, faster than the host copies them."""
TYPICAL_ROWS = 1 << 15
"""Rows of a step at which the two ways are compared."""


def always(row_bytes: int, num_rows: int) -> bool:
    """Kernels where nothing was measured: they leave the host free."""
    return True


def chosen(asked: str, far: HostRows, device: torch.device, is_faster: KernelIsFaster = always) -> bool:
    """Whether kernels move these rows: `kernel`, or `auto` where they can and `is_faster` says yes.

    An explicit `kernel` that cannot be had is an error.
    """
    if asked not in ("auto", "kernel", "copy"):
        raise ConfigError(f"rows are fetched by auto, kernel or copy, not {asked!r}")
    if asked == "copy":
        return False
    why_not = why_not_by_kernels(far, device)
    needed = far.tensor.nbytes
    free = available_memory()["host"]
    if why_not is None and needed > free and device.type == "cuda":
        why_not = f"{readable_bytes(needed)} of rows are to be locked in memory, and {readable_bytes(free)} are free"
    if asked == "kernel" and why_not is not None:
        raise ConfigError(f"--fetch-by kernel cannot be had, {why_not}: use auto or copy")
    if asked == "kernel":
        return True
    fits = why_not is None and device.type == "cuda" and needed <= free // 2
    return fits and is_faster(far.tensor[:1].nbytes, TYPICAL_ROWS)
