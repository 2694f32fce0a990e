"""What a run that goes on may be told otherwise than before."""

from __future__ import annotations

from pathlib import Path

from holdall.common.errors import CheckpointError
from holdall.planning.strategy_kinds import STRATEGY_KINDS
from holdall.training.config import TrainConfig
from holdall.training.tracking import read_run

FREE = frozenset(
    [
        "epochs",
        "steps",
        "save_every",
        "save_hot_every",
        "save_in_background",
        "keep",
        "log_every",
        "timeout",
        "device",
        "kernels",
        "cuda_graph",
    ]
)
"""How long to go on, what to write, and on what."""
PLACES = frozenset(
    ["strategy", "merge_every", "hot_bytes", "tail", "profile", "hardware", "prefetch", "fetch_by", "consistency"]
)
"""Where rows are stored and how they are fetched: may change between strategies that see samples in the same order,
whose checkpoints hold the same tensors."""


def refuse_other_settings(run: Path, config: TrainConfig) -> None:
    """Raise, naming the setting, unless `config` is what the run was trained with but for what may change."""
    before = TrainConfig.from_json(read_run(run)["config"]["train"]).to_json()
    free = FREE
    kinds = [STRATEGY_KINDS[name] for name in (before["strategy"], config.strategy)]
    if not any(kind.packs_hot_batches for kind in kinds) and not before["refresh_hot"]:
        free |= PLACES
    for name, value in config.to_json().items():
        old = before[name]
        if name not in free and old != value:
            raise CheckpointError(
                f"{run} was trained with {name}={old!r} and is asked to resume with {name}={value!r}: pass the same "
                f"settings, or start a new run"
            )
