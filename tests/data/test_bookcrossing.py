"""`prepare --format bookcrossing`: three files joined, and every kind of dirt that the public files hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdall.common.errors import ConfigError, DataError
from holdall.data.prepare import PrepareConfig, prepare
from holdall.data.schema import Schema
from tests.data.raw_files import read_map, read_split

USERS = [
    '"User-ID";"Location";"Age"',
    '"1";"nyc, new york, usa";NULL',
    '"2";"stockton, california, usa";"18"',
    '"3";"århus, \\"n/a\\", denmark";"205"',
    '"4";"lisbon, \\"n/a\\",";"41"',
]
BOOKS = [
    '"ISBN";"Book-Title";"Book-Author";"Year-Of-Publication";"Publisher"',
    '"034545104X";"A; B \\"C\\"";"E. J. W. Barber";"1999";"W. W. Norton &amp; Company"',
    '"0002005018";"Ã¼ber";"AmÃ©lie Nothomb";"0";"X"',
    '"0155061224";"c";"Böll";"2001";"X"',
]
RATINGS = [
    '"User-ID";"ISBN";"Book-Rating"',
    '"1";"034545104x";"0"',
    '"2";"\\"0002005018\\"";"5"',
    '"3";"0155061224";"9"',
]
FILES = {"BX-Users.csv": USERS, "BX-Books.csv": BOOKS, "BX-Book-Ratings.csv": RATINGS}


def write_set(folder: Path, **files: list[str]) -> Path:
    for name, lines in FILES.items():
        lines = files.get(name.removeprefix("BX-").removesuffix(".csv").replace("-", "_"), lines)
        (folder / name).write_bytes("".join(line + "\r\n" for line in lines).encode("latin-1"))
    return folder


def run(folder: Path, **options: Any) -> Schema:
    return prepare([folder], folder / "out", PrepareConfig(format="bookcrossing", **{"test": 0.0, **options}))


def values(folder: Path, feature: str) -> list[str | None]:
    return [value for value, _ in read_map(folder / "out", feature)]


def test_ratings_are_joined_with_books_and_users(tmp_path: Path) -> None:
    schema = run(write_set(tmp_path))
    assert read_split(tmp_path / "out", "train")["label"] == [0, 1, 1]
    names = ["user", "book", "author", "publisher", "year", "country", "age"]
    assert [feature.name for feature in schema.features] == names
    assert values(tmp_path, "book") == ["0002005018", "0155061224", "034545104X", None]  # quotes and case put right
    assert values(tmp_path, "author") == ["Amélie Nothomb", "Böll", "E. J. W. Barber", None]  # of two encodings
    assert values(tmp_path, "publisher") == ["X", "W. W. Norton & Company", None]
    assert values(tmp_path, "year") == ["", "1999", "2001", None]
    assert values(tmp_path, "country") == ["usa", "denmark", None]
    assert values(tmp_path, "age") == ["", "10", None]  # NULL and 205 are missing; 18 is in its tens
    assert schema.source["bad_rows"] == 0
    assert all(number == 0 for number in schema.source["counts"].values())


def test_the_rule_of_the_label_can_be_another(tmp_path: Path) -> None:
    schema = run(write_set(tmp_path), positive=">= 7")
    assert read_split(tmp_path / "out", "train")["label"] == [0, 0, 1]
    assert schema.source["positive"] == ">= 7"
    with pytest.raises(ConfigError, match=r"positive = 'seven' is no rule"):
        PrepareConfig(format="bookcrossing", positive="seven")


def test_every_line_is_read_or_listed(tmp_path: Path) -> None:
    users = [*USERS, '"5";"cernusco s', ', milan, italy";NULL', '"6";"x";"1";"2"']
    books = [
        *BOOKS,
        '"1";"t";"DK "Publishing"";"1999";"p"',
        '"2";"shifted \\";Author";"2000";"DK Inc";"p"',
        '"0155061224";"d";"E";"1";"F"',
    ]
    ratings = [
        *RATINGS,
        '"5";"034545104X";"3"',
        '"7";"unknown";"10"',
        '"7";"034545104X";"high"',
        '"7";"UNKNOWN";"0"',
        '"8";"u',
    ]
    schema = run(write_set(tmp_path, Users=users, Books=books, Book_Ratings=ratings))
    listed = [line.split("\t")[:3] for line in (tmp_path / "out/bad_rows.tsv").read_text().splitlines()[1:]]
    where = [(Path(file).name, line) for file, line, _ in listed]
    assert where == [
        *(("BX-Users.csv", line) for line in ("6", "7", "8")),
        *(("BX-Books.csv", line) for line in ("5", "6")),
        *(("BX-Book-Ratings.csv", line) for line in ("7", "9")),
    ]
    assert "is 'DK Inc' instead of a finite number" in listed[4][2]
    assert "is 'high' instead of a finite number" in listed[5][2]
    assert schema.source["bad_rows"] == 7
    assert (schema.splits["train"].rows, schema.source["rows"]) == (5, 8)  # 2 refused, 1 a second rating of a book
    counts = schema.source["counts"]
    assert counts["duplicate_ratings"] == 1
    assert counts["books_described_twice"] == 1
    assert counts["ratings_without_book_description"] == 1
    assert counts["ratings_without_user_description"] == 2
    with pytest.raises(DataError, match=r"BX-Users.csv, line 6: a quoted field is not closed"):
        prepare([tmp_path], tmp_path / "strict", PrepareConfig(format="bookcrossing", bad_rows="stop"))


def test_a_rating_twice_in_different_blocks_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from holdall.data.formats import bookcrossing
    from holdall.data.read_text import read_text

    monkeypatch.setattr(bookcrossing, "read_text", lambda path, layout: read_text(path, layout, block_bytes=40))
    ratings = [*RATINGS, *(f'"{user}";"0155061224";"7"' for user in range(3, 20))]
    schema = run(write_set(tmp_path, Book_Ratings=ratings))
    assert schema.source["counts"]["duplicate_ratings"] == 1
    assert schema.splits["train"].rows == 3 + 16


def test_names_twice_mangled_are_put_right(tmp_path: Path) -> None:
    run(write_set(tmp_path, Books=[BOOKS[0], '"0155061224";"c";"RenÃ?Â© Barjavel";"2001";"GrÃ?f"']))
    assert "René Barjavel" in values(tmp_path, "author")
    assert "GrÃ?f" in values(tmp_path, "publisher")  # what is lost stays as it is


def test_files_of_another_version_or_separator_are_refused(tmp_path: Path) -> None:
    commas = [line.replace('";"', '","') for line in RATINGS]
    with pytest.raises(DataError, match=r"BX-Book-Ratings.csv has no column 'Book-Rating'"):
        run(write_set(tmp_path, Book_Ratings=commas))
    with pytest.raises(DataError, match=r"BX-Books.csv has no column 'Publisher' \(known|did you mean"):
        run(
            write_set(tmp_path, Books=['"ISBN";"Book-Title";"Book-Author";"Year-Of-Publication"', '"1";"t";"a";"1999"'])
        )
    write_set(tmp_path)
    (tmp_path / "BX-Users.csv").unlink()
    with pytest.raises(DataError, match=r"the users of the data set \(BX-Users.csv or Users.csv\) are not among"):
        run(tmp_path)
