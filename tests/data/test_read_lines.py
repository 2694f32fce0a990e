"""JSON lines, libSVM text, and Parquet structs: the rows that a table of the same content gives."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from holdall.common.errors import DataError
from holdall.data.dataset import DataSet
from holdall.data.encode import encode_rows
from holdall.data.formats.open_to_score import open_to_score
from holdall.data.infer_schema import schema as infer
from holdall.data.prepare import PrepareConfig, prepare
from holdall.data.schema import Schema
from tests.data.raw_files import read_map, read_split

TOML = """
label = "click"
dense = [{ name = "price", transform = "none" }]
categorical = ["user.city", { name = "age", column = "user.age" }, { name = "x", cross = ["user.city", "site"] }]
bag = [{ name = "tags", separator = "|" }]
"""
ROWS: list[dict[str, Any]] = [
    {"click": True, "price": 1.5, "user": {"city": "köln", "age": 30.0}, "site": "a", "tags": ["x", "y"], "other": {}},
    {"click": False, "price": None, "user": {"city": "paris", "age": None}, "site": "b", "tags": []},
    {"click": True, "price": 2, "user": None, "site": "a", "tags": None},
    {"click": False, "price": 16777219, "user": {"city": "", "age": 7.0}, "site": "b", "tags": ["y"]},
]


def run(folder: Path, raw: Path, toml: str = TOML, **options: Any) -> Schema:
    (folder / "schema.toml").write_text(toml, encoding="utf-8")
    options = {"test": 0.0, "overwrite": True, "format": "table", **options}
    return prepare([raw], folder / "out", PrepareConfig(schema=folder / "schema.toml", **options))


def json_file(path: Path, rows: list[Any]) -> Path:
    text = "".join((row if isinstance(row, str) else json.dumps(row, ensure_ascii=False)) + "\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def parquet_file(path: Path) -> Path:
    pq.write_table(pa.Table.from_pylist([{**row, "other": None} for row in ROWS]), path)
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.ndjson", "a.json.gz"])
def test_json_lines_are_prepared_as_parquet_structs_are(name: str, tmp_path: Path) -> None:
    structs = run(tmp_path, parquet_file(tmp_path / "a.parquet"))
    rows = read_split(tmp_path / "out", "train")
    assert [text for text, _ in read_map(tmp_path / "out", "age")] == ["", "30", "7", None]
    assert {text for text, _ in read_map(tmp_path / "out", "user.city")} == {"", "köln", "paris", None}
    lines = run(tmp_path, json_file(tmp_path / name, ROWS))
    assert read_split(tmp_path / "out", "train") == rows
    assert (lines.features, lines.ids) == (structs.features, structs.ids)
    assert rows["dense"] == [[1.5], [0.0], [2.0], [np.float32(16777219)]]


def test_nested_rows_and_frames_are_encoded_alike(tmp_path: Path) -> None:
    run(tmp_path, parquet_file(tmp_path / "a.parquet"))
    stored = DataSet(tmp_path / "out").slice(0, 4)
    table = pq.read_table(tmp_path / "a.parquet")
    columns = {"price": "price", "user.city": "user.city", "age": "user.age", "site": "site", "tags": "tags"}
    flat = table.flatten()
    found = encode_rows(tmp_path / "out", pa.table({name: flat[column] for name, column in columns.items()}))
    assert torch.equal(found.ids.values, stored.ids.values)
    raw = open_to_score([json_file(tmp_path / "b.jsonl", ROWS)], tmp_path / "x", Schema.load(tmp_path / "out"))
    (rows,) = raw.read(raw.files[0])
    assert rows.frame["feature0"].to_list() == ["köln", "paris", "", ""]
    assert rows.frame["label"].to_list() == [1, 0, 1, 0]
    without = [{name: value for name, value in row.items() if name != "click"} for row in ROWS]
    json_file(tmp_path / "b.jsonl", without)
    (rows,) = raw.read(raw.files[0])
    assert rows.frame["label"].to_list() == [None] * 4


def test_frames_with_structs_are_prepared(tmp_path: Path) -> None:
    table = pq.read_table(parquet_file(tmp_path / "a.parquet"))
    prepare(table, tmp_path / "f", PrepareConfig(test=0.0), label="click", categorical=["user.city"])
    assert {text for text, _ in read_map(tmp_path / "f", "user.city")} == {"", "köln", "paris", None}


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "the line is no JSON object"),
        ("[1]", r"the line is \[1\] instead of a JSON object"),
        ("", "an empty line"),
        ({**ROWS[0], "site": ["a"]}, "column 'site' holds a list: name it as a bag or sequence"),
        ({**ROWS[0], "site": {"a": 1}}, "column 'site' holds an object: name its fields, as user.city"),
        ({**ROWS[0], "site": 1.5}, "column 'site' holds 1.5, which is not the exact value of a whole number"),
        ({**ROWS[0], "price": "much"}, "column 'price' holds 'much', which is not a finite number"),
        ({**ROWS[0], "price": float("nan")}, "column 'price' holds 'NaN', which is not a finite number"),
        ({**ROWS[0], "click": None}, r"the label \(column 'click'\) is missing"),
        ({**ROWS[0], "click": 2}, r"the label \(column 'click'\) is '2' instead of 0 or 1"),
        ('{"site": "\\ud800"}', "column 'site' holds text that is not valid Unicode"),
    ],
)
def test_a_wrong_line_is_refused_by_its_number(line: Any, reason: str, tmp_path: Path) -> None:
    path = json_file(tmp_path / "a.jsonl", [ROWS[0], line, ROWS[1]])
    with pytest.raises(DataError, match=rf"a\.jsonl, line 2: .*{reason}"):
        run(tmp_path, path)
    assert run(tmp_path, path, bad_rows="skip").splits["train"].rows == 2


def test_a_column_that_no_line_has_is_refused(tmp_path: Path) -> None:
    path = json_file(tmp_path / "a.jsonl", ROWS)
    with pytest.raises(DataError, match=r"no line of .*a\.jsonl has a column 'user\.town'.*user\.city"):
        run(tmp_path, path, TOML.replace('"user.city"', '"user.town"'))


def test_a_schema_of_json_lines_is_guessed(tmp_path: Path) -> None:
    rows = [{**ROWS[n % 4], "tags": ["x", f"t{n % 5}"], "user": {"city": f"c{n % 7}"}, "id": n} for n in range(200)]
    made = infer(json_file(tmp_path / "a.jsonl", rows))
    assert '"user.city",  # 7 different values' in made
    assert '"tags",  # lists' in made
    (tmp_path / "a.toml").write_text(made, encoding="utf-8")
    assert run(tmp_path, tmp_path / "a.jsonl", made).splits["train"].rows == 200


# --- libSVM ---------------------------------------------------------------------------------------------------------

SVM = "+1 3:1 7:1.0 9:0 # a comment\n-1 7:1\n1\n"


def libsvm(folder: Path, text: str, **options: Any) -> Schema:
    (folder / "train.txt").write_text(text)
    config = PrepareConfig(format="libsvm", test=0.0, overwrite=True, **options)
    return prepare([folder / "train.txt"], folder / "out", config)


def test_libsvm_lines_are_bags_of_indices(tmp_path: Path) -> None:
    schema = libsvm(tmp_path, SVM)
    assert read_map(tmp_path / "out", "index") == [("7", 2), ("3", 1), (None, 0)]
    rows = read_split(tmp_path / "out", "train")
    assert (rows["label"], rows["index"]) == ([1, 0, 1], [[1, 0], [0], []])
    raw = open_to_score([tmp_path / "train.txt"], tmp_path / "x", schema, format="libsvm")
    (found,) = raw.read(raw.files[0])
    assert found.frame["feature0"].to_list() == [["3", "7"], ["7"], []]


def test_indices_with_values_are_columns_of_a_schema(tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text(
        'dense = [{ name = "age", column = "2", transform = "none" }]\nbag = ["index"]\n'
        '[label]\ncolumn = "label"\npositive = ">= 4"'
    )
    libsvm(tmp_path, "4 2:0.5 3:1\n3.5 3:1\n", schema=tmp_path / "s.toml")
    rows = read_split(tmp_path / "out", "train")
    assert (rows["label"], rows["dense"]) == ([1, 0], [[0.5], [0.0]])


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("1 5:0.5", "index 5 has the value '0.5', and only 1 makes it an id: name it in a schema, as dense = [\"5\"]"),
        ("1 5:10", "index 5 has the value '10'"),
        ("1 2:5:1", "'2:5:1' is not index:value"),
        ("1 5", "'5' is not index:value"),
        ("yes 5:1", "the label .* is 'yes' instead of a finite number"),
        ("", "an empty line"),
        ("# 1:1", "a line without a label"),
    ],
)
def test_a_wrong_libsvm_line_is_refused(line: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="line 2: ") as error:
        libsvm(tmp_path, f"1 3:1\n{line}\n")
    import re

    assert re.search(reason if "label" in reason else re.escape(reason), str(error.value))
