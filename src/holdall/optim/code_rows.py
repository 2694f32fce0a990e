"""Rows of tables that store codes alone and round their own updates, with optimizer state."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from holdall.kernels.row_update import UpdateRule, UpdateScalars
from holdall.kernels.stochastic import keys
from holdall.optim.optimizer_kinds import OptimizerKind
from holdall.tables.quantized import StochasticRoundingTable


class CodeRows:
    """Rows of one table of codes: the optimizer computes a change in floating point, and the table rounds it.

    State has the shape that it has for dense rows, in float32: row-wise Adagrad keeps one number for each row, 4 bytes
    beside `dim + 8` of codes and grid; Adagrad, momentum and Adam keep one or two for each number of it, several times
    the codes. A step decodes, updates and rounds the rows that were touched.
    """

    def __init__(self, name: str, table: StochasticRoundingTable, kind: OptimizerKind, seed: int):
        self.name = name
        """Name of the table's codes in the model."""
        self.table, self.kind, self.seed = table, kind, seed
        self.slots = kind.row_state(row_shape(table))
        """Optimizer state by slot, with a line for each row."""

    def sum_gradients(self) -> Tensor:
        """The summed gradient [U, dim] of the touched rows; scaled in place, it scales the update."""
        return self.table.sum_pending()[1]

    def update(self, scalars: UpdateScalars) -> None:
        """Apply the gradients of the backward, and drop them. Rounding depends on seed, step and position alone."""
        self.table.apply_row_update(
            lambda ids, gradients: self._change(ids, gradients, scalars), keys(self.seed, scalars.step)
        )

    def _change(self, ids: Tensor, gradients: Tensor, scalars: UpdateScalars) -> Tensor:
        """What the optimizer adds to the rows `ids`: its update of rows of zero, which no digit of a row can round."""
        decay, apart = scalars.weight_decay, self.kind.row_rule is UpdateRule.ADAMW
        rows = self.table.materialize(ids).to(gradients.dtype) if decay else None
        if rows is not None and not apart:
            gradients = gradients.add(rows, alpha=decay)
        states = {slot: state.index_select(0, ids) for slot, state in self.slots.items()}
        change, places = torch.zeros_like(gradients), torch.arange(ids.numel(), device=ids.device)
        self.kind.row_update(change, places, gradients, replace(scalars, weight_decay=0.0, rounding=None), **states)
        for slot, state in states.items():
            self.slots[slot].index_copy_(0, ids, state)
        return change.sub_(rows, alpha=scalars.lr * decay) if rows is not None and apart else change

    def views(self) -> Iterator[tuple[str, Tensor]]:
        """State tensors by the name of the codes and slot."""
        for slot, state in self.slots.items():
            yield f"{self.name}.{slot}", state


def row_shape(table: StochasticRoundingTable) -> Tensor:
    """A tensor of the shape of the table's rows, on its device, that takes no memory."""
    return table.grid.new_empty((), dtype=table.row_dtype).expand(table.num_rows, table.dim)


def find_code_rows(model: nn.Module, kind: OptimizerKind, seed: int | None) -> list[CodeRows]:
    """Tables of the model, and tables inside tables, that round their own updates; each rounds by noise of its own."""
    found = [(name, module) for name, module in model.named_modules() if isinstance(module, StochasticRoundingTable)]
    return [
        CodeRows(f"{name}.codes" if name else "codes", table, kind, ((seed or 0) << 16) + number)
        for number, (name, table) in enumerate(found)
    ]
