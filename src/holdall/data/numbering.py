"""Provisional ids of raw values during a streaming pass, and the popularity order that replaces them at its end.

The first pass cannot know how often a value will occur, so it numbers values as they come (a provisional id) and
counts. Afterwards `order` sorts a table's values by count and gives the array that turns provisional ids into ids.
Memory grows with the distinct values (see docs/formats.md), not with the rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from holdall.data.id_map import IdMap, id_dtype
from holdall.data.rows import import_polars

if TYPE_CHECKING:
    import polars as pl

Array = npt.NDArray[Any]


class Numbering:
    """Provisional ids and training counts of one table's values."""

    def __init__(self) -> None:
        pl = import_polars()
        self.dtype = pl.Categorical(pl.Categories.random())
        # Polars keeps the value -> number map, and frees it with the last series that uses it: hold one.
        self._keep = pl.Series([], dtype=self.dtype)
        self._counts = np.zeros(1024, dtype=np.int64)
        self.num_values = 0

    def expression(self, column: str, one_hot: bool) -> Any:
        """The polars expression that numbers a text column, or the texts of a list column."""
        pl = import_polars()
        if one_hot:
            return pl.col(column).cast(self.dtype).to_physical()
        return pl.col(column).list.eval(pl.element().cast(self.dtype).to_physical())

    def see(self, numbers: Array) -> None:
        """Register provisional ids that occur in any split."""
        self.num_values = max(self.num_values, int(numbers.max(initial=0)) + 1) if len(numbers) else self.num_values
        if self.num_values > len(self._counts):
            grown = np.zeros(max(self.num_values, len(self._counts) * 3 // 2), dtype=np.int64)
            grown[: len(self._counts)] = self._counts
            self._counts = grown

    def count(self, numbers: Array) -> None:
        """Add one occurrence in the training split of each of these provisional ids, which have been seen."""
        np.add.at(self._counts, numbers, 1)

    def order_groups(self, rare_below: int, group: Callable[[pl.Series, Array], pl.Series]) -> tuple[IdMap, Array]:
        """`order` of other texts: `group` gives one for each value, from all values and their counts."""
        pl = import_polars()
        values = pl.Series(np.arange(self.num_values, dtype=np.uint32)).cat.to(self.dtype).cast(pl.String)
        counts, grouped = self._counts[: self.num_values], Numbering()
        texts = group(values, counts).alias("text").to_frame()
        numbers = texts.select(grouped.expression("text", one_hot=True)).to_series().to_numpy()
        grouped.see(numbers)
        np.add.at(grouped._counts, numbers, counts)
        id_map, remap = grouped.order(rare_below)
        return id_map, remap[numbers]

    def order(self, rare_below: int) -> tuple[IdMap, Array]:
        """The map in popularity order, and `remap[provisional id] -> id`. Frees the numbering."""
        pl = import_polars()
        counts = self._counts[: self.num_values]
        kept = np.flatnonzero(counts >= max(rare_below, 1)).astype(np.uint32)
        values = pl.Series(kept).cat.to(self.dtype).cast(pl.String)
        del self._keep, self._counts
        by_value = values.arg_sort().to_numpy()
        by_count = by_value[np.argsort(-counts[kept[by_value]], kind="stable")]
        kept, values = kept[by_count], values.gather(by_count)
        folded = int(counts.sum() - counts[kept].sum())
        unseen = int(np.searchsorted(-counts[kept], -folded, side="right"))  # after every value of the same count
        remap = np.full(self.num_values, unseen, dtype=id_dtype(len(kept) + 1))
        remap[kept] = np.arange(len(kept))
        remap[kept[unseen:]] += 1
        null = pl.Series([None], dtype=pl.String)
        ordered = pl.concat([values.head(unseen), null, values.slice(unseen)], rechunk=True)
        return IdMap(ordered.to_arrow(), np.insert(counts[kept], unseen, folded), unseen), remap
