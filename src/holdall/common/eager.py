"""Functions that are left out of compiled graphs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def eager(function: Callable[P, R]) -> Callable[P, R]:
    """Run `function` uncompiled: its course depends on the values of tensors.

    What `torch.compiler.disable` does, but that imports the compiler, a second, whether or not anything is compiled.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            torch._dynamo.graph_break()
        return function(*args, **kwargs)

    return run
