"""The command `holdall demo`: generate a click log, prepare it, train on it, and compare with the best possible."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console

from holdall.common.console import make_console, table
from holdall.common.files import quoted, write_json
from holdall.common.folder_lock import locked
from holdall.common.output_folder import FolderKind, Output, refuse_place
from holdall.common.settings import refuse_other_types
from holdall.common.sizes import check_budget, readable_bytes
from holdall.data.dataset import DataSet
from holdall.data.prepare import PrepareConfig, prepare
from holdall.data.schema import DATA_SET
from holdall.data.splits import TEST, draw_splits
from holdall.data.synthetic import preset, write_tsv
from holdall.evaluation.best_possible import best_possible
from holdall.training.config import TrainConfig
from holdall.training.evaluate_run import evaluate
from holdall.training.tracking import RUN
from holdall.training.train import train

LOG, PROBABILITY = "clicks.tsv.gz", "clicks.tsv.gz.probability.npy"
PARTS = {"data": DATA_SET, "dense": RUN, "compressed": RUN}


@dataclass(frozen=True)
class DemoKind(FolderKind):
    """Kind of a demo's folder; those of 0.1.0 have no marker, but exactly the content of a whole demo."""

    def matches(self, folder: Path) -> bool:
        if super().matches(folder):
            return True
        names = {entry.name for entry in folder.iterdir() if not entry.name.startswith(".holdall-")}
        return names == {LOG, PROBABILITY, *PARTS} and all(kind.matches(folder / name) for name, kind in PARTS.items())


DEMO = DemoKind("demo", "demo.json", "holdall-demo", parts=tuple(PARTS))
SCALE = 0.002  # of Criteo Kaggle's ids: 68,000 in 26 features, so that 200,000 clicks teach most of them


@dataclass(frozen=True)
class DemoRun:
    """Test metrics of one model that the demo trained."""

    name: str
    table_bytes: int
    auc: float
    logloss: float
    samples_per_second: float


@dataclass(frozen=True)
class DemoResult:
    """Results of the demo."""

    out: Path
    runs: tuple[DemoRun, ...]
    best_possible: dict[str, float]
    """Metrics of the true click probabilities on the test rows: `auc`, `logloss`, `samples`."""
    num_ids: int
    num_features: int
    seconds: float


def demo(
    out: str | Path = "demo-run",
    *,
    rows: int = 400_000,
    budget: str = "1/20",
    overwrite: bool = False,
    note: Callable[[str], None] = lambda stage: None,
) -> DemoResult:
    """Write a click log, a data folder and two runs (dense tables, tables within `budget`) to `out`.

    `note` is called with the command line of each stage when it starts.
    """
    out = Path(out)
    refuse_other_types(int, rows=rows)
    check_budget(budget)
    refuse_place(out)
    with locked(out):
        output = Output(out, DEMO, overwrite=overwrite)
        output.recover()
        output.refuse_existing()
        with output.in_place():
            result = _run(out, rows, budget, note)
            write_json(out / DEMO.marker, {"format": DEMO.format, "version": 1, "rows": rows, "budget": budget})
    return result


def _run(out: Path, rows: int, budget: str, note: Callable[[str], None]) -> DemoResult:
    started = time.perf_counter()
    log, data = out / LOG, out / "data"
    note(f"1. generate a click log of {rows:,} rows in Criteo's layout: {log}")
    write_tsv(preset("criteo-kaggle", scale=SCALE, rows=rows), log)
    note(f"2. prepare  holdall prepare {quoted(log)} --valid 0.1 --test 0.1 --out {quoted(data)}")
    options = PrepareConfig(valid=0.1, test=0.1)
    schema = prepare([log], data, options)
    runs = []
    dense = TrainConfig.of(lr=0.005, table_lr=0.02)
    for name, config in {"dense": dense, "compressed": dense.replace(budget=budget)}.items():
        rates = f"--lr {config.optimizer.lr} --table-lr {config.optimizer.table_lr}"
        flags = rates + (f" --budget {budget}" if config.tables.budget else "")
        note(f"3. train    holdall train {quoted(data)} {flags} --out {quoted(out / name)}")
        trained = train(data, out / name, config)
        metrics = evaluate(out / name, "test")
        rate = trained["samples_per_second"]
        runs.append(DemoRun(name, trained["table_bytes"], metrics["auc"], metrics["logloss"], rate))
    note(f"4. evaluate holdall evaluate {quoted(out / 'dense')}\n")
    return DemoResult(
        out=out,
        runs=tuple(runs),
        best_possible=_best_possible(log, data, rows, options),
        num_ids=sum(schema.cardinalities.values()),
        num_features=len(schema.features),
        seconds=time.perf_counter() - started,
    )


def _best_possible(log: Path, data: Path, rows: int, options: PrepareConfig) -> dict[str, float]:
    """Metrics of the true probabilities on the rows that `prepare` put into the test split."""
    probability = np.load(log.with_name(PROBABILITY), allow_pickle=False)
    test = draw_splits(np.arange(rows), options.seed, options.valid_fraction, options.test) == TEST
    return best_possible(probability[test], DataSet(data, "test").labels())


def show(result: DemoResult, console: Console | None = None) -> None:
    """Print a table of the models, and what to run next."""
    console = console or make_console(soft_wrap=True)
    shown = table("model", "table bytes", "AUC", "logloss", "samples/s")
    for run in result.runs:
        size, rate = readable_bytes(run.table_bytes), f"{run.samples_per_second:,.0f}"
        shown.add_row(f"DLRM, {run.name} tables", size, f"{run.auc:.4f}", f"{run.logloss:.4f}", rate)
    best = result.best_possible
    shown.add_row("the best possible", "", f"{best['auc']:.4f}", f"{best['logloss']:.4f}", "")
    console.print(shown)
    console.print(
        f"\n{result.num_ids:,} ids in {result.num_features} features, {best['samples']:,} test rows, "
        f"{result.seconds:.0f} s in all. The best possible is what the true click probabilities score.\n"
        f"look next: holdall inspect {quoted(result.out / 'dense')}; tensorboard --logdir {quoted(result.out)}; "
        f"your own log: holdall prepare --help"
    )
