"""The whole way on made-up data: generate a click log, prepare it, train, and measure against the best possible."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
from rich.console import Console

from holdall.data.dataset import DataSet
from holdall.data.prepare import PrepareConfig, prepare
from holdall.data.splits import TEST, draw_splits
from holdall.data.synthetic import best_possible, preset, write_tsv
from holdall.files import refuse_existing
from holdall.inspection import table
from holdall.sizes import readable_bytes
from holdall.training.config import TrainConfig
from holdall.training.evaluation import evaluate
from holdall.training.trainer import train

SCALE = 0.002  # of Criteo Kaggle's ids: 68,000 in 26 features, so that 200,000 clicks teach most of them


def run(out: Path, *, rows: int = 200_000, overwrite: bool = False) -> None:
    """Leave a click log, a data folder and a run in `out`, and print what came of it."""
    console = Console()
    refuse_existing(out, overwrite=overwrite)
    started = time.perf_counter()

    console.print(f"[bold]1. generate[/bold] a click log of {rows:,} rows in Criteo's layout")
    log = out / "clicks.tsv.gz"
    write_tsv(preset("criteo-kaggle", scale=SCALE, rows=rows), log)

    console.print(f"[bold]2. prepare[/bold] it: holdall prepare {log} --valid 0.1 --test 0.1 --out {out / 'data'}")
    options = PrepareConfig(valid=0.1, test=0.1)
    schema = prepare([log], out / "data", options)

    console.print(f"[bold]3. train[/bold] a DLRM: holdall train {out / 'data'} --out {out / 'run'}")
    trained = train(out / "data", out / "run", TrainConfig())

    console.print(f"[bold]4. evaluate[/bold] it: holdall evaluate {out / 'run'}")
    metrics = evaluate(out / "run", "test")
    best = _best_possible(log, rows, options)

    shown = table("model", "table bytes", "AUC", "logloss", "samples/s")
    shown.add_row(
        "DLRM, dense tables",
        readable_bytes(trained["table_bytes"]),
        f"{metrics['auc']:.4f}",
        f"{metrics['logloss']:.4f}",
        f"{trained['samples_per_second']:,.0f}",
    )
    shown.add_row("the best possible", "", f"{best['auc']:.4f}", f"{best['logloss']:.4f}", "")
    console.print()
    console.print(shown)
    num_ids = sum(schema.cardinalities.values())
    console.print(
        f"\n{num_ids:,} ids in {len(schema.features)} features, {metrics['samples']:,} test rows, "
        f"{time.perf_counter() - started:.0f} s in all. The best possible is what the true click probabilities score."
    )
    console.print(
        f"look next: holdall inspect {out / 'data'}, holdall inspect {out / 'run'}, "
        f"tensorboard --logdir {out / 'run' / 'tensorboard'}; then your own log: holdall prepare --help"
    )


def _best_possible(log: Path, rows: int, options: PrepareConfig) -> dict[str, float]:
    """What the true probabilities score on the rows that `prepare` made the test split."""
    probability = np.load(log.with_name(log.name + ".probability.npy"), allow_pickle=False)
    test = draw_splits(np.arange(rows), options.seed, options.valid, options.test) == TEST
    return best_possible(probability[test], DataSet(log.parent / "data", "test").labels())
