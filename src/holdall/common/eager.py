"""Decorator of functions that are not compiled."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def eager(function: Callable[P, R]) -> Callable[P, R]:
    """Run `function` uncompiled, because its control flow depends on the values of tensors.

    The effect is that of `torch.compiler.disable`, which would import the compiler, for a second, in every process.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            torch._dynamo.graph_break()
        return function(*args, **kwargs)

    return run
