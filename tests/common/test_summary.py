"""Displays of one screen, in a shell and in a notebook."""

from __future__ import annotations

import html

import pytest
import torch

from holdall import Batch, Feature, Ids, Schema
from holdall.common.summary import MAX_ROWS, Summary

HOSTILE = "<script>alert('x')</script>\n\x1b[31m"


def schema(num_features: int, name: str = "f") -> Schema:
    features = tuple(Feature(name=f"{name}{i}", kind="categorical", num_rows=5, unseen=4) for i in range(num_features))
    return Schema(label="click", dense=(), features=features)


def test_a_schema_of_many_features_takes_one_screen() -> None:
    text = repr(schema(1000))
    assert text.startswith("Schema: label 'click', 0 dense columns, 1000 features, 0 rows\n")
    assert text.endswith(f"... and {1000 - MAX_ROWS} more")
    assert len(text.splitlines()) < 24


def test_a_batch_shows_shapes_and_no_values() -> None:
    ids = Ids(torch.zeros(3, 2048, dtype=torch.int32), None, 3)
    text = repr(Batch(torch.full((2048, 4), 1.25), ids, torch.zeros(2048)))
    assert "2,048 x 4" in text
    assert "1.25" not in text
    assert len(text.splitlines()) < 10


def test_names_cannot_be_markup_or_control_the_terminal() -> None:
    shown = schema(1, HOSTILE)
    assert "<script" not in shown._repr_html_()
    assert html.escape("<script>alert('x')</script>") in shown._repr_html_()
    assert "\x1b" not in repr(shown)
    assert len(repr(shown).splitlines()) == 3


@pytest.mark.parametrize("summary", [Summary("only a title"), Summary("t", ("a", "b"), [("x", None), ("y", 1234.5)])])
def test_a_summary_without_rows_or_values(summary: Summary) -> None:
    assert summary.title in summary.text()
    assert summary.html().count("<tr>") == len(summary.rows) + bool(summary.heads)
