"""Made-up raw files: implicit data in the files of Taobao, and click logs of every other format."""

from __future__ import annotations

import gzip
import random
from pathlib import Path
from typing import Any

import polars as pl

from holdall.data.formats.avazu import CATEGORICAL
from holdall.data.prepare import PrepareConfig
from tests.data.raw_files import criteo_line, write_lines

SCHEMA = """
label = {column = "stars", positive = ">= 4"}
dense = [{name = "price", column = "cost"}, {name = "age", transform = "standard"}]
categorical = [{name = "shop", column = "shop id"}, "day"]
bag = [{name = "tags", separator = "|", max_length = 2}]
sequence = [{name = "seen", separator = " ", max_length = 3, table = "tags"}]
"""


def implicit_files(folder: Path, num_users: int = 60, num_items: int = 40) -> Path:
    """Users who choose items of their own parity, seven each, one of them held out for the test."""
    folder.mkdir()
    draw = random.Random(0)
    chosen = {user: draw.sample(range(user % 2, num_items, 2), 7) for user in range(num_users)}
    files = {
        "u.user": [f"{user} {user % 5} {user % 2} 1 2 0 3 0 {user % 3}" for user in chosen],
        "u.item": [f"{item} {item % 3} {item % 2} 1" for item in range(num_items)],
        "train.txt": [f"{user} {' '.join(map(str, items[:-1]))}" for user, items in chosen.items()],
        "test.txt": [f"{user} {items[-1]}" for user, items in chosen.items()],
    }
    for name, lines in files.items():
        (folder / name).write_text("".join(f"{line}\n" for line in lines))
    return folder


def shop_rows(count: int = 200) -> pl.DataFrame:
    draw = random.Random(1)
    return pl.DataFrame(
        {
            "stars": [draw.randint(1, 5) for _ in range(count)],
            "cost": [draw.choice([None, 1.5, 2.25, -7.0, 1e30]) for _ in range(count)],
            "age": [draw.choice([None, 3, 40, 2**60]) for _ in range(count)],
            "shop id": [draw.choice([None, "", "a", "b", "ç", 'x"y', "c" * 40]) for _ in range(count)],
            "day": [draw.choice([None, 1, 2, -3]) for _ in range(count)],
            "tags": ["|".join(draw.choices(["x", "y", "", "z"], k=draw.randint(0, 4))) for _ in range(count)],
            "seen": [" ".join(draw.choices("xyzw", k=draw.randint(0, 5))) for _ in range(count)],
            "unused": list(range(count)),
        }
    )


def raw_files_of(folder: Path, kind: str) -> tuple[list[Path], PrepareConfig]:
    """Raw files of a format, and how they are prepared."""
    everything: dict[str, Any] = {"test": 0.0, "bad_rows": "stop"}
    if kind in ("csv", "parquet"):
        write_lines(folder / "shops.toml", SCHEMA.splitlines())
        raw = folder / f"rows.{kind}"
        shop_rows().write_csv(raw) if kind == "csv" else shop_rows().write_parquet(raw)
        return [raw], PrepareConfig(format="table", schema=folder / "shops.toml", **everything)
    draw = random.Random(0)
    if kind == "criteo":
        lines = [
            criteo_line(i % 2, [i, draw.choice(["", 0, -1])], [draw.choice(["", "a", "b"])] * 26) for i in range(90)
        ]
        write_lines(folder / "day_2.txt", lines[:30])
        with gzip.open(folder / "day_10.txt.gz", "wt") as file:
            file.write("".join(f"{line}\n" for line in lines[30:]))
        return [folder / "day_*"], PrepareConfig(**everything)
    if kind == "avazu":
        lines = [
            f"{i},{i % 2},141021{i % 24:02},{','.join(draw.choice('abc') for _ in CATEGORICAL)}" for i in range(80)
        ]
        raw = write_lines(folder / "avazu.csv", [",".join(["id", "click", "hour", *CATEGORICAL]), *lines])
        return [raw], PrepareConfig(format="avazu", **everything)
    books = folder / "books"
    books.mkdir()
    write_lines(
        books / "Users.csv", ['"User-ID";"Location";"Age"', *(f"{i};x, {'ab'[i % 2]};{i + 10}" for i in range(9))]
    )
    header = "ISBN;Book-Title;Book-Author;Year-Of-Publication;Publisher"
    write_lines(books / "Books.csv", [header, *(f"{i};t;{'uvw'[i % 3]};1990;p{i % 2}" for i in range(7))])
    ratings = [f"{i % 9};{i // 9};{i % 11}" for i in range(60)]
    write_lines(books / "Ratings.csv", ["User-ID;ISBN;Book-Rating", *ratings])
    return [books], PrepareConfig(format="bookcrossing", positive=">= 7", **everything)
