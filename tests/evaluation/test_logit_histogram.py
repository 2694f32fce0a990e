"""Bins of logits: how fine they are, what they merge, and what they cost."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdall.common.errors import ConfigError
from holdall.evaluation.logit_histogram import LogitHistogram
from holdall.evaluation.metrics import BinaryMetrics, exact_auc


def one_of_each_block() -> torch.Tensor:
    """All finite bfloat16 numbers: with them, four bins a block are left."""
    numbers = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.bfloat16).float()
    return numbers[numbers.isfinite()]


def neighbours(start: float, steps: list[int]) -> torch.Tensor:
    """The float32 numbers so many steps above `start`."""
    return (torch.tensor(start).view(torch.int32) + torch.tensor(steps, dtype=torch.int32)).view(torch.float32)


def test_bins_in_ascending_order_of_logits() -> None:
    histogram = LogitHistogram()
    logits = torch.tensor([2.0, -1e-30, -5.0, 2.0, 0.0, -5e20, 3e38, -0.0])
    histogram.add(logits, torch.tensor([True, False, False, False, True, True, True, False]))
    counts = histogram.counts()
    filled = counts[:, counts.sum(0) > 0]
    assert filled.tolist() == [[0, 1, 1, 1, 1, 0], [1, 0, 0, 1, 1, 1]]


def test_neighbours_share_a_bin_only_where_there_is_no_room() -> None:
    few, many = LogitHistogram(), LogitHistogram()
    close = neighbours(1.0, [0, 1, 2, (1 << 14) - 1, 1 << 14])
    positive = torch.ones(5, dtype=torch.bool)
    few.add(close, positive)
    assert few.counts()[1].max() == 1
    assert few.is_exact()
    many.add(one_of_each_block(), torch.zeros(len(one_of_each_block()), dtype=torch.bool))
    assert many.is_exact()  # one number a block
    many.add(close, positive)
    assert many.counts()[1].unique().tolist() == [0, 1, 4]
    assert not many.is_exact()


def test_early_samples_move_to_the_wider_bins() -> None:
    generator = torch.Generator().manual_seed(0)
    blocks = one_of_each_block()
    close = neighbours(-3.0, list(range(50_000)))
    logits = torch.cat([close, blocks])
    positive = torch.rand(len(logits), generator=generator) < 0.5
    early, late = LogitHistogram(), LogitHistogram()
    early.add(logits, positive)
    for some, of_them in zip(logits.split(13_000), positive.split(13_000), strict=True):
        late.add(some, of_them)
        late.counts()
    assert int(early.counts().sum()) == len(logits)
    assert torch.equal(late.counts(), early.counts())


@settings(derandomize=True, deadline=None, max_examples=50)
@given(
    samples=st.lists(st.tuples(st.integers(0, 1 << 15), st.booleans()), min_size=1, max_size=200),
    start=st.sampled_from([-3.0, 1e-20, 1e6, 0.0]),
)
def test_auc_is_within_its_bound_where_bins_are_wide(samples: list[tuple[int, bool]], start: float) -> None:
    blocks = one_of_each_block()
    logits = torch.cat([blocks, neighbours(start, [step for step, _ in samples]).repeat(300)])
    labels = torch.tensor([float(positive) for _, positive in samples]).repeat(300)
    labels = torch.cat([(torch.arange(len(blocks)) % 97 == 0).float(), labels])
    metrics = BinaryMetrics()
    metrics.update(logits, labels)
    result = metrics.compute()
    assert abs(result["auc"] - exact_auc(logits, labels)) <= result["auc_error_bound"] + 1e-12


def test_bound_is_reached_when_a_bin_holds_a_pair_in_order() -> None:
    blocks = one_of_each_block()
    logits = torch.cat([blocks, neighbours(-3.0, [5, 4])])
    labels = torch.cat([torch.zeros(len(blocks)), torch.tensor([0.0, 1.0])])
    metrics = BinaryMetrics()
    metrics.update(logits, labels)
    result = metrics.compute()
    # The positive is above -3.0 itself and below the other, and all three are in one bin: each pair counts a half.
    assert result["auc_error_bound"] == pytest.approx(2 / 2 / (len(blocks) + 1))
    assert result["auc"] == pytest.approx(exact_auc(logits, labels))


def test_memory_does_not_grow() -> None:
    histogram = LogitHistogram()
    most = 0
    for _ in range(30):
        histogram.add(torch.randn(20_000) * 1e3, torch.ones(20_000, dtype=torch.bool))
        most = max(most, histogram.num_bytes())
    assert most <= 6 << 20
    histogram.counts()
    assert histogram.num_bytes() == LogitHistogram().num_bytes()


def test_too_few_bins() -> None:
    with pytest.raises(ConfigError, match="num_bins is 16, it must be 65,536 or more"):
        LogitHistogram(num_bins=16)
