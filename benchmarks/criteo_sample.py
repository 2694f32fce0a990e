"""AUC of the dense DLRM on a real sample of Criteo Kaggle, over several seeds.

    python -m benchmarks.criteo_sample [--source ../shared/data/criteo_kaggle/train.tsv.gz] [--seeds 3]

The sample is 1/330 of the set, so the figure is far from the published one (AUC 0.802 on all of it). It is not part of
this repository. Eight settings were tried with one seed; this one was third on the validation split, 0.0015 of AUC
below the first. With lr 0.01 in the place of 0.005 the test AUC was 0.04 lower.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.card import print_table, write_card
from holdall.data.prepare import PrepareConfig, prepare
from holdall.training.config import TrainConfig
from holdall.training.evaluate_run import evaluate
from holdall.training.train import train


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", type=Path, default=Path("../shared/data/criteo_kaggle/train.tsv.gz"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=0.005)
    parser.add_argument("--table-lr", type=float, default=0.03)
    parser.add_argument("--batch-size", type=int, default=512)
    arguments = parser.parse_args()
    if not arguments.source.exists():
        sys.exit(f"the Criteo sample is not at {arguments.source}: give its place with --source")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        schema = prepare([arguments.source], data, PrepareConfig(valid=0.05, test=0.2))
        for seed in range(arguments.seeds):
            run = Path(folder) / f"run-{seed}"
            config = TrainConfig.of(
                model="rmc2",
                epochs=arguments.epochs,
                batch_size=arguments.batch_size,
                optimizer="rowwise_adagrad",
                lr=arguments.lr,
                table_lr=arguments.table_lr,
                seed=seed,
                shuffle="rows",
                early_stopping=2,
            )
            result = train(data, run, config, quiet=True)
            metrics = evaluate(run, "test")
            rows.append(
                {
                    "seed": seed,
                    **{name: metrics[name] for name in ("auc", "logloss", "accuracy", "normalized_entropy")},
                    "samples_per_second": result["samples_per_second"],
                }
            )
    print_table(f"DLRM on {schema.splits['train'].rows:,} Criteo rows", rows)
    aucs = [row["auc"] for row in rows]
    print(f"AUC {np.mean(aucs):.4f}, from {min(aucs):.4f} to {max(aucs):.4f} over {len(aucs)} seeds")
    write_card(
        "criteo_sample",
        {
            "train_rows": schema.splits["train"].rows,
            "test_rows": schema.splits["test"].rows,
            "auc_mean": float(np.mean(aucs)),
            "auc_spread": max(aucs) - min(aucs),
            "runs": rows,
        },
    )


if __name__ == "__main__":
    main()
