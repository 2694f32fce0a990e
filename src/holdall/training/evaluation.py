"""How good a model is on a split: from a model in memory, or from a run folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from holdall.data.dataset import DataSet
from holdall.data.loader import Loader
from holdall.errors import CheckpointError
from holdall.schema import Schema
from holdall.training import checkpoint
from holdall.training.config import TrainConfig
from holdall.training.metrics import BinaryMetrics
from holdall.training.tracking import Progress, read_run

CHECKPOINTS = "checkpoints"
BEST = "best"
"""Folders of a run: the checkpoints it goes on from, and the best model when it may stop early."""
BATCH_SIZE = 16_384


def pick_device(name: str) -> torch.device:
    """The device `name` stands for; `auto` is a GPU if there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise CheckpointError(f"device '{name}' cannot be used here ({str(error).splitlines()[0]})") from None
    return device


@torch.no_grad()
def evaluate_model(
    model: nn.Module, data: DataSet, *, batch_size: int = BATCH_SIZE, allow_one_class: bool = False, quiet: bool = True
) -> dict[str, float]:
    """Metrics of `model` over all rows of a split; see `BinaryMetrics.compute`."""
    device = next(model.parameters()).device
    metrics = BinaryMetrics(device=device)
    was_training = model.training
    model.eval()
    with Progress(len(data), label=f"evaluate {data.split}", quiet=quiet) as progress:
        for batch in Loader(data, batch_size, shuffle="none").epoch(0):
            batch = batch.to(device)
            metrics.update(model(batch), batch.label)
            progress.update(len(batch))
    model.train(was_training)
    return metrics.compute(allow_one_class=allow_one_class)


def load_model(run: Path, *, device: str = "auto") -> tuple[nn.Module, TrainConfig, Schema, Path]:
    """The model of a run from its best checkpoint, else its newest; with its settings, schema and that checkpoint."""
    document = read_run(run)
    config = TrainConfig.from_json(document["config"]["train"])
    schema = Schema.load(run)
    path = checkpoint.latest(run / BEST) or checkpoint.latest(run / CHECKPOINTS)
    if path is None:
        raise CheckpointError(
            f"{run} has no complete checkpoint yet: train on with --resume, or wait for the first one"
        )
    model = config.build_model(schema, device=pick_device(device))
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    checkpoint.load_into(path, tensors, prefix="model.")
    return model, config, schema, path


def evaluate(
    run: str | Path, split: str = "test", *, data: str | Path | None = None, device: str = "auto", quiet: bool = True
) -> dict[str, Any]:
    """Metrics of a trained run on a split of its data set, or of another prepared folder with the same ids."""
    run = Path(run)
    model, _, schema, path = load_model(run, device=device)
    folder = Path(data) if data is not None else Path(read_run(run)["config"]["data"])
    split_data = DataSet(folder, split)
    refuse_other_data(split_data.schema, schema, folder)
    metrics = evaluate_model(model, split_data, quiet=quiet)
    return {"split": split, **metrics, "checkpoint": path.name}


def refuse_other_data(found: Schema, expected: Schema, folder: Path) -> None:
    """Raise unless a data folder has the columns and id ranges a model was made for."""
    for kind in ("dense", "features"):
        ours, theirs = getattr(expected, kind), getattr(found, kind)
        if ours != theirs:
            names = [a.name for a, b in zip(ours, theirs, strict=False) if a != b] or ["their number"]
            raise CheckpointError(
                f"the data set {folder} is not the one this model was trained on: its {kind} columns differ "
                f"({', '.join(names[:5])}); use the folder the run was trained on, or prepare with the same maps"
            )
