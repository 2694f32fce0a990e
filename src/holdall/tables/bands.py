"""Table in bands: ranges of the popularity order, each stored by a method of its own.

Ids are in order of popularity, so a band is a range of ids and needs no index: exact or 8-bit rows for the popular ids,
fewer bits and codes further down, a few shared rows at the end. `HotCold` is the case of two bands.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor, nn

from holdall.common.eager import eager, has_values, transforms
from holdall.common.errors import ConfigError
from holdall.tables.bands_lookup import is_cheap, rows_of_bands
from holdall.tables.codebook_fit import Sample, fit_words
from holdall.tables.codes import CodesTable, tie_codebooks
from holdall.tables.fitting import check_counts, check_shape, relative_error
from holdall.tables.method import Method, SharedPart, TableOptions, dense_std, merge_shared, require, total_bytes
from holdall.tables.table import Table


class Band(NamedTuple):
    """Rows from `start` to `end` of a table, stored by `method`; `name` is that of its submodule."""

    name: str
    start: int
    end: int
    method: Method

    def __str__(self) -> str:
        return f"{self.name} ({self.method.name}, rows {self.start} to {self.end - 1})"


@dataclass(frozen=True)
class BandedMethod(Method):
    """Base of the methods that store a table in bands."""

    @abstractmethod
    def bands_of(self, num_rows: int) -> list[Band]:
        """The bands of a table, in order, without those that have no rows."""

    def shared_parts(self, num_rows: int, dim: int, dtype: torch.dtype = torch.float32) -> dict[Hashable, SharedPart]:
        return merge_shared(self._shared(num_rows, dim, dtype))

    def num_parameters(self, num_rows: int, dim: int) -> int:
        apart = sum(band.method.num_parameters(band.end - band.start, dim) for band in self.bands_of(num_rows))
        shared = self._shared(num_rows, dim, torch.float32)
        counted = sum(part.num_parameters for found in shared for part in found.values())
        return apart - counted + sum(part.num_parameters for part in merge_shared(shared).values())

    def num_bytes(self, num_rows: int, dim: int, dtype: torch.dtype = torch.float32) -> int:
        bands = self.bands_of(num_rows)
        return total_bytes([(band.method, band.end - band.start, dim) for band in bands], dtype)

    def _shared(self, num_rows: int, dim: int, dtype: torch.dtype) -> list[dict[Hashable, SharedPart]]:
        bands = self.bands_of(num_rows)
        return [band.method.shared_parts(band.end - band.start, dim, dtype) for band in bands]

    def _build(self, num_rows: int, dim: int, options: TableOptions) -> BandsTable:
        return BandsTable(self, num_rows, dim, options)


@dataclass(frozen=True)
class Bands(BandedMethod):
    """`row_i = row i - start of the band that i is in`; bytes and flops are the sums of those of the bands.

    `Bands(((512, Quantized(8)), (4_096, Quantized(4)), (60_000, Codes(2)), (None, Shared(1))))` stores 512 rows in 8
    bits, rows 512 to 4,095 in 4 bits, and so on. A table with fewer rows has only the bands that it has rows for.
    """

    name: ClassVar[str] = "bands"

    bands: tuple[tuple[int | None, Method], ...]
    """The row that each band ends before, in rising order and None in the last, and the method of the band."""

    def __post_init__(self) -> None:
        bands = self.bands
        require(isinstance(bands, tuple | list) and len(bands) > 0, self.name, "give at least one (end, method)")
        for index, band in enumerate(bands):
            pair = isinstance(band, tuple | list) and len(band) == 2 and isinstance(band[1], Method)
            require(pair, self.name, f"bands[{index}] must be a pair (end, method), not {band!r}")
        object.__setattr__(self, "bands", tuple(tuple(band) for band in bands))
        before = 0
        for index, (end, method) in enumerate(self.bands):
            require(
                not isinstance(method, BandedMethod),
                self.name,
                f"bands[{index}] is itself in bands ({method.name}): list its bands here instead",
            )
            if end is None and index + 1 == len(self.bands):
                return
            valid = isinstance(end, int) and not isinstance(end, bool)
            require(
                valid, self.name, f"bands[{index}] must end at a number of rows, not {end!r}; only the last has None"
            )
            assert end is not None
            require(
                end > before,
                self.name,
                f"bands[{index}] ({method.name}) ends at row {end}, and the one before it at row {before}: ends must "
                "rise, as bands neither overlap nor change places",
            )
            before = end

    @property
    def trains(self) -> bool:
        return all(method.trains for _, method in self.bands)

    def for_training(self) -> Bands:
        return Bands(tuple((end, method.for_training()) for end, method in self.bands))

    def bands_of(self, num_rows: int) -> list[Band]:
        found, start = [], 0
        for index, (end, method) in enumerate(self.bands):
            if start < num_rows:
                stop = num_rows if end is None else min(end, num_rows)
                found.append(Band(f"band{index}", start, stop, method))
                start = stop
        require(
            start == num_rows,
            self.name,
            f"rows {start} to {num_rows - 1} of a table of {num_rows} rows are in no band: end the last one "
            f"({self.bands[-1][1].name}) with None",
        )
        return found

    @classmethod
    def for_bytes(cls, num_rows: int, dim: int, num_bytes: int) -> Bands:
        raise ConfigError(
            f"{cls.name}: bands are cut by how often rows are looked up: choose them from counts, or give the bands"
        )


class BandsTable(Table):
    """A submodule for each band: `band0`, `band1`, ... with the rows from the start of the band."""

    def __init__(self, method: BandedMethod, num_rows: int, dim: int, options: TableOptions):
        super().__init__(method, num_rows, dim, options)
        self.bands = method.bands_of(num_rows)
        self.fixed_shapes: bool | None = None
        """Whether `_rows` computes a row of every band for every id and selects one, whatever the ids are; on a GPU
        when None."""
        std = dense_std(num_rows) if options.init_std is None else options.init_std
        padding = options.padding_idx
        for band in self.bands:
            inside = padding is not None and band.start <= padding < band.end
            its_padding = padding - band.start if padding is not None and inside else None
            its_options = replace(options, init_std=std, padding_idx=its_padding)
            self.add_module(band.name, band.method._build(band.end - band.start, dim, its_options))
        tie_codebooks([self])

    @property
    def parts(self) -> list[Table]:
        """The table of each band."""
        return [cast(Table, self._modules[band.name]) for band in self.bands]

    def _rows(self, ids: Tensor) -> Tensor:
        if len(self.bands) == 1:
            return self.parts[0]._rows(ids).to(self.row_dtype)
        if self._has_fixed_shapes(ids) and ids.numel():
            return self._rows_of_all(ids)
        return self._rows_by_band(ids)

    @eager  # how many ids a band has depends on them
    def _rows_by_band(self, ids: Tensor) -> Tensor:
        """`_rows` with each id looked up in its band alone."""
        order = None
        if not bool((ids[1:] >= ids[:-1]).all()):  # sorted in `forward`
            ids, order = torch.sort(ids, stable=True)
        starts = torch.tensor([band.start for band in self.bands[1:]], device=ids.device)
        cuts = [0, *torch.searchsorted(ids, starts).tolist(), ids.numel()]
        found = []
        for band, table, first, last in zip(self.bands, self.parts, cuts[:-1], cuts[1:], strict=True):
            if first < last:
                found.append(table._rows(ids[first:last] - band.start if band.start else ids[first:last]))
        if not found:
            found = [table._rows(ids) for table in self.parts]
        rows = torch.cat([part.to(self.row_dtype) for part in found]) if len(found) > 1 else found[0].to(self.row_dtype)
        return rows if order is None else rows.index_select(0, _inverse(order))

    def _has_fixed_shapes(self, ids: Tensor) -> bool:
        if not has_values(ids):
            return True
        return ids.is_cuda if self.fixed_shapes is None else self.fixed_shapes

    def _rows_of_all(self, ids: Tensor) -> Tensor:
        """`_rows` in shapes that do not depend on the ids: nothing synchronizes, and a CUDA graph can capture it."""
        found: Tensor | None = None
        for table, inside, local in self.by_band(ids):
            rows = table._rows(local).to(self.row_dtype)
            found = rows if found is None else torch.where(inside[:, None], rows, found)
        assert found is not None
        return found

    def by_band(self, ids: Tensor) -> Iterator[tuple[Table, Tensor, Tensor]]:
        """Table of each band, whether each id is in it, and a row of it for each id, without synchronizing.

        An id that is not in the band has a row of another id, so that its gradient of zero makes lazy optimizers touch
        no other rows (the first of a band that no id is in).
        """
        lowest, highest = torch.aminmax(ids)
        for band, table in zip(self.bands, self.parts, strict=True):
            if band.start == 0:
                inside = ids < band.end
                other = torch.where(lowest < band.end, lowest, 0)
            elif band.end == self.num_rows:
                inside = ids >= band.start
                other = highest.clamp(min=band.start)
            else:
                inside = (ids >= band.start) & (ids < band.end)
                other = torch.where(inside, ids, band.start).amax()
            yield table, inside, torch.where(inside, ids, other) - band.start

    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        plain = offsets is None and per_sample_weights is None and self.padding_idx is None
        if plain and input.dim() == 2 and input.shape[1] == 1:
            if self._has_fixed_shapes(input):
                return self._rows(self._checked(input).reshape(-1))  # finding distinct ids would synchronize
            if self.kernel_group() is not None:
                return self.rows_many([self], self._checked(input).reshape(1, -1))[0]
        return super().forward(input, offsets, per_sample_weights)

    def kernel_group(self) -> Hashable | None:
        """Tables of bands on the CPU share a call where no band would gain by distinct ids."""
        cheap = all(is_cheap(part) for part in self.parts)
        if not cheap or self.fixed_shapes or self.padding_idx is not None or self.device.type != "cpu":
            return None
        return self.dim, self.row_dtype

    @staticmethod
    @eager
    def rows_many(tables: Sequence[Any], ids: Tensor) -> Tensor:
        if transforms() or not has_values(ids):
            return Table.rows_many(tables, ids)
        return rows_of_bands(tables, ids)

    def row_parameters(self) -> dict[str, nn.Parameter]:
        found: dict[str, nn.Parameter] = {}
        for band, table in zip(self.bands, self.parts, strict=True):
            for name, parameter in table.row_parameters().items():
                if not any(parameter is other for other in found.values()):  # a codebook of several bands
                    found[f"{band.name}.{name}"] = parameter
        return found

    @classmethod
    def from_dense(cls, weight: Tensor, table: Table) -> Table:
        table.fit_rows(weight)
        return table

    @torch.no_grad()
    def fit_rows(self, weight: Tensor, counts: Tensor | None = None) -> None:
        """Each band fitted by its own method, with its memory; codebooks that bands share to the rows of all of them.

        `fit_error` does not weigh rows.
        """
        check_shape(weight, self)
        check_counts(counts, self)
        fit_common_codebooks([(self, weight, counts)])
        for band, table in zip(self.bands, self.parts, strict=True):
            place = slice(band.start, band.end)
            try:
                table.fit_rows(weight[place], None if counts is None else counts[place])
            except ConfigError as error:
                raise ConfigError(f"{band} of a {self.method.name} table cannot be fitted: {error}") from None
        self.fit_error = relative_error(weight, self)


def coded_bands(table: Table, start: int = 0) -> Iterator[tuple[CodesTable, int]]:
    """Tables of codes that are `table` or bands of it, each with the row that it starts at."""
    if isinstance(table, CodesTable):
        yield table, start
    elif isinstance(table, BandsTable):
        for band, part in zip(table.bands, table.parts, strict=True):
            yield from coded_bands(part, start + band.start)


def fit_common_codebooks(tables: Iterable[tuple[Table, Tensor, Tensor | None]]) -> None:
    """Fit the codebooks that several tables of codes have in common, to the rows of all of them.

    `tables` are (table, weight [num_rows, dim], counts [num_rows] or None). A codebook that tables outside of `tables`
    have too stays as it is.
    """
    users: dict[Tensor, list[tuple[CodesTable, Tensor, Tensor | None]]] = {}
    for table, weight, counts in tables:
        for part, start in coded_bands(table):
            place = slice(start, start + part.num_rows)
            its_counts = None if counts is None else counts[place]
            users.setdefault(part.codebook.words, []).append((part, weight[place], its_counts))
    for parts in users.values():
        codebook = parts[0][0].codebook
        if 1 < len(parts) == len(codebook.tied):
            sample = Sample(codebook.words.shape[1])
            for part, weight, counts in parts:
                sample.add(weight, counts, part.method.parts)
            codebook.set_words(fit_words(sample, codebook.parts, codebook.num_words))


def _inverse(order: Tensor) -> Tensor:
    """The permutation that undoes `order`."""
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel(), device=order.device)
    return inverse
