"""Optimizer updates of the rows that a step touched, and of no others.

Each function takes the table's storage `weight` [R, dim], the distinct touched rows `ids` [U], their summed gradient
`grad` [U, dim] and the state that lives beside the rows. A step costs U * dim reads and writes, whatever R is.
Arithmetic is float32 or wider; the result is rounded to the storage's type: to the nearest number, or at random when
`rounding` gives the `stochastic.keys` of the step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from holdall.kernels.stochastic import FORMATS, round_stochastically

Rounding = tuple[int, int] | None


def _working(weight: Tensor, ids: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """The touched rows and their gradient, in the type to compute in."""
    dtype = torch.float32 if weight.dtype in (torch.bfloat16, torch.float16) else weight.dtype
    return weight.index_select(0, ids).to(dtype), grad.to(dtype)


def _store(weight: Tensor, ids: Tensor, rows: Tensor, rounding: Rounding) -> None:
    """Write new rows in the storage's type."""
    if rounding is not None and weight.dtype in FORMATS:
        cells = ids.long()[:, None] * weight.shape[1] + torch.arange(weight.shape[1], device=ids.device)
        rows = round_stochastically(rows, weight.dtype, cells, rounding)
    weight.index_copy_(0, ids, rows.to(weight.dtype))


def sgd(weight: Tensor, ids: Tensor, grad: Tensor, *, lr: float, rounding: Rounding = None) -> None:
    """w -= lr * g."""
    rows, grad = _working(weight, ids, grad)
    _store(weight, ids, rows.sub_(grad, alpha=lr), rounding)


def adagrad(
    weight: Tensor, ids: Tensor, grad: Tensor, sum: Tensor, *, lr: float, eps: float, rounding: Rounding = None
) -> None:
    """s += g^2; w -= lr * g / (sqrt(s) + eps). `sum` is [R, dim]."""
    rows, grad = _working(weight, ids, grad)
    total = sum.index_select(0, ids).addcmul_(grad, grad)
    sum.index_copy_(0, ids, total)
    _store(weight, ids, rows.addcdiv_(grad, total.sqrt_().add_(eps), value=-lr), rounding)


def rowwise_adagrad(
    weight: Tensor, ids: Tensor, grad: Tensor, sum: Tensor, *, lr: float, eps: float, rounding: Rounding = None
) -> None:
    """s += mean(g^2) over the row; w -= lr * g / (sqrt(s) + eps). `sum` is [R]: one number a row."""
    rows, grad = _working(weight, ids, grad)
    total = sum.index_select(0, ids).add_(grad.square().mean(1))
    sum.index_copy_(0, ids, total)
    rows.sub_(grad.mul_((total.sqrt_().add_(eps).reciprocal_() * lr)[:, None]))
    _store(weight, ids, rows, rounding)


def adam(
    weight: Tensor,
    ids: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    rounding: Rounding = None,
) -> None:
    """Lazy Adam: moments decay only when their row is touched, bias is corrected by the global `step` (from 1)."""
    rows, grad = _working(weight, ids, grad)
    first = exp_avg.index_select(0, ids).lerp_(grad, 1 - betas[0])
    second = exp_avg_sq.index_select(0, ids).mul_(betas[1]).addcmul_(grad, grad, value=1 - betas[1])
    exp_avg.index_copy_(0, ids, first)
    exp_avg_sq.index_copy_(0, ids, second)
    denominator = second.sqrt_().div_((1 - betas[1] ** step) ** 0.5).add_(eps)
    rows.addcdiv_(first, denominator, value=-lr / (1 - betas[0] ** step))
    _store(weight, ids, rows, rounding)
