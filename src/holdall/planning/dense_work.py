"""Work of the dense part of a step: its layers and the memory it allocates, traced by running it on a few samples.

The step runs twice, on batches of two small sizes with distinct ids, and every tensor it allocates is recorded. All
allocations grow linearly with the batch, so two sizes give the live bytes at each operation for any size, and their
peak. It is exact for a batch of distinct ids on the CPU's code path, and an upper bound for any other batch.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from holdall.data.batch import Batch, Ids
from holdall.data.schema import Schema
from holdall.models import TwoTower
from holdall.models.layers import MLP
from holdall.models.model import Model, ModelConfig
from holdall.optim.config import OptimizerConfig
from holdall.optim.optimizer_kinds import OPTIMIZER_KINDS
from holdall.optim.optimizers import Optimizers

SIZES = (16, 32)
"""Batch sizes of the two runs."""


PAIR_BYTES = 21
"""Bytes of a loss that compares all pairs of samples, for each pair: scores, exponentials, gradients and a mask."""


@dataclass(frozen=True)
class LinearWork:
    """A linear layer, and the number of times a sample passes through it."""

    inputs: int
    outputs: int
    per_sample: float


@dataclass(frozen=True)
class DenseWork:
    """Work and memory of a model without its tables."""

    layers: tuple[LinearWork, ...]
    interaction: tuple[int, int, float] | None
    """Vectors, their dim, and interactions a sample, of a model with a dot interaction."""
    num_parameters: int
    parameter_bytes: int
    state_bytes: int
    live: tuple[tuple[float, float], ...]
    """(bytes, bytes per sample) allocated at each operation of a step, beyond parameters and their state."""
    pair_dim: int = 0
    """Numbers of the vectors that a loss compares, those of each sample with those of all; 0 for a loss by sample."""

    def step_bytes(self, batch_size: int) -> int:
        """Peak bytes of a step of this batch size."""
        peak = max((round(base + each * batch_size) for base, each in self.live), default=0)
        return peak + (PAIR_BYTES * batch_size**2 if self.pair_dim else 0)


class LiveBytes(TorchDispatchMode):
    """Recorder of allocations: `history` is the live bytes after each operation."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.history: list[int] = []
        self._known: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {id(t.untyped_storage()) for t in _tensors((args, kwargs or {}))}
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            if id(storage) not in given and id(storage) not in self._known:
                self._add(storage)
        self.history.append(self.now)
        return result

    def _add(self, storage: Any) -> None:
        key, size = id(storage), storage.nbytes()
        self.now += size

        def freed(_: Any) -> None:
            self.now -= size
            self._known.pop(key, None)

        self._known[key] = weakref.ref(storage, freed)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [found for item in value for found in _tensors(item)] if isinstance(value, list | tuple) else []


def trace_dense_work(config: ModelConfig, schema: Schema, optimizer: str, lengths: Mapping[str, float]) -> DenseWork:
    """Trace a step of the model on synthetic batches; `lengths` are the lookups per sample of every feature."""
    histories, layers, interaction = [], {}, None
    model: Model | None = None
    for size in SIZES:
        sizes = {feature.name: size * _length(feature.one_hot, lengths[feature.name]) for feature in schema.features}
        by_table: dict[str, int] = {}
        for feature in schema.features:
            by_table[feature.table or feature.name] = max(
                by_table.get(feature.table or feature.name, 1), sizes[feature.name]
            )
        small = replace(
            schema,
            features=tuple(
                replace(feature, num_rows=by_table[feature.table or feature.name], unseen=0)
                for feature in schema.features
            ),
        )
        model = config.build(small)
        optimizers = Optimizers(model, OptimizerConfig.of_record(optimizer))
        batch = _batch(small, size, lengths)
        _step(model, optimizers, batch)  # warm-up: allocates what is kept between steps
        layers = _trace_layers(model, batch, size)
        live = LiveBytes()
        with live:
            _step(model, optimizers, batch)
        histories.append(live.history)
    assert model is not None
    interaction = _interaction(model, lengths)
    dense = [p for name, p in model.named_parameters() if not name.startswith("bags.")]
    kind = OPTIMIZER_KINDS[optimizer]
    return DenseWork(
        layers=tuple(layers.values()),
        interaction=interaction,
        num_parameters=sum(parameter.numel() for parameter in dense),
        parameter_bytes=sum(parameter.nbytes for parameter in dense),
        state_bytes=sum(kind.dense_state_bytes(parameter) for parameter in dense),
        live=_lines(*histories),
        pair_dim=model.config.tower[-1] if isinstance(model, TwoTower) else 0,
    )


def _length(one_hot: bool, mean: float) -> int:
    return 1 if one_hot else max(1, -(-int(mean * 1000) // 1000))


def _batch(schema: Schema, size: int, lengths: Mapping[str, float]) -> Batch:
    """A batch of distinct ids."""
    counts = [_length(feature.one_hot, lengths[feature.name]) for feature in schema.features]
    flat = torch.cat([torch.arange(size * count, dtype=torch.int32) for count in counts])
    if schema.one_hot:
        ids = Ids(flat.view(len(counts), size), None, len(counts))
    else:
        bags = torch.repeat_interleave(torch.tensor(counts), size)
        ids = Ids(flat, F.pad(bags.cumsum(0), (1, 0)), len(counts))
    return Batch(torch.zeros(size, schema.num_dense), ids, torch.zeros(size))


def _step(model: Model, optimizers: Optimizers, batch: Batch) -> None:
    loss = F.binary_cross_entropy_with_logits(model(batch).float(), batch.label)
    loss.backward()
    optimizers.step()


def _trace_layers(model: Model, batch: Batch, size: int) -> dict[str, LinearWork]:
    """The linear layers that a sample passes through, by name."""
    found: dict[str, LinearWork] = {}
    handles = []
    inside = {id(layer) for module in model.modules() if isinstance(module, MLP) for layer in module}

    def record(name: str, module: nn.Module, given: Any) -> None:
        rows = given[0].numel() / given[0].shape[-1] / size
        linear = [layer for layer in module.modules() if isinstance(layer, nn.Linear)]
        for place, layer in enumerate(linear):
            found[f"{name}.{place}"] = LinearWork(layer.in_features, layer.out_features, rows)

    for name, module in model.named_modules():
        if isinstance(module, MLP) or (isinstance(module, nn.Linear) and id(module) not in inside):
            handles.append(
                module.register_forward_pre_hook(lambda module, given, name=name: record(name, module, given))
            )
    with torch.no_grad():
        model.score(batch.dense, _looked_up(model, batch))
    for handle in handles:
        handle.remove()
    return found


def _looked_up(model: Model, batch: Batch) -> Any:
    with torch.enable_grad():  # without gradients a model may return row numbers, for inference
        return model.lookup(batch)


def _interaction(model: Model, lengths: Mapping[str, float]) -> tuple[int, int, float] | None:
    """The shape of a model's dot interaction; None for a model without one."""
    config: Any = getattr(model, "config", None)
    num_dense = 0 if getattr(model, "bottom", None) is None else 1
    family = getattr(config, "family", None)
    if family == "dlrm" and config.interaction == "dot":
        return model.bags.num_features + num_dense, config.dim, 1.0
    if family == "tbsm":
        roles: Any = model.roles
        return len(roles.sample) + len(roles.target) + num_dense, config.dim, config.length + 1.0
    return None


def _lines(first: list[int], second: list[int]) -> tuple[tuple[float, float], ...]:
    """(base, each) of the live bytes at every operation; of the peaks only where the two runs differ in operations."""
    if len(first) != len(second):
        first, second = [max(first)], [max(second)]
    small, large = SIZES
    lines = {
        ((b - a) / (large - small), a - (b - a) / (large - small) * small) for a, b in zip(first, second, strict=True)
    }
    return tuple((base, each) for each, base in sorted(lines))
