"""Memory of replaced tables is freed, and what still holds them is named in a warning."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from holdall.common.errors import ConfigError
from holdall.data.batch import Ids
from holdall.embedding.bags import EmbeddingBags
from holdall.embedding.compress import compress
from holdall.optim.config import OptimizerConfig
from holdall.optim.optimizers import Optimizers
from holdall.tables import TensorTrain


@pytest.fixture(autouse=True)
def _warnings_are_errors() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(5000, 8)
        self.goods = nn.EmbeddingBag(5000, 8)
        self.small = nn.Embedding(3, 8)


def references(model: Net) -> list[weakref.ref[object]]:
    modules = (model.users, model.goods)
    return [weakref.ref(found) for module in modules for found in (module, module.weight)]


@pytest.mark.parametrize("fit", [False, True])
def test_memory_of_replaced_tables_is_freed(fit: bool) -> None:
    model = Net()
    torch.optim.Adam(model.parameters())  # an optimizer that is gone is no holder
    old = references(model)
    assert all(reference() is not None for reference in old)
    compress(model, budget=0.1, fit=fit)
    assert all(reference() is None for reference in old)


def test_memory_of_replaced_tables_of_bags_is_freed() -> None:
    bags = EmbeddingBags.build({"a": 5000, "b": 20}, 8)
    bags(Ids(torch.tensor([[1], [2]]), None, 2)).sum().backward()
    old = [weakref.ref(bags.table("a")), weakref.ref(bags.table("a").weight), weakref.ref(bags.packs[0])]
    compress(bags, budget=0.1)
    assert [reference() for reference in old] == [None, None, None]


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.Adagrad])
def test_an_optimizer_with_replaced_weights_is_named(kind: type[torch.optim.Optimizer]) -> None:
    model = Net()
    optimizer = kind(model.parameters(), lr=0.1)
    with pytest.warns(UserWarning, match=rf"optimizer \({kind.__name__}\) still holds .*\('users', 'goods'\)"):
        compress(model, budget=0.1)
    assert optimizer.param_groups


def test_an_optimizer_of_other_parameters_is_not_named() -> None:
    model = Net()
    optimizer = torch.optim.SGD([*nn.Linear(3, 3).parameters(), *model.small.parameters()], lr=0.1)
    compress(model, budget=0.1)
    assert len(optimizer.param_groups[0]["params"]) == 3


def test_our_own_optimizers_are_named() -> None:
    model = Net()
    optimizers = Optimizers(model, OptimizerConfig(name="sgd"))
    with pytest.warns(UserWarning, match=r"optimizer.*still hold.*\('users', 'goods'\)"):
        compress(model, budget=0.1)
    assert optimizers is not None


def test_a_module_with_a_list_of_replaced_tables_is_named() -> None:
    model = Net()
    model.parts = [model.users]
    with pytest.warns(UserWarning, match=r"a module \(Net\) still holds .*\('users'\)"):
        compress(model, budget=0.1)


def test_another_model_with_the_same_module_is_named() -> None:
    model, other = Net(), nn.Sequential()
    other.append(model.users)
    with pytest.warns(UserWarning, match=r"a module \(Sequential\) still holds"):
        compress(model, budget=0.1)


def test_a_variable_is_named() -> None:
    model = Net()
    users = model.users
    with pytest.warns(UserWarning, match="a variable still holds"):
        compress(model, budget=0.1)
    assert users is not model.users


def test_a_loss_that_is_still_there_is_no_holder() -> None:
    model = Net()
    loss = model.users(torch.tensor([1, 2])).sum()
    loss.backward()
    compress(model, budget=0.1)
    assert loss.grad_fn is not None


def test_the_warning_names_a_few_of_many_tables() -> None:
    model = nn.ModuleDict({name: nn.Embedding(5000, 8) for name in "abcdefgh"})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.warns(UserWarning, match=r"\('a', 'b', 'c', 5 more\)"):
        compress(model, budget=0.1)
    assert optimizer.param_groups


@pytest.mark.parametrize("options", [{"budget": "1B"}, {"method": TensorTrain(rank=2, row_shape=(2, 2, 2))}])
def test_an_error_that_the_caller_keeps_is_no_holder(options: dict[str, object]) -> None:
    model = Net()
    with pytest.raises(ConfigError) as kept:
        compress(model, **options)
    old = references(model)
    compress(model, budget=0.1)
    assert all(reference() is None for reference in old)
    assert kept.value.__traceback__ is not None


def test_the_warning_names_the_line_of_the_caller() -> None:
    model = Net()
    users = model.users
    with pytest.warns(UserWarning, match="still holds") as caught:
        compress(model, budget=0.1)
    assert caught[0].filename == __file__
    assert users is not model.users
