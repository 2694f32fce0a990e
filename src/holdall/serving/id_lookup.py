"""Ids of raw values from memory-mapped files: of one value in microseconds, of many by arrays.

The values that were looked up and are among the most frequent of their feature, a prefix of its ids, are kept in a
dict. All others are found through the index of the map, `ids/<feature>.index` in a bundle, of which a lookup reads a
few pages; nothing is read when a map is opened.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Collection, Container, Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from holdall.common.errors import DataError
from holdall.data.folder_files import check_other_file
from holdall.data.id_index import IdIndex
from holdall.data.id_map import IdMap, as_text, id_dtype, id_map_path, read_file
from holdall.data.schema import Feature, Schema
from holdall.serving.arrow_buffers import bounds_of, bytes_of, is_valid, numbers_of
from holdall.serving.mapped_tensors import CURE, MappedTensors, write_tensors

HOT_VALUES = 1 << 17
"""Values that are kept in dicts, of all features together: about 150 bytes each, 20 MB."""

Array = npt.NDArray[Any]


class IdLookup:
    """Values, counts and index of one id map, as views of its files.

    Without an index file the index is built at the first lookup that needs it, in memory. The values of `withdrawn`
    ids, ascending, are unseen.
    """

    def __init__(self, path: Path, index: Path | None, feature: Feature, withdrawn: Array | None = None):
        self._out = np.empty(0, dtype=np.int64) if withdrawn is None else withdrawn
        self._is_out = frozenset(self._out.tolist())
        self.num_rows, self.unseen = feature.num_rows, feature.unseen
        self.hot: dict[str | None, int] = {}
        """Ids of values that were looked up, below `hot_rows`; None is the missing value."""
        self.hot_rows = 0
        self._path, self._index_path = path, index
        table = read_file(path)
        self._values = table["value"].chunks
        self._counts = [numbers_of(chunk) for chunk in table["count"].chunks]
        self._starts = np.cumsum([0, *map(len, self._values)])
        if table.num_rows != self.num_rows or self.text(self.unseen) is not None:
            raise DataError(f"the id map {path} does not fit schema.json: {CURE}")

    @cached_property
    def _content(self) -> tuple[IdIndex, int]:
        """Index, and bytes of the longest value."""
        if self._index_path is None:
            id_map = IdMap.load(self._path)
            return id_map.index, id_map.longest
        return read_index(self._index_path, self.num_rows)

    @property
    def index(self) -> IdIndex:
        return self._content[0]

    @property
    def longest(self) -> int:
        """Bytes of the longest value."""
        return self._content[1]

    def _place(self, number: int) -> tuple[int, int]:
        chunk = bisect_right(self._bounds, number) - 1
        return chunk, number - self._bounds[chunk]

    @cached_property
    def _bounds(self) -> list[int]:
        return self._starts[:-1].tolist() or [0]

    def text(self, number: int) -> str | None:
        """The value behind an id; None for the unseen row, and where it is withdrawn."""
        if number in self._is_out:
            return None
        chunk, place = self._place(number)
        bounds, content = self._views[chunk]
        start, end = bounds[place], bounds[place + 1]
        if start < end:
            return str(content[start:end], "utf-8")
        return "" if self._values[chunk][place].is_valid else None

    @cached_property
    def _views(self) -> list[tuple[memoryview, memoryview]]:
        """Bounds and bytes of the values of each chunk, read in a third of the time that Arrow takes for one value."""
        return [(bounds_of(values).data, bytes_of(values).data) for values in self._values]

    def count(self, number: int) -> int:
        """Occurrences in the training split of the value behind an id."""
        chunk, place = self._place(number)
        return int(self._counts[chunk][place])

    def texts(self, ids: Array) -> pa.Array:
        """Values behind ids."""
        if len(self._values) == 1:
            return self._values[0].take(pa.array(ids))
        chunks = np.searchsorted(self._starts, ids, side="right") - 1
        order = np.argsort(chunks, kind="stable")
        cuts = np.searchsorted(chunks[order], np.arange(len(self._values) + 1))
        parts = [
            values.take(pa.array(ids[order[cuts[chunk] : cuts[chunk + 1]]] - self._starts[chunk]))
            for chunk, values in enumerate(self._values)
        ]
        inverse = np.empty_like(order)
        inverse[order] = np.arange(len(order))
        return pa.concat_arrays(parts).take(pa.array(inverse))

    def rows(self, start: int, stop: int) -> tuple[pa.Array, Array]:
        """Values and counts of a range of ids; the value is null for the unseen row, and where it is withdrawn."""
        parts = [
            counts[max(start - first, 0) : max(stop - first, 0)]
            for counts, first in zip(self._counts, self._bounds, strict=True)
        ]
        ids = np.arange(start, stop)
        texts, counts = self.texts(ids), np.concatenate(parts)
        is_out = np.isin(ids, self._out)
        if is_out.any():
            texts, counts = texts.take(pa.array(np.arange(len(ids)), mask=is_out)), np.where(is_out, 0, counts)
        return texts, counts

    @property
    def withdrawn(self) -> Array:
        """Ids whose values are withdrawn, ascending: those that were given, and those without a value in the map."""
        nulls = [self._out, np.empty(0, dtype=np.int64)]
        for chunk, start in zip(self._values, self._bounds, strict=True):
            if chunk.null_count:
                nulls.append(np.flatnonzero(chunk.is_null().to_numpy(zero_copy_only=False)) + start)
        found = np.unique(np.concatenate(nulls))
        return found[found != self.unseen]

    def apply(self, values: Any, *, distinct: bool = False) -> Array:
        """`IdMap.apply`."""
        found = self.index.find(as_text(values), self.texts, self.unseen, distinct=distinct)
        if self._is_out:
            found[np.isin(found, self._out)] = self.unseen
        return found

    def id_of(self, text: str, hashed: int | None = None) -> int:
        """The id of one value; `hashed` is its `hash_one`."""
        found = self.index.find_one(text, self.text, hashed)
        if found is None or found in self._is_out:
            return self.unseen
        if found < self.hot_rows:
            self.hot[text] = found
            if not text:
                self.hot[None] = found
        return found

    def first_values(self, number: int) -> Iterator[tuple[Array, pa.StringArray, Array]]:
        """Of the first ids, in parts: ids, values, and whether each value is there, and not withdrawn."""
        for first, values in zip(self._bounds, self._values, strict=False):
            if first < number:
                part = values[: number - first]
                ids = np.arange(first, first + len(part))
                yield ids, part, is_valid(part) & ~np.isin(ids, self._out)

    def fill(self) -> None:
        """Keep all values of the hot prefix from now on."""
        for ids, values, is_there in self.first_values(self.hot_rows):
            bounds = bounds_of(values)
            content = bytes_of(values)[bounds[0] : bounds[-1]].tobytes()
            places = itertools.pairwise((bounds - bounds[0]).tolist())
            for number, (start, end), there in zip(ids.tolist(), places, is_there.tolist(), strict=True):
                if there:
                    self.hot[content[start:end].decode()] = number
        if "" in self.hot:
            self.hot[None] = self.hot[""]


def open_lookups(
    folder: Path,
    schema: Schema,
    features: Collection[str],
    listed: Container[str] = (),
    withdrawn: Mapping[str, Array] | None = None,
) -> dict[str, IdLookup]:
    """Id maps of some features, by feature; features that share a table share the object.

    An index is used if it is among the `listed` files, which were checked. The map of a table is that of its first
    feature, whether it is one of `features` or not. `withdrawn` are ids, by table, whose values are unseen.
    """
    first: dict[str, Feature] = {}
    opened: dict[str, IdLookup] = {}
    found: dict[str, IdLookup] = {}
    for feature in schema.features:
        table = feature.table or feature.name
        first.setdefault(table, feature)
        if feature.name not in features:
            continue
        if table not in opened:
            path = id_map_path(folder, first[table].name)
            check_other_file(folder, path, schema)
            index = index_path(path)
            is_listed = index.relative_to(folder).as_posix() in listed
            out = (withdrawn or {}).get(table)
            opened[table] = IdLookup(path, index if is_listed else None, feature, out)
        found[feature.name] = opened[table]
    share_hot_rows(opened.values())
    return found


def share_hot_rows(lookups: Iterable[IdLookup], total: int = HOT_VALUES) -> None:
    """Give every map its number of hot rows: all rows of small ones, the same number to each of the others."""
    left = sorted(lookups, key=lambda lookup: lookup.num_rows)
    while left:
        lookup = left.pop(0)
        lookup.hot_rows = min(lookup.num_rows, total // (len(left) + 1))
        total -= lookup.hot_rows


# --- files -----------------------------------------------------------------------------------------------------------


def index_path(id_map: Path) -> Path:
    """Path of the index of the map at a path."""
    return id_map.with_suffix(".index")


def write_index(path: Path, id_map: IdMap) -> None:
    """Write the index of a map beside it; a safetensors file."""
    index = id_map.index
    tensors = {"starts": index.starts, "hashes": index.hashes.view(np.int64), "ids": index.ids}
    arrays = {name: torch.from_numpy(array) for name, array in tensors.items()}
    write_tensors(path, {**arrays, "longest": torch.tensor([id_map.longest])})


def read_index(path: Path, num_rows: int) -> tuple[IdIndex, int]:
    """The index of a map as views of its file, and the bytes of the longest value."""
    stored = MappedTensors(path)
    try:
        starts, hashes, ids, longest = (stored[name].numpy() for name in ("starts", "hashes", "ids", "longest"))
    except KeyError as error:
        raise DataError(f"{path} has no {error}, and is no index of an id map: {CURE}") from None
    size, kinds = len(starts) - 1, {starts.dtype, ids.dtype}
    fits = hashes.ndim == starts.ndim == 1 and hashes.shape == ids.shape and longest.shape == (1,)
    fits = fits and len(ids) < num_rows
    if not fits or size < 2 or size & (size - 1) or kinds != {np.dtype(id_dtype(num_rows))} or hashes.dtype != np.int64:
        raise DataError(f"{path} is not the index of a map of {num_rows:,} rows: {CURE}")
    return IdIndex(starts, hashes.view(np.uint64), ids), int(longest[0])
