"""Gradients that can be differentiated again, for functions whose own backward cannot.

A backward by hand keeps intermediate results as constants, so what it computes has no derivative of its own, and
torch's `once_differentiable` gives none in silence where only the parameters depend on each other. With
`create_graph=True` such a function computes its gradients from its reference instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def records_gradients() -> bool:
    """Whether a backward that runs now has to give gradients that can be differentiated again."""
    return torch.is_grad_enabled()


def gradients_of_reference(
    reference: Callable[..., Tensor], inputs: Sequence[Tensor | None], needed: Sequence[bool], grad: Tensor
) -> list[Tensor | None]:
    """Gradient of `reference(*inputs)` for each input that needs one, in plain operations that autograd records."""
    with torch.enable_grad():
        output = reference(*inputs)
        wanted = [tensor for tensor, needs in zip(inputs, needed, strict=True) if needs and tensor is not None]
        found = iter(torch.autograd.grad(output, wanted, grad, create_graph=True, allow_unused=True))
    return [next(found) if needs and tensor is not None else None for tensor, needs in zip(inputs, needed, strict=True)]
