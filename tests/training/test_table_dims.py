"""A dim for each feature: narrow rows that their table widens to the model's dim."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from holdall.common.errors import ConfigError
from holdall.data.prepare import PrepareConfig, prepare
from holdall.data.schema import Schema
from holdall.serving.scorer import load
from holdall.tables import MixedDimension
from holdall.training.config import TrainConfig
from holdall.training.train import train


def folder(path: Path, **dims: int | None) -> Path:
    """A data set with the features user and item, of these dims, and a bag that shares the item's table."""
    draw = np.random.default_rng(0)
    table = pa.table(
        {
            "y": draw.integers(0, 2, 200),
            "user": draw.integers(0, 30, 200),
            "item": draw.integers(0, 9, 200),
            "seen": [[int(n)] for n in draw.integers(0, 9, 200)],
        }
    )
    entries = {name: {"name": name, **({"dim": dims[name]} if dims.get(name) else {})} for name in ("user", "item")}
    seen = {**entries["item"], "name": "seen", "table": "item"}
    prepare(table, path, PrepareConfig(test=0.0), label="y", categorical=list(entries.values()), bag=[seen])
    return path


def config(**settings: Any) -> TrainConfig:
    return TrainConfig.of(**{"epochs": 1, "batch_size": 64, "dim": 8, "bottom": (8,), "top": (8,), **settings})


def test_tables_have_the_dims_of_the_schema(tmp_path: Path) -> None:
    data = folder(tmp_path / "data", user=2, item=8)
    schema = Schema.load(data)
    assert [feature.dim for feature in schema.features] == [2, 8, 8]
    assert config().table_methods(schema) == {"user": MixedDimension(dim=2)}
    assert config(table_dim=("user=3", "item=4")).table_methods(schema) == {
        "user": MixedDimension(dim=3),
        "item": MixedDimension(dim=4),
    }
    assert config(table_dim=("none",)).table_methods(schema) is None


@pytest.mark.parametrize("model", ["dlrm", "dcn", "deepfm"])
def test_models_train_and_score_with_narrow_rows(model: str, tmp_path: Path) -> None:
    data = folder(tmp_path / "data", user=2)
    train(data, tmp_path / "run", TrainConfig.of(epochs=1, batch_size=64, dim=8, model=model), quiet=True)
    scorer = load(tmp_path / "run")
    table = scorer.model.bags.table("user")
    assert table.method == MixedDimension(dim=2)
    assert sum(p.numel() for p in table.parameters()) == 2 * (table.num_rows + scorer.model.bags.dim)
    assert scorer.score([{"user": 3, "item": 4, "seen": [1]}]).shape == (1,)


def test_dims_that_cannot_be_had_are_refused(tmp_path: Path) -> None:
    schema = Schema.load(folder(tmp_path / "data", user=16))
    with pytest.raises(
        ConfigError, match="table 'user' has rows of 16 numbers, and the model reads 8: raise --dim to 16"
    ):
        config().table_methods(schema)
    with pytest.raises(ConfigError, match=r"the model has no table 'usr'.*user"):
        config(table_dim=("usr=2",)).table_methods(schema)
    for settings in ({"budget": "1/2"}, {"method": "hashed", "setting": ("buckets=5",)}):
        with pytest.raises(ConfigError, match=r"table 'user' has a width of its own, and --.* give --table-dim none"):
            config(table_dim=("user=2",), **settings).table_methods(schema)
    for wrong in ("user", "user=0", "user=x", "=3"):
        with pytest.raises(ConfigError, match="--table-dim takes a table and its width"):
            config(table_dim=(wrong,))
    with pytest.raises(ConfigError, match="dim of 'user' is -1, but must be 1 or more"):
        folder(tmp_path / "negative", user=-1)
