"""Labels that are text or booleans, and integer ids that arrive as floats because some of them are missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from holdall.common.errors import ConfigError, DataError
from holdall.data.encode import encode_rows
from holdall.data.formats.table import parse_positive
from holdall.data.layout import Positive
from holdall.data.prepare import PrepareConfig, prepare
from holdall.data.schema import Schema
from tests.data.raw_files import read_map, read_split

NAN = float("nan")
TEXT_LABEL = 'categorical = ["c"]\n[label]\ncolumn = "y"\npositive = "{}"'


def run(folder: Path, toml: str, rows: str | pa.Table, **options: Any) -> Schema:
    """Prepare CSV text or a table, which is written as Parquet, with every row in training."""
    (folder / "schema.toml").write_text(toml, encoding="utf-8")
    raw = folder / ("a.csv" if isinstance(rows, str) else "a.parquet")
    if isinstance(rows, str):
        raw.write_text(rows, encoding="utf-8")
    else:
        pq.write_table(rows, raw)
    config = PrepareConfig(format="table", schema=folder / "schema.toml", test=0.0, overwrite=True, **options)
    return prepare([raw], folder / "out", config)


def labels(folder: Path) -> list[int]:
    return read_split(folder / "out", "train")["label"]


# --- labels ---------------------------------------------------------------------------------------------------------

FITS = ["fit", "small", "fit", "large", " fit"]


@pytest.mark.parametrize(
    ("rule", "expected"), [("== fit", [1, 0, 1, 0, 0]), ("!= fit", [0, 1, 0, 1, 1]), ("== ' fit'", [0, 0, 0, 0, 1])]
)
@pytest.mark.parametrize("kind", ["csv", "parquet", "dictionary"])
def test_a_label_can_be_text(kind: str, rule: str, expected: list[int], tmp_path: Path) -> None:
    column = pa.array(FITS).dictionary_encode() if kind == "dictionary" else pa.array(FITS)
    table = pa.table({"y": column, "c": list("abcde")})
    rows = "y,c\n" + "".join(f"{fit},{c}\n" for fit, c in zip(FITS, "abcde", strict=True)) if kind == "csv" else table
    schema = run(tmp_path, TEXT_LABEL.format(rule), rows)
    assert labels(tmp_path) == expected
    assert schema.splits["train"].positives == sum(expected)
    assert encode_rows(tmp_path / "out", table).label.tolist() == expected


def test_text_rules_take_integers_and_booleans_as_text(tmp_path: Path) -> None:
    run(tmp_path, TEXT_LABEL.format("== true"), pa.table({"y": [True, False, True], "c": ["a", "b", "c"]}))
    assert labels(tmp_path) == [1, 0, 1]
    run(tmp_path, TEXT_LABEL.format("== '2'"), pa.table({"y": [2, 3, 2], "c": ["a", "b", "c"]}))
    assert labels(tmp_path) == [1, 0, 1]
    with pytest.raises(DataError, match=r"column 'y' .* double: the rule == \"fit\" needs text, integers or booleans"):
        run(tmp_path, TEXT_LABEL.format("== fit"), pa.table({"y": [1.0], "c": ["a"]}))


def test_a_missing_text_label_is_refused_by_row(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"line 3: the label \(column 'y'\) is missing"):
        run(tmp_path, TEXT_LABEL.format("== fit"), "y,c\nfit,a\n,b\n")
    run(tmp_path, TEXT_LABEL.format("== fit"), "y,c\nfit,a\n,b\nsmall,c\n", bad_rows="skip")
    assert labels(tmp_path) == [1, 0]
    with pytest.raises(DataError, match="the label 'y' is missing in row 1"):
        encode_rows(tmp_path / "out", {"y": ["fit", None], "c": ["a", "b"]})


@pytest.mark.parametrize("rule", ["== Fit", "!= Fit"])
def test_a_rule_whose_text_no_row_has_is_refused(rule: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="none of 2 rows has 'Fit' in the label column 'y': correct positive"):
        run(tmp_path, TEXT_LABEL.format(rule), "y,c\nfit,a\nsmall,b\n")
    assert not (tmp_path / "out").exists()


def test_rules_are_numbers_where_they_can_be(tmp_path: Path) -> None:
    assert parse_positive(">= 7") == Positive(">=", 7.0)
    assert parse_positive("==1e1") == Positive("==", 10.0)
    assert parse_positive("== '7'") == Positive("==", "7")
    assert parse_positive('!= "a b"') == Positive("!=", "a b")
    assert parse_positive(str(Positive("==", "7"))) == Positive("==", "7")
    with pytest.raises(ConfigError, match="compares text: use == or !="):
        parse_positive(">= seven")
    with pytest.raises(ConfigError, match="not finite"):
        parse_positive("> 1e999")


@pytest.mark.parametrize("words", [("True", "False"), ("true", "false"), ("TRUE", "0"), ("1", "False")])
def test_booleans_are_labels_in_text_too(words: tuple[str, str], tmp_path: Path) -> None:
    yes, no = words
    run(tmp_path, 'label = "y"\ncategorical = ["c"]', f"y,c\n{yes},a\n{no},b\n{yes},c\n")
    assert labels(tmp_path) == [1, 0, 1]
    assert encode_rows(tmp_path / "out", {"y": [no, yes], "c": ["a", "b"]}).label.tolist() == [0, 1]


def test_other_words_are_refused_with_the_rule_to_write(tmp_path: Path) -> None:
    reason = r"line 2: the label \(column 'y'\) is 'yes' instead of 0 or 1; for another text set positive = \"== TEXT\""
    with pytest.raises(DataError, match=reason):
        run(tmp_path, 'label = "y"\ncategorical = ["c"]', "y,c\nyes,a\n")


def test_rows_are_encoded_with_the_rule_of_their_data_set(tmp_path: Path) -> None:
    run(tmp_path, TEXT_LABEL.format(">= 4"), "y,c\n5,a\n3,b\n4,c\n")
    assert encode_rows(tmp_path / "out", {"y": [5, 3, 4], "c": ["a", "b", "c"]}).label.tolist() == [1, 0, 1]


# --- ids ------------------------------------------------------------------------------------------------------------

IDS = 'label = "y"\ncategorical = ["user"]'
INTEGERS = 'label = "y"\n[[categorical]]\nname = "user"\ninteger = true'
USERS = [("7", 2), ("", 2), ("-3", 1), (None, 0)]


@pytest.mark.parametrize("kind", [pa.float64(), pa.float32()])
def test_floats_are_the_integers_that_they_are(kind: pa.DataType, tmp_path: Path) -> None:
    users = pa.array([7.0, None, NAN, 7.0, -3.0], kind, from_pandas=False)
    run(tmp_path, IDS, pa.table({"y": [0, 1, 0, 1, 0], "user": users}))
    assert sorted(read_map(tmp_path / "out", "user"), key=str) == sorted(USERS, key=str)
    stored = [ids for (ids,) in read_split(tmp_path / "out", "train")["ids"]]
    assert encode_rows(tmp_path / "out", pa.table({"user": users})).ids.values.tolist() == [stored]
    assert encode_rows(tmp_path / "out", {"user": ["7", None, "", 7, "-3"][:3]}).ids.values.tolist() == [stored[:3]]
    coded = pa.table({"user": users.dictionary_encode()})
    assert encode_rows(tmp_path / "out", coded).ids.values.tolist() == [stored]


@pytest.mark.parametrize(
    ("value", "kind"),
    [(1.5, pa.float64()), (2.0**53, pa.float64()), (float("inf"), pa.float64()), (2.0**24, pa.float32())],
)
def test_floats_that_are_no_exact_integers_are_refused_by_row(value: float, kind: pa.DataType, tmp_path: Path) -> None:
    table = pa.table({"y": [0, 1], "user": pa.array([3.0, value], kind)})
    with pytest.raises(DataError, match=r"line 2: column 'user' holds .*, which is not the exact value of a whole"):
        run(tmp_path, IDS, table)
    run(tmp_path, IDS, table, bad_rows="skip")
    assert read_map(tmp_path / "out", "user") == [("3", 1), (None, 0)]
    with pytest.raises(DataError, match=r"feature 'user' is .* in row 1, which is not the exact value of a whole"):
        encode_rows(tmp_path / "out", table)
    with pytest.raises(DataError, match=r"feature 'user' is .* in row 1, which is not the exact value of a whole"):
        encode_rows(tmp_path / "out", table.set_column(1, "user", table["user"].dictionary_encode()))


def test_texts_are_integers_where_the_schema_says_so(tmp_path: Path) -> None:
    rows = "y,user\n0,7.0\n1,\n0,007\n1,-3.\n0,\n"
    run(tmp_path, IDS, rows)
    assert {value for value, _ in read_map(tmp_path / "out", "user")} == {"7.0", "", "007", "-3.", None}
    run(tmp_path, INTEGERS, rows)
    assert sorted(read_map(tmp_path / "out", "user"), key=str) == sorted(USERS, key=str)
    stored = [ids for (ids,) in read_split(tmp_path / "out", "train")["ids"]]
    for users in (["7.0", "", "007", "-3.", None], [7, None, 7, -3, None], np.array([7.0, NAN, 7.0, -3.0, NAN])):
        assert encode_rows(tmp_path / "out", {"user": users}).ids.values.tolist() == [stored]


@pytest.mark.parametrize("value", ["7.5", "x", " 7", "1e3", "99999999999999999999", "nan", "٧"])
def test_texts_that_are_no_integers_are_refused_where_the_schema_wants_them(value: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"line 3: column 'user' holds .*, which is not the exact value of a whole"):
        run(tmp_path, INTEGERS, f"y,user\n0,7\n1,{value}\n")
    run(tmp_path, INTEGERS, f"y,user\n0,7\n1,{value}\n", bad_rows="skip")
    assert read_map(tmp_path / "out", "user") == [("7", 1), (None, 0)]
    with pytest.raises(DataError, match=r"feature 'user' is .* in row 1, which is not the exact value of a whole"):
        encode_rows(tmp_path / "out", {"user": ["7", value]})


def test_texts_of_bags_are_split_as_in_the_raw_files(tmp_path: Path) -> None:
    run(tmp_path, 'label = "y"\n[[bag]]\nname = "tags"\nseparator = "|"', "y,tags\n0,a|b\n1,a\n")
    found = encode_rows(tmp_path / "out", {"tags": ["b|a", "", None]})
    assert found.ids.values.tolist() == [1, 0]
    assert found.ids.offsets is not None
    assert found.ids.offsets.tolist() == [0, 2, 2, 2]
