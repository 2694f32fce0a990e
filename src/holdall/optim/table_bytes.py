"""Bytes of the tables of a model and of their optimizer state: what training takes at its peak beside a batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from holdall.common.sizes import readable_bytes
from holdall.optim.code_rows import code_row_state
from holdall.optim.optimizer_kinds import OptimizerKind
from holdall.tables import Table
from holdall.tables.quantized import StochasticRoundingTable


@dataclass(frozen=True, kw_only=True)
class TableBytes:
    """Peak table and optimizer bytes of a model, in whatever memories they are, and those of its tables in float32."""

    tables: int
    """Parameters and buffers, to the last codebook and scale; what several tables share counts once."""
    optimizer: int
    """State of the parameters and codes that train."""
    dense_tables: int
    dense_optimizer: int
    """The same of dense tables of as many rows, all of which train."""

    @property
    def total(self) -> int:
        return self.tables + self.optimizer

    @property
    def dense_total(self) -> int:
        return self.dense_tables + self.dense_optimizer

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "total": self.total, "dense_total": self.dense_total}

    def __str__(self) -> str:
        parts = f"{readable_bytes(self.tables)} of tables and {readable_bytes(self.optimizer)} of optimizer state"
        share = f", 1/{self.dense_total / self.total:.3g} of dense" if 0 < self.total < self.dense_total else ""
        return f"peak table and optimizer bytes: {readable_bytes(self.total)} ({parts}){share}"


def count_table_bytes(model: nn.Module, kind: OptimizerKind) -> TableBytes:
    """Bytes of all tables of `model`, of rows on other devices, on disk and on other ranks too, trained by `kind`."""
    tables = _tables(model)
    tensors = {id(tensor): tensor for table in tables for tensor in (*table.parameters(), *table.buffers())}
    inner = {id(part) for table in tables for part in table.modules() if part is not table}
    outermost = [table for table in tables if id(table) not in inner]
    return TableBytes(
        tables=sum(tensor.nbytes for tensor in tensors.values()),
        optimizer=state_bytes(model, kind),
        dense_tables=sum(4 * table.num_rows * table.dim for table in outermost),
        dense_optimizer=sum(table.num_rows * kind.row_state_bytes(table.dim) for table in outermost),
    )


def state_bytes(model: nn.Module, kind: OptimizerKind) -> int:
    """Bytes of the optimizer state of all tables of `model`, counted without allocating it."""
    tables = _tables(model)
    by_row = {id(parameter) for table in tables for parameter in table.row_parameters().values()}
    trained = {id(p): p for table in tables for p in table.parameters() if p.requires_grad}
    return sum(
        _row_state_bytes(p, kind) if key in by_row else kind.of_table_parts.dense_state_bytes(p)
        for key, p in trained.items()
    ) + sum(_code_state_bytes(table, kind) for table in tables if isinstance(table, StochasticRoundingTable))


def _row_state_bytes(rows: Tensor, kind: OptimizerKind) -> int:
    like = torch.empty(rows.shape, dtype=rows.dtype, device="meta")
    return sum(slot.nbytes for slot in kind.row_state(like).values())


def _code_state_bytes(table: StochasticRoundingTable, kind: OptimizerKind) -> int:
    return sum(slot.nbytes for slot in code_row_state(table, kind, "meta").values())


def _tables(model: nn.Module) -> list[Table]:
    """Tables of a model, and tables inside them, each once."""
    return [module for module in model.modules() if isinstance(module, Table)]
