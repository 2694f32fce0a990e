"""The NeuMF benchmark on a made-up set: its batches are the product's, and every kind of model trains and is ranked."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.neumf import best_of, prepare_sets, setting_of, summarise
from benchmarks.neumf_model import SHARE, Job, Setting, batches, run, state_file
from holdall.data.dataset import DataSet
from holdall.data.negatives import training_loader
from tests.data.raw_files import write_lines

pytestmark = pytest.mark.slow

SMALL = Setting(factors=16, num_layers=2, epochs=2, batch_size=60, lr=0.02)


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """60 users with 6 of 50 films and one more as the test; 20 negatives each, the first user's first the positive."""
    raw, out = tmp_path_factory.mktemp("raw"), tmp_path_factory.mktemp("sets")
    chosen = {user: [(user * 7 + 3 * k) % 50 for k in range(7)] for user in range(60)}
    others = {user: [item for item in range(50) if item not in items][:20] for user, items in chosen.items()}
    others[0][0] = chosen[0][6]
    write_lines(raw / "s.train.pairs.tsv", [f"{u}\t{i}" for u, items in chosen.items() for i in items[:6]])
    write_lines(raw / "s.test.rating", [f"{u}\t{items[6]}\t5\t9" for u, items in chosen.items()])
    lines = [f"({u},{chosen[u][6]})\t" + "\t".join(map(str, items)) for u, items in others.items()]
    write_lines(raw / "s.test.negative", lines)
    return prepare_sets(raw, out)


def job(sets: dict[str, Path], setting: Setting = SMALL, data: str = "search", seconds: float = 60) -> Job:
    split = {"search": "valid", "final": "test"}[data]
    deadline = time.time() + seconds
    return Job(setting=setting, data=str(sets[data]), split=split, seed=1, device="cpu", deadline=deadline)


def test_the_final_set_has_the_pair_that_the_search_holds_out(sets: dict[str, Path]) -> None:
    rows = {name: {split: len(DataSet(path, split)) for split in ("train", "test")} for name, path in sets.items()}
    assert rows["search"]["train"] == 60 * 5
    assert rows["final"]["train"] == 60 * 6


@pytest.mark.parametrize("batch_size", [60, 64, 1000])
def test_batches_are_those_of_training(sets: dict[str, Path], batch_size: int) -> None:
    loader = training_loader(DataSet(sets["search"], "train"), batch_size, num_negatives=4, shuffle="rows", seed=1)
    for epoch in range(2):
        found = list(batches(job(sets, replace(SMALL, batch_size=batch_size)), epoch, torch.device("cpu")))
        expected = list(loader.epoch(epoch))
        assert len(found) == len(expected) == loader.num_batches
        for ours, theirs in zip(found, expected, strict=True):
            assert torch.equal(ours.ids.values, theirs.ids.values.int())
            assert torch.equal(ours.label, theirs.label)


def test_a_dense_model_and_one_fitted_to_it(sets: dict[str, Path]) -> None:
    dense = run(job(sets))
    assert dense is not None
    assert dense["ndcg@10"] == dense["curve"][-1][2]
    assert len(dense["curve"]) == 2
    assert state_file(str(sets["search"]), SMALL, 1).exists()
    fitted = replace(SMALL, method="mixed_dimension", item_share=SHARE, tune_epochs=1, tune_lr=0.01)
    found = run(job(sets, fitted))
    assert found is not None
    assert len(found["curve"]) == 2  # the fit, and one epoch
    assert found["bytes"] < dense["bytes"] / 4
    rows = [{**vars(setting), **result} for setting, result in ((SMALL, dense), (fitted, found))]
    assert setting_of(best_of(rows, factors=16, num_bytes=dense["bytes"] / 4)) == fitted
    assert best_of(rows, factors=16)["ndcg@10"] == max(dense["ndcg@10"], found["ndcg@10"])


def test_rows_are_rounded_at_the_end(sets: dict[str, Path]) -> None:
    assert run(job(sets, replace(SMALL, factors=32))) is not None
    rounded = replace(SMALL, factors=32, method="mixed_dimension", bits=8, item_share=SHARE, tune_epochs=1)
    found = run(job(sets, rounded))
    assert found is not None
    assert "bits=8" in found["tables"]["user"]
    assert found["bytes"] <= SHARE * 4 * 64 * (61 + 51)


def test_the_test_is_ranked_once_and_leaves_out_the_positive_among_the_negatives(sets: dict[str, Path]) -> None:
    found = run(job(sets, data="final"))
    assert found is not None
    assert (found["cases"], found["dropped"]) == (60, 1)
    assert all(len(line) == 1 for line in found["curve"])  # losses alone
    mean = summarise("dense", [found, {**found, "hr@10": found["hr@10"] / 2}])
    assert mean["hr@10"] == pytest.approx(found["hr@10"] * 0.75)
    assert (mean["hr@10 lowest"], mean["hr@10 highest"]) == (found["hr@10"] / 2, found["hr@10"])


def test_models_without_time_or_room_are_left_out(sets: dict[str, Path]) -> None:
    assert run(job(sets, seconds=-1)) is None
    assert run(job(sets, replace(SMALL, method="quantized"))) is None
