"""DeepFM: the pairs written plainly in float64, planted logits, gradients, tables of every method."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from holdall.common.errors import ConfigError
from holdall.data.batch import Batch, Ids
from holdall.models import DeepFM, DeepFMConfig
from holdall.models.deepfm import pairwise_products
from tests.models.made_up import METHODS, click_batch, clicks, learns, num_dense_parameters, same_parameters, trained

SMALL = DeepFMConfig(dim=4, top=(5, 3))


def plainly(model: DeepFM, batch: Batch) -> Tensor:
    """The equations of the module's docstring in float64, a sample and a pair of features at a time."""
    tables = [model.bags.table(name).materialize().double() for name in model.bags.features.values()]
    weight, bias = (tensor.double() for tensor in model.output_layer.parameters())
    logits = []
    for b in range(len(batch)):
        rows = [table[int(batch.ids.values[f, b])] for f, table in enumerate(tables)]
        dense = batch.dense[b].double()
        first = sum(row[-1] for row in rows)
        second = sum(rows[f][:-1] @ rows[g][:-1] for g in range(len(rows)) for f in range(g))
        x = torch.cat([*(row[:-1] for row in rows), dense])
        for layer in model.deep[::2]:
            x = (layer.weight.double() @ x + layer.bias.double()).clamp(min=0)
        logits.append(weight[0] @ torch.cat([torch.stack([first, second]), dense, x]) + bias[0])
    return torch.stack(logits)


@pytest.mark.parametrize("num_dense", [0, 2])
def test_equals_the_equations(num_dense: int) -> None:
    schema = clicks(num_dense, user=5, item=7, hour=3)
    model = SMALL.build(schema)
    batch = click_batch(schema)
    with torch.no_grad():
        for name in ("user", "item", "hour"):
            model.bags.table(name).weight.normal_()
        model.output_layer.weight.normal_()
        expected = plainly(model, batch)
        torch.testing.assert_close(model(batch).double(), expected, rtol=1e-5, atol=1e-5)
    assert expected.std() > 0.1


def test_gradients() -> None:
    schema = clicks(2, user=5, item=7)
    model = SMALL.build(schema).double()
    batch = click_batch(schema)
    vectors = torch.randn(6, 2, 4, dtype=torch.float64, requires_grad=True)
    dense = batch.dense.double().requires_grad_()
    assert torch.autograd.gradcheck(model.score, (dense, vectors))


def test_planted_logit() -> None:
    """Vectors 2 and -3 with weights 10 and 20, and no deep network: 0.5 + 30 + 2 * -3 + 7 * 4."""
    model = DeepFMConfig(dim=2, top=(1,)).build(clicks(1, a=2, b=2))
    with torch.no_grad():
        model.bags.table("a").weight.copy_(torch.tensor([[0.0, 0.0], [2.0, 10.0]]))
        model.bags.table("b").weight.copy_(torch.tensor([[-3.0, 20.0], [0.0, 0.0]]))
        assert model.output_layer.weight[0, :2].tolist() == [1.0, 1.0]
        model.output_layer.weight[0, 2:] = torch.tensor([7.0, 0.0])
        model.output_layer.bias.fill_(0.5)
    batch = Batch(torch.tensor([[4.0]]), Ids(torch.tensor([[1], [0]]), None, 2), torch.zeros(1))
    assert model(batch).tolist() == [0.5 + 30 - 6 + 28]


def test_pairs_of_many_features() -> None:
    vectors = torch.randn(3, 9, 5, dtype=torch.float64)
    expected = sum((vectors[:, f] * vectors[:, g]).sum(1) for g in range(9) for f in range(g))
    torch.testing.assert_close(pairwise_products(vectors), expected)


def test_sizes() -> None:
    model = DeepFMConfig(dim=16, top=(8,)).build(clicks(3, user=5, item=7))
    assert num_dense_parameters(model) == (2 * 15 + 3) * 8 + 8 + (2 + 3 + 8) + 1
    assert model.bags.num_bytes() == 4 * 16 * (5 + 7)
    none = DeepFMConfig(dim=4, top=()).build(clicks(0, user=5, item=7))
    assert none(click_batch(clicks(0, user=5, item=7))).shape == (6,)


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_every_method_learns(method: object) -> None:
    schema = clicks(2, user=40, item=64)
    learns(DeepFMConfig(dim=8, top=(8,)), schema, click_batch(schema, 32), method)


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise_adagrad", "adam"])
def test_packed_tables_learn_what_plain_ones_do(optimizer: str) -> None:
    schema = clicks(2, user=5, item=7)
    batches = [click_batch(schema, seed=seed) for seed in range(3)]
    packed = trained(SMALL, schema, batches, optimizer=optimizer)
    same_parameters(packed, trained(SMALL, schema, batches, optimizer=optimizer, fused=False))


@pytest.mark.parametrize("vectors", [torch.float32, torch.bfloat16])
def test_pairs_are_summed_in_float32_under_autocast(vectors: torch.dtype) -> None:
    """The difference of two large squares would be lost in bf16."""
    schema = clicks(1, **{f"C{i}": 3 for i in range(30)})
    model = SMALL.build(schema)
    batch = click_batch(schema)
    looked_up = torch.full((6, 30, 4), 1.0, dtype=vectors)
    with torch.no_grad():
        model.output_layer.weight[:, 2:] = 0
        model.output_layer.bias.zero_()
        with torch.autocast("cpu", torch.bfloat16):
            logits = model.score(batch.dense, looked_up)
    torch.testing.assert_close(logits.float(), torch.full((6,), 30 + 3 * 435.0), rtol=0.005, atol=0)


def test_bad_settings() -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        DeepFMConfig(top=(0,))
    with pytest.raises(ConfigError, match="dim must be 2 or more, not 1"):
        DeepFMConfig(dim=1)
