"""compute-sanitizer finds no bad access and no race in small shapes of the kernels."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest
import torch

from holdall.kernels.dispatch import HAS_TRITON

if not torch.cuda.is_available():
    pytest.skip("there is no GPU", allow_module_level=True)
if not HAS_TRITON:
    pytest.skip("Triton is not installed", allow_module_level=True)


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
@pytest.mark.parametrize("group", ["tables", "trains", "rows"])
def test_clean_under_the_sanitizer(tool: str, group: str) -> None:
    command = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if command is None:
        pytest.skip("compute-sanitizer is not installed")
    result = subprocess.run(
        [command, "--tool", tool, "--error-exitcode", "7", sys.executable, "-m", "tests.gpu.sanitized", group],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    assert "all checks ran" in result.stdout
