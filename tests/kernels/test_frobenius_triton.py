"""The Frobenius kernels in Triton's interpreter, on small shapes: `TRITON_INTERPRET=1 pytest tests/kernels`."""

from __future__ import annotations

import pytest
import torch

from holdall.common.errors import ConfigError
from holdall.kernels.dispatch import HAS_TRITON, INTERPRETED
from holdall.kernels.frobenius import frobenius_bags, frobenius_rows_many

if not HAS_TRITON:
    pytest.skip("Triton is not installed", allow_module_level=True)
if not INTERPRETED:
    pytest.skip("Triton's interpreter is off: set TRITON_INTERPRET=1", allow_module_level=True)

from tests.kernels import frobenius_checks as checks
from tests.kernels.triton_checks import second_derivatives


@pytest.fixture(autouse=True)
def _small_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few lookups a program and few programs, so that every loop has several iterations."""
    from holdall.kernels import frobenius_triton

    monkeypatch.setitem(frobenius_triton.U, "numbers", 64)
    monkeypatch.setitem(frobenius_triton.ROWS, "numbers", 64)
    monkeypatch.setitem(frobenius_triton.ROWS_BY_MATRIX, "tiles", 2)
    for name, size in (("BASIS", "bags"), ("PRECISE_BASIS", "bags"), ("SCATTER", "lookups")):
        settings = getattr(frobenius_triton, name)
        monkeypatch.setitem(settings, size, 16)
        monkeypatch.setitem(settings, "programs", 4)


@pytest.mark.parametrize(
    ("sides", "rank", "terms", "dim", "num_lookups", "kind"),
    [
        ((8, 24, 16), 8, 4, 16, 37, "random"),
        ((40,), 3, 5, 7, 50, "long runs"),
        ((8, 8), 24, 1, 20, 33, "one row"),
        ((16, 48), 1, 1, 1, 1, "random"),
        ((8,), 16, 4, 33, 64, "distinct"),
    ],
)
def test_rows_of_several_tables(
    sides: tuple[int, ...], rank: int, terms: int, dim: int, num_lookups: int, kind: str
) -> None:
    checks.check_many(sides, rank, terms, dim, num_lookups, kind=kind)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_factors(dtype: torch.dtype) -> None:
    checks.check_many((8, 16), 8, 4, 16, 37, dtype=dtype)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("sparse", [False, True])
def test_bags(scaled: bool, sparse: bool) -> None:
    checks.check_bags(16, 8, 2, 12, 23, scaled=scaled, sparse=sparse)


@pytest.mark.parametrize("kind", ["rows", "bags", "scaled bags", "sparse rows", "many"])
def test_second_derivatives(kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    tables = [checks.some_factors(8, 3, 2, 5, generator) for _ in range(2 if kind == "many" else 1)]
    ids = torch.tensor([0, 63, 63, 7, 22, 7])
    offsets = torch.tensor([0, 2, 2, 6]) if "bags" in kind else None
    results = []
    for dtype, path in ((torch.float32, "triton"), (torch.float64, "torch")):
        factors = checks.on(tables, dtype, "cpu")
        scale = torch.arange(1, 7, dtype=dtype).requires_grad_() if kind == "scaled bags" else None
        if kind == "many":
            pairs = list(zip(factors[::3], factors[1::3], factors[2::3], strict=True))
            output = frobenius_rows_many(pairs, torch.stack([ids, ids.flip(0)]), path=path)
        else:
            output = frobenius_bags(*factors, ids, offsets, scale, sparse=kind == "sparse rows", path=path)
        results.append(second_derivatives(output, [*factors, *([] if scale is None else [scale])]))
    for ours, wanted in zip(*results, strict=True):
        assert checks.error(ours, wanted) < 1e-5


def test_columns_and_strides() -> None:
    checks.check_columns()


def test_deterministic_sums_are_the_same_sums() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        checks.check_many((8, 24, 16), 8, 4, 16, 37, kind="long runs")
    finally:
        torch.use_deterministic_algorithms(False)


def test_no_lookups_and_only_empty_bags() -> None:
    table = tuple(t.requires_grad_() for t in checks.some_factors(8, 2, 2, 4, torch.Generator().manual_seed(0)))
    rows = frobenius_rows_many([table, table], torch.zeros(2, 0, dtype=torch.int64), path="triton")  # type: ignore[list-item]
    assert rows.shape == (2, 0, 4)
    empty = torch.zeros(0, dtype=torch.int64)
    bags = frobenius_bags(*table, empty, torch.zeros(4, dtype=torch.int64), path="triton")  # type: ignore[call-arg]
    assert bags.tolist() == [[0.0] * 4] * 3
    for gradient in torch.autograd.grad(bags.sum() + rows.sum(), table):
        assert not gradient.any()


def test_shapes_the_kernels_do_not_take_are_an_error_when_asked_for_by_name() -> None:
    left, right, basis = checks.some_factors(8, 64, 3, 4, torch.Generator().manual_seed(0))
    ids = torch.tensor([3, 5])
    with pytest.raises(ConfigError, match="the Frobenius lookup was asked to use Triton, whose kernels do not take"):
        frobenius_bags(left, right, basis, ids, None, path="triton")
    assert frobenius_bags(left, right, basis, ids, None).shape == (2, 4)
