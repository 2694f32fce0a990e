"""`table-wise` (DLRM's butterfly shuffle): each table, dense or compressed, on one process.

Tables are assigned by bytes and by lookups. The result is the model of one process on the concatenated batch, up to the
order in which floats are added. `distributed.table_wise` has the exchange.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from holdall.data.batch import Ids
from holdall.distributed.table_wise import TableWiseBags, assign_tables
from holdall.models.model import Model
from holdall.optim.optimizers import Optimizers
from holdall.optim.row_groups import RowGroup
from holdall.planning.strategy_kinds import STRATEGY_KINDS
from holdall.tiers.placement import move_dense_part
from holdall.training.strategies.base import BatchPairs, Segment
from holdall.training.strategies.process_strategy import ProcessStrategy, squared_norm


class TableWiseStrategy(ProcessStrategy):
    """Tables on their owners, which look them up for all ranks."""

    kind = STRATEGY_KINDS["table-wise"]

    def _build_model(self) -> Model:
        model = self.config.build_model(self.data.schema, self.methods, dense_device="meta")
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

    def on_device(self, segment: Segment, step: int) -> BatchPairs:
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
        self._bags.exchange_gradients(1.0)  # losses are shares of the global batch's already

    def _fetch_rows(self, ids: Ids) -> None:
        self._bags.prepare(ids, training=False)

    def _squared_norm(self, dense: Mapping[str, nn.Parameter], rows: Sequence[RowGroup]) -> float:
        replicated = [p.grad for p in dense.values() if p.grad is not None and id(p) not in self._owned]
        owned = [p.grad for p in dense.values() if p.grad is not None and id(p) in self._owned]
        owned += [group.summed[1] for group in rows if group.summed is not None]
        return squared_norm(replicated) + self._sum(squared_norm(owned))

    def describe(self) -> str | None:
        counts = [list(self.owners.values()).count(rank) for rank in range(self.processes.world_size)]
        return f"table-wise: {', '.join(map(str, counts))} tables on the processes"
