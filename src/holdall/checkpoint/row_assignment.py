"""Which process writes which rows of a checkpoint: every row once, and about the same bytes on each.

Every process offers the tensors that it has. The offers are gathered, and each process works out the same deal from
them:

- an ordinary tensor that all have is the same on all of them: such tensors are laid end to end and cut where the
  processes' shares end;
- one that only some have is written by one of those: table-wise, each table is on one process;
- a lazy tensor, or a hot part, is written by one of those that have it; but if its rows are spread over processes
  (`is_sharded`) each writes its own, and in the checkpoint they follow one another.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import Tensor

from holdall.checkpoint.all_ranks import on_all_ranks
from holdall.checkpoint.manifest import DTYPES
from holdall.checkpoint.partial_tensors import ROWS, VALUES, HotPart, LazyEntry, RowsOf, Saved
from holdall.common.errors import CheckpointError
from holdall.distributed.processes import PeerError, Processes

UNCUT_BYTES = 1 << 20
"""A tensor this small is not cut only to level the shares of processes."""
CHUNK_BYTES = 16 << 20
"""Of rows that are read for a copy, at a time; the C library keeps blocks of that size when they are freed."""

WHOLE, ROWS_OF_ONE, ROWS_OF_EACH = "whole", "rows", "rows by rank"


@dataclass(frozen=True)
class Offer:
    """A tensor that a process has."""

    kind: str
    dtype: str
    shape: tuple[int, ...]
    initial: dict[str, Any] | None = None
    num_rows: int = 0
    """Of the kinds that are saved by the row: rows that this process has."""

    @property
    def row_bytes(self) -> int:
        """Bytes of a row as it is stored, with its number where that is stored too."""
        values = math.prod(self.shape[1:]) * DTYPES[self.dtype].itemsize
        return values if self.kind == WHOLE else values + 8

    @property
    def num_bytes(self) -> int:
        return self.row_bytes * (_first_dimension(self.shape) if self.kind == WHOLE else self.num_rows)


@dataclass(frozen=True)
class Span:
    """Rows `start` to `stop` of a stored tensor, which begin at row `first` of what the process has of it."""

    name: str
    first: int
    start: int
    stop: int


@dataclass(frozen=True)
class TensorSlice:
    """Rows `start` to `stop` of a stored tensor, for this process to write; they begin at row `first` of `source`."""

    name: str
    source: Tensor | RowsOf
    first: int
    start: int
    stop: int

    @property
    def row_bytes(self) -> int:
        shape = self.source.shape[1:] if self.source.shape else ()
        return math.prod(shape) * self.source.dtype.itemsize

    @property
    def num_bytes(self) -> int:
        return (self.stop - self.start) * self.row_bytes

    def rows(self, start: int, stop: int) -> Tensor:
        """Rows `start` to `stop` of the stored tensor, contiguous and on the host."""
        first = start - self.start + self.first
        if isinstance(self.source, RowsOf):
            return self.source.piece(first, first + stop - start)
        source = self.source.detach()
        return (source[first : first + stop - start] if source.dim() else source).contiguous().cpu()

    def copied(self, room: Tensor) -> TensorSlice:
        """This part with a source that does not change any more: a copy in `room`, [num_bytes] uint8 on the host."""
        shape = (self.stop - self.start, *self.source.shape[1:]) if self.source.shape else ()
        copy = room.view(self.source.dtype).view(shape)
        last = self.first + self.stop - self.start
        if isinstance(self.source, RowsOf):
            chunk = max(1, CHUNK_BYTES // max(1, self.row_bytes))
            return replace(self, source=self.source.copied(self.first, last, copy, chunk), first=0)
        source = self.source.detach()
        copy.copy_(source[self.first : last] if source.dim() else source)
        return replace(self, source=copy, first=0)


@dataclass(frozen=True)
class RowAssignment:
    """What the processes write, all together, and the part of this one."""

    stored: dict[str, tuple[str, tuple[int, ...]]]
    """Type and shape of every tensor as it is stored."""
    lazy: dict[str, LazyEntry]
    parts: list[TensorSlice]


def deal(tensors: Mapping[str, Saved], processes: Processes) -> RowAssignment:
    """Agree with the other processes on who writes what."""
    sources, mine = on_all_ranks(processes, lambda: _offered(tensors))
    said = processes.gather({name: asdict(offer) for name, offer in mine.items()})
    offers = [{name: Offer(**{**o, "shape": tuple(o["shape"])}) for name, o in theirs.items()} for theirs in said]
    stored, lazy, spans = deal_offers(offers, processes.rank)
    parts = [TensorSlice(s.name, sources[s.name], s.first, s.start, s.stop) for s in spans[processes.rank]]
    return RowAssignment(stored, lazy, parts)


def _offered(tensors: Mapping[str, Saved]) -> tuple[dict[str, Tensor | RowsOf], dict[str, Offer]]:
    """What this process has: as it is stored, and as it tells the others."""
    sources: dict[str, Tensor | RowsOf] = {}
    offers = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, Tensor):
            sources[name] = tensor
            offers[name] = Offer(WHOLE, _dtype(tensor), tuple(tensor.shape))
        else:
            part = tensor if isinstance(tensor, HotPart) else HotPart(tensor, tensor.touched())
            rows = part.rows.cpu()
            sources[name + ROWS], sources[name + VALUES] = rows, RowsOf(part.tensor, rows)
            kind = ROWS_OF_EACH if not isinstance(part.tensor, Tensor) and part.tensor.is_sharded else ROWS_OF_ONE
            initial = None if isinstance(tensor, HotPart) else tensor.initial
            offers[name] = Offer(kind, _dtype(part.tensor), tuple(part.tensor.shape), initial, rows.numel())
    return sources, offers


def deal_offers(
    offers: Sequence[Mapping[str, Offer]], rank: int = 0
) -> tuple[dict[str, tuple[str, tuple[int, ...]]], dict[str, LazyEntry], list[list[Span]]]:
    """`(stored tensors, lazy ones, spans of each process)` of the offers of every process."""
    holders: dict[str, list[int]] = {}
    for r, theirs in enumerate(offers):
        for name in theirs:
            holders.setdefault(name, []).append(r)
    _refuse_differences(offers, holders, rank)
    loads = [0] * len(offers)
    writers: dict[str, list[tuple[int, Span]]] = {}
    undecided = []
    for name, ranks in holders.items():
        kind = offers[ranks[0]][name].kind
        if kind == ROWS_OF_EACH:
            writers[name] = _one_after_another(name, offers, ranks)
            for r in ranks:
                loads[r] += offers[r][name].num_bytes
        elif kind == WHOLE and len(ranks) == len(offers) and len(ranks) > 1:
            undecided.append(name)
        else:
            writer = min(ranks, key=lambda r: loads[r])
            offer = offers[writer][name]
            num_rows = _first_dimension(offer.shape) if kind == WHOLE else offer.num_rows
            writers[name] = [(writer, Span(name, 0, 0, num_rows))]
            loads[writer] += offer.num_bytes
    writers.update(_level({name: offers[0][name] for name in undecided}, loads))
    stored, lazy = {}, {}
    spans: list[list[Span]] = [[] for _ in offers]
    for name, ranks in holders.items():
        offer = offers[ranks[0]][name]
        names = [name] if offer.kind == WHOLE else [name + ROWS, name + VALUES]
        if offer.kind == WHOLE:
            stored[name] = (offer.dtype, offer.shape)
        else:
            total = writers[name][-1][1].stop
            lazy[name] = LazyEntry(offer.dtype, offer.shape, offer.initial)
            stored[name + ROWS] = ("int64", (total,))
            stored[name + VALUES] = (offer.dtype, (total, *offer.shape[1:]))
        for stored_name in names:
            for writer, span in writers[name]:
                spans[writer].append(replace(span, name=stored_name))
    assert len(stored) == sum(1 if offers[r[0]][n].kind == WHOLE else 2 for n, r in holders.items()), "names collide"
    return stored, lazy, spans


def _one_after_another(name: str, offers: Sequence[Mapping[str, Offer]], ranks: list[int]) -> list[tuple[int, Span]]:
    found = []
    start = 0
    for rank in ranks:
        num_rows = offers[rank][name].num_rows
        if num_rows:
            found.append((rank, Span(name, 0, start, start + num_rows)))
        start += num_rows
    return found or [(ranks[0], Span(name, 0, 0, 0))]


def _level(offers: Mapping[str, Offer], loads: list[int]) -> dict[str, list[tuple[int, Span]]]:
    """RowAssignment tensors that all processes have so that each writes the same in all, as far as `loads` allow."""
    total = sum(offer.num_bytes for offer in offers.values())
    level = _water_level(loads, total)
    ranks = [rank for rank, load in enumerate(loads) if load < level] or [loads.index(min(loads))]
    found: dict[str, list[tuple[int, Span]]] = {}
    for name, offer in offers.items():
        start, num_rows = 0, _first_dimension(offer.shape)
        found[name] = []
        while start < num_rows or not found[name]:
            rank, left = ranks[0], (num_rows - start) * offer.row_bytes
            room = max(0, level - loads[rank])
            if len(ranks) == 1 or left <= room or (left <= UNCUT_BYTES and room > 0):
                stop = num_rows
            else:
                stop = start + room // offer.row_bytes
            if stop > start or num_rows == 0:
                found[name].append((rank, Span(name, start, start, stop)))
                loads[rank] += (stop - start) * offer.row_bytes
            if stop < num_rows:
                ranks = ranks[1:]
            start = stop
    return found


def _water_level(loads: list[int], total: int) -> int:
    """How full processes that hold `loads` are when `total` more has been poured in."""
    ordered = sorted(loads)
    for num in range(1, len(ordered) + 1):
        level = -(-(total + sum(ordered[:num])) // num)
        if num == len(ordered) or level <= ordered[num]:
            return level
    return 0


def _refuse_differences(offers: Sequence[Mapping[str, Offer]], holders: Mapping[str, list[int]], rank: int) -> None:
    for name, ranks in holders.items():
        first = offers[ranks[0]][name]
        for other in ranks[1:]:
            theirs = offers[other][name]
            if replace(theirs, num_rows=0) != replace(first, num_rows=0):
                kind = CheckpointError if rank == 0 else PeerError
                raise kind(
                    f"'{name}' is {_words(first)} on rank {ranks[0]} and {_words(theirs)} on rank {other}: a tensor "
                    f"must be the same kind of thing on all processes that save it"
                )


def _words(offer: Offer) -> str:
    begins = "" if offer.initial is None else f" that begins with {offer.initial}"
    return f"{offer.dtype} {list(offer.shape)} saved {offer.kind}{begins}"


def _first_dimension(shape: tuple[int, ...]) -> int:
    return shape[0] if shape else 1


def _dtype(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")
