"""Raw files for the tests of `prepare`, and the prepared rows back as plain Python values."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from holdall.data.formats.criteo import CATEGORICAL, DENSE
from holdall.data.id_map import load_id_maps
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
