"""Tables that each process learns on its own: AUC against how often they are merged, and time by stage of a step.

    python -m benchmarks.local [--source ../shared/data/criteo_kaggle/train.tsv.gz] [--processes 2 4] [--epochs 1 2]
    python -m benchmarks.local --stages-only     # the times alone: card `local_stages`

Quality (card and figure `local`): test AUC on a real Criteo sample of `--strategy local` merged every 1, 10 and 100
steps and never, which is at the checkpoint at the end; of synchronous `data-parallel`; and of one process. All have the
same settings, batches and initial weights, and nothing stops early: a checkpoint would merge. All are shown after each
number of epochs, and after the one that is best for a side on the validation split. The other settings were found for
one process (`benchmarks.criteo_sample`), none was tried for `local`. `own auc` is that of the tables of one process
before the last merge, which is how the paper on distributed DLRM (Yelp, two nodes) measured. `difference` is the root
of the mean over processes of |own tables - merged tables|^2 before a merge; `moved`, for scale, |final - initial
tables|. Bytes are those a process sends for a sample of its share; those of rows include the merge at the end.

Times (card `local_stages`): milliseconds a step by stage, mean over processes. `backward` has the gradients of MLPs
leave in buckets while it goes on; `exchange` is what is left to wait for, the slower process included, and under
`data-parallel` the exchange of row gradients; `merge` is spread over the steps between merges. One thread a process,
over gloo on loopback: processes share the cores and the memory of one machine, so this is not the network of a cluster.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.card import RESULTS, print_table, write_card
from benchmarks.local_runs import LOCAL, PLAIN, SYNCHRONOUS, Job, Side, differences, run_jobs, step_seconds
from holdall.data.prepare import PrepareConfig, prepare
from holdall.report.svg import Panel, Points, chart
from holdall.training.evaluate_run import evaluate
from holdall.training.tracking import read_metrics

STAGES = ("read", "lookup", "dense", "backward", "exchange", "update", "merge")
SCORES = ("processes", "side", "auc", "lowest", "highest", "over synchronous", "from", "to", "own auc")
"""Columns of the first of two tables."""
LOG_EVERY = 20
"""Steps between rows of the log of a run whose time is taken."""
AT_LEFT, AT_RIGHT = 0.1, 1000.0
"""Where the figure puts synchronous training and tables that are never merged."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", type=Path, default=Path("../shared/data/criteo_kaggle/train.tsv.gz"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--epochs", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--stages-only", action="store_true")
    parser.add_argument("--stage-batch-sizes", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--stage-steps", type=int, default=120)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    if not arguments.source.exists():
        sys.exit(f"the Criteo sample is not at {arguments.source}: give its place with --source")
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        schema = prepare([arguments.source], data, PrepareConfig(valid=0.05, test=0.2))
        rows = {split: found.rows for split, found in schema.splits.items()}
        if not arguments.stages_only:
            found = [
                quality(data, Path(folder) / f"quality-{epochs}", epochs, arguments.processes, arguments.seeds)
                for epochs in arguments.epochs
            ]
            write_quality(found, rows, arguments.seeds)
        tables = [
            stages(data, Path(folder) / f"stages-{size}", size, arguments.stage_steps, arguments.rounds)
            for size in arguments.stage_batch_sizes
        ]
        cores = os.cpu_count()
        notes = (
            f"All processes, one thread each, share {cores} cores and loopback. Milliseconds, medians of the rounds."
        )
        write_card("local_stages", {"cores": cores, "rounds": arguments.rounds, "tables": tables}, notes)


# --- quality ---------------------------------------------------------------------------------------------------------


def quality(
    data: Path, folder: Path, epochs: int, processes: Sequence[int], seeds: int, batch_size: int = 512
) -> dict[str, Any]:
    """Scores of every side on the test split over the seeds, one process first."""
    runs = [
        run
        for num in (1, *processes)
        for run in _runs(
            [
                Job(side, seed=seed, epochs=epochs, batch_size=batch_size)
                for seed in range(seeds)
                for side in ((PLAIN,) if num == 1 else (SYNCHRONOUS, *LOCAL))
            ],
            num,
            data,
            folder / str(num),
        )
    ]
    _check_starts(runs)
    lines = [_line(runs, num, side) for num in processes for side in (SYNCHRONOUS, *LOCAL)]
    lines.insert(0, _line(runs, 1, PLAIN))
    title = f"{_epochs(epochs)}, {seeds} seeds, batch {batch_size}"
    print_table(f"test AUC, {title}", [{key: line[key] for key in SCORES} for line in lines])
    print_table(
        f"tables and bytes, {title}", [{k: v for k, v in line.items() if k not in SCORES[2:]} for line in lines]
    )
    return {"epochs": epochs, "batch_size": batch_size, "lines": lines, "runs": runs}


def _runs(jobs: list[Job], num: int, data: Path, folder: Path) -> list[dict[str, Any]]:
    """What the card keeps of each run."""
    kept = []
    for number, (job, ranks) in enumerate(zip(jobs, run_jobs(jobs, num, data, folder), strict=True)):
        run = folder / f"run-{number}"
        scores = evaluate(run, "test")
        own = [rank["own_auc"] for rank in ranks]
        if job.side.strategy != "local" and any(abs(auc - scores["auc"]) > 1e-9 for auc in own):
            raise SystemExit(f"processes of {job.side.name} ended with different models: {own}, {scores['auc']}")
        apart = differences(run, ranks[0])
        logged = [row for row in read_metrics(run) if row["split"] == "train"]
        kept.append(
            {
                "processes": num,
                "side": job.side.name,
                "seed": job.seed,
                "steps": ranks[0]["steps"],
                "auc": scores["auc"],
                "logloss": scores["logloss"],
                "valid_logloss": ranks[0]["valid"]["logloss"],
                "own_auc": own,
                "first_loss": logged[0]["loss"],
                "moved": ranks[0]["moved"],
                "merges": len(apart),
                "difference": {"first": apart[0], "median": float(np.median(apart)), "last": apart[-1]}
                if apart
                else {},
                "bytes_per_sample": ranks[0].get("sent_bytes_per_sample", 0.0),
                "bytes_before_the_end": logged[-1].get("sent_bytes_per_sample", 0.0),
            }
        )
    return kept


def _check_starts(runs: list[dict[str, Any]]) -> None:
    """All sides of a seed must begin with the same model and the same batch."""
    for seed in {run["seed"] for run in runs}:
        losses = [run["first_loss"] for run in runs if run["seed"] == seed]
        if np.ptp(losses) > 1e-5:
            raise SystemExit(f"the first losses of seed {seed} differ: {losses}")


def _line(runs: list[dict[str, Any]], num: int, side: Side) -> dict[str, Any]:
    """Means over the seeds; `over synchronous` is taken seed by seed."""
    own = [run for run in runs if (run["processes"], run["side"]) == (num, side.name)]
    base = {run["seed"]: run["auc"] for run in runs if (run["processes"], run["side"]) == (num, SYNCHRONOUS.name)}
    over = [run["auc"] - base[run["seed"]] for run in own if base]
    dense = min(run["bytes_before_the_end"] for run in runs if run["processes"] == num)  # of tables never merged
    line: dict[str, Any] = {
        "processes": num,
        "side": side.name,
        "auc": _mean(run["auc"] for run in own),
        "lowest": min(run["auc"] for run in own),
        "highest": max(run["auc"] for run in own),
        "over synchronous": float(np.mean(over)) if over else None,
        "from": min(over, default=None),
        "to": max(over, default=None),
        "own auc": _mean(np.mean(run["own_auc"]) for run in own),
        "valid logloss": _mean(run["valid_logloss"] for run in own),
        "moved": _mean(run["moved"] for run in own),
        "bytes a sample, MLPs": dense,
        "bytes a sample, rows": _mean(run["bytes_per_sample"] for run in own) - dense,
    }
    if side.strategy == "local":
        for which in ("first", "median", "last"):
            line[f"difference, {which}"] = _mean(run["difference"][which] for run in own)
    return line


def write_quality(found: Sequence[dict[str, Any]], rows: dict[str, int], seeds: int) -> None:
    """The card and the figure of the first part."""
    chosen = epochs_by_validation(found)
    print_table("epochs chosen on the validation split", chosen)
    figure(RESULTS / "local.svg", found)
    write_card("local", {"rows": rows, "seeds": seeds, "epochs chosen on validation": chosen, "settings": found})


def epochs_by_validation(found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each side after the number of epochs at which its mean logloss on the validation split is lowest."""
    chosen: dict[tuple[int, str], dict[str, Any]] = {}
    for one in found:
        for line in one["lines"]:
            kept = chosen.get((line["processes"], line["side"]))
            if kept is None or line["valid logloss"] < kept["valid logloss"]:
                columns = {key: line[key] for key in (*SCORES[:5], "valid logloss")}
                chosen[line["processes"], line["side"]] = {**columns, "epochs": one["epochs"]}
    return list(chosen.values())


def figure(path: Path, found: Sequence[dict[str, Any]]) -> None:
    """AUC over the steps between merges, a panel for each number of epochs; below, how far processes were apart."""
    panels = []
    for one in found:
        lines, bars = {}, []
        for place, num in enumerate(_world_sizes(one)):
            own = [line for line in one["lines"] if line["processes"] == num]
            nudge = 1 + 0.12 * place  # so that bars stand side by side
            lines[f"{num} processes"] = [(_x(line) * nudge, line["auc"]) for line in own]
            bars += [[(_x(line) * nudge, line["lowest"]), (_x(line) * nudge, line["highest"])] for line in own]
        label = f"test AUC, {_epochs(one['epochs'])}"
        level = {"one process": one["lines"][0]["auc"]}
        panels.append(
            Panel(lines=lines, y_label=label, y_format="{:.4f}".format, levels=level, background=bars, markers=True)
        )
    panels.append(_difference_panel(found[-1]))
    chart(
        path,
        panels,
        title="Tables of each process's own: AUC against how often they are merged",
        subtitle="Criteo sample, settings of one process; means, and grey bars from the lowest seed to the highest",
        x_label="steps between merges",
        x_format=lambda x: {AT_LEFT: "synchronous", AT_RIGHT: "never"}.get(x, f"{x:g}"),
        x_ticks=[AT_LEFT, 1, 10, 100, AT_RIGHT],
        height=200 + 210 * len(panels),
    )


def _difference_panel(one: dict[str, Any]) -> Panel:
    lines: dict[str, Points] = {
        f"{num} processes": [
            (_x(line), line["difference, median"])
            for line in one["lines"]
            if line["processes"] == num and "difference, median" in line
        ]
        for num in _world_sizes(one)
    }
    label = f"difference before a merge, {_epochs(one['epochs'])}"
    return Panel(lines=lines, y_label=label, y_format="{:g}".format, markers=True, y_range=(0.0, _top(lines)))


def _epochs(num: int) -> str:
    return f"{num} epoch{'s' if num > 1 else ''}"


def _world_sizes(one: dict[str, Any]) -> list[int]:
    return sorted({line["processes"] for line in one["lines"]} - {1})


def _x(line: dict[str, Any]) -> float:
    places = {side.name: float(side.merge_every or AT_RIGHT) for side in LOCAL}
    return places.get(line["side"], AT_LEFT)


def _top(lines: dict[str, Points]) -> float:
    return 1.1 * max(y for points in lines.values() for _, y in points)


# --- time by stage ---------------------------------------------------------------------------------------------------


def stages(data: Path, folder: Path, batch_size: int, steps: int, rounds: int, num: int = 2) -> dict[str, Any]:
    """Milliseconds of each stage, for one process and for `num`, with the same global batch; sides taken in turn."""
    found: dict[tuple[int, Side], list[dict[str, float]]] = {}
    for turn in range(rounds):
        sides = (SYNCHRONOUS, *LOCAL) if turn % 2 == 0 else (*LOCAL[::-1], SYNCHRONOUS)
        for processes, chosen in ((1, (PLAIN,)), (num, sides)):
            where = folder / f"{turn}-{processes}"
            jobs = [Job(side, steps=steps, batch_size=batch_size, log_every=LOG_EVERY) for side in chosen]
            for number, (job, ranks) in enumerate(zip(jobs, run_jobs(jobs, processes, data, where), strict=True)):
                whole, parts = step_seconds(where / f"run-{number}", batch_size), _by_stage(job, ranks)
                seconds = {"step": whole, **parts, "not in a stage": whole - sum(parts.values())}
                found.setdefault((processes, job.side), []).append({k: 1e3 * v for k, v in seconds.items()})
    lines, spread = [], []
    for (processes, side), times in found.items():
        line: dict[str, Any] = {"processes": processes, "side": side.name}
        spread.append({**line, **{key: [min(t[key] for t in times), max(t[key] for t in times)] for key in times[0]}})
        line |= {key: float(np.median([one[key] for one in times])) for key in times[0]}
        lines.append(line)
    lines.sort(key=lambda line: line["processes"])
    print_table(f"ms a step by stage, global batch {batch_size}", lines)
    return {"batch_size": batch_size, "steps": steps, "lines": lines, "lowest and highest": spread}


def _by_stage(job: Job, ranks: list[dict[str, Any]]) -> dict[str, float]:
    """Seconds a step of each stage, mean over processes."""
    means = {stage: _mean(rank["stages"][stage] for rank in ranks) for stage in STAGES if stage in ranks[0]["stages"]}
    if "merge" in means:
        assert job.side.merge_every is not None
        means["merge"] /= job.side.merge_every
    return means


def _mean(values: Any) -> float:
    return float(np.mean(list(values)))


if __name__ == "__main__":
    main()
