"""A million raw rows through bundles, as trained and in bands, and through an export: mismatches with training, rows/s.

    python -m benchmarks.verify --rows 1000000 [--folder FOLDER]

Criteo-shaped rows are prepared, a DLRM with small MLPs is trained on them for some steps, released and exported to
onnx. `holdall verify` then reads the raw file again, and compares every id and dense value with the data set folder, to
the bit, and every score with training's, to 1e-6. What is made for it is kept in `--folder`, for another run.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import holdall
from benchmarks.card import OtherWork, print_table, write_card
from benchmarks.prepare import write_criteo

STEPS = 40
MODEL = holdall.TrainConfig.of(dim=16, bottom=(64,), top=(64,), batch_size=2048, steps=STEPS, device="cpu")
EXPORT = "as-trained-onnx"
SIDES = (("as-trained", None), ("as-trained", EXPORT), ("bands", None))
"""Bundle, and the export that scores the same rows."""


def make(folder: Path, rows: int) -> None:
    """Raw file, data set folder, run, two bundles and an export; what is there already stays."""
    raw, data, run = folder / "rows.tsv", folder / "data", folder / "run"
    if not data.exists():
        write_criteo(raw, rows)
        holdall.prepare([raw], data, holdall.PrepareConfig(format="criteo", valid=0.1, test=0.1))
    if not run.exists():
        holdall.train(data, run, MODEL)
    if not (folder / "as-trained").exists():
        holdall.release(run, folder / "as-trained", as_trained=True, device="cpu")
    if not (folder / "bands").exists():
        holdall.release(run, folder / "bands", budget="1/20", device="cpu")
    if not (folder / EXPORT).exists():
        holdall.export(folder / "as-trained", folder / EXPORT, format="onnx")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--folder", type=Path, help="for what is made, which stays there; a temporary one if absent")
    parser.add_argument("--only-make", action="store_true", help="make everything, and measure nothing")
    parser.add_argument("--card", default="verify", help="name of the run card; empty: none is written")
    options = parser.parse_args()
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) if options.folder is None else options.folder
        folder.mkdir(exist_ok=True)
        make(folder, options.rows)
        for bundle, export in () if options.only_make else SIDES:
            start = time.perf_counter()
            with OtherWork() as others:
                report = holdall.verify(
                    folder / bundle,
                    folder / "run",
                    rows=options.rows,
                    export=None if export is None else folder / export,
                    device="cpu",
                )
            seconds = time.perf_counter() - start
            results.append(
                {
                    "bundle": bundle,
                    "export": "" if export is None else "onnx",
                    "rows": report.rows,
                    "mismatches": report.num_mismatches,
                    "largest_difference": report.largest_difference,
                    "seconds": seconds,
                    "rows_per_s": report.rows / seconds,
                    "other_work": others.share,
                }
            )
    if options.only_make:
        return
    print_table(f"verify on {torch.get_num_threads()} threads", results)
    if options.card:
        write_card(
            options.card,
            {"threads": torch.get_num_threads(), "results": results},
            notes="Criteo-shaped rows as tab-separated text, DLRM with dim 16 and MLPs of 64. Seconds are those of the "
            "whole call: hashes, loading, reading, encoding and scoring each row twice. other_work: share of the CPU "
            "time that other processes took meanwhile.",
        )
    raise SystemExit(1 if any(row["mismatches"] for row in results) else 0)


if __name__ == "__main__":
    main()
