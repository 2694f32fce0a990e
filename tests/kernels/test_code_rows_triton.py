"""The kernel that moves codes, by Triton's interpreter: the bits of plain torch."""

from __future__ import annotations

import pytest
import torch

from holdall.kernels.dispatch import HAS_TRITON, INTERPRETED

if not HAS_TRITON:
    pytest.skip("Triton is not installed", allow_module_level=True)
if not INTERPRETED:
    pytest.skip("Triton's interpreter is off: set TRITON_INTERPRET=1", allow_module_level=True)

from holdall.kernels.bands import FLOATS
from tests.kernels import code_rows_checks as checks


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dim", [1, 7, 16, 128])
def test_moved_codes_are_those_of_plain_torch(bits: int, dtype: torch.dtype, dim: int) -> None:
    checks.check_moves(bits, dtype, dim)
