"""The call that trains: signals, processes, run folder and threads around a `Trainer`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from holdall.common.device import pick_device
from holdall.common.errors import ConfigError
from holdall.common.threads import torch_threads
from holdall.distributed.processes import process_group
from holdall.kernels.dispatch import kernel_path
from holdall.runtime.allocator import keep_freed_memory
from holdall.training.callbacks import Callback, Callbacks
from holdall.training.config import TrainConfig
from holdall.training.interrupt import deferred_interrupts, torchrun_process
from holdall.training.run_folder import make_run_folder
from holdall.training.start import check_inputs, inputs_of
from holdall.training.trainer import Trainer

ECHO_SECONDS = 5.0
"""Several processes ignore signals so soon after the first: torchrun passes on the signal they have got already."""


def train(
    data: str | Path,
    out: str | Path,
    config: TrainConfig | None = None,
    *,
    resume: bool = False,
    overwrite: bool = False,
    quiet: bool = False,
    callbacks: Sequence[Callback] = (),
) -> dict[str, Any]:
    """Train a model on a prepared data set, in a run folder at `out`; returns results and statistics of the run.

    With `resume`, continue from the newest complete checkpoint of `out`, or start if there is none. Ctrl-C finishes
    the step, saves a checkpoint and raises KeyboardInterrupt. `callbacks` are told what happens, and may stop the run.
    Under torchrun every process calls this, and all return the same; if torchrun is killed, they stop as after Ctrl-C.
    """
    if not isinstance(config, TrainConfig | None):
        raise ConfigError(f"config takes a TrainConfig, not {config!r}: write TrainConfig.of(epochs=2), for example")
    config, out, parent, called = config or TrainConfig(), Path(out), torchrun_process(), Callbacks(callbacks)
    keep_freed_memory()
    if config.device.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else torch refuses matrix products on a GPU
        torch.use_deterministic_algorithms(True)
    try:
        # Signals stay deferred until the process group is destroyed: the other processes end as soon as this one leaves
        # it, and torchrun would then end this one before it has reported its error.
        with (
            ExitStack() as signals,
            process_group(pick_device(config.device.device), config.processes.timeout) as processes,
        ):
            several = processes.world_size > 1
            interrupt = signals.enter_context(deferred_interrupts(ECHO_SECONDS if several else 0.0, parent))
            with (
                make_run_folder(
                    out,
                    processes,
                    resume=resume,
                    overwrite=overwrite,
                    inputs=inputs_of(Path(data), config),
                    check_inputs=lambda: check_inputs(Path(data), config),
                ) as rank_log,
                kernel_path(config.device.kernels),
                torch_threads(config.device.threads) as threads,
            ):
                trainer = Trainer(
                    Path(data),
                    out,
                    config,
                    resume=resume,
                    quiet=quiet,
                    processes=processes,
                    rank_log=rank_log,
                    callbacks=called if processes.rank == 0 else None,
                )
                return {**trainer.run(interrupt), "threads": threads}
    finally:
        if config.device.deterministic:
            torch.use_deterministic_algorithms(False)
