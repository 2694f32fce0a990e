"""Sides of the comparison of table methods, the budgets of each, and the runs to make in order of their value.

Tables that are small from the start: folding (dense rows for the ids that are looked up k times or more, one row for
the others of a table), every method that trains, and `auto` with and without counts. Dense models give, in the same
run, the forms that are fitted to them (`methods_release`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.accuracy import Work, best_setting
from benchmarks.accuracy_runs import OPTIMIZER, RULES, Job
from holdall.common.errors import ConfigError
from holdall.common.sizes import parse_budget
from holdall.data.dataset import DataSet
from holdall.data.negatives import training_loader
from holdall.optim.config import OptimizerConfig
from holdall.popularity.table_counts import table_counts
from holdall.tables import METHODS, Bands, Dense, Method, Shared
from holdall.tables.budget import suggest
from holdall.tables.method import total_bytes

DECIDING, CONFIRMING = ("criteo", "bookcrossing"), ("planted", "avazu", "taobao")
"""Sets whose validation splits decided the rule of `auto` with counts, and sets that nothing was chosen by."""
SETS = DECIDING + CONFIRMING
DENSE, FOLDING, AUTO, COUNTED = "dense", "folding", "auto", "auto, counts"
OTHERS = tuple(name for name in METHODS if name not in (DENSE, "bands", "clustered"))
"""Every method that a table can train by; assignments to clusters do not train, which makes fresh ones hashed tables
with an index."""
BUDGETS: dict[str, tuple[str, ...]] = dict.fromkeys((FOLDING, COUNTED), ("1/4", "1/20", "1/40", "1/100", "1/1000"))
BUDGETS |= {AUTO: ("1/20", "1/100", "1/1000")} | dict.fromkeys(OTHERS, ("1/20", "1/100"))
BUDGETS |= dict.fromkeys(("tensor_ring", "quotient_remainder", "codes", "shared"), ("1/20",))
"""Budgets of each side; one that cannot keep any of them is trained at 1/4."""
TUNED_AT = ("1/20", "1/4")
"""Budget that settings are tried at: the first that a side can keep."""
GRID = tuple((lr, table_lr) for lr in (0.005, 0.015) for table_lr in (0.003, 0.01, 0.03, 0.1, 0.3))
SECONDS = {"criteo": 4.5, "planted": 4.5, "avazu": 2.5, "bookcrossing": 8.0, "taobao": 11.0}
"""Core-seconds of a run of each set, about."""
SLOWNESS = {"tensor_train": 1.7, "tensor_ring": 1.7, DENSE: 0.8, FOLDING: 0.8}
RELEASE_SECONDS = {"criteo": 60.0, "planted": 60.0, "avazu": 20.0, "bookcrossing": 100.0, "taobao": 120.0}
"""Core-seconds of fitting and scoring the forms of one dense model, about."""


@lru_cache(maxsize=len(SETS))
def counts_of(name: str, data: Path) -> dict[str, Tensor]:
    """Lookups of every row of every table that the model of a set reads, in one epoch of training."""
    schema = DataSet(data).schema
    rules = RULES[name]
    loader = training_loader(DataSet(data), rules.batch_size, num_negatives=rules.negatives, shuffle="rows", seed=0)
    counted = table_counts(loader.epoch(0), schema)
    return {table: counted[table] for table in rules.model.table_rows(schema)}


def fold(counts: Mapping[str, Tensor], dim: int, budget: str) -> tuple[dict[str, Method], int]:
    """`(methods, k)`: a row of its own for ids looked up k times or more, of the least k that keeps the budget."""
    rows = {name: len(of_table) for name, of_table in counts.items()}
    available = parse_budget(budget, 4 * dim * sum(rows.values()))
    levels = torch.unique(torch.cat(list(counts.values()))).tolist()
    levels.append(levels[-1] + 1)  # no row of its own at all

    def methods_at(k: int) -> dict[str, Method]:
        return {name: _bands(int((of_table >= k).sum()), rows[name]) for name, of_table in counts.items()}

    low, high = -1, len(levels) - 1
    while high - low > 1:
        middle = (low + high) // 2
        fits = _bytes(methods_at(levels[middle]), rows, dim) <= available
        low, high = (low, middle) if fits else (middle, high)
    methods = methods_at(levels[high])
    if _bytes(methods, rows, dim) > available:
        raise ConfigError(f"one row for all ids of every table takes more than {budget} of the dense bytes")
    return methods, levels[high]


def _bands(num_popular: int, num_rows: int) -> Method:
    if num_popular == num_rows:
        return Dense()
    return Bands(((num_popular, Dense()), (None, Shared(1)))) if num_popular else Shared(1)


def _bytes(methods: Mapping[str, Method], rows: Mapping[str, int], dim: int) -> int:
    return total_bytes([(method, rows[name], dim) for name, method in methods.items()])


@lru_cache(maxsize=1024)
def methods_of(name: str, side: str, budget: str, data: Path) -> dict[str, Method] | None:
    """A method for each table of a set, trained from the start; None where the side cannot be that small."""
    config = RULES[name].model
    rows = config.table_rows(DataSet(data).schema)
    if side == DENSE:
        return dict.fromkeys(rows, Dense())
    try:
        if side == FOLDING:
            return fold(counts_of(name, data), config.dim, budget)[0]
        if side == COUNTED:
            row_state = OptimizerConfig(name=OPTIMIZER).kind.row_state_bytes(config.dim)
            return suggest(rows, config.dim, budget, training=True, counts=counts_of(name, data), row_state=row_state)
        return suggest(rows, config.dim, budget, side, training=True)
    except ConfigError:
        return None


def sides() -> tuple[str, ...]:
    """All sides, in order of their value."""
    return (DENSE, FOLDING, COUNTED, AUTO, *OTHERS)


def tune_budget(name: str, side: str, data: Path) -> str | None:
    """The budget that settings of a side are tried at; None where it can keep none."""
    if side == DENSE:
        return "1"
    return next((budget for budget in TUNED_AT if methods_of(name, side, budget, data)), None)


def budgets_of(name: str, side: str, data: Path) -> list[str]:
    """The budgets that a side is trained at with every seed."""
    if side == DENSE:
        return ["1"]
    found = [budget for budget in BUDGETS[side] if methods_of(name, side, budget, data)]
    return found or [budget for budget in TUNED_AT if methods_of(name, side, budget, data)]


def tune_jobs(name: str, side: str, data: Path) -> list[Job]:
    """Runs that try the settings of a side with one seed."""
    budget = tune_budget(name, side, data)
    if budget is None:
        return []
    return [Job(name, side, budget, setting, 0, "tune") for setting in GRID]


def final_jobs(work: Work, name: str, side: str, data: Path, seeds: int) -> list[Job] | None:
    """Runs with the setting of the lowest validation logloss; None while settings are still to be tried."""
    budget = tune_budget(name, side, data)
    if budget is None:
        return []
    setting = best_setting(work, name, side, budget, GRID)
    if setting is None:
        return None
    budgets = budgets_of(name, side, data)
    return [Job(name, side, at, setting, seed, "final") for at in budgets for seed in range(seeds)]


def seconds(job: Job) -> float:
    """Core-seconds that a run takes, about."""
    found = SECONDS[job.set] * SLOWNESS.get(job.side, 1.0)
    return found + (RELEASE_SECONDS[job.set] if job.stage == "final" and job.budget == "1" else 0.0)


def value(job: Job) -> tuple[int, int, float]:
    """Place of a run in the order of work: dense, then what is cut by popularity, then the rest; long runs first."""
    place = sides().index(job.side)
    return (1 if job.side == COUNTED else place), job.stage == "final", -seconds(job)


def plan(work: Work, folders: Mapping[str, Path], seeds: int) -> Iterator[tuple[Job | None, float, int]]:
    """Runs that are not done, as `(job, core-seconds, number)`: the job is None where its setting is not known yet."""
    for name, data in folders.items():
        for side in sides():
            yield from ((job, seconds(job), 1) for job in tune_jobs(name, side, data) if work.get(job) is None)
            jobs = final_jobs(work, name, side, data, seeds)
            if jobs is None:
                for budget in budgets_of(name, side, data):
                    job = Job(name, side, budget, GRID[0], 0, "final")
                    yield None, seconds(job) * seeds, seeds
            else:
                yield from ((job, seconds(job), 1) for job in jobs if work.get(job) is None)
