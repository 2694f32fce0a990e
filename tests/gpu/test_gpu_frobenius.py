"""The Frobenius kernels on a GPU: float64 references, duplicates, both ends, past 2^31 elements, determinism, steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch

from holdall.kernels.dispatch import HAS_TRITON

if not torch.cuda.is_available():
    pytest.skip("there is no GPU", allow_module_level=True)
if not HAS_TRITON:
    pytest.skip("Triton is not installed", allow_module_level=True)

from benchmarks.gpu_timing import captured
from holdall.data.batch import Ids
from holdall.embedding.bags import EmbeddingBags
from holdall.kernels.frobenius import frobenius_bags, frobenius_rows_many
from holdall.kernels.side_stream import one_after_the_other
from holdall.optim.config import OptimizerConfig
from holdall.optim.optimizers import Optimizers
from holdall.tables import Frobenius
from tests.kernels import dense_frobenius_checks
from tests.kernels import frobenius_checks as checks


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("kind", ["random", "one row", "long runs", "distinct"])
def test_rows_of_several_tables(kind: str) -> None:
    tolerance = 2e-5 if kind == "one row" else None  # 20,011 numbers added up one after the other
    checks.check_many((160, 504, 2864), 8, 4, 128, 20_011, kind=kind, device="cuda", tolerance=tolerance)


@pytest.mark.parametrize(("rank", "terms", "dim"), [(24, 1, 100), (16, 4, 16), (3, 5, 7), (32, 4, 256)])
def test_odd_sizes(rank: int, terms: int, dim: int) -> None:
    checks.check_many((8, 88), rank, terms, dim, 1003, device="cuda")
    checks.check_many((8, 88), rank, terms, dim, 1, device="cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_factors(dtype: torch.dtype) -> None:
    checks.check_many((160, 504), 8, 4, 128, 5003, dtype=dtype, kind="long runs", device="cuda")


@pytest.mark.parametrize("scaled", [False, True])
def test_bags(scaled: bool) -> None:
    checks.check_bags(160, 8, 4, 64, 1003, scaled=scaled, device="cuda")
    checks.check_bags(160, 8, 4, 64, 1003, scaled=scaled, sparse=True, device="cuda")


def test_columns_and_strides() -> None:
    checks.check_columns("cuda")


def test_deterministic_gradients_are_bit_equal_over_repeats() -> None:
    with deterministic():
        checks.check_many((160, 504), 8, 4, 128, 20_011, kind="long runs", device="cuda")
        generator = torch.Generator().manual_seed(0)
        factors = checks.on([checks.some_factors(160, 8, 4, 128, generator)], torch.float32, "cuda")
        ids = (torch.rand(1, 50_000, device="cuda") ** 4 * 160 * 160).long()
        direction = torch.randn(1, 50_000, 128, device="cuda")
        table = (factors[0], factors[1], factors[2])
        results = [
            torch.autograd.grad(frobenius_rows_many([table], ids, path="triton"), factors, direction) for _ in range(4)
        ]
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


def test_past_two_billion_elements() -> None:
    """An output of more than 2^31 numbers and ids of more than 2^31: its last rows, and their gradient alone."""
    side, num_lookups = 50_000, 2**31 // 128 + 1000
    generator = torch.Generator().manual_seed(0)
    factors = checks.on([checks.some_factors(side, 8, 4, 128, generator)], torch.bfloat16, "cuda")
    ids = torch.zeros(num_lookups, dtype=torch.int64, device="cuda")
    ids[-3:] = torch.tensor([0, side * side - 1, side * side - side])
    rows = frobenius_bags(factors[0], factors[1], factors[2], ids, None, path="triton")
    grad = torch.zeros_like(rows)
    grad[-3:] = 1.0
    found = torch.autograd.grad(rows, factors, grad)
    exact = [factor.detach().double().requires_grad_() for factor in factors]
    expected = checks.frobenius_bags_reference(exact[0], exact[1], exact[2], ids[-3:], None, None)
    wanted = torch.autograd.grad(expected, exact, torch.ones_like(expected))
    assert checks.error(rows[-3:].detach(), expected.detach()) < 8e-3
    assert checks.error(rows[[0, 123_456, -1000]].detach(), expected[:1].detach().expand(3, -1)) < 8e-3
    for gradient, value in zip(found, wanted, strict=True):
        assert checks.error(gradient, value) < 8e-3


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "adam"])
def test_placed_steps_equal_plain_torch(optimizer: str) -> None:
    for found, expected in zip(
        *(dense_frobenius_checks.steps(p, optimizer, "cuda") for p in ("triton", "torch")), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=2e-5, atol=5e-6)


def steps_of(way: str) -> list[torch.Tensor]:
    """Every parameter after four steps of dense and Frobenius tables: "launched", a "graph", or one "in order"."""
    rows = {"a": 50_000, "b": 700_000, "c": 7, "d": 90_000, "e": 3_000_000}
    methods = {"b": Frobenius(), "d": Frobenius()}
    generator = torch.Generator("cuda").manual_seed(0)
    bags = EmbeddingBags.build(rows, 64, methods, device="cuda", generator=generator)
    optimizers = Optimizers(bags, OptimizerConfig(name="sgd", lr=0.1))
    start = [parameter.detach().clone() for parameter in bags.parameters()]
    values = torch.zeros(len(rows), 16_384, dtype=torch.int32, device="cuda")

    def step() -> None:
        bags(Ids(values, None, len(rows))).square().sum().backward()
        optimizers.step()

    run = step
    with one_after_the_other() if way == "in order" else nullcontext():
        if way != "launched":
            replay = captured(step)

            def run() -> None:
                optimizers.prepare()
                replay()

            with torch.no_grad():
                for parameter, value in zip(bags.parameters(), start, strict=True):
                    parameter.copy_(value)
        for seed in range(4):
            drawn = torch.rand(values.shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda") ** 3
            values.copy_(drawn * torch.tensor(list(rows.values()), device="cuda")[:, None])
            run()
    return [parameter.detach() for parameter in bags.parameters()]


def test_a_graph_and_its_branches_change_nothing() -> None:
    with deterministic():
        expected = steps_of("launched")
        for way in ("graph", "in order"):
            for found, value in zip(steps_of(way), expected, strict=True):
                assert torch.equal(found, value)
