"""Copy of looked-up vectors from the host to a device, with the copy of their gradients back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class CopyToDevice(torch.autograd.Function):
    """Vectors of host tables on a device; gradients return through pinned memory, which a GPU fills at full speed."""

    @staticmethod
    def forward(ctx: Any, vectors: Tensor, device: torch.device) -> Tensor:
        return vectors.to(device, non_blocking=device.type == "cuda" and vectors.is_pinned())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,) = grads
        if grad.device.type != "cuda":
            return grad.cpu(), None
        pinned = torch.empty(grad.shape, dtype=grad.dtype, pin_memory=True)
        pinned.copy_(grad, non_blocking=True)
        torch.cuda.current_stream(grad.device).synchronize()
        return pinned, None
