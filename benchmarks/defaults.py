"""Search of the default optimizer and rates of `holdall train`, on the validation splits of the public samples.

    python -m benchmarks.defaults [--prepared FOLDER | --data ../shared/data] [--cases criteo/dlrm ...]
        [--seeds 2] [--final-seeds 10] [--workers 2] [--minutes 60] [--work FOLDER]

Every setting of the grid is trained on every case: a sample, a model and a number of steps. The best setting of each
case, in validation AUC averaged over the seeds of the search, and the defaults are then trained with further seeds,
the same for both. Test splits are not opened. Runs are kept in `<work>/runs.jsonl` as they come: a call goes on where
the last one ended, and stops after `--minutes`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.accuracy import SOURCES
from benchmarks.card import print_table, write_card
from holdall.common.environment import environment
from holdall.data.prepare import PrepareConfig, prepare
from holdall.data.schema import SCHEMA_FILE
from holdall.training.config import TrainConfig
from holdall.training.tracking import read_metrics
from holdall.training.train import train

FILES = {
    **SOURCES,
    "ml-1m": (("ml-1m",), {"format": "movielens", "valid": None, "test": 0.1}),
}
"""Raw files of each sample, and how it is prepared besides `valid=0.1, test=0.2`."""
MODELS: dict[str, dict[str, Any]] = {
    "dlrm": {},
    "dcn": {"model": "dcn"},
    "deepfm": {"model": "deepfm"},
    "tbsm": {"model": "rmc1", "model_setting": ("length=5",)},
    "ncf": {"model": "neumf"},
}
CASES: dict[str, tuple[str, str, int]] = {
    "criteo/dlrm, 24,000 rows": ("criteo", "dlrm", 12),
    "criteo/dlrm": ("criteo", "dlrm", 47),
    "criteo/dcn, 24,000 rows": ("criteo", "dcn", 12),
    "criteo/dcn": ("criteo", "dcn", 47),
    "criteo/deepfm": ("criteo", "deepfm", 47),
    "avazu/dlrm": ("avazu", "dlrm", 10),
    "avazu/dcn": ("avazu", "dcn", 10),
    "bookcrossing/dlrm": ("bookcrossing", "dlrm", 393),
    "bookcrossing/dcn, 100 steps": ("bookcrossing", "dcn", 100),
    "taobao/tbsm, 48 steps": ("taobao", "tbsm", 48),
    "taobao/tbsm, 200 steps": ("taobao", "tbsm", 200),
    "ml-1m/ncf, 400 steps": ("ml-1m", "ncf", 400),
}
"""Sample, model and steps of 2,048 samples: one epoch unless the name says another length."""
GRID = tuple(
    product(
        ("rowwise_adagrad_adam", "rowwise_adagrad"), (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02), (0.02, 0.06, 0.1, 0.2)
    )
)
"""Optimizer, and learning rates of the network and of the tables."""
NOTES = (
    "AUC on the validation split, mean over seeds. to_best: the mean of the best setting of the search minus that of "
    "the defaults, both over the same further seeds. below_mean: the mean minus the worst seed, of the defaults. "
    "largest_loss: of a step, over all seeds; first_loss: of the first step, mean."
)


@dataclass(frozen=True)
class Trial:
    """One model to train."""

    case: str
    optimizer: str | None
    """None for all three: the defaults of `holdall train`."""
    lr: float | None
    table_lr: float | None
    seed: int

    @property
    def setting(self) -> tuple[str | None, float | None, float | None]:
        return self.optimizer, self.lr, self.table_lr

    def config(self) -> TrainConfig:
        _, model, steps = CASES[self.case]
        given = {name: value for name in ("optimizer", "lr", "table_lr") if (value := getattr(self, name)) is not None}
        fixed = {"steps": steps, "log_every": 1, "rank_at": 0, "device": "cpu"}
        return TrainConfig.of(**fixed, seed=self.seed, **MODELS[model], **given)

    def key(self) -> str:
        """Name of the trial; that of the defaults has their values, so that changed ones are tried again."""
        config = self.config()
        rates = config.optimizer.rates(config.model.model_config().family)
        return json.dumps([asdict(self), config.optimizer.name, *rates], sort_keys=True)


def run_trial(job: tuple[Trial, Path]) -> tuple[Trial, dict[str, float]]:
    """Train the model of a trial."""
    trial, data = job
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        train(data, Path(folder) / "run", trial.config(), quiet=True)
        rows = read_metrics(Path(folder) / "run")
    losses = [row["loss"] for row in rows if row["split"] == "train"]
    valid = [row for row in rows if row["split"] == "valid"][-1]
    result = {name: valid[name] for name in ("auc", "logloss", "calibration")}
    return trial, result | {"first_loss": losses[0], "largest_loss": max(losses)}


class Work:
    """Trials that are done, on disk."""

    def __init__(self, folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        self.file = folder / "runs.jsonl"
        lines = self.file.read_text(encoding="utf-8").splitlines() if self.file.exists() else []
        self.done: dict[str, dict[str, Any]] = {entry["key"]: entry for entry in map(json.loads, lines)}

    def get(self, trial: Trial) -> dict[str, Any] | None:
        entry = self.done.get(trial.key())
        return None if entry is None else entry["result"]

    def keep(self, trial: Trial, result: Mapping[str, float]) -> None:
        entry = {"key": trial.key(), "commit": environment()["commit"], "result": dict(result)}
        self.done[entry["key"]] = entry
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")

    def make(self, trials: Sequence[Trial], folders: Mapping[str, Path], workers: int, until: float) -> bool:
        """Make the trials that are not done; whether all are."""
        todo = [(trial, folders[CASES[trial.case][0]]) for trial in trials if self.get(trial) is None]
        with multiprocessing.get_context("spawn").Pool(min(workers, max(1, len(todo)))) as pool:
            for trial, result in pool.imap_unordered(run_trial, todo):
                self.keep(trial, result)
                if time.monotonic() > until:
                    return False
        return True

    def mean(self, trials: Sequence[Trial], name: str = "auc") -> float:
        return float(np.mean([result[name] for trial in trials if (result := self.get(trial)) is not None]))


def find_data(name: str, work: Path, prepared: Path | None, source: Path) -> Path:
    """The prepared folder of a sample, made when it is nowhere."""
    if prepared is not None and (prepared / name / SCHEMA_FILE).exists():
        return prepared / name
    out = work / "data" / name
    if not (out / SCHEMA_FILE).exists():
        files, options = FILES[name]
        prepare([source / file for file in files], out, PrepareConfig(**{"valid": 0.1, "test": 0.2} | options))
    return out


def trials_of(case: str, setting: Sequence[Any], seeds: range) -> list[Trial]:
    return [Trial(case, *setting, seed) for seed in seeds]


def best_setting(work: Work, case: str, seeds: range) -> tuple[Any, ...]:
    """The setting of the grid with the highest mean AUC on a case."""
    return max(GRID, key=lambda setting: work.mean(trials_of(case, setting, seeds)))


def summarise(work: Work, case: str, best: tuple[Any, ...], seeds: range) -> dict[str, Any]:
    """Defaults against the best setting of a case."""
    trials = trials_of(case, (None, None, None), seeds)
    results = [result for trial in trials if (result := work.get(trial)) is not None]
    auc = [result["auc"] for result in results]
    row = {"case": case, "best_setting": best, "best_auc": work.mean(trials_of(case, best, seeds))}
    row |= {"auc": float(np.mean(auc)), "to_best": row["best_auc"] - float(np.mean(auc))}
    row |= {"below_mean": float(np.mean(auc)) - min(auc), "seeds": len(auc)}
    row |= {name: float(np.mean([r[name] for r in results])) for name in ("logloss", "calibration", "first_loss")}
    return row | {"largest_loss": max(result["largest_loss"] for result in results)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder of the raw samples")
    parser.add_argument("--prepared", type=Path, help="folder of prepared samples")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--seeds", type=int, default=2, help="of the search")
    parser.add_argument("--final-seeds", type=int, default=10, help="of the defaults and of the best settings")
    parser.add_argument("--workers", type=int, default=2, help="processes of one thread")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "holdall-defaults")
    arguments = parser.parse_args()
    until = time.monotonic() + 60 * arguments.minutes
    work = Work(arguments.work)
    names = dict.fromkeys(CASES[case][0] for case in arguments.cases)
    folders = {name: find_data(name, arguments.work, arguments.prepared, arguments.data) for name in names}
    first, further = range(arguments.seeds), range(100, 100 + arguments.final_seeds)
    search = [trial for case in arguments.cases for setting in GRID for trial in trials_of(case, setting, first)]
    defaults = [trial for case in arguments.cases for trial in trials_of(case, (None, None, None), further)]
    complete = work.make(defaults + search, folders, arguments.workers, until)
    if complete:
        best = {case: best_setting(work, case, first) for case in arguments.cases}
        finals = [trial for case in arguments.cases for trial in trials_of(case, best[case], further)]
        complete = work.make(finals, folders, arguments.workers, until)
    if not complete:
        print(f"stopped after {arguments.minutes:g} minutes: call again to go on")
        return
    rows = [summarise(work, case, best[case], further) for case in arguments.cases]
    print_table("defaults and the best setting of a search", rows)
    grid = {case: {str(s): work.mean(trials_of(case, s, first)) for s in GRID} for case in arguments.cases}
    print(write_card("defaults", {"cases": rows, "search": grid, "search_seeds": len(first)}, NOTES))


if __name__ == "__main__":
    main()
