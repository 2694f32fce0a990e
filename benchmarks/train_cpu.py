"""Training speed of DLRM Criteo Kaggle on the CPU, against the plain torch loop, side by side.

    python -m benchmarks.train_cpu [--steps 30] [--batch-size 2048]

Both sides start from the same weights and read the same batches of skewed ids; their losses must agree. The plain loop
is what a good engineer writes first: one `nn.EmbeddingBag(sparse=True)` a feature, torch's optimizer over everything.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.card import alternate, print_table, summary, write_card
from holdall.data.batch import Batch, Ids
from holdall.data.schema import DenseColumn, Feature, Schema
from holdall.data.synthetic import PRESETS
from holdall.data.zipf import Zipf
from holdall.models import DLRM, configuration
from holdall.optim.config import OptimizerConfig
from holdall.optim.optimizers import Optimizers
from holdall.runtime.allocator import keep_freed_memory
from holdall.tables import Frobenius, Method, TensorTrain

ROWS = PRESETS["criteo-kaggle"].cardinalities
NUM_DENSE = 13
LR = 0.01


class PlainDLRM(nn.Module):
    """DLRM as plain torch writes it, with the weights of one of ours."""

    def __init__(self, ours: DLRM):
        super().__init__()
        self.tables = nn.ModuleList()
        for name in ours.bags.features:
            weight = ours.bags.table(name).materialize()
            self.tables.append(nn.EmbeddingBag.from_pretrained(weight, freeze=False, mode="sum", sparse=True))
        self.bottom, self.top = _copy(ours.bottom), _copy(ours.top)
        self.row, self.column = torch.tril_indices(len(self.tables) + 1, len(self.tables) + 1, -1)
        self.top[0] = _narrow(self.top[0], model_width(ours))

    def forward(self, batch: Batch) -> Tensor:
        dense = self.bottom(batch.dense)
        offsets = torch.arange(len(batch))
        vectors = [table(batch.ids.values[i], offsets) for i, table in enumerate(self.tables)]
        stacked = torch.stack([dense, *vectors], dim=1)
        products = torch.bmm(stacked, stacked.transpose(1, 2))[:, self.row, self.column]
        return self.top(torch.cat([dense, products], dim=1)).squeeze(1)


def model_width(model: DLRM) -> int:
    """Inputs of the top MLP without the zeros that align it."""
    return model.config.dim + len(ROWS) * (len(ROWS) + 1) // 2


def _narrow(layer: nn.Linear, width: int) -> nn.Linear:
    """The same layer over its first `width` inputs."""
    narrowed = nn.Linear(width, layer.out_features)
    narrowed.load_state_dict({"weight": layer.weight[:, :width], "bias": layer.bias})
    return narrowed


def _copy(layers: nn.Sequential) -> nn.Sequential:
    copied: list[nn.Module] = []
    for layer in layers:
        if isinstance(layer, nn.Linear):
            copied.append(nn.Linear(layer.in_features, layer.out_features))
            copied[-1].load_state_dict(layer.state_dict())
        else:
            copied.append(nn.ReLU())
    return nn.Sequential(*copied)


def make_batches(count: int, batch_size: int, seed: int = 0) -> list[Batch]:
    """Batches of Zipf 1.05 ids over Criteo Kaggle's cardinalities, laid out as the loader lays them out."""
    rng = np.random.default_rng(seed)
    zipfs = [Zipf(num_ids, 1.05) for num_ids in ROWS]
    batches = []
    for _ in range(count):
        ids = np.stack([zipf.ranks(rng.random(batch_size)) for zipf in zipfs], axis=1).astype(np.int32)
        batches.append(
            Batch(
                dense=torch.from_numpy(rng.random((batch_size, NUM_DENSE), dtype=np.float32)),
                ids=Ids(torch.from_numpy(ids).t(), None, len(ROWS)),
                label=torch.from_numpy((rng.random(batch_size) < 0.25).astype(np.float32)),
            )
        )
    return batches


def build(method: dict[str, Method] | None = None) -> DLRM:
    schema = Schema(
        label="click",
        dense=tuple(DenseColumn(name=f"I{i + 1}") for i in range(NUM_DENSE)),
        features=tuple(Feature(name=f"C{i + 1}", num_rows=n, unseen=n - 1) for i, n in enumerate(ROWS)),
    )
    torch.manual_seed(0)
    return configuration("rmc2").build(schema, method)


class Side:
    """One contender: a model, its optimizer, and a step over the next batch."""

    def __init__(self, model: nn.Module, update: Callable[[], None], batches: list[Batch]):
        self.model, self.update, self.batches = model, update, batches
        self.losses: list[float] = []

    def __call__(self) -> None:
        batch = self.batches[len(self.losses) % len(self.batches)]
        loss = F.binary_cross_entropy_with_logits(self.model(batch), batch.label)
        self.losses.append(float(loss.detach()))
        loss.backward()
        self.update()


def ours(model: DLRM, optimizer: str, batches: list[Batch]) -> Side:
    return Side(model, Optimizers(model, OptimizerConfig(name=optimizer, lr=LR)).step, batches)  # type: ignore[arg-type]


def plain(model: DLRM, optimizer: str, batches: list[Batch]) -> Side:
    copy = PlainDLRM(model)
    if optimizer == "sgd":
        chosen: torch.optim.Optimizer = torch.optim.SGD(copy.parameters(), lr=LR)
    else:
        chosen = torch.optim.Adagrad(copy.parameters(), lr=LR, eps=1e-8)

    def update() -> None:
        chosen.step()
        chosen.zero_grad()

    return Side(copy, update, batches)


def fbgemm(model: DLRM, optimizer: str, batches: list[Batch]) -> Side | None:
    """The same model over fbgemm's table-batched CPU kernels, where they are installed."""
    try:
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice,
            SplitTableBatchedEmbeddingBagsCodegen,
        )
    except ImportError:
        return None
    kinds = {"sgd": "EXACT_SGD", "rowwise_adagrad": "EXACT_ROWWISE_ADAGRAD", "adagrad": "EXACT_ADAGRAD"}
    dim = model.config.dim
    tables = SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, dim, EmbeddingLocation.HOST, ComputeDevice.CPU) for rows in ROWS],
        optimizer=getattr(EmbOptimType, kinds[optimizer]),
        learning_rate=LR,
        eps=1e-8,
    )
    for weight, name in zip(tables.split_embedding_weights(), model.bags.features, strict=True):
        weight.data.copy_(model.bags.table(name).materialize())
    copy = PlainDLRM.__new__(PlainDLRM)
    nn.Module.__init__(copy)
    copy.bottom, copy.top = _copy(model.bottom), _copy(model.top)
    copy.top[0] = _narrow(copy.top[0], model_width(model))
    parameters = [*copy.bottom.parameters(), *copy.top.parameters()]
    kind = torch.optim.SGD if optimizer == "sgd" else torch.optim.Adagrad
    chosen = kind(parameters, lr=LR)
    num_vectors = len(ROWS) + 1
    row, column = torch.tril_indices(num_vectors, num_vectors, -1)

    class Model(nn.Module):
        def forward(self, batch: Batch) -> Tensor:
            values = batch.ids.values.long().reshape(-1)
            vectors = tables(values, torch.arange(values.numel() + 1)).view(len(batch), -1, dim)
            dense = copy.bottom(batch.dense)
            stacked = torch.cat([dense[:, None], vectors], dim=1)
            products = torch.bmm(stacked, stacked.transpose(1, 2))[:, row, column]
            return copy.top(torch.cat([dense, products], dim=1)).squeeze(1)

    def update() -> None:
        chosen.step()
        chosen.zero_grad()

    return Side(Model(), update, batches)


def flops_a_sample(model: DLRM) -> int:
    """Operations of a training step, a sample: three products a layer (two for the very first) and the pairs, twice."""
    layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
    total = sum(2 * 3 * layer.in_features * layer.out_features for layer in layers)
    total -= 2 * NUM_DENSE * layers[0].out_features  # nobody asks for the gradient of the dense input
    num_vectors = len(ROWS) + 1
    return total + 2 * 2 * num_vectors * num_vectors * model.config.dim


def peak_flops() -> float:
    """What this CPU does on a large float32 product, the best of ten."""
    a, b = torch.rand(2048, 2048), torch.rand(2048, 2048)
    best = 1e9
    for _ in range(10):
        start = time.perf_counter()
        a @ b
        best = min(best, time.perf_counter() - start)
    return 2 * 2048**3 / best


def stages(model: DLRM, optimizer: str, batches: list[Batch], repeats: int = 15) -> dict[str, float]:
    """Median milliseconds of each part of our step."""
    optimizers = Optimizers(model, OptimizerConfig(name=optimizer, lr=LR))  # type: ignore[arg-type]
    marks: dict[str, list[float]] = {}
    for i in range(repeats + 3):
        batch = batches[i % len(batches)]
        times = [time.perf_counter()]
        vectors = model.bags(batch.ids)
        times.append(time.perf_counter())
        leaf = vectors.detach().requires_grad_()
        loss = F.binary_cross_entropy_with_logits(model.score(batch.dense, leaf), batch.label)
        times.append(time.perf_counter())
        loss.backward()
        times.append(time.perf_counter())
        vectors.backward(leaf.grad)
        optimizers.step()
        times.append(time.perf_counter())
        names = ("tables forward", "dense forward", "dense backward", "all updates")
        if i >= 3:
            for name, (start, stop) in zip(names, pairwise(times), strict=True):
                marks.setdefault(name, []).append((stop - start) * 1e3)
    return {name: float(np.median(values)) for name, values in marks.items()}


def compare(optimizer: str, kinds: list[str], batches: list[Batch], repeats: int) -> dict[str, dict[str, float]]:
    """Samples/s of every side with one family of optimizers, checked to compute the same."""
    sides: dict[str, Side] = {"plain torch": plain(build(), optimizer, batches)}
    for kind in kinds:
        sides[f"holdall {kind}"] = ours(build(), kind, batches)
        other = fbgemm(build(), kind, batches)
        if other is not None:
            sides[f"fbgemm {kind}"] = other
    times = alternate(sides, repeats=repeats, warmup=3)
    # Adagrad's first update is lr * sign(g), whatever the size of g: rounding differences in tiny gradients grow from
    # step to step. The first steps agree to rounding, the later ones to a few percent of a percent.
    difference = np.abs(np.subtract(sides["plain torch"].losses, sides[f"holdall {optimizer}"].losses))
    assert difference[:5].max() < 1e-4, f"both sides must compute the same losses, not {difference[:5]} apart"
    assert difference.max() < 1e-2, f"both sides must compute the same losses, not {difference.max()} apart"
    size = len(batches[0])
    results = {}
    for name, taken in times.items():
        spread = summary([size / t for t in taken])
        results[name] = {**spread, "over_plain": float(np.median(times["plain torch"]) / np.median(taken))}
    return results


def compare_compressed(batches: list[Batch], repeats: int) -> dict[str, dict[str, float]]:
    """Our model with dense tables against itself with the five largest tables compressed."""
    largest = sorted(range(len(ROWS)), key=lambda i: -ROWS[i])[:5]
    kinds: dict[str, Method] = {"tensor train, rank 16": TensorTrain(rank=16), "frobenius (8, 4)": Frobenius(8, 4)}
    sides = {"dense": ours(build(), "sgd", batches)}
    for name, method in kinds.items():
        sides[name] = ours(build({f"C{i + 1}": method for i in largest}), "sgd", batches)
    times = alternate(sides, repeats=repeats, warmup=3)
    size = len(batches[0])
    return {
        name: {
            **summary([size / t for t in taken]),
            "over_dense": float(np.median(times["dense"]) / np.median(taken)),
            "table_bytes": sides[name].model.bags.num_bytes(),  # type: ignore[union-attr, operator]
        }
        for name, taken in times.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=2048)
    arguments = parser.parse_args()
    keep_freed_memory()  # for both sides: they share a process
    batches = make_batches(10, arguments.batch_size)
    results: dict[str, object] = {}
    rows = []
    for optimizer, kinds in (("sgd", ["sgd"]), ("adagrad", ["adagrad", "rowwise_adagrad"])):
        found = compare(optimizer, kinds, batches, arguments.steps)
        results[optimizer] = found
        rows += [{"optimizer": optimizer, "side": name, **values} for name, values in found.items()]
    print_table("samples/s", rows)
    results["compressed"] = compressed = compare_compressed(batches, arguments.steps)
    print_table("five largest tables compressed", [{"tables": name, **found} for name, found in compressed.items()])
    model = build()
    peak, needed = peak_flops(), flops_a_sample(model)
    parts = stages(model, "sgd", batches)
    ours_rate = results["sgd"]["holdall sgd"]["p50"]  # type: ignore[index]
    results["stages_ms"] = parts
    results["flops_a_sample"] = needed
    results["peak_gflops"] = peak / 1e9
    results["fraction_of_peak"] = ours_rate * needed / peak
    print_table("where a step goes (ms)", [parts])
    print(f"{needed / 1e6:.2f} MFLOP a sample; {ours_rate * needed / peak:.2f} of the CPU's {peak / 1e9:.0f} GFLOP/s")
    write_card("train_cpu", results)


if __name__ == "__main__":
    main()
