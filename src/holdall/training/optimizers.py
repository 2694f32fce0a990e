"""Optimizers: torch's own for the dense part, and ours for table rows, which touch only touched rows.

| name | rows of tables | everything else |
| --- | --- | --- |
| `sgd` | SGD | torch SGD |
| `adagrad` | Adagrad, one accumulator a number | torch Adagrad |
| `rowwise_adagrad` | Adagrad, one accumulator a row | torch Adagrad |
| `adam` | lazy Adam: moments decay when touched | torch Adam |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from holdall.bags import EmbeddingBags
from holdall.dense_pack import DensePack
from holdall.errors import ConfigError, did_you_mean
from holdall.kernels import row_update
from holdall.kernels.path import takes_triton
from holdall.kernels.row_gradient import RowGradient, join, sum_by_row
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

    def __post_init__(self) -> None:
        if self.name not in NAMES:
            raise ConfigError(f"unknown optimizer '{self.name}'{did_you_mean(self.name, NAMES)}")
        if not self.lr > 0 or (self.table_lr is not None and not self.table_lr > 0):
            raise ConfigError(f"learning rates must be above 0, not lr={self.lr}, table_lr={self.table_lr}")


class _Rows:
    """Rows to update: a pack of tables, or one parameter with sparse gradients, with their optimizer state."""

    def __init__(self, names: dict[str, str], config: OptimizerConfig, pack: DensePack | None, weight: Tensor):
        self.names = names
        """Full parameter name -> table name in the pack (or '' for a lone parameter)."""
        self.pack = pack
        self.parameter = weight
        self.summed: tuple[Tensor, Tensor] | None = None
        self.slots = _new_slots(config.name, weight)

    @property
    def weight(self) -> Tensor:
        return self.parameter if self.pack is None else self.pack.storage

    def gradient(self) -> RowGradient | None:
        """What the backward left."""
        if self.pack is not None:
            return join(self.pack.gradients) if self.pack.gradients else None
        grad = self.parameter.grad
        if grad is None:
            return None
        assert grad.is_sparse, "row parameters have sparse gradients"
        return RowGradient(grad._indices()[0], grad._values())

    def sum_gradients(self) -> None:
        """Turn what the backward left into distinct rows and one gradient each."""
        gradient = self.gradient()
        self.summed = None if gradient is None else sum_by_row(gradient)

    def clear(self) -> None:
        self.summed = None
        if self.pack is not None:
            self.pack.gradients.clear()
        self.parameter.grad = None

    def views(self) -> Iterator[tuple[str, Tensor]]:
        """State tensors by parameter name and slot."""
        for full_name, table in self.names.items():
            for slot, state in self.slots.items():
                yield f"{full_name}.{slot}", state if self.pack is None else self.pack.view(state, table)


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
        self._torch = _torch_optimizer(config, groups) if groups else None

    @property
    def table_lr(self) -> float:
        return self.config.lr if self.config.table_lr is None else self.config.table_lr

    def set_factor(self, factor: float) -> None:
        """Scale every learning rate, as the schedule says for this step."""
        self._factor = factor
        if self._torch is not None:
            for group in self._torch.param_groups:
                group["lr"] = group["initial_lr"] * factor

    def zero_grad(self) -> None:
        for rows in self._rows:
            rows.clear()
        for parameter in self._dense.values():
            parameter.grad = None
        for table in self._self_updating:
            table.zero_pending()

    def clip(self, max_norm: float) -> float:
        """Scale all gradients so that their joint norm is at most `max_norm`; returns the norm before."""
        if self._self_updating:
            raise ConfigError("gradients of tables that round their own updates cannot be clipped: leave clip_norm out")
        for rows in self._rows:
            rows.sum_gradients()
        gradients = [p.grad for p in self._dense.values() if p.grad is not None]
        gradients += [rows.summed[1] for rows in self._rows if rows.summed is not None]
        norm = float(torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in gradients])))
        if norm > max_norm:
            for gradient in gradients:
                gradient.mul_(max_norm / norm)
        return norm

    @torch.no_grad()
    def step(self) -> None:
        """Apply the gradients of the last backward, and clear them."""
        self.step_count += 1
        if self._torch is not None:
            self._torch.step()
        for rows in self._rows:
            if rows.summed is None and takes_triton("the row update", rows.weight, fits=_fits(rows.weight)):
                self._fused_update(rows)
                continue
            if rows.summed is None:
                rows.sum_gradients()
            if rows.summed is not None:
                self._update(rows)(rows.weight, *rows.summed, **rows.slots)
        for table in self._self_updating:
            table.apply_gradients(self.table_lr * self._factor)
        self.zero_grad()

    def _fused_update(self, rows: _Rows) -> None:
        """Sum and update in one pass over the gradients, without waiting for the device."""
        from holdall.kernels.row_update_triton import update_rows

        gradient = rows.gradient()
        if gradient is not None:
            update_rows(
                self.config.name,
                rows.weight,
                gradient,
                *rows.slots.values(),
                lr=self.table_lr * self._factor,
                eps=self.config.eps,
                betas=self.config.betas,
                step=self.step_count,
            )

    def _update(self, rows: _Rows) -> Callable[..., None]:
        lr, eps = self.table_lr * self._factor, self.config.eps
        match self.config.name:
            case "sgd":
                return lambda *args: row_update.sgd(*args, lr=lr)
            case "adagrad":
                return lambda *args, **state: row_update.adagrad(*args, **state, lr=lr, eps=eps)
            case "rowwise_adagrad":
                return lambda *args, **state: row_update.rowwise_adagrad(*args, **state, lr=lr, eps=eps)
        step, betas = self.step_count, self.config.betas
        return lambda *args, **state: row_update.adam(*args, **state, step=step, lr=lr, betas=betas, eps=eps)

    def tensors(self) -> dict[str, Tensor]:
        """Every state tensor by name, as views: what a checkpoint saves and loads into."""
        found = {}
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


def _find_rows(model: nn.Module, config: OptimizerConfig) -> Iterator[_Rows]:
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
                yield _Rows(names, config, pack, pack.storage)
    for module in model.modules():
        if isinstance(module, Table):
            for parameter in module.row_parameters().values():
                if parameter.requires_grad and id(parameter) not in taken:
                    taken.add(id(parameter))
                    yield _Rows({full_names[id(parameter)]: ""}, config, None, parameter)


def _torch_optimizer(config: OptimizerConfig, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """torch's optimizer for dense gradients, its state made at once so that a checkpoint can load into it."""
    optimizer: torch.optim.Optimizer
    on_gpu = all(parameter.is_cuda for group in groups for parameter in group["params"])
    match config.name:
        case "sgd":
            optimizer = torch.optim.SGD(groups, lr=config.lr, fused=on_gpu)
        case "adagrad" | "rowwise_adagrad":
            optimizer = torch.optim.Adagrad(groups, lr=config.lr, eps=config.eps)
        case "adam":
            optimizer = torch.optim.Adam(groups, lr=config.lr, eps=config.eps, betas=config.betas)
            for group in groups:
                for parameter in group["params"]:
                    optimizer.state[parameter] = {
                        "step": torch.zeros(()),
                        "exp_avg": torch.zeros_like(parameter),
                        "exp_avg_sq": torch.zeros_like(parameter),
                    }
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    return optimizer


def load_tensors(optimizers: Optimizers, tensors: Mapping[str, Tensor], step_count: int) -> None:
    """Copy saved state into a fresh optimizer of the same model and kind."""
    for name, state in optimizers.tensors().items():
        state.copy_(tensors[name])
    optimizers.step_count = step_count
