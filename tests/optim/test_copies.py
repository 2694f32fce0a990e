"""Copies and pickles of models and their optimizers: they predict the same, train on, and share nothing."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from holdall.common.errors import ConfigError
from holdall.data.batch import Ids
from holdall.embedding.bags import EmbeddingBags
from holdall.optim.config import OptimizerConfig
from holdall.optim.optimizers import Optimizers
from holdall.tables import Frobenius
from holdall.tiers.placement import place

ROWS = {"a": 20, "b": 7, "c": 30}


class Model(nn.Module):
    """Two dense tables in a pack, a compressed one, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bags = EmbeddingBags.build(ROWS, 4, {"c": Frobenius(2, 2)}, dtype=torch.float64)
        self.top = nn.Linear(12, 1, dtype=torch.float64)

    def forward(self, ids: Ids) -> Tensor:
        return self.top(self.bags(ids).flatten(1)).squeeze(1)


def batch(step: int) -> Ids:
    generator = torch.Generator().manual_seed(step)
    return Ids(torch.stack([torch.randint(rows, (6,), generator=generator) for rows in ROWS.values()]), None, 3)


def train(model: Model, optimizers: Optimizers, steps: range) -> None:
    for step in steps:
        model(batch(step)).square().sum().backward()
        optimizers.step()


def saved_by_torch(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "torch.save": saved_by_torch,
}


def trained(name: str = "adam") -> tuple[Model, Optimizers]:
    model = Model()
    optimizers = Optimizers(model, OptimizerConfig(name=name, lr=0.05))
    train(model, optimizers, range(3))
    return model, optimizers


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(found) == list(expected)
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


@pytest.mark.parametrize("duplicate", COPIES.values(), ids=COPIES)
def test_a_copy_with_its_optimizers_trains_on_to_the_same_model(duplicate: Callable[[Any], Any]) -> None:
    model, optimizers = trained()
    model(batch(99)).sum().backward()  # a gradient of the model, which the copy does not have
    before = state(model)
    twin, its_optimizers = duplicate((model, optimizers))
    assert_equal(state(twin), before)
    assert torch.equal(twin(batch(7)), model(batch(7)))
    train(twin, its_optimizers, range(3, 6))
    assert_equal(state(model), before)
    optimizers.zero_grad()
    train(model, optimizers, range(3, 6))
    assert_equal(state(twin), state(model))
    assert its_optimizers.tensors().keys() == optimizers.tensors().keys()
    assert all(torch.equal(value, optimizers.tensors()[name]) for name, value in its_optimizers.tensors().items())


@pytest.mark.parametrize("duplicate", COPIES.values(), ids=COPIES)
def test_a_copy_without_optimizers_predicts_and_gets_its_own(duplicate: Callable[[Any], Any]) -> None:
    model, optimizers = trained("sgd")
    before = state(model)
    twin = duplicate(model)
    with torch.no_grad():
        assert torch.equal(twin(batch(7)), model(batch(7)))
    twin(batch(7)).sum().backward()
    assert twin.bags.table("a").weight.grad.is_sparse  # no optimizer collects them
    twin.zero_grad()
    train(twin, Optimizers(twin, OptimizerConfig(name="sgd", lr=0.05)), range(3, 6))
    assert_equal(state(model), before)
    train(model, optimizers, range(3, 6))
    assert_equal(state(twin), state(model))


def test_a_copy_of_a_model_that_has_its_optimizers_as_an_attribute() -> None:
    model, optimizers = trained()
    model.optimizers = optimizers
    twin = copy.deepcopy(model)
    train(twin, twin.optimizers, range(3, 6))
    train(model, optimizers, range(3, 6))
    assert_equal(state(twin), state(model))


@pytest.mark.parametrize("duplicate", COPIES.values(), ids=COPIES)
def test_tables_of_a_copy_are_views_of_its_own_storage(duplicate: Callable[[Any], Any]) -> None:
    model, _ = trained()
    twin = duplicate(model)
    (pack,) = twin.bags.packs
    pack.storage.zero_()
    assert not twin.bags.table("a").materialize().any()
    assert not twin.bags.table("b").materialize().any()
    assert model.bags.table("a").materialize().any()
    assert pack.tables["a"] is twin.bags.table("a")


@pytest.mark.parametrize("name", ["sgd", "rowwise_adagrad", "adam"])
def test_state_dicts_continue_to_the_same_model(name: str) -> None:
    """Also through a file that `torch.load` reads without running code."""
    model, optimizers = trained(name)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizers": optimizers.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed = Model()
    resumed.load_state_dict(saved["model"])
    continued = Optimizers(resumed, OptimizerConfig(name=name, lr=0.05))
    continued.load_state_dict(saved["optimizers"])
    train(model, optimizers, range(3, 6))
    train(resumed, continued, range(3, 6))
    assert_equal(state(resumed), state(model))
    other = Optimizers(Model(), OptimizerConfig(name="adagrad"))
    with pytest.raises(ConfigError, match=r"the state of another model or optimizer: '.*' differs"):
        other.load_state_dict(saved["optimizers"])


def test_a_model_with_rows_in_several_places_is_not_copied() -> None:
    model = Model()
    place(model, {"a": 4, "b": 7}, "cpu")
    with pytest.raises(ConfigError, match="rows are in several places cannot be copied or pickled"):
        copy.deepcopy(model)


def test_loading_a_state_dict_by_assignment() -> None:
    model, other = Model(), trained()[0]
    model.load_state_dict({name: value.clone() for name, value in other.state_dict().items()}, assign=True)
    with torch.no_grad():
        assert torch.equal(model(batch(7)), other(batch(7)))
    model.bags.packs[0].storage.zero_()
    assert not model.bags.table("a").materialize().any()
    with pytest.raises(ConfigError, match="move the model first"):
        other.load_state_dict(Model().state_dict(), assign=True)
