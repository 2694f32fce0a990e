"""`compress(..., fit=True)` with `auto`: of all candidates the one that leaves the least error, and what it says."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from holdall.common.errors import ConfigError
from holdall.embedding import best_fit
from holdall.embedding.compress import compress
from holdall.tables import Bands, Clustered, MixedDimension, Table
from holdall.tables.fitting import relative_error, squared_error


def clusters(num_rows: int = 3_000, dim: int = 16, num_centres: int = 100) -> Tensor:
    """Rows that are one of a few hundred, in no order."""
    draw = torch.Generator().manual_seed(0)
    centres = torch.randn(num_centres, dim, generator=draw)
    return centres[torch.randint(num_centres, (num_rows,), generator=draw)]


def low_rank(num_rows: int = 3_000, dim: int = 16) -> Tensor:
    """Rows of one dimension, of which no two are alike."""
    draw = torch.Generator().manual_seed(0)
    return torch.randn(num_rows, 1, generator=draw) @ torch.randn(1, dim, generator=draw)


def model_of(**weights: Tensor) -> nn.ModuleDict:
    return nn.ModuleDict({name: nn.EmbeddingBag.from_pretrained(rows, mode="sum") for name, rows in weights.items()})


@pytest.mark.parametrize(("rows", "taken"), [(clusters(), Clustered), (low_rank(), MixedDimension)])
def test_auto_takes_what_the_rows_are_made_of(rows: Tensor, taken: type) -> None:
    """A table of few distinct rows is clustered without loss, one of rank 1 needs one number a row."""
    model = model_of(t=rows)
    report = compress(model, budget="1/10", fit=True)
    (line,) = report.tables
    assert isinstance(line.method, taken)
    assert line.error is not None
    assert line.error < 1e-3
    assert report.bytes_after <= report.bytes_before / 10
    assert f"auto took {line.method.name}: relative error of a lookup 0.000" in str(report)
    assert "bands 0." in str(report)
    assert torch.allclose(model["t"](torch.arange(50)[:, None]), rows[:50], atol=1e-2)


def test_rows_without_structure_are_stored_in_bands() -> None:
    torch.manual_seed(0)
    report = compress(model_of(t=torch.randn(2_000, 16)), budget="1/4", fit=True)
    (line,) = report.tables
    assert isinstance(line.method, Bands)
    assert line.error is not None
    assert 0 < line.error < 0.2
    assert f"auto took bands: relative error of a lookup {line.error:.4f}" in str(report)


def test_no_candidate_leaves_less_error_than_the_one_taken() -> None:
    torch.manual_seed(1)
    weights = {"a": clusters() + 0.05 * torch.randn(3_000, 16), "b": torch.randn(500, 8)}
    errors = {}
    for method in ("auto", "clustered", "mixed_dimension", "robe"):
        model = model_of(**weights)
        compress(model, budget="1/6", method=method, fit=True)
        tables = {name: module for name, module in model.items() if isinstance(module, Table)}
        ones = {name: torch.ones(len(rows)) for name, rows in weights.items()}
        errors[method] = best_fit.relative_lookup_error(weights, tables, ones)
    assert errors["auto"] == min(errors.values())
    assert errors["robe"] > 2 * errors["auto"]


def test_clusters_of_too_many_rows_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(best_fit, "MAX_FLOP", 1e3)
    report = compress(model_of(t=clusters()), budget="1/10", fit=True)
    assert not isinstance(report.tables[0].method, Clustered)
    assert "clustered not tried: too many rows" in str(report)


def test_a_candidate_beyond_the_budget_says_so() -> None:
    report = compress(model_of(t=torch.randn(3_000, 16)), budget="1/100", fit=True)
    assert report.choice is not None
    assert report.choice.startswith("auto took bands")
    assert "clustered too large" in report.choice


def test_tables_that_stay_dense_keep_the_budget_or_it_is_refused() -> None:
    model = model_of(t=torch.randn(10, 16))
    with pytest.raises(ConfigError, match="too small"):
        compress(model, budget="1/2", fit=True)
    with pytest.raises(ConfigError, match=r"the smallest that method auto can keep is 64\d+B"):
        compress(model_of(t=torch.randn(1_000, 16), small=torch.randn(100, 16)), budget="1/20", min_rows=500, fit=True)


def test_errors_count_rows_by_their_lookups() -> None:
    """The first row is looked up nine times of ten; it alone is exact."""
    weight = torch.tensor([[3.0, 4.0], [1.0, 0.0]])
    table = Clustered(1).fit(weight)
    table.centroids.data[0] = weight[0]
    lookups = torch.tensor([9.0, 1.0])
    missed = 4.0 + 16.0
    assert squared_error(weight, table, lookups) == (missed, 9 * 25.0 + 1.0)
    assert squared_error(weight, None) == (0.0, 26.0)
    assert relative_error(weight, table) == pytest.approx((missed / 26.0) ** 0.5)


def test_the_error_that_is_printed_is_that_of_a_lookup() -> None:
    rows, counts = torch.randn(2_000, 16), {"t": 10_000 / (1.0 + torch.arange(2_000))}
    known, unknown = (compress(model_of(t=rows), budget="1/20", fit=True, counts=c).tables[0] for c in (counts, None))
    assert known.error is not None
    assert unknown.error is not None
    assert known.error < 0.8 * unknown.error
