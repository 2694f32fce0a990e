"""Assignment of a checkpoint's rows to the processes that write them: every row once, about the same bytes on each.

Every process describes the tensors that it has. The descriptions are gathered, and each process computes the same
assignment from them:

- ordinary tensors that all processes have are replicas: they are laid end to end and cut into equal shares;
- an ordinary tensor that only some processes have is written by one of those (table-wise, each table is on one);
- a lazy tensor, or a hot part, is written by one of the processes that have it; but where its rows are sharded
  (`is_sharded`) each process writes its own, and in the checkpoint they follow one another.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import Tensor

from holdall.checkpoint.all_ranks import on_all_ranks
from holdall.checkpoint.manifest import DTYPES
from holdall.checkpoint.partial_tensors import ROWS, VALUES, HotPart, PartialEntry, Saved, SelectedRows
from holdall.common.errors import CheckpointError
from holdall.distributed.processes import PeerError, Processes

UNCUT_BYTES = 1 << 20
"""A tensor this small is not cut only to balance the shares of processes."""
CHUNK_BYTES = 16 << 20
"""Bytes of rows read at a time for a copy; the C library reuses blocks of that size after they are freed."""

WHOLE, ROWS_OF_ONE, ROWS_OF_EACH = "whole", "rows", "rows by rank"


@dataclass(frozen=True)
class TensorInfo:
    """Description of a tensor that a process has."""

    kind: str
    dtype: str
    shape: tuple[int, ...]
    initial: dict[str, Any] | None = None
    num_rows: int = 0
    """Rows that this process has; only of the kinds that are saved by the row."""

    @property
    def row_bytes(self) -> int:
        """Bytes of a stored row, including its row number where that is stored."""
        values = math.prod(self.shape[1:]) * DTYPES[self.dtype].itemsize
        return values if self.kind == WHOLE else values + 8

    @property
    def num_bytes(self) -> int:
        return self.row_bytes * (_first_dimension(self.shape) if self.kind == WHOLE else self.num_rows)


@dataclass(frozen=True)
class Span:
    """Rows `start` to `stop` of a stored tensor, which begin at row `first` of the rows that the process has."""

    name: str
    first: int
    start: int
    stop: int


@dataclass(frozen=True)
class TensorSlice:
    """Rows `start` to `stop` of a stored tensor, for this process to write; they begin at row `first` of `source`."""

    name: str
    source: Tensor | SelectedRows
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
        if isinstance(self.source, SelectedRows):
            return self.source.piece(first, first + stop - start)
        source = self.source.detach()
        return (source[first : first + stop - start] if source.dim() else source).contiguous().cpu()

    def copied(self, buffer: Tensor) -> TensorSlice:
        """This slice of a copy of its source, in `buffer`: [num_bytes] uint8 on the host."""
        shape = (self.stop - self.start, *self.source.shape[1:]) if self.source.shape else ()
        copy = buffer.view(self.source.dtype).view(shape)
        last = self.first + self.stop - self.start
        if isinstance(self.source, SelectedRows):
            chunk = max(1, CHUNK_BYTES // max(1, self.row_bytes))
            return replace(self, source=self.source.copied(self.first, last, copy, chunk), first=0)
        source = self.source.detach()
        copy.copy_(source[self.first : last] if source.dim() else source)
        return replace(self, source=copy, first=0)


@dataclass(frozen=True)
class RowAssignment:
    """Tensors that all processes write, and the slices of this one."""

    stored: dict[str, tuple[str, tuple[int, ...]]]
    """Type and shape of every stored tensor."""
    lazy: dict[str, PartialEntry]
    slices: list[TensorSlice]


def assign_rows(tensors: Mapping[str, Saved], processes: Processes) -> RowAssignment:
    """Agree with the other processes on which of them writes which rows. A collective call."""
    sources, own = on_all_ranks(processes, lambda: _describe(tensors))
    gathered = processes.gather({name: asdict(info) for name, info in own.items()})
    infos = [
        {name: TensorInfo(**{**info, "shape": tuple(info["shape"])}) for name, info in theirs.items()}
        for theirs in gathered
    ]
    stored, lazy, spans = assign_spans(infos, processes.rank)
    slices = [TensorSlice(s.name, sources[s.name], s.first, s.start, s.stop) for s in spans[processes.rank]]
    return RowAssignment(stored, lazy, slices)


def _describe(tensors: Mapping[str, Saved]) -> tuple[dict[str, Tensor | SelectedRows], dict[str, TensorInfo]]:
    """Sources of the stored tensors of this process, and the description of its tensors for the others."""
    sources: dict[str, Tensor | SelectedRows] = {}
    infos = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, Tensor):
            sources[name] = tensor
            infos[name] = TensorInfo(WHOLE, _dtype(tensor), tuple(tensor.shape))
        else:
            part = tensor if isinstance(tensor, HotPart) else HotPart(tensor, tensor.touched())
            rows = part.rows.cpu()
            sources[name + ROWS], sources[name + VALUES] = rows, SelectedRows(part.tensor, rows)
            is_sharded = not isinstance(part.tensor, Tensor) and part.tensor.is_sharded
            kind = ROWS_OF_EACH if is_sharded else ROWS_OF_ONE
            initial = None if isinstance(tensor, HotPart) else tensor.initial
            infos[name] = TensorInfo(kind, _dtype(part.tensor), tuple(part.tensor.shape), initial, rows.numel())
    return sources, infos


def assign_spans(
    infos: Sequence[Mapping[str, TensorInfo]], rank: int = 0
) -> tuple[dict[str, tuple[str, tuple[int, ...]]], dict[str, PartialEntry], list[list[Span]]]:
    """`(stored tensors, lazy ones, spans of each process)`, given the tensors of every process."""
    owners: dict[str, list[int]] = {}
    for r, theirs in enumerate(infos):
        for name in theirs:
            owners.setdefault(name, []).append(r)
    _refuse_differences(infos, owners, rank)
    writers = _assign_writers(infos, owners)
    stored, lazy = {}, {}
    spans: list[list[Span]] = [[] for _ in infos]
    for name, ranks in owners.items():
        info = infos[ranks[0]][name]
        names = [name] if info.kind == WHOLE else [name + ROWS, name + VALUES]
        if info.kind == WHOLE:
            stored[name] = (info.dtype, info.shape)
        else:
            total = writers[name][-1][1].stop
            lazy[name] = PartialEntry(info.dtype, info.shape, info.initial)
            stored[name + ROWS] = ("int64", (total,))
            stored[name + VALUES] = (info.dtype, (total, *info.shape[1:]))
        for stored_name in names:
            for writer, span in writers[name]:
                spans[writer].append(replace(span, name=stored_name))
    assert len(stored) == sum(1 if infos[r[0]][n].kind == WHOLE else 2 for n, r in owners.items()), "names collide"
    return stored, lazy, spans


def _assign_writers(
    infos: Sequence[Mapping[str, TensorInfo]], owners: Mapping[str, list[int]]
) -> dict[str, list[tuple[int, Span]]]:
    """`(rank, span)` of every tensor's writers, in the order of the spans."""
    loads = [0] * len(infos)
    writers: dict[str, list[tuple[int, Span]]] = {}
    replicated = []
    for name, ranks in owners.items():
        kind = infos[ranks[0]][name].kind
        if kind == ROWS_OF_EACH:
            writers[name] = _one_after_another(name, infos, ranks)
            for r in ranks:
                loads[r] += infos[r][name].num_bytes
        elif kind == WHOLE and len(ranks) == len(infos) and len(ranks) > 1:
            replicated.append(name)
        else:
            writer = min(ranks, key=lambda r: loads[r])
            info = infos[writer][name]
            num_rows = _first_dimension(info.shape) if kind == WHOLE else info.num_rows
            writers[name] = [(writer, Span(name, 0, 0, num_rows))]
            loads[writer] += info.num_bytes
    return {**writers, **_balance({name: infos[0][name] for name in replicated}, loads)}


def _one_after_another(
    name: str, infos: Sequence[Mapping[str, TensorInfo]], ranks: list[int]
) -> list[tuple[int, Span]]:
    found = []
    start = 0
    for rank in ranks:
        num_rows = infos[rank][name].num_rows
        if num_rows:
            found.append((rank, Span(name, 0, start, start + num_rows)))
        start += num_rows
    return found or [(ranks[0], Span(name, 0, 0, 0))]


def _balance(infos: Mapping[str, TensorInfo], loads: list[int]) -> dict[str, list[tuple[int, Span]]]:
    """Cut replicated tensors so that every process writes the same bytes in all, as far as `loads` allow."""
    target = _balanced_load(loads, sum(info.num_bytes for info in infos.values()))
    ranks = [rank for rank, load in enumerate(loads) if load < target] or [loads.index(min(loads))]
    found: dict[str, list[tuple[int, Span]]] = {}
    for name, info in infos.items():
        start, num_rows = 0, _first_dimension(info.shape)
        found[name] = []
        while start < num_rows or not found[name]:
            rank, left = ranks[0], (num_rows - start) * info.row_bytes
            free = max(0, target - loads[rank])
            if len(ranks) == 1 or left <= free or (left <= UNCUT_BYTES and free > 0):
                stop = num_rows
            else:
                stop = start + free // info.row_bytes
            if stop > start or num_rows == 0:
                found[name].append((rank, Span(name, start, start, stop)))
                loads[rank] += (stop - start) * info.row_bytes
            if stop < num_rows:
                ranks = ranks[1:]
            start = stop
    return found


def _balanced_load(loads: list[int], total: int) -> int:
    """The highest load when `total` more is spread as evenly as `loads` allow."""
    ordered = sorted(loads)
    for num in range(1, len(ordered) + 1):
        level = -(-(total + sum(ordered[:num])) // num)
        if num == len(ordered) or level <= ordered[num]:
            return level
    return 0


def _refuse_differences(infos: Sequence[Mapping[str, TensorInfo]], owners: Mapping[str, list[int]], rank: int) -> None:
    for name, ranks in owners.items():
        first = infos[ranks[0]][name]
        for other in ranks[1:]:
            theirs = infos[other][name]
            if replace(theirs, num_rows=0) != replace(first, num_rows=0):
                kind = CheckpointError if rank == 0 else PeerError
                raise kind(
                    f"'{name}' is {_words(first)} on rank {ranks[0]} and {_words(theirs)} on rank {other}: a tensor "
                    f"must have the same kind, type, shape and initial values on all processes that save it"
                )


def _words(info: TensorInfo) -> str:
    initial = "" if info.initial is None else f" with initial values {info.initial}"
    return f"{info.dtype} {list(info.shape)} saved {info.kind}{initial}"


def _first_dimension(shape: tuple[int, ...]) -> int:
    return shape[0] if shape else 1


def _dtype(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")
