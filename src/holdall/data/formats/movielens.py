"""Reader of MovieLens as implicit data: any rating is an event, and the last film of each user is the test.

Two kinds of files:

- GroupLens's own: `ratings.dat` (1M, 10M: fields separated by `::`) or `ratings.csv` (20M, 25M, latest), by time; with
  `users.dat` and `movies.dat` or `movies.csv` among the sources, their attributes are joined (gender, age, occupation,
  zip code; year and genres).
- NCF's: `*.train.rating` or `*.train.pairs.tsv`, `*.test.rating`, and `*.test.negative` with 99 negatives a user. Pairs
  have no times: `--valid` then holds out a random event of a user instead of the last.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from holdall.data.formats.id_files import is_id, read_attributes, read_id_columns, text_lines
from holdall.data.implicit import ITEM, USER, GivenNegatives, Implicit, Parse
from holdall.data.layout import RawFeature
from holdall.data.raw_data import RawData, find_roles, role_of
from holdall.data.rows import Refused, import_polars
from holdall.data.splits import TEST, TRAIN, hash_numbers

if TYPE_CHECKING:
    from holdall.data.prepare import PrepareConfig

OWN_ROLES = {
    "users": ("users.dat",),
    "movies": ("movies.dat", "movies.csv"),
    "ratings": ("ratings.dat", "ratings.csv"),
}
NCF_ROLES = {
    "training pairs": ("*train.pairs.tsv", "*.train.rating"),
    "test pairs": ("*.test.rating",),
    "test negatives": ("*.test.negative",),
}
USER_COLUMNS = ("gender", "age", "occupation", "zip")
RATING_COLUMNS = (USER, ITEM, "rating", "timestamp")


def open_movielens(sources: Sequence[str | Path], out: Path, config: PrepareConfig) -> RawData:
    training = {"training pairs": NCF_ROLES["training pairs"]}
    for source in map(Path, sources):
        if any(role_of(file, training) for file in (source.iterdir() if source.is_dir() else [source])):
            return open_ncf(sources, out, config)
    return open_own(sources, out, config)


def open_own(sources: Sequence[str | Path], out: Path, config: PrepareConfig) -> RawData:
    files = find_roles(sources, out, OWN_ROLES, needed=["ratings"])
    user_features = tuple(RawFeature(name=name, column=name) for name in USER_COLUMNS)
    year, genres = RawFeature(name="year", column="year"), RawFeature(name="genres", column="genres", kind="bag")
    data = Implicit(
        config,
        user_features=user_features if "users" in files else (),
        item_features=(year, genres) if "movies" in files else (),
        leave_one_out=True,
    )

    def users(path: Path) -> Iterator[list[Refused]]:
        data.attributes[USER] = yield from read_attributes(
            path, (USER, *USER_COLUMNS), lambda line: line.split("::"), max_value_bytes=config.max_value_bytes
        )

    def movies(path: Path) -> Iterator[list[Refused]]:
        pl = import_polars()
        names, encoding = (ITEM, "title", "genres"), "utf-8" if ".csv" in path.suffixes else "latin-1"
        frame = yield from read_attributes(
            path, names, split_movie, encoding, header="movieId,", max_value_bytes=config.max_value_bytes
        )
        lists = pl.col("genres").replace("(no genres listed)", "").str.split("|")
        data.attributes[ITEM] = frame.select(
            "id",
            pl.col("title").str.extract(r"\((\d{4})\)\s*$").fill_null("").alias("year"),
            lists.list.eval(pl.element().filter(pl.element() != "")),
        )

    def ratings(path: Path) -> Iterator[list[Refused]]:
        if ".csv" in path.suffixes:
            blocks = read_id_columns(path, ("userId", "movieId", "timestamp"), separator=",")
        else:
            blocks = read_id_columns(path, (USER, ITEM, "timestamp"), RATING_COLUMNS, separator="::")
        for numbers, refused in blocks:
            data.add_events(numbers[:, 0], numbers[:, 1], TRAIN, order=numbers[:, 2])
            yield refused

    parsers: dict[str, Parse] = {"users": users, "movies": movies, "ratings": ratings}
    return data.raw_data({file: parsers[role] for role, file in files.items()})


def split_movie(line: str) -> list[str]:
    """`1::Toy Story (1995)::Comedy` or `1,"Toy Story (1995)",Comedy`; one field where quotes are wrong."""
    if "::" in line:
        return line.split("::")
    try:
        return next(csv.reader([line], strict=True), [])
    except csv.Error:
        return [line]


def open_ncf(sources: Sequence[str | Path], out: Path, config: PrepareConfig) -> RawData:
    files = find_roles(sources, out, NCF_ROLES, needed=["training pairs", "test pairs"])
    data = Implicit(config)

    def training(path: Path) -> Iterator[list[Refused]]:
        timed = ".rating" in path.suffixes
        columns = (USER, ITEM, "timestamp") if timed else (USER, ITEM)
        num_events = 0
        for numbers, refused in read_id_columns(path, columns, RATING_COLUMNS if timed else columns):
            rows = np.arange(num_events, num_events + len(numbers))
            order = numbers[:, 2] if timed else (hash_numbers(rows, config.seed) >> np.uint64(1)).astype(np.int64)
            data.add_events(numbers[:, 0], numbers[:, 1], TRAIN, order=order)
            num_events += len(numbers)
            yield refused

    def test(path: Path) -> Iterator[list[Refused]]:
        for numbers, refused in read_id_columns(path, (USER, ITEM, "timestamp"), RATING_COLUMNS):
            data.add_events(numbers[:, 0], numbers[:, 1], TEST, order=numbers[:, 2])
            yield refused

    def negatives(path: Path) -> Iterator[list[Refused]]:
        data.given = yield from read_negatives(path)

    parsers: dict[str, Parse] = {"training pairs": training, "test pairs": test, "test negatives": negatives}
    return data.raw_data({file: parsers[role] for role, file in files.items()})


def read_negatives(path: Path) -> Generator[list[Refused], None, GivenNegatives]:
    """Lines `(user,item)` and then the negatives, tab-separated; as many on every line as on the first."""
    numbers: list[int] = []
    pairs: list[tuple[int, int]] = []
    negatives: list[list[int]] = []
    for lines, refused in text_lines(path):
        for line, raw in lines:
            pair, *items = raw.split("\t")
            match = re.fullmatch(r"\((\d+),\s*(\d+)\)", pair)
            if match is None or not items or not all(map(is_id, [*match.groups(), *items])):
                reason = "the line is not '(user,item)' and then items, separated by tabs"
                refused.append(Refused(line, reason, raw))
            elif negatives and len(items) != len(negatives[0]):
                reason = f"{len(items)} negatives instead of {len(negatives[0])}, as on line {numbers[0]}"
                refused.append(Refused(line, reason, raw))
            else:
                numbers.append(line)
                pairs.append((int(match[1]), int(match[2])))
                negatives.append(list(map(int, items)))
        yield sorted(refused, key=lambda row: row.line)
    chosen = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    width = len(negatives[0]) if negatives else 0
    table = np.array(negatives, dtype=np.int64).reshape(-1, width)
    return GivenNegatives(path, chosen[:, 0], chosen[:, 1], table, np.array(numbers))
