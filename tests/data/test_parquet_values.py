"""Parquet values that Arrow's reader does not check or polars does not have, and dense values beyond float32."""

from __future__ import annotations

import re
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from holdall.common.errors import DataError
from holdall.data.encode import encode_rows
from holdall.data.prepare import PrepareConfig, prepare
from holdall.data.schema import Schema
from tests.data.raw_files import read_map, read_split

NAN = float("nan")


def run(folder: Path, schema: str, table: pa.Table | str, **options: Any) -> Schema:
    """Prepare a table as Parquet, or text as CSV."""
    (folder / "schema.toml").write_text(schema)
    raw = folder / ("a.csv" if isinstance(table, str) else "a.parquet")
    if isinstance(table, str):
        raw.write_text(table)
    else:
        pq.write_table(table, raw)
    options = {"test": 0.0, **options}
    return prepare([raw], folder / "out", PrepareConfig(format="table", schema=folder / "schema.toml", **options))


def text(*values: bytes, large: bool = False) -> pa.Array:
    """Text of these bytes, whether they are UTF-8 or not."""
    kind = np.int64 if large else np.int32
    offsets = np.cumsum([0, *map(len, values)], dtype=kind)
    buffers = [None, pa.py_buffer(offsets.tobytes()), pa.py_buffer(b"".join(values))]
    return pa.Array.from_buffers(pa.large_string() if large else pa.string(), len(values), buffers)


BAD = [b"a", b"b\xff", "é".encode(), b"\xed\xa0\x80", b""]


@pytest.mark.parametrize("large", [False, True])
def test_text_that_is_not_utf8_is_refused_by_row(tmp_path: Path, large: bool) -> None:
    table = pa.table({"y": [0, 1, 0, 1, 3], "c": text(*BAD, large=large)})
    schema = 'label = "y"\ncategorical = ["c"]'
    reason = "line 2: column 'c' holds text that is not UTF-8: byte 0xff (number 2 of the value)"
    with pytest.raises(DataError, match=re.escape(reason)):
        run(tmp_path, schema, table)
    made = run(tmp_path, schema, table, bad_rows="skip")
    assert (made.source["rows"], made.source["bad_rows"]) == (5, 3)
    assert read_map(tmp_path / "out", "c") == [("a", 1), ("é", 1), (None, 0)]
    listed = [line.split("\t")[1:] for line in (tmp_path / "out/bad_rows.tsv").read_text().splitlines()[1:]]
    assert [line for line, *_ in listed] == ["2", "4", "5"]
    assert listed[0][2] == r"{'c': b'b\xff'}"


def test_lists_of_text_that_is_not_utf8_are_refused_by_row(tmp_path: Path) -> None:
    lists = pa.ListArray.from_arrays(pa.array([0, 1, 3, 3, 5]), text(*BAD))
    schema = 'label = "y"\n[[bag]]\nname = "c"'
    table = pa.table({"y": [0, 1, 0, 1], "c": lists})
    made = run(tmp_path, schema, table, bad_rows="skip")
    assert (made.splits["train"].rows, made.source["bad_rows"]) == (2, 2)
    assert read_map(tmp_path / "out", "c") == [("a", 1), (None, 0)]


def test_a_dictionary_of_text_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    table = pa.table({"y": [0, 1], "c": pa.DictionaryArray.from_arrays(pa.array([0, 1]), text(b"a", b"\xff"))})
    with pytest.raises(DataError, match=r"a\.parquet cannot be read as Parquet \(Invalid UTF8"):
        run(tmp_path, 'label = "y"\ncategorical = ["c"]', table, bad_rows="skip")


def test_nan_is_no_number_in_parquet_as_in_text(tmp_path: Path) -> None:
    schema = 'label = "y"\ndense = ["x"]'
    with pytest.raises(DataError, match="line 3: column 'x' holds 'nan', which is not a finite number"):
        run(tmp_path, schema, "y,x\n0,\n1,nan\n")
    table = pa.table({"y": [0, 1, 1], "x": [None, NAN, 2.0]})
    with pytest.raises(DataError, match=r"line 2: column 'x' holds nan, .* number \(a missing one is null\)"):
        run(tmp_path, schema, table)
    run(tmp_path, schema, table, bad_rows="skip", dense="none")
    assert read_split(tmp_path / "out", "train")["dense"] == [[0.0], [2.0]]


@pytest.mark.parametrize("value", [NAN, float("inf"), 1e39, "nan", "-inf", "1e39"])
def test_new_rows_have_finite_numbers(tmp_path: Path, value: Any) -> None:
    run(tmp_path, 'label = "y"\ndense = ["x"]', "y,x\n0,\n1,1\n", dense="none")
    with pytest.raises(DataError, match=r"column 'x' is (nan|-?inf|1e\+39) in row 1, which is not a finite number"):
        encode_rows(tmp_path / "out", {"x": [None, value]})
    assert encode_rows(tmp_path / "out", {"x": [None, 3.0]}).dense.tolist() == [[0.0], [3.0]]


def test_decimals_of_many_digits_are_numbers(tmp_path: Path) -> None:
    values = [Decimal("0.25"), None, Decimal("-123456789.5"), Decimal("9" * 45)]
    table = pa.table({"y": pa.array([0, 1, 1, 0], pa.decimal256(40, 1)), "x": pa.array(values, pa.decimal256(60, 5))})
    schema = 'label = "y"\ndense = ["x"]'
    with pytest.raises(DataError, match=r"line 4: column 'x' holds 1e.45, which is not a finite number"):
        run(tmp_path, schema, table)
    run(tmp_path, schema, table, bad_rows="skip", dense="none")
    assert read_split(tmp_path / "out", "train") == {
        "label": [0, 1, 1],
        "dense": [[0.25], [0.0], [float(np.float32(-123456789.5))]],
    }


def test_standardised_values_are_finite_and_clipped_ones_are_counted(tmp_path: Path) -> None:
    rows = [f"{n % 2},{1e-100 * (n % 3)},{n % 2}" for n in range(40)]
    (tmp_path / "schema.toml").write_text('label = "y"\ndense = ["tiny", "x"]')
    for name, lines in (("a.csv", rows), ("b.csv", ["1,3e38,1", "0,-1,0", "1,0,3e38"])):
        (tmp_path / name).write_text("\n".join(["y,tiny,x", *lines]) + "\n")
    config = PrepareConfig(format="table", schema=tmp_path / "schema.toml", dense="standard", test_from_last_file=True)
    schema = prepare([tmp_path / "a.csv", tmp_path / "b.csv"], tmp_path / "out", config)
    stored = np.array(read_split(tmp_path / "out", "test")["dense"], dtype=np.float32)
    largest = np.finfo(np.float32).max
    assert stored[:2, 0].tolist() == [largest, -largest]
    assert np.isfinite(stored).all()
    assert schema.source["counts"]["dense_values_clipped"] == int((np.abs(stored) == largest).sum())
    again = encode_rows(tmp_path / "out", {"tiny": [3e38, -1.0, 0.0], "x": [1.0, 0.0, 3e38]})
    assert again.dense.numpy().tobytes() == stored.tobytes()


@pytest.mark.parametrize("column", [{"c": [2**64]}, {"c": [10**400]}, {"c": ["\udcff"]}, {"c": [b"\xff"]}, {"c": [{}]}])
def test_new_rows_of_other_values_are_refused(tmp_path: Path, column: dict[str, Any]) -> None:
    run(tmp_path, 'label = "y"\ncategorical = ["c"]', "y,c\n0,a\n1,b\n")
    with pytest.raises(DataError):
        encode_rows(tmp_path / "out", column)
