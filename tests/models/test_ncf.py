"""NCF: planted logits of GMF, MLP and NeuMF, the sizes of the paper, and data that is not pairs."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from holdall.common.errors import ConfigError, IdError
from holdall.data.batch import Batch, Ids
from holdall.models import NCFConfig, configuration
from tests.models.made_up import (
    METHODS,
    click_batch,
    clicks,
    histories,
    history_batch,
    learns,
    num_dense_parameters,
    same_parameters,
    trained,
)

PAIRS = clicks(0, user=3, item=4)
ONE = Batch(torch.zeros(2, 0), Ids(torch.tensor([[1, 2], [3, 3]]), None, 2), torch.zeros(2))


def with_rows(config: NCFConfig, users: list[list[float]], items: list[list[float]]) -> torch.nn.Module:
    """A model whose users 1 and 2, and item 3, have the given rows."""
    model = config.build(PAIRS)
    with torch.no_grad():
        model.bags.table("user").weight[1:] = torch.tensor(users)
        model.bags.table("item").weight[3:] = torch.tensor(items)
    return model


def test_planted_gmf() -> None:
    model = with_rows(NCFConfig(parts="gmf", factors=2), [[1.0, 2.0], [-1.0, 3.0]], [[5.0, 7.0]])
    with torch.no_grad():
        model.output[0].weight.copy_(torch.tensor([[1.0, 10.0]]))
        model.output[0].bias.fill_(0.5)
    assert model(ONE).tolist() == [5 + 10 * 14 + 0.5, -5 + 10 * 21 + 0.5]


def test_planted_neumf() -> None:
    """Factors 1: the first number of a row is multiplied, the other two go through a tower 4-2-1 that adds them."""
    model = with_rows(NCFConfig(factors=1), [[2.0, 1.0, 1.0], [3.0, -9.0, 1.0]], [[5.0, 2.0, 3.0]])
    with torch.no_grad():
        for linear in (model.tower[0], model.tower[2]):
            linear.weight.fill_(1.0)
            linear.bias.zero_()
        model.output[0].weight.copy_(torch.tensor([[1.0, 100.0]]))
        model.output[0].bias.fill_(0.5)
    # Tower: relu of the sum in both first units, relu of their sum after them: twice relu(the sum of the four numbers).
    assert model(ONE).tolist() == [10 + 100 * 2 * 7 + 0.5, 15 + 100 * 2 * 0 + 0.5]


def test_mlp_reads_both_rows_whole() -> None:
    model = NCFConfig(parts="mlp", factors=2).build(PAIRS)
    user, item = model.bags.table("user").weight[1], model.bags.table("item").weight[3]
    expected = model.output(model.tower(torch.cat([user, item])))
    torch.testing.assert_close(model(ONE)[:1], expected)


@pytest.mark.parametrize(
    ("name", "dim", "tower"),
    [("neumf", 8 + 16, (32, 16, 8)), ("ncf", 8 + 16, (32, 16, 8)), ("gmf", 8, ()), ("ncf-mlp", 16, (32, 16, 8))],
)
def test_the_papers_sizes_at_8_factors(name: str, dim: int, tower: tuple[int, ...]) -> None:
    config = configuration(name)
    assert (config.dim, config.tower) == (dim, tower)
    model = config.build(PAIRS)
    read = 8 * (2 if name in ("ncf", "neumf") else 1)
    assert num_dense_parameters(model) == sum(a * b + b for a, b in pairwise(tower)) + read + 1
    assert model.bags.dim == dim


def test_the_public_codes_tower() -> None:
    """Its default at 8 factors is 64-32-16-8, and MLPerf's at 64 factors 256-128-64."""
    assert NCFConfig(num_layers=4).tower == (64, 32, 16, 8)
    assert NCFConfig(factors=64).tower == (256, 128, 64)
    assert NCFConfig(factors=64).dim == 64 + 128


@pytest.mark.parametrize("parts", ["neumf", "gmf", "mlp"])
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_every_method_learns(method: object, parts: str) -> None:
    schema = clicks(0, user=40, item=64)
    learns(NCFConfig(factors=4, parts=parts), schema, click_batch(schema, 64), method)


def test_packed_tables_learn_what_plain_ones_do() -> None:
    batches = [click_batch(PAIRS, seed=seed) for seed in range(3)]
    config = NCFConfig(factors=2)
    same_parameters(trained(config, PAIRS, batches), trained(config, PAIRS, batches, fused=False))


def test_other_features_are_not_read() -> None:
    """In data with attributes, histories and dense columns the model is the one of the pairs alone."""
    schema = histories(num_dense=1)
    config = NCFConfig(factors=2)
    batch = history_batch(schema, [2, 0, 3])
    model = config.build(schema, generator=torch.Generator().manual_seed(0))
    assert list(model.state_dict())[:2] == ["bags.tables.user.weight", "bags.tables.item.weight"]
    assert config.table_rows(schema) == {"user": 9, "item": 20}
    users, items = batch.ids.bag(1)[0], batch.ids.bag(2)[0]
    pairs = config.build(clicks(0, user=9, item=20), generator=torch.Generator().manual_seed(0))
    expected = pairs(Batch(torch.zeros(3, 0), Ids(torch.stack([users, items]), None, 2), torch.zeros(3)))
    assert torch.equal(model(batch), expected)
    wider = clicks(1, age=5, item=4, user=3)
    model = config.build(wider)
    model.load_state_dict(config.build(PAIRS).state_dict())
    swapped = Batch(torch.zeros(2, 1), Ids(torch.tensor([[0, 9], [3, 3], [1, 2]]), None, 3), torch.zeros(2))
    model.check(swapped.ids)  # an age that is no row of a table does not matter
    plain = config.build(PAIRS)
    plain.load_state_dict(model.state_dict())
    assert torch.equal(model(swapped), plain(ONE))


def test_an_id_out_of_range_is_named() -> None:
    model = NCFConfig().build(clicks(1, age=5, item=4, user=3))
    with pytest.raises(IdError, match="feature 'item' has id 4 but its table has 4 rows"):
        model.check(Ids(torch.tensor([[0], [4], [2]]), None, 3))


def test_data_without_pairs() -> None:
    with pytest.raises(ConfigError, match="no feature named 'item'"):
        NCFConfig().build(clicks(0, user=3, age=4))
    assert NCFConfig(item="age").build(clicks(0, user=3, age=4)).positions == [0, 1]
    with pytest.raises(ConfigError, match="one id of a user and one of an item, 'past_items' has several"):
        NCFConfig(item="past_items").build(histories())


def test_bad_settings() -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        NCFConfig(factors=0)
    with pytest.raises(ConfigError, match="num_layers of 2 or more, not 1"):
        NCFConfig(num_layers=1)
    with pytest.raises(ConfigError, match="'neumf', 'gmf' or 'mlp'"):
        NCFConfig(parts="sum")
