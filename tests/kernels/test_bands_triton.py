"""The lookup in bands in Triton's interpreter: rows, edges, types, gradients and steps equal plain torch."""

from __future__ import annotations

import pytest
import torch
from torch.func import functional_call

from holdall.common.errors import ConfigError
from holdall.kernels.dispatch import HAS_TRITON, INTERPRETED, kernel_path

if not HAS_TRITON:
    pytest.skip("Triton is not installed", allow_module_level=True)
if not INTERPRETED:
    pytest.skip("Triton's interpreter is off: set TRITON_INTERPRET=1", allow_module_level=True)

from holdall.embedding.bags import EmbeddingBags
from holdall.embedding.dense_frobenius_lookup import DenseFrobeniusPlan
from holdall.kernels import bands_triton
from holdall.kernels.bands import FLOATS
from holdall.tables import Bands, Quantized, Shared
from tests.kernels import bands_checks as checks


@pytest.mark.parametrize("dim", [1, 4, 7, 8, 16, 64, 128])
def test_every_id(dim: int) -> None:
    checks.check_every_id(dim, torch.float32, torch.float32)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("out_dtype", FLOATS)
def test_types(dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    checks.check_every_id(16, dtype, out_dtype)


def test_several_programs_of_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bands_triton, "ELEMENTS", 64)
    checks.check_every_id(16, torch.float32, torch.float32)


def test_past_two_billion_rows() -> None:
    checks.check_far_rows()


@pytest.mark.parametrize(
    ("optimizer", "size"),
    [("sgd", 21), ("adagrad", 3), ("adam", 3), ("adam", 64)],
)
def test_steps_equal_plain_torch(optimizer: str, size: int) -> None:
    """With fewer lookups than codewords, and with more, which are summed: lazy optimizers touch the same rows."""
    both = [checks.steps(path, optimizer, size=size) for path in ("triton", "torch")]
    for found, expected in zip(*both, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-6)


def test_one_launch_has_all_bands_and_the_tables_of_their_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = []
    write = bands_triton.BandLaunch.write

    def counted(self: bands_triton.BandLaunch, *args: torch.Tensor) -> None:
        launches.append(self)
        write(self, *args)

    monkeypatch.setattr(bands_triton.BandLaunch, "write", counted)
    bags = checks.build()
    with kernel_path("triton"), torch.no_grad():
        found = bags(checks.some_ids(9, 0))
        bags(checks.some_ids(9, 1))
    assert len(launches) == 2
    assert launches[0] is launches[1]
    assert launches[0].columns[:, :2].tolist() == [[i, i] for i in range(1, 6)]  # a, g and h are of other kinds
    with torch.no_grad():
        torch.testing.assert_close(found, bags(checks.some_ids(9, 0)))


def test_tables_that_move_or_change_are_found_again() -> None:
    bags = checks.build()
    ids = checks.some_ids(9, 0)
    with kernel_path("triton"), torch.no_grad():
        bags(ids)
        for parameter in bags.parameters():
            if not any(parameter is table.weight for pack in bags.packs for table in pack.tables.values()):
                parameter.data = parameter.data + 1
        found = bags(ids)
    with torch.no_grad():
        torch.testing.assert_close(found, bags(ids))
    with kernel_path("triton"), torch.no_grad():
        halves = bags.to(torch.bfloat16)(ids)
    assert halves.dtype == torch.bfloat16
    with torch.no_grad():
        torch.testing.assert_close(halves, bags(ids), rtol=3e-2, atol=3e-2)


def test_a_table_that_the_kernel_no_longer_takes_is_refused() -> None:
    bags = checks.build()
    with kernel_path("triton"), torch.no_grad():
        bags(checks.some_ids(9, 0))
        bags.table("d").double()
        with pytest.raises(ConfigError, match=r"a shared table was cast .* plan_lookups"):
            bags(checks.some_ids(9, 0))
        bags.plan_lookups()
        assert bags(checks.some_ids(9, 0)).dtype == torch.float64


def test_gradients_of_parameters_that_are_replaced_for_a_call() -> None:
    bags = checks.build()
    name = next(name for name, _ in bags.named_parameters() if "band4" in name)
    other = {name: torch.ones_like(bags.get_parameter(name)).requires_grad_()}
    gradients = []
    for path in ("torch", "triton"):
        with kernel_path(path):  # type: ignore[arg-type]
            vectors = functional_call(bags, other, (checks.some_ids(40, 0),))
            vectors.square().sum().backward()
        gradient = other[name].grad
        assert gradient is not None
        gradients.append(gradient.to_dense() if gradient.is_sparse else gradient)
        other[name].grad = None
    assert bool(gradients[0].any())
    torch.testing.assert_close(gradients[1], gradients[0])


def test_dense_gradients() -> None:
    gradients = []
    for path in ("torch", "triton"):
        bags = checks.build()
        for name in ("b", "c", "d"):
            bags.table(name).use_sparse_gradients(False)
        with kernel_path(path):  # type: ignore[arg-type]
            bags(checks.some_ids(40, 0)).square().sum().backward()
        gradients.append([p.grad for name in "bcd" for p in bags.table(name).parameters()])
    for expected, found in zip(*gradients, strict=True):
        assert expected is not None
        assert found is not None
        assert not found.is_sparse
        torch.testing.assert_close(found, expected)


def test_frozen_parameters_get_no_gradient() -> None:
    bags = checks.build()
    frozen = bags.table("d").get_parameter("stored").requires_grad_(False)
    with kernel_path("triton"):
        bags(checks.some_ids(9, 0)).sum().backward()
    assert frozen.grad is None
    assert bags.table("c").get_parameter("codebook.words").grad is not None


def test_tables_without_parameters_collect_gradients() -> None:
    """A backward pass reaches codes that train also where nothing else does."""
    pending = []
    for path in ("torch", "triton"):
        generator = torch.Generator().manual_seed(0)
        method = Quantized(8, rounding="stochastic", trainable=True)
        bags = EmbeddingBags.build({"a": 20}, 8, method, generator=generator)
        ids = checks.Ids(torch.tensor([[3, 3, 0, 19]]), None, 1)
        with kernel_path(path):  # type: ignore[arg-type]
            bags(ids).square().sum().backward()
        pending.append(bags.table("a").pending_gradient())  # type: ignore[operator]
    assert pending[0][0].tolist() == [0, 3, 19]
    for expected, found in zip(*pending, strict=True):
        torch.testing.assert_close(found, expected)


def test_an_empty_batch() -> None:
    bags = checks.build()
    with kernel_path("triton"):
        vectors = bags(checks.some_ids(0, 0))
        assert vectors.shape == (0, 8, 8)
        vectors.sum().backward()


def test_what_the_kernel_does_not_take_is_looked_up_by_torch() -> None:
    """Rows of float64, and padding, whose vector is 0."""
    method = Bands(((5, Quantized(8)), (None, Shared(1))))
    tables = {
        "double": method.build(20, 4, dtype=torch.float64),
        "padded": method.build(20, 4, dtype=torch.float64, padding_idx=7),
        "single": method.build(20, 4, dtype=torch.float64).to(torch.float32),
    }
    plan = DenseFrobeniusPlan(range(3), list(tables), tables, [])
    assert [source for _, source, _ in plan.bands.members] == [2]
    assert [position for position, _ in plan.rest] == [0, 1]
    padded = method.build(20, 4, padding_idx=7)
    bags = EmbeddingBags({"a": padded})
    with kernel_path("triton"), torch.no_grad():
        found = bags(checks.Ids(torch.tensor([[7, 6]]), None, 1))
    assert not found[0].any()
    torch.testing.assert_close(found[1, 0], padded.materialize(torch.tensor(6)))
