"""Optimizers of dense parameters: torch's own, on a GPU fused and with learning rates on the device.

A CUDA graph replays a step with the numbers it was captured with, unless kernels read them from the device. So on a GPU
every number that changes from step to step is one of `StepScalars`, whether or not a graph is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class StepScalars:
    """Numbers on a GPU that the host sets for every step and kernels read."""

    def __init__(self, count: int, device: torch.device, dtype: torch.dtype = torch.float32):
        self.values = torch.zeros(count, dtype=dtype, device=device)
        self._set: list[float] | None = None

    def set(self, values: Sequence[float]) -> None:
        """Copy `values` to the device if they have changed, without waiting; pinned memory is kept until it is done."""
        if self._set == list(values):
            return
        self._set = list(values)
        self.values.copy_(torch.tensor(values, dtype=self.values.dtype, pin_memory=True), non_blocking=True)


class DeviceAdagrad(torch.optim.Optimizer):
    """Adagrad of torch with its learning rate on the device: s += g^2; w -= lr * g / (sqrt(s) + eps).

    torch's own reads the rate from the host. State has torch's names.
    """

    def __init__(self, groups: list[dict[str, Any]], eps: float):
        super().__init__(groups, {"eps": eps})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not parameters:
                continue
            grads = [parameter.grad for parameter in parameters]
            sums = [self.state[parameter]["sum"] for parameter in parameters]
            torch._foreach_add_([self.state[parameter]["step"] for parameter in parameters], 1)
            torch._foreach_addcmul_(sums, grads, grads)
            roots = torch._foreach_sqrt(sums)
            torch._foreach_add_(roots, group["eps"])
            changes = torch._foreach_div(grads, roots)
            torch._foreach_mul_(changes, group["lr"])
            torch._foreach_sub_(parameters, changes)


Groups = list[dict[str, Any]]
"""Parameter groups of a torch optimizer, each with its learning rate: a number, or a 0-dim tensor on the GPU."""


def sgd(groups: Groups, eps: float, betas: tuple[float, float], on_gpu: bool) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, fused=on_gpu)


def adagrad(groups: Groups, eps: float, betas: tuple[float, float], on_gpu: bool) -> torch.optim.Optimizer:
    return DeviceAdagrad(groups, eps) if on_gpu else torch.optim.Adagrad(groups, eps=eps)


def adam(groups: Groups, eps: float, betas: tuple[float, float], on_gpu: bool) -> torch.optim.Optimizer:
    return torch.optim.Adam(groups, eps=eps, betas=betas, fused=on_gpu or None, capturable=on_gpu)
