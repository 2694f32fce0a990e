"""Random tables: what `prepare` stores of a row and what scoring makes of it are the same, whatever way it comes."""

from __future__ import annotations

import tempfile
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdall.data.batch import Batch, Ids
from holdall.data.dataset import DataSet
from holdall.data.formats.open_to_score import open_to_score
from holdall.data.prepare import PrepareConfig, prepare
from holdall.data.schema import Schema
from holdall.models import DLRMConfig
from holdall.serving.bundle import Origin, Quality, write_bundle
from holdall.serving.file_rows import EncodedRows, encoded_file, read_schema
from holdall.serving.row_comparison import differing_bags
from holdall.serving.scorer import Scorer, load

TOML = """
dense = [{{name = "x", column = "the x", transform = "{transform}"}}, "n"]
categorical = ["word", {{name = "number", table = "shared"}}]
bag = [{{name = "tags", separator = "|"{max_length}}}]
sequence = [{{name = "seen", separator = " ", table = "shared"{max_length}}}]
[label]
column = "y"
{positive}
"""
FLOATS = st.floats(width=64, allow_nan=True, allow_infinity=True)
SPELLINGS = [
    "1",
    "-0",
    "1.5",
    "",
    "+4",
    ".5",
    "5.",
    "1e3",
    "-2E-3",
    "007",
    "1e400",
    "nan",
    "inf",
    "x",
    "1_0",
    " 1",
    "0x1",
]
NUMBERS = {
    pa.float64(): FLOATS,
    pa.float32(): st.floats(width=32),
    pa.int64(): st.integers(-(2**63), 2**63 - 1),
    pa.uint64(): st.integers(0, 2**64 - 1),
    pa.int8(): st.integers(-128, 127),
    pa.bool_(): st.booleans(),
    pa.decimal128(30, 4): st.integers(-(10**20), 10**20).map(lambda number: Decimal(number).scaleb(-4)),
    pa.string(): st.sampled_from(SPELLINGS) | FLOATS.map(repr),
}
TEXT = st.text(st.characters(codec="utf-8", exclude_characters='\x00\r\n"'), max_size=6)
WORDS = st.sampled_from(["a", "b", "c", "", "1", "-1", "true", "é", " a", "a ", "\ufeffa"]) | TEXT
VALUES = {
    pa.string(): WORDS,
    pa.large_string(): WORDS,
    pa.dictionary(pa.int32(), pa.string()): WORDS,
    pa.int64(): st.integers(-3, 3) | st.integers(-(2**63), 2**63 - 1),
    pa.uint8(): st.integers(0, 3),
    pa.bool_(): st.booleans(),
    pa.float64(): st.sampled_from([1.0, -0.0, 2.0, float("nan"), 1.5, 2.0**53]),
    pa.float32(): st.sampled_from([1.0, -3.0, 2.0**24]),
}
LABELS = {
    pa.int64(): st.integers(0, 1) | st.integers(-1, 6),
    pa.float64(): st.sampled_from([0.0, 1.0, 4.0, 4.5, float("nan"), float("inf")]),
    pa.string(): st.sampled_from(["0", "1", "1.0", "4", "", "x", "true", "False"]),
    pa.bool_(): st.booleans(),
}


@st.composite
def columns(draw: st.DrawFn, kinds: dict[pa.DataType, Any], count: int) -> pa.Array:
    kind = draw(st.sampled_from(list(kinds)))
    values = draw(st.lists(st.none() | kinds[kind], min_size=count, max_size=count))
    return pa.array(values, kind)


@st.composite
def tables(draw: st.DrawFn) -> pa.Table:
    count = draw(st.integers(8, 24))
    pieces = st.lists(st.none() | st.sampled_from(["a", "b", "", "c", "é"]), max_size=5)

    def listed(separator: str) -> pa.Array:
        if draw(st.booleans()):
            return pa.array(draw(st.lists(st.none() | pieces, min_size=count, max_size=count)), pa.list_(pa.string()))
        texts = st.none() | pieces.map(lambda values: separator.join(value or "" for value in values))
        return pa.array(draw(st.lists(texts, min_size=count, max_size=count)), pa.string())

    return pa.table(
        {
            "y": draw(columns(LABELS, count)),
            "the x": draw(columns(NUMBERS, count)),
            "n": draw(columns(NUMBERS, count)),
            "word": draw(columns(VALUES, count)),
            "number": draw(columns(VALUES, count)),
            "tags": listed("|"),
            "seen": listed(" "),
        }
    )


def with_good_rows(table: pa.Table) -> pa.Table:
    """The table after two rows that `prepare` takes, so that there are some to train on."""
    one = {"y": 1, "the x": None, "n": None, "word": None, "number": None, "tags": None, "seen": None}
    rows = []
    for label in (0, 1):
        kind = table.schema.field("y").type
        one["y"] = {pa.string(): str(label), pa.bool_(): bool(label)}.get(kind, label)
        rows.append(pa.table({name: pa.array([value], table.schema.field(name).type) for name, value in one.items()}))
    return pa.concat_tables([*rows, table])


def as_text(table: pa.Table) -> pa.Table:
    """The table with the columns that a CSV file can have."""
    for place, name in enumerate(table.column_names):
        column = table[name]
        if pa.types.is_list(column.type):
            separator = "|" if name == "tags" else " "
            texts = [None if v is None else separator.join(piece or "" for piece in v) for v in column.to_pylist()]
            table = table.set_column(place, name, pa.array(texts, pa.string()))
        elif pa.types.is_dictionary(column.type):
            table = table.set_column(place, name, column.cast(pa.string()))
        elif name == "y" and pa.types.is_boolean(column.type):
            table = table.set_column(place, name, column.cast(pa.int8()))
    return table


def bundle_of(data: Path, out: Path) -> Scorer:
    schema, config = Schema.load(data), DLRMConfig(dim=2, bottom=(2,), top=(2,))
    quality = Quality(table_bytes=1, dense_bytes=1)
    origin = Origin(run=None, checkpoint=None, step=None)
    write_bundle(out, config.build(schema), config, schema, data, origin, quality)
    return load(out)


def same(found: Batch, expected: Batch, schema: Schema) -> bool:
    dense = np.array_equal(found.dense.numpy(), expected.dense.numpy())
    return dense and not any(len(differing_bags(found, expected, place)) for place in range(len(schema.features)))


def check_blocks(blocks: list[EncodedRows], expected: Batch, schema: Schema) -> list[int]:
    """Compare rows with those of the data set; the numbers of the good ones."""
    start = 0
    for block in blocks:
        stored = expected.slice(start, start + len(block.batch))
        assert same(block.batch, stored, schema)
        assert block.label.to_pylist() == stored.label.int().tolist()
        start += len(block.batch)
    assert start == len(expected)
    return [block.first_row + int(place) for block in blocks for place in block.places]


def check(folder: Path, table: pa.Table, kind: str, transform: str, max_length: int | None, positive: str) -> None:
    limit = "" if max_length is None else f", max_length = {max_length}"
    toml = TOML.format(transform=transform, max_length=limit, positive=positive and f'positive = "{positive}"')
    (folder / "schema.toml").write_text(toml)
    raw = folder / f"rows.{kind}"
    if kind == "parquet":
        pq.write_table(table, raw, row_group_size=7)
    else:
        pa_csv.write_csv(table, raw, pa_csv.WriteOptions(quoting_style="needed"))
    config = PrepareConfig(format="table", schema=folder / "schema.toml", test=0.0, bad_rows="skip", rare_below=2)
    schema = prepare([raw], folder / "data", config)
    (folder / "schema.toml").unlink()
    train = DataSet(folder / "data", "train")
    expected = train.slice(0, len(train))
    scorer = bundle_of(folder / "data", folder / "bundle")
    files = open_to_score([raw], folder / "out.parquet", read_schema(scorer))
    good = []
    for fast in (True, False):
        blocks = list(encoded_file(scorer, files, raw, fast=fast))
        # A row without a label is scored, and not trained on.
        assert sum(block.num_rows for block in blocks) == table.num_rows
        labelled = [with_labels(block) for block in blocks]
        good = check_blocks(labelled, expected, schema)
        assert schema.source["bad_rows"] == table.num_rows - len(good)
    if kind == "parquet":
        renamed = table.take(pa.array(good, pa.int64())).rename_columns({"the x": "x"})
        assert same(scorer.encode(renamed), expected, schema)
        assert same(scorer.encode(renamed.to_pylist()), expected, schema)


def with_labels(block: EncodedRows) -> EncodedRows:
    """The rows of a block that have a label."""
    given_labels = np.flatnonzero(np.asarray(block.label.is_valid()))
    if len(given_labels) == len(block.places):
        return block
    return EncodedRows(
        source=block.source,
        batch=rows_of(block.batch, given_labels),
        label=block.label.take(pa.array(given_labels)),
        kept=[],
        places=block.places[given_labels],
        num_rows=block.num_rows,
        first_row=block.first_row,
        position=block.position,
    )


def rows_of(batch: Batch, rows: np.ndarray) -> Batch:
    """The named rows of a batch of bags."""
    values, lengths = [], []
    for feature in range(batch.ids.num_features):
        found, offsets, _ = batch.ids.bag(feature)
        assert offsets is not None
        pieces = [found[offsets[row] : offsets[row + 1]] for row in rows.tolist()]
        values += pieces
        lengths += map(len, pieces)
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    ids = Ids(torch.cat([torch.zeros(0, dtype=torch.int32), *values]), offsets, batch.ids.num_features)
    return Batch(batch.dense[rows], ids, batch.label[rows])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["parquet", "csv"])
@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    table=tables(),
    transform=st.sampled_from(["log", "standard", "none"]),
    max_length=st.sampled_from([None, 1, 3]),
    positive=st.sampled_from(["", ">= 4", "!= 0", "< 1", "== '1'"]),
)
def test_a_row_is_scored_as_it_was_prepared(
    kind: str, table: pa.Table, transform: str, max_length: int | None, positive: str
) -> None:
    table = with_good_rows(table)
    if "'" in positive and table["y"].type in (pa.float64(), pa.bool_()):
        positive = ""
    if kind == "csv":
        table = as_text(table)
    with tempfile.TemporaryDirectory() as folder:
        check(Path(folder), table, kind, transform, max_length, positive)
