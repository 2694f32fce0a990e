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
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.progress import track

from benchmarks.card import print_table, write_card
from tests.attacks.artifacts import BAD, GOOD, Trial
from tests.attacks.command import pool
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--artifacts", type=int, default=1000, help="damaged files")
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
    groups = by_group(trials)
    for group, kinds in groups.items():
        print_table(group, [{"kind": kind, **outcomes} for kind, outcomes in kinds.items()])
    defects = [trial for trial in trials if trial.outcome not in GOOD]
    if options.card and not options.only:
        results: dict[str, Any] = {"options": vars(options), "outcomes": totals(trials), "trials": groups}
        results |= {"defects": [asdict(trial) for trial in defects], "seconds": time.monotonic() - start}
        write_card(options.card, results, notes=NOTES)
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
                line = f"{trial.outcome} | {trial.seed} | {trial.command} | {trial.attack} | {trial.note}"
                print(line, flush=True)
        return [trial for trial in (one.result() for one in made) if trial is not None]


def by_group(trials: Sequence[Trial]) -> dict[str, dict[str, dict[str, int]]]:
    """Trials by outcome, for each group and kind."""
    found: dict[str, dict[str, dict[str, int]]] = {}
    for trial in trials:
        found.setdefault(trial.seed.split("/")[1], {}).setdefault(trial.kind, {})
    for group, kinds in found.items():
        for kind in kinds:
            same = [trial for trial in trials if trial.seed.split("/")[1] == group and trial.kind == kind]
            kinds[kind] = {"trials": len(same), **totals(same)}
    return found


def totals(trials: Sequence[Trial]) -> dict[str, int]:
    counts = Counter(trial.outcome for trial in trials)
    return {outcome: counts[outcome] for outcome in (*GOOD, *BAD)}


if __name__ == "__main__":
    main()
