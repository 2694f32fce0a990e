"""Worker functions of the tests of `local`, with a small model in float64 and no trainer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from holdall.data.batch import Batch
from holdall.distributed.processes import Processes, process_group
from holdall.models.model import Model
from holdall.optim.config import OptimizerConfig
from holdall.optim.optimizers import Optimizers
from holdall.training.config import TrainConfig
from holdall.training.strategies.data_parallel import DataParallelStrategy
from holdall.training.strategies.local import LocalStrategy
from holdall.training.strategies.process_strategy import ProcessStrategy
from tests.distributed.gradient_workers import global_batches, part_of
from tests.tiers import small

CPU = torch.device("cpu")
SPLIT = SimpleNamespace(positives=1, rows=2, weights=None)
ROWS: Any = SimpleNamespace(folder=Path("none"), split="train", schema=SimpleNamespace(splits={"train": SPLIT}))
"""Data set of which a strategy needs the rate of positives alone."""


def _build(*_: Any) -> Model:
    return small.build().double()


class BareLocal(LocalStrategy):
    _build_model = _build

    def _build_loader(self) -> None:
        return None


class BareDataParallel(DataParallelStrategy):
    _build_model = _build

    def _build_loader(self) -> None:
        return None


def start(
    kind: type[ProcessStrategy], processes: Processes, optimizer: str, merge_every: int | None = None
) -> tuple[Any, Optimizers]:
    config = TrainConfig.of(strategy="local", merge_every=merge_every)
    strategy = kind(config, ROWS, CPU, Path(), None, processes)
    optimizers = Optimizers(strategy.model, OptimizerConfig(name=optimizer, lr=0.1))  # type: ignore[arg-type]
    strategy.attach(optimizers)
    return strategy, optimizers


def apart(batch: Batch, num: int) -> Batch:
    """The batch with ids such that the shares of different ranks have none in common."""
    size = len(batch)
    rank_of = torch.tensor([next(r for r in range(num) if s < size * (r + 1) // num) for s in range(size)])
    rows = torch.tensor(list(small.ROWS.values()))[:, None]
    values = (batch.ids.values.long() // num * num + rank_of) % (rows // num * num)
    return replace(batch, ids=replace(batch.ids, values=values.int()))


def steps(strategy: Any, optimizers: Optimizers, batches: list[Batch]) -> None:
    processes = strategy.processes
    for step, batch in enumerate(batches):
        size, rank, num = len(batch), processes.rank, processes.world_size
        share = part_of(batch, size * rank // num, size * (rank + 1) // num)
        loss = torch.zeros((), dtype=torch.float64)
        if len(share):
            loss = F.binary_cross_entropy_with_logits(strategy.model(share), share.label) * (len(share) / size)
        strategy.exchange.begin(step, len(share), loss.detach(), False)
        if len(share):
            loss.backward()
        strategy.exchange.finish()
        optimizers.step()
        strategy.after_step(step + 1)


def merged_every_step() -> dict[str, Any]:
    """State after local with a merge in every step, and after data-parallel, on rows that no two ranks share."""
    with process_group(CPU, timeout=20) as processes:
        batches = [apart(batch, processes.world_size) for batch in global_batches(False)]
        found = {}
        for name, kind in {"local": BareLocal, "data-parallel": BareDataParallel}.items():
            strategy, optimizers = start(kind, processes, "sgd", 1)
            steps(strategy, optimizers, batches)
            found[name] = small.state(strategy.model, optimizers)
        return found


def never_merged() -> dict[str, Any]:
    """Tables of each rank, those that an evaluation sees, and those after a merge."""
    with process_group(CPU, timeout=20) as processes:
        strategy, optimizers = start(BareLocal, processes, "adagrad")
        steps(strategy, optimizers, global_batches(False))
        own = small.state(strategy.model, optimizers)
        with strategy.evaluation():
            seen = small.state(strategy.model, optimizers)
        after = small.state(strategy.model, optimizers)
        difference = strategy.merge()
        merged = small.state(strategy.model, optimizers)
        again = strategy.merge()
        measures = strategy.measures()
        return {"own": own, "seen": seen, "after": after, "merged": merged, "norms": [difference, again], **measures}


def planted() -> dict[str, Tensor]:
    """Rows 0 to 3 of the storage: touched by both ranks, by rank 1, by rank 0, by none."""
    with process_group(CPU, timeout=20) as processes:
        strategy, _ = start(BareLocal, processes, "adagrad")
        group, touches = strategy.row_groups[0], strategy.touches[0]
        me = processes.rank
        group.weight.fill_(0.0)
        group.weight[:4] = torch.tensor([[1.0, 0.0, 0.1, 9.0], [5.0, 0.3, 0.0, 9.0]], dtype=torch.float64)[me][:, None]
        group.slots["sum"][:4] = 10 * group.weight[:4]
        touches[:3] = torch.tensor([[3, 0, 7], [1, 3, 0]])[me].int()
        norm = strategy.merge()
        return {"weight": group.weight[:4], "sum": group.slots["sum"][:4], "norm": norm, "touches": touches.sum()}
