"""Measured costs of the dense part of a step: layers, interactions, parameter updates, batches, and overlap."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from holdall.common.sizes import readable_bytes
from holdall.common.threads import available_cores
from holdall.embedding.id_checks import all_below
from holdall.kernels.interaction import dot_interaction
from holdall.models.layers import mlp
from holdall.optim.config import OptimizerConfig
from holdall.optim.optimizer_kinds import MEASURED
from holdall.optim.optimizers import Optimizers
from holdall.planning.machine.clock import Clock, fit_line
from holdall.planning.machine.hardware import Interaction, Layer, Line

WIDTHS = (16, 64, 256, 1024)
"""Numbers of inputs and of outputs of the layers that are timed."""
MAX_FLOPS = {"cpu": 1e12, "cuda": 1e16}
"""Operations a second that no core of a CPU and no GPU reaches: two to three times those of the fastest there are."""
MAX_BANDWIDTH = {"cpu": 2e12, "cuda": 4e13}
"""Bytes a second that no memory of a CPU or GPU delivers: several times those of the fastest there is."""
REPLAYS = 4
"""Repeats of a short operation inside the CUDA graph that is timed."""


def _batches(clock: Clock) -> tuple[int, ...]:
    """Batch sizes that are timed: from those that fit the caches to those that do not; fewer if it is late."""
    sizes = (512, 2048, 8192) if clock.device.type == "cpu" else (4096, 16384, 65536)
    return sizes[:2] if clock.hurries() else sizes


def _autocast(clock: Clock, precision: str) -> AbstractContextManager[Any]:
    """The autocast context of a precision, as training uses it."""
    return torch.autocast(clock.device.type, torch.bfloat16) if precision == "bf16" else nullcontext()


def precisions(clock: Clock) -> tuple[str, ...]:
    """Precisions that are timed. bf16 is left out on a CPU: without matrix units it takes many times as long."""
    return ("float32", "bf16") if clock.device.type == "cuda" else ("float32",)


def _least_seconds(clock: Clock, flop: float) -> float:
    """Least seconds of so many operations on numbers."""
    cores = available_cores() if clock.device.type == "cpu" else 1
    return flop / (cores * MAX_FLOPS[clock.device.type])


def layers(clock: Clock, of: Sequence[str] | None = None, *, quick: bool = False) -> Iterator[Layer]:
    """Seconds of linear layers in the precisions `of`, or in those of `precisions`; `quick` without the widest."""
    widths = WIDTHS[:-1:2] if clock.hurries() else WIDTHS[:-1] if quick else WIDTHS
    for precision, inputs, outputs in product(of or precisions(clock), widths, widths):
        taken = {str(size): time_layer(clock, inputs, outputs, size, precision) for size in _batches(clock)}
        yield Layer(inputs, outputs, taken, precision)


def time_layer(clock: Clock, inputs: int, outputs: int, size: int, precision: str) -> float:
    """Seconds of a linear layer with its ReLU, forward and backward, of a batch of `size` samples."""
    layer = mlp((inputs, outputs), last_activation=True, device=clock.device)
    x = torch.rand(size, inputs, device=clock.device, requires_grad=True)
    with torch.no_grad(), _autocast(clock, precision):
        grad = torch.rand_like(layer(x))

    def run() -> None:
        with _autocast(clock, precision):
            made = layer(x)
        made.backward(grad)
        layer.zero_grad()
        x.grad = None

    least, what = _least_seconds(clock, 6 * size * inputs * outputs), f"a layer of {inputs} x {outputs}"
    return clock.replayed(run, times=REPLAYS, least=least, what=what)


def interactions(clock: Clock, of: Sequence[str] | None, dims: Sequence[int]) -> Iterator[Interaction]:
    """Seconds of dot interactions in the precisions `of`, or in those of `precisions`."""
    vectors_timed = (9, 27) if clock.hurries() else (9, 27, 54)
    for precision, vectors, dim in product(of or precisions(clock), vectors_timed, dims):
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

            least = _least_seconds(clock, 3 * size * vectors * (vectors - 1) * dim)
            what = f"an interaction of {vectors} vectors of dim {dim}"
            taken[str(size)] = clock.replayed(run, times=REPLAYS, least=least, what=what)
        yield Interaction(vectors, dim, taken, precision)


def dense_updates(clock: Clock) -> dict[str, Line]:
    """Cost of updating dense parameters by optimizer, fitted to MLPs of two sizes."""
    found = {}
    for name in MEASURED:
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
                taken.append(
                    max(1e-9, clock.replayed(update, times=REPLAYS) - clock.replayed(gradients, times=REPLAYS))
                )
            else:
                taken.append(clock(lambda _, optimizers=optimizers: optimizers.step(), gradients))
        found[name] = fit_line(sizes, taken)
    return found


def stacking(clock: Clock) -> dict[str, Line]:
    """Cost of stacking vectors of several kinds of tables into one tensor, and of the backward, by numbers.

    On a GPU every kernel writes its slice of one output, and nothing has to be stacked.
    """
    if clock.device.type == "cuda":
        return {"forward": Line(), "backward": Line()}
    sizes, forward, both = [], [], []
    for size in _batches(clock):
        packed = torch.rand(size, 21, 16, device=clock.device, requires_grad=True)
        others = [torch.rand(size, 16, device=clock.device, requires_grad=True) for _ in range(5)]
        grad = torch.rand(size, 26, 16, device=clock.device)

        def stack(packed: Tensor = packed, others: list[Tensor] = others) -> Tensor:
            return torch.stack([*packed.unbind(1), *others], dim=1)

        def stack_and_backward(
            stack: Callable[[], Tensor] = stack, grad: Tensor = grad, packed: Tensor = packed
        ) -> None:
            stack().backward(grad)
            packed.grad = None

        sizes.append(grad.numel())
        forward.append(clock(stack))
        both.append(clock(stack_and_backward))
    back = [max(0.0, whole - part) for whole, part in zip(both, forward, strict=True)]
    return {"forward": fit_line(sizes, forward), "backward": fit_line(sizes, back) if all(back) else Line()}


def read_cost(clock: Clock) -> Line:
    """Cost of a batch that a thread reads, as the loader does, and whose ids the training thread checks, by numbers."""
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
    """Part of the shorter of two concurrent stages that is hidden: matrix products, and a thread that gathers rows on
    the host. 1 on a GPU, which computes beside the host."""
    if clock.device.type == "cuda":
        return 1.0
    a, table, rows = torch.rand(1024, 1024), torch.ones(1 << 20, 16), torch.randint(0, 1 << 20, (1 << 16,))

    def compute() -> None:
        for _ in range(4):
            torch.mm(a, a)

    def gather() -> None:
        for _ in range(4):
            table.index_select(0, rows)

    compute_seconds, gather_seconds = clock(compute), clock(gather)
    with ThreadPoolExecutor(1) as thread:

        def both() -> None:
            gathering = thread.submit(gather)
            compute()
            gathering.result()

        concurrent_seconds = clock(both)
    hidden = compute_seconds + gather_seconds - concurrent_seconds
    return float(np.clip(hidden / min(compute_seconds, gather_seconds), 0.0, 1.0))


def call_cost(clock: Clock) -> float:
    """Seconds of a small operation on the device."""
    x = torch.zeros(1, device=clock.device)

    def run() -> None:
        for _ in range(100):
            x.add_(1)

    return clock(run) / 100


def stream_cost(clock: Clock) -> float:
    """Bytes a second of an operation that reads and writes memory in order, on the device."""
    x = torch.zeros(1 << 24, device=clock.device)
    least = 2 * x.nbytes / MAX_BANDWIDTH[clock.device.type]
    return 2 * x.nbytes / clock(lambda: x.mul_(1.5), least=least, what=f"writing {readable_bytes(x.nbytes)} in order")
