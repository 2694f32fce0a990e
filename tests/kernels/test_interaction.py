"""Dot interaction: planted values, the plain reference, and its gradient."""

from __future__ import annotations

import pytest
import torch

from holdall.kernels.interaction import dot_interaction, dot_interaction_reference, interaction_width


def test_planted_products() -> None:
    vectors = torch.tensor([[[1.0, 0.0], [2.0, 3.0], [0.0, 5.0]]])
    assert dot_interaction(vectors).tolist() == [[1.0, 0.0, 2.0, 0.0, 15.0, 0.0, 0.0, 0.0]]
    assert interaction_width(3, 2) == 8
    assert interaction_width(27, 16) == 368


@pytest.mark.parametrize(("size", "num_vectors", "dim"), [(5, 4, 3), (1, 2, 1), (7, 27, 16), (3, 1, 4), (3, 1, 8)])
def test_equals_reference_with_gradient(size: int, num_vectors: int, dim: int) -> None:
    vectors = torch.randn(size, num_vectors, dim, dtype=torch.float64, requires_grad=True)
    direction = torch.randn(size, interaction_width(num_vectors, dim), dtype=torch.float64)
    results = []
    for function in (dot_interaction, dot_interaction_reference):
        output = function(vectors)
        results.append((output, *torch.autograd.grad((output * direction).sum(), vectors)))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)


def test_gradcheck() -> None:
    vectors = torch.randn(2, 4, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(dot_interaction, (vectors,))
    assert torch.autograd.gradgradcheck(dot_interaction, (vectors,))
