"""The tensor-train kernels on a GPU: the interpreter's checks at larger sizes, repeats, large ids, whole steps."""

from __future__ import annotations

import pytest
import torch

from holdall.data.batch import Ids
from holdall.embedding.bags import EmbeddingBags
from holdall.kernels.dispatch import HAS_TRITON, kernel_path
from holdall.kernels.tensor_train import tensor_train_rows
from holdall.optim.config import OptimizerConfig
from holdall.optim.optimizers import Optimizers
from holdall.tables import TensorTrain

if not torch.cuda.is_available():
    pytest.skip("there is no GPU", allow_module_level=True)
if not HAS_TRITON:
    pytest.skip("Triton is not installed", allow_module_level=True)

from tests.kernels import train_checks as checks

LARGE: checks.Chain = ((216, 215, 216), (4, 4, 4), (1, 64, 64, 1))
ODD: checks.Chain = ((50, 40, 60), (2, 3, 5), (1, 20, 33, 1))
PAIR: list[checks.Chain] = [((30, 20, 60), (4, 4, 4), (1, 7, 33, 1)), ((5, 20, 6), (4, 4, 4), (1, 64, 16, 1))]


@pytest.mark.parametrize("kind", ["random", "one row", "long runs", "distinct"])
@pytest.mark.parametrize("num_lookups", [1, 1023, 20_011])
def test_rows_and_gradients(num_lookups: int, kind: str) -> None:
    checks.check_rows([LARGE], num_lookups, kind, device="cuda", seed=num_lookups)


@pytest.mark.parametrize("kind", ["random", "long runs"])
def test_odd_shapes(kind: str) -> None:
    checks.check_rows([ODD], 3001, kind, device="cuda", index=torch.int32)
    checks.check_rows([((7, 3, 500), (1, 8, 16), (1, 130, 5, 1))], 3001, kind, device="cuda")


def test_several_trains_of_different_shapes_in_one_call() -> None:
    checks.check_rows(PAIR, 1501, device="cuda")
    checks.check_rows([*PAIR, PAIR[0]], 77, "long runs", device="cuda")


@pytest.mark.parametrize(("mean", "weighted"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("num_trains", [1, 2])
def test_bags(num_trains: int, mean: bool, weighted: bool) -> None:
    checks.check_bags(PAIR[:num_trains], 501, mean=mean, weighted=weighted, device="cuda")


def test_ids_past_two_billion() -> None:
    checks.check_rows([((2500, 2500, 2500), (4, 4, 4), (1, 16, 16, 1))], 3000, device="cuda")


def test_more_than_two_billion_numbers_in_a_buffer() -> None:
    """2^18 prefixes of 4*4*576 numbers each are 2.4 billion."""
    rank = 576
    generator = torch.Generator().manual_seed(0)
    cores = checks.random_cores(((700, 600, 2), (4, 4, 2), (1, rank, rank, 1)), generator, "cuda")
    ids = torch.randperm(700 * 600, generator=generator)[: 2**18].cuda() * 2
    with torch.no_grad():
        rows = tensor_train_rows(ids, cores, "triton")
        some = torch.cat([torch.arange(50), torch.arange(2**18 - 50, 2**18)]).cuda()
        for part in (some, ids.argsort()[-100:]):
            expected = checks.expected_rows([ids[part]], [[core.double() for core in cores]])
            assert checks.error(rows[part], expected) < checks.TOLERANCE


def test_bit_equal_over_repeats() -> None:
    cores = checks.random_cores(LARGE, torch.Generator().manual_seed(0), "cuda")
    ids = (torch.rand(50_000, device="cuda") ** 8 * 10_000_000).long()
    direction = torch.randn(50_000, 64, device="cuda")
    results = []
    for _ in range(5):
        rows = tensor_train_rows(ids, cores, "triton")
        results.append([rows.detach(), *torch.autograd.grad(rows, cores, direction)])
    for found in results[1:]:
        assert all(torch.equal(one, other) for one, other in zip(found, results[0], strict=True))


def test_tf32_where_torch_was_told_that_it_will_do() -> None:
    torch.set_float32_matmul_precision("high")
    try:
        checks.check_rows([LARGE], 2000, device="cuda", tolerance=2e-3)
        with pytest.raises(AssertionError):
            checks.check_rows([LARGE], 2000, device="cuda")
    finally:
        torch.set_float32_matmul_precision("highest")


def batch_of(kind: str, step: int) -> Ids:
    generator = torch.Generator().manual_seed(step)
    sizes = (3000, 70)
    if kind == "one-hot":
        return Ids(torch.stack([torch.randint(n, (500,), generator=generator) for n in sizes]).int().cuda(), None, 2)
    lengths = torch.randint(0, 4, (2, 500), generator=generator)
    totals = lengths.sum(1).tolist()
    values = torch.cat([torch.randint(n, (k,), generator=generator) for n, k in zip(sizes, totals, strict=True)])
    weights = torch.rand(len(values), generator=generator).cuda() if kind == "weighted bags" else None
    return Ids(values.cuda(), torch.nn.functional.pad(lengths.flatten().cumsum(0), (1, 0)).cuda(), 2, weights)


@pytest.mark.parametrize(("kind", "mode"), [("one-hot", "sum"), ("bags", "mean"), ("weighted bags", "sum")])
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
def test_whole_steps_equal_plain_torch(optimizer: str, kind: str, mode: str) -> None:
    results = []
    for path in ("triton", "torch"):
        with kernel_path(path):
            bags = EmbeddingBags.build(
                {"a": 3000, "b": 70}, 24, TensorTrain(rank=20), mode=mode, device="cuda",
                generator=torch.Generator("cuda").manual_seed(0),
            )  # fmt: skip
            optimizers = Optimizers(bags, OptimizerConfig(name=optimizer, lr=0.05))
            for step in range(3):
                bags(batch_of(kind, step)).square().sum().backward()
                optimizers.step()
            results.append(torch.cat([parameter.detach().flatten() for parameter in bags.parameters()]))
    torch.testing.assert_close(*results, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("num_tables", [1, 2])
def test_a_step_does_not_wait_for_the_device_and_fits_a_graph(num_tables: int) -> None:
    cardinalities = dict(list({"a": 3000, "b": 70}.items())[:num_tables])
    bags = EmbeddingBags.build(cardinalities, 24, TensorTrain(rank=20), device="cuda")
    optimizers = Optimizers(bags, OptimizerConfig(name="sgd", lr=0.01))
    ids = Ids(batch_of("one-hot", 0).values[:num_tables], None, num_tables)

    def step() -> None:
        bags(ids).square().sum().backward()
        optimizers.step()

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
        torch.cuda.set_sync_debug_mode("error")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.cuda.current_stream().wait_stream(stream)
    start = [parameter.detach().clone() for parameter in bags.parameters()]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    ids.values.copy_(batch_of("one-hot", 1).values[:num_tables])
    results = []
    for run in (graph.replay, step):
        with torch.no_grad():
            for parameter, value in zip(bags.parameters(), start, strict=True):
                parameter.copy_(value)
        run()
        results.append([parameter.detach().clone() for parameter in bags.parameters()])
    for found, expected, before in zip(*results, start, strict=True):
        assert torch.equal(found, expected)
        assert not torch.equal(found, before)
