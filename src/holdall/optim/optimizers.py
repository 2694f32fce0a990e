"""Optimizers: torch's own for the dense part, and ours for table rows, which touch only touched rows.

| name | rows of tables | everything else |
| --- | --- | --- |
| `sgd` | SGD | torch SGD |
| `adagrad` | Adagrad, one accumulator a number | torch Adagrad |
| `rowwise_adagrad` | Adagrad, one accumulator a row | torch Adagrad |
| `adam` | lazy Adam: moments decay when touched | torch Adam |
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from holdall.common.errors import ConfigError, did_you_mean
from holdall.embedding.bags import EmbeddingBags
from holdall.embedding.dense_pack import DensePack
from holdall.kernels import row_update
from holdall.kernels.dispatch import takes_triton
from holdall.kernels.row_gradient import RowGradient, join, sum_by_row
from holdall.kernels.side_stream import beside
from holdall.kernels.stochastic import keys
from holdall.optim.dense_optimizers import StepScalars, torch_optimizer
from holdall.tables import Table

OptimizerName = Literal["sgd", "adagrad", "rowwise_adagrad", "adam"]
NAMES: tuple[str, ...] = ("sgd", "adagrad", "rowwise_adagrad", "adam")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """What updates the parameters, and how fast."""

    name: OptimizerName = "rowwise_adagrad"
    lr: float = 0.01
    table_lr: float | None = None
    """Learning rate of the tables; `lr` when None."""
    eps: float = 1e-8
    betas: tuple[float, float] = (0.9, 0.999)
    stochastic_seed: int | None = None
    """Seed of the stochastic rounding of bfloat16 and float16 rows (see `kernels.stochastic`); to nearest when None."""

    def __post_init__(self) -> None:
        if self.name not in NAMES:
            raise ConfigError(f"unknown optimizer '{self.name}'{did_you_mean(self.name, NAMES)}")
        if not self.lr > 0 or (self.table_lr is not None and not self.table_lr > 0):
            raise ConfigError(f"learning rates must be above 0, not lr={self.lr}, table_lr={self.table_lr}")


class RowGroup:
    """Rows to update: a pack of tables, or one parameter with sparse gradients, with their optimizer state."""

    def __init__(self, names: dict[str, str], config: OptimizerConfig, pack: DensePack | None, weight: Tensor):
        self.names = names
        """Full parameter name -> table name in the pack (or '' for a lone parameter)."""
        self.pack = pack
        self.parameter = weight
        self.summed: tuple[Tensor, Tensor] | None = None
        self.sorted: tuple[Tensor, Tensor, RowGradient] | None = None
        """Row numbers in order, the lookups they came from, and the gradient, where clipping has sorted them."""
        self._slots = {} if pack is not None else _new_slots(config.name, weight)
        if pack is not None:
            pack.allocate_slots(lambda rows: _new_slots(config.name, rows))

    @property
    def weight(self) -> Tensor:
        return self.parameter if self.pack is None else self.pack.storage

    @property
    def slots(self) -> dict[str, Tensor]:
        """Optimizer state by kind, its rows those of `weight`."""
        return self._slots if self.pack is None else self.pack.slots

    def gradient(self) -> RowGradient | None:
        """What the backward left."""
        if self.pack is not None:
            return join(self.pack.gradients) if self.pack.gradients else None
        grad = self.parameter.grad
        if grad is None:
            return None
        assert grad.is_sparse, "row parameters have sparse gradients"
        return RowGradient(grad._indices()[0], grad._values())

    def replace_gradient(self, gradient: RowGradient) -> None:
        """Put a gradient in the place of what the backward left, such as that of all processes together."""
        if self.pack is not None:
            self.pack.gradients = [gradient]
            return
        weight, values = self.parameter, gradient.grad.to(self.parameter.dtype)
        self.parameter.grad = torch.sparse_coo_tensor(gradient.ids[None], values, weight.shape, check_invariants=False)

    def sum_gradients(self) -> None:
        """Turn what the backward left into distinct rows and one gradient each."""
        gradient = self.gradient()
        self.summed = None if gradient is None else sum_by_row(gradient)

    def squared_norm(self) -> Tensor | None:
        """Of the summed gradient, without summing it in memory; keeps what it sorted for the update."""
        from holdall.kernels import row_update_triton

        gradient = self.gradient()
        if gradient is None or gradient.ids.numel() == 0:
            return None
        self.sorted = (*row_update_triton.sorted_ids(gradient, self.weight.shape[0]), gradient)
        return row_update_triton.squared_norm(*self.sorted)

    def clear(self) -> None:
        self.summed = self.sorted = None
        if self.pack is not None:
            self.pack.gradients.clear()
        self.parameter.grad = None

    def views(self) -> Iterator[tuple[str, Any]]:
        """State tensors by parameter name and slot."""
        for full_name, table in self.names.items():
            views = self._slots if self.pack is None else self.pack.slot_views(table)
            for slot, state in views.items():
                yield f"{full_name}.{slot}", state


def _new_slots(name: str, weight: Tensor) -> dict[str, Tensor]:
    """Optimizer state for rows of `weight`, in float32 or wider; zero pages cost nothing until they are touched."""
    dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=weight.device)

    match name:
        case "adagrad":
            return {"sum": zeros(*weight.shape)}
        case "rowwise_adagrad":
            return {"sum": zeros(weight.shape[0])}
        case "adam":
            return {"exp_avg": zeros(*weight.shape), "exp_avg_sq": zeros(*weight.shape)}
    return {}


def state_bytes_per_row(config: OptimizerConfig, dim: int) -> int:
    """Bytes of optimizer state that a float32 row of a table comes with."""
    slots = _new_slots(config.name, torch.empty(1, dim, device="meta"))
    return sum(state.nbytes for state in slots.values())


SquaredNorm = Callable[[Mapping[str, nn.Parameter], Sequence[RowGroup]], float]
"""Of the gradients of dense parameters and of rows, which are in `RowGroup.summed`."""


class Optimizers:
    """Both optimizers of a model behind one `step`, with state that is named by parameter.

    Creating it takes over the gradients of packed tables (see `DensePack.collects`); make it after the model is on its
    device.
    """

    def __init__(self, model: nn.Module, config: OptimizerConfig):
        self.config = config
        self.step_count = 0
        self._factor = 1.0
        self._rows = list(_find_rows(model, config))
        row_names = {name for rows in self._rows for name in rows.names}
        self._self_updating: list[Any] = [m for m in model.modules() if hasattr(m, "apply_gradients")]
        if self._self_updating and config.name != "sgd":
            kinds = sorted({str(table.method) for table in self._self_updating})
            raise ConfigError(f"{', '.join(kinds)} tables round their own SGD updates: use sgd, not {config.name}")
        tables = {id(p) for module in model.modules() if isinstance(module, Table) for p in module.parameters()}
        self._dense = {n: p for n, p in model.named_parameters() if n not in row_names and p.requires_grad}
        groups: list[dict[str, Any]] = [
            {"params": [p for p in self._dense.values() if id(p) not in tables], "lr": config.lr},
            {"params": [p for p in self._dense.values() if id(p) in tables], "lr": self.table_lr},
        ]
        groups = [group for group in groups if group["params"]]
        self._scalars: StepScalars | None = None
        """On a GPU: table_lr, 1 - beta1^step, 1 - beta2^step, lr, table_lr of this step."""
        self._keys: StepScalars | None = None
        self._scale: Tensor | None = None
        """What clipping multiplies the gradients of rows by."""
        devices = {p.device for p in self._dense.values()} | {rows.weight.device for rows in self._rows}
        if len(devices) == 1 and next(iter(devices)).type == "cuda":
            self._scalars = StepScalars(5, next(iter(devices)))
            self._keys = StepScalars(2, next(iter(devices)), torch.int64)
            for group in groups:
                group["lr"] = self._scalars.values[4 if id(group["params"][0]) in tables else 3]
        rates = (config.lr, config.eps, config.betas)
        self._torch = torch_optimizer(config.name, groups, *rates) if groups else None

    @property
    def row_groups(self) -> list[RowGroup]:
        """What is updated by row."""
        return self._rows

    @property
    def dense_parameters(self) -> dict[str, nn.Parameter]:
        """What is updated as a whole, by name: MLPs, and the parts of compressed tables that are not rows."""
        return self._dense

    @property
    def self_updating(self) -> list[Any]:
        """Tables that round and apply their own updates."""
        return self._self_updating

    @property
    def table_lr(self) -> float:
        return self.config.lr if self.config.table_lr is None else self.config.table_lr

    def set_factor(self, factor: float) -> None:
        """Scale every learning rate, as the schedule says for this step."""
        self._factor = factor
        if self._torch is not None and self._scalars is None:
            for group in self._torch.param_groups:
                group["lr"] = group["initial_lr"] * factor

    def zero_grad(self) -> None:
        for rows in self._rows:
            rows.clear()
        for parameter in self._dense.values():
            parameter.grad = None
        for table in self._self_updating:
            table.zero_pending()

    def clip(self, max_norm: float, squared_norm: SquaredNorm | None = None) -> float | Tensor:
        """Scale all gradients so that their joint norm is at most `max_norm`; returns the norm before.

        On a GPU that is a tensor and nothing waits for it: rows are scaled as they are updated. Where some gradients
        are with other processes, `squared_norm` computes that of all.
        """
        if self._self_updating:
            raise ConfigError("gradients of tables that round their own updates cannot be clipped: leave clip_norm out")
        gradients = [p.grad for p in self._dense.values() if p.grad is not None]
        if squared_norm is None and self._scalars is not None and all(self._fuses(rows) for rows in self._rows):
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
        """What the host does for a step: count it, and bring its rates to the device."""
        self.step_count += 1
        if self._scalars is not None:
            count = self.step_count if self.config.name == "adam" else 1  # others correct nothing
            corrections = [1.0 - beta**count for beta in self.config.betas]
            table_lr, lr = self.table_lr * self._factor, self.config.lr * self._factor
            self._scalars.set([table_lr, *corrections, lr, table_lr])
            if self.config.stochastic_seed is not None and self._keys is not None:
                self._keys.set(keys(self.config.stochastic_seed, self.step_count))

    @torch.no_grad()
    def apply(self) -> None:
        """What the device does for a step, after `prepare`: update with the gradients of the backward, clear them."""
        device = torch.device("cpu") if self._scalars is None else self._scalars.values.device
        with beside(device) as other:  # small kernels, in a graph beside the large ones of the rows
            if self._torch is not None:
                self._torch.step()
        for rows in self._rows:
            if rows.summed is None and self._fuses(rows):
                self._fused_update(rows)
                continue
            if rows.summed is None:
                rows.sum_gradients()
            if rows.summed is not None:
                self._update(rows)(rows.weight, *rows.summed, **rows.slots)
        for table in self._self_updating:
            table.apply_gradients(self.table_lr * self._factor)
        other.join()
        self._scale = None
        self.zero_grad()

    def why_not_captured(self) -> str | None:
        """Why `clip` and `apply` cannot be part of a CUDA graph; None when they can."""
        if self._scalars is None:
            return "parameters are not all on one GPU"
        if self._self_updating:
            return f"{self._self_updating[0].method} tables update themselves"
        if not all(self._fuses(rows) for rows in self._rows):
            return "rows are not updated by Triton kernels"
        return None

    @staticmethod
    def _fuses(rows: RowGroup) -> bool:
        return takes_triton("the row update", rows.weight, fits=_fits(rows.weight))

    def _fused_update(self, rows: RowGroup) -> None:
        """Sum and update in one pass over the gradients, without waiting for the device."""
        from holdall.kernels import row_update_triton

        gradient = rows.gradient() if rows.sorted is None else rows.sorted[2]
        if gradient is None or gradient.ids.numel() == 0:
            return
        ids, order = (
            row_update_triton.sorted_ids(gradient, rows.weight.shape[0]) if rows.sorted is None else rows.sorted[:2]
        )
        row_update_triton.update_sorted_rows(
            self.config.name,
            rows.weight,
            ids,
            order,
            gradient,
            *rows.slots.values(),
            lr=self.table_lr * self._factor,
            eps=self.config.eps,
            betas=self.config.betas,
            step=self.step_count,
            rates=None if self._scalars is None else self._scalars.values,
            scale=self._scale,
            stochastic=self._rounding_keys(rows.weight.device),
        )

    def _rounding_keys(self, device: torch.device) -> Tensor | None:
        if self.config.stochastic_seed is None:
            return None
        if self._keys is not None:
            return self._keys.values
        return torch.tensor(keys(self.config.stochastic_seed, self.step_count), device=device)

    def _update(self, rows: RowGroup) -> Callable[..., None]:
        seed = self.config.stochastic_seed
        settings: dict[str, Any] = {
            "lr": self.table_lr * self._factor,
            "rounding": None if seed is None else keys(seed, self.step_count),
        }
        if self.config.name != "sgd":
            settings["eps"] = self.config.eps
        if self.config.name == "adam":
            settings.update(step=self.step_count, betas=self.config.betas)
        return functools.partial(getattr(row_update, self.config.name), **settings)

    def tensors(self) -> dict[str, Tensor]:
        """Every state tensor by name, as views: what a checkpoint saves and loads into."""
        found: dict[str, Any] = {}
        for rows in self._rows:
            found.update({f"rows.{name}": state for name, state in rows.views()})
        for name, parameter in self._dense.items():
            state = {} if self._torch is None else self._torch.state[parameter]
            found.update({f"dense.{name}.{slot}": value for slot, value in state.items() if isinstance(value, Tensor)})
        return found


def _fits(weight: Tensor) -> bool:
    """Whether the fused update takes this storage."""
    narrow = weight.dtype in (torch.float32, torch.bfloat16, torch.float16)
    return narrow and weight.ndim == 2 and weight.is_contiguous() and weight.shape[1] <= 2048


def _find_rows(model: nn.Module, config: OptimizerConfig) -> Iterator[RowGroup]:
    """Everything in the model that is updated by row."""
    full_names = {id(parameter): name for name, parameter in model.named_parameters()}
    taken: set[int] = set()
    for module in model.modules():
        if isinstance(module, EmbeddingBags):
            for pack in module.packs:
                trainable = {n: t for n, t in pack.tables.items() if t.weight.requires_grad}
                if len(trainable) != len(pack.tables):
                    continue  # some are frozen: leave the whole pack to ordinary sparse gradients
                pack.repack()
                pack.collects = True
                names = {full_names[id(table.weight)]: name for name, table in pack.tables.items()}
                taken.update(id(table.weight) for table in pack.tables.values())
                # Not its storage itself: a pack may make another one, and the old one's memory is wanted back then.
                yield RowGroup(names, config, pack, torch.empty(0))
    for module in model.modules():
        if isinstance(module, Table):
            for parameter in module.row_parameters().values():
                if parameter.requires_grad and id(parameter) not in taken:
                    taken.add(id(parameter))
                    yield RowGroup({full_names[id(parameter)]: ""}, config, None, parameter)


def load_tensors(optimizers: Optimizers, tensors: Mapping[str, Tensor], step_count: int) -> None:
    """Copy saved state into a fresh optimizer of the same model and kind."""
    for name, state in optimizers.tensors().items():
        state.copy_(tensors[name])
    optimizers.step_count = step_count
