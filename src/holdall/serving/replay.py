"""Replay of raw rows: each row as a scorer encodes its raw values, beside the row that `prepare` stored for it.

Raw files are read by the readers of `prepare`, with the options that `schema.json` keeps, so every row comes with its
split, and the rows of a split come in the order of its files. Where the files are gone, raw values are those behind the
ids of the stored rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from holdall.common.decode import decode
from holdall.common.errors import DataError, HoldallError
from holdall.data.batch import Batch
from holdall.data.dataset import DataSet
from holdall.data.formats.registry import FORMATS
from holdall.data.formats.table import read_table, table_data
from holdall.data.id_map import IdMap, load_id_maps
from holdall.data.passes import SplitRule
from holdall.data.prepare import PrepareConfig
from holdall.data.raw_data import RawData
from holdall.data.rows import Rows, import_polars
from holdall.data.schema import SCHEMA_FILE, Schema
from holdall.data.splits import SPLITS
from holdall.data.stored_layout import OWN_READER, stored_layout
from holdall.serving.file_rows import named_columns
from holdall.serving.scorer import Scorer

Array = npt.NDArray[Any]
BLOCK_ROWS = 1 << 15


@dataclass(frozen=True)
class ReplayedRows:
    """R rows of one split."""

    found: Batch
    """As the scorer encodes them, with the labels of the raw rows where these are known."""
    expected: Batch
    """As the data set folder has them."""
    raw: pa.Table
    """Raw values, by the names of the schema."""
    name_of: Callable[[int], str]
    """Place of a row, for people."""


@dataclass(frozen=True)
class RawSource:
    """Raw files of a data set, and the rule that gives each of their rows a split."""

    raw: RawData
    rule: SplitRule

    @classmethod
    def find(cls, schema: Schema) -> RawSource | str:
        """The files that a data set was prepared from; or, in a few words, why they cannot be read again."""
        listed = schema.source.get("files", [])
        stored = stored_layout(schema)
        name = stored[0] if stored else schema.source.get("format")
        if not listed or "options" not in schema.source:
            return "the data set was not prepared from raw files"
        if name == OWN_READER or name not in FORMATS:
            return "the data set was prepared by a reader that is not of Holdall"
        files = [Path(file["name"]) for file in listed]
        for path, file in zip(files, listed, strict=True):
            if not path.is_file():
                return f"the raw file {path} is gone"
            if path.stat().st_size != file["bytes"]:
                return f"the raw file {path} has another size than it had"
        if name == "table" and stored is None:
            return "the data set was prepared by an earlier version, which did not keep the layout of a table"
        import_polars()
        tables = name in ("criteo", "table")
        options = {**schema.source["options"], "schema": None, "format": "criteo" if tables else name}
        config = decode(options, PrepareConfig, SCHEMA_FILE, inside="source.options", error=DataError)
        if tables and stored is not None:
            raw = table_data(stored[1], files, read_table, config)
        else:
            raw = FORMATS[name](files, Path("unused"), config)
        last = raw.files[-1] if config.test_from_last_file else None
        return cls(raw, SplitRule(valid=config.valid_fraction, test=config.test, seed=config.seed, test_file=last))


def replayed(scorer: Scorer, source: RawSource, data: Path, schema: Schema) -> Iterator[ReplayedRows]:
    """The rows of raw files, in the order of reading, split by split within a block."""
    splits = {name: DataSet(data, name) for name in schema.splits}
    taken = dict.fromkeys(splits, 0)
    first_row = 0
    for file in source.raw.files:
        first_of_file = first_row
        with closing(source.raw.read(file)) as blocks:
            for rows in blocks:
                drawn = rows.splits
                if drawn is None:
                    drawn = source.rule.draw(file, rows.numbers + first_of_file)
                first_row += rows.num_rows
                for split in np.unique(drawn).tolist():
                    name, chosen = SPLITS[split], np.flatnonzero(drawn == split)
                    start, stop = taken.get(name, 0), taken.get(name, 0) + len(chosen)
                    if name not in splits or stop > len(splits[name]):
                        raise DataError(
                            f"{file} gives more rows of the {name} split than {data} has: it was changed after it was "
                            f"prepared; restore it, or move it away to verify the rows of {data} alone"
                        )
                    taken[name] = stop
                    expected = splits[name].slice(start, stop)
                    yield _replayed(scorer, source, rows, chosen, expected, f"{file}, row ")
    for name, count in taken.items():
        if count < len(splits[name]):
            raise DataError(
                f"the raw files of {data} give {count:,} rows of the {name} split, which has {len(splits[name]):,}: "
                f"they were changed after they were prepared; restore them, or move them away to verify the stored "
                f"rows alone"
            )


def _replayed(
    scorer: Scorer, source: RawSource, rows: Rows, chosen: Array, expected: Batch, place: str
) -> ReplayedRows:
    table, numbers = rows.frame[chosen].to_arrow(), rows.numbers[chosen]
    raw = named_columns(table, source.raw.layout)
    return ReplayedRows(
        found=replace(scorer.encode(raw), label=torch.from_numpy(table["label"].to_numpy().astype(np.float32))),
        expected=expected,
        raw=raw,
        name_of=lambda row: f"{place}{numbers[row] + 1}",
    )


def rebuilt(scorer: Scorer, data: Path, schema: Schema) -> Iterator[ReplayedRows]:
    """The stored rows of a data set, with the raw values behind their ids; dense values are taken as they are."""
    maps = {name: id_map for name, id_map in load_id_maps(data).items() if name in scorer.reads}
    unseen = {name: unknown_value(id_map) for name, id_map in maps.items()}
    for name in (split for split in SPLITS if split in schema.splits):
        split = DataSet(data, name)
        for start in range(0, len(split), BLOCK_ROWS):
            expected = split.slice(start, min(start + BLOCK_ROWS, len(split)))
            columns: dict[str, pa.Array] = {
                column.name: pa.nulls(len(expected), pa.float64()) for column in schema.dense
            }
            for place, feature in enumerate(schema.features):
                if feature.name not in maps:
                    continue
                ids, offsets, _ = expected.ids.bag(place)
                values = maps[feature.name].values.take(pa.array(ids.numpy())).fill_null(unseen[feature.name])
                if not feature.one_hot:
                    bounds = np.arange(len(expected) + 1) if offsets is None else offsets.numpy()
                    values = pa.LargeListArray.from_arrays(pa.array(bounds, pa.int64()), values)
                columns[feature.name] = values
            raw = pa.table(columns)
            found = replace(scorer.encoder.encode(raw, as_mapped=True), dense=expected.dense, label=expected.label)
            yield ReplayedRows(found, expected, raw, partial(_stored_place, name, start))


def _stored_place(split: str, start: int, row: int) -> str:
    return f"row {start + row + 1} of the {split} split"


def unknown_value(id_map: IdMap) -> str:
    """A text that is not in a map."""
    for number in range(id_map.num_rows + 1):
        text = f"holdall unseen {number}"
        if id_map.apply([text])[0] == id_map.unseen:
            return text
    raise AssertionError


def check_columns(found: Schema, expected: Schema, where: Path) -> None:
    """Raise unless two schemas have the same columns, of the same kinds; what is behind their ids may differ."""
    for kind in ("dense", "features"):
        ours, theirs = getattr(expected, kind), getattr(found, kind)
        if [column.name for column in ours] != [column.name for column in theirs]:
            raise HoldallError(
                f"{where} has other {kind} than the data set of the run, so its rows cannot be compared: name the run "
                f"that it was released from"
            )
    for ours, theirs in zip(expected.features, found.features, strict=True):
        if ours.kind != theirs.kind:
            raise HoldallError(
                f"{where} has a {theirs.kind} '{ours.name}' where the data set of the run has a {ours.kind}: name the "
                f"run that it was released from"
            )
