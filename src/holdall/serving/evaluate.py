"""Metrics of a run or of a bundle on a split of a data set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from holdall.common.device import pick_device
from holdall.common.errors import ConfigError
from holdall.data.dataset import DataSet
from holdall.serving.bundle import is_bundle
from holdall.serving.published_folder import is_published, open_current
from holdall.training.evaluate_run import evaluate as evaluate_run
from holdall.training.evaluate_run import measure
from holdall.training.same_data import refuse_other_data


def evaluate(
    path: str | Path,
    split: str = "test",
    *,
    data: str | Path | None = None,
    k: int | None = None,
    group_by: str | None = None,
    device: str = "auto",
    quiet: bool = True,
) -> dict[str, Any]:
    """Metrics of a trained run, of a bundle or of a published folder's current one, on a split of a prepared folder.

    The folder has the same ids. A run knows the one that it was trained on; a bundle needs `data`. If the split has
    ranking cases, as implicit data has, HR@K and NDCG@K over them are added (K is 10 by default), and metrics of its
    rows that do not exist, such as AUC without negatives, are left out. `group_by` names a feature: AUC within the rows
    of each of its ids is added, and without ranking cases, if `k` is given, HR@K and NDCG@K.
    """
    if not (is_bundle(Path(path)) or is_published(Path(path))):
        return evaluate_run(path, split, data=data, k=k, group_by=group_by, device=device, quiet=quiet)
    if data is None:
        raise ConfigError(f"{path} is a bundle, which has no rows: name the data set folder to measure on (--data)")
    bundle = open_current(path)
    rows = DataSet(data, split)
    refuse_other_data(rows.schema, bundle.schema, Path(data))
    model = bundle.model(pick_device(device))
    return {
        **measure(model, rows, k=k, group_by=group_by, quiet=quiet),
        "checkpoint": bundle.record.origin.checkpoint,
    }
