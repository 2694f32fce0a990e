"""The lookup in bands on a GPU: every kind and edge, past 2^31, steps, CUDA graphs, and the rows of fitted tables."""

from __future__ import annotations

import pytest
import torch

from holdall.kernels.dispatch import HAS_TRITON, kernel_path

if not torch.cuda.is_available():
    pytest.skip("there is no GPU", allow_module_level=True)
if not HAS_TRITON:
    pytest.skip("Triton is not installed", allow_module_level=True)

from benchmarks.gpu_timing import captured
from holdall.data.batch import Ids
from holdall.embedding.bags import EmbeddingBags
from holdall.kernels.bands import FLOATS
from holdall.tables import Bands, Codes, Quantized, Shared
from tests.kernels import bands_checks as checks
from tests.kernels import code_rows_checks


@pytest.mark.parametrize("dim", [1, 4, 7, 8, 16, 64, 128])
def test_every_id(dim: int) -> None:
    checks.check_every_id(dim, torch.float32, torch.float32, "cuda")


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("out_dtype", FLOATS)
def test_types(dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    checks.check_every_id(64, dtype, out_dtype, "cuda")


def test_past_two_billion_rows() -> None:
    checks.check_far_rows("cuda")


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "adam"])
def test_steps_equal_plain_torch(optimizer: str) -> None:
    found, expected = checks.steps("triton", optimizer, "cuda"), checks.steps("torch", optimizer, "cuda")
    torch.testing.assert_close(found[0], expected[0], rtol=1e-2, atol=1e-2)  # codes that train may round otherwise
    assert all(bool(torch.isfinite(tensor).all()) for tensor in found)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dim", [1, 7, 16, 128])
def test_moved_codes_are_those_of_plain_torch(bits: int, dtype: torch.dtype, dim: int) -> None:
    code_rows_checks.check_moves(bits, dtype, dim, "cuda")


def banded() -> EmbeddingBags:
    """Three tables of 128 numbers a row in bands, on the GPU."""
    method = Bands(
        (
            (1_000, Quantized(8, scales="float16")),
            (5_000, Quantized(4, scales="float16")),
            (50_000, Codes(2, codebook="words")),
            (None, Shared(1)),
        )
    )
    rows = {"a": 100_000, "b": 700_000, "c": 3_000}
    return EmbeddingBags.build(rows, 128, method, device="cuda", generator=torch.Generator("cuda").manual_seed(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_many_samples(dtype: torch.dtype) -> None:
    """Against the rows that each table represents, in float64."""
    bags = banded()
    bags.vector_dtype = dtype
    limits = torch.tensor([[100_000], [700_000], [3_000]], device="cuda")
    values = (torch.rand(3, 20_011, device="cuda") ** 6 * limits).long()
    with kernel_path("triton"), torch.no_grad():
        found = bags(Ids(values, None, 3))
    assert found.dtype == dtype
    rows = [bags.table(name).materialize(line).double() for name, line in zip("abc", values, strict=True)]
    expected = torch.stack(rows, dim=1)
    error = float((found.double() - expected).norm() / expected.norm())
    assert error < checks.TOLERANCE[dtype]


def test_a_graph_looks_up_the_ids_of_each_replay() -> None:
    bags = banded()
    ids = torch.zeros(3, 4_096, dtype=torch.int32, device="cuda")

    def look_up() -> torch.Tensor:
        with kernel_path("triton"), torch.no_grad():
            return bags(Ids(ids, None, 3))

    replay = captured(look_up)
    ids.copy_(torch.randint(3_000, ids.shape, device="cuda"))
    found = replay().clone()
    torch.testing.assert_close(found, look_up(), rtol=0, atol=0)


def test_a_graph_of_a_backward_pass() -> None:
    """Nothing synchronizes, or the capture would fail."""
    bags = banded()
    words = bags.table("a").get_parameter("band2.codebook.words")
    ids = torch.randint(3_000, (3, 4_096), dtype=torch.int32, device="cuda")

    def step() -> torch.Tensor:
        with kernel_path("triton"):
            for parameter in bags.parameters():
                parameter.grad = None
            bags(Ids(ids, None, 3)).sum().backward()
            assert words.grad is not None
            return words.grad._values()

    replay = captured(step)
    ids.random_(1_000, 3_000)
    ids += 4_500 * (torch.arange(3, device="cuda", dtype=torch.int32) < 2)[:, None]
    found = replay().clone()
    torch.testing.assert_close(found, step())
