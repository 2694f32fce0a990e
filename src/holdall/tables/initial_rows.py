"""Initial rows that need no storage: a function of (seed, row), the same in any process, order and tier.

Row i of a table is made of the hashes of i under the table's seed: each gives four numbers of 16 bits, and each of
those picks one of 65,536 quantiles of the normal distribution. Only integers and a table are involved, so a row has the
same bits however it is computed; its numbers are Gaussian up to 4.2 standard deviations. A row of `dim` numbers costs
dim / 4 hashes and dim reads of a table of 256 KB.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from holdall.tables.hashing import hash_ids

LEVELS = 1 << 16
BLOCK_NUMBERS = 1 << 18
"""Numbers of a block when a table is filled: their hashes stay in the cache."""


def draw_seed(generator: torch.Generator | None = None) -> int:
    """A seed for a table's rows, from `generator` (torch's own when None)."""
    device = "cpu" if generator is None else generator.device
    return int(torch.randint(1 << 62, (), generator=generator, device=device))


@cache
def quantiles(device: torch.device) -> Tensor:
    """[65,536] float32: the midpoints of as many equally likely intervals of the standard normal distribution."""
    middles = (torch.arange(LEVELS, dtype=torch.float64) + 0.5) / LEVELS
    values = torch.erfinv(2 * middles - 1) * 2**0.5
    return (values / values.square().mean().sqrt()).float().to(device)  # the truncated tails had some variance


def initial_rows(rows: Tensor, dim: int, seed: int | Tensor, std: float | Tensor) -> Tensor:
    """[U, dim] float32: the initial values of rows [U] int64; `seed` and `std` are those of a table, or one per row."""
    num_hashes = -(-dim // 4)
    keys = hash_ids(rows, 0) ^ seed
    hashes = hash_ids(keys[:, None] + torch.arange(num_hashes, device=rows.device), 1)
    parts = hashes.view(torch.int16).to(torch.int32).add_(LEVELS // 2)  # four a hash, the lowest bits first
    values = quantiles(rows.device).index_select(0, parts.view(-1)).view(-1, 4 * num_hashes)[:, :dim]
    return values.mul_(std if isinstance(std, float) else std[:, None])


@torch.no_grad()
def fill_with_initial_rows(weight: Tensor, seed: int, std: float) -> None:
    """Set every row of a table to its initial values, a block at a time."""
    num_rows, dim = weight.shape
    block = max(1, BLOCK_NUMBERS // dim) * (64 if weight.is_cuda else 1)  # small blocks are of no use on a GPU
    for start in range(0, num_rows, block):
        rows = torch.arange(start, min(start + block, num_rows), device=weight.device)
        weight[start : start + rows.numel()].copy_(initial_rows(rows, dim, seed, std))
