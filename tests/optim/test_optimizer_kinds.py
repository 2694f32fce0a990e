"""Records of optimizers: planted state of rows and dense parameters, and bytes that equal the tensors'."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from holdall.optim.dense_optimizers import DenseNumbers
from holdall.optim.optimizer_kinds import MEASURED, NAMES, OPTIMIZER_KINDS

ROW_STATE = {
    "sgd": {},
    "momentum_sgd": {"momentum_buffer": (10, 3)},
    "adagrad": {"sum": (10, 3)},
    "rowwise_adagrad": {"sum": (10,)},
    "rowwise_adagrad_adam": {"sum": (10,)},
    "adam": {"exp_avg": (10, 3), "exp_avg_sq": (10, 3)},
    "adamw": {"exp_avg": (10, 3), "exp_avg_sq": (10, 3)},
}
DENSE_STATE = {
    "sgd": [],
    "momentum_sgd": ["momentum_buffer"],
    "adagrad": ["step", "sum"],
    "rowwise_adagrad": ["step", "sum"],
    "rowwise_adagrad_adam": ["step", "exp_avg", "exp_avg_sq"],
    "adam": ["step", "exp_avg", "exp_avg_sq"],
    "adamw": ["step", "exp_avg", "exp_avg_sq"],
}
ROW_SLOT_BYTES = {
    "sgd": (),
    "momentum_sgd": (64,),
    "adagrad": (64,),
    "rowwise_adagrad": (4,),
    "rowwise_adagrad_adam": (4,),
    "adam": (64, 64),
    "adamw": (64, 64),
}


def test_every_name_has_its_record() -> None:
    assert set(OPTIMIZER_KINDS) == {*NAMES, "momentum_sgd"}
    assert all(kind.name == name for name, kind in OPTIMIZER_KINDS.items())
    rules = [kind.row_rule for kind in OPTIMIZER_KINDS.values() if kind.table_parts is None]
    assert len(set(rules)) == len(rules)


def test_an_optimizer_that_is_not_measured_has_the_rates_of_one_with_as_much_state() -> None:
    assert MEASURED == ("sgd", "adagrad", "rowwise_adagrad", "adam")
    for kind in OPTIMIZER_KINDS.values():
        assert kind.rates in MEASURED
        assert kind.row_state_bytes(16) == OPTIMIZER_KINDS[kind.rates].row_state_bytes(16)


@pytest.mark.parametrize("name", OPTIMIZER_KINDS)
@pytest.mark.parametrize(
    ("dtype", "state_dtype"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.float64, torch.float64)],
)
def test_row_state(name: str, dtype: torch.dtype, state_dtype: torch.dtype) -> None:
    state = OPTIMIZER_KINDS[name].row_state(torch.ones(10, 3, dtype=dtype))
    assert {slot: tuple(tensor.shape) for slot, tensor in state.items()} == ROW_STATE[name]
    assert all(tensor.dtype == state_dtype and not tensor.any() for tensor in state.values())


@pytest.mark.parametrize("name", OPTIMIZER_KINDS)
def test_bytes_of_row_state(name: str) -> None:
    kind = OPTIMIZER_KINDS[name]
    assert kind.row_slot_bytes(16) == ROW_SLOT_BYTES[name]
    stored = sum(tensor.nbytes for tensor in kind.row_state(torch.ones(10, 16)).values())
    assert 10 * kind.row_state_bytes(16) == stored


@pytest.mark.parametrize("name", OPTIMIZER_KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dense_state_is_what_torch_keeps(name: str, dtype: torch.dtype) -> None:
    """The state made at once has the names, shapes and bytes of the state after a step."""
    kind = OPTIMIZER_KINDS[name]
    parameter = nn.Parameter(torch.ones(4, 5, dtype=dtype))
    momentum = 0.9 if name == "momentum_sgd" else 0.0
    optimizer = kind.dense_optimizer([{"params": [parameter], "lr": 0.1}], DenseNumbers(momentum=momentum))
    before = {slot: tensor.clone() for slot, tensor in optimizer.state[parameter].items()}
    assert list(before) == DENSE_STATE[name]
    assert sum(tensor.nbytes for tensor in before.values()) == kind.dense_state_bytes(parameter)
    parameter.sum().backward()
    optimizer.step()
    after = {slot: value for slot, value in optimizer.state[parameter].items() if value is not None}
    assert list(after) == DENSE_STATE[name]
    assert all(
        after[slot].shape == tensor.shape and after[slot].dtype == tensor.dtype for slot, tensor in before.items()
    )
    assert all(tensor.any() for tensor in after.values())
