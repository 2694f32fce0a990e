"""Short form of the attack on rows; the long form is part of `python -m benchmarks.attacks`."""

from __future__ import annotations

import csv

import pytest

from tests.attacks import rows
from tests.attacks.bad_lines import split_csv, split_quoted
from tests.attacks.rows import FORMATS, Outcomes, attack_rows


@pytest.mark.parametrize("seed", [0, 1])
def test_every_row_is_identical_or_refused(seed: int) -> None:
    outcomes = attack_rows(seed, 1000)
    assert outcomes.defects == []
    assert outcomes.needless == []
    assert set(outcomes.by_format) == set(FORMATS)
    for kind, counts in outcomes.by_format.items():
        assert set(counts) == {"identical", "refused"}, kind
        assert min(counts.values()) >= 10, kind
    assert outcomes.counts.total() >= 1000


def test_a_reader_that_drops_quotes_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "split_movie", lambda line: next(csv.reader([line[:LONGEST]]), []))
    monkeypatch.setattr(rows, "FORMATS", {"movies": rows.attack_movies})
    assert attack_rows(0, 500).counts["silent"] > 0


def test_a_reader_that_raises_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "split_movie", lambda line: [str(int(line)), "", ""])
    monkeypatch.setattr(rows, "FORMATS", {"movies": rows.attack_movies})
    outcomes = attack_rows(0, 100)
    assert (outcomes.counts["traceback"], len(outcomes.defects)) == (100, 1)
    assert "ValueError" in outcomes.defects[0]


LONGEST = 100_000  # csv raises an error for longer fields


def test_the_judge() -> None:
    outcomes = Outcomes()
    outcomes.judge("k", b"1", (1,), (1,), None)
    outcomes.judge("k", b"1", (1,), (2,), None)
    outcomes.judge("k", b"1", None, (1,), None)
    outcomes.judge("k", b"1", None, None, "a sentence")
    outcomes.judge("k", b"1", None, None, "two\nlines")
    outcomes.judge("k", b"1", (1,), None, "a sentence")
    assert outcomes.counts == {"identical": 1, "silent": 2, "refused": 2, "traceback": 1}
    assert (len(outcomes.defects), len(outcomes.needless)) == (3, 1)


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ('a,"b,c",', ["a", "b,c", ""]),
        ('"a ""b""",', ['a "b"', ""]),
        ('"",""', ["", ""]),
        ('"a"b', None),
        ('a,"b', None),
        ('"a"",b', None),
    ],
)
def test_lines_with_quotes_are_split(text: str, fields: list[str] | None) -> None:
    assert split_quoted(text, ",") == fields
    assert split_csv(text) == fields
    assert split_quoted('a"b', ",") is None
    assert split_csv('a"b') == ['a"b']
