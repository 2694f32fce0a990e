"""Comparison of models with those of libraries: our sides train and are measured; the libraries need not be there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.models import MODELS, batches_of, run
from holdall.data.dataset import DataSet
from holdall.data.prepare import PrepareConfig, prepare
from tests.serving.made_up import implicit_files


@pytest.fixture(scope="module")
def implicit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("implicit")
    config = PrepareConfig(format="taobao", valid=0.1, candidates=20)
    prepare([str(implicit_files(folder / "raw"))], folder / "data", config)
    return folder / "data"


@pytest.mark.parametrize("name", ["din", "two-tower"])
def test_our_side_is_trained_and_measured(name: str, implicit: Path) -> None:
    case = replace(MODELS[name], steps=7, batch_size=100)
    batches = batches_of(case, DataSet(implicit, "train"), 0)
    assert len(batches) == 7  # of several epochs
    found = run(case, implicit, "holdall", 0.01, 0, "test")
    assert found["side"] == "holdall"
    assert 0.0 <= found[case.metric] <= 1.0
    assert found["samples_per_second"] > 0
