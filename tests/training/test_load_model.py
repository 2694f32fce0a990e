"""`load_model`: the model of a run as its checkpoint has it, and no work for values that the checkpoint replaces."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from holdall import checkpoint
from holdall.training.config import TrainConfig
from holdall.training.evaluate_run import load_model
from holdall.training.train import train


@pytest.mark.parametrize("settings", [{}, {"strategy": "split", "hot_bytes": "1KB"}, {"table_dtype": "bf16"}])
def test_no_initial_row_is_drawn(
    settings: dict[str, str], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = {"dim": 4, "bottom": (4,), "top": (4,), "steps": 3, "batch_size": 64, "device": "cpu"}
    train(data, tmp_path / "run", TrainConfig.of(**{**small, **settings}))
    monkeypatch.setattr("holdall.tables.dense.fill_with_initial_rows", None)
    model, _, _, path = load_model(tmp_path / "run", device="cpu")
    saved, _ = checkpoint.load(path, prefix="model.")
    loaded = model.state_dict()
    assert {f"model.{name}" for name in loaded} == set(saved)
    assert all(torch.equal(loaded[name.removeprefix("model.")], tensor) for name, tensor in saved.items())
    (pack,) = model.bags.packs  # type: ignore[union-attr]
    assert all(table.weight.data_ptr() >= pack.storage.data_ptr() for table in pack.tables.values())
