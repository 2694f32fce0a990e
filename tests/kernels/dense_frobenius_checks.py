"""Training steps of dense, Frobenius and hashed tables side by side, on either path."""

from __future__ import annotations

import torch
from torch import Tensor

from holdall.data.batch import Ids
from holdall.embedding.bags import EmbeddingBags
from holdall.kernels.dispatch import kernel_path
from holdall.optim.config import OptimizerConfig
from holdall.optim.optimizers import Optimizers
from holdall.tables import Frobenius, Hashed, Method

ROWS = {"a": 50, "b": 700, "c": 7, "d": 90, "e": 30, "f": 70}
METHODS: dict[str, Method] = {
    "b": Frobenius(rank=4, terms=2),
    "d": Frobenius(rank=4, terms=2),
    "e": Hashed(buckets=9),
    "f": Frobenius(rank=3, terms=1),
}


def some_ids(size: int, seed: int, device: str = "cpu") -> Ids:
    generator = torch.Generator().manual_seed(seed)
    values = torch.stack([torch.randint(rows, (size,), generator=generator) for rows in ROWS.values()], dim=1).int()
    return Ids(values.to(device).t(), None, len(ROWS))


def steps(path: str, optimizer: str, device: str = "cpu") -> list[Tensor]:
    """The vectors of the last step and every parameter after it."""
    with kernel_path(path):  # type: ignore[arg-type]
        generator = torch.Generator(device).manual_seed(0)
        bags = EmbeddingBags.build(ROWS, 8, METHODS, device=device, generator=generator)
        optimizers = Optimizers(bags, OptimizerConfig(name=optimizer, lr=0.1))  # type: ignore[arg-type]
        for step in range(3):
            vectors = bags(some_ids(21, step, device))
            vectors.square().sum().backward()
            optimizers.step()
        return [vectors.detach(), *(parameter.detach() for parameter in bags.parameters())]
