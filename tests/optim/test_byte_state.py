"""Optimizer state of a byte: right in the mean, over its whole range, and as good as 32 bits to rows that train."""

from __future__ import annotations

import pytest
import torch

from holdall.optim.byte_state import decode_bytes, encode_bytes
from holdall.optim.code_rows import code_row_state
from holdall.optim.config import OptimizerConfig
from holdall.optim.optimizer_kinds import OPTIMIZER_KINDS
from holdall.optim.optimizers import Optimizers
from holdall.tables import Method, MixedDimension, Quantized
from holdall.tables.quantized import StochasticRoundingTable

BYTES = Quantized(8, "stochastic", trainable=True, state_bits=8)


def test_every_code_is_the_number_that_it_means() -> None:
    codes = torch.arange(256).to(torch.uint8)
    numbers = decode_bytes(codes)
    assert numbers[0] == 0
    assert bool((numbers[1:] > numbers[:-1]).all())
    assert float(numbers[1]) < 4e-15
    assert float(numbers[-1]) > 4e4
    nudged = numbers * (1 + 1e-5)  # the code below a number may be that of the next, by the last bit of the logarithm
    assert torch.equal(encode_bytes(nudged, torch.full((256,), 0.5)), codes)


@pytest.mark.parametrize("value", [0.0, 1e-17, 3e-12, 0.02, 1.1, 999.0])
def test_rounding_is_right_in_the_mean(value: float) -> None:
    draws = (torch.arange(100_000) + 0.5) / 100_000
    found = decode_bytes(encode_bytes(torch.full((100_000,), value), draws))
    assert float(found.double().mean()) == pytest.approx(value, rel=1e-3)
    assert len(found.unique()) <= 2


def test_numbers_beyond_the_largest_are_the_largest() -> None:
    found = encode_bytes(torch.tensor([1e9, float("inf")]), torch.tensor([0.99, 0.0]))
    assert found.tolist() == [255, 255]


def test_state_of_one_number_a_row_takes_a_byte() -> None:
    table = BYTES.build(7, 4)
    assert isinstance(table, StochasticRoundingTable)
    state = code_row_state(table, OPTIMIZER_KINDS["rowwise_adagrad"], "cpu")
    assert {name: (slot.shape, slot.dtype) for name, slot in state.items()} == {"sum": ((7,), torch.uint8)}
    for name in ("adagrad", "adam"):  # a number for each of a row, with a sign
        state = code_row_state(table, OPTIMIZER_KINDS[name], "cpu")
        assert all(slot.dtype == torch.float32 for slot in state.values())


def train_to(method: Method, target: torch.Tensor, steps: int = 300) -> float:
    """Root mean square error of rows that were trained towards `target` [num_rows, dim]."""
    num_rows, dim = target.shape
    table = method.build(num_rows, dim, generator=torch.Generator().manual_seed(0))
    optimizers = Optimizers(table, OptimizerConfig(name="rowwise_adagrad", lr=0.1))
    for step in range(steps):
        ids = torch.randint(num_rows, (64,), generator=torch.Generator().manual_seed(step))
        (table.rows(ids) - target[ids]).square().sum().backward()
        optimizers.step()
    return float((table.materialize() - target).square().mean().sqrt())


def test_rows_train_as_well_as_with_state_of_32_bits() -> None:
    target = 0.3 * torch.randn(50, 8, generator=torch.Generator().manual_seed(1))
    floats = train_to(Quantized(8, "stochastic", trainable=True), target)
    assert train_to(BYTES, target) < 1.2 * floats + 1e-3 < 0.02


def test_narrow_rows_of_bytes_learn_a_table_of_their_rank() -> None:
    generator = torch.Generator().manual_seed(1)
    target = torch.randn(50, 2, generator=generator) @ (0.3 * torch.randn(2, 8, generator=generator))
    assert train_to(MixedDimension(2, bits=8, trainable=True), target) < 0.1 * float(target.std())
