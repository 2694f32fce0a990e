"""Hashed, quotient-remainder, MEmCom, ROBE and sketch tables, beyond the behaviour suite.

Formulas against plain loops, index arithmetic past 2^31, fits against dense linear algebra, byte budgets, gradients.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from holdall.common.errors import ConfigError
from holdall.tables import Hashed, MemCom, Method, QuotientRemainder, Robe, Sketch
from holdall.tables import fitting as fitting_module
from holdall.tables.fitting import grid_tiles
from holdall.tables.hashed import HashedTable
from holdall.tables.hashing import hash_buckets
from holdall.tables.memcom import MemComTable
from holdall.tables.quotient_remainder import QuotientRemainderTable
from holdall.tables.robe import RobeTable
from holdall.tables.sketch import SketchTable, random_transform

HUGE = [2**24 + 1, 2**31 + 1, 10**10]

METHODS: dict[str, Method] = {
    "hashed": Hashed(buckets=9, seed=2),
    "mult": QuotientRemainder(buckets=7),
    "mult of complete lines": QuotientRemainder(buckets=6),
    "mult of one line": QuotientRemainder(buckets=100),
    "add": QuotientRemainder(buckets=7, operation="add"),
    "concat": QuotientRemainder(buckets=7, operation="concat"),
    "memcom": MemCom(buckets=8),
    "memcom with bias": MemCom(buckets=8, bias=True),
    "robe": Robe(size=40, block=4),
    "robe without signs": Robe(size=30, block=3, signs=False),
    "sketch": Sketch(dim=3),
    "sketch of chunks": Sketch(dim=5, chunks=2),
}
methods = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=generator(seed), dtype=torch.float64)


def randomised(method: Method, num_rows: int, dim: int) -> torch.nn.Module:
    """A table all of whose parameters are random, so that scales and shifts count too."""
    table = method.build(num_rows, dim, dtype=torch.float64, init_std=1.0, generator=generator())
    with torch.no_grad():
        for position, parameter in enumerate(table.parameters()):
            parameter.copy_(normal(*parameter.shape, seed=position))
    return table


def edge_ids(num_rows: int) -> Tensor:
    middle = torch.randint(num_rows, (200,), generator=generator())
    return torch.cat([torch.tensor([0, 1, num_rows - 2, num_rows - 1]), middle])


# Formulas.


def test_a_hashed_table_without_collisions_is_dense() -> None:
    table = Hashed(buckets=50).build(30, 4)
    assert isinstance(table, HashedTable)
    assert torch.equal(table.materialize(), table.stored)


@pytest.mark.parametrize("operation", ["mult", "add", "concat"])
@pytest.mark.parametrize("dim", [5, 6])
def test_quotient_remainder_combines_each_id(operation: str, dim: int) -> None:
    table = randomised(QuotientRemainder(7, operation), 30, dim)
    assert isinstance(table, QuotientRemainderTable)
    assert table.quotient is not None
    for id, row in enumerate(table.materialize()):
        first, second = table.remainder[id % 7], table.quotient[id // 7]
        combined = {"mult": lambda a, b: a * b, "add": lambda a, b: a + b, "concat": lambda a, b: torch.cat([a, b])}
        torch.testing.assert_close(row, combined[operation](first, second), rtol=0, atol=0)
    bag = table(torch.tensor([3, 29]), torch.tensor([0]))[0]  # pooled after combining, not before
    torch.testing.assert_close(bag, table.materialize(torch.tensor([3, 29])).sum(0))


def test_memcom_scales_and_shifts_each_id() -> None:
    table = randomised(MemCom(7, bias=True), 30, 5)
    assert isinstance(table, MemComTable)
    assert table.shift is not None
    for id, row in enumerate(table.materialize()):
        torch.testing.assert_close(row, table.shared[id % 7] * table.scale[id] + table.shift[id], rtol=0, atol=0)


def test_robe_rows_are_blocks_of_the_array() -> None:
    table = randomised(Robe(size=60, block=4, seed=3), 30, 10)
    assert isinstance(table, RobeTable)
    places, signs = table.places(torch.arange(30))
    assert signs is not None
    for id, row in enumerate(table.materialize()):
        blocks = [sign * table.array[place] for place, sign in zip(places[id], signs[id], strict=True)]
        torch.testing.assert_close(row, torch.cat(blocks)[:10], rtol=0, atol=0)
    assert len({tuple(line) for line in places.tolist()}) == 30  # rows differ although they share every number
    assert set(signs.unique().tolist()) == {-1.0, 1.0}


@pytest.mark.parametrize(("k", "n"), [(1, 1), (1, 4), (2, 2), (3, 4), (4, 4), (2, 5), (3, 5), (5, 5), (6, 9), (8, 64)])
def test_sketch_transforms_are_orthonormal_with_equal_columns(k: int, n: int) -> None:
    transform = random_transform(k, n, seed=5)
    torch.testing.assert_close(transform @ transform.T, torch.eye(k, dtype=torch.float64), rtol=0, atol=1e-12)
    norms = transform.square().sum(0)
    torch.testing.assert_close(norms, torch.full((n,), k / n, dtype=torch.float64), rtol=0, atol=1e-12)
    assert n < 8 or not torch.equal(transform, random_transform(k, n, seed=6))


def test_sketch_chunks_do_not_mix() -> None:
    table = Sketch(dim=5, chunks=3).build(4, 11)
    assert isinstance(table, SketchTable)
    inside = torch.zeros(5, 11, dtype=torch.bool)
    inside[0:2, 0:4] = inside[2:4, 4:8] = inside[4:5, 8:11] = True
    assert not table.transform[~inside].any()
    assert (table.transform.square().sum(0) > 0).all()


# Past 2^31.


@pytest.mark.parametrize("num_rows", HUGE)
def test_hashed_and_robe_ids_are_exact(num_rows: int) -> None:
    ids = edge_ids(num_rows)
    hashed = Hashed(buckets=1009, seed=4).build(num_rows, 8, init_std=1.0)
    assert isinstance(hashed, HashedTable)
    assert torch.equal(hashed.rows(ids), hashed.stored[hash_buckets(ids, 1009, 4)])
    robe = Robe(size=4000, block=4, seed=4, signs=False).build(num_rows, 14, init_std=1.0)
    assert isinstance(robe, RobeTable)
    blocks = torch.tensor([[id * 4 + j for j in range(4)] for id in ids.tolist()])
    expected = robe.array[hash_buckets(blocks, 1000, 4)].flatten(1)[:, :14]
    assert torch.equal(robe.rows(ids), expected)


@pytest.mark.parametrize("num_rows", HUGE)
@pytest.mark.parametrize("buckets", [99_991, 2**17])
def test_quotients_and_remainders_are_exact(num_rows: int, buckets: int) -> None:
    table = QuotientRemainder(buckets).build(num_rows, 2, init_std=1.0)
    assert isinstance(table, QuotientRemainderTable)
    assert table.quotient is not None
    ids = edge_ids(num_rows)
    quotients, remainders = table.digits(ids)
    assert quotients.tolist() == [id // buckets for id in ids.tolist()]
    assert remainders.tolist() == [id % buckets for id in ids.tolist()]
    assert torch.equal(table.rows(ids), table.remainder[remainders] * table.quotient[quotients])


@pytest.mark.parametrize("num_rows", HUGE)
def test_memcom_buckets_are_exact(num_rows: int) -> None:
    table = MemCom(99_991).build(num_rows, 2, device="meta")  # a number for every id: too large to store here
    assert isinstance(table, MemComTable)
    assert table.buckets(edge_ids(num_rows)).tolist() == [id % 99_991 for id in edge_ids(num_rows).tolist()]
    assert MemCom(99_991).num_bytes(num_rows, 2) == 4 * (2 * 99_991 + num_rows) == table.num_bytes()
    assert Sketch(dim=3).num_bytes(num_rows, 16) == 4 * 3 * (num_rows + 16)
    assert Sketch(dim=3).build(num_rows, 16, device="meta").num_bytes() == 4 * 3 * (num_rows + 16)


# Gradients, numerically: sparse ones, which torch's gradcheck does not take.


@methods
def test_gradients_are_the_slopes(method: Method) -> None:
    table = randomised(method, 20, 5)
    table.use_sparse_gradients()
    ids, offsets, direction = torch.tensor([0, 19, 19, 8, 3]), torch.tensor([0, 2, 2]), normal(3, 5, seed=9)

    def loss() -> Tensor:
        return (table(ids, offsets).square() * direction).sum()

    loss().backward()
    for parameter in table.parameters():
        assert parameter.grad is not None
        assert parameter.grad.is_sparse
        gradient = parameter.grad.to_dense()
        slopes = torch.zeros_like(gradient)
        with torch.no_grad():
            for place in range(parameter.numel()):
                values = parameter.view(-1)
                kept, sides = values[place].clone(), []
                for step in (1e-5, -1e-5):
                    values[place] = kept + step
                    sides.append(loss())
                values[place] = kept
                slopes.view(-1)[place] = (sides[0] - sides[1]) / 2e-5
        torch.testing.assert_close(gradient, slopes, rtol=1e-6, atol=1e-7)


# Fits.


@methods
@pytest.mark.parametrize("block_numbers", [24, 1 << 20])
def test_a_representable_table_is_fitted_exactly(
    method: Method, block_numbers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fitting_module, "BLOCK_NUMBERS", block_numbers)  # blocks of four rows, or all at once
    target = randomised(method, 50, 6).materialize()
    table = method.fit(target)
    assert table.fit_error is not None
    assert table.fit_error < 1e-9
    torch.testing.assert_close(table.materialize(), target, rtol=1e-8, atol=1e-9)


def best_product(weight: Tensor, buckets: int) -> Tensor:
    """The best rank-one approximation of every column's grid: by SVD, or by long alternation if it is incomplete."""
    num_rows, dim = weight.shape
    lines = -(-num_rows // buckets)
    known = (torch.arange(lines * buckets) < num_rows).double().reshape(lines, buckets)
    grid = torch.zeros(lines * buckets, dim, dtype=torch.float64)
    grid[:num_rows] = weight
    grid = grid.reshape(lines, buckets, dim).permute(2, 0, 1)
    if bool(known.all()):
        u, s, v = torch.linalg.svd(grid, full_matrices=False)
        best = u[:, :, :1] * s[:, None, :1] @ v[:, :1]
    else:
        starts = normal(20, dim, buckets, 1)  # several, as the problem has local optima
        for _ in range(500):
            lefts = (grid @ starts) / (known @ starts.square())
            starts = (grid.mT @ lefts) / (known.mT @ lefts.square())
        candidates = lefts @ starts.mT
        errors = ((candidates - grid) * known).square().sum((2, 3))
        best = candidates[errors.argmin(0), torch.arange(dim)]
    return best.permute(1, 2, 0).reshape(-1, dim)[:num_rows]


def best_multiples(weight: Tensor, buckets: int, bias: bool) -> Tensor:
    """The best MEmCom fit: a rank-one approximation of the rows of every bucket, around their means with bias."""
    best = weight.mean(1, keepdim=True).expand_as(weight).clone() if bias else torch.zeros_like(weight)
    for bucket in range(buckets):
        u, s, v = torch.linalg.svd((weight - best)[bucket::buckets], full_matrices=False)
        best[bucket::buckets] += u[:, :1] * s[0] @ v[:1]
    return best


def best_linear(method: Method, weight: Tensor) -> Tensor:
    """Least squares over the parameters of a table that is linear in them, by a dense solve."""
    num_rows, dim = weight.shape
    table = method.build(num_rows, dim, dtype=torch.float64)
    parameters = list(table.parameters())
    columns = []
    with torch.no_grad():
        for parameter in parameters:
            for place in range(parameter.numel()):
                for other in parameters:
                    other.zero_()
                parameter.view(-1)[place] = 1.0
                columns.append(table.materialize().flatten())
    design = torch.stack(columns, dim=1)
    solution = torch.linalg.lstsq(design, weight.reshape(-1, 1), driver="gelsd").solution
    return (design @ solution).reshape(weight.shape)


@methods
def test_no_fit_is_better(method: Method) -> None:
    """For a table that the method cannot represent, the error is the least possible."""
    weight = normal(24, 6, seed=3) + normal(1, 6, seed=4)
    if isinstance(method, MemCom):
        best = best_multiples(weight, method.buckets, method.bias)
    elif isinstance(method, QuotientRemainder) and method.operation == "mult":
        best = best_product(weight, min(method.buckets, 24))
    else:
        best = best_linear(method, weight)
    table = method.fit(weight)
    error = float((weight - best).norm() / weight.norm())
    assert table.fit_error == pytest.approx(error, rel=2e-3, abs=1e-9)
    assert table.fit_error == pytest.approx(float((weight - table.materialize()).norm() / weight.norm()), abs=1e-12)


@methods
def test_a_zero_table_is_fitted(method: Method) -> None:
    table = method.fit(torch.zeros(50, 6))
    assert table.fit_error == 0.0
    assert all(torch.isfinite(parameter).all() for parameter in table.parameters())


@methods
def test_a_memory_mapped_float32_table_is_fitted(method: Method, tmp_path: Path) -> None:
    target = randomised(method, 50, 6).materialize().float()
    path = tmp_path / "weight.bin"
    path.write_bytes(target.numpy().tobytes())
    mapped = torch.from_file(str(path), shared=False, size=300, dtype=torch.float32).reshape(50, 6)
    table = method.fit(mapped)
    assert table.fit_error is not None
    assert table.fit_error < 1e-5
    assert next(table.parameters()).dtype == torch.float32


def test_fitted_factors_are_balanced() -> None:
    table = QuotientRemainder(buckets=8).fit(100 * normal(64, 4))
    assert isinstance(table, QuotientRemainderTable)
    assert table.quotient is not None
    torch.testing.assert_close(table.quotient.square().mean(0), table.remainder.square().mean(0))
    memcom = MemCom(buckets=8).fit(100 * normal(64, 4))
    assert isinstance(memcom, MemComTable)
    scales = memcom.scale.detach().reshape(8, 8)
    torch.testing.assert_close(scales.square().mean(0), torch.ones(8, dtype=torch.float64))
    assert (scales.mean(0) >= 0).all()


def test_a_weight_of_another_shape_is_refused() -> None:
    for method in METHODS.values():
        table = method.build(50, 6)
        with pytest.raises(ConfigError, match=r"50 rows of dim 6 to a weight of shape \(49, 6\)"):
            type(table).from_dense(torch.zeros(49, 6), table)


@settings(derandomize=True, deadline=None, max_examples=50)
@given(num_rows=st.integers(1, 60), width=st.integers(1, 60), dim=st.integers(1, 5), block=st.integers(1, 80))
def test_grid_tiles_hold_every_row_once(num_rows: int, width: int, dim: int, block: int) -> None:
    weight = torch.arange(num_rows * dim, dtype=torch.float64).reshape(num_rows, dim)
    seen = torch.full((-(-num_rows // width) * width, dim), -1.0, dtype=torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fitting_module, "BLOCK_NUMBERS", block)
        for q, r, values in grid_tiles(weight, width):
            assert values.numel() <= max(block, dim)
            place = seen.view(-1, width, dim)[q, r]
            assert (place == -1).all()
            place.copy_(values)
    assert torch.equal(seen[:num_rows], weight)
    assert (seen[num_rows:] == -1).all()


# Byte budgets.

BUDGETED = [Hashed, QuotientRemainder, MemCom, Robe, Sketch]


@settings(derandomize=True, deadline=None, max_examples=50)
@given(num_rows=st.integers(1, 10**10), dim=st.integers(1, 256), share=st.floats(1e-4, 1.5))
def test_budgets_are_used_and_kept(num_rows: int, dim: int, share: float) -> None:
    budget = int(4 * num_rows * dim * share)
    for kind in BUDGETED:
        try:
            method = kind.for_bytes(num_rows, dim, budget)
        except ConfigError as error:
            smallest = int(str(error).split("at least ")[1].split(" bytes")[0])
            assert smallest > budget
            assert kind.for_bytes(num_rows, dim, smallest).num_bytes(num_rows, dim) == smallest
            with pytest.raises(ConfigError, match="at least"):
                kind.for_bytes(num_rows, dim, smallest - 1)
            continue
        used = method.num_bytes(num_rows, dim)
        assert used <= budget
        most = Sketch(dim=dim).num_bytes(num_rows, dim) if kind is Sketch else 4 * num_rows * dim
        step = 4 * (num_rows + dim) if kind is Sketch else 4 * dim  # bytes of one more bucket
        assert used + step > budget or used >= most


@pytest.mark.parametrize(("num_rows", "dim"), [(10_000, 16), (7919, 33)])
def test_more_buckets_would_not_fit(num_rows: int, dim: int) -> None:
    for rows in (2 * math.isqrt(num_rows) + 2, 500, 2000, 5000):
        method = QuotientRemainder.for_bytes(num_rows, dim, 4 * dim * rows)
        for buckets in range(method.buckets + 1, num_rows + 1):
            assert QuotientRemainder(buckets).num_bytes(num_rows, dim) > 4 * dim * rows


# Settings.


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Hashed(buckets=0), "hashed: buckets must be at least 1, not 0"),
        (lambda: QuotientRemainder(buckets=0), "quotient_remainder: buckets must be at least 1"),
        (lambda: QuotientRemainder(buckets=3, operation="max"), "operation must be one of .* not 'max'"),
        (lambda: MemCom(buckets=-1), "memcom: buckets must be at least 1, not -1"),
        (lambda: MemCom(buckets=3, bias="no"), "bias must be true or false, not 'no'"),
        (lambda: Robe(size=8, block=0), "block must be at least 1, not 0"),
        (lambda: Robe(size=10, block=4), "size must be a positive multiple of block 4, not 10"),
        (lambda: Robe(size=0), "size must be a positive multiple of block 4, not 0"),
        (lambda: Sketch(dim=0), "dim must be at least 1, not 0"),
        (lambda: Sketch(dim=2, chunks=3), r"chunks must be from 1 to dim \(2\), not 3"),
    ],
)
def test_impossible_settings_are_refused(make: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()
