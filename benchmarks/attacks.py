"""Attacks on every artifact and every command that writes: damaged files, bad rows, kills, full disks, two writers.

python -m benchmarks.attacks [--artifacts 1000] [--rows 10000] [--kills 100] [--pairs 50] [--errors 50] [--disks 50]
                             [--seed 0] [--only GROUP/NUMBER] [--card attacks]

Each trial ends `identical` (exit 0 and the result of the undamaged artifact, to the digit), `refused` (exit 2 and one
sentence, nothing changed on disk), or `edited` (another result, of a file that people write by hand). All else is a
defect, is listed with its seed, and makes this exit with 1. `--only` makes one trial again.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import as_completed
from pathlib import Path
from typing import Any

from rich.progress import track

from benchmarks.card import print_table, write_card
from tests.attacks.artifacts import BAD, GOOD, Trial
from tests.attacks.command import pool
from tests.attacks.rows import Outcomes, attack_rows
from tests.attacks.trials import Attack, attacks
from tests.attacks.workspace import build

NOTES = (
    "identical: exit 0 and the result of the undamaged artifact, to the digit (after a kill or an error: when run "
    "again); refused: exit 2 and one sentence, nothing changed on disk; edited: exit 0 and another result, of a file "
    "that people write by hand (plan, settings, schema, log); silent: another result; traceback: no single sentence; "
    "lost: a file that was there is gone or changed; left: files stay behind; hang: 60 s. Kills are made before a "
    "change of a file or after a random time, errors at a change of a file, full disks are a tmpfs too small; of two "
    "writers the first is paused before a change of a file, or both run at once."
)

ROWS_AT_ONCE = 2_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--artifacts", type=int, default=1000, help="damaged files")
    parser.add_argument("--rows", type=int, default=10_000, help="lines of raw files, most of them bad")
    parser.add_argument("--kills", type=int, default=100, help="killed commands")
    parser.add_argument("--pairs", type=int, default=50, help="pairs of commands that write one folder at once")
    parser.add_argument("--errors", type=int, default=50, help="commands that get an error of the disk")
    parser.add_argument("--disks", type=int, default=50, help="commands on a disk that fills")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--only", help="one trial, such as artifacts/17")
    parser.add_argument("--card", default="attacks", help="name of the run card; empty: none is written")
    options = parser.parse_args()
    start = time.monotonic()
    trials = run(chosen(options), options.workers)
    lines = run_rows(options.seed, 0 if options.only else options.rows, options.workers)
    groups = by_group(trials) | {"rows": dict(lines.by_format)}
    table = [
        {"group": group, "kind": kind, **found} for group, kinds in groups.items() for kind, found in kinds.items()
    ]
    print_table("trials by outcome", table)
    defects = [describe(trial) for trial in trials if trial.outcome not in GOOD] + lines.defects
    print(*lines.defects, f"{len(defects)} defects in {time.monotonic() - start:.0f} s", sep="\n")
    if options.card and not options.only:
        outcomes = dict.fromkeys((*GOOD, *BAD), 0) | Counter(trial.outcome for trial in trials) + lines.counts
        results: dict[str, Any] = {"options": vars(options), "outcomes": outcomes, "trials": groups, "defects": defects}
        results["rows_refused_needlessly"] = len(lines.needless)
        write_card(options.card, results | {"seconds": time.monotonic() - start}, notes=NOTES)
    raise SystemExit(1 if defects else 0)


def chosen(options: argparse.Namespace) -> list[Attack]:
    if options.only:
        group, _, number = options.only.rpartition("/")
        return [Attack(group, int(number), options.seed)]
    numbers = {
        "artifacts": options.artifacts,
        "kills": options.kills - options.kills // 2,
        "timed kills": options.kills // 2,
        "errors": options.errors,
        "full disks": options.disks,
        "paused pairs": options.pairs - options.pairs // 2,
        "timed pairs": options.pairs // 2,
    }
    return list(attacks(options.seed, numbers))


def run(planned: Sequence[Attack], workers: int) -> list[Trial]:
    """Make the trials in worker processes and print the defects; trials that the system does not allow are left out."""
    with tempfile.TemporaryDirectory() as scratch, pool(workers) as processes:
        healthy = Path(scratch) / "healthy"
        healthy.mkdir()
        processes.submit(build, healthy).result()
        made = [processes.submit(attack.make, healthy) for attack in planned]
        for trial in track((one.result() for one in as_completed(made)), "attacks", total=len(made)):
            if trial is not None and trial.outcome not in GOOD:
                print(describe(trial), flush=True)
        return [trial for trial in (one.result() for one in made) if trial is not None]


def run_rows(seed: int, number: int, workers: int) -> Outcomes:
    """Attack the readers of raw files with lines, in files of their own."""
    sizes = [min(ROWS_AT_ONCE, number - start) for start in range(0, number, ROWS_AT_ONCE)]
    all_outcomes = Outcomes()
    with pool(workers) as processes:
        made = [processes.submit(attack_rows, seed * len(sizes) + part, size) for part, size in enumerate(sizes)]
        for found in (one.result() for one in made):
            all_outcomes.counts += found.counts
            for kind, counts in found.by_format.items():
                all_outcomes.by_format[kind] = all_outcomes.by_format.get(kind, Counter()) + counts
            all_outcomes.defects += found.defects
            all_outcomes.needless += found.needless
    return all_outcomes


def describe(trial: Trial) -> str:
    return f"{trial.outcome} | {trial.seed} | {trial.command} | {trial.attack} | {trial.note}"


def by_group(trials: Sequence[Trial]) -> dict[str, dict[str, Counter[str]]]:
    """Number of trials by outcome, for each group and kind."""
    found: dict[str, dict[str, Counter[str]]] = {}
    for trial in trials:
        found.setdefault(trial.seed.split("/")[1], {}).setdefault(trial.kind, Counter())[trial.outcome] += 1
    return found


if __name__ == "__main__":
    main()
