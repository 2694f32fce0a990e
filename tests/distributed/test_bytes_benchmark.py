"""The benchmark of bytes per sample counts the bytes that are computed here by hand."""

from __future__ import annotations

import pytest

from benchmarks.bytes import bytes_per_sample, hot_rows

pytestmark = pytest.mark.slow


def test_bytes_of_small_tables() -> None:
    # One row a table, looked up by all 32 samples of both processes: a row is asked for once, a vector every time.
    found = {line["way"]: line for line in bytes_per_sample([1, 1], 4, 32, 2, 2, 2.0)["lines"]}
    row, counts = 4 * 4, 8 + 3 * 8
    # Table 0 belongs to process 0, table 1 to process 1: each asks for one row, answers with one, sends one gradient.
    assert found["row-wise"]["bytes a sample"] == pytest.approx((counts + 4 + 2 * row) / 32)
    assert found["table-wise"]["bytes a sample"] == pytest.approx(3 * 8 / 32 + 4 + 2 * row)
    assert found["row-wise, every lookup"]["bytes a sample"] == pytest.approx(4 + 2 * row)
    assert found["two-fold"]["hot rows"] == 0, "no row is touched with a probability of 2"
    assert found["two-fold"]["bytes a sample"] == found["row-wise"]["bytes a sample"]


def test_hot_rows_are_those_a_batch_holds() -> None:
    assert hot_rows(1000, 100_000, 0.5) == 1000
    assert hot_rows(1000, 1, 0.5) == 0
    assert hot_rows(10, 5, 0.0) == 10
    few, more = hot_rows(10_000, 256, 0.9), hot_rows(10_000, 1024, 0.9)
    assert 0 < few < more < 10_000
