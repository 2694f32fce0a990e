"""The judge itself: a model that works, planted mistakes that it has to find, and lookups that it has to record."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import holdall
from holdall.common.errors import ConfigError
from holdall.tables import Dense, Hashed
from holdall.tables.hashed import HashedTable
from tests.peers import expected, model_checks, replay, stand_ins, suites

IDS = torch.arange(0, 600, 7)


class Scorer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(600, 8)
        self.out = nn.Linear(8, 2)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.items(ids))


def check(build: Callable[[], nn.Module] = Scorer) -> model_checks.ModelOutcome:
    return model_checks.check(model_checks.PeerModel("here", "scorer", build, lambda module: module(IDS)))


def test_a_plain_model_works() -> None:
    outcome = check()
    assert (outcome.outcome, outcome.sentence) == ("works", "")
    assert (outcome.tables, outcome.compressed) == (1, 1)
    assert len(outcome.passed) == 2 * 9


def after_compress(monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Any], None]) -> None:
    """Let `compress` make a mistake."""
    original = holdall.compress

    def wrong(model: nn.Module, *arguments: Any, **options: Any) -> Any:
        report = original(model, *arguments, **options)
        spoil(model)
        return report

    monkeypatch.setattr(holdall, "compress", wrong)


def test_a_lost_factor_is_silently_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    after_compress(monkeypatch, lambda model: model.out.register_forward_hook(lambda *found: found[2] * 1.5))
    outcome = check()
    assert outcome.outcome == "silently wrong"
    assert "auto, forward and gradients" in outcome.sentence


def test_a_budget_that_is_not_kept_is_silently_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    after_compress(monkeypatch, lambda model: model.items.register_buffer("more", torch.zeros(5000)))
    assert "bytes of tables after" in check().sentence


def test_an_error_of_its_own_is_a_refusal_and_others_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> None:
        raise ConfigError("the model cannot be compressed: give it up")

    monkeypatch.setattr(holdall, "compress", refuse)
    assert (check().outcome, check().sentence) == ("refused", "the model cannot be compressed: give it up")

    def fail(*arguments: Any) -> None:
        raise KeyError("items")

    monkeypatch.setattr(holdall, "compress", fail)
    assert (check().outcome, check().sentence) == ("fails", "auto, compress: KeyError: 'items'")


PUBLISHED = """
import unittest, torch
import torch.nn as nn

class Published(unittest.TestCase):
    def test_rows(self):
        embedding = nn.Embedding(10, 3, padding_idx=1)
        self.assertEqual(embedding(torch.tensor([[1, 2], [3, 1]])).shape, (2, 2, 3))
    def test_wrong(self):
        self.assertEqual(1, 2)
    def test_refused(self):
        torch.nn.EmbeddingBag(10, 3, mode="median")
    def test_skipped(self):
        self.skipTest("no GPU")
"""


def test_outcomes_and_lookups_of_a_suite(tmp_path: Path) -> None:
    (tmp_path / "published.py").write_text(PUBLISHED)
    module = suites.load(tmp_path / "published.py", "published_for_the_judge")
    record = stand_ins.install(module)
    cases = suites.run(module, lambda: len(record.lookups))
    verdicts = {case.name.partition(".")[2]: expected.verdict(case)[0] for case in cases}
    assert verdicts == {
        "test_rows": "works", "test_wrong": "silently wrong", "test_refused": "refused", "test_skipped": "skipped",
    }  # fmt: skip
    assert [(one.kind, one.num_rows, one.dim) for one in record.lookups] == [("embedding", 10, 3)]
    assert [case.lookups for case in cases if case.name.endswith("rows")] == [1]


def lookup() -> stand_ins.Lookup:
    options = {"mode": "mean", "padding_idx": None, "include_last_offset": False}
    arguments = (torch.tensor([1, 2, 5, 5]), torch.tensor([0, 1, 1]), None)
    return stand_ins.Lookup("embedding_bag", 10, 3, torch.float32, options, arguments)


def test_lookups_are_replayed_on_every_method(monkeypatch: pytest.MonkeyPatch) -> None:
    methods = (Dense(), Hashed(buckets=7))
    found = replay.compare([lookup(), lookup()], methods)
    assert [one.equal for one in found.values()] == [1, 1]

    def wrong(self: Any, input: Tensor, offsets: Tensor, weights: None) -> Tensor:
        return F.embedding_bag(input, self.rows(torch.arange(10)), offsets, mode="sum")

    monkeypatch.setattr(HashedTable, "forward", wrong)
    dense, hashed = replay.compare([lookup()], methods).values()
    assert (dense.equal, hashed.equal) == (1, 0)
    assert "vectors" in hashed.different[0]
