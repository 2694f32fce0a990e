"""TBSM: planted attention, the equations written plainly for one sample at a time, padding, and the tables'
gradients."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from holdall.common.errors import ConfigError, DataError
from holdall.data.batch import Batch, Ids
from holdall.data.schema import Feature, Schema
from holdall.kernels.interaction import dot_interaction_reference
from holdall.models import TBSM, TBSMConfig, configuration
from holdall.models.histories import FeatureRoles, last_places
from holdall.models.tbsm import attend
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

SMALL = TBSMConfig(dim=4, event=(6, 3), top=(5,), length=4)
LENGTHS = [2, 0, 4, 9, 1]


def samples_of(batch: Batch) -> list[list[list[int]]]:
    """Ids by sample and feature, as plain lists."""
    found = []
    for b in range(len(batch)):
        bags = [batch.ids.bag(f) for f in range(batch.ids.num_features)]
        found.append([values[int(offsets[b]) : int(offsets[b + 1])].tolist() for values, offsets, _ in bags])
    return found


def plainly(model: TBSM, batch: Batch) -> Tensor:
    """The equations of the module's docstring, a sample and an event at a time."""
    rows = {name: model.bags.table(name).materialize() for name in ("user", "item", "category")}
    logits = []
    for b, (past_items, user, item, past_categories, category) in enumerate(samples_of(batch)):
        below = [] if model.bottom is None else [model.bottom(batch.dense[b])]

        def vector(item: int, category: int, below: list[Tensor] = below, user: list[int] = user) -> Tensor:
            vectors = [rows["item"][item], rows["category"][category], rows["user"][user[0]], *below]
            made = model.event(dot_interaction_reference(torch.stack(vectors)[None])[0])
            return made / made.norm()

        target = vector(item[0], category[0])
        context = torch.zeros_like(target)
        events = list(zip(past_items, past_categories, strict=True))[-model.config.length :]
        if events:
            past = [vector(*event) for event in events]
            scores = torch.stack([(model.attention @ v) @ (model.attention @ target) for v in past])
            context = sum(a * v for a, v in zip(scores.softmax(0), past, strict=True))
        logits.append(model.top(torch.cat([context, target])))
    return torch.cat(logits)


@pytest.mark.parametrize("num_dense", [0, 2])
def test_equals_the_equations(num_dense: int) -> None:
    schema = histories(num_dense)
    model = SMALL.build(schema)
    with torch.no_grad():
        for name in ("user", "item", "category"):  # fresh rows are tiny: everything would be decided by the biases
            model.bags.table(name).weight.normal_()
    batch = history_batch(schema, LENGTHS)
    expected = plainly(model, batch)
    torch.testing.assert_close(model(batch), expected)
    with torch.no_grad():
        torch.testing.assert_close(model(batch), expected)
    assert expected.std() > 0.01


def test_planted_attention() -> None:
    """Scores of log 3 and 0: weights 3/4 and 1/4; the third event does not exist, the second sample has none."""
    history = torch.tensor([[[math.log(3.0), 2.0], [0.0, 4.0], [9.0, 9.0]]]).repeat(2, 1, 1)
    target = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    exists = torch.tensor([[True, True, False], [False, False, False]])
    context = attend(history, target, exists, torch.eye(2))
    torch.testing.assert_close(context[0], torch.tensor([0.75 * math.log(3.0), 0.75 * 2 + 0.25 * 4]))
    assert context[1].tolist() == [0.0, 0.0]
    # A enters twice: with A = 2 the scores are 4 times as large.
    weight = torch.tensor([4 * math.log(3.0), 0.0]).softmax(0)
    torch.testing.assert_close(attend(history, target, exists, 2 * torch.eye(2))[0], weight @ history[0, :2])


def test_places_of_the_last_events() -> None:
    places, exists = last_places(torch.tensor([0, 2, 2, 7]), 3)
    assert places.tolist() == [[-1, 0, 1], [-1, -1, -1], [4, 5, 6]]
    assert exists.tolist() == [[False, True, True], [False] * 3, [True] * 3]


def test_only_the_last_events_count() -> None:
    schema = histories()
    model = SMALL.build(schema)
    batch = history_batch(schema, [9])
    values = batch.ids.values.clone()
    values[:5] = (values[:5] + 1) % 20  # the five oldest of nine items
    older = replace(batch, ids=replace(batch.ids, values=values))
    assert torch.equal(model(batch), model(older))
    values = values.clone()
    values[5] = (values[5] + 1) % 20
    assert not torch.equal(model(batch), model(replace(batch, ids=replace(batch.ids, values=values))))


def test_the_limit_of_the_data_bounds_the_history() -> None:
    assert SMALL.build(histories(max_length=3)).config.length == 3
    assert SMALL.build(histories(max_length=50)).config.length == 4
    assert SMALL.build(histories()).config.length == 4


def test_no_sample_has_a_history() -> None:
    schema = histories()
    batch = history_batch(schema, [0, 0])
    model = SMALL.build(schema, Hashed(buckets=3))
    torch.testing.assert_close(model(batch), plainly(model, batch))
    same_parameters(trained(SMALL, schema, [batch]), trained(SMALL, schema, [batch], fused=False))


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise_adagrad", "adam"])
def test_packed_tables_learn_what_plain_ones_do(optimizer: str) -> None:
    """Sequences and targets share tables: their gradients, from three lookups a table, must all arrive."""
    schema = histories()
    batches = [history_batch(schema, LENGTHS, seed) for seed in range(3)]
    packed = trained(SMALL, schema, batches, optimizer=optimizer)
    same_parameters(packed, trained(SMALL, schema, batches, optimizer=optimizer, fused=False))


def test_a_row_that_only_a_history_names_learns() -> None:
    schema = histories()
    batch = history_batch(schema, [2])
    values = batch.ids.values
    item = int(values[0])
    values[3] = (item + 1) % 20  # the target's item
    before = SMALL.build(schema, generator=torch.Generator().manual_seed(0)).double().bags.table("item").materialize()
    after = trained(SMALL, schema, [batch], optimizer="sgd").bags.table("item").materialize()
    moved = (after != before).any(1).nonzero().flatten().tolist()
    assert set(moved) == {item, int(values[1]), int(values[3])}


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_every_method_learns(method: object) -> None:
    schema = histories(2)
    batch = history_batch(schema, [3, 0, 5, 1] * 8)
    learns(replace(SMALL, dim=8, event=(8, 8)), schema, batch, method)


@pytest.mark.slow
def test_bf16_and_compiled() -> None:
    schema = histories()
    model = SMALL.build(schema)
    batch = history_batch(schema, LENGTHS)
    looked_up = model.lookup(batch)
    compiled = torch.compile(model.score, backend="aot_eager")
    torch.testing.assert_close(compiled(batch.dense, looked_up), model.score(batch.dense, looked_up))
    with torch.autocast("cpu", torch.bfloat16):
        logits = model.score(batch.dense, looked_up)
    torch.testing.assert_close(logits.float(), model(batch), rtol=0.1, atol=0.1)
    F.softplus(logits.float()).sum().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad.to_dense()).all() for p in model.parameters())


def test_the_taobao_model_has_the_published_layers() -> None:
    """Dense 1-16; three tables; 22-15-15 an event, the 22 with two zeros more; 30-60-1 above."""
    model = configuration("rmc1").build(histories(1))
    bottom, event, top = 1 * 16 + 16, 24 * 15 + 15 + 15 * 15 + 15, 30 * 60 + 60 + 60 + 1
    assert num_dense_parameters(model) == bottom + event + 15 * 15 + top
    assert model.event[0].in_features == 24
    assert model.top[0].in_features == 30
    assert model.config.length == 20


def test_roles() -> None:
    assert FeatureRoles.of(histories(), "tbsm") == FeatureRoles(sample=(1,), target=(2, 4), history=(0, 3))


def test_a_history_and_nothing_else() -> None:
    """One vector an event: no pairs, no user, no dense values."""
    past = Feature(name="past", num_rows=20, unseen=19, kind="sequence", table="item")
    schema = Schema(label="click", dense=(), features=(Feature(name="item", num_rows=20, unseen=19), past))
    learns(replace(SMALL, dim=8), schema, history_batch(schema, [3, 0, 5, 1] * 8))


def test_data_that_has_no_history() -> None:
    with pytest.raises(ConfigError, match="has no sequence feature"):
        TBSMConfig().build(clicks(1, user=3, item=4))
    lonely = Feature(name="past", num_rows=4, unseen=3, kind="sequence")
    schema = Schema(label="click", dense=(), features=(Feature(name="item", num_rows=4, unseen=3), lonely))
    with pytest.raises(ConfigError, match=r"sequence 'past' has no target: .* of the same table 'past'"):
        TBSMConfig().build(schema)
    other = replace(lonely, table="item", num_rows=5)
    with pytest.raises(ConfigError, match=r"'past' gives table 'item' 5 rows, another feature .* gives it 4"):
        TBSMConfig().build(replace(schema, features=(schema.features[0], other)))


def test_sequences_of_unequal_length_are_refused() -> None:
    schema = histories()
    batch = history_batch(schema, [2, 3])
    offsets = batch.ids.offsets.clone()
    offsets[1] = 1  # the second item of the first sample goes to the second
    wrong = Ids(batch.ids.values, offsets, 5)
    model = SMALL.build(schema)
    for look in (lambda: model.check(wrong), lambda: model.lookup(replace(batch, ids=wrong))):
        with pytest.raises(DataError, match="sample 0 of the batch has 1 events in 'past_items' and 2 in 'past_cat"):
            look()


def test_bad_settings() -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        TBSMConfig(length=0)
    with pytest.raises(ConfigError, match="at least one layer"):
        TBSMConfig(event=())
