"""Readers on samples of the public data sets, where these are stored beside the project."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from holdall.data.dataset import DataSet
from holdall.data.negatives import Positives
from holdall.data.prepare import PrepareConfig, prepare
from holdall.data.ranking_cases import RankingCases

pytestmark = pytest.mark.slow

SAMPLES = Path(__file__).parents[3] / "shared/data"


def sample(name: str) -> Path:
    if not (SAMPLES / name).exists():
        pytest.skip(f"no sample of the public data at {SAMPLES / name}")
    return SAMPLES / name


def test_avazu(tmp_path: Path) -> None:
    schema = prepare([sample("avazu/train.csv.gz")], tmp_path / "out", PrepareConfig(format="avazu"))
    assert sum(split.rows for split in schema.splits.values()) == 29_872
    assert sum(split.positives for split in schema.splits.values()) == 5_130
    assert schema.feature("hour_of_day").num_rows == 24 + 1


def test_movielens_in_ncf_numbering(tmp_path: Path) -> None:
    schema = prepare([sample("ml-1m")], tmp_path / "out", PrepareConfig(format="movielens", valid=0))
    assert (schema.splits["train"].rows, schema.splits["test"].positives) == (994_169, 6_040)
    assert schema.cardinalities == {"user": 6_040 + 1, "item": 3_704 + 1}
    counts = schema.source["counts"]
    assert (counts["negatives_equal_positive"], counts["negatives_repeated"]) == (156, 0)
    cases = RankingCases.load(tmp_path / "out")
    assert cases.negatives.shape == (6_040, 99)
    assert int((~cases.keep).sum()) == 156
    known = Positives.of(DataSet(tmp_path / "out"))
    assert not known.contains(np.repeat(cases.user, 99), cases.negatives.ravel()).any()
    schema = prepare([sample("ml-1m")], tmp_path / "leave-two-out", PrepareConfig(format="movielens"))
    assert (schema.splits["train"].rows, schema.splits["valid"].positives) == (994_169 - 6_040, 6_040)


def test_taobao(tmp_path: Path) -> None:
    schema = prepare([sample("taobao")], tmp_path / "out", PrepareConfig(format="taobao", candidates=9))
    assert (schema.splits["train"].rows, schema.splits["test"].positives) == (227_108, 54_723)
    assert schema.cardinalities["item"] == 24_224 + 1
    assert all(schema.source["counts"][name] == 0 for name in ("users_without_attributes", "items_without_attributes"))


def test_bookcrossing(tmp_path: Path) -> None:
    schema = prepare([sample("bookcrossing")], tmp_path / "out", PrepareConfig(format="bookcrossing"))
    assert sum(split.rows for split in schema.splits.values()) == 1_149_780 - 1  # one is rated twice
    assert sum(split.positives for split in schema.splits.values()) == 433_670
    assert schema.source["bad_rows"] == 2  # the two halves of a user whose town has a line break in it
