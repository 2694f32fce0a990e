"""Checks of the tensor-train kernels against float64, by Triton's interpreter on the CPU and its compiler on a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod

import torch
from torch import Tensor

from holdall.kernels.tensor_train import reference_rows
from tests.kernels.triton_checks import error, some_ids

Chain = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""(n1, n2, n3), (d1, d2, d3), (r0, r1, r2, r3)."""
TOLERANCE = 3e-6
"""Of float32 products and sums, against float64; tf32 alone is off by 1.5e-3."""


def random_cores(chain: Chain, generator: torch.Generator, device: str) -> list[Tensor]:
    sizes, dims, ranks = chain
    shapes = zip(sizes, ranks[:-1], dims, ranks[1:], strict=True)
    return [torch.randn(shape, generator=generator).to(device).requires_grad_() for shape in shapes]


@contextmanager
def poisoned() -> Iterator[None]:
    """Context in which fresh memory is NaN, or the largest integer, so that a read of unwritten memory shows."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def expected_rows(ids: Sequence[Tensor], trains: Sequence[Sequence[Tensor]]) -> Tensor:
    """Rows [L, dim] of every train's ids, concatenated, by the definition, a few ids at a time."""
    parts = [reference_rows(part, cores) for line, cores in zip(ids, trains, strict=True) for part in line.split(2048)]
    return torch.cat(parts)


def check_rows(
    chains: Sequence[Chain],
    num_lookups: int,
    kind: str = "random",
    *,
    device: str = "cpu",
    index: torch.dtype = torch.int64,
    tolerance: float = TOLERANCE,
    seed: int = 0,
) -> None:
    """`num_lookups` ids in each train, one call: rows and the gradients of all cores."""
    from holdall.kernels.tensor_train_triton import train_vectors

    generator = torch.Generator().manual_seed(seed)
    trains = [random_cores(chain, generator, device) for chain in chains]
    cores = [core for train in trains for core in train]
    ids = [some_ids(kind, num_lookups, prod(chain[0]), generator).to(device) for chain in chains]
    direction = torch.randn(len(chains) * num_lookups, prod(chains[0][1]), generator=generator).to(device)
    with poisoned():
        rows = train_vectors(torch.cat(ids).to(index), trains)
        grads = torch.autograd.grad(rows, cores, direction)
    exact = [[core.detach().double().requires_grad_() for core in train] for train in trains]
    expected = expected_rows(ids, exact)
    expected_grads = torch.autograd.grad(expected, [c for train in exact for c in train], direction.double())
    assert error(rows.detach(), expected.detach()) < tolerance
    for found, wanted in zip(grads, expected_grads, strict=True):
        assert error(found, wanted) < tolerance


def check_bags(
    chains: Sequence[Chain],
    size: int,
    *,
    mean: bool = False,
    weighted: bool = False,
    device: str = "cpu",
    seed: int = 0,
) -> None:
    """Bags of 0 to 5 ids, the last one of each train empty, against float64 rows that torch pools."""
    from holdall.kernels.tensor_train_triton import train_vectors

    generator = torch.Generator().manual_seed(seed)
    trains = [random_cores(chain, generator, device) for chain in chains]
    cores = [core for train in trains for core in train]
    lengths = torch.randint(6, (len(chains), size), generator=generator)
    lengths[:, -1] = 0
    offsets = torch.nn.functional.pad(lengths.flatten().cumsum(0), (1, 0)).to(device)
    ids = [
        some_ids("random", int(line.sum()), prod(chain[0]), generator).to(device)
        for chain, line in zip(chains, lengths, strict=True)
    ]
    weights = torch.rand(int(lengths.sum()), generator=generator).to(device) if weighted else None
    dim = prod(chains[0][1])
    direction = torch.randn(size, len(chains), dim, generator=generator).to(device)
    with poisoned():
        found = train_vectors(torch.cat(ids), trains, offsets, weights, mean=mean)
        grads = torch.autograd.grad(found, cores, direction)
    exact = [[core.detach().double().requires_grad_() for core in train] for train in trains]
    rows = expected_rows(ids, exact)
    scale = torch.ones_like(rows[:, 0]) if weights is None else weights.double()
    bag = torch.repeat_interleave(lengths.flatten()).to(device)
    if mean:
        scale = scale / lengths.flatten().to(device)[bag]
    pooled = rows.new_zeros(len(chains) * size, dim).index_add(0, bag, rows * scale[:, None])
    expected = pooled.view(len(chains), size, dim).transpose(0, 1)
    expected_grads = torch.autograd.grad(expected, [c for train in exact for c in train], direction.double())
    assert error(found.detach(), expected.detach()) < TOLERANCE
    for one, wanted in zip(grads, expected_grads, strict=True):
        assert error(one, wanted) < TOLERANCE
