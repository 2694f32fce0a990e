"""A table of ten billion rows of dim 128 (5 TB dense) on this machine: built, trained, checkpointed and restored.

python -m benchmarks.ten_billion
"""

from __future__ import annotations

import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.card import print_table, write_card
from holdall import checkpoint
from holdall.data.batch import Ids
from holdall.embedding.bags import EmbeddingBags
from holdall.optim.config import OptimizerConfig
from holdall.optim.optimizers import Optimizers
from holdall.tables import Frobenius, Method, TensorTrain

ROWS, DIM, BATCH, STEPS = 10**10, 128, 2048, 20


def run(method: Method) -> dict[str, Any]:
    """Train to pull the rows of random ids towards planted vectors; the ids reach both ends of the table."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    bags = EmbeddingBags.build({"huge": ROWS}, DIM, method, generator=torch.Generator().manual_seed(0))
    built = time.perf_counter() - start
    optimizers = Optimizers(bags, OptimizerConfig(name="adagrad", lr=0.05))
    generator = torch.Generator().manual_seed(1)
    values = torch.randint(ROWS, (1, BATCH), generator=generator)
    values[0, 0], values[0, 1] = 0, ROWS - 1
    target = torch.randn(BATCH, 1, DIM, generator=generator) * 0.01
    losses = []
    start = time.perf_counter()
    for _ in range(STEPS):
        loss = (bags(Ids(values, None, 1)) - target).square().mean()
        loss.backward()
        optimizers.step()
        losses.append(float(loss.detach()))
    step = (time.perf_counter() - start) / STEPS
    with tempfile.TemporaryDirectory() as folder:
        tensors = {**bags.state_dict(), **{f"optimizer.{k}": v for k, v in optimizers.tensors().items()}}
        saved = checkpoint.save(Path(folder), STEPS, tensors, {})
        size = sum(file.stat().st_size for file in saved.iterdir())
        other = EmbeddingBags.build({"huge": ROWS}, DIM, method)
        checkpoint.load_into(saved, other.state_dict(), prefix="tables.")
    assert torch.equal(other.table("huge").materialize(values[0]), bags.table("huge").materialize(values[0]))
    assert losses[-1] < losses[0]
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "method": str(method),
        "dense_bytes": ROWS * DIM * 4,
        "table_bytes": bags.num_bytes(),
        "checkpoint_bytes": size,
        "memory_added_mb": (after - before) / 1000,
        "build_seconds": built,
        "step_ms": 1000 * step,
        "loss_first": losses[0],
        "loss_last": losses[-1],
    }


def main() -> None:
    rows = [run(method) for method in (TensorTrain(rank=8), Frobenius(rank=8, terms=4))]
    print_table("ten billion rows of dim 128", rows)
    write_card("ten_billion", {"runs": rows})


if __name__ == "__main__":
    main()
