"""`--split time`: the newest rows are held out, whatever the order of the files and the form of the times."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from holdall.common.errors import ConfigError, DataError
from holdall.data.infer_schema import schema as infer
from holdall.data.prepare import PrepareConfig, prepare
from holdall.data.schema import Schema
from holdall.data.time_split import TimeCounts, splits_of
from tests.data.raw_files import read_map, read_split

TOML = 'label = "y"\ntime = "t"\ncategorical = ["c"]\ndense = [{ name = "n", transform = "none" }]\n'
START = datetime.datetime(2024, 5, 31, 12)
ORDER = np.random.default_rng(0).permutation(100)
"""Place in time of each row."""


def times(form: str) -> pa.Array:
    dates = [START + datetime.timedelta(minutes=37 * int(place)) for place in ORDER]
    made: dict[str, Any] = {
        "seconds": [date.timestamp() for date in dates],
        "integers": [int(date.timestamp() * 1e9) for date in dates],
        "iso": [date.isoformat(sep=" " if date.hour % 2 else "T") for date in dates],
        "zoned": [(date + datetime.timedelta(hours=2)).isoformat() + "+02:00" for date in dates],
        "compact": [date.strftime("%Y%m%d%H%M") for date in dates],
        "timestamp": pa.array(dates, pa.timestamp("ms")),
        "nanoseconds": pa.array(dates, pa.timestamp("ns", "Europe/Paris")),
        "dictionary": pa.array([date.isoformat() for date in dates]).dictionary_encode(),
    }
    return pa.array(made[form])


def table(form: str) -> pa.Table:
    return pa.table({"y": ORDER % 2, "t": times(form), "c": [f"c{n}" for n in ORDER], "n": ORDER})


def run(folder: Path, *tables: pa.Table, toml: str = TOML, **options: Any) -> Schema:
    (folder / "schema.toml").write_text(toml, encoding="utf-8")
    files = [folder / f"{number}.parquet" for number in range(len(tables))]
    for file, part in zip(files, tables, strict=True):
        pq.write_table(part, file)
    options = {"split": "time", "overwrite": True, **options}
    return prepare(files, folder / "out", PrepareConfig(format="table", schema=folder / "schema.toml", **options))


def numbers(folder: Path, split: str) -> list[float]:
    return sorted(value for (value,) in read_split(folder / "out", split)["dense"])


@pytest.mark.parametrize(
    "form", ["seconds", "integers", "iso", "zoned", "compact", "timestamp", "nanoseconds", "dictionary"]
)
def test_the_newest_rows_are_held_out(form: str, tmp_path: Path) -> None:
    rows = table(form)
    run(tmp_path, rows.slice(0, 30), rows.slice(30), valid=0.2, test=0.1)
    assert numbers(tmp_path, "train") == list(range(70))
    assert numbers(tmp_path, "valid") == list(range(70, 90))
    assert numbers(tmp_path, "test") == list(range(90, 100))
    assert {value for value, count in read_map(tmp_path / "out", "c") if count} == {f"c{n}" for n in range(70)}


def test_text_files_and_frames_split_alike(tmp_path: Path) -> None:
    rows = table("iso")
    (tmp_path / "schema.toml").write_text(TOML)
    lines = [",".join(map(str, row.values())) for row in rows.to_pylist()]
    (tmp_path / "a.csv").write_text("\n".join(["y,t,c,n", *lines]) + "\n")
    config = PrepareConfig(format="table", schema=tmp_path / "schema.toml", split="time", valid=0.2)
    prepare([tmp_path / "a.csv"], tmp_path / "text", config)
    dense = [{"name": "n", "transform": "none"}]
    config = PrepareConfig(split="time", valid=0.2)
    prepare(rows, tmp_path / "frame", config, label="y", time="t", categorical=["c"], dense=dense)
    for split in ("train", "valid", "test"):
        assert read_split(tmp_path / "text", split) == read_split(tmp_path / "frame", split)
    assert sorted(value for (value,) in read_split(tmp_path / "text", "test")["dense"]) == list(range(90, 100))


def test_rows_of_one_time_stay_together(tmp_path: Path) -> None:
    days = pa.array([datetime.date(2024, 1, 1 + int(place) // 8) for place in ORDER])
    run(tmp_path, table("iso").set_column(1, "t", days), test=0.1)
    assert numbers(tmp_path, "test") == list(range(88, 100))
    same = pa.array(np.where(ORDER < 5, 1, 2))
    with pytest.raises(DataError, match=r"no rows for --test 0\.1: 95% of the rows in .*have the latest time"):
        run(tmp_path, table("iso").set_column(1, "t", same), test=0.1)


def test_the_time_is_not_read_without_need(tmp_path: Path) -> None:
    rows = table("iso").set_column(1, "t", pa.array([None] * 100, pa.string()))
    assert run(tmp_path, rows, split="random", test=0.0).splits["train"].rows == 100
    with pytest.raises(DataError, match=r"line 1: the time \(column 't'\) is None, which is no time"):
        run(tmp_path, rows.slice(0, 5))


def test_times_that_cannot_be_compared_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"'t' has dates in .*0\.parquet and numbers in .*1\.parquet"):
        run(tmp_path, table("iso"), table("seconds"))
    with pytest.raises(DataError, match=r"is of type list.*times are numbers, dates"):
        run(tmp_path, table("iso").set_column(1, "t", pa.array([[1]] * 100)))
    wrong = table("iso").set_column(1, "t", pa.array(["May 3, 2015"] * 100))
    with pytest.raises(DataError, match="no time: give seconds or another number, or a date as 2024-05-31"):
        run(tmp_path, wrong)


def test_a_split_by_time_needs_a_time(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--split time needs the time of each row: name its column in the schema"):
        run(tmp_path, table("iso"), toml=TOML.replace('time = "t"\n', ""))
    with pytest.raises(ConfigError, match="not with movielens"):
        PrepareConfig(format="movielens", split="time")
    with pytest.raises(ConfigError, match="two ways to hold rows out"):
        PrepareConfig(format="table", schema=Path("x"), split="time", test_from_last_file=True)


def test_times_are_counted_in_bounded_memory() -> None:
    draw = np.random.default_rng(1)
    everything = draw.random(50_000)
    counts = TimeCounts(max_times=2000)
    for part in np.split(everything, 100):
        counts.add(part)
        assert len(counts.times) <= 2000
    counts.merge()
    assert counts.counts.sum() == len(everything)
    splits = splits_of(everything, counts.cuts(0.1, 0.2, "here"))
    assert np.abs(np.bincount(splits) / len(everything) - [0.7, 0.1, 0.2]).max() < 0.03


def test_a_time_is_guessed_and_explained(tmp_path: Path) -> None:
    rows = pa.table(
        {"click": ORDER % 2, "when": times("iso"), "user": [f"c{n % 7}" for n in ORDER], "at": times("iso")}
    )
    pq.write_table(rows, tmp_path / "a.parquet")
    made = infer(tmp_path / "a.parquet")
    assert 'time = "when"  # a time, for --split time' in made
    assert "#   at: a time, for --split time; no input of the model; 'when' is the time already" in made
    (tmp_path / "a.toml").write_text(made)
    config = PrepareConfig(format="table", schema=tmp_path / "a.toml", split="time")
    assert prepare([tmp_path / "a.parquet"], tmp_path / "out", config).splits["test"].rows == 10
