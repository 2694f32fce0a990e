"""DeepFM, DIN and two towers against the same models of public libraries: quality on a test split, and speed.

    python -m benchmarks.models [--source ../shared/data] [--seeds 3] [--only deepfm din two-tower] [--search]

| model | data | library | metric |
| --- | --- | --- | --- |
| DeepFM | Criteo Kaggle sample, one epoch | deepctr-torch | AUC |
| DIN | Taobao ads, 100 steps | deepctr-torch | AUC |
| two towers | MovieLens-1M, 500 steps | torch-rechub (DSSM) | HR@10 among 100 |

All sides get the same batches in the same order, sizes, optimizer (Adam) and number of steps, no regularisation, and
keep their own initial values. The rates of DeepFM and DIN are the best of three for each side on the validation split,
with one seed (`--search`); the towers train at 0.01 on all sides. Vectors of DeepFM have 15 numbers on both sides,
beside the first-order weight. DINs have ReLUs, since Dice depends on the batch.

torch-rechub's trainer applies no temperature to in-batch scores; here it has ours. It does not correct for the
popularity of items; *corrected* is the same with log q subtracted from its scores (Yi et al.). Its towers
normalise by batch and end in a ReLU, and it leaves no copies of the positive out. Data and libraries are not part of
this repository: `benchmarks.rivals` says how to install them.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import rivals
from benchmarks.card import print_table, write_card
from benchmarks.models_sides import LENGTH, Side, deep_ctr, ours, rec_hub_towers
from holdall.data.batch import Batch
from holdall.data.dataset import DataSet
from holdall.data.loader import Loader
from holdall.data.negatives import training_loader
from holdall.data.prepare import PrepareConfig, prepare
from holdall.data.ranking_cases import RankingCases
from holdall.evaluation.metrics import BinaryMetrics
from holdall.evaluation.ranking import RankingMetrics
from holdall.models import DeepFMConfig, DINConfig, TwoTowerConfig

SEARCH = (0.001, 0.003, 0.01)
RATES = {("deepfm", "holdall"): 0.003, ("deepfm", "deepctr-torch"): 0.001}
DEFAULT_RATE = 0.01
"""Learning rates by model and side, and of all others."""
TEST_ROWS = 50_000
CASES = 2_000
"""Rows, or ranking cases, of a split that are scored."""

DIN = DINConfig(dim=16, attention=(64, 16), top=(200, 80), length=LENGTH, activation="relu")
TOWERS = TwoTowerConfig(dim=16, tower=(64, 32))


@dataclass(frozen=True)
class Case:
    """One model on one data set, with its sides by data set, learning rate and seed."""

    source: str
    prepare: PrepareConfig
    batch_size: int
    steps: int
    negatives: int
    sides: dict[str, Callable[[DataSet, float, int], Side]]
    metric: str = "auc"


MODELS = {
    "deepfm": Case(
        source="criteo_kaggle/train.tsv.gz",
        prepare=PrepareConfig(valid=0.05, test=0.2),
        batch_size=512,
        steps=200,
        negatives=4,
        sides={
            "holdall": lambda data, lr, seed: ours(DeepFMConfig(dim=16, top=(256, 128)), data, lr, seed, 4),
            "deepctr-torch": lambda data, lr, seed: deep_ctr(
                "DeepFM", data, lr, seed, dim=15, dnn_hidden_units=(256, 128), l2_reg_linear=0.0
            ),
        },
    ),
    "din": Case(
        source="taobao",
        prepare=PrepareConfig(format="taobao", valid=0.2),
        batch_size=1024,
        steps=100,
        negatives=4,
        sides={
            "holdall": lambda data, lr, seed: ours(DIN, data, lr, seed, 4),
            "deepctr-torch": lambda data, lr, seed: deep_ctr(
                "DIN",
                data,
                lr,
                seed,
                dim=16,
                dnn_hidden_units=DIN.top,
                att_hidden_size=DIN.attention,
                att_activation="relu",
            ),
        },
    ),
    "two-tower": Case(
        source="ml-1m",
        prepare=PrepareConfig(format="movielens"),
        batch_size=1024,
        steps=500,
        negatives=0,
        sides={
            "holdall": lambda data, lr, seed: ours(TOWERS, data, lr, seed, 0),
            "torch-rechub": lambda data, lr, seed: rec_hub_towers(TOWERS, data, lr, seed),
            "torch-rechub, corrected": lambda data, lr, seed: rec_hub_towers(TOWERS, data, lr, seed, corrected=True),
        },
        metric="hr@10",
    ),
}


def batches_of(case: Case, data: DataSet, seed: int) -> list[Batch]:
    """Batches of a training run, drawn before the clock starts."""
    loader = training_loader(data, case.batch_size, num_negatives=case.negatives, shuffle="rows", seed=seed)
    found: list[Batch] = []
    for epoch in range(case.steps):
        found.extend(islice(loader.epoch(epoch), case.steps - len(found)))
        if len(found) == case.steps:
            break
    return found


def train(side: Side, batches: list[Batch]) -> float:
    """Seconds to train on all batches."""
    start = time.perf_counter()
    for batch in batches:
        side.loss(batch).backward()
        side.step()
    return time.perf_counter() - start


@torch.no_grad()
def quality(case: Case, side: Side, folder: Path, split: str) -> dict[str, float]:
    """Metrics of a trained model on a split."""
    data = DataSet(folder, split)
    side.model.eval()  # torch-rechub's towers normalise by batch while they train
    if case.metric == "auc":
        metrics = BinaryMetrics()
        for batch in islice(Loader(data, 4096, shuffle="none").epoch(0), -(-TEST_ROWS // 4096)):
            metrics.update(side.model(batch).float(), batch.label)
        return {"auc": metrics.compute()["auc"]}
    ranking = RankingMetrics(10)
    for batch, counts in islice(RankingCases.load(folder, split).batches(data, 100), CASES // 100):
        ranking.update(side.model(batch).view(counts.shape), counts)
    return {name: ranking.compute()[name] for name in ("hr@10", "ndcg@10")}


def run(case: Case, folder: Path, side: str, rate: float, seed: int, split: str) -> dict[str, Any]:
    """One model trained and measured."""
    data = DataSet(folder, "train")
    batches = batches_of(case, data, seed)
    torch.manual_seed(seed)
    made = case.sides[side](data, rate, seed)
    seconds = train(made, batches)
    samples = sum(len(batch) for batch in batches)
    found = quality(case, made, folder, split)
    return {"side": side, "rate": rate, "seed": seed, **found, "samples_per_second": samples / seconds}


def compare(name: str, folder: Path, seeds: int) -> dict[str, Any]:
    """All sides on the test split, in turn."""
    case, runs = MODELS[name], []
    for seed in range(1, seeds + 1):
        rates = [(side, RATES.get((name, side), DEFAULT_RATE)) for side in case.sides]
        in_turn = rates if seed % 2 else rates[::-1]
        runs += [run(case, folder, side, rate, seed, "test") for side, rate in in_turn]
    rows = []
    for side in case.sides:
        own = [one for one in runs if one["side"] == side]
        scores = [one[case.metric] for one in own]
        rows.append(
            {
                "side": side,
                "rate": own[0]["rate"],
                case.metric: float(np.mean(scores)),
                "lowest": min(scores),
                "highest": max(scores),
                "samples_per_second": float(np.median([one["samples_per_second"] for one in own])),
            }
        )
    print_table(f"{name}, test split, {seeds} seeds", rows)
    return {"summary": rows, "runs": runs, "steps": case.steps, "batch_size": case.batch_size}


def search(name: str, folder: Path) -> None:
    """All sides at every rate on the validation split, with a seed that no comparison has."""
    case = MODELS[name]
    rows = [run(case, folder, side, rate, 0, "valid") for side in case.sides for rate in SEARCH]
    print_table(f"{name}, validation split", rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, default=Path("../shared/data"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", nargs="*", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--search", action="store_true", help="rates on the validation split; writes no card")
    parser.add_argument("--sets", type=Path, help="folder for the prepared sets, which are used if they are there")
    arguments = parser.parse_args()
    rivals.require()
    with tempfile.TemporaryDirectory() as temporary:
        for name in arguments.only:
            case, folder = MODELS[name], (arguments.sets or Path(temporary)) / name
            if not folder.exists():
                prepare([arguments.source / case.source], folder, case.prepare)
            if arguments.search:
                search(name, folder)
            else:
                found = {"libraries": rivals.versions(), "threads": torch.get_num_threads()}
                write_card(f"models_{name.replace('-', '_')}", found | compare(name, folder, arguments.seeds))


if __name__ == "__main__":
    main()
