"""The 26 tables of DLRM-small on a GPU: look up, sum the gradients by row and update, Triton against plain torch.

All dense, with every optimizer; and the five largest as Frobenius (8, 4), the others dense, against all dense.
The floor counts bytes: the output and its gradient once, each distinct dense row read twice (lookup, update) and
written once.
"""

from __future__ import annotations

import argparse
import gc
from typing import Any

import torch

from benchmarks.card import print_table, write_card
from benchmarks.gpu_timing import (
    BATCH,
    CARDINALITIES,
    DIM,
    alternate_on_device,
    captured,
    ceilings,
    profile,
    relative_error,
    skewed_ids,
    stored_as,
)
from holdall.data.batch import Ids
from holdall.embedding.bags import EmbeddingBags
from holdall.kernels.dispatch import kernel_path
from holdall.kernels.side_stream import one_after_the_other
from holdall.optim.config import OptimizerConfig
from holdall.optim.optimizer_kinds import NAMES, OPTIMIZER_KINDS
from holdall.optim.optimizers import Optimizers


class Step:
    """Forward, backward and update of all tables on ids that change from call to call."""

    def __init__(self, optimizer: str, size: int, path: str, num_sets: int = 4, stored: str = "dense"):
        generator = torch.Generator("cuda").manual_seed(0)
        tables = {f"C{i + 1}": rows for i, rows in enumerate(CARDINALITIES)}
        self.path = path
        self.bags = EmbeddingBags.build(tables, DIM, stored_as(stored), device="cuda", generator=generator)
        self.optimizers = Optimizers(self.bags, OptimizerConfig(name=optimizer, lr=0.01))
        self.sets = [skewed_ids(size, seed) for seed in range(num_sets)]
        self.ids = self.sets[0].clone(memory_format=torch.preserve_format)
        self.grad = torch.randn(size, len(CARDINALITIES), DIM, device="cuda", generator=generator)
        self.calls = 0

    def next_ids(self) -> None:
        self.calls += 1
        self.ids.copy_(self.sets[self.calls % len(self.sets)])

    def forward(self) -> torch.Tensor:
        with kernel_path(self.path):
            return self.bags(Ids(self.ids, None, len(CARDINALITIES)))

    def run(self) -> None:
        with kernel_path(self.path):
            self.forward().backward(self.grad)
            self.optimizers.step()

    def eager(self) -> None:
        self.next_ids()
        self.run()

    def graph(self) -> Any:
        replay = captured(self.run)

        def call() -> None:
            self.next_ids()
            replay()

        return call


def same_result(optimizer: str, size: int) -> float:
    """Relative difference of what three steps changed, on both paths."""
    steps = {path: Step(optimizer, size, path) for path in ("triton", "torch")}
    starts = torch.tensor([*steps["torch"].bags.packs[0].starts.values()], device="cuda")
    rows = torch.cat([(ids.t() + starts).reshape(-1) for ids in steps["torch"].sets]).unique()
    changes = []
    for step in steps.values():
        before = step.bags.packs[0].storage[rows]
        for _ in range(3):
            step.eager()
        changes.append(step.bags.packs[0].storage[rows] - before)
    return relative_error(*changes)


def measure(size: int, optimizer: str, bandwidth: float) -> dict[str, Any]:
    """One row: milliseconds of each side, the floor, and how far off it."""
    gc.collect()
    fused, plain = Step(optimizer, size, "triton"), Step(optimizer, size, "torch")
    starts = torch.tensor([*fused.bags.packs[0].starts.values()], device="cuda")
    distinct = int((fused.ids.t() + starts).unique().numel())
    width = 1 + OPTIMIZER_KINDS[optimizer].row_state_bytes(DIM) / (4 * DIM)  # a row with its state, in rows
    num_bytes = 4 * DIM * (2 * size * len(CARDINALITIES) + distinct * (1 + 2 * width))
    floor = num_bytes / bandwidth * 1e3
    sides = {"triton": fused.eager, "triton, one graph": fused.graph(), "torch": plain.eager}
    times = alternate_on_device(sides)
    with torch.no_grad():
        forward = alternate_on_device({"triton": fused.forward, "torch": plain.forward})
    return {
        "optimizer": optimizer,
        "batch": size,
        "distinct rows": distinct,
        **{f"{side} ms": time for side, time in times.items()},
        **{f"forward {side} ms": time for side, time in forward.items()},
        "floor ms": floor,
        "of floor": floor / times["triton, one graph"],
    }


def factors_after(size: int, path: str) -> torch.Tensor:
    """How far three steps moved every factor of the Frobenius tables."""
    step = Step("sgd", size, path, stored="frobenius")
    packed = {id(table.weight) for pack in step.bags.packs for table in pack.tables.values()}
    factors = [parameter for parameter in step.bags.parameters() if id(parameter) not in packed]
    before = [factor.detach().clone() for factor in factors]
    for _ in range(3):
        step.eager()
    return torch.cat([(f.detach() - b).flatten() for f, b in zip(factors, before, strict=True)])


def measure_frobenius(size: int, bandwidth: float) -> dict[str, Any]:
    """All embedding work of an SGD step, as one graph: five tables Frobenius against all dense, in turn."""
    gc.collect()
    torch.cuda.empty_cache()
    peaks, sides, forwards, steps = {}, {}, {}, {}
    for stored in ("dense", "frobenius"):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        steps[stored] = Step("sgd", size, "triton", stored=stored)
        sides[stored] = steps[stored].graph()
        peaks[stored] = (torch.cuda.max_memory_allocated() - before) / 2**30
    with one_after_the_other():
        sides["frobenius, one stream"] = steps["frobenius"].graph()
    plain = Step("sgd", size, "torch", stored="frobenius")
    times = alternate_on_device({**sides, "frobenius, torch": plain.eager})
    with torch.no_grad():
        forwards = alternate_on_device({stored: steps[stored].forward for stored in steps})
    pack = steps["frobenius"].bags.packs[0]
    positions = [i for i, name in enumerate(steps["dense"].bags.features) if name in pack.tables]
    starts = torch.tensor(list(pack.starts.values()), device="cuda")
    distinct = int((steps["frobenius"].ids[positions].t() + starts).unique().numel())
    floor = 4 * DIM * (2 * size * len(CARDINALITIES) + 3 * distinct) / bandwidth * 1e3
    return {
        "batch": size,
        **{f"{side} ms": time for side, time in times.items()},
        **{f"forward {side} ms": time for side, time in forwards.items()},
        "frobenius of dense": times["frobenius"] / times["dense"],
        "floor ms": floor,
        "of floor": floor / times["frobenius"],
        **{f"peak {stored} GiB": peak for stored, peak in peaks.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="*", default=[4096, 16_384, BATCH, 262_144])
    arguments = parser.parse_args()
    found = ceilings()
    errors = {optimizer: same_result(optimizer, 16_384) for optimizer in NAMES}
    errors["sgd, frobenius"] = relative_error(factors_after(16_384, "triton"), factors_after(16_384, "torch"))
    assert all(error < 1e-4 for error in errors.values()), errors
    bandwidth = found["bytes_per_second"]
    rows = [measure(BATCH, optimizer, bandwidth) for optimizer in NAMES]
    rows += [measure(size, "sgd", bandwidth) for size in arguments.sizes if size != BATCH]
    compressed = [measure_frobenius(size, bandwidth) for size in arguments.sizes]
    kernels = {stored: profile(Step("sgd", BATCH, "triton", stored=stored).eager) for stored in ("dense", "frobenius")}
    print_table("26 dense float32 tables of DLRM-small, dim 128: forward + backward + update", rows)
    print_table("five largest Frobenius (8, 4), the others dense, SGD: forward + backward + update", compressed)
    for stored, times in kernels.items():
        print_table(f"kernels of one SGD step at batch 65,536, {stored}", times)
    notes = (
        "Zipf 1.05 ids; medians; 'of floor' is the floor over the graph's time; fbgemm 1.6 took 1.61 ms (SGD) in an "
        "earlier run on such a GPU and is not part of this one; peaks count the graph's own memory; with Frobenius "
        "tables the row numbers of the dense ones are sorted beside the forward, all dense they are sorted with the "
        "update (doing the same there gained 6 us in a trial); 'one stream' runs everything in turn"
    )
    results = {
        "ceilings": found, "relative_difference": errors, "rows": rows, "frobenius": compressed, "kernels": kernels
    }  # fmt: skip
    write_card("gpu_tables", results, notes)


if __name__ == "__main__":
    main()
