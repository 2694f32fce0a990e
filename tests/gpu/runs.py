"""Small runs on a GPU: their data, and what they came to."""

from __future__ import annotations

from pathlib import Path

import torch

from holdall import checkpoint
from holdall.data.synthetic import SyntheticConfig, write_prepared
from holdall.training.evaluate_run import CHECKPOINTS


def write_clicks(folder: Path, rows: int) -> Path:
    """A prepared data set of three features, one of them small."""
    out = folder / "clicks"
    write_prepared(SyntheticConfig(rows=rows, cardinalities=(5000, 70, 20_000), num_dense=3), out)
    return out


def model_of(run: Path) -> dict[str, torch.Tensor]:
    """The parameters in the newest checkpoint of a run."""
    path = checkpoint.latest(run / CHECKPOINTS)
    assert path is not None
    return checkpoint.load(path, prefix="model.")[0]
