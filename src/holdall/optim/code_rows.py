"""Rows of tables that store codes alone and round their own updates, with optimizer state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from holdall.kernels.row_gradient import RowGradient
from holdall.kernels.row_update import UpdateRule, UpdateScalars
from holdall.kernels.stochastic import keys
from holdall.optim.byte_state import decode_bytes, encode_bytes
from holdall.optim.optimizer_kinds import OptimizerKind
from holdall.tables.code_updates import apply_row_updates, row_noise, sum_pending
from holdall.tables.quantized import StochasticRoundingTable

STATE_SEED = 1 << 40
"""Difference of the seeds by which state and rows are rounded."""


class CodeRows:
    """Rows of one table of codes: the optimizer computes a change in floating point, and the table rounds it.

    State has the shape that it has for dense rows, in float32: row-wise Adagrad keeps one number for each row, 4 bytes
    beside `dim + 8` of codes and grid, or one byte where the table says so (`Quantized.state_bits`); Adagrad, momentum
    and Adam keep one or two for each number of it, several times the codes. A step decodes, updates and rounds the rows
    that were touched, of all tables together.
    """

    def __init__(self, name: str, table: StochasticRoundingTable, kind: OptimizerKind, seed: int):
        self.name = name
        """Name of the table's codes in the model."""
        self.table, self.kind, self.seed = table, kind, seed
        self.slots = code_row_state(table, kind, table.device)
        """Optimizer state by slot, with a line for each row."""

    def views(self) -> Iterator[tuple[str, Tensor]]:
        """State tensors by the name of the codes and slot."""
        for slot, state in self.slots.items():
            yield f"{self.name}.{slot}", state


def sum_code_gradients(rows: Sequence[CodeRows]) -> list[Tensor]:
    """The summed gradients [U, dim] of the touched rows of each table; scaled in place, they scale the update."""
    summed = sum_pending([each.table for each in rows])
    for number, ids, gradients in summed:
        rows[number].table.pending = [RowGradient(ids, gradients, is_summed=True)]
    return [gradients for _, _, gradients in summed if gradients.numel()]


def update_code_rows(rows: Sequence[CodeRows], scalars: UpdateScalars) -> None:
    """Apply the gradients of the backward, and drop them. Rounding depends on seed, step and position alone."""
    apply_row_updates(
        [each.table for each in rows],
        lambda kind, gradients: _change([(rows[touched.number], touched.ids) for touched in kind], gradients, scalars),
        [keys(each.seed, scalars.step) for each in rows],
    )


def _change(touched: Sequence[tuple[CodeRows, Tensor]], gradients: Tensor, scalars: UpdateScalars) -> Tensor:
    """What the optimizer adds to touched rows: its update of rows of zero, which no digit of a row can round."""
    kind = touched[0][0].kind
    decay, apart = scalars.weight_decay, kind.row_rule is UpdateRule.ADAMW
    rows = None
    if decay:
        rows = torch.cat([each.table.materialize(ids) for each, ids in touched]).to(gradients.dtype)
        gradients = gradients if apart else gradients.add(rows, alpha=decay)
    states = {
        slot: _decoded(torch.cat([each.slots[slot].index_select(0, ids) for each, ids in touched]))
        for slot in touched[0][0].slots
    }
    change, places = torch.zeros_like(gradients), torch.arange(len(gradients), device=gradients.device)
    kind.row_update(change, places, gradients, replace(scalars, weight_decay=0.0, rounding=None), **states)
    sizes = [ids.numel() for _, ids in touched]
    for slot, state in states.items():
        if touched[0][0].slots[slot].dtype == torch.uint8:
            seeds = [keys(each.seed ^ STATE_SEED, scalars.step) for each, _ in touched]
            state = encode_bytes(state.float(), row_noise([ids for _, ids in touched], 1, seeds)[:, 0])
        for (each, ids), own in zip(touched, state.split(sizes), strict=True):
            each.slots[slot].index_copy_(0, ids, own)
    return change.sub_(rows, alpha=scalars.lr * decay) if rows is not None and apart else change


def code_row_state(
    table: StochasticRoundingTable, kind: OptimizerKind, device: torch.device | str
) -> dict[str, Tensor]:
    """Zero state of the rows of a table by slot, on a device."""
    rows = torch.empty((), dtype=table.row_dtype, device=device).expand(table.num_rows, table.dim)
    slots = kind.row_state(rows)
    if table.method.state_bits == 32:
        return slots
    per_row = {slot.name for slot in kind.row_slots if slot.per_row}
    return {
        name: torch.zeros_like(state, dtype=torch.uint8) if name in per_row else state for name, state in slots.items()
    }


def _decoded(state: Tensor) -> Tensor:
    return decode_bytes(state) if state.dtype == torch.uint8 else state


def find_code_rows(model: nn.Module, kind: OptimizerKind, seed: int | None) -> list[CodeRows]:
    """Tables of the model, and tables inside tables, that round their own updates; each rounds by noise of its own."""
    found = [(name, module) for name, module in model.named_modules() if isinstance(module, StochasticRoundingTable)]
    return [
        CodeRows(f"{name}.codes" if name else "codes", table, kind, ((seed or 0) << 16) + number)
        for number, (name, table) in enumerate(found)
    ]
