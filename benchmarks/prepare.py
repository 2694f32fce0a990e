"""How fast `prepare` is and how much memory it takes: Criteo-shaped rows, end to end, in a process of its own.

    python -m benchmarks.prepare --rows 1000000 4000000

Rows are drawn with the Criteo Kaggle cardinalities, Zipf-skewed ids and that data set's rates of missing values, and
written as a tab-separated file before the clock starts. The clock covers everything from starting `prepare` to the
data folder under its final name, flushed to disk; the peak memory is the child process's maximum resident set.
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
import pyarrow as pa

from benchmarks.card import print_table, summary, write_card

# Criteo Kaggle: distinct values of C1..C26, and the share of rows where I1..I13 and C1..C26 are missing.
CARDINALITIES = (
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194),
    *(27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572),
)
MISSING_DENSE = (0.45, 0, 0.21, 0.21, 0.03, 0.23, 0.04, 0.001, 0.04, 0.45, 0.04, 0.77, 0.21)
MISSING_IDS = {3: 0.034, 4: 0.034, 6: 0.12, 12: 0.034, 16: 0.034, 19: 0.44, 20: 0.44, 21: 0.034}
MISSING_IDS |= {22: 0.77, 24: 0.034, 25: 0.44, 26: 0.44}
# With 1.05 a sample of 138,357 rows has about as many distinct values in all as a real sample of that size.
ZIPF = 1.05
LABEL_RATE = 0.254
ROWS_PER_BLOCK = 250_000


def zipf_ranks(rng: np.random.Generator, num_values: int, size: int) -> np.ndarray:
    """Ranks 0..num_values-1 with probability about rank^-ZIPF, by inverting the continuous distribution."""
    power = 1 - ZIPF
    u = rng.random(size)
    ranks = (((num_values + 1) ** power - 1) * u + 1) ** (1 / power)
    return np.minimum(ranks.astype(np.int64), num_values) - 1


def hex_strings(ranks: np.ndarray, salt: int) -> pa.StringArray:
    """Eight hexadecimal digits a rank: one value a rank (an odd multiplier permutes 32-bit integers), well mixed."""
    mixed = ((ranks + (salt * 40503 << 9)).astype(np.uint64) * np.uint64(2654435761)) & np.uint64(0xFFFFFFFF)
    pairs = np.frombuffer(b"".join(b"%02x" % byte for byte in range(256)), dtype=np.uint16)
    digits = pairs[mixed.astype(">u4").view(np.uint8)]
    offsets = np.arange(len(ranks) + 1, dtype=np.int32) * 8
    return pa.StringArray.from_buffers(len(ranks), pa.py_buffer(offsets), pa.py_buffer(digits))


def criteo_block(rng: np.random.Generator, rows: int) -> Any:
    """A polars frame of label, 13 integers and 26 hexadecimal strings, with nulls where a value is missing."""
    import polars as pl

    columns: dict[str, pl.Series] = {"label": pl.Series(rng.random(rows) < LABEL_RATE).cast(pl.UInt8)}
    for number, share in enumerate(MISSING_DENSE, start=1):
        values = pl.Series(np.floor(rng.lognormal(2.0, 1.8, rows)).astype(np.int64))
        columns[f"I{number}"] = values.set(pl.Series(rng.random(rows) < share), None)
    for number, num_values in enumerate(CARDINALITIES, start=1):
        digits = pl.Series(hex_strings(zipf_ranks(rng, num_values, rows), salt=number))
        missing = pl.Series(rng.random(rows) < MISSING_IDS.get(number, 0.0))
        columns[f"C{number}"] = digits.set(missing, None)
    return pl.DataFrame(columns)


def write_criteo(path: Path, rows: int, seed: int = 0) -> None:
    """Write `rows` Criteo-shaped rows as a plain tab-separated file, block by block."""
    rng = np.random.default_rng(seed)
    with path.open("wb") as file:
        for start in range(0, rows, ROWS_PER_BLOCK):
            block = criteo_block(rng, min(ROWS_PER_BLOCK, rows - start))
            block.write_csv(file, include_header=False, separator="\t", quote_style="never")


# Runs in the child: the clock starts after the imports, and the stages are timed from the progress callback.
CHILD = """
import json, resource, sys, time
from holdall.data.prepare import PrepareConfig, prepare
ends = {}
start = time.perf_counter()
schema = prepare(sys.argv[1:2], sys.argv[2], PrepareConfig(overwrite=True),
                 progress=lambda stage, done, total: ends.update({stage: time.perf_counter() - start}))
seconds = time.perf_counter() - start
usage = resource.getrusage(resource.RUSAGE_SELF)
print(json.dumps({"seconds": seconds, "stages": ends, "cpu_seconds": usage.ru_utime + usage.ru_stime,
                  "peak_bytes": usage.ru_maxrss * 1024, "rows": sum(split.rows for split in schema.splits.values()),
                  "values": sum(feature.num_rows for feature in schema.features)}))
"""


def run_child(raw: Path, out: Path) -> dict[str, Any]:
    """Prepare `raw` in a process of its own; what it measured about itself."""
    load = os.getloadavg()[0]  # more than a little, and the machine had other work: measure again
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(raw), str(out)], check=True, stdout=subprocess.PIPE, text=True
    )
    return {**json.loads(done.stdout), "load_before": load}


def measure(rows: int, repeats: int, folder: Path) -> dict[str, Any]:
    """Generate `rows` rows once and prepare them `repeats` times."""
    raw = folder / "raw.tsv"
    write_criteo(raw, rows)
    runs = [run_child(raw, folder / "out") for _ in range(repeats)]
    assert all(run["rows"] == rows for run in runs), "a row was lost"
    middle = sorted(runs, key=lambda run: run["seconds"])[len(runs) // 2]
    stages = list(middle["stages"].items())
    begins = [0.0, *(end for _, end in stages)]
    shares = {stage: end - begin for (stage, end), begin in zip(stages, begins, strict=False)}
    return {
        "rows": rows,
        "raw_bytes": raw.stat().st_size,
        "distinct_values": middle["values"],
        "seconds": summary([run["seconds"] for run in runs]),
        "rows_per_second": rows / summary([run["seconds"] for run in runs])["p50"],
        "peak_bytes": max(run["peak_bytes"] for run in runs),
        "cpu_seconds": middle["cpu_seconds"],
        "load_before": [run["load_before"] for run in runs],
        "stage_seconds": {**shares, "flush": middle["seconds"] - begins[-1]},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1_000_000, 4_000_000], help="sizes to measure")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each size")
    parser.add_argument("--folder", type=Path, help="where to put the files (default: the temporary folder)")
    arguments = parser.parse_args()
    results = []
    for rows in arguments.rows:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            results.append(measure(rows, arguments.repeats, Path(folder)))
    speed = [
        {
            "rows": result["rows"],
            "distinct values": result["distinct_values"],
            "rows/s": result["rows_per_second"],
            "s (p20, p50, p80)": "{p20:.1f}, {p50:.1f}, {p80:.1f}".format(**result["seconds"]),
            "peak MB": result["peak_bytes"] / 1e6,
        }
        for result in results
    ]
    print_table("prepare, Criteo-shaped rows, end to end", speed)
    where = [{"rows": result["rows"], **result["stage_seconds"], "CPU": result["cpu_seconds"]} for result in results]
    print_table("where the seconds of the middle run go", where)
    notes = "Target: 150,000 rows/s on 2 cores and less than 2 GB at 4M rows. Memory is the largest of all runs."
    print(write_card("prepare", {"runs": results}, notes))


if __name__ == "__main__":
    main()
