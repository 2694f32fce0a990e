"""torch's optimizers for parameters with dense gradients; on a GPU in few kernels, with learning rates on the device.

A step that is captured in a CUDA graph is replayed with the numbers it was captured with, unless they are read from the
device. So there every number that changes from step to step is one of `StepScalars`, whether or not a graph is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class StepScalars:
    """Numbers that the host sets for every step and kernels read, on a GPU."""

    def __init__(self, count: int, device: torch.device, dtype: torch.dtype = torch.float32):
        self.values = torch.zeros(count, dtype=dtype, device=device)
        self._set: list[float] | None = None

    def set(self, values: Sequence[float]) -> None:
        """Copy them over, if they are others than before, without waiting; the pinned memory is kept until the copy is
        done."""
        if self._set == list(values):
            return
        self._set = list(values)
        self.values.copy_(torch.tensor(values, dtype=self.values.dtype, pin_memory=True), non_blocking=True)


class DeviceAdagrad(torch.optim.Optimizer):
    """Adagrad of torch with its learning rate on the device: s += g^2; w -= lr * g / (sqrt(s) + eps).

    torch's own takes the rate from the host. State is named as there.
    """

    def __init__(self, groups: list[dict[str, Any]], eps: float):
        super().__init__(groups, {"eps": eps})
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = {
                    "step": torch.zeros((), device=parameter.device),
                    "sum": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                }

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


def on_gpu(groups: Sequence[dict[str, Any]]) -> bool:
    """Whether all parameters are on a GPU."""
    return all(parameter.is_cuda for group in groups for parameter in group["params"])


def torch_optimizer(
    name: str, groups: list[dict[str, Any]], lr: float, eps: float, betas: tuple[float, float]
) -> torch.optim.Optimizer:
    """The optimizer of that name, its state made at once so that a checkpoint can load into it.

    Learning rates of groups may be 0-dim tensors on the GPU that all their parameters are on.
    """
    optimizer: torch.optim.Optimizer
    fused = on_gpu(groups)
    match name:
        case "sgd":
            optimizer = torch.optim.SGD(groups, lr=lr, fused=fused)
        case "adagrad" | "rowwise_adagrad":
            optimizer = DeviceAdagrad(groups, eps) if fused else torch.optim.Adagrad(groups, lr=lr, eps=eps)
        case "adam":
            optimizer = torch.optim.Adam(groups, lr=lr, eps=eps, betas=betas, fused=fused or None, capturable=fused)
            for group in groups:
                for parameter in group["params"]:
                    optimizer.state[parameter] = {
                        "step": torch.zeros((), device=parameter.device if fused else "cpu"),
                        "exp_avg": torch.zeros_like(parameter),
                        "exp_avg_sq": torch.zeros_like(parameter),
                    }
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    return optimizer
