"""The first hour of a new user: seconds and lines from an unknown CSV, and from a DataFrame, to AUC and predictions.

The CSV has a text label, ids that became floats because some are missing, and a column of several values. Every command
is a process of its own, as a user starts it.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from benchmarks.card import print_table, summary, write_card

COMMANDS = (
    "schema infer orders.csv --out orders.toml",
    "prepare orders.csv --format table --schema orders.toml --valid 0.1 --test 0.1 --out data",
    "train data --out run",
    "evaluate run --split test --json",
    "score run new.csv --out scores.csv",
)
FIT = """\
import holdall, polars as pl
frame, new = (pl.read_csv(name, null_values="NaN") for name in ("orders.csv", "new.csv"))
model = holdall.fit(frame, label={"column": "fit", "positive": "== fit"})
scores = model.predict(new)
print(model.evaluate(new)["auc"])
"""


def orders(rows: int, seed: int) -> pl.DataFrame:
    """Orders of clothes, RentTheRunway's columns: whether they fit depends on the user and the item."""
    draw = np.random.default_rng(seed)
    user, item = draw.zipf(1.3, rows) % 50_000, draw.zipf(1.2, rows) % 5000
    fits = draw.random(rows) < 0.25 + 0.25 * (user % 3 == 0) + 0.35 * (item % 3 > 0)
    events = np.array(["party", "wedding", "work", "travel", "formal"])
    return pl.DataFrame(
        {
            "fit": np.where(fits, "fit", np.where(draw.random(rows) < 0.5, "small", "large")),
            "user_id": np.where(draw.random(rows) < 0.05, np.nan, user),
            "item_id": item,
            "size": draw.integers(1, 30, rows),
            "weight": draw.normal(62, 9, rows).round(1),
            "rented_for": ["|".join(draw.permutation(events)[: row % 3]) for row in range(rows)],
        }
    )


def timed(words: list[str], folder: Path) -> tuple[float, str]:
    """Seconds and output of a Python process."""
    start = time.perf_counter()
    done = subprocess.run([sys.executable, *words], cwd=folder, capture_output=True, text=True)
    seconds = time.perf_counter() - start
    if done.returncode:
        raise RuntimeError(f"{words}: {done.stderr[-2000:]}")
    return seconds, done.stdout


def measure(rows: int, repeats: int, folder: Path) -> dict[str, Any]:
    orders(rows, seed=0).write_csv(folder / "orders.csv")
    orders(rows // 10, seed=1).write_csv(folder / "new.csv")
    seconds, outputs = {}, {}
    for command in COMMANDS:
        seconds[command], outputs[command] = timed(["-m", "holdall", *command.split()], folder)
    from_frame, auc = timed(["-c", FIT], folder)
    starts = {"holdall --help": ["-m", "holdall", "--help"], "import holdall": ["-c", "import holdall"]}
    return {
        "rows": rows,
        "csv": {
            "commands": len(COMMANDS),
            "seconds_by_command": seconds,
            "seconds": sum(seconds.values()),
            "test_auc": json.loads(outputs[COMMANDS[3]])["auc"],
            "auc_of_new_rows": float(re.findall(r"AUC ([\d.]+)", outputs[COMMANDS[4]])[0]),
        },
        "frame": {"lines": len(FIT.splitlines()), "seconds": from_frame, "auc_of_new_rows": float(auc)},
        "start_seconds": {
            name: summary([timed(words, folder)[0] for _ in range(repeats)]) for name, words in starts.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=200_000, help="rows of the CSV")
    parser.add_argument("--repeats", type=int, default=5, help="runs of --help and import")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = measure(arguments.rows, arguments.repeats, Path(folder))
    csv, frame = results["csv"], results["frame"]
    lines = [
        {"from": "CSV", "lines": csv["commands"], "seconds": csv["seconds"], "AUC": csv["auc_of_new_rows"]},
        {"from": "DataFrame", "lines": frame["lines"], "seconds": frame["seconds"], "AUC": frame["auc_of_new_rows"]},
    ]
    print_table("from unknown data to predictions, and the AUC of new rows", lines)
    print_table("start", [{"what": name, **spread} for name, spread in results["start_seconds"].items()])
    print(write_card("first_hour", results, "The schema is the one that `schema infer` guessed, unread and unchanged."))


if __name__ == "__main__":
    main()
