"""Sums of gradients by row: the fast path equals the reference, in a fixed order."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdall.kernels.row_gradient import RowGradient, join, sum_by_row, sum_by_row_reference


def some_gradient(num_ids: int, num_rows: int, bags: int | None, weighted: bool, seed: int = 0) -> RowGradient:
    generator = torch.Generator().manual_seed(seed)
    return RowGradient(
        ids=torch.randint(num_rows, (num_ids,), generator=generator),
        grad=torch.randn(num_ids if bags is None else bags, 3, generator=generator, dtype=torch.float64),
        bag_of=None if bags is None else torch.randint(bags, (num_ids,), generator=generator),
        weights=torch.rand(num_ids, generator=generator, dtype=torch.float64) if weighted else None,
    )


@settings(derandomize=True, deadline=None, max_examples=40)
@given(
    num_ids=st.integers(1, 60),
    num_rows=st.sampled_from([1, 2, 50, 10**10]),
    bags=st.none() | st.integers(1, 9),
    weighted=st.booleans(),
    seed=st.integers(0, 99),
)
def test_fast_path_equals_reference(num_ids: int, num_rows: int, bags: int | None, weighted: bool, seed: int) -> None:
    gradient = some_gradient(num_ids, num_rows, bags, weighted, seed)
    for found, expected in zip(sum_by_row(gradient), sum_by_row_reference(gradient), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)


def test_planted_sums() -> None:
    gradient = RowGradient(
        ids=torch.tensor([7, 3, 7, 7]),
        grad=torch.tensor([[1.0], [10.0]]),
        bag_of=torch.tensor([0, 0, 1, 1]),
        weights=torch.tensor([1.0, 2.0, 1.0, 0.5]),
    )
    ids, sums = sum_by_row(gradient)
    assert ids.tolist() == [3, 7]
    assert sums.tolist() == [[2.0], [16.0]]


def test_joined_gradients_add_up() -> None:
    parts = [some_gradient(5, 4, None, False), some_gradient(9, 4, 3, True, seed=1), some_gradient(4, 4, 2, False, 2)]
    total = torch.zeros(4, 3, dtype=torch.float64)
    for part in parts:
        ids, sums = sum_by_row_reference(part)
        total[ids] += sums
    ids, sums = sum_by_row(join(parts))
    torch.testing.assert_close(sums, total[ids], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("repeat", range(3))
def test_bit_equal_over_repeats(repeat: int) -> None:
    gradient = some_gradient(20_000, 5, None, False)
    assert torch.equal(sum_by_row(gradient)[1], sum_by_row(gradient)[1])


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("max_run", [2, 3, 64])
def test_long_runs_are_summed_in_pieces(max_run: int, weighted: bool) -> None:
    gradient = some_gradient(3_000, 4, 50, weighted)
    ids, sums = sum_by_row(gradient, max_run)
    expected_ids, expected = sum_by_row_reference(gradient)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(sums, expected, rtol=1e-12, atol=1e-12)


def test_no_ids() -> None:
    ids, sums = sum_by_row(RowGradient(torch.empty(0, dtype=torch.int64), torch.empty(0, 3)))
    assert ids.numel() == 0
    assert sums.shape == (0, 3)
