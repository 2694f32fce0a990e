"""One ROBE array behind several tables: one parameter, counted, trained and stored once."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from holdall.common.errors import ConfigError
from holdall.tables import Robe, method_from_json
from holdall.tables.robe import RobeTable, fit_shared, share_array


def tables(*shapes: tuple[int, int], method: Robe | None = None, **options: object) -> list[RobeTable]:
    options.setdefault("dtype", torch.float64)
    built = [(method or Robe(size=400, block=4)).build(*shape, **options) for shape in shapes]
    return [table for table in built if isinstance(table, RobeTable)]


def num_bytes(module: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters())


def test_the_array_is_counted_once() -> None:
    users, items = tables((50, 8), (90, 12))
    first = users.array
    share_array([users, items])
    both = nn.ModuleList([users, items])
    assert items.array is users.array is first
    assert num_bytes(both) == users.num_bytes() == items.num_bytes() == 400 * 8
    both.to(torch.float32)
    assert items.array is users.array
    copied = copy.deepcopy(both)
    assert copied[0].array is copied[1].array


def test_equal_ids_land_elsewhere() -> None:
    first, second, third = tables((50, 8), (50, 8), (50, 8))
    assert torch.equal(first.places(torch.arange(50))[0], second.places(torch.arange(50))[0])
    share_array([first, second, third])
    places = [table.places(torch.arange(50))[0] for table in (first, second, third)]
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert (places[one] == places[other]).double().mean() < 0.1
    assert [table.method.seed for table in (first, second, third)] == [0, 1, 2]


def test_seeds_that_differ_are_kept_and_sharing_again_changes_nothing() -> None:
    built = [t for seed in (5, 3, 5, 6) for t in tables((9, 8), method=Robe(size=400, seed=seed))]
    share_array(built)
    assert [table.method.seed for table in built] == [5, 3, 6, 7]
    rows = [table.materialize() for table in built]
    share_array(built)
    rebuilt = [method_from_json(table.method.to_json()).build(9, 8, dtype=torch.float64) for table in built]
    share_array([table for table in rebuilt if isinstance(table, RobeTable)])
    rebuilt[0].load_state_dict(built[0].state_dict())
    for table, other, expected in zip(built, rebuilt, rows, strict=True):
        assert torch.equal(table.materialize(), expected)
        assert torch.equal(other.materialize(), expected)


def test_gradients_of_both_tables_add_up() -> None:
    users, items = tables((50, 8), (90, 8), init_std=1.0)
    share_array([users, items])
    ids = torch.tensor([[3, 3, 41]])
    parts = []
    for table in (users, items):
        table(ids).square().sum().backward()
        assert users.array.grad is not None
        parts.append(users.array.grad.to_dense())
        users.array.grad = None
    (users(ids).square().sum() + items(ids).square().sum()).backward()
    torch.testing.assert_close(users.array.grad.to_dense(), parts[0] + parts[1])


def test_state_dict_restores_both() -> None:
    def pair(seed: int) -> nn.ModuleList:
        built = tables((50, 8), (90, 12), generator=torch.Generator().manual_seed(seed))
        share_array(built)
        return nn.ModuleList(built)

    source, target = pair(0), pair(1)
    target.load_state_dict(source.state_dict())
    assert target[0].array is target[1].array
    for one, other in zip(source, target, strict=True):
        assert torch.equal(one.materialize(), other.materialize())


def test_a_shared_array_is_fitted_to_all_tables() -> None:
    built = tables((50, 8), (90, 10), method=Robe(size=80, block=4), init_std=1.0)
    share_array(built)
    targets = [table.materialize() for table in built]
    with torch.no_grad():
        built[0].array.zero_()
    fit_shared(targets, built)
    for table, target in zip(built, targets, strict=True):
        torch.testing.assert_close(table.materialize(), target, rtol=1e-9, atol=1e-10)
        assert table.fit_error is not None
        assert table.fit_error < 1e-9


def test_arrays_that_differ_are_refused() -> None:
    narrow, wide = tables((50, 3)) + tables((50, 8))
    before = wide.array
    with pytest.raises(ConfigError, match=r"table 1 has an array of \(100, 4\).*the first one of \(133, 3\)"):
        share_array([narrow, wide])
    assert wide.array is before
    with pytest.raises(ConfigError, match="share_array first"):
        fit_shared([torch.zeros(50, 8), torch.zeros(50, 8)], tables((50, 8), (50, 8)))
    share_array([])
