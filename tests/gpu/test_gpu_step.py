"""The whole training step on a GPU: a graph gives the same bits, nothing synchronizes, rows in two bytes."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from holdall.common.errors import ConfigError
from holdall.data.batch import Batch, Ids
from holdall.embedding.bags import EmbeddingBags
from holdall.kernels.dispatch import HAS_TRITON, kernel_path
from holdall.optim.config import OptimizerConfig
from holdall.optim.optimizer_kinds import OPTIMIZER_KINDS
from holdall.optim.optimizers import Optimizers
from holdall.runtime.batch_prefetch import prefetch_to_device
from holdall.runtime.cuda_graph import capture, forbid_synchronization
from holdall.tables import Frobenius, HotCold
from holdall.training.config import TrainConfig
from holdall.training.tracking import read_metrics
from holdall.training.train import train
from holdall.training.trainer import Trainer

if not torch.cuda.is_available():
    pytest.skip("there is no GPU", allow_module_level=True)
if not HAS_TRITON:
    pytest.skip("Triton is not installed", allow_module_level=True)

from tests.kernels import triton_checks as checks

SMALL = TrainConfig.of(
    dim=16, bottom=(32,), top=(32,), batch_size=128, log_every=1, epochs=2, lr=0.05, device="cuda", warmup_steps=4,
    decay_start=10, decay_steps=60,
)  # fmt: skip


def curve(run: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(run) if row["split"] == "train"]


def parameters(
    data: Path, run: Path, config: TrainConfig
) -> tuple[list[float], dict[str, torch.Tensor], dict[str, Any]]:
    """Losses, everything that a run changed, and what it says of itself."""
    trainer = None
    with kernel_path(config.device.kernels):
        trainer = Trainer(data, run, config, quiet=True)
        said = trainer.run()
    return curve(run), {name: tensor.clone() for name, tensor in trainer.checkpoints.tensors().items()}, said


@pytest.mark.parametrize(
    "options",
    [
        {"optimizer": "sgd"},
        {"optimizer": "sgd", "momentum": 0.9, "weight_decay": 0.001},
        {"optimizer": "adamw", "weight_decay": 0.01, "clip_norm": 0.05},
        {"optimizer": "adagrad", "clip_norm": 0.05},
        {"optimizer": "rowwise_adagrad", "precision": "bf16", "compile": True},
        {"optimizer": "adam", "table_dtype": "bf16", "stochastic_rounding": True},
    ],
    ids=lambda options: "-".join(str(value) for value in options.values()),
)
def test_a_graph_gives_the_same_bits(data: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    config = SMALL.replace(**options)
    losses, tensors, said = parameters(data, tmp_path / "graph", config.replace(cuda_graph="on"))
    expected_losses, expected, plain = parameters(data, tmp_path / "eager", config.replace(cuda_graph="off"))
    assert int(said["cuda_graph"].split()[0]) > 30
    assert "cuda_graph" not in plain
    assert losses == expected_losses
    assert losses[-1] < losses[0]
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    "options", [{"method": "frobenius"}, {"method": "hot_cold", "setting": ("hot_rows=20", "cold=frobenius")}]
)
def test_compressed_tables_in_a_graph(data: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    config = SMALL.replace(optimizer="sgd", min_rows=40, **options)
    losses, tensors, _ = parameters(data, tmp_path / "graph", config.replace(cuda_graph="on"))
    expected_losses, expected, _ = parameters(data, tmp_path / "eager", config.replace(cuda_graph="off"))
    plain_losses, plain, _ = parameters(data, tmp_path / "torch", config.replace(cuda_graph="off", kernels="torch"))
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected_losses), rtol=1e-5, atol=0.0)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(plain_losses), rtol=1e-3, atol=0.0)
    for name in expected:
        torch.testing.assert_close(tensors[name], expected[name], rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(tensors[name], plain[name], rtol=1e-2, atol=1e-3)


def test_graphs_that_cannot_be_had(data: Path, bag_data: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="features have several ids or weights"):
        train(bag_data, tmp_path / "bags", SMALL.replace(cuda_graph="on"), quiet=True)
    with pytest.raises(ConfigError, match="rows are not updated by Triton kernels"):
        train(data, tmp_path / "torch", SMALL.replace(cuda_graph="on", kernels="torch"), quiet=True)
    said = train(bag_data, tmp_path / "auto", SMALL, quiet=True)
    assert said["cuda_graph"] == "0 steps"
    said = train(
        data, tmp_path / "waits", SMALL.replace(method="memcom", setting=("buckets=9",), min_rows=40), quiet=True
    )
    assert "a step synchronizes with the device" in said["cuda_graph"]


class Owner:
    """Something that only a collection of garbage frees."""

    def __init__(self) -> None:
        self.itself = self


@pytest.mark.parametrize("has_stream", [False, True])
def test_garbage_waits_while_a_graph_is_captured(has_stream: bool) -> None:
    """Freeing it, which synchronizes, would break the capture."""
    number = torch.zeros(1, device="cuda")
    freed: list[int] = []

    def free() -> None:
        torch.cuda.synchronize()
        freed.append(1)

    def launch() -> None:
        number.add_(1)
        weakref.finalize(Owner(), free)
        made = [[place] for place in range(100_000)]  # more than what starts a collection
        number.add_(len(made))

    graph = capture(launch, stream=torch.cuda.Stream() if has_stream else None)
    assert not freed
    graph.replay()
    assert float(number) == 100_001
    gc.collect()
    assert freed


@pytest.mark.parametrize("name", ["sgd", "adagrad", "adam"])
def test_clipped_steps_of_compressed_tables_do_not_wait(name: str) -> None:
    methods = {"a": Frobenius(rank=4, terms=2), "b": HotCold(hot_rows=3, cold=Frobenius(rank=4, terms=2))}
    bags = EmbeddingBags.build({"a": 500, "b": 70, "c": 7}, 24, methods, device="cuda")
    optimizers = Optimizers(bags, OptimizerConfig(name=name))
    ids = Ids(torch.randint(7, (3, 50), device="cuda"), None, 3)

    def step() -> torch.Tensor:
        bags(ids).square().sum().backward()
        norm = optimizers.clip(0.01)
        optimizers.step()
        assert isinstance(norm, torch.Tensor)
        return norm

    step()
    with forbid_synchronization():
        norm = step()
    assert float(norm) > 0


def test_clipping_equals_plain_torch() -> None:
    results = []
    for path in ("triton", "torch"):
        with kernel_path(path):
            generator = torch.Generator("cuda").manual_seed(0)
            bags = EmbeddingBags.build({"a": 500, "b": 70}, 24, {"a": Frobenius()}, device="cuda", generator=generator)
            optimizers = Optimizers(bags, OptimizerConfig(name="sgd", lr=1.0))
            norms = []
            for seed in range(3):
                values = torch.randint(70, (2, 50), generator=torch.Generator().manual_seed(seed)).cuda()
                bags(Ids(values, None, 2)).sum().backward()
                norms.append(float(optimizers.clip(0.5)))
                optimizers.step()
        results.append([torch.tensor(norms), *(parameter.detach() for parameter in bags.parameters())])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad", "adam"])
def test_stochastic_rounding_is_that_of_plain_torch(optimizer: str, dtype: torch.dtype) -> None:
    checks.check_stochastic(optimizer, dtype, "cuda")


@pytest.mark.parametrize("optimizer", OPTIMIZER_KINDS)
def test_settings_on_the_device(optimizer: str) -> None:
    checks.check_settings_on_the_device(optimizer, "cuda")


@pytest.mark.parametrize("kind", ["one row", "long runs", "distinct"])
def test_norm_of_summed_gradients(kind: str) -> None:
    checks.check_norm(20_011, 20_021, 128, kind, "cuda")


def test_two_byte_tables_learn(data: Path, tmp_path: Path) -> None:
    curves = []
    for dtype in ("float32", "bf16", "fp16"):
        config = SMALL.replace(table_dtype=dtype, stochastic_rounding=dtype != "float32", kernels="triton")
        train(data, tmp_path / dtype, config, quiet=True)
        curves.append(torch.tensor(curve(tmp_path / dtype)))
    for found in curves[1:]:  # they start from other draws
        torch.testing.assert_close(found[-10:].mean(), curves[0][-10:].mean(), rtol=5e-2, atol=0.0)
        assert found[-10:].mean() < 0.98 * found[0]


def test_batches_come_in_order_and_a_bad_one_after_those_before() -> None:
    def batch(number: int) -> Batch:
        ids = Ids(torch.full((2, 5), number, dtype=torch.int32), None, 2)
        return Batch(torch.full((5, 3), float(number)), ids, torch.ones(5))

    def check(batch: Batch) -> None:
        if int(batch.ids.values[0, 0]) == 3:
            raise ConfigError("the third is bad")

    coming = prefetch_to_device((batch(n) for n in range(6)), torch.device("cuda"), check)
    for number in range(3):
        given, moved = next(coming)
        assert moved.dense.is_cuda
        assert torch.equal(moved.dense.cpu(), given.dense)
        assert int(moved.ids.values[1, 4]) == number
    with pytest.raises(ConfigError, match="the third is bad"):
        next(coming)
