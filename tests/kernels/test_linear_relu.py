"""Fused linear layer: equal to its two parts, with gradients, with and without padding."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from holdall.kernels.linear_relu import linear_relu


@pytest.mark.parametrize(("size", "num_in", "num_out"), [(5, 13, 4), (1, 8, 1), (7, 3, 9)])
def test_equals_linear_then_relu(size: int, num_in: int, num_out: int) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(size, num_in), (num_out, num_in), (num_out,)]
    inputs = [torch.randn(s, generator=generator, dtype=torch.float64, requires_grad=True) for s in shapes]
    direction = torch.randn(size, num_out, generator=generator, dtype=torch.float64)
    results = []
    for function in (linear_relu, lambda x, weight, bias: F.relu(F.linear(x, weight, bias))):
        output = function(*inputs)
        results.append((output, *torch.autograd.grad((output * direction).sum(), inputs)))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)


def test_follows_autocast() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert linear_relu(torch.randn(3, 4), torch.randn(2, 4), torch.randn(2)).dtype == torch.bfloat16
