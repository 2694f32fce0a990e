"""`compress`: the tables of any model are replaced, keep their meaning, and stay unchanged after an error."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from holdall import suggest
from holdall.common.errors import ConfigError
from holdall.data.batch import Ids
from holdall.embedding.bags import EmbeddingBags
from holdall.embedding.compress import compress
from holdall.optim.config import OptimizerConfig
from holdall.optim.optimizers import Optimizers
from holdall.tables import Dense, Frobenius, Hashed, Table, TensorTrain


class Foreign(nn.Module):
    """A model that knows nothing of Holdall."""

    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(5000, 16, padding_idx=3)
        self.encoder = nn.ModuleDict({"goods": nn.EmbeddingBag(8000, 16, mode="mean", include_last_offset=True)})
        self.small = nn.Embedding(10, 16)
        self.head = nn.Linear(48, 1)

    def forward(self, users: torch.Tensor, items: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        vectors = [self.users(users), self.encoder["goods"](items, offsets), self.small(users % 10)]
        return self.head(torch.cat(vectors, dim=1)).squeeze(1)


USERS, ITEMS, OFFSETS = torch.tensor([0, 4999, 3]), torch.tensor([7, 7, 7999, 1]), torch.tensor([0, 2, 2, 4])


def test_a_foreign_model_within_a_budget() -> None:
    model = Foreign()
    before = sum(model.get_submodule(name).weight.nbytes for name in ("users", "encoder.goods", "small"))
    report = compress(model, budget="1/20", method="hashed")
    assert [line.name for line in report.tables] == ["users", "encoder.goods"]
    assert report.bytes_before == before
    assert 0.8 * before / 20 < report.bytes_after <= before / 20
    assert "encoder.goods" in str(report)
    assert isinstance(model.small, nn.Embedding)
    table = model.encoder["goods"]
    assert isinstance(table, Table)
    assert (table.mode, table.include_last_offset) == ("mean", True)
    model(USERS, ITEMS, OFFSETS).sum().backward()
    Optimizers(model, OptimizerConfig(name="sgd")).step()


def test_meaning_is_kept() -> None:
    """Fitting dense rows into dense tables is lossless, so every output must stay as it was."""
    model = Foreign()
    expected = model(USERS, ITEMS, OFFSETS)
    report = compress(model, method=Dense(dtype="float32"), fit=True)
    assert len(report.tables) == 2
    torch.testing.assert_close(model(USERS, ITEMS, OFFSETS), expected)
    assert not model.users(torch.tensor([[3]])).any()
    assert model.users(torch.tensor([[1, 2], [3, 4]])).shape == (2, 2, 16)


def test_fitting_trained_weights_reports_the_error() -> None:
    planted = Frobenius(rank=4, terms=1).build(2000, 16, init_std=1.0).materialize()
    model = nn.ModuleDict({"t": nn.EmbeddingBag.from_pretrained(planted, freeze=False)})
    report = compress(model, method=TensorTrain(rank=64), fit=True)
    (line,) = report.tables
    assert 0 <= line.error < 1
    found = model["t"].materialize()
    assert (found - planted).norm() / planted.norm() == pytest.approx(line.error, abs=1e-3)


def test_one_method_a_table() -> None:
    model = Foreign()
    compress(model, method={"encoder.goods": Hashed(buckets=100)})
    assert isinstance(model.users, nn.Embedding)
    assert model.encoder["goods"].num_bytes() == 100 * 16 * 4


def test_our_own_bags() -> None:
    bags = EmbeddingBags.build({"a": 5000, "b": 20, "c": 3000}, 8)
    report = compress(bags, budget=0.1)
    assert {line.name for line in report.tables} == {"a", "c"}
    assert bags.num_bytes() == report.bytes_after <= 0.1 * report.bytes_before
    assert [list(pack.tables) for pack in bags.packs] == [["b"]]
    assert bags(Ids(torch.tensor([[4999], [19], [0]]), None, 3)).shape == (1, 3, 8)


def test_fresh_rows_have_the_deviation_of_the_old() -> None:
    model = nn.ModuleDict({"t": nn.Embedding(4000, 32)})
    nn.init.normal_(model["t"].weight, std=0.37)
    compress(model, budget=0.1)
    assert float(model["t"].table.materialize().std()) == pytest.approx(0.37, rel=0.1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "how small"),
        ({"budget": "10B"}, "too small for these 3 tables"),
        ({"budget": "10 parsecs"}, "is not a size"),
        ({"budget": 0.1, "method": "tensor_rain"}, "did you mean 'tensor_train'"),
        ({"budget": 0.1, "method": Hashed(buckets=3)}, "not both"),
        ({"method": {"item": Dense()}}, "no table 'item'"),
        ({"budget": 0.1, "min_rows": 10**6}, "lower min_rows"),
    ],
)
def test_refusals_change_nothing(options: dict[str, object], message: str) -> None:
    model = Foreign()
    with pytest.raises(ConfigError, match=message):
        compress(model, **options)
    assert isinstance(model.users, nn.Embedding)
    assert isinstance(model.encoder["goods"], nn.EmbeddingBag)


def test_models_that_cannot_be_compressed() -> None:
    with pytest.raises(ConfigError, match=r"has no nn\.Embedding"):
        compress(nn.Linear(3, 3), budget=0.1)
    with pytest.raises(ConfigError, match="max_norm"):
        compress(nn.ModuleDict({"t": nn.Embedding(5000, 4, max_norm=1.0)}), budget=0.1)
    tied = nn.ModuleDict({"embed": nn.Embedding(5000, 4), "out": nn.Linear(4, 5000, bias=False)})
    tied["out"].weight = tied["embed"].weight
    with pytest.raises(ConfigError, match="shares its weight"):
        compress(tied, budget=0.1)


def test_suggested_methods_fill_the_budget() -> None:
    rows = {"tiny": 10, "medium": 20_000, "large": 3_000_000, "huge": 7_912_889}
    for dim in (16, 32, 64, 128):
        dense = sum(rows.values()) * dim * 4
        for share in (1 / 4, 1 / 20, 1 / 100):
            methods = suggest(rows, dim, share)
            taken = sum(method.num_bytes(rows[name], dim) for name, method in methods.items())
            assert 0.5 * share * dense < taken <= share * dense
            assert isinstance(methods["tiny"], Dense)
    assert suggest(rows, 16, 1.0) == dict.fromkeys(rows, Dense())
