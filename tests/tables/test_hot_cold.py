"""Hot/cold tables: the split, the order of rows, edge cases, fits and budgets."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F

from holdall.common.errors import ConfigError
from holdall.tables import (
    METHODS,
    Clustered,
    Dense,
    Hashed,
    HotCold,
    Method,
    MixedDimension,
    Quantized,
    Table,
    TableOptions,
    method_from_json,
)
from holdall.tables.fitting import BLOCK_NUMBERS
from holdall.tables.hot_cold import HotColdTable
from holdall.tables.method import dense_std


def planted(hot_rows: int, num_rows: int = 10, dim: int = 2, **options: object) -> HotColdTable:
    """A table whose row i is (i, 100 + i, ...), the tail stored densely."""
    table = HotCold(hot_rows=hot_rows, cold=Dense()).fit(_numbered(num_rows, dim), **options)
    assert isinstance(table, HotColdTable)
    return table


def _numbered(num_rows: int, dim: int) -> torch.Tensor:
    return torch.arange(num_rows)[:, None] + 100.0 * torch.arange(dim)


@pytest.mark.parametrize("hot_rows", [0, 1, 4, 9, 10, 11])
@pytest.mark.parametrize("ids", [[7, 0, 3, 9, 4, 3, 0], [0, 1, 2], [8, 9, 9], [3, 4], [9, 0], []])
def test_rows_come_in_the_order_asked_for(hot_rows: int, ids: list[int]) -> None:
    table = planted(hot_rows)
    found = table.rows(torch.tensor(ids, dtype=torch.int64))
    assert torch.equal(found, _numbered(10, 2)[ids])


def test_gradients_go_to_the_part_a_row_lives_in() -> None:
    table = planted(4, sparse=True)
    table.rows(torch.tensor([9, 1, 4, 1])).mul(torch.tensor([[1.0], [10.0], [100.0], [1000.0]])).sum().backward()
    assert table.hot.weight.grad.is_sparse
    assert table.hot.weight.grad.to_dense()[:, 0].tolist() == [0, 1010, 0, 0]
    assert table.cold.weight.grad.to_dense()[:, 0].tolist() == [100, 0, 0, 0, 0, 1]


@pytest.mark.parametrize("hot_rows", [1, 4, 9])
@pytest.mark.parametrize("ids", [[7, 0, 3, 9, 4, 3, 0], [0], [9, 9], []])
def test_fixed_shapes_give_the_same_rows_and_gradients(hot_rows: int, ids: list[int]) -> None:
    """As on a GPU: both parts compute a row for every id, and no other row is touched."""
    results = []
    for fixed in (False, True):
        table = planted(hot_rows, sparse=True)
        table.fixed_shapes = fixed
        rows = table(torch.tensor(ids, dtype=torch.int64)[:, None])
        rows.mul(1 + torch.arange(len(ids))[:, None]).sum().backward()
        grads = [part.weight.grad for part in (table.hot, table.cold)]
        nothing = torch.zeros(())  # of a part that was not looked up
        results.append([rows.detach(), *(nothing if g is None else g.to_dense() for g in grads)])
        if fixed and len(set(ids)) > 1:
            touched = {*grads[0]._indices()[0].tolist(), *(hot_rows + grads[1]._indices()[0]).tolist()}
            assert touched == set(ids)
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(*torch.broadcast_tensors(expected, found))


def test_a_bag_that_mixes_hot_and_cold() -> None:
    bags = torch.tensor([[0, 9, 4], [3, 3, 8]])
    weights = torch.tensor([[0.5, 2.0, 1.0], [1.0, -1.0, 3.0]])
    expected = F.embedding_bag(bags, _numbered(10, 2), mode="sum", per_sample_weights=weights)
    torch.testing.assert_close(planted(4)(bags, None, weights), expected)
    mean = F.embedding_bag(bags, _numbered(10, 2), mode="mean")
    torch.testing.assert_close(planted(4, mode="mean")(bags), mean)


@pytest.mark.parametrize(
    ("hot_rows", "num_rows", "split"),
    [(0, 5, (0, 5)), (5, 5, (5, 0)), (7, 5, (5, 0)), (2, 5, (2, 3)), (0.1, 1000, (100, 900)), (0.5, 1, (0, 1))],
)
def test_how_a_table_is_split(hot_rows: float, num_rows: int, split: tuple[int, int]) -> None:
    method = HotCold(hot_rows=hot_rows, cold=MixedDimension(dim=2))
    assert method.split(num_rows) == split
    table = method.build(num_rows, 8)
    assert isinstance(table, HotColdTable)
    assert (table.hot is None, table.cold is None) == (split[0] == 0, split[1] == 0)
    expected = split[0] * 8 + (MixedDimension(dim=2).num_parameters(split[1], 8) if split[1] else 0)
    assert method.num_parameters(num_rows, 8) == expected == sum(p.numel() for p in table.parameters())


def test_row_parameters_have_dotted_names() -> None:
    table = HotCold(hot_rows=3, cold=HotCold(hot_rows=2, cold=MixedDimension(dim=2))).build(20, 8)
    assert list(table.row_parameters()) == ["hot.weight", "cold.hot.weight", "cold.cold.narrow.weight"]
    named = dict(table.named_parameters())
    assert all(named[name] is parameter for name, parameter in table.row_parameters().items())
    assert set(table.state_dict()) == {*table.row_parameters(), "cold.cold.projection"}


def test_both_parts_start_like_the_whole_table() -> None:
    table = HotCold(hot_rows=1000, cold=Dense()).build(50_000, 16, generator=torch.Generator().manual_seed(0))
    weight = table.materialize()
    for part in (weight[:1000], weight[1000:]):
        assert float(part.std()) == pytest.approx(dense_std(50_000), rel=0.03)


@pytest.mark.parametrize("padding_idx", [1, 7])
def test_padding_row_starts_at_zero_in_its_part(padding_idx: int) -> None:
    table = HotCold(hot_rows=4, cold=MixedDimension(dim=1)).build(10, 2, padding_idx=padding_idx)
    zero = (table.materialize() == 0).all(dim=1)
    assert zero.nonzero().flatten().tolist() == [padding_idx]


def test_json_of_nested_methods() -> None:
    method = HotCold(hot_rows=0.01, cold=HotCold(hot_rows=1000, cold=Quantized(bits=4)))
    document = json.loads(json.dumps(method.to_json()))
    assert document["cold"]["cold"].items() >= {"method": "quantized", "bits": 4, "rounding": "nearest"}.items()
    assert method_from_json(document) == method
    document["cold"]["cold"]["bots"] = 4
    with pytest.raises(ConfigError, match="did you mean 'bits'"):
        method_from_json(document)


def test_a_fit_keeps_hot_rows_and_fits_the_tail() -> None:
    weight = torch.randn(BLOCK_NUMBERS // 8 + 500, 8, generator=torch.Generator().manual_seed(0))
    table = HotCold(hot_rows=300, cold=MixedDimension(dim=4)).fit(weight)
    found = table.materialize()
    assert torch.equal(found[:300], weight[:300])
    alone = MixedDimension(dim=4).fit(weight[300:])
    torch.testing.assert_close(found[300:], alone.materialize(), rtol=1e-4, atol=1e-5)
    assert table.fit_error == pytest.approx(float((found - weight).norm() / weight.norm()), rel=1e-4)


@dataclass(frozen=True)
class Ones(Method):
    """A method without a fit."""

    name: ClassVar[str] = "ones"

    def num_parameters(self, num_rows: int, dim: int) -> int:
        return 0

    def _build(self, num_rows: int, dim: int, options: TableOptions) -> Table:
        return OnesTable(self, num_rows, dim, options)


class OnesTable(Table):
    def _rows(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.ones(ids.numel(), self.dim)


def test_a_tail_without_a_fit_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"cold \(ones, rows 2 to 4\) of a hot_cold table cannot .* train it from"):
        HotCold(hot_rows=2, cold=Ones()).fit(torch.zeros(5, 2))
    assert HotCold(hot_rows=5, cold=Ones()).fit(torch.ones(5, 2)).fit_error == 0


def test_a_frozen_tail_leaves_the_hot_rows_to_train() -> None:
    table = HotCold(hot_rows=3, cold=Quantized(bits=4)).build(12, 4)
    before = table.materialize()
    optimizer = torch.optim.SGD(table.parameters(), lr=1.0)
    table(torch.tensor([[0, 11], [2, 5]])).sum().backward()
    optimizer.step()
    change = table.materialize() - before
    torch.testing.assert_close(change[[0, 2]], -torch.ones(2, 4))
    assert not change[[1, *range(3, 12)]].any()


def test_a_tail_of_another_type_comes_in_the_type_of_the_hot_rows() -> None:
    table = HotCold(hot_rows=2, cold=Dense(dtype="bfloat16")).build(6, 4)
    assert table.num_bytes() == 2 * 4 * 4 + 4 * 4 * 2
    for ids in ([0, 5], [5], [0]):
        assert table.rows(torch.tensor(ids)).dtype == torch.float32


@pytest.mark.parametrize("num_rows", [2**24 + 3, 2**31 + 5, 10**10])
def test_ids_of_huge_tables(num_rows: int) -> None:
    table = HotCold(hot_rows=1000, cold=Hashed(buckets=64)).build(num_rows, 4)
    assert isinstance(table, HotColdTable)
    ids = torch.tensor([num_rows - 1, 999, 2**24 + 1, 1000, 0])
    found = table.rows(ids)
    assert torch.equal(found[[1, 4]], table.hot.weight[[999, 0]])
    tail = torch.tensor([num_rows - 1 - 1000, 2**24 + 1 - 1000, 0])
    assert torch.equal(found[[0, 2, 3]], table.cold.rows(tail))
    assert torch.equal(table(ids[:, None]), found)


@pytest.mark.parametrize("cold", [MixedDimension, Quantized, Clustered])
@pytest.mark.parametrize("share", [2, 5, 9])
def test_for_bytes_keeps_to_the_budget(cold: type[Method], share: int) -> None:
    num_rows, dim = 20_000, 32
    budget = 4 * num_rows * dim // share
    try:
        cold.for_bytes(num_rows, dim, budget)
    except ConfigError:
        with pytest.raises(ConfigError, match="even without hot rows"):
            HotCold.for_bytes(num_rows, dim, budget, cold=cold)
        return
    method = HotCold.for_bytes(num_rows, dim, budget, cold=cold)
    assert isinstance(method.cold, cold)
    assert 0.7 * budget < method.num_bytes(num_rows, dim) <= budget
    assert method.num_bytes(num_rows, dim) == method.build(num_rows, dim).num_bytes()


def test_for_bytes_at_the_ends() -> None:
    assert HotCold.for_bytes(100, 8, 4 * 800, cold=MixedDimension) == HotCold(hot_rows=100, cold=Dense())
    whole = HotCold.for_bytes(1000, 8, 16_000, cold=MixedDimension, hot_share=0.0)
    assert isinstance(whole.cold, MixedDimension)
    assert whole.num_bytes(1000, 8) <= 16_000
    with pytest.raises(ConfigError, match="hot_share"):
        HotCold.for_bytes(1000, 8, 16_000, cold=MixedDimension, hot_share=1.5)


@pytest.mark.parametrize("share", [4, 20, 100])
def test_for_bytes_takes_frobenius_for_the_tail(share: int) -> None:
    num_rows, dim = 1_000_000, 16
    budget = 4 * num_rows * dim // share
    method = HotCold.for_bytes(num_rows, dim, budget)
    assert isinstance(method.cold, METHODS["frobenius"])
    assert 0.9 * budget < method.num_bytes(num_rows, dim) <= budget
    assert method.split(num_rows)[0] * dim * 4 >= 0.4 * budget


@pytest.mark.parametrize("hot_rows", [-1, 1.0, 0.0, -0.5, 2.5, True, "5"])
def test_bad_hot_rows(hot_rows: object) -> None:
    with pytest.raises(ConfigError, match="hot_rows must be a number of rows"):
        HotCold(hot_rows=hot_rows, cold=Dense())  # type: ignore[arg-type]


def test_bad_cold() -> None:
    with pytest.raises(ConfigError, match="'cold' must be an object, not 'dense'"):
        method_from_json({"method": "hot_cold", "hot_rows": 3, "cold": "dense"})
