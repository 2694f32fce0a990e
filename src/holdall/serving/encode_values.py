"""Encoder of rows of Python values, for requests of a few rows: a popular value is an id after one look into a dict.

Only rows whose values are plainly right are encoded here: numbers or None in dense columns, texts, integers, booleans
or None in features, lists of them in bags. For all others the answer is None, and the encoder of Arrow's columns reads
them, or says what is wrong with them.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate, chain, repeat
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from holdall.common.errors import DataError
from holdall.data.batch import Batch, Ids
from holdall.data.columns import offsets_of
from holdall.data.dense import transform
from holdall.data.id_index import hash_one, hash_texts
from holdall.data.id_map import id_dtype
from holdall.data.rows import FLOAT32_MAX
from holdall.data.schema import Feature
from holdall.data.transforms import has_transform, value_text
from holdall.serving.hot_table import PADDING, HotTable, words_of
from holdall.serving.id_lookup import IdLookup
from holdall.serving.raw_rows import RowFormat, ValueRefusedError, text_of

NUMBERS = {float, int, bool, type(None)}
"""Types of values in a dense column that numpy converts as `prepare` does."""
MANY = 1024
"""Values that are not in the dict of their feature, from which on they are looked up together. Arrow imports pandas
for that, where it is installed, which no small request should wait for."""
TABLE_FROM = 1024
"""Values of a batch that are looked up by arrays; fewer are found faster in the dicts of their features."""

_WHOLE = re.compile(r"-?[1-9][0-9]{0,17}|0")
"""Whole numbers as `prepare` writes them."""

Columns = Mapping[str, Sequence[Any]]
Array = npt.NDArray[Any]


class ValueEncoder:
    """Encoder of lists of dicts and of dicts of lists; it adds unseen values to `num_unseen`."""

    def __init__(
        self,
        form: RowFormat,
        lookups: Mapping[str, IdLookup],
        num_unseen: dict[str, int],
        hot_table: HotTable | None = None,
    ):
        self._num_unseen = num_unseen
        self._names = form.names
        self._dense = form.schema.dense
        self._all_log = all(column.transform == "log" and column.missing == 0 for column in self._dense)
        self._features = form.schema.features
        self._lookups = [lookups.get(feature.name) for feature in self._features]
        self._hot_table = hot_table or HotTable(lookups.values())
        self._unseen = np.array([-1 if lookup is None else lookup.unseen for lookup in self._lookups])
        self._separators = form.separators
        self._transformed = frozenset(feature.name for feature in self._features if has_transform(feature))
        self._integers = form.integers
        self._is_integer = [feature.name in form.integers for feature in self._features]
        self._max_bytes = form.max_value_bytes
        self._one_hot = form.schema.one_hot
        self._dtype = id_dtype(max((lookup.num_rows for lookup in lookups.values()), default=1))

    def encode(self, rows: Any) -> Batch | None:
        """A list of dicts, or a dict of lists or tuples, as a batch with labels 0; None if they are not plain ones."""
        try:
            if isinstance(rows, list):
                columns: Columns = {name: [row[name] for row in rows] for name in self._names}
                return self._encode(columns, len(rows))
            lengths = {len(rows[name]) for name in self._names if isinstance(rows[name], list | tuple)}
            if len(lengths) != 1 or not all(isinstance(rows[name], list | tuple) for name in self._names):
                return None
            return self._encode(rows, lengths.pop())
        except (LookupError, TypeError, AttributeError, ArithmeticError, ValueError, ValueRefusedError):
            return None

    def _encode(self, columns: Columns, num_rows: int) -> Batch | None:
        dense = self._numbers(columns, num_rows)
        if dense is None:
            return None
        if self._one_hot:
            return self.batch(dense, self._singles(columns, num_rows))
        ids, unseen = self._bags(columns, num_rows)
        for name, count in unseen.items():
            self._num_unseen[name] += count
        return Batch(torch.from_numpy(dense), ids, torch.zeros(num_rows))

    def batch(self, dense: npt.NDArray[np.float32], ids: Array) -> Batch:
        """The batch of ids [F, R], of which the unseen ones are counted."""
        is_unseen = ids == self._unseen[:, None]
        if is_unseen.any():
            for feature, count in zip(self._features, is_unseen.sum(axis=1).tolist(), strict=True):
                if count:
                    self._num_unseen[feature.name] += count
        return Batch(torch.from_numpy(dense), Ids(torch.from_numpy(ids), None, len(ids)), torch.zeros(ids.shape[1]))

    def _numbers(self, columns: Columns, num_rows: int) -> npt.NDArray[np.float32] | None:
        """[R, N] float32, transformed."""
        given = [columns[column.name] for column in self._dense]
        if not NUMBERS.issuperset(map(type, chain.from_iterable(given))):
            return None
        raw = np.array(given, dtype=np.float64).reshape(len(given), num_rows)  # None becomes NaN
        sizes = np.abs(raw)
        if not (sizes <= FLOAT32_MAX).all():
            missing = np.isnan(raw)
            is_none = sum(column.count(None) for column in given)
            if np.count_nonzero(missing) != is_none or not (missing | (sizes <= FLOAT32_MAX)).all():
                return None
        return self.transformed(raw)

    def transformed(self, raw: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
        """[R, N] float32 of the values [N, R] of dense columns; NaN is a missing one."""
        if self._all_log and len(raw):
            return np.ascontiguousarray(transform(raw, self._dense[0]).T)  # the same for every column
        dense = np.empty(raw.shape[::-1], dtype=np.float32)
        for index, column in enumerate(self._dense):
            dense[:, index] = transform(raw[index], column)
        return dense

    def _singles(self, columns: Columns, num_rows: int) -> Array:
        """Ids [F, R]."""
        pairs = zip(self._features, self._lookups, strict=True)
        values = [
            [0] * num_rows if lookup is None else self._values(columns, feature, num_rows) for feature, lookup in pairs
        ]
        return self._ids(values).reshape(len(values), num_rows)

    def _bags(self, columns: Columns, num_rows: int) -> tuple[Ids, dict[str, int]]:
        """Ids where some features have several a row, and the number of unseen ones by feature."""
        values: list[Sequence[Any]] = []
        lengths: list[int] = []
        for feature, lookup in zip(self._features, self._lookups, strict=True):
            if feature.one_hot:
                lengths += [1] * num_rows
                values.append([0] * num_rows if lookup is None else self._values(columns, feature, num_rows))
                continue
            bags = [] if lookup is None else [self._pieces(value, feature) for value in columns[feature.name]]
            lengths += map(len, bags) if bags else [0] * num_rows
            pieces = list(chain.from_iterable(bags))
            if feature.hash is not None:
                pieces = [str(hash_one(text) % feature.hash) for text in map(self._text, pieces)]
            values.append(pieces)
        ids = self._ids(values)
        own = np.split(ids, np.cumsum([len(part) for part in values[:-1]]))
        unseen = {
            feature.name: int(np.count_nonzero(part == number))
            for feature, part, number in zip(self._features, own, self._unseen, strict=True)
            if feature.name in self._num_unseen
        }
        offsets = torch.from_numpy(offsets_of(np.array(lengths, dtype=np.int64)))
        return Ids(torch.from_numpy(ids), offsets, len(self._features)), unseen

    def _ids(self, values: list[Sequence[Any]]) -> Array:
        """Ids of the values of every feature, one feature after the other; those of features without a map as given."""
        number = sum(map(len, values))
        if number < TABLE_FROM:
            flat: list[int] = []
            for own, lookup in zip(values, self._lookups, strict=True):
                flat += own if lookup is None else map(lookup.hot.get, own, repeat(-1))
            ids: Array = np.array(flat, dtype=self._dtype)
        else:
            ids = np.zeros(number, dtype=self._dtype)
            counts = list(map(len, values))
            mapped = [place for place, lookup in enumerate(self._lookups) if lookup is not None]
            found = self._hot_ids([values[place] for place in mapped], [self._map(place) for place in mapped])
            ids[np.repeat([lookup is not None for lookup in self._lookups], counts)] = found
        places = np.flatnonzero(ids < 0).tolist()
        if places:
            self._look_up(ids, places, values)
        return ids

    def _hot_ids(self, values: list[Sequence[Any]], lookups: list[IdLookup]) -> Array:
        """Ids of the values of some maps; -1 for those that are not in the table."""
        try:
            whole = "".join(chain.from_iterable(values))
        except TypeError:
            values = [own if set(map(type, own)) == {str} else list(map(text_of, own)) for own in values]
            whole = "".join(chain.from_iterable(values))
        counts, data = list(map(len, values)), whole.encode()
        texts = chain.from_iterable(values)
        in_bytes = map(len, texts) if len(data) == len(whole) else (len(text.encode()) for text in texts)
        sizes = np.fromiter(in_bytes, dtype=np.int64, count=sum(counts))
        starts = np.cumsum(sizes) - sizes
        words = words_of(np.frombuffer(data + PADDING.tobytes(), dtype=np.uint8), starts, sizes)
        return self._hot_table.find(words, lookups, counts)

    def _values(self, columns: Columns, feature: Feature, num_rows: int) -> Sequence[Any]:
        """Values of a feature with one value a row, as its id map has them."""
        if feature.name not in self._transformed:
            return columns[feature.name]
        return [
            value_text(feature, lambda name, row=row: columns[name][row], self._text)  # type: ignore[misc]
            for row in range(num_rows)
        ]

    def _text(self, value: Any) -> str:
        """Text of a value that a transform reads, if it is plainly right."""
        text = text_of(value)
        if len(text) > self._max_bytes // 4 or (text and self._integers and not _WHOLE.fullmatch(text)):
            raise DataError("a value may be too long, or written as a float")
        return text

    def _pieces(self, value: Any, feature: Feature) -> list[Any]:
        """Values of a bag or sequence, without missing ones and at most `max_length`."""
        if value is None:
            return []
        if isinstance(value, str):
            value = value.split(self._separators[feature.name]) if value else []
        elif not isinstance(value, list | tuple):
            raise TypeError
        pieces = [piece for piece in value if piece is not None and piece != ""]
        if feature.max_length is None or len(pieces) <= feature.max_length:
            return pieces
        if not {str}.issuperset(map(type, pieces)):
            list(map(text_of, pieces))  # raises where one that is left out is wrong
        return pieces[: feature.max_length] if feature.kind == "bag" else pieces[len(pieces) - feature.max_length :]

    def _look_up(self, ids: Array, places: list[int], values: list[Sequence[Any]]) -> None:
        """Fill in the ids of values that were not found, each distinct one once."""
        starts = list(accumulate(map(len, values), initial=0))
        asked = []
        for place in places:
            feature = bisect_right(starts, place) - 1
            asked.append((feature, text_of(values[feature][place - starts[feature]])))
        ids[places] = self.found(asked)

    def found(self, asked: Sequence[tuple[int, str]]) -> list[int]:
        """Ids of texts, each with the place of its feature; raises where a text is not plainly right."""
        distinct = list(dict.fromkeys(asked))
        for feature, text in distinct:
            if len(text) > self._max_bytes // 4:
                raise DataError("a value may be too long")
            if self._is_integer[feature] and text and not _WHOLE.fullmatch(text):
                raise DataError("a value may be written as a float")
        found: dict[tuple[int, str], int] = {}
        for feature, number in Counter(feature for feature, _ in distinct).items() if len(distinct) >= MANY else ():
            if number >= MANY:
                own = [key for key in distinct if key[0] == feature]
                found |= zip(
                    own, self._map(feature).apply([text for _, text in own], distinct=True).tolist(), strict=True
                )
        for key in distinct:
            if key not in found and (number := self._map(key[0]).hot.get(key[1], -1)) >= 0:
                found[key] = number
        left = [key for key in distinct if key not in found]
        for key, hashed in zip(left, hash_texts([text for _, text in left]), strict=True):
            found[key] = self._map(key[0]).id_of(key[1], hashed)
        return [found[key] for key in asked]

    def _map(self, feature: int) -> IdLookup:
        lookup = self._lookups[feature]
        assert lookup is not None
        return lookup
