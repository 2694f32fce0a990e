"""DLRM-small on a GPU: training in bf16 and inference in fp16, Triton kernels against plain torch, dense tables."""

from __future__ import annotations

import argparse
from typing import Any

import torch

from benchmarks.card import print_table, write_card
from benchmarks.gpu_timing import (
    BATCH,
    CARDINALITIES,
    NUM_DENSE,
    alternate_on_device,
    captured,
    ceilings,
    dlrm_small_schema,
    profile,
    relative_error,
    skewed_ids,
)
from holdall.batch import Batch, Ids
from holdall.kernels.path import kernel_path
from holdall.models import configuration
from holdall.models.dlrm import DLRM
from holdall.training.optimizers import OptimizerConfig, Optimizers
from holdall.training.trainer import logloss

FLOPS_A_SAMPLE = 4.9e6  # forward


def some_batch(size: int, seed: int, dtype: torch.dtype = torch.float32) -> Batch:
    generator = torch.Generator("cuda").manual_seed(seed)
    dense = torch.rand(size, NUM_DENSE, device="cuda", generator=generator).to(dtype)
    label = (torch.rand(size, device="cuda", generator=generator) < 0.25).float()
    return Batch(dense, Ids(skewed_ids(size, seed), None, len(CARDINALITIES)), label)


def some_model(seed: int = 0) -> DLRM:
    generator = torch.Generator("cuda").manual_seed(seed)
    model = configuration("dlrm-small").build(dlrm_small_schema(), device="cuda", generator=generator)
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


class Training:
    """One side: a whole training step."""

    def __init__(self, size: int, path: str):
        self.path, self.model, self.input = path, some_model(), Rotating(size)
        self.optimizers = Optimizers(self.model, OptimizerConfig(name="sgd", lr=0.01))
        self.score = torch.compile(self.model.score)

    def run(self) -> torch.Tensor:
        with kernel_path(self.path):
            with torch.autocast("cuda", torch.bfloat16):
                logits = self.score(self.input.batch.dense, self.model.lookup(self.input.batch))
            loss = logloss(logits, self.input.batch.label)
            loss.backward()
            self.optimizers.step()
        return loss.detach()

    def eager(self) -> torch.Tensor:
        self.input.next()
        return self.run()

    def graph(self) -> Any:
        replay = captured(self.run)

        def call() -> torch.Tensor:
            self.input.next()
            return replay()

        return call


class Inference:
    """One side: logits of a batch in fp16."""

    def __init__(self, size: int, path: str, model: DLRM):
        self.path, self.model, self.input = path, model, Rotating(size, torch.float16)
        self.score = torch.compile(model.score)

    def run(self) -> torch.Tensor:
        with kernel_path(self.path), torch.inference_mode():
            return self.score(self.input.batch.dense, self.model.lookup(self.input.batch))

    def graph(self) -> Any:
        replay = captured(self.run)

        def call() -> torch.Tensor:
            self.input.next()
            return replay()

        return call


def measure_training(size: int, flops: float) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch._dynamo.reset()
    fused, plain = Training(size, "triton"), Training(size, "torch")
    losses = [(float(fused.eager()), float(plain.eager())) for _ in range(6)]
    assert all(abs(ours - theirs) < 2e-3 * abs(theirs) for ours, theirs in losses), losses
    kernels = profile(fused.eager)
    sides = {"triton, one graph": fused.graph(), "triton": fused.eager, "torch": plain.eager}
    times = alternate_on_device(sides)
    floor = 3 * FLOPS_A_SAMPLE * size / flops * 1e3
    row = {
        "what": "training bf16",
        "batch": size,
        **{f"{side} ms": time for side, time in times.items()},
        "M samples/s": size / times["triton, one graph"] / 1e3,
        "torch M samples/s": size / times["torch"] / 1e3,
        "floor ms (arithmetic)": floor,
        "of floor": floor / times["triton, one graph"],
        "peak GiB (both sides)": torch.cuda.max_memory_allocated() / 2**30,
        "losses": losses,
    }
    return row, kernels


def measure_inference(size: int, flops: float, model: DLRM) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    torch._dynamo.reset()
    fused, plain = Inference(size, "triton", model), Inference(size, "torch", model)
    difference = relative_error(fused.run(), plain.run())
    assert difference < 2e-2, difference
    kernels = profile(fused.run)
    sides = {"triton": fused.graph(), "torch": plain.graph()}
    times = alternate_on_device(sides, inner=10)
    floor = FLOPS_A_SAMPLE * size / flops * 1e3
    row = {
        "what": "inference fp16",
        "batch": size,
        **{f"{side}, one graph ms": time for side, time in times.items()},
        "M samples/s": size / times["triton"] / 1e3,
        "torch M samples/s": size / times["torch"] / 1e3,
        "floor ms (arithmetic)": floor,
        "of floor": floor / times["triton"],
        "relative difference": difference,
        "spread of logits": float(fused.run().float().std(correction=0)),
    }
    return row, kernels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--train-sizes", type=int, nargs="*", default=[BATCH])
    parser.add_argument("--infer-sizes", type=int, nargs="*", default=[1, 64, 1024, BATCH])
    arguments = parser.parse_args()
    found = ceilings()
    flops = found["bf16_flops_per_second"]
    rows, kernels = [], {}
    model = some_model().half()
    model.bags.packs[0].storage.normal_(0.0, 0.3)  # as large as trained rows: what the tables add must show
    for size in arguments.infer_sizes:
        row, kernels[f"inference {size}"] = measure_inference(size, flops, model)
        rows.append(row)
        print_table(f"kernels of one inference at batch {size}", kernels[f"inference {size}"])
    del model
    for size in arguments.train_sizes:
        row, kernels[f"training {size}"] = measure_training(size, flops)
        rows.append(row)
        print_table(f"kernels of one training step at batch {size}", kernels[f"training {size}"])
    print_table("DLRM-small, dense tables", [{k: v for k, v in row.items() if k != "losses"} for row in rows])
    notes = "Zipf 1.05 ids on the device; the stack to beat trains at 8.41M samples/s and plain torch infers at 32.8M"
    write_card("gpu_dlrm", {"ceilings": found, "rows": rows, "kernels": kernels}, notes)


if __name__ == "__main__":
    main()
