"""Index of an id map: the id of a text by its hash, in arrays that may lie in a memory-mapped file.

Hashes are sorted, and the first bits of a hash number a bucket of one or two of them, so a lookup reads one place of
`starts`, one of `hashes` and one of `ids`; then the text of that id is compared, so the answer is exact.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

LONG_BYTES = 256  # values hashed one by one, in a microsecond or two each
DISTINCT_FROM = 4096
"""Queries of which only distinct ones are looked up: a million values of Zipf's law over 3 million take 0.25 s instead
of 0.45."""
FEW_TEXTS = 64
"""Texts from which on arrays hash them faster than a loop, which takes 2 microseconds a text."""
_OFFSET, _PRIME, _BITS_64 = 0xCBF29CE484222325, 0x100000001B3, (1 << 64) - 1  # of FNV-1a
_MIX = (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53)  # of MurmurHash3's last step

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class IdIndex:
    """Hashes of n texts and their ids."""

    starts: Array
    """[2^bits + 1] place of the first hash of each bucket."""
    hashes: Array
    """[n] uint64, ascending."""
    ids: Array
    """[n] int32 or int64."""

    @classmethod
    def build(cls, values: pa.LargeStringArray, dtype: type[np.int32 | np.int64]) -> IdIndex:
        """Index of all values that are not null: 16 bytes a value, and 24 more while it is built."""
        hashes = mixed(hash_strings(values))
        order = np.argsort(hashes, kind="stable")
        order = order[values.is_valid().to_numpy(zero_copy_only=False)[order]]
        hashes = hashes[order]
        bits = max(1, len(order).bit_length() - 1)
        first = np.arange(1 << bits, dtype=np.uint64) << np.uint64(64 - bits)
        starts = np.append(np.searchsorted(hashes, first), len(hashes))
        return cls(starts.astype(dtype), hashes, order.astype(dtype))

    def find(
        self, queries: pa.LargeStringArray, texts: Callable[[Array], pa.Array], unseen: int, *, distinct: bool = False
    ) -> Array:
        """[R] ids of R texts, `unseen` where a text is not in the index; `texts` gives the texts of ids.

        Of many queries each distinct text is looked up once, unless they are said to be `distinct`.
        """
        if len(queries) >= DISTINCT_FROM and not distinct:
            coded = queries.dictionary_encode()
            found = self._find(coded.dictionary, texts, unseen)
            return found[coded.indices.to_numpy(zero_copy_only=False)]
        return self._find(queries, texts, unseen)

    def _find(self, queries: pa.LargeStringArray, texts: Callable[[Array], pa.Array], unseen: int) -> Array:
        found = np.full(len(queries), unseen, dtype=self.ids.dtype)
        hashes = mixed(hash_strings(queries))
        bucket = (hashes >> self._shift).view(np.int64)
        where, ends = self.starts[bucket], self.starts[bucket + 1]
        left = np.flatnonzero(where < ends)  # queries still to be answered; `where` is their place in the index
        where, ends = where[left], ends[left]
        while len(left):
            same = np.flatnonzero(self.hashes[where] == hashes[left])
            candidates = self.ids[where[same]]
            equal = pc.equal(texts(candidates).cast(pa.large_string()), queries.take(pa.array(left[same])))
            equal = equal.to_numpy(zero_copy_only=False)
            found[left[same[equal]]] = candidates[equal]
            goes_on = where + 1 < ends
            goes_on[same[equal]] = False
            where, ends, left = where[goes_on] + 1, ends[goes_on], left[goes_on]
        return found

    def find_one(self, query: str, text: Callable[[int], str | None], hashed: int | None = None) -> int | None:
        """The id of one text, in a few microseconds; None if it is not in the index. `hashed` is its `hash_one`."""
        wanted = hash_one(query) if hashed is None else hashed
        bucket = wanted >> self._shift_int
        starts, hashes, ids = self._views
        for place in range(starts[bucket], starts[bucket + 1]):
            if hashes[place] == wanted:
                found: int = ids[place]
                if text(found) == query:
                    return found
        return None

    @cached_property
    def _shift_int(self) -> int:
        return 65 - (len(self.starts) - 1).bit_length()

    @cached_property
    def _shift(self) -> np.uint64:
        return np.uint64(self._shift_int)

    @cached_property
    def _views(self) -> tuple[memoryview, memoryview, memoryview]:
        """The arrays as memory views, whose elements are read in a third of the time."""
        return self.starts.data, self.hashes.data, self.ids.data


def mixed(hashes: Array) -> Array:
    """Hashes whose first bits depend on all of their bits."""
    for factor in _MIX:
        hashes = (hashes ^ (hashes >> np.uint64(33))) * np.uint64(factor)
    return hashes ^ (hashes >> np.uint64(33))


def hash_texts(texts: list[str]) -> list[int]:
    """`hash_one` of each text: one by one if they are few, by arrays if they are many."""
    if len(texts) < FEW_TEXTS:
        return list(map(hash_one, texts))
    found: list[int] = mixed(hash_strings(pa.array(texts, pa.large_string()))).tolist()
    return found


def hash_one(text: str) -> int:
    """`mixed(hash_strings([text]))` of one text."""
    data = text.encode()
    found = _OFFSET
    if len(data) > LONG_BYTES:
        found = int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
    else:
        for byte in data:
            found = ((found ^ byte) * _PRIME) & _BITS_64
    for factor in _MIX:
        found = ((found ^ (found >> 33)) * factor) & _BITS_64
    return found ^ (found >> 33)


def hash_strings(strings: pa.LargeStringArray) -> Array:
    """[R] 64-bit hashes of the strings' bytes: FNV-1a, a byte of all strings at a time, and BLAKE2b for long strings,
    so that the time is linear in the bytes."""
    _, offset_buffer, data_buffer = strings.buffers()
    offsets = np.frombuffer(offset_buffer, dtype=np.int64)[strings.offset : strings.offset + len(strings) + 1]
    data = np.frombuffer(data_buffer or b"", dtype=np.uint8)
    lengths = np.diff(offsets)
    hashes = np.full(len(strings), _OFFSET, dtype=np.uint64)
    longer = np.flatnonzero(lengths <= LONG_BYTES)
    for index in range(int(lengths[longer].max(initial=0))):
        longer = longer[lengths[longer] > index]
        hashes[longer] = (hashes[longer] ^ data[offsets[longer] + index]) * np.uint64(_PRIME)
    for row in np.flatnonzero(lengths > LONG_BYTES).tolist():
        digest = hashlib.blake2b(data[offsets[row] : offsets[row + 1]].tobytes(), digest_size=8).digest()
        hashes[row] = int.from_bytes(digest, "little")
    return hashes
