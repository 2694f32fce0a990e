"""AUC that `compress(fit=True)` loses on trained models, by how the tables are stored.

    python -m benchmarks.compress_fit [--data ../shared/data] [--sets criteo bookcrossing] [--seeds 3] [--rows 24000]

A dense DLRM is trained for two epochs on rows drawn from a sample, and its tables are compressed to a tenth and a
twentieth, without training on. `auto` chooses by the error that it leaves, and knows how often rows are looked up in
the side with counts; `robe` is what it chose before. The test split is scored once by each; nothing is chosen by it.
"""

from __future__ import annotations

import argparse
import copy
import gzip
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.accuracy import SOURCES
from benchmarks.card import print_table, write_card
from holdall.data.dataset import DataSet
from holdall.data.prepare import PrepareConfig, prepare
from holdall.embedding.compress import compress
from holdall.evaluation.evaluate_model import evaluate_model
from holdall.popularity.table_counts import stored_counts
from holdall.training.config import TrainConfig
from holdall.training.evaluate_run import load_model
from holdall.training.train import train

BUDGETS = ("1/10", "1/20")
SIDES = ("robe", "clustered", "auto", "auto with counts")
BATCH_SIZE = 512
TRAINED_SHARE = 0.7
"""Share of the rows that are in the training split."""


def draw_rows(source: Path, out: Path, num_rows: int) -> Path:
    """A file with the first line of a compressed text file, which may be a header, and `num_rows` others in order."""
    with gzip.open(source, "rb") as file:
        lines = file.readlines()
    chosen = np.sort(np.random.default_rng(0).permutation(len(lines) - 1)[:num_rows]) + 1
    with gzip.open(out, "wb", compresslevel=1) as file:
        file.writelines([lines[0], *(lines[line] for line in chosen)])
    return out


def losses(data: Path, run: Path, seed: int) -> list[dict[str, Any]]:
    """Test AUC of a trained model, and what every side loses of it."""
    config = TrainConfig.of(epochs=2, batch_size=BATCH_SIZE, seed=seed, device="cpu", shuffle="rows")
    train(data, run, config, quiet=True)
    model = load_model(run, device="cpu")[0]
    test, counts = DataSet(data, "test"), stored_counts(DataSet(data, "train"))
    dense = evaluate_model(model, test)["auc"]
    rows = []
    for budget in BUDGETS:
        for side in SIDES:
            small = copy.deepcopy(model)
            method, _, known = side.partition(" with ")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                report = compress(small, budget, method, fit=True, counts=counts if known else None)
            auc = evaluate_model(small, test)["auc"]
            size = report.bytes_before / report.bytes_after
            rows.append(
                {"budget": budget, "side": side, "seed": seed, "dense": dense, "loss": dense - auc, "times": size}
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder of the raw samples")
    parser.add_argument("--sets", nargs="+", default=["criteo", "bookcrossing"], choices=list(SOURCES))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=24_000, help="rows that models are trained on, about")
    parser.add_argument("--card", default="compress_fit", help="name of the card to write")
    arguments = parser.parse_args()
    runs: dict[str, list[dict[str, Any]]] = {}
    for name in arguments.sets:
        with tempfile.TemporaryDirectory() as folder:
            files, options = SOURCES[name]
            first, *others = (arguments.data / file for file in files)
            drawn = draw_rows(first, Path(folder) / first.name, round(arguments.rows / TRAINED_SHARE))
            sources = [drawn, *others]
            prepare(sources, Path(folder) / "data", PrepareConfig(**{"valid": 0.1, "test": 0.2, **options}))
            runs[name] = []
            for seed in range(arguments.seeds):
                runs[name] += losses(Path(folder) / "data", Path(folder) / f"run-{seed}", seed)
        print_table(f"AUC lost on {name}", summary(runs[name]))
    write_card(arguments.card, {"rows": arguments.rows, "loss": {n: summary(r) for n, r in runs.items()}, "runs": runs})


def summary(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mean loss of each side at each budget, with the smallest and the largest over seeds."""
    found = []
    for budget in BUDGETS:
        for side in SIDES:
            of_side = [run for run in runs if (run["budget"], run["side"]) == (budget, side)]
            lost = [run["loss"] for run in of_side]
            found.append(
                {
                    "budget": budget,
                    "side": side,
                    "loss": float(np.mean(lost)),
                    "least": min(lost),
                    "most": max(lost),
                    "times": float(np.mean([run["times"] for run in of_side])),
                    "dense": float(np.mean([run["dense"] for run in of_side])),
                }
            )
    return found


if __name__ == "__main__":
    main()
