"""Optimizers of a model, of its table rows and of its dense parameters, behind one `step`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from holdall.common.errors import ConfigError
from holdall.kernels.row_update import DeviceScalars, UpdateScalars
from holdall.kernels.side_stream import beside
from holdall.kernels.stochastic import keys
from holdall.optim.code_rows import find_code_rows, sum_code_gradients, update_code_rows
from holdall.optim.config import OptimizerConfig
from holdall.optim.dense_optimizers import DenseNumbers, StepScalars
from holdall.optim.optimizer_kinds import OptimizerKind
from holdall.optim.row_groups import RowGroup, find_row_groups
from holdall.tables import Table
from holdall.tables.quantized import StochasticRoundingTable

SquaredNorm = Callable[[Mapping[str, nn.Parameter], Sequence[RowGroup]], float]
"""Squared norm of the gradients of dense parameters and of rows; those of rows are in `RowGroup.summed`."""


class Optimizers:
    """Optimizers of a model, with state that is named by parameter.

    From then on packed tables collect their gradients (see `DensePack.collects`), so the model must not move any more.
    """

    def __init__(self, model: nn.Module, config: OptimizerConfig):
        self.config = config
        self.step_count = 0
        self._factor = 1.0
        self._rows = list(find_row_groups(model, config.kind))
        row_names = {name for rows in self._rows for name in rows.names}
        self._codes = find_code_rows(model, config.kind, config.stochastic_seed)
        tables = {id(p) for module in model.modules() if isinstance(module, Table) for p in module.parameters()}
        self._dense = {n: p for n, p in model.named_parameters() if n not in row_names and p.requires_grad}
        groups: list[dict[str, Any]] = [
            {"params": [p for p in self._dense.values() if id(p) not in tables], "lr": config.lr, "scalar": 3},
            {"params": [p for p in self._dense.values() if id(p) in tables], "lr": self.table_lr, "scalar": 4},
        ]
        self._scalars: StepScalars | None = None
        """On a GPU: table_lr, 1 - beta1^step, 1 - beta2^step, lr, table_lr of this step."""
        self._keys: StepScalars | None = None
        self._scale: Tensor | None = None
        """Factor of clipping on the gradients of rows."""
        devices = {p.device for p in self._dense.values()} | {rows.weight.device for rows in self._rows}
        if len(devices) == 1 and next(iter(devices)).type == "cuda":
            self._scalars = StepScalars(5, next(iter(devices)))
            self._keys = StepScalars(2, next(iter(devices)), torch.int64)
            for group in groups:
                group["lr"] = self._scalars.values[group["scalar"]]
        numbers = DenseNumbers(
            eps=config.eps, betas=config.betas, momentum=config.momentum, weight_decay=config.weight_decay
        )
        self._torch = _dense_optimizers(config.kind, groups, numbers)
        self._left_out = {name: p for name, p in model.named_parameters() if not p.requires_grad}
        """Parameters that were frozen when the optimizers were made, and have no state."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Of a copy or a pickle: learning rates on a GPU are views of its own scalars again."""
        self.__dict__.update(state)
        if self._scalars is not None:
            for group in self._torch_groups():
                group["lr"] = self._scalars.values[group["scalar"]]

    @property
    def row_groups(self) -> list[RowGroup]:
        """Parameters that are updated by row."""
        return self._rows

    @property
    def dense_parameters(self) -> dict[str, nn.Parameter]:
        """Parameters that are updated as a whole, by name: MLPs, and parts of compressed tables that are not rows."""
        return self._dense

    @property
    def self_updating(self) -> list[StochasticRoundingTable]:
        """Tables that round and apply their own updates."""
        return [codes.table for codes in self._codes]

    @property
    def table_lr(self) -> float:
        return self.config.lr if self.config.table_lr is None else self.config.table_lr

    def _torch_groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self._torch for group in optimizer.param_groups]

    def set_factor(self, factor: float) -> None:
        """Scale every learning rate by the schedule's factor of this step."""
        self._factor = factor
        if self._scalars is None:
            for group in self._torch_groups():
                group["lr"] = group["initial_lr"] * factor

    @property
    def has_frozen(self) -> bool:
        """Whether a parameter was frozen after the optimizers were made: it is not updated then."""
        weights = [weight for rows in self._rows for weight in rows.weights()]
        return not all(parameter.requires_grad for parameter in (*weights, *self._dense.values()))

    def zero_grad(self) -> None:
        for rows in self._rows:
            rows.clear()
        for parameter in self._dense.values():
            parameter.grad = None
        for codes in self._codes:
            codes.table.zero_pending()

    def clip(self, max_norm: float, squared_norm: SquaredNorm | None = None) -> float | Tensor:
        """Scale all gradients so that their joint norm is at most `max_norm`; returns the norm before.

        On a GPU the norm is a tensor and nothing waits for it: rows are scaled as they are updated. Where other
        processes have some of the gradients, `squared_norm` computes that of all.
        """
        gradients = [p.grad for p in self._dense.values() if p.grad is not None]
        gradients += sum_code_gradients(self._codes)
        if squared_norm is None and self._scalars is not None and all(rows.fuses for rows in self._rows):
            return self._clip_on_device(max_norm, gradients)
        for rows in self._rows:
            rows.sum_gradients()
        gradients += [rows.summed[1] for rows in self._rows if rows.summed is not None]
        if squared_norm is not None:
            norm = math.sqrt(squared_norm(self._dense, self._rows))
        else:
            norm = float(torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in gradients])))
        if norm > max_norm:
            for gradient in gradients:
                gradient.mul_(max_norm / norm)
        return norm

    @torch.no_grad()
    def _clip_on_device(self, max_norm: float, gradients: list[Tensor]) -> Tensor:
        squares = [rows.squared_norm() for rows in self._rows]
        if gradients:
            squares.append(torch.stack(torch._foreach_norm(gradients)).square().sum())
        norm = torch.stack([square for square in squares if square is not None]).sum().sqrt()
        self._scale = (max_norm / norm).clamp(max=1.0)
        if gradients:
            torch._foreach_mul_(gradients, self._scale)
        return norm

    def step(self) -> None:
        """Apply the gradients of the last backward, and clear them.

        Captured in a CUDA graph it is `apply` alone: call `prepare` before each replay.
        """
        if self._scalars is None or not torch.cuda.is_current_stream_capturing():
            self.prepare()
        self.apply()

    def prepare(self) -> None:
        """The host's part of a step: count it, and copy its rates to the device."""
        self.step_count += 1
        if self._scalars is not None:
            count = self.step_count if self.config.kind.corrects_bias else 1  # equal values are not copied again
            corrections = [1.0 - beta**count for beta in self.config.betas]
            table_lr, lr = self.table_lr * self._factor, self.config.lr * self._factor
            self._scalars.set([table_lr, *corrections, lr, table_lr])
            if self.config.stochastic_seed is not None and self._keys is not None:
                self._keys.set(keys(self.config.stochastic_seed, self.step_count))

    @torch.no_grad()
    def apply(self) -> None:
        """The device's part of a step, after `prepare`: update with the gradients of the backward, and clear them."""
        for name, parameter in self._left_out.items():
            if parameter.grad is not None:
                raise ConfigError(
                    f"'{name}' has a gradient but was frozen when the optimizers were made: make them before freezing "
                    f"it, or anew after"
                )
        device = torch.device("cpu") if self._scalars is None else self._scalars.values.device
        with beside(device) as other:  # small kernels, in a graph beside the large ones of the rows
            for optimizer in self._torch:
                optimizer.step()
        stale = [rows.drop_stale() for rows in self._rows]
        if any(stale):
            self._scale = None
        scalars, on_device = self._step_scalars()
        for rows in self._rows:
            rows.update(scalars, on_device)
        update_code_rows(self._codes, scalars)
        other.join()
        self._scale = None
        self.zero_grad()

    def why_not_captured(self) -> str | None:
        """Why `clip` and `apply` cannot be part of a CUDA graph; None when they can."""
        if self._scalars is None:
            return "parameters are not all on one GPU"
        if self._codes:
            return f"{self._codes[0].table.method} tables update themselves"
        if not all(rows.fuses for rows in self._rows):
            return "rows are not updated by Triton kernels"
        return None

    def _step_scalars(self) -> tuple[UpdateScalars, DeviceScalars]:
        """Numbers of this step for the updates of rows: those on the host, and those that kernels read on a GPU."""
        seed = self.config.stochastic_seed
        scalars = UpdateScalars(
            lr=self.table_lr * self._factor,
            eps=self.config.eps,
            betas=self.config.betas,
            step=self.step_count,
            momentum=self.config.momentum,
            weight_decay=self.config.weight_decay,
            rounding=None if seed is None else keys(seed, self.step_count),
        )
        rates = None if self._scalars is None else self._scalars.values
        rounding = None if self._keys is None or seed is None else self._keys.values
        return scalars, DeviceScalars(rates=rates, scale=self._scale, keys=rounding)

    def tensors(self) -> dict[str, Tensor]:
        """State tensors by name, as views: a checkpoint saves them and loads into them."""
        found: dict[str, Any] = {}
        for rows in self._rows:
            found.update({f"rows.{name}": state for name, state in rows.views()})
        for codes in self._codes:
            found.update({f"rows.{name}": state for name, state in codes.views()})
        states = {parameter: state for optimizer in self._torch for parameter, state in optimizer.state.items()}
        for name, parameter in self._dense.items():
            state = states.get(parameter, {})
            found.update({f"dense.{name}.{slot}": value for slot, value in state.items() if isinstance(value, Tensor)})
        return found

    def state_dict(self) -> dict[str, Any]:
        """State as torch's optimizers have it: tensors by name (not copied) and the number of steps."""
        tensors = self.tensors()
        if not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
            raise ConfigError("optimizer state of rows that are in several places is saved by checkpoints only")
        return {"step_count": self.step_count, "tensors": tensors}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Copy the state of `state_dict` into this one, of the same model and optimizer."""
        own, given = self.state_dict()["tensors"], state["tensors"]
        wrong = sorted(own.keys() ^ given.keys()) or [name for name in own if own[name].shape != given[name].shape]
        if wrong:
            raise ConfigError(f"this is the state of another model or optimizer: '{wrong[0]}' differs")
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(given[name])
        self.step_count = state["step_count"]


def _dense_optimizers(
    kind: OptimizerKind, groups: Sequence[dict[str, Any]], numbers: DenseNumbers
) -> list[torch.optim.Optimizer]:
    """Optimizers of dense parameters: one of all, or those of the network and of parts of tables."""
    network, table_parts = groups
    together = kind.table_parts is None
    taken = [(kind, list(groups))] if together else [(kind, [network]), (kind.of_table_parts, [table_parts])]
    filled = [(owner, [group for group in mine if group["params"]]) for owner, mine in taken]
    return [owner.dense_optimizer(mine, numbers) for owner, mine in filled if mine]
