"""Precision by popularity: tables in bands, cut where a byte saves most over all tables together.

A trained row that is looked up often is stored in many bits, the next in fewer, then as codes of codebooks that all
tables share, and the tail as one row. `PrecisionFit` measures what each level of precision loses
(`precision_levels`), chooses the cuts for a budget, and fits the tables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from holdall.common.errors import ConfigError
from holdall.common.sizes import parse_budget, readable_bytes
from holdall.tables.bands import Bands, BandsTable, coded_bands
from holdall.tables.codes import Codes, CodesTable, tie_codebooks
from holdall.tables.expected_lookups import expected_lookups
from holdall.tables.method import Method, check_finite, total_bytes
from holdall.tables.metric_kmeans import RowsToCode, metric_codewords
from holdall.tables.precision_levels import (
    CODEBOOK_ROWS,
    LADDERS,
    TAIL,
    Curves,
    RankedTable,
    coding_error,
    fit_codebooks,
    measure,
    transform_of,
)

PRICES = (1e-18, 1e18)
"""Prices of a byte, in error, between which the one that spends a budget is searched."""
SEARCH_STEPS = 80


@dataclass(frozen=True)
class Choice:
    """Bands of all tables for a budget."""

    methods: dict[str, Method]
    num_bytes: int
    """Bytes of all tables, codebooks and scales included."""
    error: float
    """Expected squared change of a lookup, over that of storing nothing but one row a table."""


class PrecisionFit:
    """Trained tables of a model, to be stored within any budget.

    `weights` are the rows [num_rows, dim] of each table, `counts` the lookups [num_rows] of its rows in training, and
    `sensitivity` the [dim, dim] matrix of each table (see `precision_levels`), or None.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        counts: Mapping[str, Tensor],
        sensitivity: Mapping[str, Tensor] | None = None,
    ):
        self.weights = dict(weights)
        self.tables: dict[str, RankedTable] = {}
        for name, weight in weights.items():
            if name not in counts:
                raise ConfigError(f"table '{name}' has no counts: give the lookups of every row of every table")
            lookups = torch.as_tensor(counts[name])
            if lookups.shape != weight.shape[:1]:
                raise ConfigError(
                    f"table '{name}' has {weight.shape[0]} rows and {len(lookups)} counts: are they of another data "
                    f"set?"
                )
            try:
                check_finite(weight)
            except ConfigError as error:
                raise ConfigError(f"table '{name}': {error}") from None
            matrix = None if sensitivity is None else sensitivity[name]
            transform = transform_of(matrix, weight.shape[1])
            self.tables[name] = RankedTable(weight, expected_lookups(lookups), transform)
        levels = {level for ladder in LADDERS for level in ladder}
        self.codebooks: dict[int, dict[str, Tensor]] = {}
        """Codewords by dim and name of codebook."""
        for dim in {weight.shape[1] for weight in weights.values()}:
            of_dim = [table for table in self.tables.values() if table.weight.shape[1] == dim]
            self.codebooks[dim] = fit_codebooks(of_dim, [level for level in levels if isinstance(level, Codes)])
        self.curves = {
            name: measure(table, sorted(levels, key=str), self.codebooks[table.weight.shape[1]])
            for name, table in self.tables.items()
        }

    @property
    def dense_bytes(self) -> int:
        """Bytes of the tables as they are."""
        return sum(weight.numel() * weight.element_size() for weight in self.weights.values())

    def choose(self, budget: str | int | float) -> Choice:
        """Bands of every table, of the least error among those that take at most `budget` in total."""
        available = parse_budget(budget, self.dense_bytes)
        found = [choice for ladder in LADDERS if (choice := self._choose(ladder, available)) is not None]
        if not found:
            least = self.smallest()
            raise ConfigError(
                f"a budget of {readable_bytes(available)} is too small for these {len(self.tables)} tables: one row "
                f"for all ids of every table takes {least.num_bytes}B"
            )
        return min(found, key=lambda choice: choice.error)

    def smallest(self) -> Choice:
        """Every table stored as one row."""
        return self._priced((), PRICES[1])

    def _choose(self, ladder: Sequence[Method], available: int) -> Choice | None:
        """The choice of least error within some bytes, of one set of levels; None if nothing fits."""
        low, high = PRICES
        best = self._priced(ladder, high)
        if best.num_bytes > available:
            return None
        for _ in range(SEARCH_STEPS):
            middle = (low * high) ** 0.5
            found = self._priced(ladder, middle)
            if found.num_bytes > available:
                low = middle
            else:
                high, best = middle, found
        return best

    def _priced(self, ladder: Sequence[Method], price: float) -> Choice:
        """The bands that are best where a byte costs `price` of error."""
        methods: dict[str, Method] = {}
        error = nothing = 0.0
        for name, table in self.tables.items():
            curves = self.curves[name]
            methods[name], lost = cut(curves, ladder, price, table.weight.shape[1])
            error += lost
            nothing += float(curves.tail[0])
        sizes = [(method, *self.weights[name].shape) for name, method in methods.items()]
        return Choice(methods, total_bytes(sizes), error / nothing if nothing else 0.0)

    @torch.no_grad()
    def fit(self, choice: Choice, options: Mapping[str, Mapping[str, Any]] | None = None) -> dict[str, BandsTable]:
        """The tables of a choice, fitted; `options` are the `TableOptions` of each.

        Codebooks are fitted once more, to the rows that the choice stores as codes, where tables then lose less than
        forecast.
        """
        tables: dict[str, BandsTable] = {}
        for name, method in choice.methods.items():
            weight = self.weights[name]
            chosen = {"dtype": torch.float32, "device": weight.device, **(options or {}).get(name, {})}
            table = method.build(*weight.shape, **chosen)
            assert isinstance(table, BandsTable)
            tables[name] = table
        for coded in tie_codebooks(tables.values()):
            self._fit_codebook(coded, tables)
        for name, table in tables.items():
            for band, part in zip(table.bands, table.parts, strict=True):
                rows = self.weights[name][band.start : band.end]
                if isinstance(part, CodesTable):
                    part.encode_rows(rows, self.tables[name].transform)
                else:
                    part.fit_rows(rows, self.tables[name].lookups[band.start : band.end])
        return tables

    def _fit_codebook(self, coded: Sequence[CodesTable], tables: Mapping[str, BandsTable]) -> None:
        """Fit the codebook that some bands share to the rows of these bands.

        The codebook of the forecast stays where the new one loses more: a single row that counts a lot, in a small
        table say, can lose its codeword to the many.
        """
        members = {id(part) for part in coded}
        places = [
            (name, part, slice(start, start + part.num_rows))
            for name, table in tables.items()
            for part, start in coded_bands(table)
            if id(part) in members
        ]
        rows = [
            RowsToCode(
                self.weights[name][place],
                self.tables[name].coding_weights[place],
                self.tables[name].transform,
                part.method.parts,
            )
            for name, part, place in places
        ]
        codebook, name = coded[0].codebook, coded[0].method.codebook
        assert name is not None
        dim = codebook.words.shape[1]
        found = (metric_codewords(rows, codebook.num_words, CODEBOOK_ROWS), self.codebooks[dim][name][: codebook.parts])
        errors = [
            sum(coding_error(self.tables[name], place, part.method.parts, words) for name, part, place in places)
            for words in found
        ]
        codebook.set_words(found[errors.index(min(errors))])


def cut(curves: Curves, ladder: Sequence[Method], price: float, dim: int) -> tuple[Method, float]:
    """The bands of least error plus `price` times bytes, each level of the ladder at most once; and their error.

    Dynamic programming over levels and places: `best[k]` is the cost of all rows before place k in the levels so far.
    """
    ends = curves.ends
    best = np.full(len(ends), np.inf)
    best[0] = 0.0
    came_from = []
    for level in ladder:
        costs = curves.errors[level] + price * _row_bytes(level, dim) * ends
        gain = best - costs
        starts = _first_minima(gain)
        came_from.append(starts)
        best = gain[starts] + costs
    has_tail = np.arange(len(ends)) < len(ends) - 1
    last = int(np.argmin(best + curves.tail + price * has_tail * TAIL.num_bytes(1, dim)))
    error = float(curves.tail[last])
    bands: list[tuple[int | None, Method]] = [] if last == len(ends) - 1 else [(None, TAIL)]
    place = last
    for level, starts in zip(reversed(ladder), reversed(came_from), strict=True):
        start = int(starts[place])
        if start < place:
            bands.insert(0, (int(ends[place]), level))
            error += float(curves.errors[level][place] - curves.errors[level][start])
        place = start
    bands[-1] = (None, bands[-1][1])
    return Bands(tuple(bands)), error


def _row_bytes(level: Method, dim: int) -> float:
    """Bytes that a further row of a level takes."""
    if isinstance(level, Codes):
        return level.parts * level.bits / 8
    return level.num_bytes(1, dim)


def _first_minima(values: np.ndarray) -> np.ndarray:
    """For each place, the place of the least value up to it."""
    lowest = np.minimum.accumulate(values)
    is_new = np.concatenate(([True], values[1:] < lowest[:-1]))
    return np.maximum.accumulate(np.where(is_new, np.arange(len(values)), 0))
