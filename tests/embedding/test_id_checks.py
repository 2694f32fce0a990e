"""Ids that are not rows of their table are detected, at any place and in any memory layout of a batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from holdall.embedding.id_checks import FOLDED, all_below

LIMITS = torch.tensor([1, 7, 2**31, 5])


def ids_of(samples: int, dtype: torch.dtype, layout: str) -> Tensor:
    """[4, samples] of good ids, the largest ones among them."""
    ids = torch.stack([torch.arange(samples, dtype=torch.int64) % limit for limit in LIMITS])
    ids[2] = 2**31 - 1
    ids = ids.to(dtype)
    if layout == "by sample":
        return ids.t().contiguous().t()
    if layout == "apart":
        return torch.stack([ids, ids], dim=2)[:, :, 0]
    return ids


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("layout", ["by feature", "by sample", "apart"])
@pytest.mark.parametrize("samples", [1, FOLDED - 1, FOLDED, 3 * FOLDED + 1])
def test_every_place_is_looked_at(samples: int, layout: str, dtype: torch.dtype) -> None:
    ids = ids_of(samples, dtype, layout)
    assert all_below(ids, LIMITS)
    for feature, limit in enumerate(LIMITS.tolist()):
        for sample in {0, samples // 2, samples - 1}:
            for wrong in (-1, limit, torch.iinfo(dtype).min):
                if wrong > torch.iinfo(dtype).max:
                    continue
                changed = ids.clone()  # keeps the layout
                changed[feature, sample] = wrong
                assert not all_below(changed, LIMITS), (feature, sample, wrong)


def test_no_samples_have_no_wrong_ids() -> None:
    assert all_below(torch.zeros(4, 0, dtype=torch.int32), LIMITS)
