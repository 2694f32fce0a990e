"""Compilation of the Triton kernels for a GPU of compute capability 9.0, without one.

It finds what the interpreter accepts: in Python a variable may change its shape in a loop; the compiler refuses that.
"""

from __future__ import annotations

from typing import Any

import pytest

from holdall.kernels.dispatch import HAS_TRITON, INTERPRETED

if not HAS_TRITON:
    pytest.skip("Triton is not installed", allow_module_level=True)
if INTERPRETED:
    pytest.skip("Triton's interpreter is on: kernels are not compiled", allow_module_level=True)

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from holdall.kernels import (
    band_gradients_triton,
    bands_triton,
    code_rows_triton,
    interaction_triton,
    lookup_triton,
    row_update_triton,
)
from holdall.kernels import frobenius_kernels_triton as frobenius
from holdall.kernels.row_update import UpdateRule

SCALARS = {
    "lr": "fp32",
    "eps": "fp32",
    "beta1": "fp32",
    "beta2": "fp32",
    "correction1": "fp32",
    "correction2": "fp32",
    "decay": "fp32",
}
INTEGERS = {
    "meta", "values", "offsets", "bag_of", "rows", "info", "ids", "order", "crossing", "num_crossing", "key",
    "lookup_weights", "columns",
}  # fmt: skip
NUMBERS = {
    "num_bags", "num_lookups", "num_features", "num_vectors", "num_others", "dim", "width", "source_stride",
    "sample_stride", "target_stride", "bag_stride", "out_columns", "num_samples",
}  # fmt: skip


def compiled(kernel: Any, num_warps: int, types: dict[str, str] | None = None, **constants: Any) -> str:
    """The kernel's machine code for constants by name; the types of other arguments follow from their names."""

    def kind(name: str) -> str:
        if name in constants:
            return "constexpr"
        guess = "*i64" if name in INTEGERS else "i32" if name in NUMBERS else SCALARS.get(name, "*fp32")
        return (types or {}).get(name, guess)

    signature = {name: kind(name) for name in kernel.arg_names}
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=places)
    found = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps})
    return str(found.asm["ptx"])


FACTORS = {"FACTOR": tl.float32, "RANK": 8}


@pytest.mark.parametrize("bags", [False, True])
def test_frobenius_of_lookups(bags: bool) -> None:
    shared = {"HAS_BAGS": bags, "SCALED": bags, **FACTORS}
    assert "st.global" in compiled(frobenius.u_kernel, 4, TERMS=4, BLOCK_N=128, BLOCK_R=8, **shared)
    scatter = compiled(
        frobenius.scatter_kernel, 4, NEEDS_SCALE=bags, BY_LOOKUP=False, COLUMNS=32, BLOCK_L=32, BLOCK_C=32, **shared
    )  # fmt: skip
    assert "atom" in scatter


@pytest.mark.parametrize("rank", [8, 32])
@pytest.mark.parametrize("kind", ["*fp32", "*bf16"])
def test_frobenius_of_rows(rank: int, kind: str) -> None:
    shape = {"FACTOR": tl.float32, "RANK": rank, "DIM": 128, "BLOCK_N": 16, "BLOCK_D": 128}
    if rank == 8:
        assert "mma" not in compiled(frobenius.rows_kernel, 1, {"out": kind}, **shape)
    by_matrix = {"PRECISION": "tf32", "TILES": 4, "BLOCK_R": max(16, rank), **shape}
    assert "mma" in compiled(frobenius.rows_by_matrix_kernel, rank // 8, {"out": kind}, **by_matrix)
    precise = {"PRECISE": kind == "*fp32", "BLOCK_R": rank, **shape}
    assert "mma" in compiled(frobenius.basis_kernel, rank // 8, {"grad": kind}, **precise)


@pytest.mark.parametrize("rule", UpdateRule)
def test_row_update(rule: UpdateRule) -> None:
    shared = {
        "RULE": rule.value, "FRACTION": 7, "LEAST": 8, "DEVICE_RATES": True, "SCALED": True, "DECAYS": True,
        "BLOCK_K": 8, "BLOCK_D": 64,
    }  # fmt: skip
    types = {"weight": "*bf16"}
    runs = compiled(row_update_triton._sum_runs_kernel, 1, types, HAS_BAGS=True, WEIGHTED=False, LONG_RUN=16, **shared)
    assert "st.global" in runs
    assert "st.global" in compiled(row_update_triton._finish_runs_kernel, 1, types, BLOCK_C=8, FROM_BACK=True, **shared)


def test_lookups() -> None:
    assert "st.global" in compiled(lookup_triton._gather_kernel, 4, BLOCK_L=32, BLOCK_D=128)
    assert "st.global" in compiled(lookup_triton._pool_kernel, 4, WEIGHTED=True, MEAN=False, BLOCK_N=64, BLOCK_D=16)
    assert "st.global" in compiled(lookup_triton._write_columns_kernel, 4, COLUMNS=21, BLOCK_L=32, BLOCK_D=128)
    assert "st.global" in compiled(lookup_triton._number_kernel, 4, COLUMNS=26, BLOCK_L=1024)


@pytest.mark.parametrize("dim", [1, 7, 16, 128])
@pytest.mark.parametrize("kind", ["*fp32", "*bf16"])
def test_lookups_in_bands(dim: int, kind: str) -> None:
    block = max(2, triton.next_power_of_2(dim))
    types = {"KINDS": 63, "PARTS": 3, "FLOAT_TYPES": 7, "GRID_TYPES": 7}
    align = {"ALIGN": 2 if dim % 16 else 16, "ALIGN_8": 1 if dim % 16 else 4, "ALIGN_4": 1 if dim % 16 else 2}
    code = compiled(
        bands_triton._bands_kernel, 4, {"out": kind, "values": "*i32"}, NUM_TABLES=26, **types, **align,
        DIM=dim, BLOCK_B=4096 // block, BLOCK_D=block,
    )  # fmt: skip
    assert "st.global" in code


@pytest.mark.parametrize("dim", [1, 7, 128])
@pytest.mark.parametrize("kind", ["*fp32", "*bf16"])
def test_gradients_of_bands(dim: int, kind: str) -> None:
    block = max(2, triton.next_power_of_2(dim))
    types = {"grads": kind, "values": "*i32", "numbers": "*i32", "touched": "*i8", "learning": "*i64", "none": "i32"}
    code = compiled(
        band_gradients_triton._gradients_kernel, 2, types, NUM_TABLES=26, PARTS=3, NUMBERS=True, SUMS=True, DIM=dim,
        BLOCK_B=1024 // block, BLOCK_D=block,
    )  # fmt: skip
    assert "red.global" in code or "atom" in code


@pytest.mark.parametrize("dim", [1, 7, 128])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("grid", [tl.float32, tl.bfloat16, tl.float16])
def test_moves_of_codes(dim: int, bits: int, grid: Any) -> None:
    block = max(2, triton.next_power_of_2(dim))
    types = {"parts": "*i64", "num_rows": "i32", "num_parts": "i32", "headroom": "fp32"}
    code = compiled(
        code_rows_triton._move_kernel, 1, types, SEARCH=5, BITS=bits, GRID=grid, LIMIT=65504.0, EPS=1e-3,
        PER_LEVEL=0.01, DIM=dim, BLOCK_K=512 // block, BLOCK_D=block,
    )  # fmt: skip
    assert "div.rn.f32" in code


def test_codes_are_read_several_at_once_in_the_layout_of_their_vectors() -> None:
    code = compiled(
        bands_triton._bands_kernel, 4, {"out": "*bf16", "values": "*i32"}, NUM_TABLES=26, KINDS=16, PARTS=1,
        FLOAT_TYPES=0, GRID_TYPES=4, ALIGN=16, ALIGN_8=8, ALIGN_4=4, DIM=128, BLOCK_B=32, BLOCK_D=128,
    )  # fmt: skip
    assert "ld.global.v2.b32" in code
    assert "ld.global.b8" not in code


@pytest.mark.parametrize("two", [False, True])
def test_interaction(two: bool) -> None:
    halves = dict.fromkeys(("first", "vectors", "others", "out"), "*fp16")
    code = compiled(
        interaction_triton._forward_kernel, 1, halves, COMPUTE=tl.float16, PRECISION="ieee", HAS_FIRST=True,
        GATHER=True, TWO=two, BLOCK_V=32, BLOCK_D=128,
    )  # fmt: skip
    assert "mma" in code
