"""Raw rows: every form of them becomes what `prepare` makes of the same values, and what it refuses is refused."""

from __future__ import annotations

import datetime
import random
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from holdall.common.errors import DataError
from holdall.data.dataset import DataSet
from holdall.data.encode import Encoder
from holdall.data.loader import Loader
from holdall.data.prepare import PrepareConfig, prepare
from holdall.data.schema import Schema
from holdall.serving.raw_rows import RowFormat

TOML = """
label = "y"
dense = ["float", "int", "huge", "bool", "text", "decimal", "none"]
categorical = ["word", "number", "unsigned", "flag", "coded", "nothing"]
[[bag]]
name = "tags"
max_length = 2
[[bag]]
name = "numbers"
[[sequence]]
name = "history"
max_length = 3
"""


def made_up_rows(count: int = 200) -> pa.Table:
    """Every type of column that `prepare` reads, with nulls and empty texts."""
    draw = random.Random(0)

    def some(*values: Any) -> list[Any]:
        return [draw.choice([None, *values]) for _ in range(count)]

    words = ["a", "b", "", "é", "日本", "x y", "007", "7", "true", "1.0", "\x00"]
    lists = [[], ["a"], ["a", "", "b"], ["b", None, "c", "a", "d"], ["", None]]
    return pa.table(
        {
            "y": [draw.randint(0, 1) for _ in range(count)],
            "float": some(0.1, -3.7, 1e-300, 3e38),
            "int": pa.array(some(0, 5, -9), pa.int16()),
            "huge": pa.array(some(2**53 + 1, 2**62 + 1, 2**64 - 1), pa.uint64()),
            "bool": some(True, False),
            "text": some("1.5", "", "-2e3", "+4", ".5"),
            "decimal": pa.array(some(Decimal("123456789.123"), Decimal("0.1")), pa.decimal128(20, 4)),
            "none": pa.nulls(count),
            "word": some(*words),
            "number": some(7, -1, 2**63 - 1),
            "unsigned": pa.array(some(7, 2**64 - 1), pa.uint64()),
            "flag": some(True, False),
            "coded": pa.array(some("a", "b", "")).dictionary_encode(),
            "nothing": pa.nulls(count),
            "tags": pa.array(some(*lists), pa.list_(pa.string())),
            "numbers": pa.array(some([1, None, 2], [], [3]), pa.large_list(pa.int32())),
            "history": pa.array(some(*lists), pa.large_list(pa.large_string())),
        }
    )


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, pa.Table]:
    folder = tmp_path_factory.mktemp("rows")
    (folder / "schema.toml").write_text(TOML)
    table = made_up_rows()
    pq.write_table(table, folder / "a.parquet")
    config = PrepareConfig(format="table", schema=folder / "schema.toml", test=0.0, dense="log")
    prepare([folder / "a.parquet"], folder / "data", config)
    return folder, table


def row_format(folder: Path, separators: dict[str, str] | None = None) -> RowFormat:
    schema = Schema.load(folder / "data")
    return replace(RowFormat.of(schema, schema.cardinalities), separators=separators or {})


def as_polars(table: pa.Table, _: Path) -> Any:
    return pl.from_arrow(table)


def as_pandas(table: pa.Table, _: Path) -> Any:
    pytest.importorskip("pandas")
    import pandas as pd

    return table.to_pandas(types_mapper=pd.ArrowDtype)


def as_arrays(table: pa.Table, _: Path) -> Any:
    return {name: table[name] for name in table.column_names}


FORMS = {
    "Arrow": lambda table, _: table,
    "record batch": lambda table, _: table.combine_chunks().to_batches()[0],
    "slices": lambda table, _: pa.concat_tables([table[:50], table[50:]]),
    "Parquet": lambda _, folder: folder / "a.parquet",
    "name of a Parquet file": lambda _, folder: str(folder / "a.parquet"),
    "dicts": lambda table, _: table.to_pylist(),
    "columns": lambda table, _: table.to_pydict(),
    "columns of arrays": as_arrays,
    "polars": as_polars,
    "pandas": as_pandas,
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_rows_is_what_prepare_makes_of_it(form: str, prepared: tuple[Path, pa.Table]) -> None:
    folder, table = prepared
    expected = next(iter(Loader(DataSet(folder / "data", "train"), len(table), shuffle="none").epoch(0)))
    found = Encoder(folder / "data").encode(row_format(folder).table(FORMS[form](table, folder)))
    assert found.dense.numpy().tobytes() == expected.dense.numpy().tobytes()
    assert torch.equal(found.ids.values, expected.ids.values)
    assert found.ids.offsets is not None
    assert expected.ids.offsets is not None
    assert torch.equal(found.ids.offsets, expected.ids.offsets)


@pytest.mark.parametrize("form", ["Arrow", "dicts", "columns", "polars"])
def test_texts_of_bags_are_split_at_their_separator(form: str, prepared: tuple[Path, pa.Table]) -> None:
    folder, table = prepared
    texts = ["a|b", "", None, "|a||b|", "c", "never|a"]
    joined = table[:6].set_column(table.column_names.index("tags"), "tags", pa.array(texts))
    encoder = Encoder(folder / "data")
    found = encoder.encode(row_format(folder, {"tags": "|"}).table(FORMS[form](joined, folder)))
    lists = [["a", "b"], [], [], ["a", "b"], ["c"], ["never", "a"]]
    apart = table[:6].set_column(table.column_names.index("tags"), "tags", pa.array(lists))
    assert torch.equal(found.ids.values, encoder.encode(apart).ids.values)


def test_other_columns_are_ignored(prepared: tuple[Path, pa.Table]) -> None:
    folder, table = prepared
    form, encoder = row_format(folder), Encoder(folder / "data")
    odd = table.append_column("other", pa.array([object.__name__] * len(table))).set_column(
        0, "y", pa.nulls(len(table))
    )
    assert torch.equal(encoder.encode(form.table(odd)).ids.values, encoder.encode(form.table(table)).ids.values)
    rows = [{**row, "other": object(), "y": "no label"} for row in table[:3].to_pylist()]
    assert torch.equal(encoder.encode(form.table(rows)).ids.values, encoder.encode(form.table(table[:3])).ids.values)


def numpy_scalars(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "float": np.float32(2.5), "number": np.int8(7), "flag": np.bool_(True), "bool": np.bool_(False)}


def test_numpy_s_scalars_are_values_too(prepared: tuple[Path, pa.Table]) -> None:
    folder, table = prepared
    (row,) = table[:1].to_pylist()
    form, encoder = row_format(folder), Encoder(folder / "data")
    found = encoder.encode(form.table([numpy_scalars(row)]))
    plain = encoder.encode(form.table([{**row, "float": 2.5, "number": 7, "flag": True, "bool": False}]))
    assert torch.equal(found.ids.values, plain.ids.values)
    assert torch.equal(found.dense, plain.dense)


WRONG_VALUES: list[tuple[str, Any, str]] = [
    ("word", 1.5, r"row 1: feature 'word' is 1.5, which is not the exact value of a whole number"),
    ("word", 2.0**53, r"row 1: feature 'word' is 9007199254740992.0, which is not the exact value"),
    ("word", ["a"], r"row 1: feature 'word' is \['a'\], and needs one text"),
    ("word", {"a": 1}, "row 1: feature 'word' is .* needs one text"),
    ("word", b"a", "row 1: feature 'word' is b'a'"),
    ("word", "\udcff", "row 1: feature 'word' is text that is not valid Unicode"),
    ("word", 2**64, "row 1: feature 'word' is an integer of more than 64 bits"),
    ("word", 10**5000, "row 1: feature 'word' is an integer of more than 64 bits"),
    ("word", datetime.date(2020, 1, 1), "row 1: feature 'word' is datetime"),
    ("word", np.array([1, 2]), "row 1: feature 'word' is array"),
    ("word", "x" * 70_000, "feature 'word' has a value of 70,000 bytes in row 1, but 65,536 are the most"),
    ("tags", "a|b", r"row 1: feature 'tags' is the text 'a\|b', and needs a list"),
    ("tags", 3, "row 1: feature 'tags' is 3, and needs a list"),
    ("tags", {"a": 1}, "row 1: feature 'tags' is {'a': 1}, and needs a list"),
    ("tags", [["a"]], r"row 1: feature 'tags' is \['a'\], and needs one text"),
    ("tags", ["a", 1.5], "row 1: feature 'tags' is the number 1.5"),
    ("tags", ["a", "b", 2**64], "row 1: feature 'tags' is an integer of more than 64 bits"),  # beyond max_length
    ("tags", ["\ud800"], "row 1: feature 'tags' is text that is not valid Unicode"),
    ("float", float("nan"), r"row 1: dense column 'float' is nan, .* \(a missing one is null\)"),
    ("float", float("inf"), "row 1: dense column 'float' is inf, which is not a finite number"),
    ("float", 1e39, "row 1: dense column 'float' is 1e"),
    ("float", 10**400, "row 1: dense column 'float' is 1000"),
    ("float", 10**5000, "row 1: dense column 'float' is an integer of 16,610 bits"),
    ("float", "1_000", "row 1: dense column 'float' is '1_000', which is not a finite number"),
    ("float", "nan", "row 1: dense column 'float' is 'nan'"),
    ("float", [1.0], r"row 1: dense column 'float' is \[1.0\]"),
    ("float", np.array([1.0, 2.0]), "row 1: dense column 'float' is array"),
    ("float", 1j, "row 1: dense column 'float' is 1j"),
]


@pytest.mark.parametrize("form", ["dicts", "columns"])
@pytest.mark.parametrize(("name", "value", "message"), WRONG_VALUES, ids=range(len(WRONG_VALUES)))
def test_a_wrong_value_is_refused_by_row_and_name(
    name: str, value: Any, message: str, form: str, prepared: tuple[Path, pa.Table]
) -> None:
    folder, table = prepared
    rows = table[:2].to_pylist()
    rows[1][name] = value
    given: Any = rows if form == "dicts" else {name: [row[name] for row in rows] for name in rows[0]}
    with pytest.raises(DataError, match=message):
        Encoder(folder / "data").encode(row_format(folder).table(given))


BAD_TEXT = pa.Array.from_buffers(
    pa.string(), 2, [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0\2\0\0\0"), pa.py_buffer(b"a\xff")]
)
WRONG_COLUMNS: list[tuple[str, Any, str]] = [
    ("word", pa.array([1.0, 2.5]), "feature 'word' is 2.5 in row 1, which is not the exact value of a whole number"),
    ("word", pa.array([["a"], ["b"]]), "feature 'word' needs text, not list"),
    ("word", BAD_TEXT, "feature 'word' is text that is not UTF-8 in row 1"),
    ("tags", pa.array(["a", "b"]), "bag 'tags' needs a list of texts, integers or booleans a row, not string"),
    ("tags", pa.array([[1.0], [2.0]]), "bag 'tags' needs a list of texts, integers or booleans a row, not list<"),
    ("tags", pa.ListArray.from_arrays(pa.array([0, 0, 2]), BAD_TEXT), "'tags' .*not UTF-8 in row 1"),
    ("float", pa.array([1.0, float("nan")]), "column 'float' is nan in row 1, which is not a finite number"),
    ("float", pa.array(["1", "x"]), "column 'float' is 'x' in row 1, which is not a number"),
    ("float", pa.array([datetime.date(2020, 1, 1)] * 2), "column 'float' is of type date32"),
    ("float", pa.array([b"1", b"2"]), "column 'float' is of type binary"),
]


@pytest.mark.parametrize(("name", "column", "message"), WRONG_COLUMNS, ids=[message for *_, message in WRONG_COLUMNS])
def test_a_wrong_column_is_refused_by_name(
    name: str, column: Any, message: str, prepared: tuple[Path, pa.Table]
) -> None:
    folder, table = prepared
    wrong = table[:2].set_column(table.column_names.index(name), name, column)
    with pytest.raises(DataError, match=message):
        Encoder(folder / "data").encode(row_format(folder).table(wrong))


def test_rows_that_are_no_rows_are_refused(prepared: tuple[Path, pa.Table]) -> None:
    folder, table = prepared
    form, rows = row_format(folder), table[:3].to_pylist()
    (folder / "a.csv").write_text("word\na\n")
    (folder / "b.parquet").write_bytes(b"PAR1 nothing PAR1")
    columns = table[:3].to_pydict()
    for given, message in [
        ([rows[0], "text"], "row 1 is a str instead of a dict"),
        ([rows[0], {**rows[1], "word": 1.5}], "row 1: feature 'word'"),
        (
            [rows[0], {name: value for name, value in rows[1].items() if name != "word"}],
            "row 1: feature 'word' is missing",
        ),
        ([{name: value for name, value in rows[1].items() if name != "int"}], "row 0: dense column 'int' is missing"),
        ([{name: value for name, value in rows[1].items() if name != "tags"}], "row 0: feature 'tags' is missing"),
        (rows[0], "is one value, not a column: give one row as a list of one dict"),
        ({**columns, "word": ["a"]}, "column 'word' has 1 rows and column 'float' 3"),
        ({name: column for name, column in columns.items() if name != "word"}, "the rows have no column 'word'"),
        (table.drop(["word"]), "the rows have no column 'word'"),
        (table.append_column("word", table["word"]), "the rows have 2 columns named 'word'"),
        (3, "rows cannot be a int"),
        ({**columns, "word": 3}, "column 'word' is one value"),
        ({**columns, "word": "abc"}, "column 'word' is one value"),
        ({**columns, "word": np.array(["a", 1.5, {}], dtype=object)}, "column 'word' is not a column of one type"),
        (folder / "a.csv", "a.csv has no column 'float'"),
        (folder / "none.csv", "no such file"),
        (folder / "b.parquet", "b.parquet cannot be read as Parquet"),
        (folder / "c.parquet", "c.parquet cannot be read as Parquet"),
    ]:
        with pytest.raises(DataError, match=message):
            form.table(given)


NAMED = """
label = "y"
dense = ["x"]
[[categorical]]
name = "site"
column = "s"
[[bag]]
name = "tags"
column = "t"
separator = "|"
"""


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_files_are_read_by_the_columns_of_their_layout(kind: str, tmp_path: Path) -> None:
    rows = [{"y": i % 2, "x": i / 3, "s": f"s{i % 5}", "t": "|".join(["a", "b", "c"][: i % 4])} for i in range(40)]
    frame = pl.DataFrame(rows)
    (tmp_path / "schema.toml").write_text(NAMED)
    raw = tmp_path / f"raw.{kind}"
    unlabelled = tmp_path / f"unlabelled.{kind}"
    if kind == "csv":
        frame.write_csv(raw)
        frame.drop("y").write_csv(unlabelled)
    else:
        frame.write_parquet(raw)
        frame.drop("y").write_parquet(unlabelled)
    prepare([raw], tmp_path / "data", PrepareConfig(format="table", schema=tmp_path / "schema.toml", test=0.0))
    expected = next(iter(Loader(DataSet(tmp_path / "data", "train"), 40, shuffle="none").epoch(0)))
    schema = Schema.load(tmp_path / "data")
    form, encoder = RowFormat.of(schema, schema.cardinalities), Encoder(tmp_path / "data")
    named = [{"x": row["x"], "site": row["s"], "tags": row["t"]} for row in rows]
    for given in (raw, unlabelled, str(raw), named):
        found = encoder.encode(form.table(given))
        assert torch.equal(found.ids.values, expected.ids.values)
        np.testing.assert_allclose(found.dense, expected.dense, rtol=1e-6)
    if kind == "csv":
        unlabelled.write_text("x,s,t\n1,a,b\nnan,a,b\n")
        with pytest.raises(DataError, match=r"unlabelled.csv, line 3: column 'x' holds 'nan'"):
            form.table(unlabelled)
    frame[:0].write_parquet(tmp_path / "empty.parquet")
    assert form.table(tmp_path / "empty.parquet").num_rows == 0
