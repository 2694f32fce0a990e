"""Two-tower: the loss written plainly in float64, duplicates of an item, the correction, gradients, columns."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from holdall.common.errors import ConfigError
from holdall.data.batch import Batch
from holdall.data.dataset import DataSet
from holdall.data.items import ItemTable
from holdall.data.prepare import PrepareConfig, prepare
from holdall.data.schema import Schema
from holdall.models import TwoTower, TwoTowerConfig
from holdall.models.two_tower import in_batch_softmax, item_counts
from holdall.optim.config import OptimizerConfig
from holdall.optim.optimizers import Optimizers
from tests.models.made_up import METHODS, click_batch, clicks, histories, history_batch, num_dense_parameters
from tests.serving.made_up import implicit_files

SMALL = TwoTowerConfig(dim=4, tower=(5, 3))
HISTORIES = replace(SMALL, user=("user", "past_items", "I0"), item=("item", "category"))


def unit(vector: Tensor) -> Tensor:
    return vector / vector.square().sum().sqrt()


def layers(mlp: torch.nn.Module, x: Tensor) -> Tensor:
    for layer in mlp:
        x = layer.weight.double() @ x + layer.bias.double() if isinstance(layer, torch.nn.Linear) else x.clamp(min=0)
    return x


def vectors_plainly(model: TwoTower, batch: Batch) -> tuple[list[Tensor], list[Tensor]]:
    """Vectors of users and items of `HISTORIES` in float64, a sample at a time."""
    rows = {name: model.bags.table(name).materialize().double() for name in ("user", "item", "category")}
    users, items = [], []
    for b in range(len(batch)):
        past, user, item, _, category = (
            values[int(offsets[b]) : int(offsets[b + 1])] for values, offsets, _ in map(batch.ids.bag, range(5))
        )
        history = rows["item"][past].sum(0)
        dense = batch.dense[b, :1].double()
        users.append(unit(layers(model.user, torch.cat([rows["user"][user[0]], history, dense]))))
        items.append(unit(layers(model.item, torch.cat([rows["item"][item[0]], rows["category"][category[0]]]))))
    return users, items


def loss_plainly(
    users: list[Tensor], items: list[Tensor], ids: list[int], log_q: list[float], label: list[float], temperature: float
) -> float:
    """The loss of the module's docstring, a pair at a time."""
    total = 0.0
    for i, user in enumerate(users):
        scores = [float(user @ item) / temperature for item in items]
        others = [j for j in range(len(items)) if ids[j] != ids[i]]
        expected = [(len(items) - 1) * math.exp(log_q[j]) for j in others]
        summed = sum(math.exp(scores[j] - scores[i]) / number for j, number in zip(others, expected, strict=True))
        total += label[i] * math.log(1 + summed)
    return total / len(users)


def test_equals_the_equations() -> None:
    schema = histories(2)
    model = HISTORIES.build(schema)
    with torch.no_grad():
        for name in ("user", "item", "category"):
            model.bags.table(name).weight.normal_()
    batch = history_batch(schema, [2, 0, 4, 9, 1, 3])
    item = batch.ids.bag(2)[0]
    item[3] = item[0]  # in the batch twice
    with torch.no_grad():
        users, items = vectors_plainly(model, batch)
    model.log_frequency = torch.rand(20).log()
    looked_up = model.lookup(batch)
    found = model.training_loss(model.training_outputs(batch.dense, looked_up), batch)
    log_q = model.log_frequency[item.long()].tolist()
    expected = loss_plainly(users, items, item.tolist(), log_q, batch.label.tolist(), 0.1)
    assert found.item() == pytest.approx(expected, rel=1e-5)
    logits = torch.stack([user @ item / 0.1 for user, item in zip(users, items, strict=True)])
    torch.testing.assert_close(model(batch).double(), logits, rtol=1e-4, atol=1e-4)
    weighted = replace(batch, weight=torch.full((6,), 3.0))
    assert model.training_loss(model.training_outputs(batch.dense, looked_up), weighted).item() == pytest.approx(
        3 * expected, rel=1e-5
    )


def test_towers_read_their_own_columns() -> None:
    schema = histories(2)
    model = HISTORIES.build(schema)
    assert set(model.bags.features) == {"user", "past_items", "item", "category"}
    batch = history_batch(schema, [2, 0, 4])
    users, items = model.towers(batch.dense, model.lookup(batch))
    assert torch.equal(model.side_vectors("user", batch), users)
    assert torch.equal(model.side_vectors("item", batch), items)
    torch.testing.assert_close(users.norm(dim=1), torch.ones(3))
    other = replace(batch, dense=batch.dense + torch.tensor([0.0, 5.0]))  # I1 is of neither tower
    assert torch.equal(model(other), model(batch))
    other = replace(batch, dense=batch.dense + torch.tensor([5.0, 0.0]))
    assert torch.equal(model.side_vectors("item", other), items)
    assert not torch.equal(model.side_vectors("user", other), users)


def test_gradients() -> None:
    model = SMALL.build(clicks(0, user=5, item=7)).double()
    model.log_frequency = torch.rand(7, dtype=torch.float64).log()
    batch = click_batch(clicks(0, user=5, item=7))
    batch = replace(batch, dense=batch.dense.double(), label=batch.label.double())
    item = batch.ids.bag(1)[0].long()
    users, items = (torch.randn(6, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))

    def loss(users: Tensor, items: Tensor) -> Tensor:
        return in_batch_softmax(users, items, item, item, model.log_frequency[item], batch.label, temperature=0.5)

    assert torch.autograd.gradcheck(loss, (users, items))


def test_copies_of_an_item_are_no_negatives() -> None:
    """Two samples of one item: the loss of either has no other candidate, and is 0."""
    users, items = torch.randn(2, 3), torch.randn(2, 3)
    same, zeros, ones = torch.tensor([4, 4]), torch.zeros(2), torch.ones(2)
    assert in_batch_softmax(users, items, same, same, zeros, ones).item() == 0.0
    different = torch.tensor([4, 5])
    assert in_batch_softmax(users, items, different, different, zeros, ones).item() > 0.0


def test_only_positives_are_queries_and_all_items_are_candidates() -> None:
    users, items, ids = torch.randn(3, 4), torch.randn(3, 4), torch.tensor([0, 1, 2])
    label = torch.tensor([1.0, 0.0, 0.0])
    found = in_batch_softmax(users, items, ids, ids, torch.zeros(3), label)
    own, first, second = users[0] @ items.t()
    expected = ((own.exp() + (first.exp() + second.exp()) / 2).log() - own) / 3
    torch.testing.assert_close(found, expected)
    assert in_batch_softmax(users, items, ids, ids, torch.zeros(3), torch.zeros(3)).item() == 0.0


def test_the_loss_is_least_at_the_logarithm_of_the_probability() -> None:
    """All users alike take item 0 in 8 of 10 samples. Uncorrected, it would be pushed down there, as the negative of
    nearly all others."""
    items, log_q = torch.tensor([0] * 80 + [1] * 10 + [2] * 10), torch.tensor([0.8, 0.1, 0.1]).log()

    def gradient(scores: Tensor, log_q: Tensor) -> Tensor:
        scores = scores[:, None].requires_grad_()
        in_batch_softmax(torch.ones(100, 1), scores[items], items, items, log_q[items], torch.ones(100)).backward()
        assert scores.grad is not None
        return scores.grad[:, 0]

    assert gradient(log_q.clone(), log_q).abs().max() < 0.005
    assert gradient(torch.zeros(3), log_q)[0] < -0.1
    assert gradient(log_q.clone(), torch.zeros(3))[0] > 0.05


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_every_method_learns(method: object) -> None:
    schema = clicks(0, user=40, item=64)
    model = replace(SMALL, dim=8, tower=(8,)).build(schema, method, generator=torch.Generator().manual_seed(0))
    model.log_frequency = torch.zeros(64)
    batch = replace(click_batch(schema, 32), label=torch.ones(32))
    before = {name: model.bags.table(name).materialize() for name in ("user", "item")}
    name, rate = ("sgd", 2.0) if "trainable=True" in str(method) else ("adagrad", 0.1)
    optimizers = Optimizers(model, OptimizerConfig(name=name, lr=0.02, table_lr=rate))
    losses = []
    for _ in range(12):
        loss = model.training_loss(model.training_outputs(batch.dense, model.lookup(batch)), batch)
        loss.backward()
        optimizers.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.1, losses
    assert not any(torch.equal(model.bags.table(name).materialize(), rows) for name, rows in before.items())


@pytest.fixture(scope="module")
def implicit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("implicit")
    prepare([str(implicit_files(folder / "raw"))], folder / "data", PrepareConfig(format="taobao", valid=0.1))
    return folder / "data"


def test_frequencies_are_those_of_the_item_alone(implicit: Path) -> None:
    """The history shares the item's table, and its id map counts both."""
    data = DataSet(implicit, "train")
    place = [feature.name for feature in data.schema.features if feature.one_hot].index("item")
    expected = np.bincount(data.columns(0, len(data)).ids[:, place], minlength=data.schema.feature("item").num_rows)
    assert np.array_equal(item_counts(data, "item"), expected)
    assert np.array_equal(item_counts(data, "user").sum(), len(data))  # of the map
    model = SMALL.build(data.schema)
    model.read_training_split(data)
    assert model.log_frequency is not None
    assert model.log_frequency.exp()[0].item() == pytest.approx(expected[0] / expected.sum())
    assert "log_frequency" not in model.state_dict()


def test_the_user_must_not_know_the_item(implicit: Path) -> None:
    data = DataSet(implicit, "train")
    config = replace(SMALL, user=("user", "category"))
    with pytest.raises(ConfigError, match=r"'category' depends on the item.*--model-setting item=item,category"):
        config.build(data.schema).read_training_split(data)
    assert "category" in ItemTable.load(implicit, data.schema).attributes


def test_a_loss_without_frequencies_is_refused() -> None:
    schema = clicks(0, user=5, item=7)
    model, batch = SMALL.build(schema), click_batch(schema)
    with pytest.raises(ConfigError, match="read_training_split"):
        model.training_loss(model.training_outputs(batch.dense, model.lookup(batch)), batch)


def test_sizes() -> None:
    model = HISTORIES.build(histories(2))
    user = (2 * 4 + 1) * 5 + 5 + 5 * 3 + 3
    item = 2 * 4 * 5 + 5 + 5 * 3 + 3
    assert num_dense_parameters(model) == user + item
    assert SMALL.scaled(2).tower == (10, 6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tower": ()}, "at least one layer"),
        ({"temperature": 0.0}, "above 0, not 0.0"),
        ({"user": ()}, "the user's tower reads no column"),
        ({"user": ("user", "item")}, "column 'item' is named twice"),
        ({"dim": 0}, "at least 1"),
    ],
)
def test_bad_settings(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TwoTowerConfig(**settings)


def test_columns_that_are_not_there() -> None:
    schema: Schema = histories(1)
    with pytest.raises(ConfigError, match=r"the user's tower reads 'usr', which .*did you mean 'user'.*user=\.\.\."):
        replace(SMALL, user=("usr",)).build(schema)
    for item in (("past_items",), ("I0", "item")):
        with pytest.raises(ConfigError, match=f"'{item[0]}' is not one id a row"):
            replace(SMALL, item=item).build(schema)
