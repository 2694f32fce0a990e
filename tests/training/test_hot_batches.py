"""Hot and cold batches: every sample once an epoch, hot ones apart, phases that follow the loss, places to resume."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from holdall.data.dataset import DataSet
from holdall.errors import CheckpointError, ConfigError
from holdall.training.hot_batches import HotBatches, Interleaving


@pytest.fixture(scope="module")
def split(data: Path) -> DataSet:
    return DataSet(data, "train")


def is_hot(split: DataSet, share: float = 0.6) -> np.ndarray:
    return np.random.default_rng(0).random(len(split)) < share


def seen(loader: HotBatches, epoch: int = 0, start: int = 0) -> list[tuple[str, list[tuple[float, ...]]]]:
    """Kind and samples, told by their dense values, of every batch."""
    found = []
    for segment in loader.segments(epoch, start):
        batches = list(segment.batches)
        assert len(batches) == segment.num_batches
        found += [(segment.kind, [tuple(row) for row in batch.dense.tolist()]) for batch in batches]
    return found


def test_every_sample_comes_once_and_hot_ones_apart(split: DataSet) -> None:
    hot = is_hot(split)
    loader = HotBatches(split, hot, 100, seed=3)
    batches = seen(loader)
    assert len(batches) == loader.num_batches
    everything = [tuple(row) for row in split.slice(0, len(split)).dense.tolist()]
    by_kind = {kind: sorted(row for of, rows in batches if of == kind for row in rows) for kind in ("hot", "cold")}
    assert by_kind["hot"] == sorted(row for row, is_it in zip(everything, hot, strict=True) if is_it)
    assert by_kind["cold"] == sorted(row for row, is_it in zip(everything, hot, strict=True) if not is_it)
    assert all(len(rows) <= 100 for _, rows in batches)


def test_kinds_take_turns_at_the_rate(split: DataSet) -> None:
    loader = HotBatches(split, is_hot(split, 0.5), 50)
    loader.interleaving = Interleaving(rate=0.25)
    kinds = [(segment.kind, segment.num_batches, segment.ends_cycle) for segment in loader.segments(0)]
    assert [kind for kind, _, _ in kinds[:8]] == ["cold", "hot"] * 4
    assert all(ends == (kind == "hot") for kind, _, ends in kinds[:8])
    assert sum(size for _, size, _ in kinds) == loader.num_batches


@pytest.mark.parametrize(("rate", "cycles"), [(0.5, 2), (0.25, 4), (1 / 16, 8), (1 / 128, 8)])
def test_the_loss_is_asked_for_at_most_eight_times(split: DataSet, rate: float, cycles: int) -> None:
    loader = HotBatches(split, is_hot(split, 0.5), 10)
    loader.interleaving = Interleaving(rate=rate)
    segments = [(segment.ends_cycle, segment.num_batches) for segment in loader.segments(0)]
    assert abs(sum(ends for ends, _ in segments) - cycles) <= 1
    between = np.diff([0, *np.cumsum([size for _, size in segments])[[ends for ends, _ in segments]]])
    assert between.max() <= loader.num_batches / cycles * 1.5


def test_epochs_and_seeds_differ_and_repeat(split: DataSet) -> None:
    hot = is_hot(split)
    first = seen(HotBatches(split, hot, 100, seed=1))
    assert seen(HotBatches(split, hot, 100, seed=1)) == first
    assert seen(HotBatches(split, hot, 100, seed=2)) != first
    assert seen(HotBatches(split, hot, 100, seed=1), epoch=1) != first


@pytest.mark.parametrize("stop", [1, 7, 13, 20])
def test_going_on_from_a_checkpoint(split: DataSet, stop: int) -> None:
    """The loss changes the rate on the way; what was decided before the checkpoint stays decided."""

    def batches(loader: HotBatches, start: int = 0, limit: int | None = None) -> list[object]:
        found: list[object] = []
        for segment in loader.segments(0, start):
            for batch in segment.batches:
                found.append((segment.kind, batch.dense.tolist()))
                if len(found) == limit:
                    return found
            loader.interleaving.after(1.0 + (len(found) + start) % 3)
        return found

    hot = is_hot(split)
    whole = batches(HotBatches(split, hot, 100))
    first = HotBatches(split, hot, 100)
    before = batches(first, limit=stop)
    second = HotBatches(split, hot, 100)
    position = second.load_state(first.state(0, stop))
    assert (position.epoch, position.batch) == (0, stop)
    assert before == whole[:stop]
    assert batches(second, stop)[: len(whole) - stop] == whole[stop:]


def test_a_checkpoint_of_other_data_is_refused(split: DataSet) -> None:
    state = HotBatches(split, is_hot(split), 100).state(0, 3)
    with pytest.raises(CheckpointError, match="hot_inputs"):
        HotBatches(split, is_hot(split, 0.3), 100).load_state(state)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_all_of_one_kind(split: DataSet, share: float) -> None:
    loader = HotBatches(split, is_hot(split, share), 100)
    batches = seen(loader)
    assert {kind for kind, _ in batches} == {"hot" if share else "cold"}
    assert sum(len(rows) for _, rows in batches) == len(split)


def test_the_rate_follows_the_loss() -> None:
    schedule = Interleaving(rate=0.5, coarsest=1.0)
    schedule.after(1.0)
    schedule.after(2.0)  # worse: mix more finely
    assert schedule.rate == 0.25
    for loss in (1.9, 1.8, 1.7):
        schedule.after(loss)
    assert schedule.rate == 0.25
    schedule.after(1.6)  # the fourth better one in a row
    assert schedule.rate == 0.5
    for loss in range(2, 40):
        schedule.after(float(loss))
    assert schedule.rate == 1 / 128
    assert schedule.phase(10) == 1  # never nothing
    for loss in range(1, 200):
        schedule.after(-float(loss))
    assert schedule.rate == 1.0


def test_a_mask_of_another_split_is_refused(split: DataSet) -> None:
    with pytest.raises(ConfigError, match="10 inputs"):
        HotBatches(split, np.ones(10, dtype=bool), 100)
