"""Comparison, by content, of a data set with the one that a run was trained on, and of a run with its own parts."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from holdall.common.errors import CheckpointError
from holdall.common.files import sha256
from holdall.data.identity import data_fingerprint, ids_fingerprint, json_digest
from holdall.data.schema import SCHEMA_FILE, Schema
from holdall.training.follow_plan import PLAN_FILE

DATA_SET = "data_set"
"""Key of run.json: the fingerprints of the data set."""
PLAN = "plan"
"""Key of run.json: the SHA-256 of the copy of the plan that was followed."""
TABLES = "tables"
"""Key of run.json: the method of each table, unless all are dense in float32 or a plan has them."""
TABLE_SIZES = "table_sizes"
"""Key of run.json: rows, words for the method, and bytes of each table."""
RUN = "run"
"""Key of a checkpoint's state: the fingerprint of its run."""


def made_from(schema: Schema, plan: Path | None) -> dict[str, Any]:
    """Fingerprints of the data set and of the plan that a run follows, for its `run.json`."""
    return {
        DATA_SET: {"fingerprint": data_fingerprint(schema), "ids_fingerprint": ids_fingerprint(schema)},
        PLAN: None if plan is None else sha256(plan),
    }


def run_fingerprint(document: Mapping[str, Any]) -> str | None:
    """SHA-256 of the settings, data set, plan and tables in a `run.json`; None for one of an earlier version."""
    if DATA_SET not in document:
        return None
    made_of = {key: document.get(key) for key in (DATA_SET, PLAN, *([TABLES] if TABLES in document else []))}
    return json_digest({"train": document["config"]["train"], **made_of})


def refuse_other_data(found: Schema, expected: Schema, folder: Path) -> None:
    """Raise unless a data folder has the columns, and behind every id the value, that a model was trained on.

    Its rows may be others. Where one of both was written by an earlier version, the values cannot be compared; a
    warning says so, unless the rows are the same.
    """
    trained = "is not the one this model was trained on"
    for kind in ("dense", "features"):
        ours, theirs = getattr(expected, kind), getattr(found, kind)
        if ours != theirs:
            names = [a.name for a, b in zip(ours, theirs, strict=False) if a != b] or ["their number"]
            raise CheckpointError(
                f"the data set {folder} {trained}: its {kind} columns differ ({', '.join(names[:5])}); use the folder "
                f"the run was trained on, or prepare with the same maps"
            )
    if found.order_hashes != expected.order_hashes:
        raise CheckpointError(
            f"the ids of {folder} are in another order than those this model was trained on: use the folder the run "
            f"was trained on, or order it in the same way (holdall order --like)"
        )
    if found.ids is None or expected.ids is None:
        if other_rows(found, expected, found.splits):
            older = "the data set of the run" if expected.ids is None else folder
            warnings.warn(
                f"{older} has no hashes of its id maps, as it was prepared by an earlier version: {folder} has the "
                f"columns that the model was trained on, but whether the ids mean the same is not known",
                stacklevel=2,
            )
    elif found.ids != expected.ids:
        tables = [table for table, ids in expected.ids.items() if found.ids.get(table) != ids]
        raise CheckpointError(
            f"the data set {folder} {trained}: other values are behind the ids of {', '.join(tables[:5])} (fingerprint "
            f"{_short(ids_fingerprint(found))}, the run's is {_short(ids_fingerprint(expected))}); use the folder the "
            f"run was trained on, or prepare the same training rows"
        )


def other_rows(found: Schema, expected: Schema, splits: Iterable[str]) -> list[str]:
    """Splits whose files differ between two data sets."""
    hashes = [
        {name: [file.sha256 for file in split.files] for name, split in schema.splits.items()}
        for schema in (found, expected)
    ]
    return [split for split in splits if hashes[0].get(split) != hashes[1].get(split)]


def refuse_other_rows(found: Schema, expected: Schema, folder: Path, run: Path) -> None:
    """Raise unless a run can resume on a data folder: the rows that it trains and is validated on must be the same."""
    differing = other_rows(found, expected, ("train", "valid"))
    if differing:
        raise CheckpointError(
            f"{run} was trained on other rows than those of {folder}: its {' and '.join(differing)} "
            f"split{'s' * (len(differing) > 1)} changed (fingerprint {_short(data_fingerprint(found))}, the run's is "
            f"{_short(data_fingerprint(expected))}); resume with the data set that the run began with, or start a new "
            f"run"
        )


def refuse_replaced_data(found: Schema, expected: Schema, folder: Path, run: Path) -> None:
    """Raise if the folder that a run was trained on holds another data set now."""
    if data_fingerprint(found) != data_fingerprint(expected):
        raise CheckpointError(
            f"{folder} holds another data set than the one that {run} was trained on (fingerprint "
            f"{_short(data_fingerprint(found))}, the run's is {_short(data_fingerprint(expected))}): restore that one, "
            f"or pass --data {folder} to measure on this one all the same"
        )


def refuse_other_parts(run: Path, document: Mapping[str, Any], schema: Schema) -> None:
    """Raise if the schema or the plan in a run folder is not the one that its `run.json` is about."""
    plan = run / PLAN_FILE
    if document.get(PLAN) is not None and not plan.exists():
        raise CheckpointError(f"{plan} is missing, and the run followed it: restore the run folder from a copy")
    for key, found in made_from(schema, None if document.get(PLAN) is None else plan).items():
        if key in document and document[key] != found:
            file = SCHEMA_FILE if key == DATA_SET else PLAN_FILE
            raise CheckpointError(
                f"{run / file} is not the one that the run was trained with, as run.json tells: restore the run folder "
                f"from a copy"
            )


def refuse_other_run(state: Mapping[str, Any], fingerprint: str | None, path: Path) -> None:
    """Raise if a checkpoint with this state was saved by another run."""
    if fingerprint is not None and state.get(RUN, fingerprint) != fingerprint:
        raise CheckpointError(
            f"{path} was saved by another run, with other settings or data (run {_short(state[RUN])}, this one is "
            f"{_short(fingerprint)}): restore the run folder from a copy"
        )


def _short(fingerprint: str | None) -> str:
    return "unknown" if fingerprint is None else fingerprint[:12]
