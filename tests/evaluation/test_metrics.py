"""Binary metrics: planted answers, the error bound of the binned AUC, and values that must be refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdall.common.errors import ConfigError, DataError
from holdall.evaluation.metrics import BinaryMetrics, exact_auc

SLACK = 1e-12  # float64 rounding of the sums, on top of the bound


def measure(logits: torch.Tensor, labels: torch.Tensor, **options) -> dict[str, float]:
    metrics = BinaryMetrics(**options)
    metrics.update(logits, labels)
    return metrics.compute()


def auc_by_pairs(scores: np.ndarray, labels: np.ndarray) -> float:
    """The definition: every pair of a positive and a negative."""
    difference = scores[labels == 1][:, None] - scores[labels == 0][None, :]
    return float(np.mean((difference > 0) + 0.5 * (difference == 0)))


class TestExactAuc:
    @pytest.mark.parametrize(
        ("scores", "labels", "expected"),
        [
            ([1, 2, 3, 4], [0, 0, 1, 1], 1.0),
            ([4, 3, 2, 1], [0, 0, 1, 1], 0.0),
            ([1, 1, 1, 1], [0, 1, 0, 1], 0.5),
            ([1, 2, 2, 3], [0, 1, 0, 1], 0.875),
            ([0.1, 0.4, 0.35, 0.8], [0, 0, 1, 1], 0.75),
        ],
    )
    def test_planted(self, scores: list, labels: list, expected: float):
        assert exact_auc(scores, labels) == expected
        assert exact_auc(torch.tensor(scores, dtype=torch.float32), torch.tensor(labels)) == expected

    @settings(derandomize=True, deadline=None, max_examples=50)
    @given(st.lists(st.tuples(st.integers(-5, 5), st.booleans()), min_size=2, max_size=60))
    def test_equals_the_definition(self, samples: list[tuple[int, bool]]):
        scores, labels = np.array([s for s, _ in samples], float), np.array([y for _, y in samples], int)
        if labels.min() == labels.max():
            with pytest.raises(DataError, match=f"all {len(samples)} labels"):
                exact_auc(scores, labels)
        else:
            assert exact_auc(scores, labels) == pytest.approx(auc_by_pairs(scores, labels), abs=SLACK)

    def test_refuses_bad_values(self):
        with pytest.raises(DataError, match="2 scores are not finite"):
            exact_auc([math.nan, math.inf, 1.0], [0, 1, 1])
        with pytest.raises(DataError, match="labels of 0 and 1"):
            exact_auc([1.0, 2.0], [0, 2])
        with pytest.raises(DataError, match="one shape"):
            exact_auc([1.0, 2.0], [0])


class TestBinnedAuc:
    @settings(derandomize=True, deadline=None, max_examples=50)
    @given(
        samples=st.lists(
            st.tuples(st.floats(-(2.0**100), 2.0**100, width=32) | st.floats(-3, 3, width=32), st.booleans()),
            min_size=2, max_size=200,
        ),
        num_bins=st.sampled_from([2, 3, 16, 257, 1 << 16]),
    )  # fmt: skip
    def test_within_its_bound(self, samples: list[tuple[float, bool]], num_bins: int):
        logits = torch.tensor([x for x, _ in samples])
        labels = torch.tensor([float(y) for _, y in samples])
        labels[0], labels[1] = 0.0, 1.0  # both classes, always
        result = measure(logits, labels, num_bins=num_bins)
        assert abs(result["auc"] - exact_auc(logits, labels)) <= result["auc_error_bound"] + SLACK

    @pytest.mark.parametrize(
        "draw",
        [
            lambda g: torch.randn(20_000, generator=g) - 3,
            lambda g: torch.randn(20_000, generator=g) * 1e-3 - 6,  # all scores nearly the same, as early in training
            lambda g: torch.randn(20_000, generator=g).exp() * 10 - 20,  # a heavy tail
            lambda g: torch.randn(20_000, generator=g).bfloat16(),  # many ties
            lambda g: torch.randint(0, 3, (20_000,), generator=g).double() * 1e-9,  # apart in float64 only just
        ],
    )
    def test_within_its_bound_on_skewed_scores(self, draw):
        generator = torch.Generator().manual_seed(3)
        logits = draw(generator)
        rank = logits.double().argsort().argsort() / len(logits)
        labels = (torch.rand(len(logits), generator=generator) < 0.3 * rank).float()
        result = measure(logits, labels)
        assert abs(result["auc"] - exact_auc(logits.double(), labels)) <= result["auc_error_bound"] + SLACK

    def test_bound_is_small_where_scores_are_spread(self):
        generator = torch.Generator().manual_seed(0)
        logits = torch.randn(100_000, generator=generator) - 3
        labels = (torch.rand(100_000, generator=generator) < torch.sigmoid(logits)).float()
        result = measure(logits, labels)
        assert result["auc_error_bound"] < 1e-4
        assert result["auc"] == pytest.approx(exact_auc(logits, labels), abs=1e-6)

    def test_bound_is_reached_when_one_bin_holds_all(self):
        # Perfectly ordered, but two bins put both in the upper one: the AUC reads 1/2, off by the whole bound.
        result = measure(torch.tensor([1.0, 2.0]), torch.tensor([0.0, 1.0]), num_bins=2)
        assert (result["auc"], result["auc_error_bound"]) == (0.5, 0.5)


class TestValues:
    def test_planted(self):
        # Predictions 0.8 and 0.5 for clicks, 0.2 and 0.5 for none; 0.5 is a prediction of no click.
        logits = torch.tensor([math.log(4), 0.0, -math.log(4), 0.0], dtype=torch.float64)
        result = measure(logits, torch.tensor([1.0, 1.0, 0.0, 0.0]))
        logloss = -(2 * math.log(0.8) + 2 * math.log(0.5)) / 4
        assert result["logloss"] == pytest.approx(logloss, rel=1e-7)
        assert result["normalized_entropy"] == pytest.approx(logloss / math.log(2), rel=1e-7)
        assert result["accuracy"] == 0.75
        assert result["calibration"] == pytest.approx(1.0)
        assert result["auc"] == 0.875
        assert (result["samples"], result["positives"]) == (4, 2)

    def test_predicting_the_base_rate_has_normalized_entropy_one(self):
        labels = torch.tensor([1.0, 0.0, 0.0, 0.0])
        result = measure(torch.full((4,), math.log(1 / 3), dtype=torch.float64), labels)
        assert result["normalized_entropy"] == pytest.approx(1.0, rel=1e-7)
        assert result["auc"] == 0.5

    def test_logloss_is_stable_at_extreme_logits(self):
        result = measure(torch.tensor([1000.0, -1000.0, 30.0, -30.0]), torch.tensor([0.0, 1.0, 1.0, 0.0]))
        assert result["logloss"] == pytest.approx((2000 + 2 * math.log1p(math.exp(-30))) / 4, rel=1e-15)
        right = measure(torch.tensor([40.0, -40.0]), torch.tensor([1.0, 0.0]))
        assert right["logloss"] == pytest.approx(math.exp(-40), rel=1e-12)

    def test_sums_are_float64(self):
        # A million times 0.1 in float32 is off by 1%.
        metrics = BinaryMetrics()
        logits = torch.full((1000,), 0.5)
        labels = torch.zeros(1000)
        labels[0] = 1.0
        for _ in range(1000):
            metrics.update(logits, labels)
        p = 1 / (1 + math.exp(-0.5))
        expected = -(math.log(p) + 999 * math.log(1 - p)) / 1000
        assert metrics.compute()["logloss"] == pytest.approx(expected, rel=1e-12)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
    def test_any_float_type_and_a_graph(self, dtype: torch.dtype):
        logits = torch.tensor([-1.0, 2.0, 0.5], dtype=dtype, requires_grad=True)
        assert measure(logits, torch.tensor([0, 1, 1]))["auc"] == 1.0


class TestState:
    def test_batches_merge_and_all_reduce_alike(self):
        generator = torch.Generator().manual_seed(1)
        logits = torch.randn(1000, generator=generator)
        labels = (torch.rand(1000, generator=generator) < 0.3).float()
        whole = measure(logits, labels)
        parts = [BinaryMetrics() for _ in range(3)]
        for part, rows in zip(parts, (slice(0, 100), slice(100, 650), slice(650, 1000)), strict=True):
            part.update(logits[rows], labels[rows])
        reduced = BinaryMetrics()
        reduced.counts.copy_(sum(part.counts for part in parts))
        reduced.sums.copy_(sum(part.sums for part in parts))
        parts[0].merge(parts[1])
        parts[0].merge(parts[2])
        assert parts[0].compute() == pytest.approx(whole, rel=1e-13)
        assert reduced.compute() == pytest.approx(whole, rel=1e-13)

    def test_memory_does_not_grow(self):
        metrics = BinaryMetrics()
        before = metrics.counts.nbytes + metrics.sums.nbytes
        for _ in range(10):
            metrics.update(torch.randn(1000), torch.ones(1000))
        assert metrics.counts.nbytes + metrics.sums.nbytes == before <= 2 << 20

    def test_refuses_to_merge_other_bins(self):
        with pytest.raises(ConfigError, match="16 bins"):
            BinaryMetrics().merge(BinaryMetrics(num_bins=16))


class TestRefusals:
    @pytest.mark.parametrize("label", [0, 1])
    def test_one_class(self, label: int):
        metrics = BinaryMetrics()
        metrics.update(torch.zeros(7), torch.full((7,), float(label)))
        with pytest.raises(DataError, match=f"AUC is undefined: all 7 labels are {label}"):
            metrics.compute()
        result = metrics.compute(allow_one_class=True)
        assert math.isnan(result["auc"])
        assert math.isnan(result["auc_error_bound"])
        assert math.isnan(result["normalized_entropy"])
        assert result["logloss"] == pytest.approx(math.log(2))
        assert math.isnan(result["calibration"]) == (label == 0)

    def test_non_finite_logits_are_counted(self):
        metrics = BinaryMetrics()
        metrics.update(torch.tensor([math.nan, 1.0, math.inf]), torch.tensor([0.0, 1.0, 0.0]))
        metrics.update(torch.tensor([-math.inf, 1.0]), torch.tensor([0.0, 1.0]))
        with pytest.raises(DataError, match="3 logits are not finite"):
            metrics.compute()

    def test_labels_other_than_0_and_1(self):
        with pytest.raises(DataError, match="2 labels are neither 0 nor 1"):
            measure(torch.zeros(4), torch.tensor([0.0, 1.0, 0.5, 2.0]))

    def test_shapes_that_would_broadcast(self):
        with pytest.raises(DataError, match=r"\[4, 1\] and \[4\]"):
            measure(torch.zeros(4, 1), torch.zeros(4))

    def test_no_samples(self):
        with pytest.raises(DataError, match="no samples"):
            BinaryMetrics().compute(allow_one_class=True)

    def test_too_few_bins(self):
        with pytest.raises(ConfigError, match="num_bins"):
            BinaryMetrics(num_bins=1)
