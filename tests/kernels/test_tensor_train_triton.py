"""The tensor-train kernels in Triton's interpreter, on small shapes: `TRITON_INTERPRET=1 pytest tests/kernels`."""

from __future__ import annotations

import pytest
import torch

from holdall.common.errors import ConfigError
from holdall.data.batch import Ids
from holdall.embedding.bags import EmbeddingBags
from holdall.kernels.dispatch import HAS_TRITON, INTERPRETED, kernel_path
from holdall.kernels.tensor_train import tensor_train_rows
from holdall.tables import TensorRing, TensorTrain

if not HAS_TRITON:
    pytest.skip("Triton is not installed", allow_module_level=True)
if not INTERPRETED:
    pytest.skip("Triton's interpreter is off: set TRITON_INTERPRET=1", allow_module_level=True)

from tests.kernels import train_checks as checks
from tests.kernels.triton_checks import second_derivatives

CHAINS: dict[str, checks.Chain] = {
    "odd": ((5, 4, 6), (2, 3, 2), (1, 3, 20, 1)),
    "prime": ((7, 13, 11), (1, 5, 3), (1, 2, 3, 1)),
    "a long inner core": ((3, 40, 2), (2, 2, 2), (1, 17, 16, 1)),
    "a single row": ((1, 1, 1), (2, 1, 2), (1, 2, 2, 1)),
    "more than one tile": ((9, 2, 7), (4, 4, 4), (1, 8, 40, 1)),
}
PAIR: list[checks.Chain] = [((5, 4, 6), (2, 2, 4), (1, 3, 5, 1)), ((2, 9, 3), (2, 2, 4), (1, 7, 18, 1))]


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of the least size, so that all work spans many of them."""
    from holdall.kernels import tensor_train_layout_triton, tensor_train_sums_triton
    from holdall.kernels.tensor_train_products_triton import TILES

    for name, size in {"BLOCK": 16, "PIECE": 4, "WINDOW": 8}.items():
        monkeypatch.setattr(tensor_train_layout_triton, name, size)
    monkeypatch.setattr(tensor_train_sums_triton, "COLUMNS", 64)
    monkeypatch.setattr(tensor_train_sums_triton, "ITEMS", 4)
    for tile in TILES.values():
        for name, size in {"rows": 16, "columns": 16, "inner": 16, "ids": 4, "programs": 3}.items():
            if name in tile:
                monkeypatch.setitem(tile, name, size)


@pytest.mark.parametrize("kind", ["random", "one row", "long runs", "distinct"])
def test_any_repetition(kind: str) -> None:
    checks.check_rows([CHAINS["odd"]], 37, kind)


@pytest.mark.parametrize("name", CHAINS)
def test_any_shape(name: str) -> None:
    checks.check_rows([CHAINS[name]], 19)


@pytest.mark.parametrize(
    ("num_lookups", "index"), [(1, torch.int64), (2, torch.int32), (16, torch.int64), (65, torch.int32)]
)
def test_any_number_of_lookups(num_lookups: int, index: torch.dtype) -> None:
    checks.check_rows([CHAINS["odd"]], num_lookups, index=index)


def test_ids_past_two_billion() -> None:
    """Forward alone: the gradients of 8,000 slices take a minute here."""
    train = checks.random_cores(((4000, 150, 4000), (2, 1, 2), (1, 2, 3, 1)), torch.Generator().manual_seed(0), "cpu")
    ids = torch.tensor([4000 * 150 * 4000 - 1, 0, 2**31 - 1, 2**31, 2**31 + 1])
    with torch.no_grad():
        found = tensor_train_rows(ids, train, "triton")
        assert checks.error(found, checks.expected_rows([ids], [[core.double() for core in train]])) < checks.TOLERANCE


def test_several_trains_of_different_shapes_in_one_call() -> None:
    checks.check_rows([*PAIR, PAIR[0]], 11, "long runs")


@pytest.mark.parametrize(("mean", "weighted"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("num_trains", [1, 2])
def test_bags(num_trains: int, mean: bool, weighted: bool) -> None:
    checks.check_bags(PAIR[:num_trains], 5, mean=mean, weighted=weighted)


@pytest.mark.parametrize("bags", ["none", "sum", "weighted", "mean"])
def test_second_derivatives(bags: str) -> None:
    from holdall.kernels.tensor_train_triton import train_vectors

    offsets = None if bags == "none" else torch.tensor([0, 2, 2, 4, 7, 9, 10])
    weights = torch.rand(10) if bags == "weighted" else None
    ids = torch.tensor([0, 53, 53, 7, 10, 9, 0, 53, 3, 3])
    if offsets is None:
        ids = torch.cat([ids[:5], ids[5:].clamp(max=53)])
    generator = torch.Generator().manual_seed(0)
    trains = [checks.random_cores(chain, generator, "cpu") for chain in PAIR]
    cores = [core for train in trains for core in train]
    found = second_derivatives(train_vectors(ids, trains, offsets, weights, mean=bags == "mean"), cores)
    exact = [[core.detach().double().requires_grad_() for core in train] for train in trains]
    split = 5 if offsets is None else 4
    rows = checks.expected_rows([ids[:split], ids[split:]], exact)
    if offsets is not None:
        scale = None if weights is None else weights.double()
        sizes = offsets.diff()
        bag = torch.repeat_interleave(sizes)
        scale = (
            sizes.double().reciprocal()[bag] if bags == "mean" else torch.ones(10).double() if scale is None else scale
        )
        pooled = rows.new_zeros(6, rows.shape[1]).index_add(0, bag, rows * scale[:, None])
        rows = pooled.view(2, 3, -1).transpose(0, 1)
    expected = second_derivatives(rows, [core for train in exact for core in train])
    for ours, wanted in zip(found, expected, strict=True):
        assert checks.error(ours, wanted) < 1e-5


def test_nothing_looked_up() -> None:
    from holdall.kernels.tensor_train_triton import train_vectors

    trains = [checks.random_cores(chain, torch.Generator().manual_seed(0), "cpu") for chain in PAIR]
    empty = torch.zeros(0, dtype=torch.int64)
    assert train_vectors(empty, trains).shape == (0, 16)
    pooled = train_vectors(empty, trains, torch.zeros(2 * 3 + 1, dtype=torch.int64))
    assert torch.equal(pooled, torch.zeros(3, 2, 16))
    grads = torch.autograd.grad(pooled.sum(), trains[1])
    assert all(torch.equal(grad, torch.zeros_like(core)) for grad, core in zip(grads, trains[1], strict=True))


def test_no_gradient_leaves_nothing_behind() -> None:
    train = checks.random_cores(CHAINS["odd"], torch.Generator().manual_seed(0), "cpu")
    with torch.no_grad():
        rows = tensor_train_rows(torch.arange(20), train, "triton")
    assert rows.grad_fn is None
    torch.testing.assert_close(rows, tensor_train_rows(torch.arange(20), train, "reference").detach())


def test_cores_that_do_not_lie_in_order() -> None:
    train = checks.random_cores(CHAINS["odd"], torch.Generator().manual_seed(0), "cpu")
    strided = [core.detach().transpose(1, 3).contiguous().transpose(1, 3).requires_grad_() for core in train]
    ids = torch.arange(0, 120, 7)
    results = []
    for cores in (train, strided):
        rows = tensor_train_rows(ids, cores, "triton")
        results.append([rows.detach(), *torch.autograd.grad(rows.square().sum(), cores)])
    for found, expected in zip(*results, strict=True):
        assert torch.equal(found, expected)


def test_what_does_not_fit_is_an_error_when_asked_for() -> None:
    two = [torch.randn(7, 1, 3, 4), torch.randn(9, 4, 2, 1)]
    ring = [torch.randn(5, 2, 2, 3), torch.randn(4, 3, 3, 4), torch.randn(6, 4, 2, 2)]
    wide = [core.detach().double() for core in checks.random_cores(CHAINS["odd"], torch.Generator(), "cpu")]
    for cores in (two, ring, wide):
        with pytest.raises(ConfigError, match="tensor-train lookup was asked to use Triton"):
            tensor_train_rows(torch.arange(3), cores, "triton")
        with kernel_path("triton"), pytest.raises(ConfigError, match="do not take"):
            tensor_train_rows(torch.arange(3), cores)
        assert tensor_train_rows(torch.arange(3), cores).shape[0] == 3
    with kernel_path("triton"), pytest.raises(ConfigError, match="do not take"):
        TensorRing(rank=2).build(50, 8)(torch.arange(4)[:, None])


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_a_table_on_both_paths(mode: str) -> None:
    table = TensorTrain(rank=5).build(200, 12, mode=mode, generator=torch.Generator().manual_seed(0))
    ids = torch.tensor([0, 199, 3, 3, 3, 117, 0, 42])
    offsets = torch.tensor([0, 3, 3, 7])
    weights = torch.rand(8) if mode == "sum" else None
    calls = {
        "bags": lambda: table(ids, offsets, weights),
        "two a bag": lambda: table(ids.view(4, 2)),
        "one a bag": lambda: table(ids[:, None].int()),
        "rows": lambda: table.rows(ids.view(2, 4)),
    }
    for name, call in calls.items():
        results = []
        for path in ("triton", "torch"):
            with kernel_path(path):
                out = call()
                grads = torch.autograd.grad(out.square().sum(), list(table.cores))
            results.append([out.detach(), *grads])
        for found, expected in zip(*results, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6, msg=name)


def test_weights_that_learn_and_padding() -> None:
    table = TensorTrain(rank=4).build(90, 8, padding_idx=3, generator=torch.Generator().manual_seed(0))
    weights = torch.rand(2, 3, requires_grad=True)
    results = []
    for path in ("triton", "torch"):
        with kernel_path(path):
            out = table(torch.tensor([[1, 3, 89], [3, 3, 2]]), None, weights)
            results.append([out.detach(), *torch.autograd.grad(out.square().sum(), (weights, *table.cores))])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    assert float(results[0][1][0, 1]) == 0.0  # padding


@pytest.mark.parametrize("kind", ["one-hot", "bags", "weighted bags"])
def test_all_tables_of_a_model(kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    cardinalities = {"a": 300, "b": 20, "c": 75}
    bags = EmbeddingBags.build(cardinalities, 8, TensorTrain(rank=9), generator=generator)
    ranks = {tuple(core.shape[3] for core in bags.table(name).cores) for name in cardinalities}
    assert len(ranks) > 1  # small tables have cut ranks
    if kind == "one-hot":
        ids = Ids(torch.stack([torch.randint(rows, (11,)) for rows in cardinalities.values()]), None, 3)
    else:
        lengths = torch.randint(0, 4, (3, 11))
        totals = zip(cardinalities.values(), lengths.sum(1).tolist(), strict=True)
        values = torch.cat([torch.randint(rows, (count,)) for rows, count in totals])
        weights = torch.rand(len(values)) if kind == "weighted bags" else None
        ids = Ids(values, torch.nn.functional.pad(lengths.flatten().cumsum(0), (1, 0)), 3, weights)
    results = []
    for path in ("triton", "torch"):
        with kernel_path(path):
            out = bags(ids)
            results.append([out.detach(), *torch.autograd.grad(out.square().sum(), list(bags.parameters()))])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
