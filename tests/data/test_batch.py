"""Ids of a batch: features selected from it."""

from __future__ import annotations

import pytest
import torch

from holdall.data.batch import Ids


@pytest.mark.parametrize("weighs", [False, True])
def test_features_can_be_selected(weighs: bool) -> None:
    single = Ids(torch.arange(6).view(3, 2), None, 3, torch.rand(3, 2) if weighs else None)
    bags = Ids(torch.arange(7), torch.tensor([0, 2, 3, 3, 4, 6, 7]), 3, torch.rand(7) if weighs else None)
    for ids in (single, bags):
        assert ids.select((0, 1, 2)) is ids
        chosen = ids.select((2, 0))
        assert (chosen.num_features, chosen.batch_size) == (2, 2)
        for place, position in enumerate((2, 0)):
            for found, expected in zip(chosen.bag(place), ids.bag(position), strict=True):
                assert (found is None) == (expected is None)
                assert found is None or torch.equal(found, expected)
