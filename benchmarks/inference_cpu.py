"""Latency and throughput of scoring on a CPU: the scorer and exports against torch with one nn.EmbeddingBag a table.

    python -m benchmarks.inference_cpu --scale 1 [--folder FOLDER]

The model is DLRM of Criteo Kaggle (dim 16, 512-256-64 and 512-256), its tables dense and in bands. `scorer` and `torch`
have batches of ids, `scorer, dicts` raw rows, which it encodes; `onnx` and `pt2` are exports. Batches are of held-out
rows, a new one for every call. Sides take turns of some calls, in an order that is turned round, and are compared turn
by turn, so that a slow spell of the machine does not decide. All sides must give the same logits. What is made for it
(7 GB at scale 1) is kept in `--folder`, for another run.
"""

from __future__ import annotations

import argparse
import itertools
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import holdall
from benchmarks.card import OtherWork, print_table, write_card
from holdall.data.batch import Batch
from holdall.data.dataset import DataSet
from holdall.data.loader import Loader
from holdall.data.schema import Schema
from holdall.data.synthetic import preset, write_prepared
from holdall.models import DLRM, DLRMConfig
from holdall.serving.bundle import Origin, Quality, write_bundle
from holdall.serving.export.export import export, open_export
from holdall.tables import Bands, Codes, Method, Quantized, Shared

CALLS = {1: 5000, 64: 1500, 4096: 100}
"""Calls of each side, by rows of a batch."""
TURN = 25
"""Calls of one side before it is the next one's turn, of small batches."""
TARGET = 1.5
CONFIG = DLRMConfig()
BANDS = Bands(((512, Quantized(8)), (4_096, Quantized(4)), (60_000, Codes(2)), (None, Shared(1))))
METHODS: dict[str, Method | None] = {"dense": None, "bands": BANDS}

Rows = list[dict[str, Any]]
Times = npt.NDArray[np.float64]
Side = Callable[[int], Any]
"""Scores the batch of a number."""


class Eager(nn.Module):
    """DLRM as it is usually written: a module a table, rows of float32."""

    def __init__(self, model: DLRM):
        super().__init__()
        names = model.bags.features.values()
        tables = [model.bags.table(name).materialize() for name in names]
        self.tables = nn.ModuleList(nn.EmbeddingBag.from_pretrained(rows, mode="sum") for rows in tables)
        assert model.bottom is not None
        self.bottom, self.top = nn.Sequential(*model.bottom), nn.Sequential(*model.top)
        self.row, self.column = torch.tril_indices(len(tables) + 1, len(tables) + 1, -1)
        self.missing = model.top[0].in_features - CONFIG.dim - len(self.row)  # type: ignore[operator]

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        first = self.bottom(dense)
        offsets = torch.arange(len(dense))
        vectors = [table(ids[place], offsets) for place, table in enumerate(self.tables)]
        stacked = torch.cat([first, *vectors], dim=1).view(len(dense), -1, CONFIG.dim)
        products = torch.bmm(stacked, stacked.transpose(1, 2))
        features = torch.cat([first, products[:, self.row, self.column]], dim=1)
        return self.top(F.pad(features, (0, self.missing))).squeeze(1)


def make_bundle(folder: Path, data: Path, method: Method | None) -> Path:
    """Bundle of an untrained model: its numbers do not matter for the time."""
    model = CONFIG.build(Schema.load(data), method, generator=torch.Generator().manual_seed(0))
    origin = Origin(run=None, checkpoint=None, step=None)
    quality = Quality(table_bytes=model.bags.num_bytes(), dense_bytes=1)
    write_bundle(folder, model, CONFIG, Schema.load(data), data, origin, quality)
    return folder


def raw_rows(scorer: holdall.Scorer, batch: Batch) -> Rows:
    """The rows of a batch as dicts, as they come out of JSON."""
    names = [feature.name for feature in scorer.schema.features]
    texts = [
        [scorer.lookups[name].text(number) or "never seen" for number in batch.ids.values[place].tolist()]
        for place, name in enumerate(names)
    ]
    numbers = np.expm1(batch.dense.double().numpy()).round().tolist()
    dense = [column.name for column in scorer.schema.dense]
    return [
        {**dict(zip(dense, numbers[row], strict=True)), **dict(zip(names, values, strict=True))}
        for row, values in enumerate(zip(*texts, strict=True))
    ]


class Scored:
    """A bundle and all that scores its rows."""

    def __init__(self, bundle: Path, exports: Sequence[str]):
        self.scorer = holdall.load(bundle)
        self.scorer.warm_up()
        assert isinstance(self.scorer.model, DLRM)
        self.eager = Eager(self.scorer.model).eval()
        self.exported = {}
        for name in exports:
            out = bundle.with_name(f"{bundle.name}-{name}")
            if not out.exists():
                export(bundle, out, format=name)  # type: ignore[arg-type]
            self.exported[name] = open_export(out, num_threads=torch.get_num_threads(), run_code=True)

    def sides(self, batches: list[Batch]) -> dict[str, Side]:
        """Every way to score these batches."""
        scorer, eager = self.scorer, self.eager
        ids = [batch.ids.values.long().contiguous() for batch in batches]
        rows = [raw_rows(scorer, batch) for batch in batches]

        def run_eager(number: int) -> Tensor:
            with torch.inference_mode():
                return eager(batches[number].dense, ids[number])

        sides: dict[str, Side] = {
            "torch": run_eager,
            "scorer": lambda number: scorer.logits(batches[number]),
            "scorer, dicts": lambda number: scorer.score(rows[number]),
        }
        for name, exported in self.exported.items():
            sides[name] = partial(lambda run, number: run(batches[number]), exported.logits)
        return sides


def check_equal(sides: dict[str, Side]) -> None:
    expected = sides["scorer"](0)
    for name, side in sides.items():
        if name != "scorer, dicts":  # whose dense values went through a transform
            torch.testing.assert_close(side(0), expected, rtol=1e-4, atol=1e-5)


def measure(sides: dict[str, Side], size: int, num_batches: int) -> dict[str, dict[str, float]]:
    """Latency in microseconds and rows a second of every side, and its speed against torch, the median of all turns."""
    times: dict[str, list[list[float]]] = {name: [] for name in sides}
    numbers = {name: itertools.cycle(range(num_batches)) for name in sides}
    turn = max(1, min(TURN, CALLS[size] // 10))
    for name, side in sides.items():
        for _ in range(turn):
            side(next(numbers[name]))
    for round_ in range(CALLS[size] // turn):
        for name in list(sides) if round_ % 2 == 0 else reversed(list(sides)):
            times[name].append([])
            for _ in range(turn):
                number = next(numbers[name])
                start = time.perf_counter()
                sides[name](number)
                times[name][-1].append(time.perf_counter() - start)
    return {name: _figures(np.array(seconds), np.array(times["torch"]), size) for name, seconds in times.items()}


def _figures(seconds_TC: Times, torch_TC: Times, size: int) -> dict[str, float]:
    """Figures of the calls C of all turns T of one side."""
    return {
        "p50_us": float(np.percentile(seconds_TC, 50)) * 1e6,
        "p99_us": float(np.percentile(seconds_TC, 99)) * 1e6,
        "rows_per_s": size / float(np.median(seconds_TC.mean(axis=1))),
        "times_torch": float(np.median(np.median(torch_TC, axis=1) / np.median(seconds_TC, axis=1))),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=1.0, help="rows of the tables, of those of Criteo Kaggle")
    parser.add_argument("--rows", type=int, default=400_000, help="rows of the log, a fifth of which is scored")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--exports", nargs="*", default=["onnx"], help="to measure beside it: onnx, pt2")
    parser.add_argument(
        "--folder", type=Path, help="for bundles and exports, which stay there; a temporary one if absent"
    )
    parser.add_argument("--calls", type=float, default=1.0, help="of the usual number of calls")
    parser.add_argument("--out", default="inference_cpu", help="name of the run card; empty: none is written")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    CALLS.update({size: max(4, int(count * arguments.calls)) for size, count in CALLS.items()})
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder if arguments.folder is None else arguments.folder)
        scratch.mkdir(exist_ok=True)
        log = preset("criteo-kaggle", scale=arguments.scale, rows=arguments.rows)
        if not (scratch / "data").exists():
            write_prepared(log, scratch / "data", valid=0.0, test=0.2)
        for tables, method in METHODS.items():
            if not (scratch / tables).exists():
                make_bundle(scratch / tables, scratch / "data", method)
            scored = Scored(scratch / tables, arguments.exports)
            for size in CALLS:
                loader = Loader(DataSet(scratch / "data", "test"), size, shuffle="none", drop_last=True)
                batches = list(itertools.islice(loader.epoch(0), max(8, min(256, 16_384 // size))))
                sides = scored.sides(batches)
                check_equal(sides)
                with OtherWork() as others:
                    measured = measure(sides, size, len(batches))
                for side, found in measured.items():
                    row = {"tables": tables, "batch": size, "side": side, **found, "other_work": others.share}
                    results.append(row)
    print_table(f"scoring on {arguments.threads} threads", results)
    if not arguments.out:
        return
    write_card(
        arguments.out,
        {
            "scale": arguments.scale,
            "threads": arguments.threads,
            "target_times_torch": TARGET,
            "calls": CALLS,
            "results": results,
        },
        notes="DLRM of Criteo Kaggle's sizes times scale. torch: one nn.EmbeddingBag of float32 a table, inference "
        "mode; scorer: holdall.load(bundle).logits of batches, whose ids it checks; scorer, dicts: score of lists of "
        "dicts, encoding included; onnx: onnxruntime; pt2: AOTInductor. times_torch: median over turns of the p50 of "
        "torch over that of the side; rows_per_s: of the median turn. other_work: share of the CPU time that other "
        "processes took meanwhile. A new batch of held-out rows at every call, sides in turn.",
    )


if __name__ == "__main__":
    main()
