"""`compress(..., counts=)`: budgets divided by popularity, of fresh rows and of trained ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from holdall import compress
from holdall.common.errors import ConfigError
from holdall.tables import Bands, Dense, Shared
from holdall.tables.describe import describe_method


def zipf(num_rows: int) -> Tensor:
    return (20_000 / (1.0 + torch.arange(num_rows))).ceil()


COUNTS = {"users": zipf(4_000), "goods": zipf(900)}


def build(**options: Any) -> nn.ModuleDict:
    torch.manual_seed(0)
    return nn.ModuleDict(
        {
            "users": nn.Embedding(4_000, 16, **options),
            "goods": nn.EmbeddingBag(900, 8, dtype=torch.bfloat16),
            "days": nn.Embedding(7, 16),
        }
    )


def table_bytes(model: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in {*model.parameters(), *model.buffers()})


@pytest.mark.parametrize("fit", [False, True])
@pytest.mark.parametrize("share", [1 / 3, 1 / 20, 1 / 60])
def test_mixed_widths_and_types_keep_the_budget(share: float, fit: bool) -> None:
    model = build(padding_idx=3)
    nn.init.ones_(model["users"].weight[3].data)  # a padding row that a fit keeps apart
    dense = table_bytes(model)
    report = compress(model, budget=share, counts=COUNTS, fit=fit)
    assert table_bytes(model) == report.bytes_after
    assert 0.8 * share * dense < report.bytes_after <= share * dense
    assert "days" in {line.name for line in report.left_alone}
    words = [describe_method(line.method, line.rows) for line in report.tables]
    assert all(word in str(report) for word in words)
    assert "Bands(" not in str(report)


def test_trained_rows_that_are_popular_lose_least() -> None:
    model = build()
    before = model["users"].weight.detach().clone()
    report = compress(model, budget="1/20", counts=COUNTS, fit=True)
    after = model["users"](torch.arange(4_000)).detach()
    errors = (after - before).square().mean(dim=1)
    assert errors[:4].max() < 0.0001
    assert errors[:10].mean() < errors[2_000:].mean() / 100
    assert all(line.error is not None and 0 < line.error < 1.1 for line in report.tables)


def test_fresh_rows_train_by_any_optimizer() -> None:
    model = build()
    compress(model, budget="1/20", counts=COUNTS)
    method = model["users"].table.method
    assert isinstance(method, Bands)
    assert [band for _, band in method.bands] == [Dense(), Shared(1)]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    ids = torch.tensor([0, 3_999])
    before = model["users"](ids).detach().clone()
    model["users"](ids).sum().backward()
    optimizer.step()
    assert torch.equal(model["users"](ids), before - 1.0)


def test_counts_may_use_any_name_of_a_table_and_have_others() -> None:
    model = nn.ModuleDict({"one": nn.Embedding(500, 4)})
    model["two"] = model["one"]
    model["out"] = nn.Embedding(300, 4)
    compress(model, budget="1/4", counts={"two": zipf(500), "out": zipf(300)}, exclude="out")
    assert model["one"] is model["two"]
    assert isinstance(model["one"].table.method, Bands)


def test_a_budget_of_everything_changes_nothing() -> None:
    for fit in (False, True):
        model = build()
        report = compress(model, budget="1/1", counts=COUNTS, fit=fit)
        assert not report.tables
        assert type(model["users"]) is nn.Embedding


@pytest.mark.parametrize("fit", [False, True])
@pytest.mark.parametrize(
    ("counts", "options", "message"),
    [
        ({"users": COUNTS["users"]}, {}, "table 'goods' has no counts"),
        ({**COUNTS, "users": zipf(3_999)}, {}, "'users' has 4,000 rows and 3,999 counts: are they of another data set"),
        ({**COUNTS, "goods": -COUNTS["goods"]}, {}, "row 0 of table 'goods' has a count of -20000"),
        ({**COUNTS, "goods": COUNTS["goods"] * float("nan")}, {}, "row 0 of table 'goods' has a count of nan"),
        ({**COUNTS, "user": COUNTS["users"]}, {}, "'user', which is no table of the model .did you mean 'users'"),
        (COUNTS, {"method": "hashed"}, "leave out method"),
        (COUNTS, {"budget": None}, "give both"),
        (COUNTS, {"budget": 480}, "too small for these"),
    ],
)
def test_counts_and_budgets_that_cannot_work(
    counts: dict[str, Tensor], options: dict[str, Any], message: str, fit: bool
) -> None:
    model = build()
    weights = {name: module.weight for name, module in model.items()}
    with pytest.raises(ConfigError, match=message):
        compress(model, **{"budget": "1/20", **options}, counts=counts, fit=fit)
    assert {name: module.weight for name, module in model.items()} == weights
