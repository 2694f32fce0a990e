"""Predicted messages of a step, compared with those that processes counted."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.simulate import WAYS, compare, law
from holdall.data.zipf import Zipf
from holdall.planning.messages import two_fold_messages

pytestmark = pytest.mark.slow


def test_bytes_are_those_that_were_expected() -> None:
    found = compare([3000, 400, 5, 20_000], 8, 256, [2], 12)
    assert [line["way"] for line in found["bytes"]] == list(WAYS)
    for line in found["bytes"]:
        assert line["predicted"] == pytest.approx(line["counted"], rel=0.03), line["way"]
        assert abs(line["its error"]) < 0.05, line["worst kind"]
    exact = {line["way"]: line for line in found["bytes"]}["table-wise"]
    assert exact["predicted"] == exact["counted"]
    assert found["hot rows"][2]["two-fold"] > 5, "some rows are hot, or little was compared"
    assert {line["processes"] for line in found["seconds"]} == {2}


def test_the_law_of_the_ids_is_the_one_that_is_expected() -> None:
    drawn, known = Zipf(50_000, 1.05), law(50_000)
    assert known.num_rows == 50_000
    assert known.per_sample == pytest.approx(1.0)
    for rank in (0, 7, 999, 5000, 49_999):
        expected = -np.expm1(500 * np.log1p(-drawn.probability(rank)))
        assert known.touched(500, rank) == pytest.approx(expected, rel=0.02)
    assert law(3).num_rows == 3
    assert law(1).touched(10, 0) == 1


def test_a_row_is_asked_for_once_however_often_it_is_looked_up() -> None:
    common = {"row_bytes": 64, "batch_size": 2048, "world_size": 4}
    by_kind = {m.kind: m.sent for m in two_fold_messages({"a": law(1)}, {}, **common)}
    assert by_kind["cold_rows"] == 64 * 3 / 4
    sent = sum(message.sent for message in two_fold_messages({"a": law(100_000)}, {}, **common))
    assert sent < 0.6 * 2048 * (4 + 128) * 3 / 4
