"""Example of a row, made of values that training had."""

from __future__ import annotations

from typing import Any

from holdall.serving.id_lookup import IdLookup
from holdall.serving.scorer import Scorer

EXAMPLE_IDS = 3
"""Popular ids of a table among which an example looks for a value that is not missing."""


def example_row(scorer: Scorer) -> dict[str, Any]:
    """A row with a popular value of every feature, as training had them."""
    row: dict[str, Any] = {column.name: 1 for column in scorer.schema.dense}
    for feature in scorer.inputs:
        if feature.bucket is not None:
            row[feature.name] = 1
            continue
        value = _popular(scorer.lookups[feature.name]) if feature.name in scorer.lookups else ""
        row[feature.name] = value if feature.one_hot else [value] if value else []
    return row


def _popular(lookup: IdLookup) -> str:
    texts = (lookup.text(number) for number in range(min(EXAMPLE_IDS, lookup.num_rows)))
    return next((text for text in texts if text), "")
