"""Tables and figures of the comparison of table methods, made of its runs.

Differences to dense are taken seed by seed. Of tables that are small from the start, the standard error is over seeds.
Of a form of a trained model, bounds are those of the paired difference on the rows of a split, one for each seed; their
mean bounds the mean loss of the seeds, since its standard error is at most the mean of theirs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.accuracy import Work, commits, describe
from benchmarks.accuracy_tables import deviation, difference
from benchmarks.card import print_table, write_card
from benchmarks.methods_data import PLANTED
from benchmarks.methods_sides import CONFIRMING, DECIDING, DENSE, final_jobs, sides, tune_jobs
from holdall.data.dataset import DataSet
from holdall.evaluation.best_possible import best_possible_of

Row = dict[str, Any]
NOTES = (
    "Small from the start: 'folding' keeps dense rows for ids looked up k times or more and one row a table for the "
    "others, with the least k that keeps the budget; 'auto, counts' is what --budget chooses from the counts of a "
    "data folder. peak_bytes are tables and optimizer state (row-wise Adagrad). Settings were tried with seed 0 at "
    "1/20 of the bytes (1/4 where a method cannot be that small) and chosen by validation logloss. Dense models stop "
    "early, like all others. To keep within the time, auto without counts was trained at 1/20, 1/100 and 1/1000, the "
    "other methods at 1/20 and 1/100 (tensor_ring, quotient_remainder, codes and shared at 1/20 alone, those that "
    "cannot be as small at 1/4), and forms were polished at 1/20, 1/100 and 1/300. Forms are fitted to the dense "
    "model of each seed, and 'polished' ones trained on; bounds are one-sided, 95%, of the paired difference on the "
    "rows of a split, and the mean over seeds. Polished forms are compared on the half of the validation rows that did "
    "not decide. A difference to dense of tables trained from the start has its standard error over seeds."
)


def finish(work: Work, folders: Mapping[str, Path], seeds: int) -> Path:
    """Print the tables of the runs that are done, and write the card and the figures."""
    samples = {name: describe(name, data) for name, data in folders.items()}
    runs, search = collect(work, folders, seeds)
    from_start = [row for name in folders for row in summarise(runs, name, samples[name])]
    released = [row for name in folders for row in summarise_forms(runs, name, samples[name])]
    best = {name: best_possible_of(DataSet(data, "test"))["auc"] for name, data in folders.items() if name == PLANTED}
    results = {
        "samples": samples,
        "best_possible_auc": best,
        "auto": {"decided_by": DECIDING, "confirmed_by": CONFIRMING},
        "from_start": from_start,
        "released": released,
        "search": search,
        "runs_by_commit": commits(work),
        "core_seconds": round(sum(entry["result"]["cpu_seconds"] for entry in work.done.values())),
    }
    show(from_start, released)
    path = write_card("methods", results, NOTES)
    from benchmarks.methods_figures import draw  # reads the card

    draw(path)
    return path


def collect(work: Work, folders: Mapping[str, Path], seeds: int) -> tuple[list[Row], list[Row]]:
    """`(runs, search)` that are done."""
    runs: list[Row] = []
    search: list[Row] = []
    for name, data in folders.items():
        for side in sides():
            tried = {job: work.get(job) for job in tune_jobs(name, side, data)}
            search += [
                {**asdict(job), "valid_logloss": result["valid_logloss"]} for job, result in tried.items() if result
            ]
            made = {job: work.get(job) for job in final_jobs(work, name, side, data, seeds) or []}
            runs += [{**asdict(job), **result} for job, result in made.items() if result]
    return runs, search


def summarise(runs: Sequence[Row], name: str, sample: Row) -> list[Row]:
    """A row for each side and budget of a set."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for run in runs:
        if run["set"] == name:
            groups.setdefault((run["side"], run["budget"]), []).append(run)
    dense = {run["seed"]: run for run in groups.get((DENSE, "1"), [])}
    found = []
    for (side, budget), of_seeds in groups.items():
        first = of_seeds[0]
        row: Row = {"set": name, "side": side, "budget": budget, "bytes": first["bytes"]}
        row |= {"share": first["bytes"] / sample["dense_bytes"], "peak_bytes": first["peak_bytes"]}
        row["peak_share"] = first["peak_bytes"] / first["dense_peak_bytes"]
        row |= spread([run["auc"] for run in of_seeds])
        for metric in ("logloss", "valid_auc", "valid_logloss"):
            row[metric] = float(np.mean([run[metric] for run in of_seeds]))
        both = [run for run in of_seeds if run["seed"] in dense]
        if both:
            row |= difference([run["auc"] - dense[run["seed"]]["auc"] for run in both])
            of_valid = difference([run["valid_auc"] - dense[run["seed"]]["valid_auc"] for run in both])
            row |= {f"valid_{key}": value for key, value in of_valid.items()}
        row |= {"setting": first["setting"], "seeds": len(of_seeds)}
        row["cpu_seconds"] = float(np.mean([run["cpu_seconds"] for run in of_seeds]))
        found.append(row)
    return found


def summarise_forms(runs: Sequence[Row], name: str, sample: Row) -> list[Row]:
    """A row for each form and budget of the trained dense models of a set."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for run in runs:
        if run["set"] == name:
            for form in run.get("forms", []):
                groups.setdefault((form["form"], form["budget"]), []).append(form)
    found = []
    for (form, budget), of_seeds in groups.items():
        num_bytes = max(one["bytes"] for one in of_seeds)
        row: Row = {"set": name, "form": form, "budget": budget, "bytes": num_bytes}
        row["share"] = num_bytes / sample["dense_bytes"]
        row |= spread([one["test_auc"] for one in of_seeds])
        row["logloss"] = float(np.mean([one["test_logloss"] for one in of_seeds]))
        for split in ("valid", "test"):
            for metric in ("auc", "logloss"):
                for number in ("loss", "loss_bound"):
                    key = f"{split}_{metric}_{number}"
                    row[key] = float(np.mean([one[key] for one in of_seeds]))
            row[f"{split}_auc_worst_bound"] = max(one[f"{split}_auc_loss_bound"] for one in of_seeds)
        found.append({**row, "seeds": len(of_seeds)})
    return found


def spread(aucs: Sequence[float]) -> Row:
    """Mean, standard deviation, least and greatest AUC over seeds."""
    mean = float(np.mean(aucs))
    return {"auc": mean, "auc_sd": deviation(aucs), "auc_low": min(aucs), "auc_high": max(aucs)}


def show(from_start: Sequence[Row], released: Sequence[Row]) -> None:
    """Print the tables for people."""
    columns = ("side", "budget", "bytes", "auc", "auc_sd", "logloss", "minus_dense", "standard_error", "peak_share")
    forms = (
        "form",
        "budget",
        "bytes",
        "auc",
        "logloss",
        "test_auc_loss",
        "test_auc_loss_bound",
        "valid_auc_loss_bound",
    )
    for name in dict.fromkeys(row["set"] for row in from_start):
        print_table(f"{name}: small from the start", _picked(from_start, name, columns))
        print_table(f"{name}: trained dense, then released", _picked(released, name, forms))


def _picked(rows: Sequence[Row], name: str, columns: Sequence[str]) -> list[Row]:
    def rounded(value: Any) -> Any:
        return f"{value:.4f}" if isinstance(value, float) else value

    return [{column: rounded(row.get(column)) for column in columns} for row in rows if row["set"] == name]
