"""Sampled profiles: their intervals hold as often as stated, on planted Zipf data, over many seeds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import holdall
from holdall import Profile, ProfileConfig
from holdall.common.errors import DataError
from holdall.common.falling_estimate import falling_estimate
from holdall.data.columns import Ragged
from holdall.data.splits import hash_numbers
from holdall.popularity.choose_hot_rows import hot_rows
from holdall.popularity.curves import ClusterShares, t_quantile
from holdall.popularity.prepared_counts import choose_blocks
from holdall.popularity.stream_counts import FeatureStream
from tests.popularity.planted_sets import in_popularity_order, write_set, zipf

PLACES = (1, 10, 100, 1000)


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """c0 is Zipf throughout; c1 is Zipf in bursts of 300 rows of one id, so that rows of a block are alike."""
    rng = np.random.default_rng(0)
    rows = 40_000
    plain = zipf(rng, 5000, rows)
    bursts = np.where(rng.random(rows) < 0.5, np.repeat(zipf(rng, 5000, rows), 300)[:rows], zipf(rng, 5000, rows))
    ids = np.stack([in_popularity_order(stream, 5000) for stream in (plain, bursts)], axis=1)
    return write_set(tmp_path_factory.mktemp("planted") / "data", ids, [5001, 5001])


@pytest.fixture(scope="module")
def sampled(planted: Path) -> list[Profile]:
    return [holdall.profile(planted, config=ProfileConfig(sample=0.1, seed=seed)) for seed in range(120)]


@pytest.mark.parametrize("feature", ["c0", "c1"])
def test_coverage_intervals_hold_as_often_as_they_say(planted: Path, sampled: list[Profile], feature: str) -> None:
    exact = holdall.profile(planted)
    for k in PLACES:
        true = exact.coverage(feature, k)
        intervals = np.array([profile.coverage_interval(feature, k) for profile in sampled])
        hits = ((intervals[:, 0] <= true) & (true <= intervals[:, 1])).mean()
        # 120 draws at 95% have a standard error of 2%.
        assert hits >= 0.90, (k, hits)
        estimates = np.array([profile.coverage(feature, k) for profile in sampled])
        assert estimates.mean() == pytest.approx(true, abs=0.01)
        # The intervals are no wider than they need to be: about four times the spread of the estimates.
        assert (intervals[:, 1] - intervals[:, 0]).mean() < 6 * estimates.std() + 1e-3


def test_hot_inputs_are_not_judged_by_their_own_rows(tmp_path: Path) -> None:
    """Where the sample can tell, its share of hot inputs is the exact one's; where it cannot, it stays below."""
    rng = np.random.default_rng(9)
    ids = np.stack([in_popularity_order(zipf(rng, 5000, 40_000), 5000) for _ in range(2)], axis=1)
    folder = write_set(tmp_path / "data", ids, [5001, 5001])
    exact = holdall.profile(folder)
    sampled = [holdall.profile(folder, config=ProfileConfig(sample=0.1, seed=seed)) for seed in range(40)]
    wanted = dict(zip(exact.hot.threshold, exact.hot.inputs, strict=True))
    for threshold in (0.01, 0.00316228):
        places = [profile.hot.threshold.index(threshold) for profile in sampled]
        found = np.array([profile.hot.inputs[place] for profile, place in zip(sampled, places, strict=True)])
        assert found.mean() == pytest.approx(wanted[threshold], abs=0.02)
    last = np.array([profile.hot.inputs[-1] for profile in sampled])
    assert 0.2 < last.mean() < 0.9  # at one lookup in the sample; an input that vouched for itself would make this 1


def test_a_sample_is_enough_to_choose_hot_rows(tmp_path: Path) -> None:
    """Rows chosen by a tenth of the log, over two tables, cover almost what rows chosen by all of it do."""
    rng = np.random.default_rng(4)
    streams = [zipf(rng, 20_000, 100_000), zipf(rng, 2000, 100_000, power=1.3)]
    ids = np.stack([in_popularity_order(stream, 20_000) for stream in streams], axis=1)
    folder = write_set(tmp_path / "data", ids, [20_001, 20_001])
    exact = holdall.profile(folder, tmp_path / "exact.json").counts()
    rough = holdall.profile(folder, tmp_path / "rough.json", ProfileConfig(sample=0.1)).counts()
    for budget in (100, 1000, 10_000):
        best, found = hot_rows(exact, 1, budget), hot_rows(rough, 1, budget)
        covered = [sum(exact[name][:rows].sum() for name, rows in chosen.items()) for chosen in (best, found)]
        assert covered[1] > 0.99 * covered[0]
    assert rough["c0"].sum() == pytest.approx(exact["c0"].sum(), rel=0.01)


@settings(derandomize=True, deadline=None, max_examples=50)
@given(st.lists(st.integers(0, 50), min_size=1, max_size=300))
def test_the_falling_estimate(counts: list[int]) -> None:
    """It falls, keeps the sum, and begins with the largest mean of a prefix, up to the width of its steps."""
    found = falling_estimate(np.array(counts))
    assert len(found) == len(counts)
    assert np.all(np.diff(found) <= 1e-9)
    assert found.sum() == pytest.approx(sum(counts))
    np.testing.assert_allclose(np.cumsum(found)[0], max(np.cumsum(counts) / np.arange(1, len(counts) + 1)), rtol=0.2)


def test_what_a_sample_cannot_tell(planted: Path, sampled: list[Profile]) -> None:
    profile = sampled[0]
    assert profile.sample is not None
    assert (profile.sample.share, profile.sample.confidence) == (0.1, 0.95)
    assert profile.rows_read == pytest.approx(4000, abs=200)
    with pytest.raises(DataError, match="made from a sample"):
        profile.miss_ratio("c0", 10)
    assert 0 < profile.miss_ratio("c0", 10, policy="static") < 1
    whole = holdall.profile(planted, config=ProfileConfig(sample=1.0))
    assert whole == holdall.profile(planted)


@pytest.mark.slow
def test_intervals_of_a_held_out_hot_set_hold() -> None:
    """As for raw files: ids are ranked by some slices, and held against others; the truth is over all rows."""
    rng = np.random.default_rng(6)
    rows, width = 60_000, 250
    ids = np.where(rng.random(rows) < 0.7, zipf(rng, 4000, rows), np.repeat(zipf(rng, 4000, rows), 50)[:rows])
    hashes = hash_numbers(ids, 0)
    slices = hashes.reshape(-1, width)
    hits = dict.fromkeys((1, 10, 100), 0)
    for _ in range(100):
        chosen = rng.choice(len(slices), 60, replace=False)
        stream = FeatureStream(4096, follow=False)
        stream.add(slices[chosen[12:]].reshape(-1))
        held = slices[chosen[:12]].reshape(-1)
        curve = stream.held_out(Ragged(held, np.arange(len(held) + 1)), np.repeat(np.arange(12), width))
        ranked = stream.heavy.top()[0]
        for k in hits:
            true = np.isin(hashes, ranked[:k]).mean()
            place = curve.k.index(k) if k in curve.k else int(np.searchsorted(curve.k, k))
            if curve.k[place] != k:
                true = np.isin(hashes, ranked[: curve.k[place]]).mean()
            hits[k] += curve.low[place] <= true <= curve.high[place]
    assert min(hits.values()) >= 88, hits


def test_blocks_are_drawn_alike_from_every_window() -> None:
    blocks = choose_blocks(1_000_000, windows=8, sample=0.05, seed=1)
    starts = [block.start for block in blocks]
    assert len(set(starts)) == len(starts)
    assert starts == sorted(starts)
    rows = np.bincount([block.window for block in blocks], [block.stop - block.start for block in blocks])
    np.testing.assert_allclose(rows, 50_000 / 8, rtol=0.2)
    everything = choose_blocks(1000, windows=3, sample=None, seed=0)
    assert sum(block.stop - block.start for block in everything) == 1000


def test_an_interval_does_not_collapse_at_the_ends() -> None:
    shares = ClusterShares(2)
    for _ in range(10):
        shares.add(np.array([0, 20]), 20)
    low, high = shares.interval(0.0)
    assert (low[0], high[1]) == pytest.approx((0.0, 1.0))
    assert 0.005 < high[0] < 0.05
    assert 0.95 < low[1] < 0.995
    one = ClusterShares(1)
    one.add(np.array([3]), 10)
    assert one.interval(0.0) == (0.0, 1.0)  # one block says nothing about blocks


def test_quantiles_of_t() -> None:
    for degrees, value in ((4, 2.776), (10, 2.228), (63, 1.998), (10_000, 1.960)):
        assert t_quantile(0.975, degrees) == pytest.approx(value, rel=0.005)
