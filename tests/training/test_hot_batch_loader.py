"""Loader of hot and cold batches: every sample once an epoch, phases that follow the loss, positions to resume at."""

from __future__ import annotations

import json
import threading
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from holdall.common.errors import CheckpointError, ConfigError
from holdall.data.dataset import DataSet
from holdall.data.loader import Shuffle
from holdall.training.strategies.hot_batch_loader import HotBatchLoader, Interleaving


@pytest.fixture(scope="module")
def split(data: Path) -> DataSet:
    return DataSet(data, "train")


def is_hot(split: DataSet, share: float = 0.6) -> np.ndarray:
    return np.random.default_rng(0).random(len(split)) < share


def seen(loader: HotBatchLoader, epoch: int = 0, start: int = 0) -> list[tuple[str, list[tuple[float, ...]]]]:
    """Kind and samples, identified by their dense values, of every batch."""
    found = []
    for segment in loader.segments(epoch, start):
        batches = list(islice(segment.batches, segment.num_batches))
        assert len(batches) == segment.num_batches > 0
        found += [(segment.kind, [tuple(row) for row in batch.dense.tolist()]) for batch in batches]
    return found


def of_kind(batches: list[tuple[str, list[tuple[float, ...]]]], kind: str) -> list[tuple[float, ...]]:
    return [row for of, rows in batches if of == kind for row in rows]


def dealt(num_cold: int, num_hot: int, rate: float, monkeypatch: pytest.MonkeyPatch, split: DataSet) -> list[str]:
    """The kinds of an epoch's batches, of one sample each, at a fixed rate."""
    monkeypatch.setattr(HotBatchLoader, "num_batches", num_cold + num_hot)
    monkeypatch.setattr(HotBatchLoader, "num_batches_of", lambda _, kind: num_hot if kind == "hot" else num_cold)
    loader = HotBatchLoader(split, is_hot(split), 1)
    loader.interleaving = Interleaving(rate=rate)
    return [segment.kind for segment in loader.segments(0) for _ in range(segment.num_batches)]


@pytest.mark.parametrize("shuffle", get_args(Shuffle))
@pytest.mark.parametrize("share", [0.05, 0.3, 0.6, 0.99])
def test_every_sample_comes_once_and_hot_batches_are_full_of_hot_ones(
    split: DataSet, share: float, shuffle: Shuffle
) -> None:
    hot = is_hot(split, share)
    loader = HotBatchLoader(split, hot, 100, shuffle=shuffle, seed=3)
    batches = seen(loader)
    everything = [tuple(row) for row in split.slice(0, len(split)).dense.tolist()]
    hot_rows = Counter(row for row, is_it in zip(everything, hot, strict=True) if is_it)
    cold_rows = Counter(everything) - hot_rows
    in_hot, in_cold = Counter(of_kind(batches, "hot")), Counter(of_kind(batches, "cold"))
    assert in_hot + in_cold == hot_rows + cold_rows
    assert in_hot <= hot_rows
    assert (in_cold - cold_rows).total() == hot_rows.total() % 100  # less than a batch of them
    assert all(len(rows) == 100 for kind, rows in batches if kind == "hot")
    assert len(batches) == loader.num_batches == -(-len(split) // 100)  # as many as without hot batches
    assert sum(len(rows) < 100 for _, rows in batches) <= 1


def test_the_hot_samples_left_over_change_with_the_epoch(split: DataSet) -> None:
    loader = HotBatchLoader(split, is_hot(split), 512)
    left_over = [set(of_kind(seen(loader, epoch), "hot")) for epoch in range(3)]
    assert left_over[0] != left_over[1] != left_over[2]


def test_kinds_take_turns_at_the_rate(split: DataSet) -> None:
    loader = HotBatchLoader(split, is_hot(split, 0.5), 50)
    loader.interleaving = Interleaving(rate=0.25)
    kinds = [(segment.kind, segment.num_batches, segment.ends_cycle) for segment in loader.segments(0)]
    assert [kind for kind, _, _ in kinds] == ["hot", "cold"] * 4
    assert all(ends == (kind == "cold") for kind, _, ends in kinds)
    assert all(abs(size - loader.num_batches / 8) <= 1 for _, size, _ in kinds)
    assert sum(size for _, size, _ in kinds) == loader.num_batches


@pytest.mark.parametrize("rate", [1.0, 0.5, 1 / 16, 1 / 64, 1 / 128])
@pytest.mark.parametrize(("cold", "hot"), [(132, 71), (71, 132), (1, 200), (200, 1), (40, 40), (3, 1)])
def test_kinds_end_together(split: DataSet, monkeypatch: pytest.MonkeyPatch, rate: float, cold: int, hot: int) -> None:
    """After every cycle the number of hot batches used is the nearest to their share of all."""
    kinds = dealt(cold, hot, rate, monkeypatch, split)
    assert (kinds.count("cold"), kinds.count("hot")) == (cold, hot)
    size = max(1, round(rate * (cold + hot)))
    for stop in [*range(size, cold + hot, size), cold + hot]:
        assert abs(kinds[:stop].count("hot") - stop * hot / (cold + hot)) <= 0.5


def test_the_finest_rate_mixes_batch_by_batch(split: DataSet, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = dealt(40, 20, 1 / 128, monkeypatch, split)
    assert kinds[:6] in (["cold", "hot", "cold", "cold", "hot", "cold"], ["cold", "cold", "hot"] * 2)
    assert "".join(kind[0] for kind in kinds).count("ccc") == 0


def test_kinds_end_together_whatever_the_loss_does(split: DataSet) -> None:
    loader = HotBatchLoader(split, is_hot(split, 0.35), 10)
    loader.interleaving = Interleaving(rate=0.25, coarsest=0.25)
    losses = iter([5.0, 6.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 3.0])
    kinds: list[str] = []
    rates = set()
    for segment in loader.segments(0):
        kinds += [segment.kind] * segment.num_batches
        if segment.report_loss is not None:
            segment.report_loss(next(losses))
        rates.add(loader.interleaving.rate)
    assert rates == {0.25, 0.125, 0.0625}
    assert len(kinds) == loader.num_batches == 320
    for stop in range(80, 321, 80):  # a cycle's end may be 20 batches away
        assert abs(kinds[:stop].count("hot") - 0.35 * stop) <= 0.65 * 20


@pytest.mark.parametrize(("rate", "cycles"), [(0.5, 2), (0.25, 4), (1 / 16, 8), (1 / 128, 8)])
def test_the_loss_is_asked_for_at_most_eight_times(split: DataSet, rate: float, cycles: int) -> None:
    loader = HotBatchLoader(split, is_hot(split, 0.5), 10)
    loader.interleaving = Interleaving(rate=rate)
    segments = [(segment.ends_cycle, segment.num_batches) for segment in loader.segments(0)]
    assert abs(sum(ends for ends, _ in segments) - cycles) <= 1
    between = np.diff([0, *np.cumsum([size for _, size in segments])[[ends for ends, _ in segments]]])
    assert between.max() <= loader.num_batches / cycles * 1.5


def test_epochs_and_seeds_differ_and_repeat(split: DataSet) -> None:
    hot = is_hot(split)
    first = seen(HotBatchLoader(split, hot, 100, seed=1))
    assert seen(HotBatchLoader(split, hot, 100, seed=1)) == first
    assert seen(HotBatchLoader(split, hot, 100, seed=2)) != first
    assert seen(HotBatchLoader(split, hot, 100, seed=1), epoch=1) != first


@pytest.mark.parametrize("stop", [1, 2, 7, 13, 20])
def test_going_on_from_a_checkpoint(split: DataSet, stop: int) -> None:
    """The loss changes the rate on the way; what was decided before the checkpoint stays decided."""

    def batches(loader: HotBatchLoader, start: int = 0, limit: int | None = None) -> list[object]:
        found: list[object] = []
        for segment in loader.segments(0, start):
            for batch in islice(segment.batches, segment.num_batches):
                found.append((segment.kind, batch.dense.tolist()))
                if len(found) == limit:
                    return found
            if segment.report_loss is not None:
                segment.report_loss(1.0 + (len(found) + start) % 3)
        return found

    hot = is_hot(split)
    whole = batches(HotBatchLoader(split, hot, 100))
    first = HotBatchLoader(split, hot, 100)
    before = batches(first, limit=stop)
    second = HotBatchLoader(split, hot, 100)
    position = second.load_state(json.loads(json.dumps(first.state(0, stop))))
    assert (position.epoch, position.batch) == (0, stop)
    assert before == whole[:stop]
    assert batches(second, stop) == whole[stop:]


def test_a_checkpoint_of_other_data_is_refused(split: DataSet) -> None:
    state = HotBatchLoader(split, is_hot(split), 100).state(0, 3)
    with pytest.raises(CheckpointError, match="made with shuffle 'chunks' and this run has 'rows'"):
        HotBatchLoader(split, is_hot(split), 100, shuffle="rows").load_state(state)
    with pytest.raises(CheckpointError, match="hot_inputs"):
        HotBatchLoader(split, is_hot(split, 0.3), 100).load_state(state)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_all_of_one_kind(split: DataSet, share: float) -> None:
    loader = HotBatchLoader(split, is_hot(split, share), 90)
    batches = seen(loader)
    assert sum(len(rows) for _, rows in batches) == len(split)
    assert len(split) % 90 != 0
    kinds = [kind for kind, _ in batches]
    assert kinds.count("cold") == (1 if share else len(kinds))  # of hot ones alone, the short batch


@pytest.mark.parametrize(("num_hot", "sizes"), [(1, [1]), (99, [99]), (100, [100]), (101, [100]), (200, [100, 100])])
def test_few_hot_inputs(split: DataSet, num_hot: int, sizes: list[int]) -> None:
    """Less than a batch of hot inputs is one short batch."""
    loader = HotBatchLoader(split, np.arange(len(split)) < num_hot, 100)
    batches = seen(loader)
    assert [len(rows) for kind, rows in batches if kind == "hot"] == sizes
    assert sum(len(rows) for _, rows in batches) == len(split)
    assert len(batches) == loader.num_batches


def test_a_batch_larger_than_the_split(split: DataSet) -> None:
    loader = HotBatchLoader(split, is_hot(split), len(split) + 1)
    num_hot = int(is_hot(split).sum())
    assert [(kind, len(rows)) for kind, rows in seen(loader)] in (
        [("hot", num_hot), ("cold", len(split) - num_hot)],
        [("cold", len(split) - num_hot), ("hot", num_hot)],
    )


def test_leaving_an_epoch_ends_its_threads(split: DataSet) -> None:
    others = set(threading.enumerate())  # of loaders that other tests left
    segments = HotBatchLoader(split, is_hot(split), 10).segments(0)
    taken = [next(segment.batches) for segment in islice(segments, 2)]
    assert len(taken) == 2
    assert [thread.name for thread in set(threading.enumerate()) - others] == ["holdall-loader"] * 2
    segments.close()  # type: ignore[attr-defined]
    assert not set(threading.enumerate()) - others


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
    assert schedule.cycle(10) == 1  # never nothing
    for loss in range(1, 200):
        schedule.after(-float(loss))
    assert schedule.rate == 1.0


def test_a_mask_of_another_split_is_refused(split: DataSet) -> None:
    with pytest.raises(ConfigError, match="10 inputs"):
        HotBatchLoader(split, np.ones(10, dtype=bool), 100)
