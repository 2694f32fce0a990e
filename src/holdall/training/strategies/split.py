"""`split`: hot rows on the device, the other rows on the host or on disk.

A step fetches the rows it needs and writes them back after its update. Rows that were never touched take no memory.
The result is that of `plain`, bit for bit.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from holdall.checkpoint.protocols import TensorByRows
from holdall.embedding.bags import module_name
from holdall.models.model import Model
from holdall.planning.machine.transfer_path import kernel_is_faster
from holdall.planning.strategy_kinds import STRATEGY_KINDS
from holdall.tiers.mapped_file import refuse_full_disk
from holdall.tiers.pipeline import Pipeline
from holdall.tiers.placement import Tiers, place
from holdall.tiers.staging import buffers_for
from holdall.training.strategies.base import BatchPairs, Segment, Strategy
from holdall.training.strategies.hot_bytes import bytes_per_row, packed_tables, rows_within_hot_bytes


class SplitStrategy(Strategy):
    """Tables in tiers: a hot prefix of every dense table on the device, the tail behind a prefetch pipeline."""

    kind = STRATEGY_KINDS["split"]

    def _build_model(self) -> Model:
        config = self.config
        model = config.build_model(self.data.schema, self.methods, device=self.device, dense_device="meta")
        packed = packed_tables(model)
        self.hot_rows = self._choose_hot_rows(model, packed)
        shutil.rmtree(self.scratch, ignore_errors=True)  # left by a run that was killed; its checkpoint has the rows
        depth = config.placement.prefetch_depth(self.device)
        self.tiers = self._place(model, packed, depth)
        self.pipeline = Pipeline(
            self.tiers,
            depth,
            refresh_every=config.placement.refresh_hot,
            graphs=config.device.cuda_graph != "off",
            stage=lambda name: self.stages.stage(name, waits=False),
        )
        return model

    def _choose_hot_rows(self, model: Model, packed: set[str]) -> dict[str, int]:
        if self.plan is not None:
            return self.plan.hot_rows()
        return rows_within_hot_bytes(packed, self.config, self.data, bytes_per_row(self.config, model))

    def _place(self, model: Model, packed: set[str], depth: int) -> Tiers:
        """Move the tables of a model to their tiers; staging buffers are as large as the plan forecasts."""
        tails = dict.fromkeys(packed, self.config.placement.tail) if self.plan is None else self.plan.tails()
        on_disk = sum(model.bags.table(name).num_rows for name in packed if tails.get(name) == "disk")
        refuse_full_disk(self.scratch, on_disk * bytes_per_row(self.config, model))
        tiers = place(
            model,
            self.hot_rows,
            self.device,
            refreshes=self.config.placement.refresh_hot is not None,
            num_buffers=buffers_for(depth),
            tails=tails,
            folder=self.scratch,
            fetch_by=self.config.placement.fetch_by,
            kernel_is_faster=kernel_is_faster,
        )
        if self.plan is not None and self.plan.forecast is not None:
            for pack in tiers.packs:
                tail = self.plan.table(next(iter(pack.tables))).tail
                pack.reserve(self.plan.forecast.staging_rows.get(tail, 0))
        return tiers

    def on_device(self, segment: Segment, step: int) -> BatchPairs:
        return self.pipeline.steps(segment.batches, lambda batch: self.model.check(batch.ids), first=step)

    def after_step(self, step: int) -> None:
        self.pipeline.finish_step()
        every = self.config.placement.refresh_hot
        if every is not None and step % every == 0:
            self.pipeline.refresh()

    @property
    def is_capturable(self) -> bool:
        """Whether all rows of the current step are on the device, at fixed addresses."""
        return self.tiers.has_fixed_addresses

    def wait_for_threads(self) -> None:
        self.pipeline.synchronize()

    @contextmanager
    def ready_to_save(self) -> Iterator[None]:
        self.tiers.flush()
        with self.tiers.in_order_of_ids():
            yield

    def checkpoint_tensors(self) -> dict[str, Tensor | TensorByRows]:
        lazy = {f"model.bags.{name}": tensor for name, tensor in self.tiers.lazy_weights().items()}
        return {**lazy, **self.tiers.tensors()}

    def hot_row_ids(self) -> dict[str, Tensor]:
        packed = (name for pack in self.tiers.packs for name in pack.tables)
        return {f"tables.{module_name(name)}.weight": torch.arange(self.hot_rows[name]) for name in packed}

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

    def close(self) -> None:
        self.pipeline.close()
        shutil.rmtree(self.scratch, ignore_errors=True)
