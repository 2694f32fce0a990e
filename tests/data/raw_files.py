"""Raw files for the tests of `prepare`, and the prepared rows back as plain Python values."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from holdall.data.formats.criteo import CATEGORICAL, DENSE
from holdall.data.id_map import load_id_maps
from holdall.data.prepare import PrepareConfig, prepare
from holdall.data.schema import Schema


def criteo_line(label: object = 0, dense: Sequence[object] = (), values: Sequence[str] = ()) -> str:
    """A Criteo line without its newline; columns not given are empty."""
    columns = [str(label), *map(str, dense), *[""] * (len(DENSE) - len(dense))]
    return "\t".join([*columns, *values, *[""] * (len(CATEGORICAL) - len(values))])


def write_lines(path: Path, lines: Sequence[str]) -> Path:
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8", newline="")
    return path


def read_split(folder: Path, split: str) -> dict[str, list[Any]]:
    """The columns of a split, all files one after the other."""
    tables = []
    for file in Schema.load(folder).splits[split].files:
        reader = pa.ipc.open_file(pa.memory_map(str(folder / file.name)))
        assert reader.num_record_batches == 1
        tables.append(reader.read_all())
    return pa.concat_tables(tables).to_pydict()


def read_map(folder: Path, feature: str) -> list[tuple[str | None, int]]:
    """(value, count) by id."""
    id_map = load_id_maps(folder)[feature]
    return list(zip(id_map.values.to_pylist(), id_map.counts.tolist(), strict=True))


def prepare_films(folder: Path) -> Path:
    """A set of 40 users with 8 of 60 films each, all of the user's parity: odd users see odd films. Years and genres
    are known."""
    lines = [f"{u}::{2 * ((u * 3 + k * (1 + u % 5)) % 30) + u % 2}::4::{k}" for u in range(40) for k in range(8)]
    write_lines(folder / "ratings.dat", lines)
    genres = ["", "a", "b|c", "a|b|c"]
    write_lines(folder / "movies.dat", [f"{item}::film ({1900 + item})::{genres[item % 4]}" for item in range(60)])
    prepare([folder], folder / "out", PrepareConfig(format="movielens", candidates=10, valid=0.5))
    return folder / "out"
