"""Choice of the implementation of an operation: plain torch, or Triton kernels.

Every operation has a plain-torch path that runs anywhere. `auto` takes Triton's kernels for tensors on a GPU when
Triton can be imported. A path that is named and unavailable is an error, never a silent fallback.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, get_args

from torch import Tensor

from holdall.common.errors import ConfigError

Path = Literal["auto", "triton", "torch"]

HAS_TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = HAS_TRITON and os.environ.get("TRITON_INTERPRET", "0") == "1"
"""Triton's interpreter runs kernels on CPU tensors, slowly: for tests."""

_default: Path = "auto"


@contextmanager
def kernel_path(path: Path) -> Iterator[None]:
    """Context in which operations without a path of their own take this one."""
    global _default
    before, _default = _default, checked(path)
    try:
        yield
    finally:
        _default = before


def checked(path: str) -> Path:
    """The path of that name."""
    if path not in get_args(Path):
        raise ConfigError(f"a kernel path is auto, triton or torch, not {path!r}")
    return path  # type: ignore[return-value]


def default_path() -> Path:
    """The path of operations that are not given one."""
    return _default


def plain_torch() -> bool:
    """Whether the current path is plain torch."""
    return _default == "torch"


def takes_triton(operation: str, tensor: Tensor, path: Path | None = None, *, fits: bool = True) -> bool:
    """Whether `operation` on `tensor` takes Triton. `fits`: its kernels take these shapes and types."""
    path = _default if path is None else path
    runs = HAS_TRITON and (tensor.is_cuda or INTERPRETED)
    if path == "auto":
        return runs and fits and tensor.is_cuda
    if path == "torch":
        return False
    if not HAS_TRITON:
        raise ConfigError(f"{operation} was asked to use Triton, which is not installed: pip install 'holdall[triton]'")
    if not runs:
        raise ConfigError(f"{operation} was asked to use Triton, which needs a GPU: its tensors are on {tensor.device}")
    if not fits:
        raise ConfigError(
            f"{operation} was asked to use Triton, whose kernels do not take a {tensor.dtype} tensor of shape "
            f"{tuple(tensor.shape)}: use path 'auto' or 'torch'"
        )
    return True
