"""DeepFM, DIN and two towers against the same models of public libraries: quality on a test split, and speed.

    python -m benchmarks.models [--source ../shared/data] [--seeds 3] [--only deepfm din two-tower] [--search]

| model | data | library | metric |
| --- | --- | --- | --- |
| DeepFM | Criteo Kaggle sample, one epoch | deepctr-torch | AUC |
| DIN | Taobao ads, 100 steps | deepctr-torch | AUC |
| two towers | MovieLens-1M, 200 steps | torch-rechub (DSSM) | HR@10 among 100 |

Both sides get the same batches in the same order, sizes, optimizer (Adam) and number of steps, no regularisation, and
keep their own initial values. DeepFM and DIN train at 0.001, the default of the library; for the towers each side has
the best of three rates on the validation split, with one seed (`--search`). The test split is read once. Vectors of
DeepFM have 15 numbers on both sides, beside the first-order weight. DINs have ReLUs, since Dice depends on the batch.

torch-rechub's trainer applies no temperature to in-batch scores; here it has ours, without which it learns little. It
neither corrects for the popularity of items nor leaves out copies of the positive. Data and libraries are not part of
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
RATES: dict[str, tuple[float, float]] = {"deepfm": (0.001, 0.001), "din": (0.001, 0.001), "two-tower": (0.01, 0.01)}
"""Learning rates of Holdall and of the library."""
TEST_ROWS = 50_000
CASES = 2_000
"""Rows, or ranking cases, of a split that are scored."""

TOWERS = TwoTowerConfig(dim=16, tower=(64, 32))


@dataclass(frozen=True)
class Case:
    """One model on one data set, with its two sides by learning rate and seed."""

    source: str
    prepare: PrepareConfig
    batch_size: int
    steps: int
    negatives: int
    holdall: Callable[[DataSet, float, int], Side]
    library: Callable[[DataSet, float, int], Side]
    name: str
    """Name of the library."""
    metric: str = "auc"


MODELS = {
    "deepfm": Case(
        source="criteo_kaggle/train.tsv.gz",
        prepare=PrepareConfig(valid=0.05, test=0.2),
        batch_size=512,
        steps=200,
        negatives=4,
        holdall=lambda data, lr, seed: ours(DeepFMConfig(dim=16, top=(256, 128)), data, lr, seed, 4),
        library=lambda data, lr, seed: deep_ctr(
            "DeepFM", data, lr, seed, dim=15, dnn_hidden_units=(256, 128), l2_reg_linear=0.0
        ),
        name="deepctr-torch",
    ),
    "din": Case(
        source="taobao",
        prepare=PrepareConfig(format="taobao", valid=0.2),
        batch_size=1024,
        steps=100,
        negatives=4,
        holdall=lambda data, lr, seed: ours(
            DINConfig(dim=16, attention=(64, 16), top=(200, 80), length=LENGTH, activation="relu"), data, lr, seed, 4
        ),
        library=lambda data, lr, seed: deep_ctr(
            "DIN", data, lr, seed, dim=16, dnn_hidden_units=(200, 80), att_hidden_size=(64, 16), att_activation="relu"
        ),
        name="deepctr-torch",
    ),
    "two-tower": Case(
        source="ml-1m",
        prepare=PrepareConfig(format="movielens"),
        batch_size=1024,
        steps=200,
        negatives=0,
        holdall=lambda data, lr, seed: ours(TOWERS, data, lr, seed, 0),
        library=lambda data, lr, seed: rec_hub_towers(TOWERS, data, lr, seed),
        name="torch-rechub",
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
    made = (case.holdall if side == "holdall" else case.library)(data, rate, seed)
    seconds = train(made, batches)
    samples = sum(len(batch) for batch in batches)
    found = quality(case, made, folder, split)
    label = "holdall" if side == "holdall" else case.name
    return {"side": label, "rate": rate, "seed": seed, **found, "samples_per_second": samples / seconds}


def compare(name: str, folder: Path, seeds: int) -> dict[str, Any]:
    """Both sides on the test split, in turn."""
    case = MODELS[name]
    runs = []
    for seed in range(1, seeds + 1):
        sides = list(zip(("holdall", "library"), RATES[name], strict=True))
        for side, rate in sides if seed % 2 else reversed(sides):
            runs.append(run(case, folder, side, rate, seed, "test"))
    rows = []
    for label in ("holdall", case.name):
        own = [one for one in runs if one["side"] == label]
        scores = [one[case.metric] for one in own]
        rows.append(
            {
                "side": label,
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
    """Both sides at every rate on the validation split, with a seed that no comparison has."""
    case = MODELS[name]
    rows = [run(case, folder, side, rate, 0, "valid") for side in ("holdall", "library") for rate in SEARCH]
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
        results: dict[str, Any] = {"libraries": rivals.versions(), "threads": torch.get_num_threads()}
        for name in arguments.only:
            case, folder = MODELS[name], (arguments.sets or Path(temporary)) / name
            if not folder.exists():
                prepare([arguments.source / case.source], folder, case.prepare)
            if arguments.search:
                search(name, folder)
            else:
                results[name] = compare(name, folder, arguments.seeds)
    if not arguments.search:
        write_card("models", results)


if __name__ == "__main__":
    main()
