"""Stochastic rounding of float32 numbers to bfloat16 or float16: up or down at random, so that the mean is the number.

Rounded to nearest, an update smaller than half a unit in the last place is always lost; rounded this way it counts in
the mean. A draw depends on (seed, step, position in the storage) alone: the same run gives the same bits, on every path
and in any order. The Triton kernels of `row_update_triton` compute the same function.
"""

from __future__ import annotations

import torch
from torch import Tensor

MIX = (0x7FEB352D, 0x846CA68B)
GOLDEN = 0x9E3779B9
_WORD = 0xFFFFFFFF

Key = tuple[int, int] | tuple[Tensor, Tensor]
"""Two 32-bit keys of the noise, of all numbers or, as int64 tensors, of each."""

FORMATS = {torch.bfloat16: (7, 8), torch.float16: (10, 113)}
"""Bits of the fraction, and the least exponent (as float32 stores it) at which the unit in the last place shrinks."""


def keys(seed: int, step: int) -> tuple[int, int]:
    """Two 32-bit keys of the noise of one step of a run."""
    high = _mixed((seed ^ (seed >> 32)) & _WORD)
    low = _mixed((high + GOLDEN * (step & _WORD) + (step >> 32)) & _WORD)
    return low, _mixed((low ^ high) + GOLDEN & _WORD)


def _mixed(x: int) -> int:
    """A permutation of the numbers of 32 bits in which every bit of the input changes half of the output's."""
    x = (x ^ (x >> 16)) * MIX[0] & _WORD
    x = (x ^ (x >> 15)) * MIX[1] & _WORD
    return x ^ (x >> 16)


def _mix(x: Tensor) -> Tensor:
    """`_mixed` of int64 numbers; products wrap, and only their low half is kept."""
    x = (x ^ (x >> 16)) * MIX[0] & _WORD
    x = (x ^ (x >> 15)) * MIX[1] & _WORD
    return x ^ (x >> 16)


def noise(cells: Tensor, key: Key) -> Tensor:
    """32-bit noise, as int64, for int64 positions in the storage."""
    return _mix(_mix((cells & _WORD) ^ key[0]) + (cells >> 32) * GOLDEN + key[1] & _WORD)


def uniform_noise(ids: Tensor, dim: int, key: Key) -> Tensor:
    """Numbers [U, dim] in float32, uniform from 0 to 1, by the noise of the cells of rows `ids` [U] of width `dim`."""
    cells = ids.long()[:, None] * dim + torch.arange(dim, device=ids.device)
    return noise(cells, key).to(torch.float32).mul_(2.0**-32)


def round_stochastically(values: Tensor, dtype: torch.dtype, cells: Tensor, key: tuple[int, int]) -> Tensor:
    """float32 `values` in `dtype`, each rounded by the noise of its cell."""
    fraction, least = FORMATS[dtype]
    exponent = (values.view(torch.int32) >> 23 & 0xFF).clamp(min=least) - fraction
    unit = (exponent << 23).view(torch.float32)
    per_unit = (254 - exponent << 23).view(torch.float32)
    dropped = 23 - fraction
    draw = (noise(cells, key) & (1 << dropped) - 1).to(torch.float32) * 2.0**-dropped
    return (values * per_unit + draw).floor_().mul_(unit).to(dtype)
