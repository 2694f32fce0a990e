"""Every family of models through the trainer: learns a planted rule, resumes to the same bits, ranks its cases."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from holdall import checkpoint
from holdall.common.errors import DataError
from holdall.data.arrow_files import write_split_file
from holdall.data.columns import offsets_of
from holdall.data.dataset import DataSet
from holdall.data.items import ItemTable
from holdall.data.ranking_cases import RankingCases
from holdall.data.schema import Feature, Schema, Split
from holdall.evaluation.grouped import grouped_metrics
from holdall.training.config import TrainConfig
from holdall.training.evaluate_run import CHECKPOINTS, evaluate, evaluate_ranking, load_model
from holdall.training.train import train

NUM_USERS, NUM_ITEMS, NUM_CATEGORIES = 30, 40, 4
SMALL = TrainConfig.of(batch_size=64, lr=0.05, deterministic=True, optimizer="adagrad")
FAMILIES = {
    "dcn": SMALL.replace(model="dcn", dim=4, top=(16,), model_setting=("rank=8",)),
    "deepfm": SMALL.replace(model="deepfm", dim=4, top=(16,)),
    "neumf": SMALL.replace(model="neumf", model_setting=("factors=4",)),
    "gmf": SMALL.replace(model="gmf", model_setting=("factors=4",)),
    "tbsm": SMALL.replace(model="tbsm", dim=4, model_setting=("length=5", "event=16,8"), top=(16,)),
    "din": SMALL.replace(model="din", dim=4, model_setting=("length=5", "attention=8"), top=(16,)),
    "two-tower": SMALL.replace(model="two-tower", dim=4, model_setting=("item=item,category", "tower=16,8")),
    "tbsm with hashed tables": SMALL.replace(
        model="tbsm", dim=4, method="hashed", setting=("buckets=20",), min_rows=1, model_setting=("length=5",)
    ),
}


def category(items: np.ndarray) -> np.ndarray:
    return items % NUM_CATEGORIES


def write_split(folder: Path, name: str, num_rows: int, seed: int, anonymous: bool) -> Split:
    """Users choose the items of one category, before and now. `anonymous`: all have the same id."""
    random = np.random.default_rng(seed)
    users = random.integers(NUM_USERS, size=num_rows)
    items = random.integers(NUM_ITEMS, size=num_rows)
    lengths = random.integers(0, 8, size=num_rows)
    past_users = np.repeat(users, lengths)
    past = (
        random.integers(NUM_ITEMS // NUM_CATEGORIES, size=len(past_users)) * NUM_CATEGORIES
        + past_users % NUM_CATEGORIES
    )
    label = category(items) == users % NUM_CATEGORIES
    ids = np.stack([users * (not anonymous), items, category(items)], axis=1).astype(np.int32)
    offsets = offsets_of(lengths)
    lists = {
        "history": (past.astype(np.int32), offsets),
        "history_category": (category(past).astype(np.int32), offsets),
    }
    file = write_split_file(folder / f"{name}.arrow", label.astype(np.uint8), np.zeros((num_rows, 0)), ids, lists)
    return Split(rows=num_rows, positives=int(label.sum()), files=(file,))


@pytest.fixture(scope="module")
def events(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_events(tmp_path_factory.mktemp("data"))


def write_events(folder: Path, anonymous: bool = False) -> Path:
    """A data folder with users, items, categories and histories."""
    sequence = {"kind": "sequence", "max_length": 6}
    schema = Schema(
        label="chosen",
        dense=(),
        features=(
            Feature(name="user", num_rows=NUM_USERS, unseen=0),
            Feature(name="item", num_rows=NUM_ITEMS, unseen=0),
            Feature(name="category", num_rows=NUM_CATEGORIES, unseen=0),
            Feature(name="history", num_rows=NUM_ITEMS, unseen=0, table="item", **sequence),
            Feature(name="history_category", num_rows=NUM_CATEGORIES, unseen=0, table="category", **sequence),
        ),
        splits={
            name: write_split(folder, name, rows, seed, anonymous)
            for seed, (name, rows) in enumerate({"train": 1500, "valid": 100, "test": 200}.items())
        },
    )
    schema.save(folder)
    return folder


@pytest.fixture(scope="module")
def cases(events: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same folder with a ranking case for each positive of the test split."""
    folder = shutil.copytree(events, tmp_path_factory.mktemp("data") / "cases")
    ItemTable(Schema.load(folder), "item", {"category": category(np.arange(NUM_ITEMS))}).save(folder)
    columns = DataSet(folder, "test").columns(0, 200)
    row = np.flatnonzero(columns.label)
    users, items = columns.ids[row, 0], columns.ids[row, 1]
    shift = np.array([1, 2, 3, 5, 6, 7])  # never the user's category
    negatives = (items[:, None] + shift) % NUM_ITEMS
    RankingCases(row, users, items, negatives, np.ones(negatives.shape, dtype=bool)).save(folder, "test")
    return folder


def test_damaged_ranking_cases_are_refused_before_training(cases: Path, tmp_path: Path) -> None:
    data = shutil.copytree(cases, tmp_path / "data")
    (data / "ranking-valid.arrow").write_bytes(b"noise")
    with pytest.raises(DataError, match=r"ranking-valid\.arrow"):
        train(data, tmp_path / "run", FAMILIES["gmf"].replace(steps=2), quiet=True)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_a_planted_rule_is_learned(events: Path, cases: Path, tmp_path: Path, name: str) -> None:
    train(events, tmp_path / "run", FAMILIES[name].replace(epochs=8), quiet=True)
    metrics = evaluate(tmp_path / "run", "test")
    ranked = evaluate_ranking(tmp_path / "run", "test", k=1, data=cases)
    assert ranked["cases"] == metrics["positives"]
    assert ranked["dropped"] == 0
    floor = 0.75 if "hashed" in name else 0.85
    assert metrics["auc"] > floor
    assert ranked["hr@1"] > 0.5  # one in seven by chance


@pytest.mark.parametrize("name", FAMILIES)
def test_resume_continues_to_the_same_bits(events: Path, tmp_path: Path, name: str) -> None:
    config = FAMILIES[name].replace(steps=9)
    train(events, tmp_path / "whole", config, quiet=True)
    train(events, tmp_path / "parts", config.replace(steps=4), quiet=True)
    train(events, tmp_path / "parts", config, quiet=True, resume=True)
    whole, parts = (checkpoint.load(checkpoint.latest(tmp_path / n / CHECKPOINTS))[0] for n in ("whole", "parts"))
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[key], parts[key]) for key in whole)


@pytest.mark.slow
def test_histories_say_what_ids_do_not(tmp_path: Path) -> None:
    """Users without names: an eighth of the samples has no history and can only be guessed, a quarter is positive."""
    data = write_events(tmp_path, anonymous=True)
    train(data, tmp_path / "tbsm", FAMILIES["tbsm"].replace(epochs=8, dim=8, lr=0.1), quiet=True)
    assert evaluate(tmp_path / "tbsm", "test")["auc"] > 0.8  # 0.855 to 0.985 over four seeds
    train(data, tmp_path / "neumf", FAMILIES["neumf"].replace(epochs=2), quiet=True)
    assert evaluate(tmp_path / "neumf", "test")["auc"] < 0.65


def test_metrics_within_users(events: Path, tmp_path: Path) -> None:
    train(events, tmp_path / "run", FAMILIES["gmf"].replace(epochs=8), quiet=True)
    model = load_model(tmp_path / "run")[0]
    found = grouped_metrics(model, DataSet(events, "test"), "user", k=1)
    assert found["groups"] + found["groups_left_out"] == NUM_USERS
    assert found["gauc"] > 0.8
