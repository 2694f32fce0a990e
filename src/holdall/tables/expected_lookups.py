"""Expected use of rows: how often each will be looked up from now on, estimated from its count in training."""

from __future__ import annotations

import torch
from torch import Tensor


def expected_lookups(counts: Tensor) -> Tensor:
    """Expected lookups [num_rows] in as many new samples, in float64, from `counts` [num_rows] of training.

    Absolute discounting (Ney, Essen and Kneser, 1994): a row seen c times is expected c - d times, and what is taken
    off goes to the rows that were never seen, such as the row of unseen values. d = n1 / (n1 + 2 n2), where n1 and n2
    are the numbers of rows seen once and twice: values that came up once mostly do not come back.
    """
    counts = counts.double()
    once, twice = float((counts == 1).sum()), float((counts == 2).sum())
    discount = once / (once + 2 * twice) if once else 0.0
    expected = (counts - discount).clamp(min=0.0)
    never = counts == 0
    num_never = int(never.sum())
    if num_never:
        expected[never] = discount * float((counts > 0).sum()) / num_never
    return expected if bool(expected.any()) else torch.ones_like(expected)
