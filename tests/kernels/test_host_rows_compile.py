"""Compilation of the host-row kernels for a GPU of compute capability 9.0, without one."""

from __future__ import annotations

from typing import Any

import pytest

from holdall.kernels.dispatch import HAS_TRITON, INTERPRETED

if not HAS_TRITON:
    pytest.skip("Triton is not installed", allow_module_level=True)
if INTERPRETED:
    pytest.skip("Triton's interpreter is on: kernels are not compiled", allow_module_level=True)

import triton.language as tl

from holdall.kernels import host_rows_triton
from holdall.kernels.host_rows import BUFFER_SHIFT, NO_ROW
from tests.kernels.test_kernels_compile import compiled

LONG = {"rows", "cached", "source", "host_rows", "host_lookups", "order", "slots", "info", "starts", "seeds"}
SCALARS = {
    "num_lookups", "num_tables", "capacity", "table_stride", "sample_stride", "num_listed", "num_hot", "width",
    "buffer_rows", "own_buffer", "num_cached",
}  # fmt: skip


def types(kernel: Any, **others: str) -> dict[str, str]:
    found = {name: "*i64" if name in LONG else "i32" if name in SCALARS else "*i32" for name in kernel.arg_names}
    return {**found, "stds": "*fp32", "quantiles": "*fp32", "touched": "*u8", **others}


@pytest.mark.parametrize("wide", [False, True])
def test_find(wide: bool) -> None:
    located = "*i64" if wide else "*i32"
    kernel = host_rows_triton._find_kernel
    assert "atom" in compiled(kernel, 4, types(kernel, located=located), BLOCK=1024)
    kernel = host_rows_triton._number_kernel
    assert "st.global" in compiled(kernel, 4, types(kernel, located=located), NO_ROW=NO_ROW, BLOCK=256)


@pytest.mark.parametrize("write_back", [False, True])
@pytest.mark.parametrize(
    ("bits", "dtype", "lazy", "width"),
    [("*i32", tl.float32, True, 64), ("*i32", tl.float32, False, 1), ("*i16", tl.bfloat16, True, 16)],
)
def test_copy_rows(bits: str, dtype: Any, lazy: bool, width: int, write_back: bool) -> None:
    kernel = host_rows_triton._copy_rows_kernel
    code = compiled(
        kernel, 4, types(kernel, host=bits, buffer=bits), WRITE_BACK=write_back, SKIP_CACHED=not write_back, LAZY=lazy,
        MARK=lazy and write_back, STEPS=5 if lazy else 0, START_0=-5, START_1=7, DTYPE=dtype, BLOCK_N=1024 // width,
        BLOCK_W=width,
    )  # fmt: skip
    assert "ld.global" in code


@pytest.mark.parametrize("first", [False, True])
def test_find_in_buffer(first: bool) -> None:
    kernel = host_rows_triton._find_in_buffer_kernel
    settings = {"FIRST": first, "LAST": not first, "STEPS": 17, "BLOCK": 256}
    code = compiled(kernel, 4, types(kernel, first="i64"), NO_ROW=NO_ROW, **settings)
    assert "ld.global" in code


def test_copy_between_buffers() -> None:
    kernel = host_rows_triton._copy_between_buffers_kernel
    assert "ld.global" in compiled(kernel, 4, types(kernel), BUFFER_SHIFT=BUFFER_SHIFT, BLOCK_N=16, BLOCK_W=64)
