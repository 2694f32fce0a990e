"""Optimizers of dense parameters: torch's own, on a GPU fused and with learning rates on the device.

A CUDA graph replays a step with the numbers it was captured with, unless kernels read them from the device. So on a GPU
every number that changes from step to step is one of `StepScalars`, whether or not a graph is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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

    def __init__(self, groups: list[dict[str, Any]], eps: float, weight_decay: float = 0.0):
        super().__init__(groups, {"eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not parameters:
                continue
            grads = [parameter.grad for parameter in parameters]
            if group["weight_decay"]:
                grads = list(torch._foreach_add(grads, parameters, alpha=group["weight_decay"]))
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


@dataclass(frozen=True, kw_only=True)
class DenseNumbers:
    """Numbers of the torch optimizers, by torch's names; each reads those that it has."""

    eps: float = 1e-8
    betas: tuple[float, float] = (0.9, 0.999)
    momentum: float = 0.0
    weight_decay: float = 0.0


def sgd(groups: Groups, numbers: DenseNumbers, on_gpu: bool) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, momentum=numbers.momentum, weight_decay=numbers.weight_decay, fused=on_gpu)


def adagrad(groups: Groups, numbers: DenseNumbers, on_gpu: bool) -> torch.optim.Optimizer:
    if on_gpu:
        return DeviceAdagrad(groups, numbers.eps, numbers.weight_decay)
    return torch.optim.Adagrad(groups, eps=numbers.eps, weight_decay=numbers.weight_decay)


def adam(groups: Groups, numbers: DenseNumbers, on_gpu: bool) -> torch.optim.Optimizer:
    return torch.optim.Adam(groups, **_of_adam(numbers, on_gpu))


def adamw(groups: Groups, numbers: DenseNumbers, on_gpu: bool) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, **_of_adam(numbers, on_gpu))


def _of_adam(numbers: DenseNumbers, on_gpu: bool) -> dict[str, Any]:
    return {
        "eps": numbers.eps,
        "betas": numbers.betas,
        "weight_decay": numbers.weight_decay,
        "fused": on_gpu or None,
        "capturable": on_gpu,
    }
