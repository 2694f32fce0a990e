"""Checkpoints of hot rows, saved more often than full ones: `FOLDER/hot-<step>`, loaded on top of a full checkpoint.

Hot rows get most of the updates and are few of the bytes. A hot part holds them and the dense part of the model at its
step, and names the full checkpoint, its base, that has the other rows. A restored run resumes at the step of the
hot part; it loses the updates of the other rows since the base.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from holdall.checkpoint.all_ranks import on_all_ranks
from holdall.checkpoint.folder import complete, hot_parts
from holdall.checkpoint.loading import copy_shards, find_damage, read, shape_differences, verify_shards
from holdall.checkpoint.partial_tensors import Saved
from holdall.checkpoint.protocols import TensorByRows
from holdall.checkpoint.saving import SHARD_BYTES, SavePlan, plan_save, write
from holdall.common.errors import CheckpointError, ConfigError
from holdall.distributed.processes import SINGLE_PROCESS, Processes


def save_hot(
    folder: Path,
    step: int,
    tensors: Mapping[str, Saved],
    state: Mapping[str, Any],
    *,
    base: int,
    shard_bytes: int = SHARD_BYTES,
    processes: Processes = SINGLE_PROCESS,
) -> Path:
    """Write `folder/hot-<step>` and return its path; then remove other hot parts of the same base.

    `tensors` has a `HotPart` for each tensor of which some rows are saved, and whole tensors as in `save`. Everything
    else keeps its value in the checkpoint of step `base`, which must be complete. A collective call.
    """
    planned = plan_hot(folder, step, tensors, state, base=base, shard_bytes=shard_bytes, processes=processes)
    return write(planned, processes)


def plan_hot(
    folder: Path,
    step: int,
    tensors: Mapping[str, Saved],
    state: Mapping[str, Any],
    *,
    base: int,
    shard_bytes: int = SHARD_BYTES,
    processes: Processes = SINGLE_PROCESS,
) -> SavePlan:
    """Agree with the other processes on a save of hot rows, before anything is written. A collective call."""
    if base > step:
        raise ConfigError(f"the hot rows of step {step} cannot complete the checkpoint of step {base}, a later one")

    def refuse_missing() -> None:
        if base not in [number for number, _ in complete(Path(folder))]:
            raise CheckpointError(
                f"{folder} has no complete checkpoint of step {base} for the hot rows of step {step} to complete: save "
                f"one first"
            )

    processes.on_rank_zero(refuse_missing)
    return plan_save(folder, step, tensors, state, base=base, shard_bytes=shard_bytes, processes=processes)


def latest_hot(folder: Path, base: int, processes: Processes = SINGLE_PROCESS) -> Path | None:
    """The newest hot part in `folder` that completes the checkpoint of step `base` and is not damaged, or None.

    Damaged ones are skipped with a warning (from rank 0). Every shard is hashed, as in `latest_sound`.
    """
    folder = Path(folder)
    names = processes.on_rank_zero(
        lambda: [path.name for its_base, _, path in reversed(hot_parts(folder)) if its_base in (base, -1)]
    )
    for name in names:
        damage = find_damage(folder / name, processes)
        if damage is None:
            return folder / name
        if processes.rank == 0:
            warnings.warn(f"{damage}; its hot rows are skipped", stacklevel=2)
    return None


def load_hot_into(
    path: Path,
    tensors: Mapping[str, Tensor | TensorByRows],
    *,
    prefix: str = "",
    verify: bool = True,
    processes: Processes = SINGLE_PROCESS,
) -> dict[str, Any]:
    """Load a hot part into `tensors`, into which its base was loaded before, and return its state.

    Rows that are not in it stay unchanged. Rows of a lazy tensor that are in it become touched. A collective call.
    """
    part = on_all_ranks(processes, lambda: read(path))
    if part.base is None:
        raise CheckpointError(f"{path} is a full checkpoint, not one of hot rows: load it with load_into")
    logical = {name: tensor for name, tensor in part.logical.items() if name.startswith(prefix)}
    known = set().union(*processes.gather(sorted(tensors)))

    def refuse_mismatch() -> None:
        differences = [f"'{name}' is in the checkpoint only" for name in logical if name not in known]
        differences += shape_differences(logical, tensors)
        if differences:
            raise CheckpointError(
                f"{path} is of another schema or model: {'; '.join(sorted(differences)[:3])}: use the data set, model "
                f"and optimizer it was trained with"
            )

    on_all_ranks(processes, refuse_mismatch)
    wanted = [tensor for name, tensor in part.tensors.items() if name.startswith(prefix)]
    verify_shards(part, wanted, hashes=verify, processes=processes)
    on_all_ranks(processes, lambda: copy_shards(part, {name: tensors[name] for name in logical if name in tensors}))
    return part.state
