"""DLRM-small on a GPU: training in bf16 and inference in fp16, all tables dense and the five largest Frobenius (8, 4).

Triton kernels against plain torch, both kinds of tables in one run, the step as one CUDA graph.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.card import print_table, write_card
from benchmarks.gpu_timing import (
    BATCH,
    CARDINALITIES,
    LARGEST,
    NUM_DENSE,
    alternate_on_device,
    captured,
    ceilings,
    dlrm_small_schema,
    profile,
    relative_error,
    skewed_ids,
    stored_as,
)
from holdall.data.batch import Batch, Ids
from holdall.kernels.dispatch import kernel_path
from holdall.models import configuration
from holdall.models.dlrm import DLRM
from holdall.models.loss import logloss
from holdall.optim.config import OptimizerConfig
from holdall.optim.optimizers import Optimizers

FLOPS_A_SAMPLE = 4.9e6  # forward
KINDS = ("dense", "frobenius")
AT_MOST = "dense, the five always row 0"


def some_batch(size: int, seed: int, dtype: torch.dtype = torch.float32) -> Batch:
    generator = torch.Generator("cuda").manual_seed(seed)
    dense = torch.rand(size, NUM_DENSE, device="cuda", generator=generator).to(dtype)
    label = (torch.rand(size, device="cuda", generator=generator) < 0.25).float()
    return Batch(dense, Ids(skewed_ids(size, seed), None, len(CARDINALITIES)), label)


def some_model(stored: str, seed: int = 0) -> DLRM:
    generator = torch.Generator("cuda").manual_seed(seed)
    schema = dlrm_small_schema()
    model = configuration("dlrm-small").build(schema, stored_as(stored), device="cuda", generator=generator)
    assert isinstance(model, DLRM)
    return model


class Rotating:
    """A batch on the device whose contents change from call to call, at the same place."""

    def __init__(self, size: int, dtype: torch.dtype = torch.float32, num_sets: int = 4):
        self.sets = [some_batch(size, seed, dtype) for seed in range(num_sets)]
        first = self.sets[0]
        values = first.ids.values.clone(memory_format=torch.preserve_format)
        self.batch = Batch(first.dense.clone(), Ids(values, None, len(CARDINALITIES)), first.label.clone())
        self.calls = 0

    def next(self) -> None:
        self.calls += 1
        chosen = self.sets[self.calls % len(self.sets)]
        self.batch.ids.values.copy_(chosen.ids.values)
        self.batch.dense.copy_(chosen.dense)
        self.batch.label.copy_(chosen.label)


class Side:
    """One side of a comparison: `run` on a batch that changes, as it is or as one graph."""

    input: Rotating

    def __init__(self, path: str, model: DLRM):
        self.path, self.model, self.score = path, model, torch.compile(model.score)

    def run(self) -> torch.Tensor:
        raise NotImplementedError

    def eager(self) -> torch.Tensor:
        self.input.next()
        return self.run()

    def graph(self) -> Callable[[], torch.Tensor]:
        replay, rotating = captured(self.run), self.input

        def call() -> torch.Tensor:
            rotating.next()
            return replay()

        return call


class Training(Side):
    """A whole training step."""

    def __init__(self, path: str, stored: str):
        super().__init__(path, some_model(stored))
        self.optimizers = Optimizers(self.model, OptimizerConfig(name="sgd", lr=0.01))

    def run(self) -> torch.Tensor:
        with kernel_path(self.path):
            with torch.autocast("cuda", torch.bfloat16):
                logits = self.score(self.input.batch.dense, self.model.lookup(self.input.batch))
            loss = logloss(logits, self.input.batch.label)
            loss.backward()
            self.optimizers.step()
        return loss.detach()


class Inference(Side):
    """Logits of a batch in fp16."""

    def run(self) -> torch.Tensor:
        with kernel_path(self.path), torch.inference_mode():
            return self.score(self.input.batch.dense, self.model.lookup(self.input.batch))


def with_first_rows(side: Inference) -> Callable[[], torch.Tensor]:
    """A graph of the same work with row 0 for every id of the five largest tables, which the cache nearest to the
    arithmetic holds: how much their rows cost, so how much another way to store them can gain."""
    changing = side.input
    side.input = Rotating(changing.batch.dense.shape[0], changing.batch.dense.dtype)
    for i, batch in enumerate(side.input.sets):
        values = batch.ids.values.clone(memory_format=torch.preserve_format)  # others share what is there
        for position in LARGEST:
            values[position].zero_()
        side.input.sets[i] = Batch(batch.dense, Ids(values, None, len(CARDINALITIES)), batch.label)
    side.input.next()
    graph = side.graph()
    side.input = changing
    return graph


def memory_of(run: Callable[[], Any]) -> float:
    """GiB that a call needs at its peak, beyond what there is before it."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def same_losses(fused: Training, stored: str) -> tuple[Training, list[tuple[float, float]]]:
    """Plain torch on the same batches from the same start, and the losses of both."""
    fused.input.calls = 0
    ours = [float(fused.eager()) for _ in range(6)]
    plain = Training("torch", stored)
    plain.input = fused.input
    plain.input.calls = 0
    theirs = [float(plain.eager()) for _ in range(6)]
    assert all(abs(a - b) < 2e-3 * abs(b) for a, b in zip(ours, theirs, strict=True)), (ours, theirs)
    return plain, list(zip(ours, theirs, strict=True))


def measure_training(
    size: int, flops: float, sides: dict[str, Training]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Rows and kernels of both kinds of tables; plain torch beside them at the main size."""
    gc.collect()
    rotating = Rotating(size)
    runs: dict[str, Callable[[], Any]] = {}
    peaks, losses, kernels = {}, {}, {}
    for stored, fused in sides.items():
        fused.input = rotating
        if size == BATCH:
            plain, losses[stored] = same_losses(fused, stored)
            runs[f"{stored}, torch"] = plain.eager
        fused.eager()
        peaks[stored] = memory_of(fused.eager)
        kernels[stored] = profile(fused.eager)
        runs[f"{stored}, graph"], runs[f"{stored}, launched"] = fused.graph(), fused.eager
    times = alternate_on_device(runs)
    floor = 3 * FLOPS_A_SAMPLE * size / flops * 1e3
    rows = [
        {
            "what": f"training bf16, {stored}",
            "batch": size,
            "graph ms": times[f"{stored}, graph"],
            "launched ms": times[f"{stored}, launched"],
            "torch ms": times.get(f"{stored}, torch"),
            "M samples/s": size / times[f"{stored}, graph"] / 1e3,
            "floor ms (arithmetic)": floor,
            "of floor": floor / times[f"{stored}, graph"],
            "peak GiB besides the model": peaks[stored],
            "losses, ours and torch's": losses.get(stored),
        }
        for stored in sides
    ]
    return rows, kernels


def measure_inference(
    size: int, flops: float, sides: dict[str, Inference]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    rotating = Rotating(size, torch.float16)
    runs: dict[str, Callable[[], Any]] = {}
    differences, spreads, kernels, peaks = {}, {}, {}, {}
    for stored, fused in sides.items():
        fused.input = rotating
        spreads[stored] = float(fused.run().float().std(correction=0))
        peaks[stored] = memory_of(fused.run)
        kernels[stored] = profile(fused.run)
        runs[stored] = fused.graph()
        if size == BATCH:
            plain = Inference("torch", fused.model)
            plain.input = rotating
            differences[stored] = relative_error(fused.run(), plain.run())
            assert differences[stored] < 2e-2, differences
            # Plain torch's lookup of several compressed tables waits for the device: no graph can hold it.
            runs[f"{stored}, torch"] = plain.graph() if stored == "dense" else plain.eager
    if size == BATCH:
        runs[AT_MOST] = with_first_rows(sides["dense"])
    times = alternate_on_device(runs, inner=10, repeats=21)
    floor = FLOPS_A_SAMPLE * size / flops * 1e3
    rows = [
        {
            "what": f"inference fp16, {stored}",
            "batch": size,
            "graph ms": times[stored],
            "torch ms": times.get(f"{stored}, torch"),
            "M samples/s": size / times[stored] / 1e3,
            "times dense": times["dense"] / times[stored],
            "if the five cost nothing": times["dense"] / times[AT_MOST] if AT_MOST in times else None,
            "floor ms (arithmetic)": floor,
            "of floor": floor / times[stored],
            "peak GiB besides the model": peaks[stored],
            "relative difference": differences.get(stored),
            "spread of logits": spreads[stored],
        }
        for stored in sides
    ]
    return rows, kernels


def models_to_infer() -> dict[str, DLRM]:
    """Both kinds in fp16, with rows as large as trained ones: what the tables add must show."""
    models = {}
    for stored in KINDS:
        model = some_model(stored)
        with torch.no_grad():
            model.bags.packs[0].storage.normal_(0.0, 0.3)
            for name in stored_as(stored):
                table = model.bags.table(name)
                table.basis.mul_(0.3 / table.materialize(torch.arange(1000, device="cuda")).std())
        models[stored] = model.half()
    return models


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--train-sizes", type=int, nargs="*", default=[BATCH, 4096, 262_144])
    parser.add_argument("--infer-sizes", type=int, nargs="*", default=[BATCH, 64, 1024, 1, 262_144])
    arguments = parser.parse_args()
    found = ceilings()
    flops = found["bf16_flops_per_second"]
    rows: list[dict[str, Any]] = []
    kernels: dict[str, Any] = {}
    try:
        infer = {stored: Inference("triton", model) for stored, model in models_to_infer().items()}
        train = {stored: Training("triton", stored) for stored in KINDS}
        # The main size of both first: the others compile the dense part once more, for any size.
        plan = [
            *(("inference", size) for size in arguments.infer_sizes if size == BATCH),
            *(("training", size) for size in arguments.train_sizes if size == BATCH),
            *(("training", size) for size in arguments.train_sizes if size != BATCH),
            *(("inference", size) for size in arguments.infer_sizes if size != BATCH),
        ]
        before = ""
        for what, size in plan:
            if what != before:
                torch._dynamo.reset()  # it compiles a function so many times and no more
            before = what
            more, times = (
                measure_inference(size, flops, infer) if what == "inference" else measure_training(size, flops, train)
            )
            rows += more
            kernels.update({f"{what} {stored} {size}": times[stored] for stored in KINDS})
            print([{k: v for k, v in row.items() if "losses" not in k} for row in more], flush=True)
    finally:  # a size that fails must not take the others along
        report(found, rows, kernels)


def report(found: dict[str, float], rows: list[dict[str, Any]], kernels: dict[str, Any]) -> None:
    """Print and write what was measured."""
    for what in ("inference dense", "inference frobenius", "training dense", "training frobenius"):
        if f"{what} {BATCH}" in kernels:
            print_table(f"kernels of {what} at batch {BATCH}", kernels[f"{what} {BATCH}"])
    print_table("DLRM-small", [{k: v for k, v in row.items() if "losses" not in k} for row in rows])
    notes = (
        "Zipf 1.05 ids on the device; SGD; not part of this run, from earlier ones on such a GPU: fbgemm tables with a "
        "compiled dense part train at 8.41M samples/s, plain compiled torch infers at 32.8M dense and 36.6M Frobenius; "
        "plain torch runs as a graph with dense tables, launched with Frobenius; sizes other than 65,536 run the dense "
        "part compiled for any size"
    )
    write_card("gpu_dlrm", {"ceilings": found, "rows": rows, "kernels": kernels}, notes)


if __name__ == "__main__":
    main()
