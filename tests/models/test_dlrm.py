"""DLRM: planted logits, the shapes of the papers, and the reference interaction."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from holdall.common.errors import ConfigError
from holdall.data.batch import Batch, Ids
from holdall.data.schema import DenseColumn, Feature, Schema
from holdall.models import CONFIGURATIONS, DLRMConfig, configuration


def schema(num_dense: int, *rows: int) -> Schema:
    return Schema(
        label="click",
        dense=tuple(DenseColumn(name=f"I{i}") for i in range(num_dense)),
        features=tuple(Feature(name=f"C{i}", num_rows=n, unseen=n - 1) for i, n in enumerate(rows)),
    )


def batch(num_dense: int, *rows: int, size: int = 5) -> Batch:
    generator = torch.Generator().manual_seed(0)
    values = torch.stack([torch.randint(n, (size,), generator=generator) for n in rows])
    return Batch(
        dense=torch.rand(size, num_dense, generator=generator),
        ids=Ids(values, None, len(rows)),
        label=torch.ones(size),
    )


def count(model: torch.nn.Module) -> int:
    return sum(p.numel() for name, p in model.named_parameters() if not name.startswith("bags"))


def test_the_criteo_kaggle_model_has_the_published_layers() -> None:
    model = configuration("rmc2").build(schema(13, *[3] * 26))
    sizes = [13, 512, 256, 64, 16]
    bottom = sum(a * b + b for a, b in pairwise(sizes))
    sizes = [16 + 27 * 26 // 2 + 1, 512, 256, 1]  # one column of zeros makes the width a multiple of 8
    top = sum(a * b + b for a, b in pairwise(sizes))
    assert count(model) == bottom + top


@pytest.mark.parametrize("name", [n for n, config in CONFIGURATIONS.items() if config.family == "dlrm"])
def test_every_configuration_scores_a_batch(name: str) -> None:
    logits = configuration(name).build(schema(13, 3, 4))(batch(13, 3, 4))
    assert logits.shape == (5,)
    assert torch.isfinite(logits).all()


def test_planted_logit() -> None:
    """With hand-set weights the logit is x + e + x*e for one dense value x and one row e."""
    model = DLRMConfig(dim=1, bottom=(), top=()).build(schema(1, 3))
    with torch.no_grad():
        model.bottom[0].weight.fill_(1.0)
        model.bottom[0].bias.zero_()
        model.bags.table("C0").weight.copy_(torch.tensor([[0.0], [2.0], [-3.0]]))
        model.top[0].weight.zero_()
        model.top[0].weight[0, :2] = torch.tensor([1.0, 10.0])
        model.top[0].bias.fill_(0.5)
    given = Batch(torch.tensor([[4.0], [5.0]]), Ids(torch.tensor([[1, 2]]), None, 1), torch.zeros(2))
    assert model(given).tolist() == [4 + 10 * 4 * 2 + 0.5, 5 + 10 * 5 * -3 + 0.5]


def test_concat_interaction() -> None:
    model = DLRMConfig(dim=4, bottom=(8,), top=(8,), interaction="concat").build(schema(2, 3, 4))
    assert model.top[0].in_features == 4 * 3
    assert model(batch(2, 3, 4)).shape == (5,)


def test_no_dense_columns() -> None:
    model = DLRMConfig(dim=4, top=(8,)).build(schema(0, 3, 4))
    assert model.bottom is None
    assert model(batch(0, 3, 4)).shape == (5,)


def test_features_that_share_a_table() -> None:
    features = tuple(Feature(name=name, num_rows=9, unseen=8, table="item") for name in ("seen", "target"))
    model = DLRMConfig(dim=4).build(Schema(label="click", dense=(), features=features))
    assert [name for name, _ in model.named_parameters() if name.startswith("bags")] == ["bags.tables.item.weight"]


def test_initial_weights_depend_on_the_generator_only() -> None:
    models = [
        DLRMConfig(dim=4).build(schema(2, 3), generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)
    ]
    weights = [torch.cat([p.detach().flatten() for p in model.parameters()]) for model in models]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_bad_settings() -> None:
    with pytest.raises(ConfigError, match="unknown model 'dlmr' \\(did you mean 'dlrm'"):
        configuration("dlmr")
    with pytest.raises(ConfigError, match="at least 1"):
        DLRMConfig(dim=0)
    with pytest.raises(ConfigError, match="'dot' or 'concat'"):
        DLRMConfig(interaction="sum")
