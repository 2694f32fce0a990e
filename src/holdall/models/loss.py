"""Loss of click predictions, and the penalty on looked-up vectors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from holdall.models.model import LookedUp


def logloss(logits: Tensor, label: Tensor, weight: Tensor | None = None) -> Tensor:
    """Mean of -log p(label) over a batch, computed from logits in float32; of its product with `weight` [B]."""
    return F.binary_cross_entropy_with_logits(logits.float(), label, weight)


def squared_length(looked_up: LookedUp) -> Tensor:
    """Sum of the squares of all vectors that a batch looked up, in float32."""
    parts = (looked_up,) if isinstance(looked_up, Tensor) else looked_up
    return torch.stack([part.float().square().sum() for part in parts if part.is_floating_point()]).sum()
