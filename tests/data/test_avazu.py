"""`prepare --format avazu`: hour of day and weekday, splits by time, and files that are not the Avazu log."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdall.common.errors import ConfigError, DataError
from holdall.data.formats.avazu import CATEGORICAL
from holdall.data.prepare import PrepareConfig, prepare
from holdall.data.schema import Schema
from tests.data.raw_files import read_map, read_split, write_lines

HEADER = ",".join(["id", "click", "hour", *CATEGORICAL])


def line(hour: object, click: object = 0, site: str = "s") -> str:
    values = {"site_id": site}
    return ",".join(["17", str(click), str(hour), *(values.get(name, "v") for name in CATEGORICAL)])


def run(folder: Path, *lines: str, header: str = HEADER, **options: Any) -> Schema:
    raw = write_lines(folder / "train.csv", [header, *lines])
    return prepare([raw], folder / "out", PrepareConfig(format="avazu", **{"test": 0.0, **options}))


def test_hour_of_day_weekday_and_hours_since_the_first(tmp_path: Path) -> None:
    schema = run(tmp_path, line(14102100, 1), line(14102201), line(14102823), dense="none")
    assert read_split(tmp_path / "out", "train")["dense"] == [[0.0], [25.0], [7 * 24 + 23.0]]
    assert [value for value, _ in read_map(tmp_path / "out", "hour_of_day")] == ["0", "1", "23", None]
    # 21 October 2014 was a Tuesday, as was the 28th.
    assert read_map(tmp_path / "out", "weekday") == [("1", 2), ("2", 1), (None, 0)]
    assert read_split(tmp_path / "out", "train")["label"] == [1, 0, 0]
    assert [feature.name for feature in schema.features] == ["hour_of_day", "weekday", *CATEGORICAL]
    assert (schema.num_dense, len(CATEGORICAL)) == (1, 21)


def test_columns_may_stand_in_any_order(tmp_path: Path) -> None:
    names = ["hour", *reversed(CATEGORICAL), "click"]
    values = {"hour": "14102103", "click": "1", "site_id": "here"}
    run(tmp_path, ",".join(values.get(name, "v") for name in names), header=",".join(names))
    assert read_map(tmp_path / "out", "site_id")[0] == ("here", 1)
    assert read_map(tmp_path / "out", "hour_of_day")[0] == ("3", 1)


def test_a_split_by_time_takes_whole_hours_from_the_end(tmp_path: Path) -> None:
    hours = [14102100] * 6 + [14102101] * 2 + [14102102, 14102103]
    lines = [line(hour, site=str(hour)) for hour in reversed(hours)]  # in no order
    run(tmp_path, *lines, split="time", valid=0.1, test=0.1)
    sites = dict(enumerate(value for value, _ in read_map(tmp_path / "out", "site_id")))
    place = 2 + CATEGORICAL.index("site_id")
    train, valid, test = (read_split(tmp_path / "out", split) for split in ("train", "valid", "test"))
    assert sorted({sites[ids[place]] or "" for ids in train["ids"]}) == ["14102100", "14102101"]
    assert (len(train["label"]), len(valid["label"]), len(test["label"])) == (8, 1, 1)
    assert test["ids"][0][place] == valid["ids"][0][place] == len(sites) - 1  # hours of no training row


def test_a_cut_inside_an_hour_moves_to_its_nearer_end(tmp_path: Path) -> None:
    hours = [14102100] * 5 + [14102101] * 5
    run(tmp_path, *map(line, hours), split="time", test=0.3)
    assert {name: split.rows for name, split in Schema.load(tmp_path / "out").splits.items()} == {"train": 5, "test": 5}


@pytest.mark.parametrize("hour", ["1410210", "141021000", "14103201", "14102124", "", "noon", "-4102100"])
def test_an_hour_that_is_none_is_refused(tmp_path: Path, hour: str) -> None:
    with pytest.raises(DataError, match=r"train.csv, line 3: column 'hour' holds .* instead of an hour as YYMMDDHH"):
        run(tmp_path, line(14102100), line(hour))
    schema = run(tmp_path, line(14102100), line(hour), line("14102100", "x"), bad_rows="skip")
    assert (schema.splits["train"].rows, schema.source["bad_rows"]) == (1, 2)
    listed = (tmp_path / "out/bad_rows.tsv").read_text().splitlines()
    assert [row.split("\t")[1] for row in listed[1:]] == ["3", "4"]


def test_files_of_another_separator_or_version_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"train.csv has no column 'click'"):
        run(tmp_path, line(14102100).replace(",", ";"), header=HEADER.replace(",", ";"))
    with pytest.raises(DataError, match=r"train.csv has no column 'click'.*: correct"):  # the public test file
        run(tmp_path, line(14102100), header=HEADER.replace("click", "clicked"))
    with pytest.raises(DataError, match=r"no column 'C21' \(did you mean"):
        run(tmp_path, line(14102100).rsplit(",", 1)[0], header=HEADER.rsplit(",", 1)[0])


def test_a_split_by_time_is_for_formats_with_a_time(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--split time goes with --format avazu or table, not with taobao"):
        PrepareConfig(format="taobao", split="time")
    with pytest.raises(ConfigError, match=r"--split time"):
        PrepareConfig(format="avazu", split="time", test_from_last_file=True)
    with pytest.raises(DataError, match=r"no row with a readable 'hour'"):
        run(tmp_path, line("x"), split="time")


def test_the_last_of_several_files_can_be_the_test(tmp_path: Path) -> None:
    first = write_lines(tmp_path / "day_2.csv", [HEADER, line(14102200, 1)])
    write_lines(tmp_path / "day_10.csv", [HEADER, line(14103000)])
    config = PrepareConfig(format="avazu", test_from_last_file=True)
    schema = prepare([str(first).replace("day_2", "day_*")], tmp_path / "out", config)
    assert (schema.splits["train"].positives, schema.splits["test"].positives) == (1, 0)  # day_10 comes after day_2
