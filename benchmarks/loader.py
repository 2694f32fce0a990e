"""How many samples a second the loader gives: a Criteo-Kaggle-shaped set, in the page cache.

    python -m benchmarks.loader --rows 4000000

The set (13 dense values, 26 ids, 161 bytes a row) is generated before the clock starts and read once, so that the disk
is out of the picture. Each side runs whole epochs, the shuffle included: `given` takes the batches and drops them,
`touched` also sums every dense value, id and label in torch, as the least that a training step would read. The sides
take turns, and at the end must have seen the same sums.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.card import alternate, print_table, summary, write_card
from holdall.data.dataset import DataSet
from holdall.data.loader import Loader
from holdall.data.synthetic import preset, write_prepared

TARGET = 2_000_000  # samples/s, so that loading never bounds training
WAYS: dict[str, dict[str, Any]] = {
    "chunks": {"shuffle": "chunks", "prefetch": 2},
    "blocks": {"shuffle": "blocks", "prefetch": 2},
    "blocks, no thread": {"shuffle": "blocks", "prefetch": 0},
    "rows": {"shuffle": "rows", "prefetch": 2},
}


def give(loader: Loader) -> None:
    """One epoch, looking at nothing."""
    num_samples = 0
    for batch in loader.epoch(0):
        num_samples += len(batch)
    assert num_samples == len(loader.data)


def touch(loader: Loader, sums: list[tuple[float, int]]) -> None:
    """One epoch, reading everything."""
    dense, ids = 0.0, 0
    for batch in loader.epoch(0):
        dense += float(batch.dense.sum()) + float(batch.label.sum())
        ids += int(batch.ids.values.sum())
    sums.append((dense, ids))


def measure(data: DataSet, batch_sizes: list[int], repeats: int) -> list[dict[str, Any]]:
    sums: list[tuple[float, int]] = []
    sides: dict[str, Callable[[], None]] = {}
    for batch_size in batch_sizes:
        for what, options in WAYS.items():
            loader = Loader(data, batch_size, **options)
            sides[f"{batch_size}|{what}|given"] = partial(give, loader)
            sides[f"{batch_size}|{what}|touched"] = partial(touch, loader, sums)
    times = alternate(sides, repeats)
    assert len({ids for _, ids in sums}) == 1
    assert max(dense for dense, _ in sums) - min(dense for dense, _ in sums) < 1e-5 * sums[0][0]
    rows = []
    for side, seconds in times.items():
        size, way, reading = side.split("|")
        rates = summary([len(data) / second for second in seconds])
        rows.append({"batch": int(size), "shuffle": way, "batches": reading, **rates})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4_000_000)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[2048, 65536])
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    # One core reads, the other is the loader thread's. With two torch threads on two cores that others use too,
    # the sums wait for each other at barriers, with or without a loader, and hide what is measured.
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        config = preset("criteo-kaggle", scale=0.01, rows=arguments.rows)
        write_prepared(config, Path(folder) / "data", valid=0.0, test=0.0)
        rows = measure(DataSet(Path(folder) / "data"), arguments.batch_sizes, arguments.repeats)
    shown = [{**row, **{name: row[name] / 1e6 for name in ("p20", "p50", "p80")}} for row in rows]
    print_table(f"loader, {arguments.rows:,} rows: million samples/s", shown)
    reached = all(row["p50"] >= TARGET for row in rows if row["shuffle"] in ("chunks", "blocks"))
    print(f"target of {TARGET:,} samples/s {'reached' if reached else 'MISSED'} at every batch size")
    write_card(
        "loader",
        {
            "rows": arguments.rows,
            "target_samples_per_s": TARGET,
            "target_reached": reached,
            "samples_per_s": rows,
            "load_average": os.getloadavg()[0],
        },
        notes="Whole epochs of shuffled batches, files in the page cache (written just before and read once), "
        "one process, one torch thread. given: batches taken and dropped; touched: every dense value, id and label "
        "summed in torch. load_average: how busy all processes kept the machine during the run.",
    )


if __name__ == "__main__":
    main()
