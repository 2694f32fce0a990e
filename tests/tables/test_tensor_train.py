"""Tensor trains: the fast path against the definition, exact digits, shapes, sizes, and the fit to given rows."""

from __future__ import annotations

import threading
from math import prod
from pathlib import Path

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from holdall.common.errors import ConfigError
from holdall.kernels import tensor_train as kernel
from holdall.kernels.tensor_train import row_digits, tensor_train_rows
from holdall.tables import TensorRing, TensorTrain, tt_svd
from holdall.tables.tensor_train import dim_factors, full_ranks, row_factors

# (sizes, dims, ranks): trains and rings of two to five cores, with modes of one and unequal ranks.
CHAINS = {
    "three cores": ((5, 4, 6), (2, 3, 2), (1, 3, 4, 1)),
    "prime modes": ((7, 13, 11), (1, 5, 3), (1, 2, 3, 1)),
    "two cores": ((7, 9), (3, 2), (1, 4, 1)),
    "four cores": ((3, 4, 2, 5), (2, 1, 3, 2), (1, 2, 5, 3, 1)),
    "ring": ((5, 4, 6), (2, 3, 2), (2, 3, 4, 2)),
    "ring of two": ((7, 9), (3, 2), (3, 4, 3)),
    "ring of five": ((3, 4, 2, 3, 3), (2, 1, 3, 2, 1), (2, 2, 5, 3, 2, 2)),
    "a long inner core": ((3, 40, 2), (2, 2, 2), (1, 3, 3, 1)),
    "a single row": ((1, 1, 1), (2, 1, 2), (1, 2, 2, 1)),
}
chains = pytest.mark.parametrize(("sizes", "dims", "ranks"), CHAINS.values(), ids=CHAINS.keys())


def random_cores(sizes: tuple[int, ...], dims: tuple[int, ...], ranks: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = zip(sizes, ranks[:-1], dims, ranks[1:], strict=True)
    return [torch.randn(s, dtype=torch.float64, generator=generator).requires_grad_() for s in shapes]


def lookups(num_rows: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "all": torch.arange(num_rows),
        "with repeats": torch.randint(num_rows, (50,), generator=generator),
        "the first": torch.tensor([0]),
        "the last, twice": torch.tensor([num_rows - 1, num_rows - 1]),
        "a few": torch.unique(torch.randint(num_rows, (7,), generator=generator)),
        "every third, backwards": torch.arange(0, num_rows, 3).flip(0),
    }


def assert_paths_agree(ids: Tensor, cores: list[Tensor]) -> None:
    expected = tensor_train_rows(ids, cores, "reference")
    found = tensor_train_rows(ids, cores, "fast")
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    direction = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    pairs = zip(*(torch.autograd.grad(rows, cores, direction) for rows in (found, expected)), strict=True)
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)


def test_the_reference_is_a_chain_of_products() -> None:
    cores = random_cores((5, 4, 6), (2, 3, 2), (1, 3, 4, 1))
    first, inner, last = (core.detach() for core in cores)
    for i1, i2, i3 in ((0, 0, 0), (4, 3, 5), (2, 0, 1), (0, 3, 2)):
        row = torch.zeros(2, 3, 2, dtype=torch.float64)
        for a in range(2):
            for b in range(3):
                for c in range(2):
                    row[a, b, c] = first[i1, 0, a] @ inner[i2, :, b] @ last[i3, :, c, 0]
        found = tensor_train_rows(torch.tensor([(i1 * 4 + i2) * 6 + i3]), cores, "reference")
        torch.testing.assert_close(found[0], row.flatten())


@chains
def test_the_fast_path_equals_the_reference(
    sizes: tuple[int, ...], dims: tuple[int, ...], ranks: tuple[int, ...]
) -> None:
    cores = random_cores(sizes, dims, ranks)
    for ids in lookups(prod(sizes)).values():
        assert_paths_agree(ids, cores)


@settings(derandomize=True, deadline=None, max_examples=50)
@given(st.lists(st.integers(0, 30 * 12 * 5 - 1), min_size=1, max_size=300), st.integers(0, 11), st.integers(0, 200))
def test_the_fast_path_on_any_skew(values: list[int], digit: int, popular: int) -> None:
    """Random ids beside many that share one inner digit: groups of every length, some split, some absent."""
    crowd = [(first % 30 * 12 + digit) * 5 + first % 5 for first in range(popular)]
    assert_paths_agree(torch.tensor(values + crowd), random_cores((30, 12, 5), (2, 1, 2), (1, 3, 2, 1)))


def test_the_fast_path_in_blocks_of_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "BLOCK_ELEMENTS", 200)
    cores = random_cores((5, 4, 6), (2, 3, 2), (1, 3, 4, 1))
    assert_paths_agree(torch.arange(120), cores)
    assert_paths_agree(torch.arange(119, -1, -2), cores)


def test_cores_may_lie_anyhow_in_memory() -> None:
    cores = random_cores((5, 4, 6), (2, 3, 2), (1, 3, 4, 1))
    strided = [core.detach().transpose(0, 3).contiguous().transpose(0, 3).requires_grad_() for core in cores]
    assert not strided[1].is_contiguous()
    assert_paths_agree(torch.arange(120), strided)


@chains
def test_numerical_gradients_of_the_fast_path(
    sizes: tuple[int, ...], dims: tuple[int, ...], ranks: tuple[int, ...]
) -> None:
    ids = torch.arange(0, prod(sizes), max(1, prod(sizes) // 5))
    cores = random_cores(sizes, dims, ranks)
    assert torch.autograd.gradcheck(lambda *c: tensor_train_rows(ids, c, "fast"), cores, fast_mode=True)


def test_second_derivatives_of_the_fast_path() -> None:
    cores = tuple(random_cores((5, 4, 6), (2, 3, 2), (1, 3, 4, 1)))
    ids = torch.arange(9)
    assert torch.autograd.gradgradcheck(lambda *c: tensor_train_rows(ids, c, "fast"), cores, fast_mode=True)


def test_absent_slices_get_no_gradient() -> None:
    cores = random_cores((5, 4, 6), (2, 3, 2), (1, 3, 4, 1))
    ids = torch.tensor([(1 * 4 + 2) * 6 + 3, (1 * 4 + 2) * 6 + 5, (3 * 4 + 2) * 6 + 3])
    gradients = torch.autograd.grad(tensor_train_rows(ids, cores, "fast").sum(), cores)
    for gradient, present in zip(gradients, ({1, 3}, {2}, {3, 5}), strict=True):
        assert {i for i, slice_ in enumerate(gradient) if slice_.any()} == present


def test_auto_takes_the_fast_path_for_many_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    monkeypatch.setattr("holdall.kernels.tensor_train._fast_rows", lambda ids, *cores: taken.append(ids.numel()))
    cores = random_cores((60, 60, 60), (2, 2, 2), (1, 16, 16, 1))
    for num_ids in (10, 2000):
        tensor_train_rows(torch.arange(num_ids), cores)
    assert taken == [2000]


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_a_table_on_the_fast_path(mode: str) -> None:
    tables = []
    for path in ("fast", "reference"):
        torch.manual_seed(0)
        table = TensorTrain(rank=5).build(1009, 12, mode=mode, padding_idx=3, dtype=torch.float64, init_std=1.0)
        table.path = path
        tables.append(table)
    ids = torch.randint(1009, (400,), generator=torch.Generator().manual_seed(3))
    ids[::50] = 3
    offsets = torch.tensor([0, 10, 10, 200])
    outputs = [table(ids, offsets) for table in tables]
    torch.testing.assert_close(*outputs, rtol=1e-12, atol=1e-12)
    for output in outputs:
        output.square().sum().backward()
    for ours, theirs in zip(*(table.cores for table in tables), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-10, atol=1e-11)


def test_the_fast_path_computes_in_the_type_of_the_cores() -> None:
    cores = random_cores((9, 8, 7), (2, 3, 2), (1, 4, 4, 1))
    expected = tensor_train_rows(torch.arange(500), cores, "fast").detach()
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 2e-2)):
        lower = [core.detach().to(dtype).requires_grad_() for core in cores]
        with torch.autocast("cpu", torch.bfloat16):
            rows = tensor_train_rows(torch.arange(500), lower, "fast")
        assert rows.dtype == dtype
        assert (rows.double() - expected).norm() <= tolerance * expected.norm()
        rows.sum().backward()
        assert all(core.grad.dtype == dtype for core in lower)


@pytest.mark.slow
def test_the_fast_path_under_compile() -> None:
    table = TensorTrain(rank=4).build(211, 8, dtype=torch.float64, init_std=1.0)
    table.path = "fast"
    ids = torch.arange(0, 200, 2)[:, None]
    expected = table(ids)
    expected.sum().backward()
    gradients = [core.grad.clone() for core in table.cores]
    table.zero_grad()
    found = torch.compile(table, backend="aot_eager")(ids)
    found.sum().backward()
    torch._dynamo.reset()
    torch.testing.assert_close(found, expected)
    for core, gradient in zip(table.cores, gradients, strict=True):
        torch.testing.assert_close(core.grad, gradient)


def test_threads_do_not_share_scratch_memory() -> None:
    cores = random_cores((9, 8, 7), (2, 3, 2), (1, 4, 4, 1))
    ids = [torch.arange(start, start + 400) for start in range(8)]
    expected = [tensor_train_rows(i, cores, "reference").detach() for i in ids]
    wrong: list[float] = []

    def look_up(k: int) -> None:
        wrong.extend(
            float((tensor_train_rows(ids[k], cores, "fast").detach() - expected[k]).abs().max()) for _ in range(50)
        )

    threads = [threading.Thread(target=look_up, args=(k,)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(wrong) == 8 * 50
    assert max(wrong) < 1e-12


@pytest.mark.parametrize("num_rows", [2**24 + 1, 2**31 + 7, 10**10, 2**62])
def test_digits_are_exact(num_rows: int) -> None:
    sizes = row_factors(num_rows, 3)
    ids = [0, 1, sizes[2] - 1, sizes[2], num_rows // 3, 2**24 - 1, num_rows - 2, num_rows - 1]
    for value, *digits in zip(ids, *(d.tolist() for d in row_digits(torch.tensor(ids), sizes)), strict=True):
        rest, last = divmod(value, sizes[2])
        assert digits == [rest // sizes[1], rest % sizes[1], last]
        assert all(0 <= digit < size for digit, size in zip(digits, sizes, strict=True))


@pytest.mark.parametrize("num_rows", [2**24 + 1, 2**31 + 7, 10**10])
def test_rows_of_large_tables_are_the_right_products(num_rows: int) -> None:
    table = TensorTrain(rank=2).build(num_rows, 8, dtype=torch.float64, init_std=1.0)
    first, inner, last = (core.detach() for core in table.cores)
    ids = [num_rows - 1, 0, num_rows // 2, 2**24, num_rows - 2]
    for path in ("reference", "fast"):
        table.path = path
        for value, row in zip(ids, table.materialize(torch.tensor(ids)), strict=True):
            i12, i3 = divmod(value, len(last))
            i1, i2 = divmod(i12, len(inner))
            expected = torch.einsum("ar,rbs,sc->abc", first[i1, 0], inner[i2], last[i3, :, :, 0])
            torch.testing.assert_close(row, expected.flatten())


def test_ten_billion_rows_train_and_save_in_a_few_megabytes(tmp_path: Path) -> None:
    """5 TB dense. Two distant ids are trained to planted rows; the file of all rows stays small."""
    num_rows, dim = 10**10, 128
    table = TensorTrain(rank=16).build(num_rows, dim, init_std=0.1, generator=torch.Generator().manual_seed(0))
    ids = torch.tensor([[num_rows - 1], [3]])
    targets = torch.stack([torch.linspace(-1, 1, dim), torch.ones(dim)])
    optimizer = torch.optim.SGD(table.parameters(), lr=0.2)
    losses = []
    for _ in range(2):
        loss = (table(ids) - targets).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[1] < 0.95 * losses[0]
    save_file(table.state_dict(), tmp_path / "table.safetensors")
    assert table.num_bytes() < (tmp_path / "table.safetensors").stat().st_size < 200e6
    assert table.num_bytes() == TensorTrain(rank=16).num_bytes(num_rows, dim)


@settings(derandomize=True, deadline=None, max_examples=50)
@given(st.integers(1, 10**11), st.integers(2, 5))
def test_row_factors_cover_the_rows_closely(num_rows: int, count: int) -> None:
    factors = row_factors(num_rows, count)
    assert len(factors) == count
    assert prod(factors) >= num_rows
    assert max(factors) <= min(factors) + 1 or prod(factors) <= 1.2 * num_rows
    smaller = sorted(factors)
    smaller[-1] -= 1
    assert prod(smaller) < num_rows  # no factor is larger than it must be


def test_shapes_of_known_tables() -> None:
    assert row_factors(10_000_000, 3) == (216, 215, 216)
    assert row_factors(7_912_889, 3) == (199, 199, 200)  # a prime
    assert row_factors(1, 4) == (1, 1, 1, 1)
    shapes = {1: (1, 1, 1), 8: (2, 2, 2), 13: (1, 1, 13), 16: (2, 2, 4), 24: (3, 2, 4), 64: (4, 4, 4), 128: (4, 4, 8)}
    assert {dim: dim_factors(dim, 3) for dim in shapes} == shapes
    assert dim_factors(64, 4) == (4, 2, 2, 4)


@pytest.mark.parametrize("dim", [1, 2, 13, 32, 200, 251, 256])
def test_every_dim(dim: int) -> None:
    table = TensorTrain(rank=3).build(7_912_889, dim, init_std=1.0)
    rows = table(torch.tensor([[0], [7_912_888]]))
    assert rows.shape == (2, dim)
    assert rows.any(dim=1).all()


def test_explicit_shapes() -> None:
    table = TensorTrain(rank=3, row_shape=(2, 7, 3), dim_shape=(3, 1, 4)).build(37, 12)
    assert [tuple(core.shape) for core in table.cores] == [(2, 1, 3, 3), (7, 3, 1, 3), (3, 3, 4, 1)]
    assert TensorTrain(rank=3, row_shape=[2, 7, 3]) == TensorTrain(rank=3, row_shape=(2, 7, 3))  # type: ignore[arg-type]


def test_bad_settings_name_the_cure() -> None:
    for settings_, message in (
        ({"rank": 0}, "rank must be an integer of at least 1, not 0"),
        ({"rank": 2.5}, "not 2.5"),
        ({"rank": 4, "cores": 1}, "cores must be an integer of at least 2"),
        ({"rank": 4, "row_shape": (4, 5)}, r"2 factors for 3 cores; set cores=2"),
        ({"rank": 4, "dim_shape": (4, 0, 2)}, "dim_shape must be 3 integers of at least 1"),
    ):
        with pytest.raises(ConfigError, match=f"tensor_train: .*{message}"):
            TensorTrain(**settings_)
    with pytest.raises(
        ConfigError, match=r"row_shape .* makes 7880400 rows, but the table has 7912889; \(199, 199, 200\)"
    ):
        TensorTrain(rank=4, row_shape=(199, 200, 198)).build(7_912_889, 16)
    with pytest.raises(ConfigError, match=r"makes 18 numbers per row, but dim is 16; \(2, 2, 4\) would do"):
        TensorTrain(rank=4, dim_shape=(3, 3, 2)).num_parameters(100, 16)


@settings(derandomize=True, deadline=None, max_examples=40)
@given(
    st.sampled_from([TensorTrain, TensorRing]),
    st.integers(1, 10**9),
    st.sampled_from([1, 13, 16, 32, 64, 128, 100]),
    st.integers(1_000, 10**8),
)
def test_the_largest_rank_within_a_budget(cls: type[TensorTrain], num_rows: int, dim: int, budget: int) -> None:
    smallest = cls(rank=1).num_bytes(num_rows, dim)
    if budget < smallest:
        with pytest.raises(ConfigError, match=f"takes at least {smallest} bytes .* not {budget}"):
            cls.for_bytes(num_rows, dim, budget)
        return
    method = cls.for_bytes(num_rows, dim, budget)
    assert method.num_bytes(num_rows, dim) <= budget
    full = max(full_ranks(method.rows_split(num_rows), method.dim_split(dim)))
    assert method.rank == full or cls(rank=method.rank + 1).num_bytes(num_rows, dim) > budget


@pytest.mark.parametrize("method", [TensorTrain(rank=1), TensorTrain(rank=2), TensorTrain(rank=3, cores=4)])
def test_one_number_over_many_seeds_is_gaussian(method: TensorTrain) -> None:
    """A product of Gaussian cores would have heavy tails at such ranks: a Kolmogorov-Smirnov distance of 0.1."""
    tables = (method.build(60, 8, init_std=1.0, generator=torch.Generator().manual_seed(k)) for k in range(600))
    values = torch.stack([table.materialize(torch.tensor([41]))[0, 5] for table in tables]).double().sort().values
    empirical = torch.arange(1, 601, dtype=torch.float64) / 600
    assert (torch.special.ndtr(values) - empirical).abs().max() < 0.06
    assert abs(values.std() - 1) < 0.06


@pytest.mark.parametrize("method", [TensorTrain(rank=16), TensorTrain(rank=8, cores=4), TensorRing(rank=8)])
def test_the_scale_is_spread_evenly(method: TensorTrain) -> None:
    table = method.build(100_000, 64, generator=torch.Generator().manual_seed(0))
    scales = [float(core.detach().square().mean().sqrt()) for core in table.cores]
    assert max(scales) < 1.05 * min(scales)


# The fit to given rows


def planted(num_rows: int, dim: int, seed: int = 0) -> Tensor:
    return torch.randn(num_rows, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def unfoldings(weight: Tensor, sizes: tuple[int, ...], dims: tuple[int, ...]) -> list[Tensor]:
    """Every cut of the padded tensor of modes (n_k d_k) into a matrix."""
    padded = torch.zeros(prod(sizes), weight.shape[1], dtype=weight.dtype)
    padded[: len(weight)] = weight
    count = len(sizes)
    axes = [axis for k in range(count) for axis in (k, count + k)]
    tensor = padded.view(*sizes, *dims).permute(axes).reshape([n * d for n, d in zip(sizes, dims, strict=True)])
    return [tensor.reshape(prod(tensor.shape[:k]), -1) for k in range(1, count)]


@pytest.mark.parametrize("cores", [2, 3, 4, 5])
def test_a_tensor_train_is_fitted_exactly(cores: int) -> None:
    """For any padding: 211 rows leave the grid unfinished in every number of cores."""
    method = TensorTrain(rank=4, cores=cores)
    assert prod(method.rows_split(211)) > 211
    weight = method.build(211, 24, dtype=torch.float64, init_std=1.0).materialize()
    table = method.fit(weight)
    assert table.fit_error is not None
    assert table.fit_error < 1e-12
    torch.testing.assert_close(table.materialize(), weight)


def test_any_table_is_fitted_exactly_at_full_rank() -> None:
    weight = planted(37, 12)
    for cores in (2, 3, 4):
        table = TensorTrain(rank=1000, cores=cores).fit(weight)
        assert table.fit_error is not None
        assert table.fit_error < 1e-12
        torch.testing.assert_close(table.materialize(), weight)


@pytest.mark.parametrize("gram", [True, False])
def test_two_cores_reach_the_least_error(monkeypatch: pytest.MonkeyPatch, gram: bool) -> None:
    """Two cores are a matrix factorisation: Eckart and Young give the error of the best one."""
    if not gram:
        monkeypatch.setattr(tt_svd, "LARGEST_GRAM", 4)
    method = TensorTrain(rank=7, cores=2)
    weight = planted(196, 12)  # a full grid
    (matrix,) = unfoldings(weight, method.rows_split(196), method.dim_split(12))
    least = float(torch.linalg.svdvals(matrix)[7:].norm() / matrix.norm())
    table = method.fit(weight)
    assert table.fit_error is not None
    assert least * (1 - 1e-9) <= table.fit_error <= least * (1 + (1e-9 if gram else 0.01))


@pytest.mark.parametrize("cores", [3, 4, 5])
def test_the_error_is_within_the_bound_of_tt_svd(cores: int) -> None:
    method = TensorTrain(rank=6, cores=cores)
    sizes, dims = method.rows_split(500), method.dim_split(16)
    weight = planted(prod(sizes), 16)  # a full grid
    ranks = method.ranks(prod(sizes), 16)
    left_out = [
        float(torch.linalg.svdvals(matrix)[rank:].norm() / matrix.norm())
        for matrix, rank in zip(unfoldings(weight, sizes, dims), ranks[1:-1], strict=True)
    ]
    error = method.fit(weight).fit_error
    assert error is not None
    assert max(left_out) * (1 - 1e-9) <= error <= sum(e**2 for e in left_out) ** 0.5 + 1e-9


@pytest.mark.parametrize("cores", [2, 3, 4])
def test_a_fit_in_small_blocks_from_a_memory_map(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cores: int) -> None:
    weight = planted(301, 12)
    expected = TensorTrain(rank=5, cores=cores).fit(weight)
    mapped = numpy.memmap(tmp_path / "weight", dtype=numpy.float64, mode="w+", shape=(301, 12))
    mapped[:] = weight.numpy()
    largest = 0
    read = tt_svd._Rows.read

    def watched(*arguments: object) -> Tensor:
        nonlocal largest
        block = read(*arguments)  # type: ignore[arg-type]
        largest = max(largest, block.numel())
        return block

    monkeypatch.setattr(tt_svd._Rows, "read", watched)
    monkeypatch.setattr(tt_svd, "BLOCK_NUMBERS", 300)
    table = TensorTrain(rank=5, cores=cores).fit(torch.from_numpy(mapped))
    torch.testing.assert_close(table.materialize(), expected.materialize(), rtol=1e-8, atol=1e-9)
    assert 0 < largest <= 300


def test_a_fit_is_balanced_and_keeps_types() -> None:
    weight = planted(200, 16).float() * 1e-3
    table = TensorTrain(rank=5).fit(weight)
    scales = [float(core.detach().square().mean().sqrt()) for core in table.cores]
    assert max(scales) < 1.001 * min(scales)
    assert all(core.dtype == torch.float32 for core in table.cores)
    zero = TensorTrain(rank=5).fit(torch.zeros(20, 4))
    assert zero.fit_error == 0.0
    assert not zero.materialize().any()


def test_a_fit_to_rows_of_another_shape_is_refused() -> None:
    table = TensorTrain(rank=2).build(20, 4)
    with pytest.raises(ConfigError, match=r"20 rows of dim 4 to a weight of shape \(20, 5\)"):
        type(table).from_dense(torch.zeros(20, 5), table)
