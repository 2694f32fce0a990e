"""Updates of several tables of codes at once: the bits of each on its own, whatever gradients they have."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from holdall.kernels.row_gradient import RowGradient
from holdall.kernels.stochastic import keys
from holdall.tables import Quantized
from holdall.tables.code_updates import GradientShare, Touched, apply_row_updates, sum_pending
from holdall.tables.fixed_grid import FixedGridTable
from holdall.tables.method import TableOptions
from holdall.tables.quantized import StochasticRoundingTable

DIM = 5
METHODS = (
    Quantized(8, rounding="stochastic", trainable=True),
    Quantized(4, rounding="stochastic", trainable=True, scales="float16"),
    Quantized(8, rounding="stochastic", trainable=True),
    Quantized(8, rounding="stochastic", trainable=True, scales="bfloat16"),
    Quantized(4, rounding="stochastic", trainable=True, scales="float16"),
)
ROWS = (30, 7, 3, 20, 50)


def some_tables(dtype: torch.dtype = torch.float32) -> list[StochasticRoundingTable]:
    found = []
    for number, (method, rows) in enumerate(zip(METHODS, ROWS, strict=True)):
        table = method.build(rows, DIM, generator=torch.Generator().manual_seed(number), dtype=dtype)
        assert isinstance(table, StochasticRoundingTable)
        found.append(table)
    return found


def push(tables: list[StochasticRoundingTable], seed: int) -> None:
    """Gradients of two backward passes for two tables, of one for two, none for the fourth."""
    generator = torch.Generator().manual_seed(seed)
    for number in (0, 1, 2, 4, 0, 1):
        ids = torch.randint(ROWS[number], (12,), generator=generator)
        gradient = torch.randn(12, DIM, generator=generator).to(tables[number].row_dtype)
        tables[number].collect(RowGradient(ids, gradient))


def push_joint(tables: list[StochasticRoundingTable], seed: int) -> None:
    """One gradient of the lookups of all tables, a row of a matrix for two of them, and some lookups of none."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(sum(ROWS) + 9, (80,), generator=generator)
    bags = torch.arange(40).repeat(2)
    joint = RowGradient(numbers, torch.randn(40, DIM, generator=generator).to(tables[0].row_dtype), bags)
    start = 0
    for table in tables:
        table.collect(GradientShare(joint, start, start + table.num_rows))
        start += table.num_rows


def change(kind: object, gradients: Tensor) -> Tensor:
    return gradients * -0.3


@pytest.mark.parametrize("pushed", [push, push_joint], ids=["own", "joint"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_together_is_as_each_on_its_own(dtype: torch.dtype, pushed) -> None:  # type: ignore[no-untyped-def]
    together, apart = some_tables(dtype), some_tables(dtype)
    before = [table.codes.clone() for table in apart]
    for step in range(3):
        for tables in (together, apart):
            pushed(tables, step)
        noise = [keys(number, step) for number in range(len(ROWS))]
        apply_row_updates(together, change, noise)
        for table, key in zip(apart, noise, strict=True):
            table.apply_row_update(change, key)
    for old, table, other in zip(before, together, apart, strict=True):
        assert torch.equal(table.codes, other.codes)
        assert torch.equal(table.grid, other.grid)
        assert not table.pending
        assert torch.equal(table.codes, old) == (pushed is push and table is together[3])


def test_tables_on_one_grid_are_updated_together() -> None:
    """The bits of each on its own, on the grid that all have, clipped at its ends, apart from tables of other grids."""
    results = []
    for together in (True, False):
        torch.manual_seed(0)
        tables = [FixedGridTable(rows, DIM, TableOptions()) for rows in ROWS[:2]]
        other = METHODS[0].build(9, DIM)
        assert isinstance(other, StochasticRoundingTable)
        for step in range(4):
            for table in (*tables, other):
                table.collect(
                    RowGradient(torch.tensor([0, 2, 2]), torch.full((3, DIM), 5.0 * (-1) ** step * (step > 0)))
                )
                table.collect(RowGradient(torch.tensor([5]), torch.full((1, DIM), -0.01)))
            noise = [keys(number, step) for number in range(3)]
            if together:
                apply_row_updates([*tables, other], change, noise)
            else:
                for table, key in zip((*tables, other), noise, strict=True):
                    table.apply_row_update(change, key)
        results.append([table.codes for table in (*tables, other)])
        assert all(table.grid.tolist() == [[-1.0, 1 / 128]] for table in tables)
        assert all(bool((table.codes[[0, 2]] == 255).all()) for table in tables)
    assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))


@pytest.mark.parametrize("pushed", [push, push_joint], ids=["own", "joint"])
def test_sums_are_those_of_each_lookup(pushed) -> None:  # type: ignore[no-untyped-def]
    tables = some_tables()
    pushed(tables, 0)
    summed = sum_pending(tables)
    assert [touched.number for touched in summed] == ([0, 1, 2, 4] if pushed is push else [0, 1, 2, 3, 4])
    for number, ids, gradients in summed:
        expected = torch.zeros(ROWS[number], DIM)
        for each in tables[number].pending:
            gradient = each.own(torch.float32) if isinstance(each, GradientShare) else each
            rows = gradient.grad if gradient.bag_of is None else gradient.grad[gradient.bag_of]
            expected.index_add_(0, gradient.ids, rows)
        torch.testing.assert_close(torch.zeros_like(expected).index_copy_(0, ids, gradients), expected)
        assert ids.tolist() == sorted(set(ids.tolist()))


def test_kinds_are_updated_at_once() -> None:
    """Tables of the same bits and scales: one call of the optimizer for each kind."""
    tables, calls = some_tables(), []

    def counted(kind: list[Touched], gradients: Tensor) -> Tensor:
        calls.append([touched.number for touched in kind])
        return torch.zeros_like(gradients)

    push(tables, 0)
    apply_row_updates(tables, counted)  # type: ignore[arg-type]
    assert sorted(calls) == [[0, 2], [1, 4]]
