"""Rows of repeated ids: the fast path equals the reference, forward and gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from holdall.kernels.repeat_rows import rows_of_distinct, rows_of_distinct_reference


@pytest.mark.parametrize("ids", [[3, 1, 3, 3, 0], [5], [0, 1, 2], [10**10, 7, 10**10]])
def test_equals_the_reference_with_gradient(ids: list[int]) -> None:
    results = []
    for function in (rows_of_distinct, rows_of_distinct_reference):
        factor = torch.tensor([0.5, -2.0], dtype=torch.float64, requires_grad=True)
        calls: list[Tensor] = []

        def make(distinct: Tensor, calls: list[Tensor] = calls, factor: Tensor = factor) -> Tensor:
            calls.append(distinct)
            return (distinct.double()[:, None] * factor).sin()

        output = function(torch.tensor(ids), make)
        output.pow(3).sum().backward()
        assert calls[0].tolist() == sorted(set(ids))
        results.append((output, factor.grad))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


def test_no_ids() -> None:
    assert rows_of_distinct(torch.empty(0, dtype=torch.int64), lambda ids: torch.zeros(len(ids), 3)).shape == (0, 3)
