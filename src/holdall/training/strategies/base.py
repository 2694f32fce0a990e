"""How a run spreads its tables: where they live, in what batches samples come, and what happens around a step.

A strategy builds the model and the loader of a run, and the trainer tells it about every step. `plain` keeps tables
where the model is; the others are for tables that are larger than the device.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Generator, Hashable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from holdall.checkpoint.protocols import TensorByRows
from holdall.common.sizes import parse_bytes
from holdall.data.batch import Batch, Ids
from holdall.data.dataset import DataSet
from holdall.data.negatives import training_loader
from holdall.distributed.processes import SINGLE_PROCESS, Processes
from holdall.embedding.bags import module_name
from holdall.models.model import LookedUp, Model
from holdall.optim.optimizers import Optimizers, SquaredNorm, state_bytes_per_row
from holdall.planning.machine.transfer_path import kernel_is_faster
from holdall.planning.plan import Plan
from holdall.popularity.hot_rows import count_lookups, hot_rows, ranked_rows
from holdall.popularity.profile import Profile
from holdall.runtime.batch_prefetch import prefetch_to_device
from holdall.runtime.stage_times import StageTimes
from holdall.tiers.pipeline import Pipeline
from holdall.tiers.placement import Tiers, move_dense_part, place
from holdall.tiers.staging import buffers_for
from holdall.training.config import TrainConfig
from holdall.training.hot_batches import Segment


class Strategy:
    """`plain`: tables on the device, with everything else. Files it needs for a while go under `scratch`."""

    def __init__(
        self,
        config: TrainConfig,
        data: DataSet,
        device: torch.device,
        scratch: Path,
        plan: Plan | None = None,
        processes: Processes = SINGLE_PROCESS,
    ):
        self.config, self.data, self.device, self.scratch, self.plan = config, data, device, scratch, plan
        self.processes = processes
        self.stages = StageTimes(device)
        self.model = self._build_model()
        self.loader = self._build_loader()

    def _build_model(self) -> Model:
        return self.config.build_model(self.data.schema, device=self.device)

    def _build_loader(self) -> Any:
        return training_loader(
            self.data,
            self.config.batch_size,
            num_negatives=self.config.negatives,
            shuffle=self.config.shuffle,
            seed=self.config.seed,
            rank=self.processes.rank,
            world_size=self.processes.world_size,
            prefetch_to_device=self.device.type == "cuda",
        )

    def _lookups(self) -> Mapping[str, Any]:
        """How often each row of a table is looked up: as the profile says, or counted now."""
        if self.config.placement.profile is None:
            return count_lookups(self.data)
        profile = Profile.load(self.config.placement.profile)
        profile.check(self.data.schema)
        return profile.counts()

    def segments(self, epoch: int, start_batch: int) -> Iterator[Segment]:
        """The batches of an epoch, in stretches between which the order may be changed."""
        batches = self.loader.epoch(epoch, start_batch)
        yield Segment("mixed", batches, self.loader.num_batches - start_batch, ends_cycle=False)

    def after_cycle(self, loss: float) -> None:
        """Take note of the loss on the validation split after a segment that ends a cycle."""

    def lookup(self, batch: Batch, moved: Batch) -> LookedUp:
        """What the tables give for a batch, on the device; `moved` is its copy there."""
        return self.model.lookup(moved)

    def on_device(self, segment: Segment, step: int) -> Generator[tuple[Batch, Batch], None, None]:
        """`(batch, the same on the device)`, checked and ready to be looked up; `step` is the number of the first."""
        return prefetch_to_device(segment.batches, self.device, lambda batch: self.model.check(batch.ids))

    def attach(self, optimizers: Optimizers) -> None:
        """After the optimizers are made, which hold what is updated and its gradients."""

    def begin_backward(self, step: int, num_samples: int, loss: Tensor, stop: bool) -> None:
        """Of several processes: before the backward of `loss`, this rank's share of that of the global batch. `stop`
        says that someone asked this rank to."""
        raise AssertionError("a strategy of one process has nobody to tell")

    def exchange_gradients(self) -> Tensor:
        """Of several processes: make the gradients those of the global batch. [2, W]: what each rank gave to
        `begin_backward` as `loss` and `stop`, on all of them."""
        raise AssertionError("a strategy of one process has nobody to exchange with")

    squared_norm: SquaredNorm | None = None
    """The squared norm of all gradients, where not all of them are here (see `Optimizers.clip`)."""

    bring: Callable[[Ids], None] | None = None
    """What an evaluation calls before it looks a batch up, with no samples too, in step with the other processes."""

    def reduce(self, tensor: Tensor) -> None:
        """Sum a tensor over the processes of the run, in place."""

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Inside, the model is as an evaluation should measure it, the same on all processes."""
        yield

    def after_step(self, step: int) -> None:
        """After the update; `step` counts from 1."""

    @property
    def moves_nothing(self) -> bool:
        """Whether the step under way works on the device alone, so that it can be captured."""
        return True

    def addresses(self) -> Hashable:
        """Where what such a step works on is."""
        return self.model.bags.addresses()

    def settle(self) -> None:
        """Wait until no other thread of this process has work for the device."""

    @contextmanager
    def checkpoint_view(self) -> Iterator[None]:
        """Inside, the model's parameters and the optimizer's state are as a checkpoint should hold them."""
        yield

    def tensors(self) -> dict[str, Tensor | TensorByRows]:
        """What a checkpoint keeps beyond the model and its optimizer, or in the place of a parameter of the model."""
        return {}

    def hot_ids(self) -> dict[str, Tensor]:
        """The hot rows that this process saves more often, by the name of their parameter in the bags."""
        return {}

    def close(self) -> None:
        """At the end of the run, however it ends."""

    def after_loading(self) -> None:
        """After a checkpoint was copied into the model, the optimizer and `tensors`."""

    def measures(self) -> dict[str, float]:
        """Figures of the run so far, for its log."""
        return {}

    def describe(self) -> str | None:
        """How tables were spread, in a sentence for people, where that was chosen here."""
        return None


class HostTables(Strategy):
    """`host`: tables on the host and looked up there; pooled vectors go to the device and their gradients come back.

    The hybrid mode of DLRM: 2 * features * dim numbers a sample cross the bus.
    """

    _samples = 0
    _bytes = 0

    def _build_model(self) -> Model:
        model = self.config.build_model(self.data.schema)
        move_dense_part(model, self.device)
        model.bags.output_device = self.device
        for pack in model.bags.packs:
            pack.pin_output = self.device.type == "cuda"
        return model

    def lookup(self, batch: Batch, moved: Batch) -> LookedUp:
        found = self.model.lookup(Batch(moved.dense, batch.ids, moved.label))
        parts = found if isinstance(found, tuple) else (found,)
        self._samples += len(batch)
        self._bytes += 2 * sum(part.nbytes for part in parts)
        return found

    def measures(self) -> dict[str, float]:
        return {"moved_bytes_per_sample": self._bytes / max(1, self._samples)}


class Split(Strategy):
    """`split`: hot rows on the device, the others on the host or on disk; a step fetches those it needs and sends them
    back.

    Rows that were never touched take no memory. The result is that of `plain`, bit for bit.
    """

    tiers: Tiers

    def _build_model(self) -> Model:
        model = self.config.build_model(self.data.schema, device=self.device, dense_device="meta")
        packed = {name for pack in model.bags.packs for name in pack.tables}
        everything = {name: model.bags.table(name).num_rows for name in dict.fromkeys(model.bags.features.values())}
        self.row_bytes = model.bags.dim * 4 + state_bytes_per_row(self.config.optimizer_config(), model.bags.dim)
        self.hot_rows = self._choose_hot_rows(packed) if self.plan is None else self.plan.hot_rows()
        self.limits = {**everything, **self.hot_rows}  # compressed tables are on the device as a whole
        config, ahead = self.config, self.config.placement.prefetch_depth(self.device)
        shutil.rmtree(self.scratch, ignore_errors=True)  # of a run that was killed: its checkpoint has what counts
        self.tiers = place(
            model,
            self.hot_rows,
            self.device,
            refreshes=config.placement.refresh_hot is not None,
            num_buffers=buffers_for(ahead),
            tails=dict.fromkeys(packed, config.placement.tail) if self.plan is None else self.plan.tails(),
            folder=self.scratch,
            fetch_by=config.placement.fetch_by,
            kernel_is_faster=kernel_is_faster,
        )
        if self.plan is not None and self.plan.forecast is not None:
            for pack in self.tiers.packs:  # at once what steps will need
                tail = self.plan.table(next(iter(pack.tables))).tail
                pack.reserve(self.plan.forecast.staging_rows.get(tail, 0))
        self.pipeline = Pipeline(
            self.tiers,
            ahead,
            refresh_every=config.placement.refresh_hot,
            graphs=config.device.cuda_graph != "off",
            stage=lambda name: self.stages.stage(name, waits=False),
        )
        return model

    def _choose_hot_rows(self, packed: set[str]) -> dict[str, int]:
        """As many rows of the dense tables as fit `hot_bytes`, by their worth."""
        assert self.config.placement.hot_bytes is not None
        counts = {name: counts for name, counts in self._lookups().items() if name in packed}
        budget = parse_bytes(self.config.placement.hot_bytes)
        return hot_rows(counts, self.row_bytes, budget, at_most=ranked_rows(self.data.schema))

    def on_device(self, segment: Segment, step: int) -> Generator[tuple[Batch, Batch], None, None]:
        return self.pipeline.steps(segment.batches, lambda batch: self.model.check(batch.ids), first=step)

    def after_step(self, step: int) -> None:
        self.pipeline.finish_step()
        if self.config.placement.refresh_hot is not None and step % self.config.placement.refresh_hot == 0:
            self.pipeline.refresh()

    @property
    def moves_nothing(self) -> bool:
        """Whether all rows of the step under way are on the device, at addresses that a graph knows."""
        return self.tiers.has_fixed_addresses

    def settle(self) -> None:
        self.pipeline.synchronize()

    @contextmanager
    def checkpoint_view(self) -> Iterator[None]:
        self.tiers.flush()
        with self.tiers.in_order_of_ids():
            yield

    def hot_ids(self) -> dict[str, Tensor]:
        packed = (name for pack in self.tiers.packs for name in pack.tables)
        return {f"tables.{module_name(name)}.weight": torch.arange(self.hot_rows[name]) for name in packed}

    def tensors(self) -> dict[str, Tensor | TensorByRows]:
        lazy = {f"model.bags.{name}": tensor for name, tensor in self.tiers.lazy_weights().items()}
        return {**lazy, **self.tiers.tensors()}

    def close(self) -> None:
        self.pipeline.close()
        shutil.rmtree(self.scratch, ignore_errors=True)

    def after_loading(self) -> None:
        self.tiers.after_loading()

    def measures(self) -> dict[str, float]:
        traffic = self.tiers.traffic
        lookups = max(1, traffic.lookups)
        return {
            "hot_share_of_lookups": traffic.hot_lookups / lookups,
            "moved_bytes_per_sample": traffic.total / lookups * len(self.model.bags.features),
            "flushed_bytes_per_sample": traffic.flushed / lookups * len(self.model.bags.features),
        }
