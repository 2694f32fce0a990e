"""Functions that are not compiled, and the transforms of PyTorch that are under way."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from holdall.common.errors import ConfigError

P = ParamSpec("P")
R = TypeVar("R")


def eager(function: Callable[P, R]) -> Callable[P, R]:
    """Run `function` uncompiled, because its control flow depends on the values of tensors.

    The effect is that of `torch.compiler.disable`, which would import the compiler, for a second, in every process.
    """

    why = f"{function.__name__} reads values of tensors, so it cannot be in a full graph: compile without fullgraph"

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            torch._dynamo.graph_break(msg=why)
        return function(*args, **kwargs)

    return run


def break_graph(reason: str) -> None:
    """Go on uncompiled; `torch.compile(fullgraph=True)` shows the reason, and `torch.export` stops with it."""
    if torch.compiler.is_exporting():
        raise ConfigError(reason)
    torch._dynamo.graph_break(msg=reason)


def transforms() -> bool:
    """Whether a transform of `torch.func` is under way: `grad`, `vmap` and the like."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def has_values(tensor: Tensor) -> bool:
    """Whether Python can read the values: not on the meta device, in `torch.export`, or inside of `torch.vmap`."""
    if torch.compiler.is_compiling():
        return not torch.compiler.is_exporting()
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        if torch._C._functorch.is_batchedtensor(tensor):
            return False
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return not tensor.is_meta
