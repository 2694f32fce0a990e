"""The kernels that reach the host's rows compile for a GPU of compute capability 9.0, without one."""

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
from holdall.kernels.host_rows import NOBODY, ROOM_SHIFT
from tests.kernels.test_kernels_compile import compiled

LONG = {"rows", "held", "source", "far_rows", "far_lookups", "order", "places", "info", "starts", "seeds"}
SCALARS = {
    "num_lookups", "num_tables", "capacity", "table_stride", "sample_stride", "num_listed", "num_hot", "width",
    "room_rows", "own_room", "num_held",
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
    assert "st.global" in compiled(kernel, 4, types(kernel, located=located), NOBODY=NOBODY, BLOCK=256)


@pytest.mark.parametrize("home", [False, True])
@pytest.mark.parametrize(
    ("bits", "dtype", "lazy", "width"),
    [("*i32", tl.float32, True, 64), ("*i32", tl.float32, False, 1), ("*i16", tl.bfloat16, True, 16)],
)
def test_moves(bits: str, dtype: Any, lazy: bool, width: int, home: bool) -> None:
    kernel = host_rows_triton._move_kernel
    code = compiled(
        kernel, 4, types(kernel, far=bits, room=bits), HOME=home, FORWARDED=not home, LAZY=lazy, MARKED=lazy and home,
        STEPS=5 if lazy else 0, START_0=-5, START_1=7, DTYPE=dtype, BLOCK_N=1024 // width, BLOCK_W=width,
    )  # fmt: skip
    assert "ld.global" in code


@pytest.mark.parametrize("first", [False, True])
def test_held(first: bool) -> None:
    kernel = host_rows_triton._held_kernel
    settings = {"FIRST": first, "LAST": not first, "STEPS": 17, "BLOCK": 256}
    code = compiled(kernel, 4, types(kernel, first="i64"), NOBODY=NOBODY, **settings)
    assert "ld.global" in code


def test_take() -> None:
    kernel = host_rows_triton._take_kernel
    assert "ld.global" in compiled(kernel, 4, types(kernel), ROOM_SHIFT=ROOM_SHIFT, BLOCK_N=16, BLOCK_W=64)
