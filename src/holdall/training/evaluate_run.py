"""Metrics of a trained run: its model loaded from the run folder and measured on a split."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from holdall import checkpoint
from holdall.common.device import pick_device
from holdall.common.errors import CheckpointError, ConfigError
from holdall.data.dataset import DataSet
from holdall.data.ranking_cases import has_ranking_cases
from holdall.data.schema import Schema
from holdall.evaluation.evaluate_model import evaluate_model, rank_model
from holdall.evaluation.grouped import grouped_metrics
from holdall.evaluation.ranking import K
from holdall.models.model import Model
from holdall.tables import Method
from holdall.tables.table import HASH_SEED
from holdall.tiers.placement import place
from holdall.training.config import TrainConfig
from holdall.training.follow_plan import PLAN_FILE
from holdall.training.same_data import (
    refuse_other_data,
    refuse_other_parts,
    refuse_other_run,
    refuse_replaced_data,
    run_fingerprint,
)
from holdall.training.table_methods import stored_methods
from holdall.training.tracking import read_run

CHECKPOINTS = "checkpoints"
BEST = "best"
"""Folders of a run: the checkpoints it resumes from, and the best model under early stopping."""


def load_model(run: str | Path, *, device: str = "auto") -> tuple[nn.Module, TrainConfig, Schema, Path]:
    """The model of a run from its best checkpoint, else from its newest; its settings, schema and that checkpoint.

    The run may go on meanwhile.
    """
    run = Path(run)
    document = read_run(run)
    config = TrainConfig.from_json(document["config"]["train"])
    if config.placement.plan is not None:
        config = config.replace(plan=str(run / PLAN_FILE))  # the run may have moved
    schema = Schema.load(run)
    refuse_other_parts(run, document, schema)
    folders = (run / BEST, run / CHECKPOINTS)
    if all(checkpoint.newest(folder) is None for folder in folders):
        raise _no_checkpoint(run)
    methods = stored_methods(run, document)
    if config.placement.tail == "disk":
        model, tensors = _on_disk(config, schema, methods, pick_device(device))
    else:
        model = _without_initial_rows(config, schema, methods, pick_device(device))
        tensors = model_tensors(model)
    loaded = checkpoint.load_newest(folders, tensors, prefix="model.")
    if loaded is None:
        raise _no_checkpoint(run)
    path, state = loaded
    refuse_other_run(state, run_fingerprint(document), path)
    return model, config, schema, path


def _no_checkpoint(run: Path) -> CheckpointError:
    return CheckpointError(f"{run} has no complete checkpoint yet: continue with --resume, or wait for the first one")


def model_tensors(model: nn.Module) -> dict[str, Any]:
    """Tensors of a model by their names in checkpoints; seeds of hashes are in run.json, with the methods."""
    state = model.state_dict().items()
    return {f"model.{name}": tensor for name, tensor in state if name.rsplit(".", 1)[-1] != HASH_SEED}


def _without_initial_rows(
    config: TrainConfig, schema: Schema, methods: Mapping[str, Method] | None, device: torch.device
) -> Model:
    """A model whose dense tables have any values, to be loaded: drawing a GB of initial rows takes 25 s, loading 2."""
    model = config.build_model(schema, methods, device=device, dense_device="meta")
    for pack in model.bags.packs:
        meta = pack.storage  # not empty_like, which imports torch's compiler for a meta tensor: a second
        pack.use_storage(torch.empty(meta.shape, dtype=meta.dtype, device=device))
    model.bags.plan_lookups()
    return model


def _on_disk(
    config: TrainConfig, schema: Schema, methods: Mapping[str, Method] | None, device: torch.device
) -> tuple[Model, dict[str, Any]]:
    """A model whose tables are in nameless files of the temporary folder, and the tensors to load a checkpoint into."""
    torch.manual_seed(config.seed)  # decides the initial values of untouched rows
    model = config.build_model(schema, methods, dense_device="meta")
    hot = dict.fromkeys((name for pack in model.bags.packs for name in pack.tables), 0)
    tiers = place(model, hot, device, tails=dict.fromkeys(hot, "disk"), folder=Path(tempfile.gettempdir()))
    tensors = model_tensors(model)
    tensors.update({f"model.bags.{name}": tensor for name, tensor in tiers.lazy_weights().items()})
    return model, tensors


def evaluate(
    run: str | Path,
    split: str = "test",
    *,
    data: str | Path | None = None,
    k: int | None = None,
    group_by: str | None = None,
    device: str = "auto",
    quiet: bool = True,
) -> dict[str, Any]:
    """Metrics of a trained run on a split of its data set, or of another prepared folder with the same ids.

    If the split has ranking cases, as implicit data has, HR@K and NDCG@K over them are added (K is 10 by default), and
    metrics of its rows that do not exist, such as AUC without negatives, are left out. `group_by` names a feature: AUC
    within the rows of each of its ids is added, and without ranking cases, if `k` is given, HR@K and NDCG@K.
    """
    model, rows, checkpoint_name = _load(run, split, data, device)
    return {**measure(model, rows, k=k, group_by=group_by, quiet=quiet), "checkpoint": checkpoint_name}


def measure(
    model: nn.Module, rows: DataSet, *, k: int | None = None, group_by: str | None = None, quiet: bool = True
) -> dict[str, Any]:
    """Metrics of a model on the rows of a split, as `evaluate` gives them."""
    split = rows.split
    ranked = has_ranking_cases(rows.folder, split, rows.schema)
    if k is not None and not ranked and group_by is None:
        raise ConfigError(
            f"HR@{k} and NDCG@{k} need ranking cases, and split '{split}' of {rows.folder} has none: they are written "
            f"for implicit data sets; for click data name the feature to rank within (--group-by user)"
        )
    metrics: dict[str, Any] = evaluate_model(model, rows, allow_one_class=ranked, quiet=quiet)
    if group_by is not None:
        metrics.update(grouped_metrics(model, rows, group_by, None if ranked else k))
    if ranked:
        metrics.update(rank_model(model, rows, K if k is None else k))
        metrics = {name: value for name, value in metrics.items() if not math.isnan(value)}
    return {"split": split, **metrics}


def evaluate_ranking(
    run: str | Path, split: str = "test", k: int = K, *, data: str | Path | None = None, device: str = "auto"
) -> dict[str, Any]:
    """HR@K and NDCG@K of a trained run over the ranking cases of a split: `evaluate` without the metrics of rows."""
    model, rows, checkpoint_name = _load(run, split, data, device)
    return {"split": split, **rank_model(model, rows, k), "checkpoint": checkpoint_name}


def _load(run: str | Path, split: str, data: str | Path | None, device: str) -> tuple[nn.Module, DataSet, str]:
    """The model of a run, the rows to measure it on, and the name of its checkpoint."""
    model, _, schema, path = load_model(Path(run), device=device)
    folder = Path(data) if data is not None else Path(read_run(Path(run))["config"]["data"])
    rows = DataSet(folder, split)
    refuse_other_data(rows.schema, schema, folder)
    if data is None:
        refuse_replaced_data(rows.schema, schema, folder, Path(run))
    return model, rows, path.name
