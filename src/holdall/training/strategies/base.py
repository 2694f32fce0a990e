"""Interface of a training strategy: where tables are stored, and how the rows of a step reach the device.

A strategy builds the model and the loader of a run. The trainer calls it around every step, evaluation and checkpoint.
Its capabilities are in `planning.strategy_kinds`, and `registry` finds its class by name.
"""

# ruff: noqa: B027 (empty methods are hooks: most strategies have nothing to do there)
from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from holdall.checkpoint.protocols import TensorByRows
from holdall.data.batch import Batch
from holdall.data.dataset import DataSet
from holdall.data.negatives import positive_rate, training_loader
from holdall.distributed.processes import SINGLE_PROCESS, Processes
from holdall.evaluation.evaluate_model import SplitShare
from holdall.models.model import Gather, LookedUp, Model
from holdall.optim.optimizers import Optimizers
from holdall.planning.plan import Plan
from holdall.planning.strategy_kinds import StrategyKind
from holdall.runtime.batch_prefetch import prefetch_to_device
from holdall.runtime.stage_times import StageTimes
from holdall.tables import Method
from holdall.training.config import TrainConfig
from holdall.training.strategies.gradient_exchange import GradientExchange

BatchPairs = Generator[tuple[Batch, Batch], None, None]
"""Pairs of a batch on the host and its copy on the device, checked and ready to be looked up."""


@dataclass(frozen=True)
class Segment:
    """Consecutive batches of one kind."""

    kind: Literal["cold", "hot", "mixed"]
    batches: Iterator[Batch]
    """The batches of this kind that the epoch has left. The first `num_batches` are this segment's; the next ones
    belong to later segments of the kind, which share the iterator, and can be prefetched."""
    num_batches: int
    report_loss: Callable[[float], None] | None = None
    """Called with the validation loss after the segment, where the order of later segments depends on it."""

    @property
    def ends_cycle(self) -> bool:
        """Whether the validation loss is due after the segment."""
        return self.report_loss is not None


class Strategy(ABC):
    """A way to store tables and to fetch their rows. The defaults suit one process with its tables on the device."""

    kind: ClassVar[StrategyKind]
    exchange: GradientExchange | None = None
    """Sums gradients over processes; None for a strategy of one process. `attach` sets it."""
    gather: Gather | None = None
    """Concatenates samples over processes, for a loss that compares them; None where it need not. `attach` sets it."""

    def __init__(
        self,
        config: TrainConfig,
        data: DataSet,
        device: torch.device,
        scratch: Path,
        plan: Plan | None = None,
        processes: Processes = SINGLE_PROCESS,
        methods: Mapping[str, Method] | None = None,
    ):
        self.config, self.data, self.device, self.plan = config, data, device, plan
        self.scratch = scratch
        """Folder for files that are deleted when the run ends."""
        self.processes = processes
        self.methods = methods
        """Method of each table; those of the settings when None."""
        self.stages = StageTimes(device)
        self.model = self._build_model()
        self.model.start_at_rate(positive_rate(data, config.num_negatives))
        self.model.read_training_split(data)
        self.loader = self._build_loader()

    @abstractmethod
    def _build_model(self) -> Model:
        """The model with its tables where the strategy stores them."""

    def _build_loader(self) -> Any:
        return training_loader(
            self.data,
            self.config.batch_size,
            num_negatives=self.config.num_negatives,
            shuffle=self.config.sample_order,
            seed=self.config.seed,
            rank=self.processes.rank,
            world_size=self.processes.world_size,
            prefetch_to_device=self.device.type == "cuda",
        )

    def attach(self, optimizers: Optimizers) -> None:
        """Prepare for the parameters and gradients of the optimizers, which have just been made."""

    # --- batches -----------------------------------------------------------------------------------------------------

    def segments(self, epoch: int, start_batch: int) -> Iterator[Segment]:
        """The batches of an epoch from `start_batch` on."""
        batches = self.loader.epoch(epoch, start_batch)
        yield Segment("mixed", batches, self.loader.num_batches - start_batch)

    def on_device(self, segment: Segment, step: int) -> BatchPairs:
        """The batches of a segment on the device; `step` is the number of the first."""
        return self._copied(segment.batches)

    def _copied(self, batches: Iterator[Batch]) -> BatchPairs:
        """Batches checked on the host and copied to the device."""
        return prefetch_to_device(batches, self.device, lambda batch: self.model.check(batch.ids))

    # --- step --------------------------------------------------------------------------------------------------------

    def lookup(self, batch: Batch, moved: Batch) -> LookedUp:
        """The vectors of a batch, on the device; `moved` is its copy there."""
        return self.model.lookup(moved)

    def after_step(self, step: int) -> None:
        """Called after the update; `step` counts from 1."""

    @property
    def is_capturable(self) -> bool:
        """Whether the current step works on the device alone, so that a CUDA graph can hold it."""
        return True

    def addresses(self) -> Hashable:
        """Device addresses that such a step works on."""
        return self.model.bags.addresses()

    def wait_for_threads(self) -> None:
        """Wait until no other thread of this process has work for the device."""

    # --- evaluation and checkpoints ----------------------------------------------------------------------------------

    @contextmanager
    def evaluation(self) -> Iterator[SplitShare]:
        """The share of a split that this process evaluates. Inside, all processes have the model to be measured."""
        yield SplitShare()

    @contextmanager
    def ready_to_save(self) -> Iterator[None]:
        """Inside, parameters and optimizer state are complete, as a checkpoint stores them."""
        yield

    def checkpoint_tensors(self) -> dict[str, Tensor | TensorByRows]:
        """Tensors of a checkpoint beyond those of the model and its optimizer, or in place of a model parameter."""
        return {}

    def hot_row_ids(self) -> dict[str, Tensor]:
        """Hot rows that this process saves in checkpoints of hot rows, by the name of their parameter in the bags."""
        return {}

    def after_loading(self) -> None:
        """Called after a checkpoint was copied into the model, the optimizer and `checkpoint_tensors`."""

    # --- the run -----------------------------------------------------------------------------------------------------

    def measures(self) -> dict[str, float]:
        """Statistics of the run so far, for its log."""
        return {}

    def describe(self) -> str | None:
        """A sentence for people about a placement that the strategy chose itself."""
        return None

    def close(self) -> None:
        """Release threads and files; called at the end of every run, failed or not."""
