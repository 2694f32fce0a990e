"""DIN: planted weights, the equations written plainly in float64 for one event at a time, gradients, and padding."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holdall.common.errors import ConfigError, DataError
from holdall.data.batch import Batch, Ids
from holdall.data.schema import Feature, Schema
from holdall.models import DIN, DINConfig
from holdall.tables import Hashed
from tests.models.made_up import (
    METHODS,
    clicks,
    histories,
    history_batch,
    learns,
    num_dense_parameters,
    same_parameters,
    trained,
)
from tests.models.test_tbsm import LENGTHS, samples_of

SMALL = DINConfig(dim=4, attention=(6, 3), top=(5,), length=4)


def layers(mlp: nn.Module, x: Tensor) -> Tensor:
    """The layers of an MLP in float64, a number at a time where it matters."""
    for layer in mlp:
        if isinstance(layer, nn.Linear):
            x = layer.weight.double() @ x + layer.bias.double()
        else:
            slope = layer.weight.double() if isinstance(layer, nn.PReLU) else 0.0
            x = torch.where(x > 0, x, slope * x)
    return x


def plainly(model: DIN, batch: Batch) -> Tensor:
    """The equations of the module's docstring in float64, a sample and an event at a time."""
    rows = {name: model.bags.table(name).materialize().double() for name in ("user", "item", "category")}
    logits = []
    for b, (past_items, user, item, past_categories, category) in enumerate(samples_of(batch)):
        q = torch.cat([rows["item"][item[0]], rows["category"][category[0]]])
        interest = torch.zeros_like(q)
        for past_item, past_category in list(zip(past_items, past_categories, strict=True))[-model.config.length :]:
            k = torch.cat([rows["item"][past_item], rows["category"][past_category]])
            interest += layers(model.attention, torch.cat([q, k, q - k, q * k])) * k
        logits.append(layers(model.top, torch.cat([rows["user"][user[0]], q, interest, batch.dense[b].double()])))
    return torch.cat(logits)


def with_large_rows(model: DIN) -> DIN:
    with torch.no_grad():
        for name in dict.fromkeys(model.bags.features.values()):
            model.bags.table(name).weight.normal_()
    return model


@pytest.mark.parametrize("activation", ["prelu", "relu"])
@pytest.mark.parametrize("num_dense", [0, 2])
def test_equals_the_equations(num_dense: int, activation: str) -> None:
    schema = histories(num_dense)
    model = with_large_rows(replace(SMALL, activation=activation).build(schema))
    batch = history_batch(schema, LENGTHS)
    with torch.no_grad():
        expected = plainly(model, batch)
        torch.testing.assert_close(model(batch).double(), expected, rtol=1e-5, atol=1e-5)
    assert expected.std() > 0.1


def test_gradients() -> None:
    schema = histories(2)
    model = SMALL.build(schema).double()
    exists = torch.tensor([[False, True, True, True], [False] * 4])
    vectors = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    events = (torch.randn(2, 4, 2, 4, dtype=torch.float64) * exists[..., None, None]).requires_grad_()
    dense = torch.rand(2, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda d, v, e: model.score(d, (v, e, exists)), (dense, vectors, events))


def test_planted_interest() -> None:
    """A weight of q * k: 6 for the first event, 3 for the second; the third does not exist, nor any of sample 1."""
    past = Feature(name="past", num_rows=9, unseen=8, kind="sequence", table="item")
    schema = Schema(label="click", dense=(), features=(Feature(name="item", num_rows=9, unseen=8), past))
    model = DINConfig(dim=1, attention=(), top=(), length=3).build(schema)
    with torch.no_grad():
        model.attention[0].weight.copy_(torch.tensor([[0.0, 0.0, 0.0, 1.0]]))
        model.attention[0].bias.zero_()
    events = torch.tensor([[[2.0], [1.0], [9.0]]]).repeat(2, 1, 1)
    exists = torch.tensor([[True, True, False], [False, False, False]])
    interest = model.interest(events, torch.tensor([[3.0], [3.0]]), exists)
    assert interest.tolist() == [[6.0 * 2 + 3.0 * 1], [0.0]]


def test_padding_makes_no_difference() -> None:
    schema = histories()
    model = with_large_rows(SMALL.build(schema)).double()
    batch = history_batch(schema, LENGTHS)
    found = {}
    for skips in (True, False):
        model.skips_padding = skips
        model.zero_grad()
        logits = model.score(batch.dense.double(), model.lookup(batch))
        logits.square().sum().backward()
        found[skips] = [logits, *(parameter.grad.to_dense().clone() for parameter in model.parameters())]
    torch.testing.assert_close(found[True], found[False])


def test_only_the_last_events_count() -> None:
    schema = histories()
    model = with_large_rows(SMALL.build(schema))
    batch = history_batch(schema, [9])
    values = batch.ids.values.clone()
    values[:5] = (values[:5] + 1) % 20  # the five oldest of nine items
    older = replace(batch, ids=replace(batch.ids, values=values))
    assert torch.equal(model(batch), model(older))
    values = values.clone()
    values[5] = (values[5] + 1) % 20
    assert not torch.equal(model(batch), model(replace(batch, ids=replace(batch.ids, values=values))))
    assert SMALL.build(histories(max_length=3)).config.length == 3


def test_no_sample_has_a_history() -> None:
    schema = histories()
    batch = history_batch(schema, [0, 0])
    model = SMALL.build(schema, Hashed(buckets=3))
    torch.testing.assert_close(model(batch).double(), plainly(model, batch), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise_adagrad", "adam"])
def test_packed_tables_learn_what_plain_ones_do(optimizer: str) -> None:
    schema = histories()
    batches = [history_batch(schema, LENGTHS, seed) for seed in range(3)]
    packed = trained(SMALL, schema, batches, optimizer=optimizer)
    same_parameters(packed, trained(SMALL, schema, batches, optimizer=optimizer, fused=False))


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_every_method_learns(method: object) -> None:
    schema = histories(2)
    batch = history_batch(schema, [3, 0, 5, 1] * 8)
    learns(replace(SMALL, dim=8, attention=(8,)), schema, batch, method, table_lr=0.1)  # cubic in its rows


def test_bf16_and_compiled() -> None:
    schema = histories()
    model = with_large_rows(SMALL.build(schema))
    batch = history_batch(schema, LENGTHS)
    looked_up = model.lookup(batch)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model.score(batch.dense, looked_up)
    torch.testing.assert_close(logits.float(), model(batch), rtol=0.1, atol=0.2)
    F.softplus(logits.float()).sum().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad.to_dense()).all() for p in model.parameters())
    compiled = torch.compile(model.score, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(batch.dense, looked_up), model.score(batch.dense, looked_up))


def test_sizes() -> None:
    model = DINConfig(dim=4, attention=(6,), top=(5,)).build(histories(1))
    attention = 4 * 8 * 6 + 6 + 6 + 6 + 1  # weights, biases and slopes; then the output
    top = (4 + 8 + 8 + 1) * 5 + 5 + 5 + 5 + 1
    assert num_dense_parameters(model) == attention + top


def test_data_that_has_no_history() -> None:
    with pytest.raises(ConfigError, match="din reads a user's last events: this data set has no sequence feature"):
        DINConfig().build(clicks(1, user=3, item=4))
    lonely = Feature(name="past", num_rows=4, unseen=3, kind="sequence")
    schema = Schema(label="click", dense=(), features=(Feature(name="item", num_rows=4, unseen=3), lonely))
    with pytest.raises(ConfigError, match=r"sequence 'past' has no target: din compares .* table 'past'"):
        DINConfig().build(schema)


def test_sequences_of_unequal_length_are_refused() -> None:
    schema = histories()
    batch = history_batch(schema, [2, 3])
    offsets = batch.ids.offsets.clone()
    offsets[1] = 1  # the second item of the first sample goes to the second
    with pytest.raises(DataError, match="sample 0 of the batch has 1 events in 'past_items' and 2 in 'past_cat"):
        SMALL.build(schema).check(Ids(batch.ids.values, offsets, 5))


def test_bad_settings() -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        DINConfig(length=0)
    with pytest.raises(ConfigError, match="must be 'prelu' or 'relu', not 'dice'"):
        DINConfig(activation="dice")
