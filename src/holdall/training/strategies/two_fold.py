"""`two-fold` (P2RES): hot rows on every process, the other rows of dense tables sharded by the row.

Compressed tables are on every process, as in `data-parallel`. The result is the model of one process on the
concatenated batch, up to the order in which floats are added. `distributed.two_fold` has the exchange.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager

import torch
from torch import Tensor, nn

from holdall.checkpoint.protocols import TensorByRows
from holdall.data.batch import Ids
from holdall.distributed.collectives import Collectives
from holdall.distributed.row_gradient_exchange import exchange_row_gradients
from holdall.distributed.two_fold import two_fold
from holdall.distributed.two_fold_pack import TwoFoldPack
from holdall.embedding.bags import module_name
from holdall.models.model import Model
from holdall.optim.optimizers import Optimizers
from holdall.optim.row_groups import RowGroup
from holdall.planning.lookup_counts import LookupCounts
from holdall.planning.machine.hardware import Hardware
from holdall.planning.strategy_kinds import STRATEGY_KINDS
from holdall.planning.two_fold_cut import Cut, choose_cut, cold_row_costs
from holdall.popularity.choose_hot_rows import ranked_rows
from holdall.tiers.placement import move_dense_part
from holdall.training.strategies.base import BatchPairs, Segment
from holdall.training.strategies.hot_bytes import (
    bytes_per_row,
    lookups_of,
    packed_tables,
    rows_within_hot_bytes,
)
from holdall.training.strategies.process_strategy import ProcessStrategy, squared_norm


class TwoFoldStrategy(ProcessStrategy):
    """Hot rows by the plan, by `--hot-bytes`, or else those with which the exchange of a step is shortest, on links as
    fast as `holdall hardware` measured them (`cut`)."""

    kind = STRATEGY_KINDS["two-fold"]
    cut: Cut | None = None

    def _build_model(self) -> Model:
        self._ahead = Collectives(self.processes, own_group=True) if self.config.placement.prefetch else None
        """Collectives of the thread that fetches rows for the next step."""
        model = self.config.build_model(self.data.schema, self.methods, dense_device="meta")
        move_dense_part(model, self.device)
        packed = packed_tables(model)
        for name in set(model.bags.features.values()) - packed:
            model.bags.table(name).to(self.device)
        self.hot_rows = self._choose_hot_rows(model, packed)
        self.shared = two_fold(model.bags, self.hot_rows, self.collectives, self.device)
        return model

    def _choose_hot_rows(self, model: Model, packed: set[str]) -> dict[str, int]:
        if not packed:
            return {}  # `two_fold` raises the error
        if self.plan is not None:
            return self.plan.hot_rows()
        row_bytes = bytes_per_row(self.config, model)
        if self.config.placement.hot_bytes is not None:
            return rows_within_hot_bytes(packed, self.config, self.data, row_bytes)
        self.cut = self._choose_cut(model, packed, row_bytes)
        limits = ranked_rows(self.data.schema)
        chosen = {name: min(rows, limits.get(name, rows)) for name, rows in self.cut.hot_rows.items()}
        return self.processes.on_rank_zero(lambda: chosen)  # hosts may have files of their own

    def _choose_cut(self, model: Model, packed: set[str], row_bytes: int) -> Cut:
        """The hot rows with which the exchange of a step is shortest."""
        world_size = self.processes.world_size
        hardware = None if self.config.placement.hardware is None else Hardware.load(self.config.placement.hardware)
        num_rows = sum(model.bags.table(name).num_rows for name in packed)
        counts = lookups_of(packed, self.config, self.data)
        return choose_cut(
            {name: LookupCounts.from_counts(rows, len(self.data)) for name, rows in counts.items()},
            row_bytes=model.bags.dim * 4,
            batch_size=max(1, self.config.batch_size // world_size),
            world_size=world_size,
            links=None if hardware is None else hardware.collectives,
            budget=num_rows * row_bytes // world_size,  # no more than a process has of the other rows
            stored_bytes=row_bytes,
            **({} if hardware is None else cold_row_costs(hardware, row_bytes)),
        )

    def attach(self, optimizers: Optimizers) -> None:
        super().attach(optimizers)
        self.row_groups = [group for group in optimizers.row_groups if not isinstance(group.pack, TwoFoldPack)]

    def on_device(self, segment: Segment, step: int) -> BatchPairs:
        batches = self._copied(segment.batches)
        with closing(batches), closing(self.shared.steps(batches, self._ahead, self.stages.stage)) as steps:
            self._name_step(step)
            for number, ready in enumerate(steps, start=step + 1):
                yield ready
                self._name_step(number)

    def _name_step(self, step: int) -> None:
        """Name, for errors, the step whose rows are fetched next; for rows fetched ahead, the current step."""
        self.collectives.step = step
        if self._ahead is not None:
            self._ahead.step = step

    def _exchange_rows(self) -> None:
        exchange_row_gradients(self.row_groups, self.collectives)
        self.shared.exchange_gradients(1.0)  # losses are shares of the global batch's already

    def _fetch_rows(self, ids: Ids) -> None:
        self.shared.prepare(ids, training=False)

    def _squared_norm(self, dense: Mapping[str, nn.Parameter], rows: Sequence[RowGroup]) -> float:
        replicated = [parameter.grad for parameter in dense.values() if parameter.grad is not None]
        owned = []
        for group in rows:
            if group.summed is None:
                continue
            ids, sums = group.summed
            num_hot = group.pack.num_hot if isinstance(group.pack, TwoFoldPack) else group.weight.shape[0]
            replicated.append(sums[ids < num_hot])
            owned.append(sums[ids >= num_hot])
        return squared_norm(replicated) + self._sum(squared_norm(owned))

    @contextmanager
    def ready_to_save(self) -> Iterator[None]:
        self.shared.finish()
        yield

    def checkpoint_tensors(self) -> dict[str, Tensor | TensorByRows]:
        return {f"model.bags.{name}": tensor for name, tensor in self.shared.weights().items()}

    def hot_row_ids(self) -> dict[str, Tensor]:
        rank, world_size = self.processes.rank, self.processes.world_size
        return {
            f"tables.{module_name(name)}.weight": torch.arange(rows)[rank::world_size]
            for name, rows in self.hot_rows.items()
        }

    def _training_collectives(self) -> list[Collectives]:
        return [*super()._training_collectives(), *([] if self._ahead is None else [self._ahead])]

    def describe(self) -> str | None:
        if self.cut is not None:
            return f"two-fold: {self.cut.describe()}"
        rows = sum(table.num_rows for pack in self.shared.packs for table in pack.tables.values())
        hot = sum(self.hot_rows.values())
        return f"two-fold: {hot:,} of {rows:,} rows on every process, each of the others on one"
