"""`compress`: the tables of any model are replaced, keep their meaning, and stay unchanged after an error."""

from __future__ import annotations

import warnings

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
from holdall.tables import Dense, Frobenius, Hashed, Method, Quantized, Table, TensorTrain


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


@pytest.mark.parametrize("method", ["hashed", "robe", "auto", "memcom", "mixed_dimension"])
def test_gradients_stay_of_the_kind_they_were(method: str) -> None:
    ids = torch.tensor([[0, 4999], [7, 7]])
    for sparse in (False, True):
        modules = {"users": nn.Embedding(5000, 16, sparse=sparse), "goods": nn.EmbeddingBag(5000, 16, sparse=sparse)}
        model = nn.ModuleDict(modules)
        modules.clear()
        compress(model, budget=0.3, method=method)
        assert model["users"].sparse == model["goods"].sparse == sparse
        (model["users"](ids).sum() + model["goods"](ids).sum()).backward()
        row_parameters = [
            parameter
            for table in (model["users"].table, model["goods"])
            for parameter in table.row_parameters().values()
        ]
        assert row_parameters
        assert all(parameter.grad.is_sparse == sparse for parameter in row_parameters)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        kind = torch.optim.AdamW if not sparse else torch.optim.SparseAdam
        kind(row_parameters if sparse else model.parameters(), lr=0.1).step()
        assert any(not torch.equal(*pair) for pair in zip(model.parameters(), before, strict=True))


def test_frozen_tables_stay_frozen() -> None:
    rows = torch.randn(5000, 8)
    model = nn.ModuleDict(
        {
            "frozen": nn.Embedding.from_pretrained(rows.clone()),
            "frozen bag": nn.EmbeddingBag.from_pretrained(rows.clone()),
            "trained": nn.Embedding(5000, 8),
        }
    )
    compress(model, budget=0.5, method="mixed_dimension", fit=True)
    assert not any(p.requires_grad for name in ("frozen", "frozen bag") for p in model[name].parameters())
    assert all(p.requires_grad for p in model["trained"].parameters())
    ids = torch.tensor([[1, 2]])
    assert not model["frozen"](ids).requires_grad
    assert not model["frozen bag"](ids).requires_grad
    assert model["trained"](ids).requires_grad


def test_a_frozen_table_gets_no_codes_that_train() -> None:
    model = nn.ModuleDict({"t": nn.Embedding.from_pretrained(torch.randn(5000, 8))})
    with pytest.raises(ConfigError, match="t is frozen, but"):
        compress(model, method=Quantized(rounding="stochastic", trainable=True), fit=True)
    compress(model, method=Quantized(rounding="stochastic"), fit=True)
    assert not model["t"](torch.tensor([1])).requires_grad


def test_fresh_rows_that_nothing_trains_are_warned_of() -> None:
    model = nn.ModuleDict({"frozen": nn.Embedding.from_pretrained(torch.randn(5000, 8)), "t": nn.Embedding(5000, 8)})
    with pytest.warns(UserWarning, match=r"^frozen: the new rows are random and nothing trains them"):
        compress(model, budget=0.1)
    assert not model["frozen"](torch.tensor([1])).requires_grad
    with pytest.warns(UserWarning, match=r"^t: the new rows are random .* stores fixed codes"):
        compress(nn.ModuleDict({"t": nn.Embedding(5000, 8)}), method=Quantized())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compress(nn.ModuleDict({"t": nn.Embedding(5000, 8)}), method=Quantized(rounding="stochastic", trainable=True))
        compress(nn.ModuleDict({"t": nn.Embedding(5000, 8)}), method=Quantized(), fit=True)


@pytest.mark.parametrize("method", [Dense(dtype="float32"), Hashed(buckets=50), TensorTrain(rank=4)])
def test_a_padding_row_that_is_not_zero_stays_as_it_was(method: Method) -> None:
    model = nn.ModuleDict({"t": nn.Embedding(2000, 8, padding_idx=1999)})
    nn.init.normal_(model["t"].weight)
    row = model["t"].weight[1999].detach().clone()
    compress(model, method=method, fit=True)
    ids = torch.tensor([[1999, 3], [4, 1999]])
    found = model["t"](ids)
    assert torch.equal(found[0, 0], row)
    assert torch.equal(found[1, 1], row)
    assert torch.equal(model["t"].materialize()[1999], row)
    found[ids == 1999].sum().backward()  # lookups of the padding row train nothing
    assert all(p.grad is None or not p.grad.to_dense().any() for p in model["t"].parameters())
    assert torch.equal(model["t"](ids)[0, 0], row)
    copy = nn.ModuleDict({"t": nn.Embedding(2000, 8, padding_idx=1999)})
    nn.init.ones_(copy["t"].weight)
    compress(copy, method=method, fit=True)
    copy.load_state_dict(model.state_dict())
    torch.testing.assert_close(copy["t"](ids), found)


def test_fresh_tables_have_a_padding_row_of_zeros() -> None:
    model = nn.ModuleDict({"t": nn.Embedding(2000, 8, padding_idx=0)})
    nn.init.ones_(model["t"].weight)
    compress(model, budget=0.1)
    assert not model["t"](torch.tensor([0])).any()
    assert not model["t"].materialize()[0].any()
    assert model["t"].materialize()[1:].any(1).all()


def test_a_compressed_embedding_is_called_as_before() -> None:
    model = nn.ModuleDict({"t": nn.Embedding(5000, 8)}).eval()
    rows = model["t"].weight.detach().clone()
    compress(model, method=Dense(dtype="float32"), fit=True)
    module = model["t"]
    assert not module.training
    assert not module.table.training
    assert (module.num_embeddings, module.embedding_dim, module.padding_idx) == (5000, 8, None)
    assert torch.equal(module.materialize(), rows)
    assert torch.equal(module.materialize(torch.tensor([[7]])), rows[None, None, 7])
    for ids in (torch.tensor(7), torch.tensor([4999, 7, 7]), torch.tensor([[7], [0]], dtype=torch.int32)):
        assert torch.equal(module(ids), rows[ids.long()])
    assert module(torch.zeros(0, 3, dtype=torch.long)).shape == (0, 3, 8)
    with pytest.raises(IndexError, match="id 5000"):
        module(torch.tensor([5000]))


def test_reading_the_weight_of_a_compressed_table_names_the_cure() -> None:
    model = nn.ModuleDict({"t": nn.Embedding(5000, 8), "bag": nn.EmbeddingBag(5000, 8)})
    compress(model, budget=0.1)
    with pytest.raises(AttributeError, match=r"no weight: .*materialize\(\).*exclude"):
        model["t"].weight  # noqa: B018
    with pytest.raises(AttributeError, match="no attribute 'wait'"):
        model["t"].wait  # noqa: B018
    assert not hasattr(model["t"], "weight")
    assert (model["bag"].num_embeddings, model["bag"].embedding_dim) == (5000, 8)


def test_the_report_reads_well() -> None:
    model = Foreign()
    model.readers = model.users
    model.normed = nn.Embedding(5000, 16, max_norm=1.0)
    report = compress(model, budget="1/20", method="hashed", exclude=["normed"])
    assert str(report) == REPORT


REPORT = """\
compressed     method                rows  dim    before    after  error
users          Hashed(buckets=282)  5,000   16  320.0 KB  18.0 KB
= readers
encoder.goods  Hashed(buckets=357)  8,000   16  512.0 KB  22.8 KB

left alone  because                         rows  dim     bytes
small       stays dense within the budget     10   16     640 B
normed      is excluded                    5,000   16  320.0 KB

2 of 3 tables compressed: 832.6 KB -> 41.5 KB (20.0 times less)
not counted, because left out or not compressible: 1 table, 320.0 KB"""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "how small"),
        ({"budget": "10B"}, "too small for these 3 tables"),
        ({"budget": "10 parsecs"}, "is not a size"),
        ({"budget": 0.1, "method": "tensor_rain"}, "did you mean 'tensor_train'"),
        ({"budget": 0.1, "method": Hashed(buckets=3)}, "not both"),
        ({"method": {"item": Dense()}}, "no table 'item'"),
        ({"method": {"users": "hashed"}}, "'users' must be one with its settings"),
        ({"method": {"users": Hashed(buckets=3)}, "budget": 0.1}, "not both"),
        ({"method": {"users": Hashed(buckets=3)}, "min_rows": 5}, "not both"),
        ({"method": {"encoder.goods": TensorTrain(rank=2, row_shape=(2, 2, 2))}}, r"encoder\.goods: tensor_train"),
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
