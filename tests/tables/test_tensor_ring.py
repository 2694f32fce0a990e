"""Tensor rings: differences from the tensor train."""

from __future__ import annotations

import pytest
import torch

from holdall.tables import TensorRing, TensorTrain


@pytest.mark.parametrize("path", ["reference", "fast"])
def test_a_row_is_a_trace(path: str) -> None:
    table = TensorRing(rank=3, row_shape=(5, 4, 6), dim_shape=(2, 3, 2)).build(120, 12, dtype=torch.float64)
    table.path = path
    first, inner, last = (core.detach() for core in table.cores)
    rows = table.materialize().view(5, 4, 6, 2, 3, 2)
    for i1, i2, i3 in ((0, 0, 0), (4, 3, 5), (2, 0, 1)):
        for a, b, c in ((0, 0, 0), (1, 2, 1), (0, 1, 1)):
            expected = torch.trace(first[i1, :, a] @ inner[i2, :, b] @ last[i3, :, c])
            torch.testing.assert_close(rows[i1, i2, i3, a, b, c], expected)


def test_every_core_has_the_full_rank() -> None:
    method = TensorRing(rank=5)
    assert [tuple(core.shape) for core in method.build(37, 8).cores] == [(4, 5, 2, 5), (3, 5, 2, 5), (4, 5, 2, 5)]
    assert method.num_parameters(37, 8) == (4 + 3 + 4) * 2 * 25


@pytest.mark.parametrize("method", [TensorRing(rank=1), TensorRing(rank=2), TensorRing(rank=2, cores=4)])
def test_one_number_over_many_seeds_is_gaussian(method: TensorRing) -> None:
    tables = (method.build(60, 8, init_std=1.0, generator=torch.Generator().manual_seed(k)) for k in range(600))
    values = torch.stack([table.materialize(torch.tensor([41]))[0, 5] for table in tables]).double().sort().values
    empirical = torch.arange(1, 601, dtype=torch.float64) / 600
    assert (torch.special.ndtr(values) - empirical).abs().max() < 0.06
    assert abs(values.std() - 1) < 0.06


@pytest.mark.parametrize("cores", [2, 3, 4])
def test_a_fit_is_the_tensor_train_of_its_rank(cores: int) -> None:
    weight = torch.randn(150, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ring, train = TensorRing(rank=4, cores=cores).fit(weight), TensorTrain(rank=4, cores=cores).fit(weight)
    torch.testing.assert_close(ring.materialize(), train.materialize())
    assert ring.fit_error == pytest.approx(train.fit_error)


def test_rows_of_a_tensor_train_are_fitted_exactly_and_train_on() -> None:
    source = TensorTrain(rank=3, row_shape=(5, 4, 6)).build(120, 12, dtype=torch.float64, init_std=1.0)
    ring = TensorRing(rank=3, row_shape=(5, 4, 6)).fit(source.materialize())
    assert ring.fit_error is not None
    assert ring.fit_error < 1e-10
    ring(torch.arange(120)[:, None]).square().sum().backward()
    assert ring.cores[2].grad[..., 1:].abs().sum() > 0  # the part that the train does not use can learn
