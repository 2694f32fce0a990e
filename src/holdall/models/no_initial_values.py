"""Models built without initial values, on the meta device."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode


class NoInitialValues(TorchFunctionMode):
    """Context in which nothing is drawn: on meta torch imports its compiler to do so, which takes seconds."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.normal_, Tensor.uniform_):
            return args[0]
        return func(*args, **(kwargs or {}))
