"""Budgets of `compress`: kept by the bytes that the new modules take, for any mix of widths, types and sizes."""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from holdall.common.errors import ConfigError
from holdall.embedding.compress import TINY_ROWS, compress
from holdall.embedding.compressed_embedding import CompressedEmbedding
from holdall.tables import METHODS, Table

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Spec:
    """Table of a random model."""

    rows: int
    dim: int
    dtype: torch.dtype
    padded: bool
    bag: bool

    def build(self) -> nn.Module:
        kind = nn.EmbeddingBag if self.bag else nn.Embedding
        module = kind(self.rows, self.dim, padding_idx=0 if self.padded else None, dtype=self.dtype)
        nn.init.normal_(module.weight)  # the padding row too
        return module


SPECS = st.builds(
    Spec,
    rows=st.sampled_from((1, 3, 17, 60, 300, 700)),
    dim=st.integers(1, 40),
    dtype=st.sampled_from(DTYPES),
    padded=st.booleans(),
    bag=st.booleans(),
)


def bytes_of(model: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


def smallest_budget(message: str) -> int:
    found = re.search(r"can keep is ([0-9]+)B", message)
    assert found, message
    return int(found[1])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*nothing trains them")
@given(
    specs=st.lists(SPECS, min_size=1, max_size=5),
    share=st.floats(0.01, 1.0),
    method=st.sampled_from(("auto", "auto", *METHODS)),
    min_rows=st.sampled_from((None, None, 0, 50)),
    fit=st.booleans(),
)
@settings(deadline=None, max_examples=30)
def test_any_mix_keeps_its_budget_or_names_the_smallest(
    specs: list[Spec], share: float, method: str, min_rows: int | None, fit: bool
) -> None:
    specs = [*specs, Spec(rows=700, dim=6, dtype=torch.float32, padded=False, bag=False)]
    model = nn.ModuleList(spec.build() for spec in specs)
    before = bytes_of(model)
    budget = max(1, int(share * before))
    try:
        report = compress(model, budget, method, min_rows=min_rows, fit=fit)
    except ConfigError as error:
        assert bytes_of(model) == before
        budget = smallest_budget(str(error))
        report = compress(model, f"{budget}B", method, min_rows=min_rows, fit=fit)
    assert bytes_of(model) == report.bytes_after <= budget
    assert report.bytes_before == before
    assert len(report.tables) + len(report.left_alone) == len(specs)
    for spec, module in zip(specs, model, strict=True):
        if spec.rows <= max(TINY_ROWS, (min_rows or 0) - 1):
            assert isinstance(module, nn.Embedding | nn.EmbeddingBag)


class DeepFM(nn.Module):
    """Tables of dim 1 beside wide ones for every feature, as in DeepFM and Wide & Deep."""

    def __init__(self, dtype: torch.dtype = torch.float32):
        super().__init__()
        rows = (20_000, 3, 500, 60_000)
        self.wide = nn.ModuleList(nn.Embedding(n, 16, dtype=dtype) for n in rows)
        self.linear = nn.ModuleList(nn.Embedding(n, 1, dtype=dtype) for n in rows)

    def forward(self, ids: Tensor) -> Tensor:
        vectors = [table(column) for table, column in zip(self.wide, ids, strict=True)]
        first = [table(column) for table, column in zip(self.linear, ids, strict=True)]
        return torch.cat([*vectors, *first], dim=1).sum(1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("min_rows", [None, 1000])
def test_linear_tables_beside_wide_ones(dtype: torch.dtype, min_rows: int | None) -> None:
    model = DeepFM(dtype)
    before = bytes_of(model)
    report = compress(model, budget="1/20", min_rows=min_rows)
    assert 0.8 * before / 20 < report.bytes_after == bytes_of(model) <= before / 20
    assert isinstance(model.wide[1], nn.Embedding)
    assert isinstance(model.linear[1], nn.Embedding)
    assert isinstance(model.linear[3], CompressedEmbedding)
    out = model(torch.tensor([[19_999, 0], [2, 1], [499, 0], [59_999, 1]]))
    assert out.dtype == dtype
    out.sum().backward()


def test_a_budget_counts_small_tables_and_not_those_left_out() -> None:
    def build() -> nn.ModuleDict:
        return nn.ModuleDict(
            {
                "large": nn.Embedding(10_000, 16),
                "small": nn.Embedding(900, 16),
                "normed": nn.Embedding(5000, 16, max_norm=1.0),
                "pretrained": nn.Embedding(5000, 16),
            }
        )

    model = build()
    report = compress(model, "64KB", min_rows=1000, exclude="pretrained")
    assert report.bytes_before == (10_000 + 900) * 16 * 4
    assert report.bytes_after == model["large"].num_bytes() + 900 * 16 * 4 <= 64_000
    with pytest.raises(ConfigError, match=r"can keep is [0-9]+B, with tables .*\(small 57.6 KB \(dense\), large"):
        compress(build(), "50KB", min_rows=1000, exclude="pretrained")


def test_a_padding_row_that_is_kept_counts() -> None:
    model = nn.ModuleDict({"t": nn.Embedding(2000, 8, padding_idx=0)})
    nn.init.ones_(model["t"].weight)
    report = compress(model, budget=1000, method="hashed", fit=True)
    (line,) = report.tables
    assert line.bytes_after == bytes_of(model) == 30 * 8 * 4 + 8 * 4 <= 1000
    assert isinstance(model["t"].table, Table)
