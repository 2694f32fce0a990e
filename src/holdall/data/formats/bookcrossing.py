"""Reader of Book-Crossing: ratings joined with books and users, in `;`-separated, quoted files with many errors.

The files are ISO-8859-1 with some UTF-8. Corrections: `\\"` inside a field is a quote; NULL is missing; a value whose
bytes are UTF-8, once or twice over, is taken as that; `&amp;` and the like are resolved; ISBNs lose quotes and spaces
around them and are in upper case; year 0 and ages outside 5..100 are missing. A line that still cannot be read is left
out and listed in bad_rows.tsv (`--bad-rows stop` to stop instead). Books and users that ratings name and the other
files do not describe keep their ids; their attributes are missing, and such ratings are counted.

Label: `rating > 0`, that is, an explicit rating; `--positive ">= 7"` for another rule.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from holdall.data.formats.table import parse_positive
from holdall.data.layout import Layout, Positive, RawFeature, TextFormat
from holdall.data.raw_data import RawData, find_roles, no_rows
from holdall.data.read_text import read_text
from holdall.data.rows import Rows, import_polars

if TYPE_CHECKING:
    from holdall.data.prepare import PrepareConfig

ROLES = {
    "users": ("BX-Users.csv", "Users.csv"),
    "books": ("BX-Books*.csv", "BX_Books.csv", "Books.csv"),
    "ratings": ("BX-Book-Ratings.csv", "Ratings.csv"),
}
TEXT = TextFormat(separator=";", quote='"', escape="\\", encoding="latin-1", header=True, missing=("NULL",))
RATING, USER_ID, ISBN = "Book-Rating", "User-ID", "ISBN"
FEATURES = ("user", "book", "author", "publisher", "year", "country", "age")
AGES = (5, 100)
ANY = Positive(">=", 0)  # what identifies a row of users and books must be a number of this kind


def open_bookcrossing(
    sources: Sequence[str | Path], out: Path, config: PrepareConfig, *, to_score: bool = False
) -> RawData:
    """Ratings, books and users. Rows to score need no rating, and repeated ones are kept."""
    files = find_roles(sources, out, ROLES, needed=tuple(ROLES))
    rule = parse_positive(config.positive or "> 0")
    layout = Layout(
        label=RATING,
        label_optional=to_score,
        positive=rule,
        features=tuple(RawFeature(name=name, column=name) for name in FEATURES),
        text=TEXT,
        max_value_bytes=config.max_value_bytes,
    )
    counts: dict[str, int] = {}
    described: dict[str, Any] = {}
    seen: list[Any] = []

    def read(path: Path) -> Generator[Rows]:
        if path == files["ratings"]:
            for rows in read_columns(path, RATING, (USER_ID, ISBN), config.max_value_bytes, rule, to_score):
                yield join(rows, described, counts, None if to_score else seen)
            return
        role = "users" if path == files["users"] else "books"
        parts = []
        for rows in read_columns(path, *DESCRIBED[role][0], config.max_value_bytes):
            parts.append(DESCRIBED[role][1](rows.frame))
            yield no_rows(layout, rows.refused, rows.position)
        frame = import_polars().concat(parts)
        described[role] = frame.unique("key", keep="first", maintain_order=True)
        counts[f"{role}_described_twice"] = len(frame) - len(described[role])

    return RawData(layout=layout, files=list(files.values()), read=read, counts=counts, bad_rows="skip")


def read_columns(
    path: Path,
    label: str,
    columns: Sequence[str],
    max_value_bytes: int,
    rule: Positive = ANY,
    label_optional: bool = False,
) -> Generator[Rows]:
    """Rows of one file; `feature0`.. are its columns as text."""
    layout = Layout(
        label=label,
        label_optional=label_optional,
        positive=rule,
        features=tuple(RawFeature(name=name, column=name) for name in columns),
        text=TEXT,
        max_value_bytes=max_value_bytes,
    )
    return read_text(path, layout)


def users_of(frame: Any) -> Any:
    """user -> country, age: the last part of `Location`, and the decade."""
    pl = import_polars()
    country = pl.col("feature1").str.split(",").list.last().str.strip_chars(' ".,')
    age = pl.col("feature2").cast(pl.Float64, strict=False)
    decade = (age // 10 * 10).cast(pl.Int64).cast(pl.String)
    return cleaned(frame, "feature1").select(
        pl.col("feature0").alias("key"),
        pl.when(country.is_in(["n/a", "na"])).then(pl.lit("")).otherwise(country).alias("country"),
        pl.when(age.is_between(*AGES)).then(decade).otherwise(pl.lit("")).alias("age"),
    )


def books_of(frame: Any) -> Any:
    """ISBN -> author, publisher, year."""
    pl = import_polars()
    year = pl.col("feature3")
    return cleaned(frame, "feature1", "feature2").select(
        isbn("feature0").alias("key"),
        pl.col("feature1").alias("author"),
        pl.col("feature2").alias("publisher"),
        pl.when(year == "0").then(pl.lit("")).otherwise(year).alias("year"),
    )


# What is read of each file (the column that must be a number, and the others), and what is made of it. A book whose
# year is no number has its columns shifted by a stray quote.
Describe = Callable[[Any], Any]
DESCRIBED: dict[str, tuple[tuple[str, tuple[str, ...]], Describe]] = {
    "users": ((USER_ID, (USER_ID, "Location", "Age")), users_of),
    "books": (
        ("Year-Of-Publication", (ISBN, "Book-Author", "Publisher", "Year-Of-Publication")),
        books_of,
    ),
}


def join(rows: Rows, described: dict[str, Any], counts: dict[str, int], seen: list[Any] | None) -> Rows:
    """Ratings with what is known of their books and users; one of a book and user in `seen` is dropped."""
    pl = import_polars()
    frame = rows.frame.select("label", user="feature0", book=isbn("feature1"))
    numbers = rows.numbers
    if seen is not None:
        pairs = frame.select("user", "book").hash_rows()
        repeated = (~pairs.is_first_distinct()) | (pairs.is_in(pl.concat(seen).implode()) if seen else pl.lit(False))
        fresh = frame.select(~repeated).to_series().to_numpy()
        seen.append(pairs.filter(pl.Series(fresh)))
        frame, numbers = frame.filter(pl.Series(fresh)), numbers[fresh]
        add(counts, "duplicate_ratings", int(np.count_nonzero(~fresh)))
    for role, key in (("books", "book"), ("users", "user")):
        add(
            counts,
            f"ratings_without_{key}_description",
            len(frame.join(described[role], left_on=key, right_on="key", how="anti")),
        )
        frame = frame.join(described[role], left_on=key, right_on="key", how="left", maintain_order="left")
    columns = {f"feature{index}": pl.col(name).fill_null("") for index, name in enumerate(FEATURES)}
    return replace(rows, frame=frame.select("label", **columns), numbers=numbers)


def add(counts: dict[str, int], name: str, number: int) -> None:
    counts[name] = counts.get(name, 0) + number


def isbn(column: str) -> Any:
    return import_polars().col(column).str.strip_chars('" ').str.to_uppercase()


def cleaned(frame: Any, *columns: str) -> Any:
    """These text columns with encodings and entities put right."""
    pl = import_polars()
    for column in columns:
        values = frame[column].unique()
        fixed = [clean(value) for value in values.to_list()]
        frame = frame.with_columns(pl.col(column).replace_strict(values, pl.Series(fixed, dtype=pl.String)))
    return frame


def clean(value: str) -> str:
    """A value decoded as latin-1: as UTF-8 if its bytes are that, without entities and spaces around it."""
    if not value.isascii():
        twice = value.replace("Ã?Â", "Ã\x83Â")  # UTF-8 of UTF-8, its unprintable byte lost on the way
        with suppress(UnicodeError):
            value = twice.encode("latin-1").decode("utf-8")
            value = value.encode("latin-1").decode("utf-8")
    return html.unescape(value).strip()
