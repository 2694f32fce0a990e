"""The dense part of a step, measured: layers, interactions, updates of parameters, batches, and what overlaps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from holdall.embedding.id_checks import all_below
from holdall.kernels.interaction import dot_interaction
from holdall.models.layers import mlp
from holdall.optim.optimizers import NAMES, OptimizerConfig, Optimizers
from holdall.planning.machine.clock import Clock, fit_line
from holdall.planning.machine.hardware import Interaction, Layer, Line

WIDTHS = (16, 64, 256, 1024)
"""Inputs and outputs of the layers that are timed."""
TIMES = 4
"""How often small things are repeated in what is timed on a GPU."""


def _batches(clock: Clock) -> tuple[int, ...]:
    """Samples of the batches that are timed: from what caches hold to what they do not."""
    return (512, 2048, 8192) if clock.device.type == "cpu" else (4096, 16384, 65536)


def _arithmetic(clock: Clock, precision: str) -> AbstractContextManager[Any]:
    """What training computes in: bf16 by autocast."""
    return torch.autocast(clock.device.type, torch.bfloat16) if precision == "bf16" else nullcontext()


def precisions(clock: Clock) -> tuple[str, ...]:
    """What is timed: on a CPU without matrix units for it, bf16 takes many times as long and is left out."""
    return ("float32", "bf16") if clock.device.type == "cuda" else ("float32",)


def layers(clock: Clock, of: Sequence[str] | None = None) -> Iterator[Layer]:
    """Linear layers in some precisions, or in all that the device is good at."""
    for precision, inputs, outputs in product(of or precisions(clock), WIDTHS, WIDTHS):
        layer = mlp((inputs, outputs), last_activation=True, device=clock.device)
        taken = {}
        for size in _batches(clock):
            x = torch.rand(size, inputs, device=clock.device, requires_grad=True)
            with torch.no_grad(), _arithmetic(clock, precision):
                grad = torch.rand_like(layer(x))

            def run(layer: Any = layer, x: Tensor = x, grad: Tensor = grad, precision: str = precision) -> None:
                with _arithmetic(clock, precision):
                    made = layer(x)
                made.backward(grad)
                layer.zero_grad()
                x.grad = None

            taken[str(size)] = clock.replayed(run, times=TIMES)
        yield Layer(inputs, outputs, taken, precision)


def interactions(clock: Clock, of: Sequence[str] | None, dims: Sequence[int]) -> Iterator[Interaction]:
    for precision, vectors, dim in product(of or precisions(clock), (9, 27, 54), dims):
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        taken = {}
        for size in _batches(clock):
            shape = (size, vectors - 1, dim)
            looked_up = torch.rand(shape, dtype=dtype, device=clock.device, requires_grad=True)
            first = torch.rand(size, dim, dtype=dtype, device=clock.device, requires_grad=True)
            with torch.no_grad():
                grad = torch.rand_like(dot_interaction(looked_up, first))

            def run(looked_up: Tensor = looked_up, first: Tensor = first, grad: Tensor = grad) -> None:
                dot_interaction(looked_up, first).backward(grad)
                looked_up.grad = first.grad = None

            taken[str(size)] = clock.replayed(run, times=TIMES)
        yield Interaction(vectors, dim, taken, precision)


def dense_updates(clock: Clock) -> dict[str, Line]:
    """Updating the dense parameters, through `Optimizers`, of MLPs of two sizes."""
    found = {}
    for name in NAMES:
        sizes, taken = [], []
        for width in (64, 768):
            model = mlp((width, width, width), last_activation=False, device=clock.device)
            optimizers = Optimizers(model, OptimizerConfig(name=name))  # type: ignore[arg-type]

            def gradients(model: Any = model) -> None:
                for parameter in model.parameters():
                    parameter.grad = torch.full_like(parameter, 1e-3)

            def update(gradients: Any = gradients, optimizers: Optimizers = optimizers) -> None:
                gradients()
                optimizers.apply()

            sizes.append(sum(parameter.numel() for parameter in model.parameters()))
            if clock.device.type == "cuda":
                optimizers.prepare()
                taken.append(max(1e-9, clock.replayed(update, times=TIMES) - clock.replayed(gradients, times=TIMES)))
            else:
                taken.append(clock(lambda _, optimizers=optimizers: optimizers.step(), gradients))  # type: ignore[misc]
        found[name] = fit_line(sizes, taken)
    return found


def stacking(clock: Clock) -> dict[str, Line]:
    """Putting vectors of several kinds of tables side by side, and their gradients back, by numbers.

    On a GPU every kernel writes into its place of one output, and there is nothing to put together.
    """
    if clock.device.type == "cuda":
        return {"forward": Line(), "backward": Line()}
    sizes, forward, both = [], [], []
    for size in _batches(clock):
        packed = torch.rand(size, 21, 16, device=clock.device, requires_grad=True)
        others = [torch.rand(size, 16, device=clock.device, requires_grad=True) for _ in range(5)]
        grad = torch.rand(size, 26, 16, device=clock.device)

        def put(packed: Tensor = packed, others: list[Tensor] = others) -> Tensor:
            return torch.stack([*packed.unbind(1), *others], dim=1)

        def put_and_back(put: Callable[[], Tensor] = put, grad: Tensor = grad, packed: Tensor = packed) -> None:
            put().backward(grad)
            packed.grad = None

        sizes.append(grad.numel())
        forward.append(clock(put))
        both.append(clock(put_and_back))
    back = [max(0.0, whole - part) for whole, part in zip(both, forward, strict=True)]
    return {"forward": fit_line(sizes, forward), "backward": fit_line(sizes, back) if all(back) else Line()}


def read_cost(clock: Clock) -> Line:
    """A batch made by a thread that looks at all of it, as the loader does, and checked by the one that gets it."""
    sizes = (1 << 14, 1 << 20)
    taken = []
    with ThreadPoolExecutor(1) as thread:
        for size in sizes:
            values = torch.ones(size // 8, 8, dtype=torch.int32).t()
            limits = torch.full((8,), 2)

            def run(values: Tensor = values, limits: Tensor = limits) -> None:
                all_below(thread.submit(values.clone).result(), limits)

            taken.append(clock(run))
    return fit_line(sizes, taken)


def overlap_cost(clock: Clock) -> float:
    """How much of the shorter of two things that run at the same time is hidden: products, and a thread that gathers on
    the host. All of it where the products are those of a GPU."""
    if clock.device.type == "cuda":
        return 1.0
    a, table, rows = torch.rand(1024, 1024), torch.ones(1 << 20, 16), torch.randint(0, 1 << 20, (1 << 16,))

    def compute() -> None:
        for _ in range(4):
            torch.mm(a, a)

    def gather() -> None:
        for _ in range(4):
            table.index_select(0, rows)

    alone_compute, alone_gather = clock(compute), clock(gather)
    with ThreadPoolExecutor(1) as thread:

        def both() -> None:
            waiting = thread.submit(gather)
            compute()
            waiting.result()

        together = clock(both)
    hidden = alone_compute + alone_gather - together
    return float(np.clip(hidden / min(alone_compute, alone_gather), 0.0, 1.0))


def call_cost(clock: Clock) -> float:
    x = torch.zeros(1, device=clock.device)

    def run() -> None:
        for _ in range(100):
            x.add_(1)

    return clock(run) / 100


def stream_cost(clock: Clock) -> float:
    x = torch.zeros(1 << 24, device=clock.device)
    return 2 * x.nbytes / clock(lambda: x.mul_(1.5))
