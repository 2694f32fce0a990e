"""Kinds of optimizers: the state of each, its updates of rows, and its updates of dense parameters.

| name | rows of tables | everything else |
| --- | --- | --- |
| `sgd` | SGD | torch SGD |
| `adagrad` | Adagrad, one accumulator per element | torch Adagrad |
| `rowwise_adagrad` | Adagrad, one accumulator per row | torch Adagrad |
| `rowwise_adagrad_adam` | Adagrad, one accumulator per row | torch Adam; Adagrad inside compressed tables |
| `adam` | lazy Adam: moments decay when touched | torch Adam |
| `adamw` | lazy Adam after weight decay apart from the gradient | torch AdamW |

Weight decay, and the decay of momentum, reach a row in the steps that touch it and in no others. `sgd` with momentum
is a kind of its own, since it has state.

A new optimizer needs a name in `optim.config` and an `OptimizerKind` here, a plain update and a rule in
`kernels.row_update`, and a branch of the kernel in `kernels.row_update_triton`. Training, checkpoints and the cost
model read everything from it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from holdall.kernels import row_update
from holdall.kernels.row_update import UpdateRule
from holdall.optim import dense_optimizers
from holdall.optim.config import NAMES as NAMES


@dataclass(frozen=True)
class RowSlot:
    """State tensor of the rows of a table: one value for each element of a row, or one for the whole row."""

    name: str
    """Name in checkpoints, and parameter of the plain update."""
    per_row: bool = False
    """Whether there is one value for the whole row."""


@dataclass(frozen=True, kw_only=True)
class OptimizerKind:
    """State and updates of one optimizer."""

    name: str
    """That of the optimizer, or of its variant with other state."""
    row_slots: tuple[RowSlot, ...]
    """State of table rows, in the order of the Triton kernel's arguments."""
    row_update: Callable[..., None]
    """Plain update of rows; see `kernels.row_update`."""
    row_rule: UpdateRule
    """Branch of the Triton kernel that computes the same."""
    dense: Callable[..., torch.optim.Optimizer]
    """Builder of the torch optimizer of dense parameters; see `dense_optimizers`."""
    dense_slots: tuple[str, ...]
    """State tensors of a dense parameter, each of its shape and type."""
    counts_steps: bool = True
    """Whether torch also counts the steps of a dense parameter with such state."""
    corrects_bias: bool = False
    """Whether an update divides by 1 - beta^step."""
    table_parts: str | None = None
    """The optimizer of parts of compressed tables that are not rows, tensor-train cores for one; this one when None."""
    measured_as: str | None = None
    """The optimizer whose measured times stand for its own, because it moves as many bytes; None: it is measured."""

    def row_state(self, weight: Tensor) -> dict[str, Tensor]:
        """Zero state for the rows of `weight`, by slot, in float32 or wider; memory is committed when it is touched."""
        dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
        return {
            slot.name: torch.zeros(
                weight.shape[:1] if slot.per_row else weight.shape, dtype=dtype, device=weight.device
            )
            for slot in self.row_slots
        }

    def row_slot_bytes(self, dim: int) -> tuple[int, ...]:
        """Bytes of each slot for one float32 row of a table."""
        return tuple(4 if slot.per_row else 4 * dim for slot in self.row_slots)

    def row_state_bytes(self, dim: int) -> int:
        """Bytes of all slots for one float32 row of a table."""
        return sum(self.row_slot_bytes(dim))

    def dense_state(self, parameter: Tensor, step_device: torch.device | str) -> dict[str, Tensor]:
        """Zero state of a dense parameter under torch's names."""
        if not self.dense_slots:
            return {}
        zeros = {slot: torch.zeros_like(parameter) for slot in self.dense_slots}
        return {"step": torch.zeros((), device=step_device), **zeros} if self.counts_steps else zeros

    def dense_state_bytes(self, parameter: Tensor) -> int:
        """Bytes of `dense_state`."""
        return len(self.dense_slots) * parameter.nbytes + (4 if self.dense_slots and self.counts_steps else 0)

    @property
    def of_table_parts(self) -> OptimizerKind:
        """State and updates of parts of compressed tables that are not rows."""
        return self if self.table_parts is None else OPTIMIZER_KINDS[self.table_parts]

    @property
    def rates(self) -> str:
        """Name under which a hardware file has the times of this optimizer."""
        return self.measured_as or self.name

    def dense_optimizer(
        self, groups: dense_optimizers.Groups, numbers: dense_optimizers.DenseNumbers
    ) -> torch.optim.Optimizer:
        """The torch optimizer of dense parameters, with zero state that a checkpoint can load into.

        Learning rates of groups may be 0-dim tensors on the GPU that all their parameters are on.
        """
        on_gpu = all(parameter.is_cuda for group in groups for parameter in group["params"])
        optimizer = self.dense(groups, numbers, on_gpu)
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]
            for parameter in group["params"]:
                if self.dense_slots:
                    optimizer.state[parameter] = self.dense_state(parameter, parameter.device if on_gpu else "cpu")
        return optimizer


OPTIMIZER_KINDS: dict[str, OptimizerKind] = {
    kind.name: kind
    for kind in (
        OptimizerKind(
            name="sgd",
            row_slots=(),
            row_update=row_update.sgd,
            row_rule=UpdateRule.SGD,
            dense=dense_optimizers.sgd,
            dense_slots=(),
        ),
        OptimizerKind(
            name="momentum_sgd",
            row_slots=(RowSlot("momentum_buffer"),),
            row_update=row_update.momentum_sgd,
            row_rule=UpdateRule.MOMENTUM_SGD,
            dense=dense_optimizers.sgd,
            dense_slots=("momentum_buffer",),
            counts_steps=False,
            measured_as="adagrad",
        ),
        OptimizerKind(
            name="adagrad",
            row_slots=(RowSlot("sum"),),
            row_update=row_update.adagrad,
            row_rule=UpdateRule.ADAGRAD,
            dense=dense_optimizers.adagrad,
            dense_slots=("sum",),
        ),
        OptimizerKind(
            name="rowwise_adagrad",
            row_slots=(RowSlot("sum", per_row=True),),
            row_update=row_update.rowwise_adagrad,
            row_rule=UpdateRule.ROWWISE_ADAGRAD,
            dense=dense_optimizers.adagrad,
            dense_slots=("sum",),
        ),
        OptimizerKind(
            name="rowwise_adagrad_adam",
            row_slots=(RowSlot("sum", per_row=True),),
            row_update=row_update.rowwise_adagrad,
            row_rule=UpdateRule.ROWWISE_ADAGRAD,
            dense=dense_optimizers.adam,
            dense_slots=("exp_avg", "exp_avg_sq"),
            table_parts="rowwise_adagrad",
            measured_as="rowwise_adagrad",
        ),
        OptimizerKind(
            name="adam",
            row_slots=(RowSlot("exp_avg"), RowSlot("exp_avg_sq")),
            row_update=row_update.adam,
            row_rule=UpdateRule.ADAM,
            dense=dense_optimizers.adam,
            dense_slots=("exp_avg", "exp_avg_sq"),
            corrects_bias=True,
        ),
        OptimizerKind(
            name="adamw",
            row_slots=(RowSlot("exp_avg"), RowSlot("exp_avg_sq")),
            row_update=row_update.adamw,
            row_rule=UpdateRule.ADAMW,
            dense=dense_optimizers.adamw,
            dense_slots=("exp_avg", "exp_avg_sq"),
            corrects_bias=True,
            measured_as="adam",
        ),
    )
}
"""Records by name: those of `OptimizerName`, and variants of them with other state."""
MEASURED = tuple(kind.name for kind in OPTIMIZER_KINDS.values() if kind.measured_as is None)
"""Optimizers that a hardware file has times of."""
