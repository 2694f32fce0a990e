"""Hash table of the hot values of all features, in arrays: the ids of thousands of texts by a few operations of numpy.

A text of at most 8 bytes is one 64-bit word, so a word that is equal is the text. Longer texts are not in the table.
The rows of a request are hundreds of values that lie far apart in memory: 7,000 lookups take 0.3 ms here, and 1.5 ms in
dicts of Python texts, which wait for memory one after the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from holdall.serving.arrow_buffers import bounds_of, bytes_of
from holdall.serving.id_lookup import IdLookup

ROWS_PER_HOT = 4
"""Values in the table for each that a dict may keep: 50 bytes a value, 25 MB at most."""
PROBES = 4
"""Slots that a word may be in."""
_FACTOR = np.uint64(0x9E3779B97F4A7C15)  # of Fibonacci hashing
_EMPTY, _NO_WORD = np.uint64(1), np.uint64(2)  # no text has these words
_LOW_BYTES = np.array([(1 << 8 * size) - 1 for size in range(9)] + [0], dtype=np.uint64)
_SIZES = np.array([size << 56 for size in range(8)] + [0, 2], dtype=np.uint64)
PADDING = np.zeros(8, dtype=np.uint8)
"""Bytes behind the last text, so that a word can be read at any."""

Array = npt.NDArray[Any]


def words_of(data: Array, starts: Array, sizes: Array) -> Array:
    """[N] words of the texts at `starts` in `data`, which ends with `PADDING`; `_NO_WORD` for those without one.

    A word has the bytes of its text, and their number in the last byte if that is free.
    """
    at = np.ndarray((len(data) - 7,), dtype="<u8", buffer=data, strides=(1,))
    kinds = np.minimum(sizes, 9)
    words = (at[starts] & _LOW_BYTES[kinds]) | _SIZES[kinds]
    words[(kinds == 8) & (words < np.uint64(8 << 56))] = _NO_WORD  # its last byte would stand for a number
    return words


class HotTable:
    """Words and ids of the first rows of some id maps; it is filled when it is first asked."""

    def __init__(self, lookups: Iterable[IdLookup]):
        self._lookups = list(dict.fromkeys(lookups))

    def find(self, words: Array, lookups: Sequence[IdLookup], counts: Sequence[int]) -> Array:
        """[N] ids of words, of which `counts` belong to each of the maps; -1 for those that are not in the table."""
        table, ids, places = self._filled
        first, shift = (np.repeat([places[lookup][part] for lookup in lookups], counts) for part in (0, 1))
        slots = ((words * _FACTOR) >> shift.astype(np.uint64)).view(np.int64) + first
        there = table[slots]
        found = np.where(there == words, ids[slots], -1)
        left = np.flatnonzero((found < 0) & (there != _EMPTY))
        for _ in range(PROBES - 1):
            slots[left] += 1
            there = table[slots[left]]
            same = there == words[left]
            found[left[same]] = ids[slots[left[same]]]
            left = left[~same & (there != _EMPTY)]
        return found

    @cached_property
    def _filled(self) -> tuple[Array, Array, dict[IdLookup, tuple[int, int]]]:
        """Words and ids by slot, and the first slot and the shift of each map."""
        places, parts, size = {}, [], 0
        for lookup in self._lookups:
            words, ids = _hot_words(lookup)
            bits = max(1, (2 * len(words)).bit_length())
            places[lookup] = size, 64 - bits
            parts.append((words, ids, (words * _FACTOR >> np.uint64(64 - bits)).astype(np.int64) + size))
            size += (1 << bits) + PROBES
        words, ids, slots = (np.concatenate(part) for part in zip(*parts, strict=True))
        table, table_ids = np.full(size, _EMPTY), np.zeros(size, dtype=np.int64)
        for _ in range(PROBES):
            _, chosen = np.unique(slots, return_index=True)  # the most frequent of those that want a slot
            chosen = chosen[table[slots[chosen]] == _EMPTY]
            table[slots[chosen]], table_ids[slots[chosen]] = words[chosen], ids[chosen]
            words, ids, slots = (np.delete(part, chosen) for part in (words, ids, slots + 1))
        return table, table_ids, places


def _hot_words(lookup: IdLookup) -> tuple[Array, Array]:
    """Words and ids of the first rows of a map that have one."""
    words, ids = [np.empty(0, dtype=np.uint64)], [np.empty(0, dtype=np.int64)]
    for numbers, values, is_there in lookup.first_values(ROWS_PER_HOT * lookup.hot_rows):
        bounds = bounds_of(values).astype(np.int64)
        data = bytes_of(values)[bounds[0] : bounds[-1]]
        found = words_of(np.append(data, PADDING), bounds[:-1] - bounds[0], np.diff(bounds))
        kept = is_there & (found != _NO_WORD)
        words.append(found[kept])
        ids.append(numbers[kept])
    return np.concatenate(words), np.concatenate(ids)
