"""Bad input to `prepare`: every error names file, line and cure, and no row is lost without being counted."""

from __future__ import annotations

import gzip
import re
import tempfile
from collections.abc import Generator
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from holdall.common.errors import ConfigError, DataError
from holdall.data import blocks
from holdall.data.formats.criteo import CRITEO
from holdall.data.layout import Layout
from holdall.data.prepare import PrepareConfig, prepare
from holdall.data.read_text import read_text
from holdall.data.rows import Rows
from tests.data.raw_files import criteo_line, write_lines

GOOD = criteo_line(1, [1, 2, 3], ["aaaa", "bbbb"])
SKIP = PrepareConfig(test=0.0, bad_rows="skip")
BAD_LINES = {
    "short": (GOOD.rsplit("\t", 1)[0], "39 columns instead of 40 columns"),
    "long": (GOOD + "\textra", "41 columns instead of 40 columns"),
    "blank": ("", "an empty line instead of 40 columns"),
    "one column": ("hello", "1 column instead of 40 columns"),
    "text in a number": (criteo_line(0, [1, "x7"]), "column 'I2' holds 'x7', which is not a finite number"),
    "a space in a number": (criteo_line(0, [" 5"]), "column 'I1' holds ' 5'"),
    "not a number": (criteo_line(0, ["nan"]), "column 'I1' holds 'nan'"),
    "infinite": (criteo_line(0, [1, 2, "inf"]), "column 'I3' holds 'inf'"),
    "too large": (criteo_line(0, ["1e39"]), "column 'I1' holds '1e39'"),
    "label 2": (criteo_line(2), "the label (column 'label') is '2' instead of 0 or 1"),
    "label text": (criteo_line("yes"), "the label (column 'label') is 'yes' instead of 0 or 1"),
    "no label": (criteo_line(""), "the label (column 'label') is missing"),
    "carriage return": (criteo_line(0, values=["a\rb"]), "a carriage return is inside the line"),
}


@pytest.mark.parametrize("case", BAD_LINES)
def test_a_bad_line_stops_the_run_with_its_place_and_cure(tmp_path: Path, case: str) -> None:
    line, reason = BAD_LINES[case]
    raw = write_lines(tmp_path / "raw.tsv", [GOOD, GOOD, line, GOOD])
    with pytest.raises(DataError, match=re.escape(f"{raw}, line 3: {reason}") + ".*--bad-rows skip"):
        prepare([raw], tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["raw.tsv"]


def test_bad_utf8_is_found_by_line(tmp_path: Path) -> None:
    raw = tmp_path / "raw.tsv"
    good, bad = f"{GOOD}é\n".encode(), f"{GOOD}X\n".encode().replace(b"X", b"\xff")
    raw.write_bytes(good + bad + good)
    position = len(bad) - 1
    with pytest.raises(DataError, match=rf"line 2: byte 0xff \(number {position} of the line\) is not valid utf-8"):
        prepare([raw], tmp_path / "out")
    schema = prepare([raw], tmp_path / "out", SKIP)
    assert (schema.splits["train"].rows, schema.source["bad_rows"]) == (2, 1)
    assert r"\xff" in (tmp_path / "out/bad_rows.tsv").read_text()


def test_skipped_rows_are_listed_with_file_line_reason_and_content(tmp_path: Path) -> None:
    first = write_lines(tmp_path / "a.tsv", [GOOD, "oops", criteo_line(0, ["x"]), GOOD, GOOD + "\t"])
    second = write_lines(tmp_path / "b.tsv", [criteo_line(7), GOOD])
    schema = prepare([first, second], tmp_path / "out", SKIP)
    assert schema.source["bad_rows"] == 4
    assert schema.source["rows"] == 7
    assert schema.splits["train"].rows == 3
    header, *lines = (tmp_path / "out/bad_rows.tsv").read_text().splitlines()
    assert header == "file\tline\treason\tcontent"
    listed = [line.split("\t", 3) for line in lines]
    assert [(file, int(line), content) for file, line, _, content in listed] == [
        (str(first), 2, "oops"),
        (str(first), 3, criteo_line(0, ["x"])),
        (str(first), 5, GOOD + "\t"),
        (str(second), 1, criteo_line(7)),
    ]
    assert listed[1][2] == "column 'I1' holds 'x', which is not a finite number"


def test_one_short_and_one_long_line_do_not_cancel_out(tmp_path: Path) -> None:
    raw = write_lines(tmp_path / "raw.tsv", [GOOD, GOOD.rsplit("\t", 1)[0], GOOD + "\tx", GOOD])
    schema = prepare([raw], tmp_path / "out", SKIP)
    assert (schema.splits["train"].rows, schema.source["bad_rows"]) == (2, 2)


def test_the_first_bad_line_is_named_whatever_is_wrong_with_later_ones(tmp_path: Path) -> None:
    raw = write_lines(tmp_path / "raw.tsv", [GOOD, criteo_line(0, ["x"]), "short"])
    with pytest.raises(DataError, match="line 2: column 'I1'"):
        prepare([raw], tmp_path / "out")
    raw = write_lines(tmp_path / "raw.tsv", [GOOD, "short", criteo_line(0, values=["a\rb"])])
    with pytest.raises(DataError, match="line 2: 1 column"):
        prepare([raw], tmp_path / "out")


def test_line_numbers_count_across_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdall.data.formats.table.read_text", small_blocks)
    raw = write_lines(tmp_path / "raw.tsv", [GOOD] * 500 + ["bad"] + [GOOD] * 20)
    with pytest.raises(DataError, match="line 501: 1 column"):
        prepare([raw], tmp_path / "out")


def small_blocks(path: Path, layout: Layout) -> Generator[Rows]:
    return read_text(path, layout, block_bytes=300)


def test_quotes_line_endings_and_a_missing_last_newline_are_fine(tmp_path: Path) -> None:
    raw = tmp_path / "raw.tsv"
    lines = [criteo_line(0, [1], ['"a', "#b", "c\x00", " "]), GOOD, criteo_line(1, [2], ["d"] * 26)]
    raw.write_bytes("\r\n".join(lines).encode())
    schema = prepare([raw], tmp_path / "out", PrepareConfig(test=0.0))
    assert schema.splits["train"].rows == 3
    assert schema.splits["train"].positives == 2
    assert schema.feature("C26").num_rows == 3  # "", "d" and unseen: the last column has no "\r" on it
    assert '"a' in load_values(tmp_path / "out", "C1")
    assert "c\x00" in load_values(tmp_path / "out", "C3")


def load_values(folder: Path, feature: str) -> list[str | None]:
    return pa.ipc.open_file(str(folder / f"ids/{feature}.arrow")).read_all()["value"].to_pylist()


@pytest.mark.parametrize("bad_rows", ["stop", "skip"])
def test_files_that_cannot_be_read_always_stop(tmp_path: Path, bad_rows: str) -> None:
    config = PrepareConfig(bad_rows=bad_rows, test=0.0)  # type: ignore[arg-type]
    whole = gzip.compress("".join(f"{GOOD}\t{number}\n" for number in range(9)).encode())
    zstd = pa.compress(GOOD.encode() * 99, "zstd", asbytes=True)
    (tmp_path / "cut.tsv.gz").write_bytes(whole[:-9])
    (tmp_path / "cut.tsv.zst").write_bytes(zstd[:-4])
    (tmp_path / "wrong.tsv.gz").write_bytes(b"not gzip at all, but long enough to look at")
    (tmp_path / "empty.tsv").write_bytes(b"")
    (tmp_path / "empty.tsv.gz").write_bytes(gzip.compress(b""))
    (tmp_path / "folder").mkdir()
    for name, message in {
        "cut.tsv.gz": "cut.tsv.gz is truncated.*again",
        "cut.tsv.zst": "cut.tsv.zst is truncated.*again",
        "wrong.tsv.gz": "wrong.tsv.gz cannot be read.*gzip",
        "empty.tsv": "empty.tsv is empty",
        "empty.tsv.gz": "empty.tsv.gz is empty",
        "absent.tsv": "no such file: .*absent.tsv",
        "day_*.tsv": r"no file matches the pattern .*day_\*.tsv",
        "folder": "folder is a folder",
    }.items():
        with pytest.raises(DataError, match=message):
            prepare([tmp_path / name], tmp_path / "out", config)
        assert not (tmp_path / "out").exists()


def test_a_file_that_is_no_text_stops_instead_of_filling_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "MAX_RECORD_BYTES", 1000)
    monkeypatch.setattr("holdall.data.formats.table.read_text", small_blocks)
    raw = tmp_path / "raw.tsv"
    raw.write_bytes(f"{GOOD}\n".encode() + b"\x01" * 5000)
    with pytest.raises(DataError, match="line 2: no end of the line"):
        prepare([raw], tmp_path / "out", SKIP)


def test_no_row_left_is_an_error(tmp_path: Path) -> None:
    raw = write_lines(tmp_path / "raw.tsv", ["a,b", "c,d"])
    with pytest.raises(DataError, match="no rows to train on: 2 rows were read from 1 files, 2 of them were refused"):
        prepare([raw], tmp_path / "out", SKIP)


def test_sources_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    raw = write_lines(tmp_path / "raw.tsv", [GOOD])
    with pytest.raises(ConfigError, match="no source files"):
        prepare([], tmp_path / "out")
    with pytest.raises(ConfigError, match="more than once"):
        prepare([raw, str(tmp_path / "*.tsv")], tmp_path / "out")
    with pytest.raises(ConfigError, match="is in the output folder"):
        prepare([raw], tmp_path)
    with pytest.raises(ConfigError, match="two source files"):
        prepare([raw], tmp_path / "out", PrepareConfig(test_from_last_file=True))


def test_one_class_alone_is_prepared_and_recorded(tmp_path: Path) -> None:
    schema = prepare([write_lines(tmp_path / "raw.tsv", [criteo_line(0)] * 3)], tmp_path / "out", SKIP)
    assert schema.splits["train"].positives == 0


# Bytes that mean something to a reader of lines are far more frequent here than in random ones.
garbage = st.lists(
    st.one_of(
        st.binary(max_size=12),
        st.sampled_from(
            [b"\t", b"\t" * 39, b"\n", b"\r\n", b"\r", b'"', b"\x00", b"\xff", b"\xef\xbb\xbf", b"1", b"nan"]
        ),
        st.sampled_from([GOOD.encode() + b"\n", GOOD.encode(), BAD_LINES["short"][0].encode() + b"\n"]),
        st.text(max_size=6).map(lambda text: text.encode("utf-8", "surrogatepass")),
    ),
    max_size=40,
).map(b"".join)


def expected_row(line: bytes) -> tuple[str, ...] | None:
    """The 26 values of a line, or None when it must be refused; the plain way to read what `read_text` reads."""
    try:
        columns = line.removesuffix(b"\r").decode("utf-8").split("\t")
    except UnicodeDecodeError:
        return None
    if len(columns) != 40 or "\r" in "".join(columns) or columns[0] not in LABELS:
        return None
    return tuple(columns[14:]) if all(re.fullmatch(NUMBER, column) for column in columns[1:14]) else None


LABELS = {label for label in map(str, range(-9, 10)) if int(label) in (0, 1)}
NUMBER = r"([-+]?([0-9]+[.]?[0-9]*|[.][0-9]+)([eE][-+]?[0-9]+)?)?"


@settings(derandomize=True, deadline=None, max_examples=50)
@given(data=garbage, block_bytes=st.integers(1, 400))
@example(data=b"\xef\xbb\xbf" + GOOD.encode(), block_bytes=1)
@example(data=b"\n\n\n", block_bytes=1)
@example(data=b"\r", block_bytes=2)
@example(data=GOOD.replace("aaaa", "\u2028\x85\x0b\x1c").encode(), block_bytes=7)
@example(data=(GOOD + "\r").encode(), block_bytes=7)
def test_rows_in_are_rows_out_and_rows_refused(data: bytes, block_bytes: int) -> None:
    data = f"{GOOD}\n".encode() + data
    lines = data.removesuffix(b"\n").split(b"\n")
    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder) / "raw.tsv"
        raw.write_bytes(data)
        read = list(read_text(raw, CRITEO, block_bytes))
    assert sum(rows.num_rows for rows in read) == len(lines)
    kept = {int(number): row[14:] for rows in read for number, row in zip(rows.numbers, rows.frame.rows(), strict=True)}
    refused = {row.line - 1 + later: row for rows in read for row in rows.refused for later in range(row.num_rows)}
    assert sorted([*kept, *refused]) == list(range(len(lines)))  # each line once, in one of the two
    for number, line in enumerate(lines):
        assert kept.get(number) == expected_row(line)
