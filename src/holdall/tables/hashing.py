"""Integer hash of every method that hashes ids: splitmix64, the same on every device and past 2^31.

The hash of `id` under `seed` is output number `id` of the splitmix64 generator whose state starts at `stream(seed)`
(Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014), all arithmetic modulo 2^64:

    z = stream(seed) + (id + 1) * 0x9E3779B97F4A7C15
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9
    z = (z ^ z >> 27) * 0x94D049BB133111EB
    hash = z ^ z >> 31

It is a bijection of the 64-bit integers, so distinct ids never have equal hashes; they only share buckets. Torch has
no unsigned 64-bit arithmetic: int64 products wrap to the same bits, and the shifts are made logical by a mask. Hashing
costs some 15 elementwise integer operations an id.
"""

from __future__ import annotations

import torch
from torch import Tensor

from holdall.tables.method import require

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB
_LOW_BITS = (1 << 63) - 1


def _signed(value: int) -> int:
    """The int64 with the bits of `value` modulo 2^64."""
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


_STEPS = ((30, _signed(_FIRST)), (27, _signed(_SECOND)))


def stream(seed: int) -> int:
    """Initial state (below 2^64) of the generator of `seed`; those of consecutive seeds are far apart."""
    z = (seed + 1) * _GAMMA & _MASK
    z = (z ^ z >> 30) * _FIRST & _MASK
    z = (z ^ z >> 27) * _SECOND & _MASK
    return z ^ z >> 31


def hash_ids(ids: Tensor, seed: int) -> Tensor:
    """64 random bits for every int64 id, as int64: half of them are negative."""
    z = ids * _signed(_GAMMA)
    z += _signed(stream(seed) + _GAMMA)
    for shift, factor in _STEPS:
        z ^= (z >> shift).bitwise_and_((1 << 64 - shift) - 1)
        z *= factor
    z ^= (z >> 31).bitwise_and_((1 << 33) - 1)
    return z


def buckets_of(hashes: Tensor, num_buckets: int) -> Tensor:
    """The lower 63 bits of each hash modulo `num_buckets`: never negative, uniform to within num_buckets / 2^63."""
    return hashes.bitwise_and(_LOW_BITS).remainder_(num_buckets)


def signs_of(hashes: Tensor, dtype: torch.dtype) -> Tensor:
    """+1 or -1 by the highest bit of each hash, which `buckets_of` does not use."""
    return 1 - 2 * (hashes < 0).to(dtype)


def hash_buckets(ids: Tensor, num_buckets: int, seed: int) -> Tensor:
    """Bucket in [0, num_buckets) of every id."""
    return buckets_of(hash_ids(ids, seed), num_buckets)


def check_seed(seed: int, method: str) -> None:
    """Raise a `ConfigError` for a seed outside of what JSON and int64 represent."""
    valid = isinstance(seed, int) and not isinstance(seed, bool) and 0 <= seed <= _LOW_BITS
    require(valid, method, f"seed must be a whole number from 0 to 2^63 - 1, not {seed!r}")
