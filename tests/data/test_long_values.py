"""Values and files that are far too long: refused by line in every format, in bounded time and memory."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from holdall.common.errors import ConfigError, DataError
from holdall.data import blocks
from holdall.data.encode import Encoder, encode_rows
from holdall.data.formats.avazu import CATEGORICAL as AVAZU_COLUMNS
from holdall.data.formats.criteo import CRITEO
from holdall.data.formats.id_files import text_lines
from holdall.data.id_index import LONG_BYTES, hash_strings
from holdall.data.prepare import PrepareConfig, prepare
from holdall.data.read_text import read_text
from tests.data.raw_files import criteo_line, read_map, write_lines

LIMIT = 64 << 10
FITS, LONG = "x" * LIMIT, "é" * (LIMIT // 2) + "x"  # the second has fewer characters, and one byte more
Case = tuple[list[Path], dict[str, Any], str]
"""Sources, options, and the place and reason of the refusal."""


def csv_case(folder: Path) -> Case:
    (folder / "schema.toml").write_text('label = "y"\n[[bag]]\nname = "tags"\nseparator = "|"')
    raw = write_lines(folder / "a.csv", ["y,tags", f"1,a|{FITS}|b", f"0,a|{LONG}|b"])
    return [raw], {"format": "table", "schema": folder / "schema.toml"}, "a.csv, line 3: column 'tags'"


def criteo_case(folder: Path) -> Case:
    lines = [criteo_line(0, values=["a", FITS]), criteo_line(1, values=["a", LONG])]
    return [write_lines(folder / "a.tsv", lines)], {}, "a.tsv, line 2: column 'C2'"


def parquet_case(folder: Path) -> Case:
    (folder / "schema.toml").write_text('label = "y"\ncategorical = ["c"]\n[[sequence]]\nname = "s"')
    pq.write_table(pa.table({"y": [0, 1], "c": [FITS, LONG], "s": [[FITS], [FITS, "a"]]}), folder / "a.parquet")
    return [folder / "a.parquet"], {"format": "table", "schema": folder / "schema.toml"}, "line 2: column 'c'"


def parquet_lists_case(folder: Path) -> Case:
    (folder / "schema.toml").write_text('label = "y"\n[[sequence]]\nname = "s"')
    pq.write_table(pa.table({"y": [0, 1], "s": [[], ["a", LONG]]}), folder / "a.parquet")
    return [folder / "a.parquet"], {"format": "table", "schema": folder / "schema.toml"}, "line 2: column 's'"


def avazu_case(folder: Path) -> Case:
    lines = [",".join(["0", "14102100", *["v"] * 20, value]) for value in (FITS, LONG)]
    raw = write_lines(folder / "train.csv", [",".join(["click", "hour", *AVAZU_COLUMNS]), *lines])
    return [raw], {"format": "avazu"}, "train.csv, line 3: column 'C21'"


def taobao_case(folder: Path) -> Case:
    write_lines(folder / "u.user", ["0 1 1 1 1 1 1 1 1"])
    write_lines(folder / "u.item", [f"0 {FITS} 1 1", f"1 1 {LONG} 1"])
    write_lines(folder / "train.txt", ["0 0 1"])
    write_lines(folder / "test.txt", ["0 2"])
    return [folder], {"format": "taobao", "candidates": 1}, "u.item, line 2: column 'brand'"


def movielens_case(folder: Path) -> Case:
    write_lines(folder / "ratings.dat", ["1::10::5::100", "1::20::3::300"])
    write_lines(folder / "movies.dat", ["10::A (1995)::Comedy", f"20::B (1995)::{LONG}"])
    return [folder], {"format": "movielens", "candidates": 1}, "movies.dat, line 2: column 'genres'"


def bookcrossing_case(folder: Path) -> Case:
    write_lines(folder / "BX-Users.csv", ['"User-ID";"Location";"Age"', '"1";"a, b";"20"'])
    names = '"ISBN";"Book-Title";"Book-Author";"Year-Of-Publication";"Publisher"'
    write_lines(folder / "BX-Books.csv", [names, f'"i";"t";"{LONG}";"1990";"p"'])
    write_lines(folder / "BX-Book-Ratings.csv", ['"User-ID";"ISBN";"Book-Rating"', '"1";"i";"5"'])
    return [folder], {"format": "bookcrossing", "bad_rows": "stop"}, "BX-Books.csv, line 2: column 'Book-Author'"


CASES = (
    csv_case,
    criteo_case,
    parquet_case,
    parquet_lists_case,
    avazu_case,
    taobao_case,
    movielens_case,
    bookcrossing_case,
)


@pytest.mark.parametrize("case", CASES)
def test_a_value_beyond_the_limit_is_refused_by_line(tmp_path: Path, case: Callable[[Path], Case]) -> None:
    sources, options, place = case(tmp_path)
    with pytest.raises(DataError, match=re.escape(place) + r".* bytes, but 65,536 are the most") as error:
        prepare(sources, tmp_path / "out", PrepareConfig(test=0.0, **options))
    assert len(str(error.value)) < 1000
    made = prepare(sources, tmp_path / "out", PrepareConfig(test=0.0, **{**options, "bad_rows": "skip"}))
    assert made.source["bad_rows"] == 1
    wider = PrepareConfig(test=0.0, **{**options, "max_value_bytes": 4 * LIMIT}, overwrite=True)
    assert prepare(sources, tmp_path / "out", wider).source["bad_rows"] == 0


def test_new_rows_have_the_limit_or_the_longest_value_of_the_map(tmp_path: Path) -> None:
    raw = write_lines(tmp_path / "a.tsv", [criteo_line(0, values=[FITS, LONG])])
    prepare([raw], tmp_path / "out", PrepareConfig(test=0.0, max_value_bytes=4 * LIMIT))
    rows: dict[str, Any] = {column.name: [0.0, 0.0] for column in CRITEO.dense}
    rows |= {feature.name: ["", ""] for feature in CRITEO.features}
    assert encode_rows(tmp_path / "out", rows | {"C2": ["", LONG]}).ids.values[1].tolist() == [1, 0]
    with pytest.raises(DataError, match=r"feature 'C1' has a value of 65,537 bytes in row 1, but 65,536 are the most"):
        encode_rows(tmp_path / "out", rows | {"C1": ["", LONG]})
    encoder = Encoder(tmp_path / "out", max_value_bytes=2 << 20)
    assert encoder.encode(rows | {"C1": ["x" * (2 << 20), FITS]}).ids.values[0].tolist() == [1, 0]


def test_long_values_have_hashes_of_their_own() -> None:
    values = ["a" * length for length in (0, 1, LONG_BYTES, LONG_BYTES + 1, 1 << 20)] + ["b" * (1 << 20)]
    hashes = hash_strings(pa.array(values, pa.large_string())).tolist()
    assert len(set(hashes)) == len(values)
    assert hash_strings(pa.array(["a", *values], pa.large_string()).slice(1)).tolist() == hashes


def test_a_long_number_is_not_quoted_whole(tmp_path: Path) -> None:
    raw = write_lines(tmp_path / "a.tsv", [criteo_line(0, ["x" * 100_000])])
    with pytest.raises(DataError, match=r"line 1: column 'I1' holds 'x+\.\.\. \(100,002 characters\)") as error:
        prepare([raw], tmp_path / "out")
    assert len(str(error.value)) < 1000


# --- many lines ------------------------------------------------------------------------------------------------------


def test_a_run_of_empty_lines_is_one_refusal(tmp_path: Path) -> None:
    raw = tmp_path / "a.tsv"
    good = criteo_line(1, values=["a"]).encode() + b"\n"
    raw.write_bytes(good + b"\n" * 400_000 + good + b"\r\n" + good)
    read = list(read_text(raw, CRITEO))
    assert sum(rows.num_rows for rows in read) == 400_004
    assert [row.num_rows for rows in read for row in rows.refused][-1] == 1
    assert sum(len(rows.refused) for rows in read) < 10
    assert [number for rows in read for number in rows.numbers.tolist()] == [0, 400_001, 400_003]
    with pytest.raises(DataError, match=r"line 2: 99,990 empty lines instead of 40 columns"):
        prepare([raw], tmp_path / "out")
    made = prepare([raw], tmp_path / "out", PrepareConfig(test=0.0, bad_rows="skip"))
    assert (made.source["rows"], made.source["bad_rows"], made.splits["train"].rows) == (400_004, 400_001, 3)
    assert len((tmp_path / "out/bad_rows.tsv").read_text().splitlines()) < 12
    assert read_map(tmp_path / "out", "C1") == [("a", 3), (None, 0)]


def test_lines_are_read_in_blocks_of_a_bounded_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK_LINES", 100)
    raw = tmp_path / "a.tsv"
    data = b"x" * 3000 + b"\n" + b"y\n" * 2000 + b"z" * 900 + b"\n" + b"\n" * 500
    raw.write_bytes(data)
    found = list(blocks.read_blocks(raw))
    assert b"".join(block.data for block in found) == data
    assert max(block.data.count(b"\n") for block in found) <= 100
    lines = [line for part, _ in text_lines(raw) for line in part]
    assert lines == [(1, "x" * 3000), *((line, "y") for line in range(2, 2002)), (2002, "z" * 900)]
    refused = [row for _, part in text_lines(raw) for row in part]
    assert (refused[0].line, sum(row.num_rows for row in refused)) == (2003, 500)


def test_a_record_of_many_lines_is_not_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK_LINES", 10)
    (tmp_path / "schema.toml").write_text('label = "y"\ncategorical = ["c"]\n[csv]\nmultiline = true')
    lines = "\n" * 50
    raw = tmp_path / "a.csv"
    raw.write_text(f'y,c\n0,"a{lines}"\n1,b\n0,"{lines}c"\n')
    config = PrepareConfig(format="table", schema=tmp_path / "schema.toml", test=0.0)
    prepare([raw], tmp_path / "out", config)
    assert {value for value, _ in read_map(tmp_path / "out", "c")} == {f"a{lines}", "b", f"{lines}c", None}


@pytest.mark.parametrize("name", ["max_value_bytes", "rows_per_file", "max_length", "candidates", "rare_below"])
def test_sizes_have_bounds(name: str) -> None:
    for value in (0, 2**31):
        with pytest.raises(ConfigError, match=rf"{name} is {value}, but must be 1 or more, and below 2\^31"):
            PrepareConfig(**{name: value})  # type: ignore[arg-type]


def test_seeds_have_bounds() -> None:
    for seed in (-1, 2**63, 10**400):
        with pytest.raises(ConfigError, match=r"seed is .*, but must be 0 or more, and below 2\^63"):
            PrepareConfig(seed=seed)
