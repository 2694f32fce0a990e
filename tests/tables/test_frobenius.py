"""Frobenius tables: published sizes, exact index arithmetic, the fast path against the reference, init, fit, sizing."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from holdall.common.errors import ConfigError, IdError
from holdall.kernels.frobenius import frobenius_bags, frobenius_rows_many
from holdall.tables import Frobenius, Table
from holdall.tables.frobenius import FrobeniusTable, grid_side
from holdall.tables.frobenius_fit import fit_factors

LARGEST = [8165896, 7912889, 7156453, 5554114, 2675940]
"""Rows of the five largest tables of DLRM-small on Criteo 1TB, dim 128."""
SETTINGS = [(1, 1), (1, 4), (3, 2), (5, 3), (8, 4), (16, 2), (24, 1), (20, 7)]


def planted(num_rows: int, dim: int, rank: int, terms: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    table = Frobenius(rank, terms).build(num_rows, dim, dtype=torch.float64, init_std=1.0, generator=generator)
    return table.materialize()


def parts(table: Table) -> tuple[Tensor, Tensor, Tensor]:
    """A and B [side, terms, rank] and the basis."""
    assert isinstance(table, FrobeniusTable)
    A, B = (factor.detach().unflatten(1, (table.terms, table.rank)) for factor in (table.left, table.right))
    return A, B, table.basis.detach()


@pytest.mark.parametrize(
    ("rank", "terms", "five", "four"),
    [
        (8, 1, "0.7739", "0.6699"),
        (8, 2, "1.5284", "1.3243"),
        (8, 4, "3.0371", None),
        (16, 2, "3.0566", "2.6484"),
        (16, 4, "6.0742", None),
    ],
)
def test_published_sizes(rank: int, terms: int, five: str, four: str | None) -> None:
    """MiB of the five and of the four largest tables; the report adds up sizes that it has rounded table by table."""
    sizes = [round(Frobenius(rank, terms).num_bytes(num_rows, 128) / 2**20, 4) for num_rows in LARGEST]
    assert f"{sum(sizes):.4f}" == five
    if four is not None:
        assert f"{sum(sizes[:4]):.4f}" == four


@pytest.mark.parametrize(("rank", "terms"), SETTINGS)
def test_parameters_are_those_of_the_formula(rank: int, terms: int) -> None:
    table = Frobenius(rank, terms).build(7919, 20)  # sqrt is 88.99: q = 96
    assert sum(parameter.numel() for parameter in table.parameters()) == rank * (2 * terms * 96 + 20)


@settings(derandomize=True, deadline=None, max_examples=50)
@given(st.one_of(st.integers(1, 10**6), st.integers(1, 2**62), st.integers(1, 2**31).map(lambda root: root**2 + 1)))
def test_grid_side_is_exact(num_rows: int) -> None:
    side = grid_side(num_rows)
    assert side % 8 == 0
    assert side**2 >= num_rows > max(side - 8, 0) ** 2


@pytest.mark.parametrize("num_rows", [2**24 + 3, 2**31 + 11, 10**10])
def test_large_ids_use_the_factors_of_exact_integers(num_rows: int) -> None:
    table = Frobenius(rank=3, terms=2).build(num_rows, 4, dtype=torch.float64, init_std=1.0)
    A, B, basis = parts(table)
    side = math.isqrt(num_rows - 1) + 1
    side += -side % 8
    ids = [0, side - 1, side, 2**24 + 1, num_rows // 2 + 1, num_rows - side, num_rows - 1]
    expected = torch.stack([(A[i // side] * B[i % side]).sum(0) @ basis for i in ids])
    torch.testing.assert_close(table.rows(torch.tensor(ids)), expected, rtol=1e-12, atol=1e-14)


@pytest.mark.filterwarnings("ignore:Sparse invariant")  # a warning of torch's Adagrad
def test_ten_billion_rows_train_in_a_few_megabytes() -> None:
    generator = torch.Generator().manual_seed(0)
    table = Frobenius(rank=2, terms=1).build(10**10, 128, init_std=0.5, generator=generator, sparse=True)
    assert table.num_bytes() == 4 * 2 * (2 * 100_000 + 128)
    ids, target = torch.tensor([[9_999_999_999], [5_000_050_001], [12]]), torch.ones(3, 128)
    optimizer = torch.optim.Adagrad(table.parameters(), lr=0.1)
    losses = []
    for _ in range(100):
        optimizer.zero_grad()
        loss = (table(ids) - target).square().sum(1).mean()
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
    assert losses[-1] < 0.1 * losses[0]
    assert sorted(table.row_parameters()) == ["left", "right"]
    assert table.left.grad.coalesce().indices().tolist() == [[0, 50_000, 99_999]]
    assert table.right.grad.coalesce().indices().tolist() == [[12, 50_001, 99_999]]
    assert not table.basis.grad.is_sparse


@pytest.mark.parametrize("fast", [True, False])
def test_sparse_gradients_are_the_dense_ones(fast: bool) -> None:
    torch.manual_seed(0)
    factors = [torch.randn(*shape, requires_grad=True) for shape in ((16, 12), (16, 12), (4, 6))]
    ids, offsets, scale = torch.randint(256, (40,)), torch.tensor([0, 3, 3, 40]), torch.rand(40)
    direction = torch.randn(3, 6)
    found, expected = (
        torch.autograd.grad(frobenius_bags(*factors, ids, offsets, scale, sparse=s, fast=fast), factors, direction)
        for s in (True, False)
    )
    assert [gradient.is_sparse for gradient in found] == [True, True, False]
    for ours, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.to_dense() if ours.is_sparse else ours, wanted, rtol=1e-5, atol=1e-5)


def test_second_derivatives_of_several_tables_in_one_call() -> None:
    torch.manual_seed(0)
    shapes = [(8, 6), (8, 6), (3, 4), (16, 6), (16, 6), (3, 4)]
    factors = tuple(torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes)
    ids = torch.tensor([[0, 63, 7], [255, 3, 3]])

    def rows(*factors: Tensor) -> Tensor:
        return frobenius_rows_many([factors[:3], factors[3:]], ids)  # type: ignore[list-item]

    assert torch.autograd.gradgradcheck(rows, factors, fast_mode=True)


def test_a_table_with_sparse_gradients_learns_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdall.tables.frobenius.SPARSE_SIDE", 7)
    table = Frobenius(3, 2).build(37, 8, mode="mean", padding_idx=4, sparse=True)
    assert set(table.row_parameters()) == {"left", "right"}
    for _ in range(2):
        table(torch.tensor([[4, 36], [1, 2]])).sum().backward()
    assert table.left.grad.is_sparse
    twice = table.left.grad.to_dense()
    monkeypatch.setattr("holdall.tables.frobenius.SPARSE_SIDE", 8)
    dense = Frobenius(3, 2).build(37, 8, mode="mean", padding_idx=4)
    dense.load_state_dict(table.state_dict())
    assert not dense.row_parameters()
    dense(torch.tensor([[4, 36], [1, 2]])).sum().backward()
    torch.testing.assert_close(twice, 2 * dense.left.grad)


@pytest.mark.parametrize(("rank", "terms"), SETTINGS)
@pytest.mark.parametrize("bags", ["one id a bag", "bags"])
@pytest.mark.parametrize("scaled", [False, True])
def test_the_fast_path_equals_the_reference(rank: int, terms: int, bags: str, scaled: bool) -> None:
    torch.manual_seed(0)
    left, right = (torch.randn(16, rank * terms, dtype=torch.float64, requires_grad=True) for _ in range(2))
    basis = torch.randn(rank, 6, dtype=torch.float64, requires_grad=True)
    scale = torch.rand(40, dtype=torch.float64, requires_grad=True) if scaled else None
    ids = torch.randint(256, (40,))
    ids[:4] = torch.tensor([0, 255, 255, 7])
    offsets = None if bags == "one id a bag" else torch.tensor([0, 0, 3, 4, 20, 20, 40])
    found, expected = (frobenius_bags(left, right, basis, ids, offsets, scale, fast=fast) for fast in (True, False))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    direction = torch.randn_like(found)
    inputs = [tensor for tensor in (left, right, basis, scale) if tensor is not None]
    gradients = (torch.autograd.grad(output, inputs, direction) for output in (found, expected))
    for ours, wanted in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-11, atol=1e-11)


def test_the_reference_is_one_switch_away() -> None:
    table = Frobenius().build(1000, 16, mode="mean", padding_idx=3)
    assert isinstance(table, FrobeniusTable)
    ids, offsets = torch.tensor([3, 5, 999, 5, 0]), torch.tensor([0, 2, 2])
    fast = table(ids, offsets)
    table.fast = False
    slow = table(ids, offsets)
    assert slow.grad_fn.name() != fast.grad_fn.name()
    torch.testing.assert_close(fast, slow)


@pytest.mark.parametrize("wanted", range(3))
def test_only_the_gradients_asked_for(wanted: int) -> None:
    torch.manual_seed(0)
    values = [torch.randn(8, 12), torch.randn(8, 12), torch.randn(4, 5)]
    gradients = []
    for fast in (True, False):
        factors = [value.clone().requires_grad_(k == wanted) for k, value in enumerate(values)]
        frobenius_bags(*factors, torch.arange(64), None, fast=fast).square().sum().backward()
        assert [factor.grad is not None for factor in factors] == [k == wanted for k in range(3)]
        gradients.append(factors[wanted].grad)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-4)


def test_a_graph_that_is_kept_gives_its_gradient_twice() -> None:
    table = Frobenius().build(1000, 16, init_std=1.0)
    output = table(torch.tensor([[1, 2], [999, 3]]), None, torch.rand(2, 2)).sum()
    first, second = (torch.autograd.grad(output, list(table.parameters()), retain_graph=True) for _ in range(2))
    assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))


@pytest.mark.parametrize(("rank", "terms"), [(8, 4), (3, 3), (5, 1)])
def test_many_tables_at_once_are_the_tables_one_by_one(rank: int, terms: int) -> None:
    torch.manual_seed(0)
    method = Frobenius(rank, terms)
    tables = [method.build(num_rows, 6, dtype=torch.float64, init_std=1.0) for num_rows in (1000, 7, 1000, 300)]
    tables.append(tables[0])  # two features may share a table
    ids = torch.stack([torch.randint(table.num_rows, (50,)) for table in tables])
    parameters = [parameter for table in tables[:-1] for parameter in table.parameters()]
    found = frobenius_rows_many([(table.left, table.right, table.basis) for table in tables], ids)
    expected = torch.stack([table.rows(line) for table, line in zip(tables, ids, strict=True)])
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    direction = torch.randn_like(found)
    gradients = (torch.autograd.grad(output, parameters, direction) for output in (found, expected))
    for ours, wanted in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-11, atol=1e-11)


def test_autocast_leaves_rows_in_their_own_type() -> None:
    table = Frobenius().build(1000, 16, init_std=1.0)
    ids = torch.tensor([[1], [999], [40]])
    expected = table(ids)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = table(ids)
    assert output.dtype == torch.float32
    torch.testing.assert_close(output, expected, rtol=0, atol=0)
    output.sum().backward()
    assert table.basis.grad.dtype == torch.float32


def test_many_small_gradients_in_bfloat16_do_not_get_lost() -> None:
    """Five thousand ones at one row: a bfloat16 sum would stop at 256, from where adding 1 changes nothing."""
    left, right = (torch.ones(8, 1, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    basis = torch.ones(1, 1, dtype=torch.bfloat16)
    frobenius_bags(left, right, basis, torch.full((5000,), 9), None).sum().backward()
    assert float(left.grad[1]) == pytest.approx(5000, rel=0.01)
    assert float(right.grad[1]) == pytest.approx(5000, rel=0.01)


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("include_last_offset", [False, True])
def test_bags_of_one_id(mode: str, include_last_offset: bool) -> None:
    """They have a path of their own, which must still refuse similar offsets that are invalid."""
    table = Frobenius(3, 2).build(100, 4, mode=mode, include_last_offset=include_last_offset)
    ids = torch.tensor([99, 5, 5])
    offsets = torch.arange(3 + include_last_offset)
    expected = table.rows(ids)
    for output in (table(ids, offsets), table(ids.int(), offsets.int()), table(ids[:, None])):
        torch.testing.assert_close(output, expected, rtol=0, atol=0)
    with pytest.raises(IdError, match="offset 2 is 1 after 2"):
        table(ids, torch.tensor([0, 2, 1, 3])[: 3 + include_last_offset])
    with pytest.raises(IdError, match="id 100 at position 1"):
        table(torch.tensor([[0], [100]]))
    merged = table(ids, torch.tensor([0, 0, 1, 3])[: 3 + include_last_offset])
    assert not merged[0].any()


@pytest.mark.parametrize(("rank", "terms", "dim"), [(8, 4, 128), (24, 1, 16), (1, 8, 5), (32, 1, 8), (3, 2, 1)])
def test_initial_rows_are_gaussian_and_the_factors_balanced(rank: int, terms: int, dim: int) -> None:
    num_rows = 250_000
    generator = torch.Generator().manual_seed(1)
    table = Frobenius(rank, terms).build(num_rows, dim, init_std=0.5, generator=generator)
    A, B, basis = parts(table)
    sizes = [float(factor.square().mean().sqrt()) for factor in (A, B, basis)]
    assert sizes == pytest.approx([(0.5 / math.sqrt(rank * terms)) ** (1 / 3)] * 3, rel=0.05)
    values = (table.materialize(torch.arange(0, num_rows, 37)) / 0.5).double()
    assert abs(values.mean()) < 0.03
    assert abs(values.std() - 1) < 0.05
    torch.testing.assert_close(values.std(0), torch.ones(dim, dtype=torch.float64), rtol=0.1, atol=0)
    ordered = values.flatten().sort().values
    empirical = torch.arange(1, ordered.numel() + 1, dtype=torch.float64) / ordered.numel()
    assert (torch.special.ndtr(ordered) - empirical).abs().max() < 0.03


@pytest.mark.parametrize(
    ("num_rows", "dim", "rank", "terms"),
    [
        (20_000, 16, 8, 4),
        (20_001, 64, 16, 2),  # the last grid row has one id
        (5_000, 16, 32, 1),  # more directions than dim
        (4_999, 32, 1, 3),
        (53, 12, 3, 2),
        (101, 1, 3, 2),
        (5, 4, 2, 2),  # not one grid row is filled
        (1, 4, 8, 4),
    ],
)
def test_a_table_of_the_same_setting_is_fitted_exactly(num_rows: int, dim: int, rank: int, terms: int) -> None:
    weight = planted(num_rows, dim, rank, terms)
    table = Frobenius(rank, terms).fit(weight)
    assert table.fit_error < 1e-6
    assert (table.materialize() - weight).norm() / weight.norm() == pytest.approx(table.fit_error, abs=1e-12)


def test_a_fit_finds_the_table_under_noise_and_gets_better_with_every_sweep() -> None:
    torch.manual_seed(0)
    signal = planted(20_001, 16, 4, 2)
    weight = signal + 0.5 * torch.randn_like(signal)
    found = fit_factors(weight, grid_side(20_001), 4, 2)
    assert all(after < before + 1e-9 for before, after in pairwise(found.errors))
    table = Frobenius(4, 2).fit(weight)
    assert table.fit_error == pytest.approx(found.errors[-1], rel=1e-6)
    # The noise cannot be fitted; all but the share of it that 2,360 of 320,016 numbers can follow must be gone.
    assert table.fit_error == pytest.approx(float((weight - signal).norm() / weight.norm()), rel=0.02)
    assert (table.materialize() - signal).norm() / signal.norm() < 0.06


def test_what_cannot_be_fitted_falls_with_every_sweep_too() -> None:
    torch.manual_seed(0)
    errors = fit_factors(torch.randn(3_000, 16), grid_side(3_000), 8, 4, sweeps=20).errors
    assert len(errors) > 2
    assert all(after < before + 1e-9 for before, after in pairwise(errors))
    assert errors[-1] < 1


def test_the_size_of_blocks_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = planted(1_003, 8, 3, 2)
    whole = Frobenius(3, 2).fit(weight).materialize()
    monkeypatch.setattr("holdall.tables.frobenius_fit.BLOCK_NUMBERS", 100)
    torch.testing.assert_close(Frobenius(3, 2).fit(weight).materialize(), whole, rtol=1e-5, atol=1e-6)


def test_a_fitted_table_is_balanced_and_every_term_can_learn() -> None:
    """Two directions are enough for these rows: the other six contribute nothing, and must still be able to learn."""
    weight = planted(5_000, 16, 2, 1)
    table = Frobenius(8, 4).fit(weight)
    assert table.fit_error < 1e-6
    A, B, basis = parts(table)
    used = A.square().mean((0, 1)).sqrt() > 1e-3
    assert used.sum() == 2
    of_A, of_B, of_basis = A.square().mean((0, 1)).sqrt(), B.square().mean((0, 1)).sqrt(), basis.square().mean(1).sqrt()
    torch.testing.assert_close(of_A[used], of_B[used])
    assert (of_A[used] / of_basis[used]).log2().abs().max() < 1
    (table(torch.arange(5_000)[:, None]) * torch.randn(5_000, 16, dtype=torch.float64)).sum().backward()
    gradients = table.left.grad.square().mean(0).sqrt()
    assert gradients.min() > 1e-3 * gradients.max()


def test_fitting_twice_gives_the_same_and_leaves_the_global_generator_alone() -> None:
    weight = torch.randn(500, 8, generator=torch.Generator().manual_seed(0))
    first = Frobenius(4, 2).fit(weight, generator=torch.Generator().manual_seed(1))
    state = torch.get_rng_state()
    second = Frobenius(4, 2).fit(weight, generator=torch.Generator().manual_seed(2))
    assert torch.equal(first.materialize(), second.materialize())
    assert torch.equal(torch.get_rng_state(), state)


def test_rows_of_zeros() -> None:
    table = Frobenius().fit(torch.zeros(100, 8))
    assert table.fit_error == 0
    assert not table.materialize().any()
    table(torch.tensor([[7]])).sum().backward()
    assert table.left.grad.any()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_rows_that_are_no_numbers(bad: float) -> None:
    weight = torch.randn(100, 8)
    weight[3, 4] = bad
    with pytest.raises(ConfigError, match="NaN or infinity"):
        Frobenius().fit(weight)


def test_rows_of_another_shape() -> None:
    with pytest.raises(ConfigError, match="100 rows of dim 8"):
        FrobeniusTable.from_dense(torch.randn(100, 7), Frobenius().build(100, 8))


@pytest.mark.parametrize(("rank", "terms"), [(8, 4), (16, 2), (8, 3), (8, 2), (16, 4), (4, 2), (1, 1)])
def test_for_bytes_finds_the_published_shapes_again(rank: int, terms: int) -> None:
    for num_rows in LARGEST:
        wanted = Frobenius(rank, terms)
        found = Frobenius.for_bytes(num_rows, 128, wanted.num_bytes(num_rows, 128))
        if (rank, terms) == (16, 2):  # as wide as (8, 4), which is smaller
            wanted = Frobenius(8, 4)
        assert found == wanted


@settings(derandomize=True, deadline=None, max_examples=50)
@given(st.integers(1, 10**10), st.sampled_from([1, 3, 10, 16, 32, 64, 128, 256]), st.floats(0.001, 0.5))
def test_for_bytes_uses_its_budget(num_rows: int, dim: int, share: float) -> None:
    least = Frobenius(1, 1).num_bytes(num_rows, dim)
    budget = max(least, int(4 * num_rows * dim * share))
    method = Frobenius.for_bytes(num_rows, dim, budget)
    assert isinstance(method, Frobenius)
    assert 1 <= method.rank <= dim
    assert method.num_bytes(num_rows, dim) <= budget
    assert method.rank <= 8 * method.terms
    if budget > 8 * least and num_rows > 1000:
        assert method.num_bytes(num_rows, dim) > 0.7 * budget
    more = Frobenius.for_bytes(num_rows, dim, 2 * budget)
    assert more.rank * more.terms >= method.rank * method.terms


def test_for_bytes_below_the_smallest_table() -> None:
    least = Frobenius(1, 1).num_bytes(10**6, 64)
    assert Frobenius.for_bytes(10**6, 64, least) == Frobenius(1, 1)
    with pytest.raises(ConfigError, match=f"at least {least} bytes"):
        Frobenius.for_bytes(10**6, 64, least - 1)


@pytest.mark.parametrize("wrong", [{"rank": 0}, {"terms": 0}, {"rank": -3}, {"terms": 1.5}])
def test_impossible_settings(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(wrong))} must be 1 or more"):
        Frobenius(**wrong)
