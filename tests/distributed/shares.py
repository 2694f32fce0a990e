"""Batches split over processes, a loss on looked-up vectors, and the result of one process on the whole batches."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from holdall.data.batch import Ids
from holdall.embedding.bags import EmbeddingBags
from holdall.optim.config import OptimizerConfig
from holdall.optim.optimizers import Optimizers

ROWS = {"a": 40, "b": 3, "c": 90}
FEATURES = {"f": "a", "g": "b", "h": "c", "i": "a"}
"""Two features share a table."""
DIM = 6
LR = 0.1


def build(mode: str, device: str = "cpu") -> EmbeddingBags:
    """The same tables in every process; on `meta`, with the same initial rows as elsewhere."""
    generator = torch.Generator().manual_seed(3)
    options = {"features": FEATURES, "mode": mode, "dtype": torch.float64, "generator": generator}
    return EmbeddingBags.build(ROWS, DIM, dense_device=device, **options)  # type: ignore[arg-type]


def draw(kind: str, sizes: Sequence[int], step: int, low: float = 0.0, high: float = 1.0) -> list[Ids]:
    """Shares of one batch, `sizes[rank]` samples each; ids are between these fractions of every table's rows."""
    generator = torch.Generator().manual_seed(100 + step)
    return [_share(kind, size, generator, low, high) for size in sizes]


def _share(kind: str, size: int, generator: torch.Generator, low: float, high: float) -> Ids:
    def ids(rows: int, count: int) -> Tensor:
        skewed = torch.rand(count, generator=generator) ** 3 * (high - low) + low
        return (skewed * rows).long().clamp(max=rows - 1).int()

    rows = [ROWS[name] for name in FEATURES.values()]
    if kind == "one-hot":
        return Ids(torch.stack([ids(n, size) for n in rows]), None, len(rows))
    lengths = torch.randint(0, 4, (len(rows), size), generator=generator)
    values = torch.cat([ids(n, int(count)) for n, count in zip(rows, lengths.sum(1), strict=True)])
    weights = torch.rand(values.numel(), generator=generator).double() if kind == "weighted" else None
    return Ids(values, F.pad(lengths.reshape(-1).cumsum(0), (1, 0)), len(rows), weights)


def concatenate(shares: Sequence[Ids]) -> Ids:
    """All shares as one batch, in the order of processes."""
    if shares[0].offsets is None:
        return Ids(torch.cat([share.values for share in shares], dim=1), None, len(FEATURES))
    bags = [[share.bag(position) for share in shares] for position in range(len(FEATURES))]
    values = torch.cat([values for feature in bags for values, _, _ in feature])
    lengths = torch.cat([bounds.diff() for feature in bags for _, bounds, _ in feature if bounds is not None])
    weights = [weights for feature in bags for _, _, weights in feature if weights is not None]
    return Ids(values, F.pad(lengths.cumsum(0), (1, 0)), len(FEATURES), torch.cat(weights) if weights else None)


def loss(vectors: Tensor) -> Tensor:
    """A mean over samples whose gradient differs by sample, feature and number."""
    factors = torch.linspace(-1, 2, vectors[0].numel(), dtype=vectors.dtype).view(vectors.shape[1:])
    return (vectors * factors).sum((1, 2)).add(0.3).square().mean()


def one_process(mode: str, optimizer: str, batches: Sequence[Ids]) -> dict[str, dict[str, Tensor]]:
    """Weights and optimizer state of every table after training on whole batches; empty ones are left out."""
    bags = build(mode)
    optimizers = Optimizers(bags, OptimizerConfig(name=optimizer, lr=LR))  # type: ignore[arg-type]
    for ids in batches:
        if ids.batch_size == 0:
            continue
        loss(bags(ids)).backward()
        optimizers.step()
    (pack,) = bags.packs
    return {name: {"weight": table.weight.detach(), **pack.slot_views(name)} for name, table in pack.tables.items()}


def difference(found: dict[str, dict[str, Tensor]], wanted: dict[str, dict[str, Tensor]]) -> float:
    """Largest difference between two states of the same tables."""
    assert found.keys() == wanted.keys()
    largest = 0.0
    for name, kinds in wanted.items():
        assert found[name].keys() == kinds.keys()
        for kind, tensor in kinds.items():
            assert found[name][kind].shape == tensor.shape
            largest = max(largest, float((found[name][kind] - tensor).abs().max()))
    return largest
