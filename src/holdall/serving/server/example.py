"""Example of a row, made of values that training had."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa

from holdall.data.id_map import id_map_path
from holdall.serving.scorer import Scorer

EXAMPLE_IDS = 3
"""Popular ids of a table among which an example looks for a value that is not missing."""


def example_row(scorer: Scorer) -> dict[str, Any]:
    """A row with a popular value of every feature, as training had them."""
    row: dict[str, Any] = {column.name: 1 for column in scorer.schema.dense}
    files: dict[str, Path] = {}
    for feature in scorer.schema.features:
        files.setdefault(feature.table or feature.name, id_map_path(scorer.maps, feature.name))
        if feature.name in scorer.reads:
            value = _popular(str(files[feature.table or feature.name]))
            row[feature.name] = value if feature.one_hot else [value] if value else []
    return row


def _popular(path: str) -> str:
    with pa.memory_map(path) as file:
        values = pa.ipc.open_file(file).get_batch(0)["value"].slice(0, EXAMPLE_IDS).to_pylist()
    return next((value for value in values if value), "")
