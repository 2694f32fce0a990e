"""Criteo Terabyte: day files of the Criteo layout, the last of which is the test."""

from __future__ import annotations

import gzip
from pathlib import Path

from holdall.data.prepare import PrepareConfig, prepare
from tests.data.raw_files import criteo_line, read_map


def test_the_last_day_is_the_test_and_days_are_counted_as_numbers(tmp_path: Path) -> None:
    for day in range(12):
        with gzip.open(tmp_path / f"day_{day}.gz", "wt") as file:
            file.write(criteo_line(label=int(day == 11), values=[f"day{day}"]) + "\n")
    config = PrepareConfig(format="criteo", test_from_last_file=True)
    schema = prepare([str(tmp_path / "day_*.gz")], tmp_path / "out", config)
    assert (schema.splits["train"].rows, schema.splits["test"].rows) == (11, 1)
    assert (schema.splits["train"].positives, schema.splits["test"].positives) == (0, 1)
    assert ("day11", 0) not in read_map(tmp_path / "out", "C1")
    names = [Path(file["name"]).name for file in schema.source["files"]]
    assert names == [f"day_{day}.gz" for day in range(12)]
