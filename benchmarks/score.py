"""How fast `score` is and how much memory it takes: Criteo-shaped rows, Parquet to Parquet, in a process of its own.

    python -m benchmarks.score --rows 2000000

A log is prepared, and a DLRM with that data set's id maps is written as a bundle; its weights are random, since speed
does not depend on them. Other rows of the same distribution are the Parquet file that is scored. MLPs have two sizes:
those of DLRM for Criteo Kaggle, of which matrix products take most of the time, and small ones, which show the rest.
Each is scored by the fast path of Parquet and by the plain path, in turn, and both must give the same scores. The clock
covers everything from opening the files to the scores under their final name; the peak memory is that of the process,
and is measured again with four times the rows.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from benchmarks.card import print_table, summary, write_card
from benchmarks.prepare import ROWS_PER_BLOCK, criteo_block, write_criteo
from holdall.data.prepare import PrepareConfig, prepare
from holdall.data.schema import Schema
from holdall.models import DLRMConfig
from holdall.serving.bundle import Origin, Quality, write_bundle

MODELS = {
    "DLRM of Criteo Kaggle": DLRMConfig(dim=16),
    "DLRM with small MLPs": DLRMConfig(dim=16, bottom=(64,), top=(64,)),
}
PATHS = ("fast", "plain")

# Runs in the child: the clock starts when the bundle is open.
CHILD = """
import functools, json, os, resource, sys, time
from holdall.serving import file_rows, score_files
bundle, rows, out, path = sys.argv[1:]
if path == "plain":
    score_files.encoded_file = functools.partial(file_rows.encoded_file, fast=False)
scorer = score_files.load(bundle, device="cpu")
start, cpu = time.perf_counter(), time.process_time()
report = score_files.score(scorer, rows, out, overwrite=True)
print(json.dumps({"rows": report.rows, "seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - cpu,
                  "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
                  "unseen": sum(report.unseen.values()) / len(report.unseen)}))
"""


def write_rows(path: Path, rows: int, seed: int) -> None:
    """Write Criteo-shaped rows as a Parquet file, a row group a block."""
    rng = np.random.default_rng(seed)
    writer = None
    for start in range(0, rows, ROWS_PER_BLOCK):
        block = criteo_block(rng, min(ROWS_PER_BLOCK, rows - start)).to_arrow()
        writer = writer or pq.ParquetWriter(path, block.schema)
        writer.write_table(block)
    assert writer is not None
    writer.close()


def run_child(bundle: Path, rows: Path, out: Path, path: str) -> dict[str, Any]:
    """Score `rows` in a process of its own; what it measured about itself."""
    load = os.getloadavg()[0]  # more than a little, and the machine had other work: measure again
    command = [sys.executable, "-c", CHILD, str(bundle), str(rows), str(out), path]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return {**json.loads(done.stdout), "load_before": load}


def largest_difference(folder: Path) -> float:
    one, other = (pq.read_table(folder / f"{path}.parquet")["score"].to_numpy() for path in PATHS)
    return float(np.abs(one - other).max())


def measure(name: str, folder: Path, repeats: int) -> dict[str, Any]:
    """Score the rows by both paths, `repeats` times each in turn, and four times the rows once."""
    bundle = folder / name.replace(" ", "-")
    config, schema = MODELS[name], Schema.load(folder / "data")
    quality = Quality(table_bytes=1, dense_bytes=1)
    origin = Origin(run=None, checkpoint=None, step=None)
    write_bundle(bundle, config.build(schema), config, schema, folder / "data", origin, quality)
    runs: dict[str, list[dict[str, Any]]] = {path: [] for path in PATHS}
    for repeat in range(repeats):
        for path in PATHS if repeat % 2 == 0 else reversed(PATHS):
            runs[path].append(run_child(bundle, folder / "rows.parquet", folder / f"{path}.parquet", path))
    difference = largest_difference(folder)
    assert difference <= 1e-6, f"the paths differ by {difference}"
    longer = run_child(bundle, folder / "longer.parquet", folder / "longer-scores.parquet", "fast")
    return {
        "model": name,
        "rows": runs["fast"][0]["rows"],
        **{
            path: {
                "seconds": summary([run["seconds"] for run in found]),
                "rows_per_second": found[0]["rows"] / summary([run["seconds"] for run in found])["p50"],
                "cpu_seconds": summary([run["cpu_seconds"] for run in found])["p50"],
                "peak_bytes": max(run["peak_bytes"] for run in found),
                "load_before": [run["load_before"] for run in found],
            }
            for path, found in runs.items()
        },
        "four_times_the_rows": longer,
        "largest_difference": difference,
        "unseen_share": longer["unseen"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows that are scored")
    parser.add_argument("--train-rows", type=int, default=1_000_000, help="rows of the log that the id maps come from")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each side")
    parser.add_argument("--folder", type=Path, help="where to put the files (default: the temporary folder)")
    parser.add_argument("--no-card", action="store_true", help="print only")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        write_criteo(folder / "raw.tsv", arguments.train_rows)
        prepare([folder / "raw.tsv"], folder / "data", PrepareConfig())
        write_rows(folder / "rows.parquet", arguments.rows, seed=1)
        write_rows(folder / "longer.parquet", 4 * arguments.rows, seed=2)
        results = [measure(model, folder, arguments.repeats) for model in MODELS]
    table = [
        {
            "model": result["model"],
            "path": path,
            "rows/s": result[path]["rows_per_second"],
            "s (p20, p50, p80)": "{p20:.2f}, {p50:.2f}, {p80:.2f}".format(**result[path]["seconds"]),
            "CPU us/row": result[path]["cpu_seconds"] / result["rows"] * 1e6,
            "peak MB": result[path]["peak_bytes"] / 1e6,
            "peak MB, 4x rows": result["four_times_the_rows"]["peak_bytes"] / 1e6 if path == "fast" else None,
        }
        for result in results
        for path in PATHS
    ]
    print_table("score, Criteo-shaped rows, Parquet to Parquet", table)
    notes = "Target: 300,000 rows/s on 2 cores, in memory that does not grow with the rows. Weights are random."
    if not arguments.no_card:
        print(write_card("score", {"train_rows": arguments.train_rows, "models": results}, notes))


if __name__ == "__main__":
    main()
