"""Optimizer updates of the rows that a step touched, and of no others.

Each update takes the table's storage `weight` [R, dim], the distinct touched rows `ids` [U], their summed gradient
`grad` [U, dim], the scalars of the step, and its state tensors, which have a line for each row of the storage. A step
costs U * dim reads and writes, whatever R is. Arithmetic is float32 or wider. The result is rounded to the storage's
type: to the nearest number, or stochastically with `UpdateScalars.rounding`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from holdall.kernels.stochastic import FORMATS, round_stochastically


class UpdateRule(IntEnum):
    """Branches of the kernels of `row_update_triton`: the updates below, and the norm, which updates nothing."""

    SGD = 0
    ADAGRAD = 1
    ROWWISE_ADAGRAD = 2
    ADAM = 3
    NORM = 4
    MOMENTUM_SGD = 5
    ADAMW = 6


@dataclass(frozen=True, kw_only=True)
class UpdateScalars:
    """Numbers of one optimizer step; each update reads those in its equation."""

    lr: float = 0.0
    eps: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    step: int = 1
    """Global step, counted from 1."""
    momentum: float = 0.0
    weight_decay: float = 0.0
    """An update adds `weight_decay * w` to the gradient of a touched row; `adamw` shrinks the row instead."""
    rounding: tuple[int, int] | None = None
    """`stochastic.keys` of the step: two-byte storages are rounded stochastically. To nearest when None."""


@dataclass(frozen=True, kw_only=True)
class DeviceScalars:
    """Numbers of a step that the kernels read from the device, so that a CUDA graph can be replayed with others."""

    rates: Tensor | None = None
    """[3]: lr, 1 - beta1^step and 1 - beta2^step, in the place of those of `UpdateScalars`."""
    scale: Tensor | None = None
    """[1]: factor on the gradients."""
    keys: Tensor | None = None
    """[2] int64: the `stochastic.keys` of the step, in the place of `UpdateScalars.rounding`."""


NO_DEVICE_SCALARS = DeviceScalars()


def _working(weight: Tensor, ids: Tensor, grad: Tensor, weight_decay: float = 0.0) -> tuple[Tensor, Tensor]:
    """The touched rows and their gradient with weight decay, in the type to compute in."""
    dtype = torch.float32 if weight.dtype in (torch.bfloat16, torch.float16) else weight.dtype
    rows, grad = weight.index_select(0, ids).to(dtype), grad.to(dtype)
    return rows, grad.add(rows, alpha=weight_decay) if weight_decay else grad


def _store(weight: Tensor, ids: Tensor, rows: Tensor, scalars: UpdateScalars) -> None:
    """Write new rows in the storage's type."""
    if scalars.rounding is not None and weight.dtype in FORMATS:
        cells = ids.long()[:, None] * weight.shape[1] + torch.arange(weight.shape[1], device=ids.device)
        rows = round_stochastically(rows, weight.dtype, cells, scalars.rounding)
    weight.index_copy_(0, ids, rows.to(weight.dtype))


def sgd(weight: Tensor, ids: Tensor, grad: Tensor, scalars: UpdateScalars) -> None:
    """w -= lr * g."""
    rows, grad = _working(weight, ids, grad, scalars.weight_decay)
    _store(weight, ids, rows.sub_(grad, alpha=scalars.lr), scalars)


def momentum_sgd(weight: Tensor, ids: Tensor, grad: Tensor, scalars: UpdateScalars, momentum_buffer: Tensor) -> None:
    """b = momentum * b + g; w -= lr * b. `momentum_buffer` is [R, dim]; it decays only when its row is touched."""
    rows, grad = _working(weight, ids, grad, scalars.weight_decay)
    buffer = momentum_buffer.index_select(0, ids).mul_(scalars.momentum).add_(grad)
    momentum_buffer.index_copy_(0, ids, buffer)
    _store(weight, ids, rows.sub_(buffer, alpha=scalars.lr), scalars)


def adagrad(weight: Tensor, ids: Tensor, grad: Tensor, scalars: UpdateScalars, sum: Tensor) -> None:
    """s += g^2; w -= lr * g / (sqrt(s) + eps). `sum` is [R, dim]."""
    rows, grad = _working(weight, ids, grad, scalars.weight_decay)
    total = sum.index_select(0, ids).addcmul_(grad, grad)
    sum.index_copy_(0, ids, total)
    rows.addcdiv_(grad, total.sqrt_().add_(scalars.eps), value=-scalars.lr)
    _store(weight, ids, rows, scalars)


def rowwise_adagrad(weight: Tensor, ids: Tensor, grad: Tensor, scalars: UpdateScalars, sum: Tensor) -> None:
    """s += mean(g^2) over the row; w -= lr * g / (sqrt(s) + eps). `sum` is [R]: one number per row."""
    rows, grad = _working(weight, ids, grad, scalars.weight_decay)
    total = sum.index_select(0, ids).add_(grad.square().mean(1))
    sum.index_copy_(0, ids, total)
    rows.sub_(grad.mul_((total.sqrt_().add_(scalars.eps).reciprocal_() * scalars.lr)[:, None]))
    _store(weight, ids, rows, scalars)


def adam(
    weight: Tensor, ids: Tensor, grad: Tensor, scalars: UpdateScalars, exp_avg: Tensor, exp_avg_sq: Tensor
) -> None:
    """Lazy Adam: moments decay only when their row is touched, bias is corrected by the global step."""
    rows, grad = _working(weight, ids, grad, scalars.weight_decay)
    _adam_step(weight, ids, rows, grad, scalars, exp_avg, exp_avg_sq)


def adamw(
    weight: Tensor, ids: Tensor, grad: Tensor, scalars: UpdateScalars, exp_avg: Tensor, exp_avg_sq: Tensor
) -> None:
    """Lazy Adam after w *= 1 - lr * weight_decay, of the touched rows."""
    rows, grad = _working(weight, ids, grad)
    rows.mul_(1 - scalars.lr * scalars.weight_decay)
    _adam_step(weight, ids, rows, grad, scalars, exp_avg, exp_avg_sq)


def _adam_step(
    weight: Tensor,
    ids: Tensor,
    rows: Tensor,
    grad: Tensor,
    scalars: UpdateScalars,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
) -> None:
    (beta1, beta2), step = scalars.betas, scalars.step
    first = exp_avg.index_select(0, ids).lerp_(grad, 1 - beta1)
    second = exp_avg_sq.index_select(0, ids).mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    exp_avg.index_copy_(0, ids, first)
    exp_avg_sq.index_copy_(0, ids, second)
    denominator = second.sqrt_().div_((1 - beta2**step) ** 0.5).add_(scalars.eps)
    rows.addcdiv_(first, denominator, value=-scalars.lr / (1 - beta1**step))
    _store(weight, ids, rows, scalars)
