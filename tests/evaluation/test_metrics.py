"""Binary metrics: planted answers, the error bound of the binned AUC, and values that must be refused."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

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


SHAPES: dict[str, Callable[[torch.Generator, int], torch.Tensor]] = {
    "normal at -3": lambda g, n: torch.randn(n, generator=g) - 3,
    "all within 1e-4 of 0": lambda g, n: torch.rand(n, generator=g) * 1e-4,
    "all within 1e-4 of -3": lambda g, n: torch.rand(n, generator=g) * 1e-4 - 3,
    "all within 1e-4 of 1e-2": lambda g, n: torch.rand(n, generator=g) * 1e-4 + 1e-2,
    "spread over 1e6": lambda g, n: (torch.rand(n, generator=g) - 0.5) * 1e6,
    "spread over 1e30": lambda g, n: torch.randn(n, generator=g) * 1e30,
    "normal with an outlier": lambda g, n: (torch.randn(n, generator=g) * 1e-4 - 3).index_fill(0, torch.tensor(0), 5e8),
    "heavy tail": lambda g, n: (torch.randn(n, generator=g) * 6).exp(),
    "bfloat16": lambda g, n: torch.randn(n, generator=g).bfloat16(),
    "few distinct": lambda g, n: torch.randint(-1, 2, (n,), generator=g).float() * 1e-9,
    "constant": lambda g, n: torch.full((n,), -2.7),
}


def labels_of(logits: torch.Tensor, generator: torch.Generator, tail: bool = False) -> torch.Tensor:
    """Labels that are likelier for higher logits, or positives among the highest thousandth alone."""
    rank = logits.double().argsort().argsort() / len(logits)
    labels = torch.rand(len(logits), generator=generator) < (2 * (rank >= 0.999) if tail else 0.3 * rank)
    labels[0], labels[1] = False, True  # both classes, always
    return labels.float()


class TestBinnedAuc:
    @settings(derandomize=True, deadline=None, max_examples=80)
    @given(
        shape=st.sampled_from(list(SHAPES)),
        size=st.integers(2, 30_000),
        tail=st.booleans(),
        seed=st.integers(0, 1000),
    )
    def test_close_and_within_its_bound(self, shape: str, size: int, tail: bool, seed: int):
        generator = torch.Generator().manual_seed(seed)
        logits = SHAPES[shape](generator, size)
        labels = labels_of(logits, generator, tail)
        result = measure(logits, labels)
        error = abs(result["auc"] - exact_auc(logits.float(), labels))
        assert error <= result["auc_error_bound"] + SLACK
        assert error < 1e-4

    @pytest.mark.parametrize("shape", SHAPES)
    def test_bound_is_small_on_many_samples(self, shape: str):
        generator = torch.Generator().manual_seed(0)
        logits = SHAPES[shape](generator, 200_000)
        labels = labels_of(logits, generator)
        result = measure(logits, labels)
        assert result["auc_error_bound"] < 1e-4
        assert result["auc"] == pytest.approx(exact_auc(logits.float(), labels), abs=1e-6)

    @settings(derandomize=True, deadline=None, max_examples=50)
    @given(st.lists(st.tuples(st.floats(width=32, allow_nan=False, allow_infinity=False), st.booleans()), min_size=2))
    def test_any_floats_are_within_the_bound(self, samples: list[tuple[float, bool]]):
        logits = torch.tensor([x for x, _ in samples])
        labels = torch.tensor([float(y) for _, y in samples])
        labels[0], labels[1] = 0.0, 1.0
        result = measure(logits, labels)
        assert abs(result["auc"] - exact_auc(logits, labels)) <= result["auc_error_bound"] + SLACK

    def test_ties_are_no_error(self):
        result = measure(torch.tensor([-0.0, 0.0, 1.0]), torch.tensor([0.0, 1.0, 1.0]))
        assert (result["auc"], result["auc_error_bound"]) == (0.75, 0.0)

    def test_float64_logits_that_float32_makes_equal_are_in_the_bound(self):
        logits = torch.tensor([-3.0, -3.0 + 1e-12], dtype=torch.float64)
        result = measure(logits, torch.tensor([0.0, 1.0]))
        assert (result["auc"], result["auc_error_bound"]) == (0.5, 0.5)
        huge = measure(torch.tensor([1e200, 1e300], dtype=torch.float64), torch.tensor([0.0, 1.0]))
        assert (huge["auc"], huge["auc_error_bound"]) == (0.5, 0.5)


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


class Ranks:
    """All-reduce between threads that stand for the processes."""

    def __init__(self, world_size: int):
        self.barrier = threading.Barrier(world_size, timeout=60)
        self.tensors: list[torch.Tensor] = []

    def reduce(self, tensor: torch.Tensor) -> None:
        self.tensors.append(tensor)
        self.barrier.wait()
        total = torch.stack(self.tensors).sum(0)
        if self.barrier.wait() == 0:
            self.tensors = []
        tensor.copy_(total)
        self.barrier.wait()

    def run(self, parts: list[BinaryMetrics]) -> None:
        with ThreadPoolExecutor(len(parts)) as pool:
            list(pool.map(lambda part: part.sum_over_ranks(self.reduce), parts))


class TestState:
    @pytest.mark.parametrize("shape", SHAPES)
    def test_ranks_and_merged_parts_give_the_results_of_one_process(self, shape: str):
        generator = torch.Generator().manual_seed(1)
        logits = SHAPES[shape](generator, 20_000)
        labels = labels_of(logits, generator)
        whole = measure(logits, labels)
        order = logits.float().argsort()  # the parts have different values, and so different bins at first
        shares = [order[:9_000], order[9_000:9_001], order[9_001:], order[:0]]
        parts = [BinaryMetrics() for _ in shares]
        merged = BinaryMetrics()
        for part, share in zip(parts, shares, strict=True):
            part.update(logits[share], labels[share])
            merged.merge(part)
        Ranks(len(parts)).run(parts)
        for found in (merged, *parts):
            result = found.compute()
            assert (result["auc"], result["auc_error_bound"]) == (whole["auc"], whole["auc_error_bound"])
            assert result == pytest.approx(whole, rel=1e-12)

    def test_batches_go_on_after_a_sum_over_ranks(self):
        generator = torch.Generator().manual_seed(2)
        first, second = torch.randn(2, 5000, generator=generator)
        parts = [BinaryMetrics(), BinaryMetrics()]
        for part in parts:
            part.update(first, (first > 0).float())
        Ranks(2).run(parts)
        parts[0].update(second * 1e6, (second < 1).float())
        logits = torch.cat([first, first, second * 1e6])
        whole = measure(logits, torch.cat([(first > 0).float(), (first > 0).float(), (second < 1).float()]))
        assert parts[0].compute()["auc"] == whole["auc"]

    def test_batch_sizes_do_not_matter(self):
        generator = torch.Generator().manual_seed(1)
        logits = torch.randn(300_000, generator=generator)
        labels = labels_of(logits, generator)
        whole = measure(logits, labels)
        metrics = BinaryMetrics()
        for start in range(0, 300_000, 7_777):
            metrics.update(logits[start : start + 7_777], labels[start : start + 7_777])
        found = metrics.compute()
        assert (found["auc"], found["auc_error_bound"]) == (whole["auc"], whole["auc_error_bound"])

    def test_refuses_to_merge_other_bins(self):
        with pytest.raises(ConfigError, match="100000 bins"):
            BinaryMetrics().merge(BinaryMetrics(num_bins=100_000))

    @pytest.mark.slow
    def test_update_never_waits_for_the_device(self):
        # A tensor on meta has no values: any read of them is an error.
        metrics = BinaryMetrics(device="meta")
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            metrics.update(torch.zeros(1 << 18, dtype=dtype, device="meta"), torch.zeros(1 << 18, device="meta"))
        with pytest.raises((RuntimeError, NotImplementedError)):
            metrics.compute()


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
