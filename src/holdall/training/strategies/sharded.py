"""`two-fold` and `table-wise`: tables spread over processes, everything else as in `data-parallel`.

| strategy | dense tables | compressed tables |
| --- | --- | --- |
| `two-fold` | hot rows on every process, the others dealt out by the row | on every process, as in `data-parallel` |
| `table-wise` | each on one process | each on one process |

Both are the model of one process on the concatenated batch, up to the order in which floats are added.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from typing import Any

import torch
from torch import Tensor, nn

from holdall.common.sizes import parse_bytes
from holdall.data.batch import Batch, Ids
from holdall.distributed.collectives import Collectives
from holdall.distributed.row_exchange import exchange_row_gradients
from holdall.distributed.table_wise import TableWiseBags, assign_tables
from holdall.distributed.two_fold import two_fold
from holdall.distributed.two_fold_pack import TwoFoldPack
from holdall.embedding.bags import module_name
from holdall.models.model import Model
from holdall.optim.optimizers import Optimizers, RowGroup, state_bytes_per_row
from holdall.planning.machine.hardware import Hardware
from holdall.planning.two_fold_cut import Cut, choose_cut, cold_work
from holdall.popularity.hot_rows import hot_rows, ranked_rows
from holdall.runtime.batch_prefetch import prefetch_to_device
from holdall.tiers.placement import move_dense_part
from holdall.training.hot_batches import Segment
from holdall.training.strategies.data_parallel import DataParallel
from holdall.training.strategies.hot_batches import PacksHotInputs


class SpreadTables(DataParallel):
    """What both share."""

    def _sum(self, number: float) -> float:
        """The sum of the processes' numbers."""
        return float(self.collectives.all_reduce(torch.tensor([number], dtype=torch.float64, device=self.device)))


class TwoFoldTables(SpreadTables):
    """`two-fold` (P2RES): see `two_fold`. Hot are the rows that a plan says, or that `--hot-bytes` has room for, by
    their worth; or those with which the exchange of a step is shortest, on links as fast as `holdall hardware` measured
    them (`cut`)."""

    cut: Cut | None = None

    def _build_model(self) -> Model:
        self._ahead = Collectives(self.processes, own_group=True) if self.config.placement.prefetch else None
        model = self.config.build_model(self.data.schema, dense_device="meta")
        move_dense_part(model, self.device)
        packed = {name for pack in model.bags.packs for name in pack.tables}
        everything = {name: model.bags.table(name).num_rows for name in dict.fromkeys(model.bags.features.values())}
        for name in everything.keys() - packed:
            model.bags.table(name).to(self.device)
        self.hot_rows = self._choose_hot_rows(model, packed)
        self.limits = {**everything, **self.hot_rows}  # compressed tables are here as a whole
        self.shared = two_fold(model.bags, self.hot_rows, self.collectives, self.device)
        return model

    def _choose_hot_rows(self, model: Model, packed: set[str]) -> dict[str, int]:
        config, dim = self.config, model.bags.dim
        tables = {name: model.bags.table(name).num_rows for name in packed}
        if not tables:
            return {}  # `two_fold` says what is wrong
        self.row_bytes = row_bytes = dim * 4 + state_bytes_per_row(config.optimizer_config(), dim)
        if self.plan is not None:
            return self.plan.hot_rows()
        counts = {name: counts for name, counts in self._lookups().items() if name in packed}
        limits, world_size = ranked_rows(self.data.schema), self.processes.world_size
        if config.placement.hot_bytes is not None:
            return hot_rows(counts, row_bytes, parse_bytes(config.placement.hot_bytes), at_most=limits)
        hardware = None if config.placement.hardware is None else Hardware.load(config.placement.hardware)
        self.cut = choose_cut(
            counts,
            len(self.data),
            row_bytes=dim * 4,
            batch_size=max(1, config.batch_size // world_size),
            world_size=world_size,
            links=None if hardware is None else hardware.collectives,
            budget=sum(tables.values()) * row_bytes // world_size,  # no more than a process has of the others
            held_bytes=row_bytes,
            **({} if hardware is None else cold_work(hardware, row_bytes)),
        )
        chosen = {name: min(rows, limits.get(name, rows)) for name, rows in self.cut.hot_rows.items()}
        return self.processes.first(lambda: chosen)  # hosts may have files of their own

    def attach(self, optimizers: Optimizers) -> None:
        super().attach(optimizers)
        self.row_groups = [group for group in optimizers.row_groups if not isinstance(group.pack, TwoFoldPack)]

    def on_device(self, segment: Segment, step: int) -> Generator[tuple[Batch, Batch], None, None]:
        batches = prefetch_to_device(segment.batches, self.device, lambda batch: self.model.check(batch.ids))
        with closing(batches), closing(self.shared.steps(batches, self._ahead, self.stages.stage)) as steps:
            self._name_step(step)
            for number, ready in enumerate(steps, start=step + 1):
                yield ready
                self._name_step(number)

    def _name_step(self, step: int) -> None:
        """For errors: the step whose rows are fetched next; ahead of it, the step under way."""
        self.collectives.step = step
        if self._ahead is not None:
            self._ahead.step = step

    def _exchange_rows(self) -> None:
        exchange_row_gradients(self.row_groups, self.collectives)
        self.shared.exchange_gradients(1.0)  # of losses that are shares of the whole batch's already

    def bring(self, ids: Ids) -> None:
        self.shared.prepare(ids, learns=False)

    def squared_norm(self, dense: Mapping[str, nn.Parameter], rows: Sequence[RowGroup]) -> float:
        everywhere = [parameter.grad for parameter in dense.values() if parameter.grad is not None]
        here = []
        for group in rows:
            if group.summed is None:
                continue
            ids, sums = group.summed
            num_hot = group.pack.num_hot if isinstance(group.pack, TwoFoldPack) else group.weight.shape[0]
            everywhere.append(sums[ids < num_hot])
            here.append(sums[ids >= num_hot])
        return _square(everywhere) + self._sum(_square(here))

    def checkpoint_view(self) -> Any:
        self.shared.finish()
        return super().checkpoint_view()

    def tensors(self) -> dict[str, Any]:
        return {f"model.bags.{name}": tensor for name, tensor in self.shared.weights().items()}

    def hot_ids(self) -> dict[str, Tensor]:
        rank, world_size = self.processes.rank, self.processes.world_size
        return {
            f"tables.{module_name(name)}.weight": torch.arange(rows)[rank::world_size]
            for name, rows in self.hot_rows.items()
        }

    def _counted(self) -> list[Collectives]:
        return [*super()._counted(), *([] if self._ahead is None else [self._ahead])]

    def describe(self) -> str | None:
        rows = sum(table.num_rows for pack in self.shared.packs for table in pack.tables.values())
        hot = sum(self.hot_rows.values())
        if self.cut is not None:
            return f"two-fold: {self.cut.describe()}"
        return f"two-fold: {hot:,} of {rows:,} rows on every process, each of the others on one"


class TwoFoldHotBatches(PacksHotInputs, TwoFoldTables):
    """`hot-batches` of several processes: as `two-fold`, with inputs that need hot rows only in batches of their own,
    for which nothing but gradients is exchanged."""

    def _enter_hot(self, batch: Batch, moved: Batch) -> None:
        self.collectives.step += 1
        self.shared.enter_hot(len(batch))


class TableWise(SpreadTables):
    """`table-wise` (DLRM's butterfly shuffle): see `table_wise`. Tables are dealt by bytes and by lookups."""

    def _build_model(self) -> Model:
        model = self.config.build_model(self.data.schema, dense_device="meta")
        bags = model.bags
        num_bytes = {name: bags.table(name).num_bytes() for name in dict.fromkeys(bags.features.values())}
        loads = {name: float(list(bags.features.values()).count(name)) for name in num_bytes}
        self.owners = assign_tables(num_bytes, loads, self.processes.world_size)
        model.bags = TableWiseBags(bags, self.owners, self.collectives, self.device)
        move_dense_part(model, self.device)
        return model

    def _replicated(self, optimizers: Optimizers) -> Mapping[str, nn.Parameter]:
        self._owned = {id(parameter) for parameter in self.model.bags.parameters()}
        return {n: p for n, p in optimizers.dense_parameters.items() if id(p) not in self._owned}

    def on_device(self, segment: Segment, step: int) -> Generator[tuple[Batch, Batch], None, None]:
        for number, (batch, moved) in enumerate(super().on_device(segment, step), start=step):
            self.collectives.step = number
            with self.stages.stage("fetch"):
                self._bags.prepare(batch.ids)
            yield batch, moved

    @property
    def _bags(self) -> TableWiseBags:
        assert isinstance(self.model.bags, TableWiseBags)
        return self.model.bags

    def _exchange_rows(self) -> None:
        self._bags.exchange_gradients(1.0)

    def bring(self, ids: Ids) -> None:
        self._bags.prepare(ids, learns=False)

    def squared_norm(self, dense: Mapping[str, nn.Parameter], rows: Sequence[RowGroup]) -> float:
        everywhere = [p.grad for p in dense.values() if p.grad is not None and id(p) not in self._owned]
        here = [p.grad for p in dense.values() if p.grad is not None and id(p) in self._owned]
        here += [group.summed[1] for group in rows if group.summed is not None]
        return _square(everywhere) + self._sum(_square(here))

    def describe(self) -> str | None:
        counts = [list(self.owners.values()).count(rank) for rank in range(self.processes.world_size)]
        return f"table-wise: {', '.join(map(str, counts))} tables on the processes"


def _square(gradients: Sequence[Tensor]) -> float:
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float64) for gradient in gradients]
    return float(torch.stack(norms).square().sum()) if norms else 0.0
