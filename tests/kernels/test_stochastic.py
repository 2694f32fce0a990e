"""Stochastic rounding: unbiased, between neighbours, the same for the same step, and enough to keep small updates."""

from __future__ import annotations

import pytest
import torch

from holdall.kernels.row_update import UpdateScalars, sgd
from holdall.kernels.stochastic import keys, noise, round_stochastically

TYPES = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("value", [1.0 + 2.0**-10, -0.3, 3e-6, 1e-7, 123.4, -(2.0**-30)])
def test_the_mean_of_many_roundings_is_the_number(dtype: torch.dtype, value: float) -> None:
    size = 200_000
    values = torch.full((size,), value)
    rounded = round_stochastically(values, dtype, torch.arange(size), keys(0, 1)).double()
    below, above = rounded.unique()[[0, -1]]
    exact = float(values[0])
    assert float(below) <= exact <= float(above)
    assert rounded.unique().numel() <= 2
    unit = max(float(above - below), torch.finfo(dtype).tiny * torch.finfo(dtype).eps)
    assert abs(float(rounded.mean()) - exact) < 4 * 0.5 * unit / size**0.5  # four deviations of the mean


@pytest.mark.parametrize("dtype", TYPES)
def test_numbers_of_the_type_stay_as_they_are(dtype: torch.dtype) -> None:
    values = torch.cat([torch.randn(1000), torch.tensor([0.0, 1e-7, -1.0, float("inf"), float("-inf")])]).to(dtype)
    assert torch.equal(round_stochastically(values.float(), dtype, torch.arange(1005), keys(3, 4)), values)
    assert round_stochastically(torch.tensor([float("nan")]), dtype, torch.tensor([0]), keys(3, 4)).isnan().all()


def test_noise_depends_on_seed_step_and_position_alone() -> None:
    places = torch.tensor([0, 1, 2**31, 2**32, 2**33 + 1, 5])
    first = noise(places, keys(1, 2))
    assert torch.equal(noise(places.flip(0), keys(1, 2)).flip(0), first)
    assert first.unique().numel() == 6
    others = [noise(places, keys(seed, step)) for seed, step in ((1, 3), (2, 2), (2**40 + 1, 2))]
    assert all(not (first == other).any() for other in others)
    many = noise(torch.arange(100_000), keys(0, 0)).double() / 2**32
    assert abs(float(many.mean()) - 0.5) < 0.004
    assert abs(float(torch.corrcoef(torch.stack([many[:-1], many[1:]]))[0, 1])) < 0.02


@pytest.mark.parametrize("dtype", TYPES)
def test_small_updates_are_lost_to_the_nearest_and_kept_at_random(dtype: torch.dtype) -> None:
    ids = torch.arange(500)
    update, steps = 2.0**-13, 64
    nearest, random = torch.ones(500, 8, dtype=dtype), torch.ones(500, 8, dtype=dtype)
    for step in range(steps):
        sgd(nearest, ids, torch.ones(500, 8), UpdateScalars(lr=update))
        sgd(random, ids, torch.ones(500, 8), UpdateScalars(lr=update, rounding=keys(0, step)))
    assert torch.equal(nearest, torch.ones_like(nearest))
    assert abs(float(random.double().mean()) - (1 - steps * update)) < 0.05 * steps * update
