"""Ranking metrics: places and ties worked out by hand, against definitions written plainly, in any batching."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from holdall.common.errors import ConfigError, DataError, IdError
from holdall.data.batch import Batch
from holdall.data.dataset import DataSet
from holdall.evaluation.grouped import GroupedAUC, grouped_batches, grouped_metrics, places
from holdall.evaluation.metrics import exact_auc
from holdall.evaluation.ranking import RankingMetrics, candidate_batches, ranking_metrics
from holdall.models import DLRMConfig, NCFConfig
from tests.models.made_up import clicks


def measured(scores: list[list[float]], k: int, counts: list[list[bool]] | None = None) -> dict[str, float]:
    metrics = RankingMetrics(k)
    metrics.update(torch.tensor(scores), None if counts is None else torch.tensor(counts))
    return metrics.compute()


@pytest.mark.parametrize(
    ("scores", "k", "hr", "ndcg"),
    [
        ([9.0, 1, 2, 3], 2, 1.0, 1.0),
        ([2.5, 1, 2, 3], 2, 1.0, 1 / math.log2(3)),
        ([1.5, 1, 2, 3], 2, 0.0, 0.0),
        ([1.5, 1, 2, 3], 3, 1.0, 1 / 2),
        ([0.0, 1, 2, 3], 10, 1.0, 1 / math.log2(5)),
        ([2.0, 2, 0, 0], 1, 1 / 2, 1 / 2),  # first or second
        ([2.0, 3, 2, 2], 2, 1 / 3, 1 / math.log2(3) / 3),  # second, third or fourth
        ([2.0, 2, 2, 2], 3, 3 / 4, (1 + 1 / math.log2(3) + 1 / 2) / 4),  # anywhere
        ([5.0], 1, 1.0, 1.0),  # no negatives at all
    ],
)
def test_places_worked_out_by_hand(scores: list[float], k: int, hr: float, ndcg: float) -> None:
    found = measured([scores], k)
    assert found[f"hr@{k}"] == pytest.approx(hr, abs=1e-12)
    assert found[f"ndcg@{k}"] == pytest.approx(ndcg, abs=1e-12)
    assert found["cases"] == 1


def test_a_model_that_scores_everything_alike_gets_its_share() -> None:
    assert measured([[0.0] * 100] * 7, 10)["hr@10"] == pytest.approx(0.1)


def test_candidates_that_do_not_count() -> None:
    found = measured([[2.0, 3.0, 2.0, 9.0]], 1, [[True, False, True, False]])
    assert found == {"hr@1": 0.5, "ndcg@1": 0.5, "cases": 1, "dropped": 2}


def test_merging_is_measuring_all() -> None:
    scores = torch.randn(20, 12, generator=torch.Generator().manual_seed(0)).round(decimals=1)
    whole, first, second = RankingMetrics(3), RankingMetrics(3), RankingMetrics(3)
    whole.update(scores)
    first.update(scores[:4])
    second.update(scores[4:])
    first.merge(second)
    assert first.compute() == pytest.approx(whole.compute(), rel=1e-12)
    with pytest.raises(ConfigError, match="metrics at 4 cannot be merged into metrics at 3"):
        first.merge(RankingMetrics(4))


def test_what_cannot_be_ranked() -> None:
    with pytest.raises(DataError, match="of no cases"):
        RankingMetrics().compute()
    with pytest.raises(DataError, match="2 scores are not finite"):
        measured([[math.nan, 1.0], [0.0, math.inf]], 1)
    assert measured([[0.0, math.nan]], 1, [[True, False]])["hr@1"] == 1.0  # what does not count may be anything
    with pytest.raises(DataError, match=r"\[cases, candidates\], got \[3\]"):
        RankingMetrics().update(torch.zeros(3))
    with pytest.raises(ConfigError, match="at least 1"):
        RankingMetrics(0)


# --- models ----------------------------------------------------------------------------------------------------------


def product_model() -> torch.nn.Module:
    """Scores a pair by the user's number times the item's: 1 and -1 for users 0 and 1, and the id for items."""
    model = NCFConfig(parts="gmf", factors=1).build(clicks(0, user=2, item=6))
    with torch.no_grad():
        model.bags.table("user").weight.copy_(torch.tensor([[1.0], [-1.0]]))
        model.bags.table("item").weight.copy_(torch.arange(6.0)[:, None])
        model.output[0].weight.fill_(1.0)
        model.output[0].bias.zero_()
    return model


USERS = torch.tensor([0, 1, 0])
ITEMS = torch.tensor([[4, 5, 4, 0], [1, 0, 3, 2], [0, 5, 4, 3]])


@pytest.mark.parametrize("batch_size", [1, 8, 1000])
def test_a_model_ranks_given_candidates(batch_size: int) -> None:
    """Places: second (one negative is the positive itself), second, fourth."""
    found = ranking_metrics(product_model(), candidate_batches(USERS, ITEMS, batch_size=batch_size), k=2)
    assert found == pytest.approx({"hr@2": 2 / 3, "ndcg@2": 2 / 3 / math.log2(3), "cases": 3, "dropped": 1})


def test_a_negative_is_the_positive_only_if_it_is_in_every_feature() -> None:
    category = torch.tensor([[0, 0, 1, 0], [1, 1, 1, 1], [2, 2, 2, 2]])
    batches = list(candidate_batches(USERS, ITEMS, category, batch_size=8))
    assert [counts.shape for _, counts in batches] == [(2, 4), (1, 4)]
    assert all(bool(counts.all()) for _, counts in batches)
    batch = batches[0][0]
    assert batch.ids.values.tolist() == [[0] * 4 + [1] * 4, [4, 5, 4, 0, 1, 0, 3, 2], [0, 0, 1, 0, 1, 1, 1, 1]]
    assert batch.label.tolist() == [1, 0, 0, 0, 1, 0, 0, 0]
    assert batch.dense.shape == (8, 0)


def test_candidates_that_are_none() -> None:
    for wrong in ((USERS,), (USERS, ITEMS[:2]), (USERS, ITEMS, ITEMS[:, :2])):
        with pytest.raises(ConfigError, match=r"ids \[cases\] or \[cases, candidates\]"):
            list(candidate_batches(*wrong))
    with pytest.raises(IdError, match="feature 'item' has id 6 but its table has 6 rows"):
        ranking_metrics(product_model(), candidate_batches(USERS, ITEMS + 1))


def test_the_model_is_left_as_it_was() -> None:
    model = product_model().train()
    ranking_metrics(model, candidate_batches(USERS, ITEMS))
    assert model.training


# --- groups ----------------------------------------------------------------------------------------------------------


def rows(max_size: int = 40) -> st.SearchStrategy[list[tuple[int, int, int]]]:
    """Group, score and label of rows; few different scores, so that there are ties."""
    row = st.tuples(st.integers(0, 5), st.integers(0, 4), st.integers(0, 1))
    return st.lists(row, min_size=1, max_size=max_size).map(lambda made: sorted(made, key=lambda row: row[0]))


def as_tensors(made: list[tuple[int, int, int]]) -> tuple[Tensor, Tensor, Tensor]:
    group, score, label = torch.tensor(made).T
    return score.float(), label.float(), group


@given(rows())
@settings(derandomize=True, deadline=None, max_examples=50)
def test_places_are_what_counting_says(made: list[tuple[int, int, int]]) -> None:
    found = sorted(zip(*(tensor.tolist() for tensor in places(*as_tensors(made))), strict=True))
    expected = []
    for group, score, label in made:
        if label:
            against = [other for other_group, other, its_label in made if other_group == group and not its_label]
            expected.append((group, sum(other > score for other in against), against.count(score)))
    assert found == sorted(expected)


@given(rows(), st.integers(1, 7))
@settings(derandomize=True, deadline=None, max_examples=50)
def test_grouped_auc_is_the_weighted_mean_of_exact_ones(made: list[tuple[int, int, int]], step: int) -> None:
    """Over any cutting into updates, groups cut in two included."""
    scores, labels, groups = as_tensors(made)
    metrics = GroupedAUC(RankingMetrics(2))
    for start in range(0, len(made), step):
        metrics.update(*(tensor[start : start + step] for tensor in (scores, labels, groups)))
    total, weight, num_left_out, whole = 0.0, 0, 0, RankingMetrics(2)
    for group in groups.unique():
        score, label = scores[groups == group], labels[groups == group]
        if label.min() == label.max():
            num_left_out += 1
            continue
        total += exact_auc(score, label) * len(score)
        weight += len(score)
        negatives = score[label == 0]
        for positive in score[label == 1]:
            whole.update(torch.cat([positive[None], negatives])[None])
    if not weight:
        with pytest.raises(DataError, match=f"none of {num_left_out} groups has both classes"):
            metrics.compute()
        return
    found = metrics.compute()
    assert found["gauc"] == pytest.approx(total / weight, rel=1e-12)
    assert found["groups"] + num_left_out == len(groups.unique())
    assert found["groups_left_out"] == num_left_out
    assert {name: found[name] for name in whole.compute()} == pytest.approx(whole.compute(), rel=1e-12)


def test_planted_grouped_auc() -> None:
    """AUC 1 over two rows, 0 over four: (2 * 1 + 4 * 0) / 6; a group of clicks alone says nothing."""
    metrics = GroupedAUC()
    groups = torch.tensor([7, 7, 3, 3, 3, 3, 5])
    metrics.update(torch.tensor([1.0, 0, 0, 1, 1, 1, 9]), torch.tensor([1.0, 0, 1, 0, 0, 0, 1]), groups)
    assert metrics.compute() == {"gauc": pytest.approx(1 / 3), "groups": 2, "groups_left_out": 1}


@pytest.mark.parametrize("groups", [[1, 2, 1], [1, 1, 2, 2, 1, 1], [0, 1, 0, 1, 0]])
@pytest.mark.parametrize("step", [1, 2, 10])
def test_a_group_in_two_places_is_refused(groups: list[int], step: int) -> None:
    metrics = GroupedAUC()

    def update() -> None:
        for start in range(0, len(groups), step):
            part = torch.tensor(groups[start : start + step])
            metrics.update(torch.zeros(len(part)), torch.zeros(len(part)), part)
        metrics.compute()

    with pytest.raises(DataError, match=r"the rows of group [01] do not follow one another: sort them"):
        update()


def test_rows_that_no_metric_can_use() -> None:
    zero = torch.zeros(2)
    for scores, labels, groups, message in (
        (torch.tensor([0.0, math.nan]), zero, zero, "not finite"),
        (zero, torch.tensor([0.0, 2.0]), zero, "neither 0 nor 1"),
        (zero, zero, torch.zeros(3), r"one shape \[B\]"),
        (zero, zero, torch.tensor([-1, 0]), "group -1 is no id"),
    ):
        with pytest.raises(DataError, match=message):
            GroupedAUC().update(scores, labels, groups)


def test_batches_by_group_hold_every_row_once(data: Path) -> None:
    split = DataSet(data, "test")
    found: list[Batch] = []
    groups = []
    for batch, group in grouped_batches(split, "C2", batch_size=64):
        assert torch.equal(batch.ids.values[1], group)
        found.append(batch)
        groups.append(group)
    assert torch.cat(groups).diff().min() >= 0
    samples = [row for batch in found for row in batch.dense.tolist()]
    assert sorted(samples) == sorted(split.slice(0, len(split)).dense.tolist())


class Constant(torch.nn.Module):
    """Scores everything alike."""

    def __init__(self) -> None:
        super().__init__()
        self.score = torch.nn.Parameter(torch.zeros(1))

    def forward(self, batch: Batch) -> Tensor:
        return self.score.expand(len(batch))


def test_grouped_metrics_of_a_model(data: Path) -> None:
    split = DataSet(data, "test")
    alike = grouped_metrics(Constant(), split, "C2", batch_size=50)
    assert alike["gauc"] == pytest.approx(0.5)
    assert alike["groups"] + alike["groups_left_out"] == split.slice(0, len(split)).ids.values[1].unique().numel()
    generator = torch.Generator().manual_seed(0)
    model = DLRMConfig(dim=2, bottom=(2,), top=(2,)).build(split.schema, generator=generator)
    small, large = (grouped_metrics(model, split, "C2", batch_size=size) for size in (7, 1000))
    assert small == pytest.approx(large, rel=1e-6)
    assert small["gauc"] != pytest.approx(0.5)


def test_grouping_by_what_is_no_group(bag_data: Path) -> None:
    with pytest.raises(ConfigError, match="'C2' has several"):
        next(grouped_batches(DataSet(bag_data, "test"), "C2"))
    with pytest.raises(ConfigError, match="no feature named 'user'"):
        next(grouped_batches(DataSet(bag_data, "test"), "user"))
