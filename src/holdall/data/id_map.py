"""Id map of one feature, from raw values to ids, as stored in `ids/<feature>.arrow`.

Row number = id, in popularity order: by count in the training split, descending; equal counts by the value's UTF-8
bytes, ascending. The `unseen` row (a null value) represents every value that is not in the map; its count is the
total of values rarer than `rare_below`, and among equal counts it comes last. A missing value is the empty string. In a
folder that `holdall order` made, the ids from `ordered_from` on are in another order.

In a bundle that values were withdrawn from, these are null, too, with a count of 0, and the metadata of the file has
the unseen row.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from holdall.common.errors import ConfigError, DataError
from holdall.data.folder_files import check_other_file
from holdall.data.id_index import IdIndex
from holdall.data.rows import NOT_WHOLE, WHOLE_FLOATS, WHOLE_TEXT
from holdall.data.schema import Schema

IDS_FOLDER = "ids"
FILE_SCHEMA = pa.schema([("value", pa.string()), ("count", pa.int64())])
UNSEEN = b"unseen"  # key of the metadata of a file that has more than one null
ROWS_PER_BATCH = 1 << 20  # of the file: keeps the 32-bit offsets of `string` from overflowing

Array = npt.NDArray[Any]


class IdMap:
    """Values and counts by id, and the lookup of the id of a value.

    The first `apply` builds an index of 16 to 24 bytes per row; a lookup then takes a microsecond or less, and compares
    the strings, so it is exact.
    """

    def __init__(self, values: pa.Array, counts: Array, unseen: int):
        self.values = values.cast(pa.large_string())
        """[num_rows] text; null at the unseen row, and where a value was withdrawn."""
        self.counts = np.asarray(counts, dtype=np.int64)
        """[num_rows] occurrences in the training split, not increasing up to the feature's `ordered_from`."""
        self.unseen = unseen
        assert len(self.values) == len(self.counts)
        assert not self.values[unseen].is_valid

    @property
    def num_rows(self) -> int:
        """Rows of the table: the values, and the unseen row."""
        return len(self.counts)

    @property
    def dtype(self) -> type[np.int32 | np.int64]:
        """The integer that ids are stored as."""
        return id_dtype(self.num_rows)

    def save(self, path: str | Path) -> None:
        table = pa.table({"value": self.values, "count": self.counts})
        schema = FILE_SCHEMA if self.values.null_count == 1 else FILE_SCHEMA.with_metadata({UNSEEN: str(self.unseen)})
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, schema) as writer:
            for start in range(0, self.num_rows, ROWS_PER_BATCH):
                writer.write_table(table.slice(start, ROWS_PER_BATCH).cast(schema))

    @classmethod
    def load(cls, path: str | Path) -> IdMap:
        table = read_file(path)
        values = table["value"].cast(pa.large_string()).combine_chunks()
        nulls = np.flatnonzero(values.is_null().to_numpy(zero_copy_only=False))
        named = (table.schema.metadata or {}).get(UNSEEN)
        unseen = nulls if named is None else nulls[nulls == (int(named) if named.isdigit() else -1)]
        if len(unseen) != 1:
            raise DataError(f"the id map {path} has {len(unseen)} unseen rows instead of one")
        return cls(values, table["count"].to_numpy(), int(unseen[0]))

    def without(self, ids: Array) -> IdMap:
        """This map with the values of some ids withdrawn: nothing is left of them, and they are unseen."""
        is_out = np.zeros(self.num_rows, dtype=bool)
        is_out[ids] = True
        values = self.values.take(pa.array(np.arange(self.num_rows), mask=is_out))  # if_else would keep their bytes
        return IdMap(values, np.where(is_out, 0, self.counts), self.unseen)

    def fingerprint(self) -> str:
        """SHA-256 of the values in the order of their ids; their counts do not matter."""
        _, offsets, data = self.values.buffers()
        start, length = self.values.offset, len(self.values)
        bounds = np.frombuffer(offsets, dtype=np.int64)[start : start + length + 1]
        digest = hashlib.sha256(f"{length} {self.unseen} ".encode())
        digest.update((bounds - bounds[0]).astype("<i8").data)
        digest.update(memoryview(data or b"")[int(bounds[0]) : int(bounds[-1])])
        return digest.hexdigest()

    def apply(self, values: pa.Array | pa.ChunkedArray | Sequence[Any] | Array, *, distinct: bool = False) -> Array:
        """[R] ids of R raw values; null is missing, and a value that is not in the map becomes `unseen`.

        `distinct` says that hardly a value occurs twice, which saves the search for such.
        """
        texts = as_text(values)
        return self.index.find(texts, lambda ids: self.values.take(pa.array(ids)), self.unseen, distinct=distinct)

    @cached_property
    def longest(self) -> int:
        """Bytes of the longest value."""
        return int(pc.max(pc.binary_length(self.values)).as_py() or 0)

    @cached_property
    def index(self) -> IdIndex:
        """Index of the values, without the unseen row."""
        return IdIndex.build(self.values, self.dtype)


def read_file(path: str | Path) -> pa.Table:
    """The columns `value` and `count` of an id map, mapped into memory."""
    try:
        with pa.memory_map(str(path)) as file:
            table = pa.ipc.open_file(file).read_all()
    except FileNotFoundError:
        raise DataError(f"the id map {path} is missing: prepare the data set again") from None
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"the id map {path} cannot be read ({error}): prepare the data set again") from error
    if not table.schema.equals(FILE_SCHEMA):
        columns = ", ".join(f"{field.name} ({field.type})" for field in table.schema)
        raise DataError(f"{path} is not an id map: its columns are {columns}; prepare the data set again")
    if table["count"].null_count:
        raise DataError(f"the id map {path} has values without a count: prepare the data set again")
    return table


def id_dtype(num_rows: int) -> type[np.int32 | np.int64]:
    """int32 while every id below `num_rows` fits."""
    return np.int32 if num_rows < 2**31 else np.int64


def as_text(values: pa.Array | pa.ChunkedArray | Sequence[Any] | Array) -> pa.LargeStringArray:
    """Raw values as text, missing ones as the empty string."""
    array = values if isinstance(values, pa.Array | pa.ChunkedArray) else pa.array(values)
    if is_whole_float(array.type):
        array, wrong = whole_texts(array)
        if len(wrong):
            raise DataError(f"value {wrong[0]} is {values[int(wrong[0])]}, {NOT_WHOLE}")
    if not is_nameable(array.type):
        raise DataError(f"categorical values must be text, integers or booleans, not {array.type}: store them as text")
    if pa.types.is_dictionary(array.type) and pa.types.is_string_view(array.type.value_type):  # Arrow has no cast
        chunks = array.chunks if isinstance(array, pa.ChunkedArray) else [array]
        texts = [chunk.dictionary.cast(pa.large_string()).take(chunk.indices) for chunk in chunks]
        array = pa.chunked_array(texts, pa.large_string())
    array = array.cast(pa.large_string())
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
    return array.fill_null("") if array.null_count else array


def is_nameable(kind: pa.DataType) -> bool:
    """Whether values of this Arrow type have one obvious text. Floats and dates do not: 1.0 or 1?"""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return any(
        test(kind)
        for test in (
            pa.types.is_string,
            pa.types.is_large_string,
            pa.types.is_string_view,
            pa.types.is_integer,
            pa.types.is_boolean,
            pa.types.is_null,
        )
    )


def is_whole_float(kind: pa.DataType) -> bool:
    """Whether values of this Arrow type may be whole numbers that became floats because others are missing."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return bool(pa.types.is_float32(kind) or pa.types.is_float64(kind))


def whole_texts(values: pa.Array | pa.ChunkedArray) -> tuple[pa.LargeStringArray, Array]:
    """Floats, or texts that may be written as such, as the text of the whole numbers that they are, missing ones (null,
    NaN, "") as null; and the places of values that are no whole number, or may be a rounded one."""
    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    if is_whole_float(values.type):
        limit = WHOLE_FLOATS[values.type.bit_width]
        found = values.cast(pa.float64()).to_numpy(zero_copy_only=False)
        missing = np.isnan(found)
        fine = missing | ((found == np.round(found)) & (np.abs(found) < limit))
        numbers = pa.array(np.where(fine & ~missing, found, 0).astype(np.int64), mask=missing)
        return numbers.cast(pa.large_string()), np.flatnonzero(~fine)
    texts = values.cast(pa.large_string()).fill_null("")
    empty = np.asarray(pc.equal(texts, ""))
    fine = empty | np.asarray(pc.match_substring_regex(texts, WHOLE_TEXT))
    plain = pc.replace_substring_regex(pc.if_else(pa.array(fine & ~empty), texts, "0"), r"\.0*$", "")
    try:
        numbers = plain.cast(pa.int64())
    except pa.ArrowInvalid:  # beyond 64 bits
        fine &= np.array([-(2**63) <= int(text) < 2**63 for text in plain.to_pylist()])
        numbers = pc.if_else(pa.array(fine), plain, "0").cast(pa.int64())
    return pc.if_else(pa.array(empty), None, numbers.cast(pa.large_string())), np.flatnonzero(~fine)


def id_map_path(folder: str | Path, feature: str) -> Path:
    """Path of a feature's map; characters that file names cannot have are percent-encoded."""
    return Path(folder) / IDS_FOLDER / f"{quote(feature, safe='')}.arrow"


def load_id_map(folder: str | Path, feature: str, schema: Schema) -> IdMap:
    """The map of a feature of a prepared data set, checked against the hash in its schema."""
    path = id_map_path(folder, feature)
    check_other_file(Path(folder), path, schema)
    return IdMap.load(path)


def load_counts(folder: str | Path, feature: str, schema: Schema) -> npt.NDArray[np.int64]:
    """[num_rows] occurrences of the ids of a feature's table in the training split, over all features of the table.

    The values of the map are not read.
    """
    path, num_rows = id_map_path(folder, feature), schema.feature(feature).num_rows
    check_other_file(Path(folder), path, schema)
    counts = read_file(path)["count"].to_numpy().copy()
    if len(counts) != num_rows or (counts < 0).any():
        raise DataError(f"the id map {path} does not fit schema.json: prepare the data set again")
    return counts


def reserve_id_maps(folder: Path, features: Sequence[str], tables: Sequence[str]) -> None:
    """Create the empty maps of these features, so that names a file cannot have are refused before any row is read.

    `holdall order` names files after the tables, so their names are tried as well.
    """
    (folder / IDS_FOLDER).mkdir()
    for name in dict.fromkeys([*features, *tables]):
        try:
            path = id_map_path(folder, name)
            path.touch(exist_ok=False)
            if name not in features:
                path.unlink()
        except FileExistsError:
            raise ConfigError(
                f"the feature '{name}' and another one have the same file name, {path.name}, on this file system: give "
                f"one of them another name in the schema"
            ) from None
        except (OSError, UnicodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is no text"
            raise ConfigError(
                f"the name {name[:40]!a}... of {len(name)} characters cannot be that of a file ({reason}): give "
                f"the feature or table a shorter name in the schema, and its own as `column`"
            ) from None


def load_id_maps(folder: str | Path) -> dict[str, IdMap]:
    """The maps of a prepared data set, by feature; features that share a table share the object."""
    schema = Schema.load(Path(folder))
    by_table: dict[str, IdMap] = {}
    maps = {}
    for feature in schema.features:
        table = feature.table or feature.name
        if table not in by_table:
            by_table[table] = load_id_map(folder, feature.name, schema)
        maps[feature.name] = by_table[table]
        if maps[feature.name].num_rows != feature.num_rows or maps[feature.name].unseen != feature.unseen:
            raise DataError(f"the id map of '{feature.name}' in {folder} does not fit schema.json: prepare it again")
    return maps
