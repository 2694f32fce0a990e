"""Encoder of rows of Python values, for requests of a few rows: a popular value is an id after one look into a dict.

Only rows whose values are plainly right are encoded here: numbers or None in dense columns, texts, integers, booleans
or None in features, lists of them in bags. For all others the answer is None, and the encoder of Arrow's columns reads
them, or says what is wrong with them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from holdall.common.errors import DataError
from holdall.data.batch import Batch, Ids
from holdall.data.columns import offsets_of
from holdall.data.dense import transform
from holdall.data.id_map import id_dtype
from holdall.data.rows import FLOAT32_MAX
from holdall.data.schema import Feature
from holdall.serving.id_lookup import IdLookup
from holdall.serving.raw_rows import RowFormat, ValueRefusedError, text_of

NUMBERS = {float, int, bool, type(None)}
"""Types of values in a dense column that numpy converts as `prepare` does."""
MANY = 1024
"""Values that are not in the dict of their feature, from which on they are looked up together. Arrow imports pandas
for that, where it is installed, which no small request should wait for."""

_WHOLE = re.compile(r"-?[1-9][0-9]{0,17}|0")
"""Whole numbers as `prepare` writes them."""

Columns = Mapping[str, Sequence[Any]]


class ValueEncoder:
    """Encoder of lists of dicts and of dicts of lists; it adds unseen values to `num_unseen`."""

    def __init__(self, form: RowFormat, lookups: Mapping[str, IdLookup], num_unseen: dict[str, int]):
        self._num_unseen = num_unseen
        self._names = form.names
        self._dense = form.schema.dense
        self._all_log = all(column.transform == "log" and column.missing == 0 for column in self._dense)
        self._features = form.schema.features
        self._lookups = [lookups.get(feature.name) for feature in self._features]
        self._separators = form.separators
        self._integers = form.integers
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
        ids, unseen = self._singles(columns, num_rows) if self._one_hot else self._bags(columns, num_rows)
        for name, count in unseen.items():
            self._num_unseen[name] += count
        return Batch(torch.from_numpy(dense), ids, torch.zeros(num_rows))

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
        if self._all_log and given:
            return np.ascontiguousarray(transform(raw, self._dense[0]).T)  # the same for every column
        dense = np.empty((num_rows, len(given)), dtype=np.float32)
        for index, column in enumerate(self._dense):
            dense[:, index] = transform(raw[index], column)
        return dense

    def _singles(self, columns: Columns, num_rows: int) -> tuple[Ids, dict[str, int]]:
        """Ids [F, R], and the number of unseen ones by feature."""
        flat: list[int | None] = []
        unseen: dict[str, int] = {}
        for feature, lookup in zip(self._features, self._lookups, strict=True):
            if lookup is None:
                flat += [0] * num_rows
                continue
            values = columns[feature.name]
            found = list(map(lookup.hot.get, values))
            if None in found:
                self._look_up(found, values, lookup, feature.name)
            if lookup.unseen in found:
                unseen[feature.name] = found.count(lookup.unseen)
            flat += found
        ids = np.array(flat, dtype=self._dtype).reshape(len(self._features), num_rows)
        return Ids(torch.from_numpy(ids), None, len(self._features)), unseen

    def _bags(self, columns: Columns, num_rows: int) -> tuple[Ids, dict[str, int]]:
        """`_singles` where some features have several ids a row."""
        flat: list[int | None] = []
        lengths: list[int] = []
        unseen: dict[str, int] = {}
        for feature, lookup in zip(self._features, self._lookups, strict=True):
            if lookup is None:
                flat += [0] * (num_rows if feature.one_hot else 0)
                lengths += [1 if feature.one_hot else 0] * num_rows
                continue
            values = columns[feature.name]
            if feature.one_hot:
                lengths += [1] * num_rows
            else:
                bags = [self._pieces(value, feature) for value in values]
                lengths += map(len, bags)
                values = list(chain.from_iterable(bags))
            found = list(map(lookup.hot.get, values))
            if None in found:
                self._look_up(found, values, lookup, feature.name)
            unseen[feature.name] = found.count(lookup.unseen)
            flat += found
        offsets = torch.from_numpy(offsets_of(np.array(lengths, dtype=np.int64)))
        return Ids(torch.from_numpy(np.array(flat, dtype=self._dtype)), offsets, len(self._features)), unseen

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
        return pieces[: feature.max_length] if feature.kind == "bag" else pieces[len(pieces) - feature.max_length :]

    def _look_up(self, found: list[int | None], values: Sequence[Any], lookup: IdLookup, name: str) -> None:
        """Fill in the ids of values that are not in the dict of their feature."""
        places = [place for place, number in enumerate(found) if number is None]
        texts = [text_of(values[place]) for place in places]
        if any(len(text) > self._max_bytes // 4 for text in texts):
            raise DataError("a value may be too long")
        if name in self._integers and not all(text == "" or _WHOLE.fullmatch(text) for text in texts):
            raise DataError("a value may be written as a float")
        numbers = [lookup.id_of(text) for text in texts] if len(texts) < MANY else lookup.apply(texts).tolist()
        for place, number in zip(places, numbers, strict=True):
            found[place] = number
