"""Rows that are not pooled, and the vectors of some features alone."""

from __future__ import annotations

import pytest
import torch

from holdall.common.errors import IdError
from holdall.data.batch import Ids
from holdall.embedding.bags import EmbeddingBags
from holdall.optim.config import OptimizerConfig
from holdall.optim.optimizers import Optimizers
from holdall.tables import Hashed

ROWS = {"a": 5, "b": 7, "c": 4}
ONE_HOT = Ids(torch.tensor([[4, 0, 4], [6, 6, 1], [3, 2, 0]], dtype=torch.int32), None, 3)
BAGS = Ids(torch.tensor([4, 4, 0, 6, 2, 1]), torch.tensor([0, 2, 3, 3, 3, 5, 5, 5, 5, 6]), 3)


def build(fused: bool, hashed: bool = False) -> EmbeddingBags:
    generator = torch.Generator().manual_seed(0)
    method = {"b": Hashed(buckets=3)} if hashed else None
    return EmbeddingBags.build(ROWS, 2, method, fused=fused, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("collects", [False, True])
@pytest.mark.parametrize("hashed", [False, True])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("ids", [ONE_HOT, BAGS], ids=["one-hot", "bags"])
def test_rows_and_chosen_features(ids: Ids, fused: bool, hashed: bool, collects: bool) -> None:
    bags = build(fused, hashed)
    if collects:
        Optimizers(bags, OptimizerConfig())
    for position, name in enumerate(ROWS):
        expected = bags.table(name).materialize()[ids.bag(position)[0].long()]
        assert torch.equal(bags.rows(ids, position), expected)
        with torch.no_grad():
            assert torch.equal(bags.rows(ids, position), expected)
    everything = bags(ids)
    for chosen in ([2, 0], [1], [0, 1, 2], [2, 1, 0]):
        assert torch.equal(bags(ids, chosen), everything[:, chosen])


@pytest.mark.parametrize("hashed", [False, True])
def test_gradients_of_rows_and_bags_add_up(hashed: bool) -> None:
    """The same rows looked up twice in a step, once pooled: packed tables move as tables on their own do."""
    start, moved = build(False, hashed), []
    weights = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64)
    for fused in (True, False):
        bags = build(fused, hashed)
        bags.load_state_dict(start.state_dict())
        optimizers = Optimizers(bags, OptimizerConfig(name="sgd", lr=0.5))
        of_rows = sum((bags.rows(BAGS, i) ** 2).sum() * (i + 1) for i in range(3))
        (of_rows + (bags(BAGS, [1, 0]) * weights).sum()).backward()
        optimizers.step()
        moved.append(bags)
    for name in ROWS:
        ours, theirs = (bags.table(name).materialize() for bags in moved)
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)
        assert not torch.equal(ours, start.table(name).materialize())


def test_no_ids_at_all() -> None:
    nothing = Ids(torch.zeros(0, dtype=torch.int64), torch.zeros(7, dtype=torch.int64), 3)
    for hashed in (False, True):
        assert build(True, hashed).rows(nothing, 1).shape == (0, 2)


def test_an_id_out_of_range_is_named() -> None:
    ids = Ids(BAGS.values.clone(), BAGS.offsets, 3)
    ids.values[3] = 7
    with pytest.raises(IdError, match=r"feature 'b' has id 7 but its table has 7 rows \(sample 1"):
        build(True).rows(ids, 1)
