"""`holdall train` on a GPU from end to end: DLRM-small on a prepared synthetic data set, with and without a CUDA graph.

What is timed is the trainer's own loop: batches from the data folder, checks of ids, copies to the device, steps, logs.
Not in it: the first epoch (compilation, capture), evaluation, and the checkpoint at the end, whose 17 GB would be most
of so short a run.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.card import print_table, write_card
from benchmarks.gpu_timing import BATCH, stored_as
from holdall.data.batch import Batch
from holdall.data.synthetic import preset, write_prepared
from holdall.tables import Method
from holdall.training.config import TrainConfig
from holdall.training.trainer import Trainer

EPOCH = 32
"""Batches of an epoch, all full: kernels are compiled again for one that is not."""
WARM_UP = EPOCH


class Config(TrainConfig):
    """Settings whose largest five tables are Frobenius, the others dense."""

    def table_methods(self, schema: Any) -> dict[str, Method]:
        return stored_as("frobenius")


class TimedTrainer(Trainer):
    """Notes when each step is over on the host, and when the device is done with the last."""

    def train_step(self, batch: Batch, moved: Batch | None = None) -> float | None:
        self.step_ends = getattr(self, "step_ends", [])
        if len(self.step_ends) == WARM_UP:
            torch.cuda.synchronize()
        self.step_ends.append(time.perf_counter())
        return super().train_step(batch, moved)

    def save(self, folder: str = "", keep: int | None = None) -> Path:
        torch.cuda.synchronize()
        self.ended = time.perf_counter()
        return self.out

    @property
    def samples_per_second(self) -> float:
        return (len(self.step_ends) - WARM_UP) * self.config.batch_size / (self.ended - self.step_ends[WARM_UP])


def measure(data: Path, config: TrainConfig, repeats: int) -> list[dict[str, Any]]:
    """Samples a second with and without a graph, in turn."""
    speeds: dict[str, list[float]] = {"on": [], "off": []}
    peak = {}
    for repeat in range(repeats):
        for graph in ("on", "off") if repeat % 2 == 0 else ("off", "on"):
            torch._dynamo.reset()
            gc.collect()  # the run before, whose peak is not this one's
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            with tempfile.TemporaryDirectory() as out:
                trainer = TimedTrainer(data, Path(out) / "run", config.replace(cuda_graph=graph), quiet=True)
                trainer.validation.split = None  # no evaluation at the end
                trainer.run()
                speeds[graph].append(trainer.samples_per_second)
            peak[graph] = torch.cuda.max_memory_allocated() / 2**30
            del trainer
    return [
        {
            "tables": "frobenius" if isinstance(config, Config) else "dense",
            "cuda graph": graph,
            "batch": config.batch_size,
            "M samples/s": statistics.median(speeds[graph]) / 1e6,
            "least": min(speeds[graph]) / 1e6,
            "most": max(speeds[graph]) / 1e6,
            "peak GiB": peak[graph],
        }
        for graph in speeds
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=EPOCH * BATCH * 5 // 4, help="of which 4 of 5 are trained on")
    parser.add_argument("--steps", type=int, default=3 * EPOCH)
    parser.add_argument("--repeats", type=int, default=1)
    arguments = parser.parse_args()
    settings = {
        "model": "dlrm-small", "batch_size": BATCH, "steps": arguments.steps, "optimizer": "sgd", "precision": "bf16",
        "compile": True, "device": "cuda", "evaluate_every": 10**9, "log_every": 20,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "clicks"
        started = time.perf_counter()
        write_prepared(preset("criteo-1tb", scale=1.0, rows=arguments.rows), data)
        print(f"made {arguments.rows:,} rows in {time.perf_counter() - started:.0f} s")
        rows = [row for kind in (TrainConfig, Config) for row in measure(data, kind.of(**settings), arguments.repeats)]
    print_table("holdall train, DLRM-small, bf16, SGD", rows)
    notes = (
        f"{arguments.steps} steps on {arguments.rows:,} synthetic rows, read from disk (page cache) again and again; "
        f"the first {WARM_UP} steps, evaluation and the last checkpoint are not in it; the step alone is in gpu_dlrm"
    )
    write_card("gpu_trainer", {"rows": rows}, notes)


if __name__ == "__main__":
    main()
