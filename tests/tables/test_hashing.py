"""Shared integer hash: equal to arithmetic on Python's integers, uniform, and independent of the device's width."""

from __future__ import annotations

import pytest
import torch

from holdall.common.errors import ConfigError
from holdall.tables import Hashed
from holdall.tables.hashing import buckets_of, hash_buckets, hash_ids, signs_of, stream

IDS = [0, 1, 2, 63, 2**24 - 1, 2**24 + 1, 2**31 - 1, 2**31 + 1, 2**32 + 5, 10**10 - 1, 2**53 + 1, 2**63 - 1]


def splitmix64(state: int, index: int) -> int:
    """Output number `index` of the published generator, by stepping its state on Python's integers."""
    z = (state + (index + 1) * 0x9E3779B97F4A7C15) % 2**64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
    return z ^ (z >> 31)


def test_the_reference_gives_the_published_numbers() -> None:
    assert [splitmix64(1234567, index) for index in range(3)] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]


@pytest.mark.parametrize("seed", [0, 1, 12345, 2**63 - 1])
def test_hashes_are_those_of_python_integers(seed: int) -> None:
    assert stream(seed) == splitmix64(0, seed)
    expected = [splitmix64(stream(seed), index) for index in IDS]
    found = hash_ids(torch.tensor(IDS), seed)
    assert found.dtype == torch.int64
    assert [value % 2**64 for value in found.tolist()] == expected


@pytest.mark.parametrize("num_buckets", [1, 2, 3, 1000, 2**20, 7_912_889, 2**31 + 11, 10**10])
def test_buckets_are_exact_and_never_negative(num_buckets: int) -> None:
    found = hash_buckets(torch.tensor(IDS), num_buckets, 7)
    assert found.tolist() == [splitmix64(stream(7), index) % 2**63 % num_buckets for index in IDS]


def test_ids_are_left_as_they_were() -> None:
    ids = torch.tensor(IDS)
    hashes = hash_ids(ids, 0)
    kept = hashes.clone()
    buckets_of(hashes, 10)
    assert ids.tolist() == IDS
    assert torch.equal(hashes, kept)


def chi_square(counts: torch.Tensor) -> float:
    """Standardised chi-square statistic of counts against equal ones: about normal(0, 1) for random ones."""
    expected = counts.sum() / counts.numel()
    freedom = counts.numel() - 1
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / (2 * freedom) ** 0.5)


@pytest.mark.parametrize("num_buckets", [16, 997, 4096])
@pytest.mark.parametrize("step", [1, 1000, 2**20, 2**32])
def test_regular_ids_spread_evenly(num_buckets: int, step: int) -> None:
    ids = torch.arange(200_000) * step
    hashes = hash_ids(ids, 3)
    assert abs(chi_square(torch.bincount(buckets_of(hashes, num_buckets), minlength=num_buckets).double())) < 4.5
    signs = signs_of(hashes, torch.float64)
    assert set(signs.tolist()) == {1.0, -1.0}
    assert abs(float(signs.sum())) < 4.5 * ids.numel() ** 0.5
    both = buckets_of(hashes, 4) * 2 + (signs > 0)  # the sign is independent of the bucket
    assert abs(chi_square(torch.bincount(both, minlength=8).double())) < 4.5


def test_seeds_part_what_met() -> None:
    ids, num_buckets = torch.arange(100_000), 1000
    first, second = hash_buckets(ids, num_buckets, 0), hash_buckets(ids, num_buckets, 1)
    pairs = torch.bincount(first % 32 * 32 + second % 32, minlength=1024).double()
    assert abs(chi_square(pairs)) < 4.5


@pytest.mark.parametrize("seed", [-1, 2**63, 1.5, True, "0"])
def test_bad_seeds_are_refused(seed: object) -> None:
    with pytest.raises(ConfigError, match="hashed: seed must be a whole number"):
        Hashed(buckets=4, seed=seed)
