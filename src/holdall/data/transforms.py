"""Transforms of raw values on the way to their ids: buckets of numbers, hashes of texts, crosses of several values.

| transform | raw value | text in the id map |
| --- | --- | --- |
| `bucket = [0, 1, 10]` | 7.5 | `1 to 10` |
| `hash = 1000` | `ann` | `417` |
| `cross = ["city", "device"]` | `paris`, `phone` | `paris&phone` |

A transform makes a text of raw values, and the id map has these texts. So nothing behind an id map knows of transforms,
ids are in popularity order as all others are, and texts that training did not have are unseen. A missing value stays
the missing value. `prepare` and the encoders of raw rows call the same functions.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from holdall.data.id_index import hash_one, hash_strings, mixed
from holdall.data.schema import CrossPart, Feature

SEPARATOR, ESCAPE = "&", "\\"
GRID_BITS = 40
"""Last bits of a float64 that quantiles leave out: 12 bits of the mantissa stay, so that a column of any length has
some ten thousand different numbers."""
DISTINCT_FROM = 4096
"""Texts of which only distinct ones are hashed."""

Array = npt.NDArray[Any]


# --- buckets --------------------------------------------------------------------------------------------------------


def bucket_names(bounds: Sequence[float]) -> list[str]:
    """Texts of the buckets between ascending bounds; a number that is a bound is in the bucket above it."""
    said = [f"{bound:.0f}" if bound == round(bound) and abs(bound) < 1e15 else repr(bound) for bound in bounds]
    if not said:
        return ["any number"]
    return [f"below {said[0]}", *(f"{a} to {b}" for a, b in pairwise(said)), f"{said[-1]} or more"]


_bucket_names = lru_cache(maxsize=256)(bucket_names)
"""`bucket_names` of a tuple, for requests of a few rows."""


def bucket_texts(numbers: Array, bounds: Sequence[float]) -> pa.LargeStringArray:
    """Buckets of numbers [R] float64; "" where a number is missing (NaN)."""
    names = pa.array([*bucket_names(bounds), ""], pa.large_string())
    places = np.searchsorted(np.asarray(bounds, dtype=np.float64), numbers, side="right")
    return names.take(pa.array(np.where(np.isnan(numbers), len(names) - 1, places)))


def on_grid(numbers: Array) -> Array:
    """Numbers [R] float64 rounded down to the grid of quantiles: x >= b and `on_grid(x) >= b` are the same for every b
    on the grid."""
    bits = (np.asarray(numbers, dtype=np.float64) + 0.0).view(np.int64)  # + 0.0: -0 and 0 are one number
    up = np.where(bits < 0, bits + ((1 << GRID_BITS) - 1), bits)  # away from 0 is down for negative ones
    return np.where(np.isnan(numbers), np.nan, (up >> GRID_BITS << GRID_BITS).view(np.float64))


def quantile_bounds(values: Array, counts: Array, num_buckets: int) -> tuple[float, ...]:
    """Bounds of at most `num_buckets` buckets with about equal counts; values [n] are numbers on the grid, or NaN."""
    keep = ~np.isnan(values) & (counts > 0)
    order = np.argsort(values[keep], kind="stable")
    values, counts = values[keep][order], counts[keep][order]
    before = np.cumsum(counts) - counts
    wanted = np.arange(1, num_buckets) * counts.sum() / num_buckets
    places = np.unique(np.searchsorted(before, wanted))
    return tuple(values[places[(places > 0) & (places < len(values))]].tolist())


# --- hashes ---------------------------------------------------------------------------------------------------------


def hashed_texts(texts: pa.LargeStringArray, size: int) -> pa.LargeStringArray:
    """Numbers below `size` of texts, as text: FNV-1a, mixed as in `data.id_index`; the same everywhere and for ever."""
    if len(texts) >= DISTINCT_FROM:
        coded = texts.dictionary_encode()
        return _hash(coded.dictionary, size).take(coded.indices)
    return _hash(texts, size)


def _hash(texts: pa.LargeStringArray, size: int) -> pa.LargeStringArray:
    if not len(texts):
        return texts
    numbers = pa.array((mixed(hash_strings(texts)) % np.uint64(size)).astype(np.int64)).cast(pa.large_string())
    return pc.if_else(pc.equal(texts, ""), "", numbers).cast(pa.large_string())


# --- crosses --------------------------------------------------------------------------------------------------------


def cross_texts(parts: Sequence[pa.LargeStringArray]) -> pa.LargeStringArray:
    """Texts of several columns joined in one, so that different values have different texts."""
    escaped = []
    for texts in parts:
        for character in (ESCAPE, SEPARATOR):
            if pc.any(pc.match_substring(texts, character)).as_py():
                texts = pc.replace_substring(texts, character, ESCAPE + character)
        escaped.append(texts)
    return pc.binary_join_element_wise(*escaped, pa.scalar(SEPARATOR, pa.large_string())).cast(pa.large_string())


# --- features -------------------------------------------------------------------------------------------------------


def has_transform(feature: Feature) -> bool:
    """Whether the id map of a feature has other texts than its raw values."""
    return bool(feature.cross) or feature.hash is not None or feature.bucket is not None


def feature_texts(
    feature: Any, numbers: Callable[[str], Array], texts: Callable[[str], pa.LargeStringArray]
) -> pa.LargeStringArray:
    """Texts of a feature with one value a row, as its id map has them.

    `numbers` and `texts` give the raw values of an input by its name, NaN and "" where they are missing.
    """
    if feature.cross:
        found = cross_texts([feature_texts(Single(part), numbers, texts) for part in feature.cross])
    elif feature.bucket is not None:
        found = bucket_texts(numbers(feature.name), feature.bucket)
    else:
        found = texts(feature.name)
    return found if feature.hash is None else hashed_texts(found, feature.hash)


class Single:
    """Part of a cross as a feature."""

    def __init__(self, part: Any):
        self.name, self.bucket, self.hash, self.cross = part.name, part.bucket, part.hash, ()


def value_text(feature: Any, value: Callable[[str], Any], text_of: Callable[[Any], str]) -> str:
    """`feature_texts` of one row of Python values; a `TypeError` where a number is none."""
    if feature.cross:
        pieces = [value_text(Single(part), value, text_of) for part in feature.cross]
        found = SEPARATOR.join(p.replace(ESCAPE, ESCAPE * 2).replace(SEPARATOR, ESCAPE + SEPARATOR) for p in pieces)
    elif feature.bucket is not None:
        number = value(feature.name)
        if number is None:
            found = ""
        elif type(number) not in (int, float, bool) or not math.isfinite(number):
            raise TypeError
        else:
            found = _bucket_names(feature.bucket)[bisect_right(feature.bucket, number)]
    else:
        found = text_of(value(feature.name))
    return found if feature.hash is None or not found else str(hash_one(found) % feature.hash)


def input_features(features: Iterable[Feature]) -> list[Feature]:
    """The raw columns behind features, once each: the parts of a cross in its place."""
    found: dict[str, Feature] = {}
    everything = list(features)
    for feature in everything:
        if not feature.cross:
            found[feature.name] = feature
    for feature in everything:
        for part in feature.cross:
            found.setdefault(part.name, _as_feature(part))
    return list(found.values())


def _as_feature(part: CrossPart) -> Feature:
    return Feature(name=part.name, num_rows=1, unseen=0, bucket=part.bucket, hash=part.hash)


def described(feature: Feature) -> str:
    """Transform of a feature in words; empty without one."""
    said = []
    if feature.cross:
        said.append(f"cross of {' and '.join(part.name for part in feature.cross)}")
    if feature.bucket is not None:
        said.append(f"{len(feature.bucket) + 1} buckets")
    if feature.hash is not None:
        said.append(f"hash below {feature.hash:,}")
    return ", ".join(said)
