"""A DLRM with all tables in bands at 1/100 of the dense bytes, against dense: the lookup, and the whole training step.

    python -m benchmarks.bands [--device cuda|cpu] [--card NAME]

DLRM Criteo Kaggle (dim 16, batch 2,048) on the CPU, DLRM-small (dim 128, batch 65,536) on a GPU. Ids are Zipf numbers.
Bands are cut where a row's expected count falls below a threshold: 8-bit rows, 4-bit rows at 1/16 of their count, two
codes at 1/64, one at 1/256, one shared row for the rest; the threshold is the least whose tables fit the share.
Rows are fresh, not fitted: a lookup takes as long whatever they are. Training rounds 8-bit and 4-bit rows
stochastically, and has codewords and shared rows in float32.

The floor counts bytes: every distinct stored row and codeword read once, every vector written once.
"""

from __future__ import annotations

import argparse
import gc
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.card import alternate, print_table, write_card
from benchmarks.gpu_timing import alternate_on_device, captured, profile, relative_error
from holdall.data.batch import Batch, Ids
from holdall.data.schema import DenseColumn, Feature, Schema
from holdall.data.synthetic import PRESETS
from holdall.data.zipf import Zipf
from holdall.embedding.bags import EmbeddingBags
from holdall.kernels.dispatch import kernel_path
from holdall.models import configuration
from holdall.models.loss import logloss
from holdall.optim.config import OptimizerConfig
from holdall.optim.optimizers import Optimizers
from holdall.tables import Bands, Codes, Method, Quantized, Shared
from holdall.tables.bands import BandsTable
from holdall.tables.codes import CodesTable
from holdall.tables.method import total_bytes

SKEW = 1.05
NUM_DENSE = 13
NUM_SETS = 4
"""Batches that calls take in turn."""
SHAPES = ((512, 1), (1024, 1), (1024, 2), (2048, 2), (1024, 4), (2048, 4), (4096, 4), (2048, 8), (4096, 8))
"""Numbers and warps of a program of the kernel that `--shapes` measures."""
TAIL = Shared(1, "float16")
LEVELS: tuple[tuple[float, Method], ...] = (
    (1.0, Quantized(8, scales="float16")),
    (1 / 16, Quantized(4, scales="float16")),
    (1 / 64, Codes(2, 8, "words", "float16")),
    (1 / 256, Codes(1, 8, "words", "float16")),
)
"""Count at which a level begins, as a share of the threshold of the first."""


@dataclass(frozen=True)
class Case:
    """What is measured, and where."""

    model: str
    cardinalities: Sequence[int]
    dim: int
    batch_size: int
    device: str
    repeats: int

    @property
    def rows(self) -> dict[str, int]:
        return {f"C{i + 1}": rows for i, rows in enumerate(self.cardinalities)}


def banded(case: Case, share: float) -> dict[str, Bands]:
    """Bands of every table, within a share of the dense bytes."""
    available = share * sum(case.cardinalities) * case.dim * 4
    low, high = 1e-12, 1.0  # thresholds: the probability of a lookup
    for _ in range(60):
        middle = (low * high) ** 0.5
        methods = _cut(case, middle)
        size = total_bytes([(method, case.rows[name], case.dim) for name, method in methods.items()], torch.float32)
        low, high = (low, middle) if size <= available else (middle, high)
    return _cut(case, high)


def _cut(case: Case, threshold: float) -> dict[str, Bands]:
    found: dict[str, Bands] = {}
    for name, num_rows in case.rows.items():
        ranks = np.arange(1, min(num_rows, 1 << 20) + 1, dtype=np.float64)
        total = float((ranks**-SKEW).sum())
        if num_rows > len(ranks):  # the rest of the sum, by its integral
            total += (len(ranks) ** (1 - SKEW) - num_rows ** (1 - SKEW)) / (SKEW - 1)
        bands, before = [], 0
        for factor, method in LEVELS:
            end = min(num_rows, int((1 / (threshold * factor * total)) ** (1 / SKEW)))
            if end > before:
                bands.append((end, method))
                before = end
        found[name] = Bands((*bands, (None, TAIL))) if before < num_rows else Bands(tuple(bands))
    return found


def trainable(methods: Mapping[str, Bands]) -> dict[str, Method]:
    """The same bands to be trained, with codewords and shared rows in float32."""
    found: dict[str, Method] = {}
    for name, method in methods.items():
        wide = [(end, replace(m, dtype=None) if isinstance(m, Codes | Shared) else m) for end, m in method.bands]
        found[name] = Bands(tuple(wide)).for_training()
    return found


def some_batch(case: Case, seed: int) -> Batch:
    rng = np.random.default_rng(seed)
    zipfs = [Zipf(num_rows, SKEW) for num_rows in case.cardinalities]
    ids = np.stack([zipf.ranks(rng.random(case.batch_size)) for zipf in zipfs]).astype(np.int32)
    dense = torch.from_numpy(rng.random((case.batch_size, NUM_DENSE), dtype=np.float32))
    label = torch.from_numpy((rng.random(case.batch_size) < 0.25).astype(np.float32))
    return Batch(dense, Ids(torch.from_numpy(ids), None, len(ids)), label).to(case.device)


def medians(case: Case, sides: Mapping[str, Callable[[], Any]]) -> dict[str, float]:
    """Milliseconds of a call of each side, taken in turn."""
    if case.device == "cuda":
        return alternate_on_device(sides, repeats=case.repeats)
    times = alternate(sides, repeats=case.repeats, warmup=3)
    return {side: statistics.median(taken) * 1e3 for side, taken in times.items()}


class Lookup:
    """Lookup of all features without gradients, of ids that change from call to call."""

    def __init__(self, bags: EmbeddingBags, batches: Sequence[Batch], path: str, *, graph: bool):
        self.bags, self.path, self.calls = bags, path, 0
        self.sets = [batch.ids.values for batch in batches]
        self.ids = self.sets[0].clone()
        self._run = captured(self.run) if graph else self.run

    def run(self) -> Tensor:
        with kernel_path(self.path), torch.no_grad():  # type: ignore[arg-type]
            return self.bags(Ids(self.ids, None, len(self.ids)))

    def __call__(self) -> None:
        self.calls += 1
        self.ids.copy_(self.sets[self.calls % len(self.sets)])
        self._run()


def measure_lookup(case: Case, batches: Sequence[Batch], share: float, dtype: torch.dtype) -> dict[str, Any]:
    """One row: milliseconds of each side, its floor, and the ratio to dense."""
    gc.collect()
    bags: dict[str, EmbeddingBags] = {}
    for stored, method in (("dense", None), ("bands", banded(case, share))):
        bags[stored] = EmbeddingBags.build(
            case.rows, case.dim, method, device=case.device, generator=torch.Generator(case.device).manual_seed(0)
        )
        bags[stored].vector_dtype = None if dtype == torch.float32 else dtype
    on_gpu = case.device == "cuda"
    sides = {stored: Lookup(bags[stored], batches, "auto", graph=on_gpu) for stored in bags}
    if on_gpu:
        sides["bands, torch"] = Lookup(bags["bands"], batches, "torch", graph=False)
    difference = relative_error(sides["bands"].run(), _rows(bags["bands"], sides["bands"].ids))
    assert difference < 1e-2, f"the lookup is {difference} off the rows that the tables represent"
    times = medians(case, sides)
    bandwidth = copy_bandwidth(case)
    touched = {stored: bytes_touched(each, sides["bands"].ids, dtype) for stored, each in bags.items()}
    return {
        "vectors": str(dtype).removeprefix("torch."),
        **{f"{side} ms": time for side, time in times.items()},
        "bands of dense": times["bands"] / times["dense"],
        **{f"{stored} MB touched": size / 1e6 for stored, size in touched.items()},
        **{f"{stored} floor ms": size / bandwidth * 1e3 for stored, size in touched.items()},
        **{f"{stored} MB stored": each.num_bytes() / 1e6 for stored, each in bags.items()},
        "relative difference": difference,
    }


def measure_shapes(case: Case, batches: Sequence[Batch], share: float, dtype: torch.dtype) -> list[dict[str, Any]]:
    """Milliseconds of the kernel of a lookup in bands, by the numbers and warps of a program."""
    from holdall.kernels import bands_triton

    generator = torch.Generator(case.device).manual_seed(0)
    bags = EmbeddingBags.build(case.rows, case.dim, banded(case, share), device=case.device, generator=generator)
    bags.vector_dtype = None if dtype == torch.float32 else dtype
    chosen, sides = (bands_triton.ELEMENTS, bands_triton.NUM_WARPS), {}
    for shape in SHAPES:
        bands_triton.ELEMENTS, bands_triton.NUM_WARPS = shape
        sides[str(shape)] = Lookup(bags, batches, "auto", graph=True)
    bands_triton.ELEMENTS, bands_triton.NUM_WARPS = chosen
    vectors = str(dtype).removeprefix("torch.")
    return [{"vectors": vectors, "numbers, warps": shape, "ms": time} for shape, time in medians(case, sides).items()]


def _rows(bags: EmbeddingBags, ids: Tensor) -> Tensor:
    names = list(bags.features)
    return torch.stack([bags.table(name).materialize(line.long()) for name, line in zip(names, ids, strict=True)], 1)


def bytes_touched(bags: EmbeddingBags, ids: Tensor, dtype: torch.dtype) -> int:
    """Bytes of all ids and vectors, of each distinct row as it is stored, and of all codewords."""
    total = ids.numel() * (ids.element_size() + bags.dim * dtype.itemsize)
    codebooks: set[int] = set()
    for name, line in zip(bags.features, ids, strict=True):
        table, distinct = bags.table(name), line.unique()
        if not isinstance(table, BandsTable):
            total += distinct.numel() * bags.dim * 4
            continue
        for band, part in zip(table.bands, table.parts, strict=True):
            count = int(((distinct >= band.start) & (distinct < band.end)).sum())
            if isinstance(part, CodesTable):
                total += count * part.method.row_width
                if count and id(part.codebook.words) not in codebooks:
                    codebooks.add(id(part.codebook.words))
                    total += part.codebook.words.numel() * part.codebook.words.element_size()
            else:
                stored = min(count, 1) if isinstance(band.method, Shared) else count
                total += band.method.num_bytes(1, bags.dim) * stored
    return total


def copy_bandwidth(case: Case) -> float:
    """Bytes read plus written a second by a copy of more than the caches hold."""
    source = torch.randn(1 << (28 if case.device == "cuda" else 25), device=case.device)
    target = torch.empty_like(source)
    return 2 * source.numel() * 4 / medians(case, {"copy": lambda: target.copy_(source)})["copy"] * 1e3


class Step:
    """Forward, backward and update of a whole model, in bf16 on a GPU."""

    def __init__(self, case: Case, method: Mapping[str, Method] | None, batches: Sequence[Batch]):
        schema = Schema(
            label="label",
            dense=tuple(DenseColumn(name=f"I{i + 1}") for i in range(NUM_DENSE)),
            features=tuple(Feature(name=name, num_rows=rows, unseen=rows - 1) for name, rows in case.rows.items()),
            splits={},
        )
        generator = torch.Generator(case.device).manual_seed(0)
        config = configuration(case.model)
        assert config.dim == case.dim
        self.model = config.build(schema, method, device=case.device, generator=generator)
        self.optimizers = Optimizers(self.model, OptimizerConfig(name="sgd", lr=0.01))
        self.batches, self.calls, self.device = batches, 0, case.device

    def __call__(self) -> None:
        self.calls += 1
        batch = self.batches[self.calls % len(self.batches)]
        with torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda"):
            logits = self.model(batch)
        logloss(logits, batch.label).backward()
        self.optimizers.step()


def measure_step(case: Case, batches: Sequence[Batch], share: float) -> dict[str, Any]:
    """One row: milliseconds of a training step of each side."""
    gc.collect()
    sides = {"dense": Step(case, None, batches), "bands": Step(case, trainable(banded(case, share)), batches)}
    times = medians(case, sides)
    return {**{f"{side} ms": time for side, time in times.items()}, "bands of dense": times["bands"] / times["dense"]}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--card", help="name of the run card (default: bands_DEVICE)")
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the rows of every table")
    parser.add_argument("--share", type=float, default=0.01, help="bytes of the bands, as a share of dense")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--lookup-only", action="store_true", help="leave the training step out")
    parser.add_argument("--shapes", action="store_true", help="also the kernel by the sizes of its programs (GPU)")
    given = parser.parse_args(arguments)
    on_gpu = given.device == "cuda"
    preset, model, dim, size = (
        ("criteo-1tb", "dlrm-small", 128, 65_536) if on_gpu else ("criteo-kaggle", "rmc2", 16, 2_048)
    )
    rows = [max(3, int(rows * given.scale)) for rows in PRESETS[preset].cardinalities]
    case = Case(model, rows, dim, given.batch_size or size, given.device, given.repeats)
    batches = [some_batch(case, seed) for seed in range(NUM_SETS)]
    dtypes = (torch.float32, torch.bfloat16) if on_gpu else (torch.float32,)
    lookups = [measure_lookup(case, batches, given.share, dtype) for dtype in dtypes]
    print_table(f"lookup of {len(rows)} tables, dim {dim}, batch {case.batch_size:,}", lookups)
    results: dict[str, Any] = {"lookups": lookups}
    if given.shapes and on_gpu:
        results["shapes"] = [row for dtype in dtypes for row in measure_shapes(case, batches, given.share, dtype)]
        print_table("kernel of the lookup in bands", results["shapes"])
    if not given.lookup_only:
        results["step"] = measure_step(case, batches, given.share)
        print_table(f"training step of {model}, SGD", [results["step"]])
        if on_gpu:
            results["kernels of a step"] = profile(Step(case, trainable(banded(case, given.share)), batches))
            print_table("kernels of a step with bands", results["kernels of a step"])
    results["bands of the largest table"] = str(
        max(banded(case, given.share).items(), key=lambda m: case.rows[m[0]])[1]
    )
    results["case"] = {"batch": case.batch_size, "dim": dim, "rows": sum(rows), "share": given.share, "model": model}
    notes = (
        f"Zipf {SKEW} ids; bands by fixed rule (see the module), not fitted to rows; medians, sides in turn; lookups "
        "without gradients, on a GPU as CUDA graphs (plain torch launched one by one); steps launched one by one"
    )
    write_card(given.card or f"bands_{given.device}", results, notes)


if __name__ == "__main__":
    main()
