"""The Triton kernels on a GPU: the interpreter's checks at larger sizes, determinism, past 2^31 elements, steps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from holdall.data.batch import Ids
from holdall.embedding.bags import EmbeddingBags
from holdall.evaluation.metrics import BinaryMetrics
from holdall.kernels.dispatch import HAS_TRITON, kernel_path
from holdall.kernels.row_gradient import RowGradient
from holdall.kernels.row_update import UpdateRule, UpdateScalars
from holdall.optim.config import OptimizerConfig
from holdall.optim.optimizer_kinds import NAMES, OPTIMIZER_KINDS
from holdall.optim.optimizers import Optimizers
from holdall.training.config import TrainConfig
from holdall.training.tracking import read_metrics
from holdall.training.train import train

if not torch.cuda.is_available():
    pytest.skip("there is no GPU", allow_module_level=True)
if not HAS_TRITON:
    pytest.skip("Triton is not installed", allow_module_level=True)

from tests.kernels import triton_checks as checks


@pytest.mark.parametrize("optimizer", OPTIMIZER_KINDS)
@pytest.mark.parametrize("dim", [100, 128])
@pytest.mark.parametrize("kind", ["random", "one row", "long runs", "distinct"])
def test_updates(optimizer: str, dim: int, kind: str) -> None:
    for num_lookups in (33, 20_011):
        checks.check_update(
            optimizer, num_lookups=num_lookups, num_rows=20_021, dim=dim, kind=kind, device="cuda", seed=num_lookups
        )


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16])
def test_updates_from_bags(weighted: bool, grad_dtype: torch.dtype) -> None:
    checks.check_update(
        "adagrad", num_lookups=5000, num_rows=90, dim=64, bags=701, weighted=weighted, grad_dtype=grad_dtype,
        device="cuda",
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize(("size", "num_vectors", "dim"), [(1001, 27, 128), (77, 9, 3), (31, 33, 130), (3, 1, 8)])
def test_interaction(size: int, num_vectors: int, dim: int, dtype: torch.dtype, first: bool) -> None:
    if first and num_vectors == 1:
        pytest.skip("nothing is left beside the first vector")
    checks.check_interaction(size, num_vectors, dim, dtype, first=first, device="cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [5, 128])
def test_gather(dtype: torch.dtype, dim: int) -> None:
    checks.check_gather((1003, 26), 100_000, dim, dtype, device="cuda")


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("mean", [False, True])
def test_pool(weighted: bool, mean: bool) -> None:
    checks.check_pool(5, 1003, 128, weighted=weighted, mean=mean, device="cuda")


def test_updates_are_bit_equal_over_repeats() -> None:
    from holdall.kernels.row_update_triton import update_rows

    ids = (torch.rand(300_000, device="cuda") ** 8 * 1000).int()
    gradient = RowGradient(ids, torch.randn(300_000, 128, device="cuda"))
    results = []
    for _ in range(5):
        weight, state = torch.zeros(1000, 128, device="cuda"), torch.zeros(1000, 128, device="cuda")
        update_rows(UpdateRule.ADAGRAD, weight, [state], gradient, UpdateScalars(lr=0.1, eps=1e-8))
        results.append(weight)
    assert all(torch.equal(result, results[0]) for result in results)


def test_past_two_billion_elements() -> None:
    from holdall.kernels.lookup_triton import gather
    from holdall.kernels.row_update_triton import update_rows

    num_rows, dim = 2**31 // 64 + 1000, 64
    storage = torch.zeros(num_rows, dim, device="cuda", dtype=torch.bfloat16)
    ids = torch.tensor([num_rows - 1, 3, num_rows - 1], device="cuda")
    gradient = RowGradient(ids, torch.ones(3, dim, device="cuda"))
    update_rows(UpdateRule.SGD, storage, [], gradient, UpdateScalars(lr=0.5))
    assert gather(storage, ids, torch.float32).mean(1).tolist() == [-1.0, -0.5, -1.0]
    assert float(storage.sum(dtype=torch.float64)) == -1.5 * dim


def test_stochastic_rounding_keeps_small_updates() -> None:
    from holdall.kernels.row_update_triton import update_rows
    from holdall.kernels.stochastic import keys

    weight = torch.ones(2000, 64, device="cuda", dtype=torch.bfloat16)
    gradient = RowGradient(torch.arange(2000, device="cuda"), torch.ones(2000, 64, device="cuda"))
    for step in range(10):
        update_rows(UpdateRule.SGD, weight, [], gradient, UpdateScalars(lr=1e-4, rounding=keys(0, step)))
    assert abs(float(weight.double().mean()) - (1 - 10 * 1e-4)) < 1e-4  # rounded to nearest, it would still be 1


def batch_of(kind: str, step: int) -> Ids:
    generator = torch.Generator().manual_seed(step)
    if kind == "one-hot":
        return Ids(torch.randint(7, (2, 50), generator=generator).cuda(), None, 2)
    lengths = torch.randint(0, 4, (2 * 50,), generator=generator)
    values = torch.randint(7, (int(lengths.sum()),), generator=generator)
    weights = torch.rand(values.numel(), generator=generator).cuda() if kind == "weighted bags" else None
    return Ids(values.cuda(), torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).cuda(), 2, weights)


@pytest.mark.parametrize("optimizer", NAMES)
@pytest.mark.parametrize(("kind", "mode"), [("one-hot", "sum"), ("bags", "mean"), ("weighted bags", "sum")])
def test_whole_steps_equal_plain_torch(optimizer: str, kind: str, mode: str) -> None:
    results = []
    for path in ("triton", "torch"):
        with kernel_path(path):
            bags = EmbeddingBags.build(
                {"a": 50, "b": 7}, 24, mode=mode, device="cuda", generator=torch.Generator("cuda").manual_seed(0)
            )
            optimizers = Optimizers(bags, OptimizerConfig(name=optimizer, lr=0.1))
            for step in range(3):
                bags(batch_of(kind, step)).square().sum().backward()
                optimizers.step()
            results.append(bags.packs[0].storage)
    torch.testing.assert_close(
        *results, rtol=2e-5, atol=1e-5
    )  # of updates of 0.1: adam's are as large for any gradient


def test_a_step_does_not_wait_for_the_device() -> None:
    bags = EmbeddingBags.build({"a": 50, "b": 7}, 24, device="cuda")
    optimizers = Optimizers(bags, OptimizerConfig(name="rowwise_adagrad"))
    batches = [batch_of(kind, 1) for kind in ("one-hot", "bags", "weighted bags")]

    def steps() -> None:
        for ids in batches:
            bags(ids).square().sum().backward()
            optimizers.step()

    steps()
    torch.cuda.set_sync_debug_mode("error")
    try:
        steps()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_metrics_do_not_wait_for_the_device() -> None:
    logits = torch.randn(1 << 18, generator=torch.Generator().manual_seed(0)) * 1e-4
    labels = (logits + logits.roll(1) > 0).float()
    here, there = BinaryMetrics(), BinaryMetrics(device="cuda")
    batches = [(logits.cuda(), labels.cuda()), ((logits * 1e9).cuda(), labels.cuda())]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in batches:
            there.update(*batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for batch in batches:
        here.update(batch[0].cpu(), batch[1].cpu())
    expected, found = here.compute(), there.compute()
    assert (found["auc"], found["auc_error_bound"]) == (expected["auc"], expected["auc_error_bound"])
    assert found == pytest.approx(expected)


@pytest.mark.parametrize(("precision", "tolerance"), [("float32", 1e-4), ("bf16", 1e-2)])
def test_training_on_both_paths_is_one_curve(data: Path, tmp_path: Path, precision: str, tolerance: float) -> None:
    config = TrainConfig.of(dim=16, bottom=(32,), top=(32,), batch_size=128, log_every=5, epochs=2, device="cuda")
    curves = []
    for path in ("triton", "torch"):
        with kernel_path(path):
            train(data, tmp_path / path, config.replace(precision=precision), quiet=True)
        curves.append([row["loss"] for row in read_metrics(tmp_path / path) if row["split"] == "train"])
    assert len(curves[0]) == 10
    assert curves[0][-1] < curves[0][0]
    torch.testing.assert_close(torch.tensor(curves[0]), torch.tensor(curves[1]), rtol=tolerance, atol=0.0)


def test_interaction_compiles_with_its_gradient() -> None:
    from holdall.kernels.interaction import dot_interaction

    vectors = torch.randn(64, 26, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    first = torch.randn(64, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    results = []
    for function in (dot_interaction, torch.compile(dot_interaction, fullgraph=True)):
        out = function(vectors, first)
        results.append([out, *torch.autograd.grad(out.float().square().sum(), (vectors, first))])
    for found, expected in zip(*results, strict=True):
        assert torch.equal(found, expected)
