"""`holdall inspect`: results first, then tables, and settings that differ from their defaults."""

from __future__ import annotations

import io
import json

from rich.console import Console

from holdall.commands.inspect import show
from holdall.training.config import TrainConfig

ROW = {"split": "valid", "step": 8, "auc": 0.75, "logloss": 0.5}
RUN = {
    "kind": "run",
    "path": "run",
    "config": {"train": json.loads(json.dumps(TrainConfig.of(lr=0.5).to_json()))},
    "last": {"train": {"split": "train", "step": 16, "loss": 0.4}, "valid": {**ROW, "step": 16, "auc": 0.7}},
    "kept": ROW,
    "checkpoint": "step-00000016",
    "best": "step-00000008",
    "tables": {},
    "table_sizes": None,
}


def shown(**changes: object) -> list[str]:
    console = Console(file=io.StringIO(), width=200)
    show({**RUN, **changes}, console, all=bool(changes.get("all")))
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


def test_results_come_first_and_defaults_not_at_all() -> None:
    lines = shown()
    assert lines[1].split() == ["metric", "kept,", "step", "8", "last,", "step", "16"]
    assert lines[2].split() == ["auc", "0.75", "0.7"]
    assert "kept as the best: step-00000008" in "\n".join(lines)
    assert lines[-1].startswith("settings: lr=0.5 (")
    assert lines[-1].endswith("at their defaults: --all)")


def test_all_shows_every_setting() -> None:
    text = "\n".join(shown(all=True))
    assert "batch_size=2048" in text
    assert "--all" not in text


def test_a_run_whose_last_model_is_kept_has_one_column() -> None:
    lines = shown(kept=None, best=None)
    assert lines[1].split() == ["metric", "valid,", "step", "16"]
    assert lines[-2] == "checkpoint: step-00000016"
