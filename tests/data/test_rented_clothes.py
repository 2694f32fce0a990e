"""Data like that of a clothes rental, in one attempt: a text label, ids that became floats, several values a column.

Columns and their faults are those of RentTheRunway's reviews; values are generated, and the label is planted.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdall.data.infer_schema import schema as infer
from holdall.data.prepare import PrepareConfig, prepare
from holdall.data.schema import Schema
from holdall.training.config import TrainConfig
from holdall.training.evaluate_run import evaluate
from holdall.training.train import train

NUM_ROWS = 3000
OCCASIONS = ["wedding", "formal affair", "party", "work", "date"]
TAGS = ["lace", "silk", "long", "short", "red"]
WORDS = ["I", "wore", "this", "dress", "and", "loved", "it", "so", "much", "again"]
BODIES = ["hourglass", "athletic", "pear", "petite", None]


def reviews() -> list[dict[str, Any]]:
    draw = np.random.default_rng(0)
    found = []
    for number in range(NUM_ROWS):
        item, user = int(draw.integers(40)), int(draw.integers(300))
        chance = 0.85 if item % 2 else 0.25
        fit = "fit" if draw.random() < chance else str(draw.choice(["small", "large"]))
        words = draw.choice(
            ["I", "wore", "this", "dress", "and", "loved", "it", "so", "much", "again", str(number)], 14
        )
        found.append(
            {
                "fit": fit,
                "user_id": None if draw.random() < 0.05 else 100_000 + user,
                "item_id": 2_260_000 + item,
                "bust size": f"{draw.integers(30, 40)}{draw.choice(list('abcd'))}",
                "weight": None if draw.random() < 0.2 else f"{draw.integers(100, 200)}lbs",
                "rented for": OCCASIONS[draw.integers(5)],
                "body type": BODIES[draw.integers(5)],
                "tags": "|".join(
                    draw.choice(["lace", "silk", "long", "short", "red"], draw.integers(1, 4), replace=False)
                ),
                "size": int(draw.integers(0, 60)),
                "age": None if draw.random() < 0.1 else int(draw.integers(18, 80)),
                "review_text": " ".join(words),
                "review_date": f"{draw.choice(['April', 'May'])} {draw.integers(1, 29)}, 2016",
            }
        )
    return found


def as_csv(path: Path) -> Path:
    """With ids as a data frame writes them that has missing ones."""
    rows = reviews()
    lines = [",".join(rows[0])]
    for row in rows:
        floats = {name: float(row[name]) for name in ("user_id", "age") if row[name] is not None}
        values = {**row, **floats, "review_date": f'"{row["review_date"]}"'}
        lines.append(",".join("" if value is None else str(value) for value in values.values()))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def as_json(path: Path) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in reviews()), encoding="utf-8")
    return path


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["csv", "json"])
def test_one_attempt_from_a_file_to_a_model(kind: str, tmp_path: Path) -> None:
    raw = as_csv(tmp_path / "reviews.csv") if kind == "csv" else as_json(tmp_path / "reviews.json")
    made = infer(raw)
    assert '"== fit"' in made
    assert "\nweight =" not in made
    (tmp_path / "schema.toml").write_text(made, encoding="utf-8")
    config = PrepareConfig(format="table", schema=tmp_path / "schema.toml", valid=0.1, test=0.2)
    schema = prepare([raw], tmp_path / "data", config)
    check(schema)
    settings = {"epochs": 2, "batch_size": 128, "dim": 4, "bottom": (8,), "top": (8,)}
    train(tmp_path / "data", tmp_path / "run", TrainConfig.of(**settings), quiet=True)
    assert evaluate(tmp_path / "run", "test")["auc"] > 0.7


def check(schema: Schema) -> None:
    features = {feature.name: feature for feature in schema.features}
    assert features["tags"].kind == "bag"
    assert features["tags"].num_rows == 6
    assert 200 < features["user_id"].num_rows <= 302
    assert {"item_id", "bust size", "weight", "rented for", "body type"} <= set(features)
    assert {column.name for column in schema.dense} == {"size", "age"}
    assert not {"review_text", "review_date"} & set(features)
    assert sum(split.rows for split in schema.splits.values()) == NUM_ROWS
