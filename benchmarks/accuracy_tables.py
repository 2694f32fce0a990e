"""The tables of the accuracy benchmark, made of its runs: means, spreads, differences, and what was chosen.

A difference to dense is taken seed by seed. Its standard error, and every spread, say how much the initial values and
the order of the rows matter; all seeds share one test split, whose own chance is `test_standard_error`. Sides with FIT
are also compared with the dense model that was trained on like them (`minus_dense_fit`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.accuracy_runs import FIT, RULES
from benchmarks.card import print_table
from benchmarks.rivals import RIVALS

METRICS = ("auc", "logloss", "accuracy")
SIZES = ("bytes", "train_rows", "test_rows")
OURS_DENSE = ("dlrm", "dcn", "tbsm")
PAPERS = {"DLRM": None, "TT-Rec": "hot_tensor_train", "FAE": "hot_cold", "EL-Rec": "tensor_train"}
"""What stands for each system in the table of the papers. DLRM: dense. TT-Rec: tensor trains with a cache of exact
rows. EL-Rec: tensor trains over ids in order of popularity. FAE: exact hot rows, whose cold rows are dense with FAE and
Frobenius tables here."""

Row = dict[str, Any]


def compare(runs: Mapping[str, Sequence[Row]], samples: Mapping[str, Row]) -> dict[str, list[Row]]:
    """All tables, from the final runs of every set and what `describe` says of it."""
    means = [row for name, rows in runs.items() if rows for row in summarise(rows, samples[name])]
    return {
        "means": means,
        "best_compressed": best_compressed(means),
        "against_libraries": against_libraries(runs),
        "papers": table_of_papers(means),
    }


def summarise(runs: Sequence[Row], sample: Row) -> list[Row]:
    """Mean and standard deviation over seeds of every side and budget, and its difference to dense."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for run in runs:
        groups.setdefault((run["side"], run["budget"]), []).append(run)
    name = runs[0]["set"]
    family = RULES[name].model.family
    dense = {run["seed"]: run["auc"] for run in groups[family, "1"]}
    trained_on = {run["seed"]: run["auc"] for run in groups.get((family + FIT, "1"), [])}
    found = []
    for (side, budget), rows in groups.items():
        row: Row = {"set": name, "side": side, "budget": budget, "bytes": rows[0].get("bytes"), "seeds": len(rows)}
        for metric in METRICS:
            values = [run[metric] for run in rows]
            row |= {metric: float(np.mean(values)), f"{metric}_sd": deviation(values)}
        row["valid_logloss"] = float(np.mean([run["valid_logloss"] for run in rows]))
        differences = [run["auc"] - dense[run["seed"]] for run in rows if run["seed"] in dense]
        row |= difference(differences)
        if side.endswith(FIT) and trained_on:
            gap = difference([run["auc"] - trained_on[run["seed"]] for run in rows if run["seed"] in trained_on])
            row |= {"minus_dense_fit": gap["minus_dense"], "standard_error_fit": gap["standard_error"]}
        row |= {"setting": rows[0]["setting"], "train_rows": sample["train_rows"], "test_rows": sample["test_rows"]}
        row["test_standard_error"] = auc_standard_error(row["auc"], sample["test_positives"], sample["test_rows"])
        found.append(row)
    return found


def deviation(values: Sequence[float]) -> float:
    return float(np.std(values, ddof=1)) if len(values) > 1 else math.nan


def difference(values: Sequence[float]) -> Row:
    """Mean of paired differences and its standard error."""
    return {"minus_dense": float(np.mean(values)), "standard_error": deviation(values) / math.sqrt(len(values))}


def auc_standard_error(auc: float, num_positives: int, num_rows: int) -> float:
    """Of one AUC, the test rows being a sample (Hanley and McNeil, 1982); differences on the same rows vary less."""
    num_negatives = num_rows - num_positives
    both_above, both_below = auc / (2 - auc), 2 * auc**2 / (1 + auc)
    variance = (
        auc * (1 - auc) + (num_positives - 1) * (both_above - auc**2) + (num_negatives - 1) * (both_below - auc**2)
    )
    return math.sqrt(variance / (num_positives * num_negatives))


def best_compressed(means: Sequence[Row]) -> list[Row]:
    """By set and budget, the compressed side with the lowest mean validation logloss: with and without fitted ones."""
    found = []
    keys = dict.fromkeys((row["set"], row["budget"]) for row in means if row["budget"] != "1")
    for name, budget in keys:
        rows = [row for row in means if (row["set"], row["budget"]) == (name, budget)]
        for start in ("any", "fresh tables"):
            allowed = [row for row in rows if start == "any" or not row["side"].endswith(FIT)]
            best = min(allowed, key=lambda row: row["valid_logloss"])
            columns = ("side", "auc", "minus_dense", "standard_error", "minus_dense_fit", "standard_error_fit", *SIZES)
            chosen = {key: best[key] for key in columns if key in best}
            found.append({"set": name, "budget": budget, "start": start, **chosen})
    return found


def against_libraries(runs: Mapping[str, Sequence[Row]]) -> list[Row]:
    """Our dense models minus each library's, seed by seed."""
    found = []
    for name, rows in runs.items():
        by_side: dict[str, dict[int, float]] = {}
        for run in rows:
            if run["budget"] == "1":
                by_side.setdefault(run["side"], {})[run["seed"]] = run["auc"]
        for rival in RIVALS:
            for ours in OURS_DENSE:
                seeds = by_side.get(rival, {}).keys() & by_side.get(ours, {}).keys()
                if seeds:
                    values = [by_side[ours][seed] - by_side[rival][seed] for seed in sorted(seeds)]
                    gap = difference(values)
                    row = {"set": name, "ours": ours, "theirs": rival, "ours_minus_theirs": gap["minus_dense"]}
                    found.append({**row, "standard_error": gap["standard_error"], "seeds": len(values)})
    return found


def table_of_papers(means: Sequence[Row]) -> list[Row]:
    """Accuracy in percent by system and data set, in the layout of EL-Rec's comparison; tables at 1/20 of the bytes."""
    found = []
    for system, side in PAPERS.items():
        row: Row = {"system": system, "side": side or "dense"}
        for mean in means:
            wanted = (RULES[mean["set"]].model.family, "1") if side is None else (side, "1/20")
            if (mean["side"], mean["budget"]) == wanted:
                sizes = f"{mean['train_rows']:,} / {mean['test_rows']:,}"
                row[f"{mean['set']} ({sizes} rows)"] = round(100 * mean["accuracy"], 2)
        found.append(row)
    return found


def show(tables: Mapping[str, Sequence[Row]]) -> None:
    """Print the tables for people."""
    for name in dict.fromkeys(row["set"] for row in tables["means"]):
        rows = [row for row in tables["means"] if row["set"] == name]
        title = f"{name}: {rows[0]['train_rows']:,} training rows, {rows[0]['test_rows']:,} test rows"
        columns = ("side", "budget", "bytes", *METRICS, "auc_sd", "minus_dense", "standard_error", "minus_dense_fit")
        print_table(title, [{column: rounded(row.get(column)) for column in columns} for row in rows])
    for title in ("best_compressed", "against_libraries", "papers"):
        if tables[title]:
            print_table(title.replace("_", " "), [{k: rounded(v) for k, v in row.items()} for row in tables[title]])


def rounded(value: Any) -> Any:
    return f"{value:.4f}" if isinstance(value, float) and abs(value) < 1 else value
