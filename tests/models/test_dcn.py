"""DCN-v2: planted logits, the recursion written plainly, ranks, and MLPerf's shapes."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from holdall.common.errors import ConfigError
from holdall.data.batch import Batch, Ids
from holdall.models import DCNConfig, configuration
from holdall.models.dcn import CrossLayer
from tests.models.made_up import METHODS, click_batch, clicks, learns, num_dense_parameters, same_parameters, trained

ONE = Batch(torch.tensor([[4.0], [5.0]]), Ids(torch.tensor([[1, 2]]), None, 1), torch.zeros(2))


def planted(structure: str, top: tuple[int, ...]) -> torch.nn.Module:
    """x_0 = [x, e] with the row e of ids 1 and 2 being 2 and -3; x_1 = [x(e + 1) + x, e(x + 0) + e]."""
    model = DCNConfig(dim=1, cross_layers=1, top=top, structure=structure).build(clicks(1, C0=3))
    with torch.no_grad():
        model.bags.table("C0").weight.copy_(torch.tensor([[0.0], [2.0], [-3.0]]))
        model.cross[0].linear[0].weight.copy_(torch.tensor([[0.0, 1.0], [1.0, 0.0]]))
        model.cross[0].bias.copy_(torch.tensor([1.0, 0.0]))
    return model


def test_planted_logit() -> None:
    model = planted("stacked", ())
    with torch.no_grad():
        model.top[0].weight.copy_(torch.tensor([[1.0, 10.0]]))
        model.top[0].bias.fill_(0.5)
    assert model(ONE).tolist() == [4 * 3 + 4 + 10 * (2 * 4 + 2) + 0.5, 5 * -2 + 5 + 10 * (-3 * 5 - 3) + 0.5]


def test_planted_logit_in_parallel() -> None:
    """The deep part reads x_0, not x_1: relu(x + e) beside [x_1]."""
    model = planted("parallel", (1,))
    with torch.no_grad():
        model.deep[0].weight.copy_(torch.tensor([[1.0, 1.0]]))
        model.deep[0].bias.fill_(-3.0)
        model.top[0].weight.copy_(torch.tensor([[1.0, 10.0, 100.0]]))
        model.top[0].bias.fill_(0.5)
    assert model(ONE).tolist() == [16 + 100 + 100 * 3 + 0.5, -5 - 180 + 100 * 0 + 0.5]


def test_layers_multiply_with_the_input_not_with_each_other() -> None:
    schema = clicks(2, user=5, item=7)
    model = DCNConfig(dim=3, cross_layers=3, top=(4,)).build(schema)
    batch = click_batch(schema)
    x0 = torch.cat([batch.dense, model.bags(batch.ids).flatten(1)], dim=1)
    x = x0
    for layer in model.cross:
        weight, bias = layer.linear[0].weight, layer.bias
        x = torch.stack([x0[b] * (weight @ x[b] + bias) + x[b] for b in range(len(batch))])
    torch.testing.assert_close(model(batch), model.top(x).squeeze(1))


def test_a_rank_is_a_product_of_two_matrices() -> None:
    low, full = CrossLayer(6, 2), CrossLayer(6, None)
    with torch.no_grad():
        low.bias.uniform_()
        full.bias.copy_(low.bias)
        down, up = (linear.weight for linear in low.linear)
        assert (down.shape, up.shape) == ((2, 6), (6, 2))
        full.linear[0].weight.copy_(up @ down)
    x0, x = torch.rand(2, 5, 6)
    torch.testing.assert_close(low(x0, x), full(x0, x))


def test_the_mlperf_model_has_the_published_layers() -> None:
    rows = {f"C{i}": 3 for i in range(26)}
    model = configuration("dcn-mlperf").build(clicks(13, **rows))
    width = 27 * 128
    bottom = sum(a * b + b for a, b in pairwise([13, 512, 256, 128]))
    cross = 3 * (2 * width * 512 + width)
    deep = sum(a * b + b for a, b in pairwise([width, 1024, 1024, 512, 256, 1]))
    assert num_dense_parameters(model) == bottom + cross + deep
    assert model.bags.dim == 128


def test_no_dense_columns() -> None:
    schema = clicks(0, user=5, item=7)
    for bottom in (None, (8,)):
        model = DCNConfig(dim=3, bottom=bottom, top=(4,)).build(schema)
        assert model.cross[0].bias.numel() == 2 * 3
        assert model(click_batch(schema)).shape == (6,)


@pytest.mark.parametrize("structure", ["stacked", "parallel"])
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_every_method_learns(method: object, structure: str) -> None:
    schema = clicks(2, user=40, item=64)
    learns(
        DCNConfig(dim=8, top=(8,), rank=4, bottom=(4,), structure=structure), schema, click_batch(schema, 32), method
    )


def test_packed_tables_learn_what_plain_ones_do() -> None:
    schema = clicks(2, user=5, item=7)
    batches = [click_batch(schema, seed=seed) for seed in range(3)]
    config = DCNConfig(dim=3, top=(4,), structure="parallel")
    same_parameters(trained(config, schema, batches), trained(config, schema, batches, fused=False))


def test_bad_settings() -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        DCNConfig(cross_layers=0)
    with pytest.raises(ConfigError, match="at least 1"):
        DCNConfig(rank=0)
    with pytest.raises(ConfigError, match="'stacked' or 'parallel'"):
        DCNConfig(structure="sideways")
