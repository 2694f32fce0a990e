"""`prepare` of frames in memory: the folder of a Parquet file with the same rows, byte for byte."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from holdall.common.errors import ConfigError, DataError
from holdall.data import read_parquet
from holdall.data.formats import frame as frames
from holdall.data.prepare import PrepareConfig, prepare
from holdall.data.schema import Schema

TOML = """
label = "click"
dense = ["price", { name = "age", transform = "standard" }]
categorical = ["user", "site"]
[[bag]]
name = "tags"
"""
COLUMNS: dict[str, Any] = {
    "label": "click",
    "dense": ["price", {"name": "age", "transform": "standard"}],
    "categorical": ["user", "site", "tags"],
}


def clicks(count: int = 300) -> pa.Table:
    draw = random.Random(0)
    return pa.table(
        {
            "click": [draw.random() < 0.3 for _ in range(count)],
            "price": [draw.choice([None, 1.5, 20.0, 7.25]) for _ in range(count)],
            "age": [draw.choice([None, *range(18, 70)]) for _ in range(count)],
            "user": [draw.choice([None, 7.0, 8.0, 9.0]) for _ in range(count)],
            "site": pa.array([draw.choice([None, "news", "shop", ""]) for _ in range(count)]).dictionary_encode(),
            "tags": [draw.sample(["a", "b", "c"], draw.randint(0, 3)) for _ in range(count)],
            "unused": [object.__name__] * count,
        }
    )


def as_pandas(table: pa.Table) -> Any:
    pytest.importorskip("pandas")
    return table.to_pandas().set_index("unused")


FORMS: dict[str, Any] = {
    "Arrow": lambda table: table,
    "slices": lambda table: pa.concat_tables([table[:70], table[70:]]),
    "record batch": lambda table: table.combine_chunks().to_batches()[0],
    "polars": pl.from_arrow,
    "pandas": as_pandas,
}


def content(folder: Path) -> dict[str, bytes]:
    """All files but the schema, which names the sources."""
    files = (file for file in sorted(folder.rglob("*")) if file.is_file() and file.name != "schema.json")
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


@pytest.mark.parametrize("form", FORMS)
def test_a_frame_gives_the_folder_of_its_parquet_file(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frames, "ROWS_PER_BLOCK", 64)
    monkeypatch.setattr(read_parquet, "ROWS_PER_BLOCK", 64)
    (tmp_path / "schema.toml").write_text(TOML)
    pq.write_table(clicks(), tmp_path / "a.parquet")
    config = PrepareConfig(format="table", schema=tmp_path / "schema.toml", valid=0.1, test=0.2, rare_below=2)
    expected = prepare([tmp_path / "a.parquet"], tmp_path / "expected", config)
    given = FORMS[form](clicks())
    plain = PrepareConfig(valid=0.1, test=0.2, rare_below=2)
    found = [prepare(given, tmp_path / "named", plain, **COLUMNS), prepare(given, tmp_path / "toml", config)]
    for made, name in zip(found, ("named", "toml"), strict=True):
        assert content(tmp_path / name) == content(tmp_path / "expected")
        assert (made.features, made.dense, made.splits) == (expected.features, expected.dense, expected.splits)
        assert made.layout == expected.layout
        assert made.source["format"] == made.source["options"]["format"] == "table"
        assert Schema.load(tmp_path / name) == made


def test_columns_are_guessed_where_none_is_named(tmp_path: Path) -> None:
    made = prepare(clicks(), tmp_path / "data", label="click")
    assert [column.name for column in made.dense] == ["price", "age"]
    kinds = {feature.name: feature.kind for feature in made.features}
    assert kinds == {"user": "categorical", "site": "categorical", "tags": "bag"}


def test_what_is_wrong_with_a_frame_is_named(tmp_path: Path) -> None:
    table = clicks(20)
    with pytest.raises(DataError, match="the frame, line 2: column 'price' holds nan"):
        prepare(pa.table({"y": [0, 1], "price": [1.0, float("nan")]}), tmp_path / "a", label="y", dense=["price"])
    with pytest.raises(DataError, match=r"the frame has no column 'users' \(did you mean 'user'"):
        prepare(table, tmp_path / "a", label="click", categorical=["users"])
    with pytest.raises(ConfigError, match="a frame needs the name of its label"):
        prepare(table, tmp_path / "a", categorical=["user"])
    with pytest.raises(DataError, match="holds no rows"):
        prepare(table[:0], tmp_path / "a", label="click", categorical=["user"])
    with pytest.raises(ConfigError, match="label goes with a frame"):
        prepare([tmp_path / "a.csv"], tmp_path / "a", label="click")
    (tmp_path / "schema.toml").write_text(TOML)
    config = PrepareConfig(format="table", schema=tmp_path / "schema.toml")
    with pytest.raises(ConfigError, match="the schema names the columns"):
        prepare(table, tmp_path / "a", config, label="click")
    assert not (tmp_path / "a").exists()
