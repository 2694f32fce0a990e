"""Search of the default rates and warm-up of `holdall train`, on the validation splits of the public samples.

    python -m benchmarks.defaults [--prepared FOLDER | --data ../shared/data] [--cases criteo/dlrm ...]
        [--lengths 12 48] [--seeds 2] [--final-seeds 10] [--minutes 15] [--work FOLDER]

Every setting of the grid is trained on every case, a sample with a model, for a fixed number of steps: 12 steps are
24,000 rows. The setting that loses least to the best of each case, in validation AUC averaged over seeds and cases, and
the defaults as they are, are then trained with further seeds. Test splits are not opened. Runs are kept in
`<work>/runs.jsonl` as they come: a call goes on where the last one ended, and stops after `--minutes`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
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
from holdall.training.trainer import train

FILES = {
    **SOURCES,
    "ml-1m": (("ml-1m",), {"format": "movielens", "valid": None, "test": 0.1}),
}
"""Raw files of each sample, and how it is prepared besides `valid=0.1, test=0.2`."""
CASES: dict[str, dict[str, Any]] = {
    "criteo/dlrm": {},
    "criteo/dcn": {"model": "dcn"},
    "avazu/dlrm": {},
    "avazu/dcn": {"model": "dcn"},
    "bookcrossing/dlrm": {},
    "taobao/tbsm": {"model": "rmc1", "model_setting": ("length=5",)},
    "ml-1m/ncf": {"model": "neumf"},
}
"""Settings besides the rates, by sample and model."""
RATES = tuple(product((0.001, 0.003, 0.01), (0.01, 0.03, 0.1), (0, 4, 16)))
"""Learning rates of the network and of the tables, and warm-up steps."""
NOTES = (
    "AUC on the validation split after so many steps of 2,048 samples, over all seeds. loss_to_best is the mean over "
    "cases of the difference to the best setting of the case, worst_loss_to_best the largest of them. below_mean is "
    "the difference of the worst seed to the mean."
)


@dataclass(frozen=True)
class Trial:
    """One model to train."""

    case: str
    steps: int
    lr: float | None
    """None for all three: the defaults of `holdall train`."""
    table_lr: float | None
    warmup_steps: int | None
    seed: int

    @property
    def setting(self) -> tuple[float | None, float | None, int | None]:
        return self.lr, self.table_lr, self.warmup_steps

    def config(self) -> TrainConfig:
        rates = {name: getattr(self, name) for name in ("lr", "table_lr", "warmup_steps")}
        given = {name: value for name, value in rates.items() if value is not None}
        fixed = {"steps": self.steps, "log_every": 1, "rank_at": 0, "device": "cpu", "shuffle": "rows"}
        return TrainConfig.of(**fixed, seed=self.seed, **CASES[self.case], **given)


class Work:
    """Trials that are done, on disk."""

    def __init__(self, folder: Path, defaults: TrainConfig):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.file = folder, folder / "runs.jsonl"
        self.defaults = [*defaults.optimizer.rates("dlrm"), defaults.schedule.warmup_steps]
        self.done: dict[str, dict[str, Any]] = {}
        for line in self.file.read_text(encoding="utf-8").splitlines() if self.file.exists() else []:
            entry = json.loads(line)
            self.done[entry["key"]] = entry

    def key(self, trial: Trial) -> str:
        """Name of a trial; that of the defaults has their values, so that changed ones are tried again."""
        return json.dumps([asdict(trial), *(self.defaults if trial.lr is None else [])], sort_keys=True)

    def get(self, trial: Trial) -> dict[str, Any] | None:
        entry = self.done.get(self.key(trial))
        return None if entry is None else entry["result"]

    def make(self, trial: Trial, data: Path) -> None:
        """Train the model of a trial, and keep its result."""
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            train(data, Path(folder) / "run", trial.config(), quiet=True)
            rows = read_metrics(Path(folder) / "run")
        losses = [row["loss"] for row in rows if row["split"] == "train"]
        valid = [row for row in rows if row["split"] == "valid"][-1]
        result = {name: valid[name] for name in ("auc", "logloss", "calibration")}
        result |= {"first_loss": losses[0], "largest_loss": max(losses)}
        entry = {"key": self.key(trial), "commit": environment()["commit"], "result": result}
        self.done[entry["key"]] = entry
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")


def find_data(name: str, work: Path, prepared: Path | None, source: Path) -> Path:
    """The prepared folder of a sample, made when it is nowhere."""
    if prepared is not None and (prepared / name / SCHEMA_FILE).exists():
        return prepared / name
    out = work / "data" / name
    if not (out / SCHEMA_FILE).exists():
        files, options = FILES[name]
        prepare([source / file for file in files], out, PrepareConfig(**{"valid": 0.1, "test": 0.2} | options))
    return out


def search_trials(cases: Sequence[str], lengths: Sequence[int], seeds: int) -> Iterator[Trial]:
    for seed, (steps, case, rates) in product(range(seeds), product(lengths, cases, RATES)):
        yield Trial(case, steps, *rates, seed)


def mean_auc(work: Work, trials: Sequence[Trial]) -> dict[tuple[Any, ...], dict[tuple[str, int], float]]:
    """Mean AUC over seeds, by setting and by (case, steps), of the trials that are done."""
    found: dict[tuple[Any, ...], dict[tuple[str, int], list[float]]] = {}
    for trial in trials:
        result = work.get(trial)
        if result is not None:
            found.setdefault(trial.setting, {}).setdefault((trial.case, trial.steps), []).append(result["auc"])
    return {s: {case: float(np.mean(values)) for case, values in by.items()} for s, by in found.items()}


def rank(work: Work, trials: Sequence[Trial]) -> list[dict[str, Any]]:
    """Settings, the one that loses least to the best of every case first."""
    found = mean_auc(work, trials)
    best: dict[tuple[str, int], float] = {}
    for by_case in found.values():
        for case, auc in by_case.items():
            best[case] = max(auc, best.get(case, 0.0))
    rows = []
    for setting, by_case in found.items():
        losses = [best[case] - auc for case, auc in by_case.items()]
        if len(losses) == len(best):
            lr, table_lr, warmup = setting
            row = {"lr": lr, "table_lr": table_lr, "warmup_steps": warmup, "loss_to_best": float(np.mean(losses))}
            rows.append(row | {"worst_loss_to_best": max(losses)})
    return sorted(rows, key=lambda row: row["loss_to_best"])


def summarise(work: Work, trials: Sequence[Trial]) -> list[dict[str, Any]]:
    """Mean and worst seed of each case."""
    rows = []
    for case, steps, setting in dict.fromkeys((t.case, t.steps, t.setting) for t in trials):
        results = [
            r
            for t in trials
            if (t.case, t.steps, t.setting) == (case, steps, setting) and (r := work.get(t)) is not None
        ]
        if results:
            auc = np.array([r["auc"] for r in results])
            row = {"case": case, "steps": steps, "setting": "defaults" if setting[0] is None else str(setting)}
            row |= {"seeds": len(results), "auc": float(auc.mean()), "below_mean": float(auc.mean() - auc.min())}
            row |= {name: float(np.mean([r[name] for r in results])) for name in ("logloss", "calibration")}
            rows.append(row | {"largest_loss": max(r["largest_loss"] for r in results)})
    return rows


def run_all(work: Work, trials: Sequence[Trial], folders: Mapping[str, Path], until: float) -> bool:
    """Make the trials that are not done; whether all are."""
    for trial in trials:
        if work.get(trial) is None:
            if time.monotonic() > until:
                return False
            work.make(trial, folders[trial.case])
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder of the raw samples")
    parser.add_argument("--prepared", type=Path, help="folder of prepared samples")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--lengths", nargs="+", type=int, default=[12, 48], help="steps of a run")
    parser.add_argument("--seeds", type=int, default=2, help="of the search")
    parser.add_argument("--final-seeds", type=int, default=10, help="of the defaults and of the best setting")
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "holdall-defaults")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    until = time.monotonic() + 60 * arguments.minutes
    work = Work(arguments.work, TrainConfig())
    folders = {
        case: find_data(case.partition("/")[0], arguments.work, arguments.prepared, arguments.data)
        for case in arguments.cases
    }
    trials = list(search_trials(arguments.cases, arguments.lengths, arguments.seeds))
    complete = run_all(work, trials, folders, until)
    ranked = rank(work, trials)
    settings: list[tuple[Any, ...]] = [(None, None, None)]
    if ranked:
        settings.append(tuple(ranked[0][name] for name in ("lr", "table_lr", "warmup_steps")))
    finals = [
        Trial(case, steps, *setting, seed)
        for seed in range(arguments.final_seeds)
        for steps, case, setting in product(arguments.lengths, arguments.cases, settings)
    ]
    complete = run_all(work, finals, folders, until) and complete
    rows = summarise(work, finals)
    print_table("settings, best first", ranked[:12])
    print_table("defaults and the best setting", rows)
    if not complete:
        print(f"stopped after {arguments.minutes:g} minutes: call again to go on")
        return
    print(write_card("defaults", {"search": ranked, "seeds": arguments.seeds, "finals": rows}, NOTES))


if __name__ == "__main__":
    main()
