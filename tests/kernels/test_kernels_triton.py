"""The Triton kernels in Triton's interpreter, on small shapes: `TRITON_INTERPRET=1 pytest tests/kernels`."""

from __future__ import annotations

import pytest
import torch

from holdall.kernels.dispatch import HAS_TRITON, INTERPRETED

if not HAS_TRITON:
    pytest.skip("Triton is not installed", allow_module_level=True)
if not INTERPRETED:
    pytest.skip("Triton's interpreter is off: set TRITON_INTERPRET=1", allow_module_level=True)

from holdall.optim.optimizer_kinds import OPTIMIZER_KINDS
from tests.kernels import triton_checks as checks


@pytest.mark.parametrize("optimizer", OPTIMIZER_KINDS)
@pytest.mark.parametrize(
    ("kind", "num_lookups", "dim"),
    [("random", 1, 8), ("random", 37, 13), ("one row", 40, 32), ("long runs", 61, 9), ("distinct", 33, 8)],
)
def test_updates(optimizer: str, kind: str, num_lookups: int, dim: int) -> None:
    checks.check_update(optimizer, num_lookups=num_lookups, num_rows=41, dim=dim, kind=kind)


@pytest.mark.parametrize("optimizer", OPTIMIZER_KINDS)
@pytest.mark.parametrize("kind", ["one row", "long runs"])
def test_updates_with_weight_decay(optimizer: str, kind: str) -> None:
    checks.check_update(optimizer, num_lookups=40, num_rows=41, dim=13, kind=kind, weight_decay=0.3)


@pytest.mark.parametrize("weighted", [False, True])
def test_updates_from_bags(weighted: bool) -> None:
    checks.check_update("sgd", num_lookups=50, num_rows=9, dim=16, bags=7, weighted=weighted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_updates_of_narrow_rows_and_gradients(dtype: torch.dtype) -> None:
    checks.check_update("adagrad", num_lookups=30, num_rows=9, dim=16, weight_dtype=dtype, grad_dtype=torch.bfloat16)


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize(("size", "num_vectors", "dim"), [(3, 27, 16), (2, 5, 3), (1, 33, 20), (2, 2, 128)])
def test_interaction(size: int, num_vectors: int, dim: int, first: bool) -> None:
    checks.check_interaction(size, num_vectors, dim, torch.float32, first=first)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_gather(dtype: torch.dtype) -> None:
    checks.check_gather((7, 5), 11, 12, dtype)
    checks.check_gather((300,), 2, 128, dtype)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("mean", [False, True])
def test_pool(weighted: bool, mean: bool) -> None:
    checks.check_pool(3, 7, 20, weighted=weighted, mean=mean)
    checks.check_pool(1, 1, 128, weighted=weighted, mean=mean)


@pytest.mark.parametrize("optimizer", OPTIMIZER_KINDS)
def test_settings_on_the_device(optimizer: str) -> None:
    checks.check_settings_on_the_device(optimizer)


@pytest.mark.parametrize(("num_lookups", "kind"), [(1, "random"), (40, "one row"), (61, "long runs"), (33, "distinct")])
def test_norm_of_summed_gradients(num_lookups: int, kind: str) -> None:
    checks.check_norm(num_lookups, 41, 9, kind)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("optimizer", OPTIMIZER_KINDS)
def test_stochastic_rounding_is_that_of_plain_torch(optimizer: str, dtype: torch.dtype) -> None:
    checks.check_stochastic(optimizer, dtype)


def test_written_columns_and_row_numbers() -> None:
    checks.check_write_columns()
