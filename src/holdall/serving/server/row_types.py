"""Decoder of JSON rows: msgspec types made from the schema, so that a wrong value is found while it is read."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import msgspec
import pyarrow as pa

from holdall.common.errors import DataError
from holdall.data.schema import Schema
from holdall.data.transforms import input_features
from holdall.serving.raw_rows import RowFormat

Row = tuple[Any, ...]
"""Values of one row, in the order of `RowReader.names`."""

Columns = tuple[list[Any], ...]
"""Values of some rows by column, in the order of `RowReader.names`."""


@dataclass(frozen=True, slots=True)
class ArrowColumns:
    """Columns of some rows in the order of `RowReader.names`, as Arrow arrays, one or more a column."""

    arrays: tuple[list[pa.Array], ...]

    def lists(self) -> Columns:
        """The same as Python values."""
        return tuple([value for part in parts for value in part.to_pylist()] for parts in self.arrays)


_PATH = re.compile(r" - at `\$(?:\.(rows|items|user)(?:\[(\d+)\])?(?:\.(.*?))?((?:\[\d+\])*))?`$", re.DOTALL)
_WORDS = {"bool | int | str | null": "text, a whole number, true, false or null", "float | null": "a number or null"}


class RowReader:
    """Decoders of the rows of one schema.

    A dense column is a number or null, a feature text, a whole number, a boolean or null, and a bag or sequence a
    list of texts or whole numbers, or null. Names that the schema does not have are ignored.
    """

    def __init__(self, schema: Schema, reads: Sequence[str], max_rows: int, max_values: int):
        """`reads` are the features that the model reads."""
        self.max_rows, self.max_values = max_rows, max_values
        self.dense = tuple(column.name for column in schema.dense)
        features = input_features(feature for feature in schema.features if feature.name in reads)
        self.names = (*self.dense, *(feature.name for feature in features))
        self.places = {name: number for number, name in enumerate(self.names)}
        self.bags = frozenset(feature.name for feature in features if not feature.one_hot)
        self.separators = RowFormat.of(schema, reads).separators
        self._bag_places = [self.places[name] for name in sorted(self.bags)]
        types: list[Any] = [float | None] * len(self.dense)
        for feature in features:
            single = float | None if feature.bucket is not None else str | int | bool | None
            types.append(single if feature.one_hot else list[str | int] | None)
        fields = [(f"value_{number}", kind) for number, kind in enumerate(types)]
        rename = {field[0]: name for field, name in zip(fields, self.names, strict=True)}
        row: Any = msgspec.defstruct("Row", fields, rename=rename, gc=False)
        absent = [(name, kind | msgspec.UnsetType, msgspec.UNSET) for name, kind in fields]
        part: Any = msgspec.defstruct("Part", absent, rename=rename, gc=False)
        rows = msgspec.defstruct("Rows", [("rows", list[row])], forbid_unknown_fields=True, gc=False)
        ranking = msgspec.defstruct("Ranking", [("user", part), ("items", list[part])], forbid_unknown_fields=True)
        self._rows, self._ranking = msgspec.json.Decoder(rows), msgspec.json.Decoder(ranking)

    def rows(self, body: bytes | bytearray) -> list[Row]:
        """The rows of `{"rows": [{...}, ...]}`."""
        rows = self._decode(self._rows, body).rows
        self.check_number(len(rows), "rows")
        found = list(map(msgspec.structs.astuple, rows))
        self.check_values(self.num_values(found))
        return found

    def num_values(self, rows: Sequence[Row]) -> int:
        """Values in the bags and sequences of rows."""
        return sum(_length(row[place]) for place in self._bag_places for row in rows)

    def num_ranked_values(self, user: Mapping[str, Any], items: Mapping[str, Sequence[Any]]) -> int:
        """Values in the bags and sequences of items, each with those of the user."""
        number = len(next(iter(items.values()), ()))
        own = sum(_length(user[name]) for name in self.bags if name in user)
        return own * number + sum(_length(bag) for name in self.bags for bag in items.get(name, ()))

    def ranking(self, body: bytes | bytearray) -> tuple[dict[str, Any], dict[str, list[Any]]]:
        """The user's values and the columns of the items of `{"user": {...}, "items": [{...}, ...]}`."""
        found = self._decode(self._ranking, body)
        self.check_number(len(found.items), "items")
        user = {
            name: value
            for name, value in zip(self.names, msgspec.structs.astuple(found.user), strict=True)
            if value is not msgspec.UNSET
        }
        columns = zip(*map(msgspec.structs.astuple, found.items), strict=True)
        items: dict[str, list[Any]] = {}
        for name, column in zip(self.names, columns, strict=True):
            for number, value in enumerate(column):
                if (value is msgspec.UNSET) != (name in user):
                    fault = "is given by the user and by the item" if name in user else "is missing in user and item"
                    raise RowError(f"item {number}: '{name}' {fault}: give it in one of them")
            if name not in user:
                items[name] = list(column)
        if not items:
            raise RowError(
                "the user has every feature, so the items have none: give those that differ by item in 'items'"
            )
        self.check_values(self.num_ranked_values(user, items))
        return user, items

    def check_number(self, number: int, what: str = "rows") -> None:
        """Raise unless a request may have this number of rows."""
        if number == 0:
            raise RowError(f"{what}: the list is empty: give one or more")
        if number > self.max_rows:
            raise TooManyRowsError(
                f"{number:,} {what} are more than the {self.max_rows:,} of one request: send fewer at once"
            )

    def check_values(self, number: int) -> None:
        """Raise unless the bags and sequences of a request may have this number of values."""
        if number > self.max_values:
            raise TooManyRowsError(
                f"{number:,} values in bags and sequences are more than the {self.max_values:,} of one request: send "
                f"fewer at once"
            )

    def check_names(self, names: Sequence[str]) -> list[str]:
        """The columns to read; raise unless each is there once."""
        for name in self.names:
            if (number := names.count(name)) != 1:
                raise RowError(f"'{name}' is {'given twice' if number else 'missing'}: give it once")
        return list(self.names)

    def arrays(self, parts: Sequence[ArrowColumns]) -> dict[str, list[pa.Array]]:
        """Arrow columns of the rows of several requests, one after the other."""
        columns = zip(*(part.arrays for part in parts), strict=True)
        return {name: list(chain.from_iterable(column)) for name, column in zip(self.names, columns, strict=True)}

    def columns(self, parts: Sequence[list[Row] | ArrowColumns]) -> dict[str, Sequence[Any]]:
        """Columns of the rows of several requests, one after the other."""
        rows = [part for part in parts if isinstance(part, list)]
        if len(rows) == len(parts):
            return dict(zip(self.names, zip(*chain.from_iterable(rows), strict=True), strict=True))
        each = [part.lists() if isinstance(part, ArrowColumns) else zip(*part, strict=True) for part in parts]
        columns = zip(*each, strict=True)
        return {name: list(chain.from_iterable(column)) for name, column in zip(self.names, columns, strict=True)}

    def _decode(self, decoder: Any, body: bytes | bytearray) -> Any:
        try:
            return decoder.decode(body)
        except msgspec.ValidationError as error:
            raise RowError(_sentence(str(error))) from None
        except RecursionError:
            raise BodyError("the body is no JSON of rows: it is nested too deeply") from None
        except UnicodeDecodeError:
            raise BodyError("the body is no JSON: it is not UTF-8") from None
        except msgspec.DecodeError as error:
            raise BodyError(f"the body is no JSON: {error}") from None


class RowError(DataError):
    """Row that cannot be scored."""


class TooManyRowsError(DataError):
    """Request with more rows, or values in them, than one may have."""


class BodyError(DataError):
    """Body that is not of the format that it says it is."""


def _length(bag: Any) -> int:
    return 0 if bag is None or bag is msgspec.UNSET else len(bag)


def _sentence(message: str) -> str:
    """An error of msgspec with the number of the row and the name of the feature first."""
    path = _PATH.search(message)
    said = message[: path.start()] if path else message
    if missing := re.fullmatch(r"Object missing required field `(.*)`", said, flags=re.DOTALL):
        said = f"'{missing[1]}' is missing: give it, or null where there is no value"
    else:
        for types, words in _WORDS.items():
            said = said.replace(f"`{types}`", words)
        said = said.replace("`", "").replace("Expected", "expected").replace("got float", "got a number with a point")
    if path is None or path[1] is None:
        return said
    place = (
        {"rows": "row", "items": "item", "user": "user"}[path[1]] if path[2] or path[1] == "user" else f"'{path[1]}'"
    )
    feature = f"'{path[3]}': " if path[3] else ""
    return f"{place}{f' {path[2]}' if path[2] else ''}: {feature}{said}"
