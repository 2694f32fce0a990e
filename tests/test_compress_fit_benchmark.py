"""The benchmark of `compress(fit=True)`: the rows that it draws, and the summary of its runs."""

from __future__ import annotations

import gzip
from pathlib import Path

from benchmarks.compress_fit import BUDGETS, SIDES, draw_rows, summary


def test_rows_are_drawn_once_each_below_the_header(tmp_path: Path) -> None:
    lines = [b"header\n", *(f"{line}\n".encode() for line in range(100))]
    with gzip.open(tmp_path / "all.gz", "wb") as file:
        file.writelines(lines)
    drawn = gzip.decompress(draw_rows(tmp_path / "all.gz", tmp_path / "some.gz", 30).read_bytes()).splitlines()
    assert drawn[0] == b"header"
    numbers = [int(line) for line in drawn[1:]]
    assert len(numbers) == 30
    assert numbers == sorted(set(numbers))


def test_the_summary_has_the_mean_and_the_ends_of_every_side() -> None:
    runs = [
        {"budget": budget, "side": side, "seed": seed, "dense": 0.8, "loss": 0.01 * seed, "times": 10.0}
        for budget in BUDGETS
        for side in SIDES
        for seed in (0, 1, 2)
    ]
    found = summary(runs)
    assert len(found) == len(BUDGETS) * len(SIDES)
    assert (found[0]["loss"], found[0]["least"], found[0]["most"]) == (0.01, 0.0, 0.02)
