"""Transforms of the checked rows of raw files, before their values are numbered."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from holdall.data.id_map import as_text
from holdall.data.layout import Layout
from holdall.data.rows import import_polars, inputs_of
from holdall.data.transforms import bucket_texts, feature_texts, hashed_texts, on_grid, quantile_bounds

if TYPE_CHECKING:
    import polars as pl

Array = npt.NDArray[Any]


def with_texts(frame: pl.DataFrame, layout: Layout) -> pl.DataFrame:
    """Checked rows with the texts of the id maps as their features; of quantiles, numbers on a grid as text."""
    pl = import_polars()
    columns = {feature.name: name for name, feature in inputs_of(layout).items()}

    def numbers(name: str) -> Array:
        return frame[columns[name]].fill_null(float("nan")).to_numpy()

    def texts(name: str) -> pa.LargeStringArray:
        return as_text(frame[columns[name]].to_arrow())

    made: dict[str, pa.Array] = {}
    for index, feature in enumerate(layout.features):
        place = f"feature{index}"
        if feature.kind != "categorical":
            if feature.hash is not None:
                made[place] = hashed_lists(frame[place].to_arrow(), feature.hash)
        elif feature.buckets is not None:
            grid = on_grid(numbers(feature.name))
            made[place] = pa.array(np.where(np.isnan(grid), "", grid.astype(str)), pa.large_string())
        elif feature.cross or feature.hash is not None or feature.bucket is not None:
            made[place] = feature_texts(feature, numbers, texts)
    return frame.with_columns(pl.Series(name, array) for name, array in made.items())


def hashed_lists(lists: pa.LargeListArray, size: int) -> pa.LargeListArray:
    """Lists of texts with the hash of each."""
    offsets = np.asarray(lists.offsets)
    texts = hashed_texts(as_text(lists.flatten()), size)
    return pa.LargeListArray.from_arrays(pa.array(offsets - offsets[0]), texts)


class Quantiles:
    """Buckets of about equal numbers of training rows, whose bounds are known once all rows have been counted."""

    def __init__(self, num_buckets: int):
        self.num_buckets = num_buckets
        self.bounds: tuple[float, ...] = ()

    def group(self, values: pl.Series, counts: Array) -> pl.Series:
        """Bucket of each number, which is text, "" where it is missing; sets the bounds."""
        pl = import_polars()
        numbers = values.replace("", None).cast(pl.Float64).fill_null(float("nan")).to_numpy()
        self.bounds = quantile_bounds(numbers, counts, self.num_buckets)
        return pl.Series(bucket_texts(numbers, self.bounds))
