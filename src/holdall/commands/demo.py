"""The whole way on made-up data: generate a click log, prepare it, train, and measure against the best possible."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import numpy as np
from rich.console import Console

from holdall.common.console import table
from holdall.common.files import refuse_existing
from holdall.common.sizes import readable_bytes
from holdall.data.dataset import DataSet
from holdall.data.prepare import PrepareConfig, prepare
from holdall.data.splits import TEST, draw_splits
from holdall.data.synthetic import preset, write_tsv
from holdall.evaluation.best_possible import best_possible
from holdall.training.config import TrainConfig
from holdall.training.evaluate_run import evaluate
from holdall.training.trainer import train

SCALE = 0.002  # of Criteo Kaggle's ids: 68,000 in 26 features, so that 200,000 clicks teach most of them


def run(out: Path, *, rows: int = 400_000, budget: str = "1/20", overwrite: bool = False) -> None:
    """Leave a click log, a data folder and two runs in `out`, and print what came of them."""
    console = Console(soft_wrap=True)
    refuse_existing(out, overwrite=overwrite)
    started = time.perf_counter()
    log, data = out / "clicks.tsv.gz", out / "data"

    console.print(f"[bold]1. generate[/bold] a click log of {rows:,} rows in Criteo's layout: {log}")
    write_tsv(preset("criteo-kaggle", scale=SCALE, rows=rows), log)

    console.print(f"[bold]2. prepare[/bold]  holdall prepare {log} --valid 0.1 --test 0.1 --out {data}")
    options = PrepareConfig(valid=0.1, test=0.1)
    schema = prepare([log], data, options)

    shown = table("model", "table bytes", "AUC", "logloss", "samples/s")
    dense = TrainConfig(lr=0.005, table_lr=0.02)
    for name, config in {"dense": dense, "compressed": replace(dense, budget=budget)}.items():
        flags = f"--lr {config.lr} --table-lr {config.table_lr}" + (f" --budget {budget}" if config.budget else "")
        console.print(f"[bold]3. train[/bold]    holdall train {data} {flags} --out {out / name}")
        trained = train(data, out / name, config)
        metrics = evaluate(out / name, "test")
        shown.add_row(
            f"DLRM, {name} tables",
            readable_bytes(trained["table_bytes"]),
            f"{metrics['auc']:.4f}",
            f"{metrics['logloss']:.4f}",
            f"{trained['samples_per_second']:,.0f}",
        )
    best = _best_possible(log, data, rows, options)
    shown.add_row("the best possible", "", f"{best['auc']:.4f}", f"{best['logloss']:.4f}", "")

    console.print(f"[bold]4. evaluate[/bold] holdall evaluate {out / 'dense'}\n")
    console.print(shown)
    num_ids, seconds = sum(schema.cardinalities.values()), time.perf_counter() - started
    console.print(
        f"\n{num_ids:,} ids in {len(schema.features)} features, {best['samples']:,} test rows, {seconds:.0f} s in all. "
        f"The best possible is what the true click probabilities score.\n"
        f"look next: holdall inspect {out / 'dense'}; tensorboard --logdir {out}; your own log: holdall prepare --help"
    )


def _best_possible(log: Path, data: Path, rows: int, options: PrepareConfig) -> dict[str, float]:
    """What the true probabilities score on the rows that `prepare` made the test split."""
    probability = np.load(log.with_name(log.name + ".probability.npy"), allow_pickle=False)
    test = draw_splits(np.arange(rows), options.seed, options.valid_fraction, options.test) == TEST
    return best_possible(probability[test], DataSet(data, "test").labels())
