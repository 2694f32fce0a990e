"""Lookup in many tables by few operations, for graphs: tables of one kind are joined, and looked up at once.

A table consists of *pieces*: its bands, or itself. Pieces that decode rows in the same way (8-bit codes, 4-bit codes,
codes of one codebook, plain rows) become rows of one joined table, whichever tables they belong to. A graph for 26
tables of five bands has one lookup for each kind of band, not 130.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from holdall.embedding.bags import EmbeddingBags
from holdall.tables import Dense, Table, TableOptions
from holdall.tables.bands import BandsTable
from holdall.tables.codes import CodesTable
from holdall.tables.dense import DenseTable
from holdall.tables.quantized import QuantizedTable
from holdall.tables.shared import SharedTable


@dataclass(frozen=True)
class Piece:
    """Rows of a looked-up table from `start` to `end`, and the table that stores them."""

    table: Table
    start: int
    end: int
    is_whole: bool
    """Whether these are all rows of the looked-up table."""


def pieces(table: Table) -> list[Piece]:
    """Bands of a table, bands in bands included; the table itself where it has none."""
    found = list(_stored(table, 0))
    return [Piece(part, start, start + part.num_rows, len(found) == 1) for part, start in found]


def _stored(table: Table, start: int) -> Iterator[tuple[Table, int]]:
    """Tables that store the rows of a table, each with the row that it starts at."""
    if isinstance(table, BandsTable):
        for band, part in zip(table.bands, table.parts, strict=True):
            yield from _stored(part, start + band.start)
    else:
        yield table, start


class JoinedTables(nn.Module):
    """All tables of a model, those of one kind joined. The rows of packs are used as they are, not copied."""

    def __init__(self, bags: EmbeddingBags):
        super().__init__()
        self.joined = nn.ModuleList()
        self._places: dict[int, tuple[int, int]] = {}
        """By id of a table: the number of the joined table that has its rows, and its first row there."""
        for pack in bags.packs:
            for name, packed in pack.tables.items():
                self._places[id(packed)] = (len(self.joined), pack.starts[name])
            self.joined.append(_of_rows(pack.storage))
        kinds: dict[Hashable, dict[int, Table]] = {}
        for name in dict.fromkeys(bags.features.values()):
            for piece in pieces(bags.table(name)):
                if id(piece.table) not in self._places:
                    kinds.setdefault(_kind(piece.table), {})[id(piece.table)] = piece.table
        for members in kinds.values():
            start = 0
            for table in members.values():
                self._places[id(table)] = (len(self.joined), start)
                start += _num_stored(table)
            self.joined.append(_join(list(members.values())))

    def place(self, piece: Piece) -> tuple[int, int]:
        """Number of the joined table with the rows of a piece, and the first of its rows there."""
        return self._places[id(piece.table)]

    def stored_rows(self, number: int, rows: Tensor) -> Tensor:
        """Rows [L, dim] in float32 of the joined table of that number."""
        table = self.joined[number]
        assert isinstance(table, Table)
        return table._rows(rows).float()

    def rows(self, table: Table, ids: Tensor) -> Tensor:
        """Rows [L, dim] of ids [L] of one table: a row of each of its pieces, of which one is selected."""
        found: Tensor | None = None
        for piece in pieces(table):
            number, base = self.place(piece)
            local = ids if piece.is_whole else (ids - piece.start).clamp(0, piece.end - piece.start - 1)
            if isinstance(piece.table, SharedTable):
                local = piece.table.places(local)
            rows = self.stored_rows(number, local + base)
            found = rows if found is None else torch.where((ids >= piece.start)[:, None], rows, found)
        assert found is not None
        return found


class PieceGroup(nn.Module):
    """Pieces of some of F features, by column, whose rows are in one joined table.

    Numbers of the pieces are buffers: compiled code can be given buffers, but not tensors that a graph makes.
    """

    columns: Tensor
    """[M] columns of the pieces."""
    places: Tensor
    """[F] piece of each column; any piece in columns of other features."""
    starts: Tensor
    lasts: Tensor
    bases: Tensor
    """[M] first row of each piece in its looked-up table, number of its last row, first row in the joined table."""
    num_stored: Tensor
    num_rows: Tensor
    """[M] rows that are stored, and rows that they stand for."""
    first_in: Tensor
    first_after: Tensor
    """[F] rows from which on, and up to which, ids are in the piece of a column."""

    def __init__(self, tables: JoinedTables, members: Mapping[int, Piece], num_columns: int):
        super().__init__()
        parts = list(members.values())
        columns = list(members)
        self.number = tables.place(parts[0])[0]
        self.has_all_columns = columns == list(range(num_columns))
        self.has_whole_tables = all(piece.is_whole for piece in parts)
        self.shares_rows = isinstance(parts[0].table, SharedTable)
        bounds = [(members[c].start, members[c].end) if c in members else (0, 0) for c in range(num_columns)]
        self._keep("columns", columns)
        self._keep("places", [columns.index(c) if c in members else 0 for c in range(num_columns)])
        self._keep("starts", [piece.start for piece in parts])
        self._keep("lasts", [piece.end - piece.start - 1 for piece in parts])
        self._keep("bases", [tables.place(piece)[1] for piece in parts])
        self._keep("num_stored", [_num_stored(piece.table) for piece in parts])
        self._keep("num_rows", [piece.table.num_rows for piece in parts])
        self._keep("first_in", [start for start, _ in bounds])
        self._keep("first_after", [end for _, end in bounds])

    def _keep(self, name: str, numbers: list[int]) -> None:
        """Register numbers of the pieces, or of all columns."""
        self.register_buffer(name, torch.tensor(numbers), persistent=False)

    def rows(self, tables: JoinedTables, ids_BF: Tensor) -> Tensor:
        """Rows [B, F, dim] of the features of the group; any rows in other columns, and for ids of other pieces."""
        ids = ids_BF if self.has_all_columns else ids_BF.index_select(1, self.columns)
        if not self.has_whole_tables:
            ids = torch.minimum((ids - self.starts).clamp(min=0), self.lasts)
        if self.shares_rows:
            ids = ids * self.num_stored // self.num_rows
        rows = tables.stored_rows(self.number, (ids + self.bases).flatten()).unflatten(0, (-1, len(self.columns)))
        return rows if self.has_all_columns else rows.index_select(1, self.places)

    def has(self, ids_BF: Tensor) -> Tensor:
        """[B, F]: whether each id is in the piece of its feature."""
        return (ids_BF >= self.first_in) & (ids_BF < self.first_after)


class TracedLookup(nn.Module):
    """Vectors of features with one id a row."""

    def __init__(self, tables: JoinedTables, looked_up: Sequence[Table]):
        """`looked_up` are the tables of the features, by column."""
        super().__init__()
        found: dict[tuple[int, int], dict[int, Piece]] = {}
        for column, table in enumerate(looked_up):
            turns: dict[int, int] = {}
            for piece in pieces(table):
                number, _ = tables.place(piece)
                turn = turns[number] = turns.get(number, -1) + 1  # a group has one piece of a feature
                found.setdefault((number, turn), {})[column] = piece
        self.groups = nn.ModuleList(PieceGroup(tables, members, len(looked_up)) for members in found.values())

    def forward(self, tables: JoinedTables, ids_BF: Tensor) -> Tensor:
        """Vectors [B, F, dim] of ids [B, F]."""
        found: Tensor | None = None
        for group in self.groups:
            assert isinstance(group, PieceGroup)
            rows = group.rows(tables, ids_BF)
            found = rows if found is None else torch.where(group.has(ids_BF)[:, :, None], rows, found)
        assert found is not None
        return found


def _kind(table: Table) -> Hashable:
    """Key of the tables that can be joined; a table that cannot has a key of its own."""
    if type(table) is DenseTable:
        return "dense", table.weight.dtype
    if type(table) is SharedTable:
        return "shared", table.stored.dtype
    if isinstance(table, QuantizedTable):
        return "quantized", table.method.bits, table.method.scales, table.grid.dtype, table.row_dtype
    if type(table) is CodesTable:
        return "codes", table.method.bits, table.method.parts, id(table.codebook.words), table.row_dtype
    return id(table)


def _num_stored(table: Table) -> int:
    return table.num_stored if isinstance(table, SharedTable) else table.num_rows


def _of_rows(rows: Tensor) -> DenseTable:
    """A table of these rows [R, dim]."""
    num_rows, dim = rows.shape
    table = DenseTable(Dense(), num_rows, dim, TableOptions(dtype=rows.dtype, device=torch.device("meta")))
    table.weight = nn.Parameter(rows, requires_grad=False)
    return table


def _join(tables: Sequence[Table]) -> Table:
    """One table with the stored rows of all of these, which are of one kind."""
    first = tables[0]
    if isinstance(first, DenseTable | SharedTable):
        name = "stored" if isinstance(first, SharedTable) else "weight"
        return _of_rows(torch.cat([table.get_parameter(name).detach() for table in tables]))
    if len(tables) == 1:
        return first
    assert isinstance(first, QuantizedTable | CodesTable)
    build = type(first) if isinstance(first, CodesTable) else QuantizedTable
    options = TableOptions(dtype=first.row_dtype, device=torch.device("meta"))
    joined = build(first.method, sum(map(_num_stored, tables)), first.dim, options)  # type: ignore[arg-type]
    joined.codes = torch.cat([table.get_buffer("codes") for table in tables])
    if isinstance(joined, CodesTable) and isinstance(first, CodesTable):
        joined.codebook = first.codebook
    elif isinstance(joined, QuantizedTable):
        joined.grid = torch.cat([table.get_buffer("grid") for table in tables])
    return joined
