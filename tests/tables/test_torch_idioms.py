"""One suite over every method: a table takes part in what PyTorch users do with an `nn.EmbeddingBag`."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holdall.common.errors import ConfigError
from holdall.tables import (
    Dense,
    Frobenius,
    Hashed,
    HotCold,
    Method,
    MixedDimension,
    Quantized,
    Robe,
    Sketch,
    Table,
    TensorTrain,
)
from holdall.tables.quantized import LearnedRoundingTable
from holdall.tables.robe import share_array
from tests.tables.cases import BAGS, CASES, FITTABLE, build, some_ids

methods = pytest.mark.parametrize("method", CASES.values(), ids=CASES.keys())

OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01),
    "Adagrad": torch.optim.Adagrad,
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
    "NAdam": torch.optim.NAdam,
    "RMSprop": torch.optim.RMSprop,
}


@methods
@pytest.mark.parametrize("mode", ["sum", "max"])
def test_gradients_are_dense_unless_sparse_is_asked_for(method: Method, mode: str) -> None:
    found = []
    for sparse in (False, True):
        table = build(method, mode=mode, sparse=sparse)
        rows = table.row_parameters()
        output = table(some_ids(37), BAGS[:-1])
        if output.requires_grad:
            (output.square().sum() + table.rows(torch.tensor([3])).square().sum()).backward()
        for name, parameter in table.named_parameters():
            assert parameter.grad is not None, name
            assert parameter.grad.is_sparse == (sparse and name in rows), name
        found.append([parameter.grad.to_dense() for parameter in table.parameters()])
    for dense, sparse_one in zip(*found, strict=True):
        torch.testing.assert_close(dense, sparse_one, rtol=1e-12, atol=1e-12)


@methods
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_of_torch_trains_a_table(method: Method, name: str) -> None:
    table = build(method)
    if not list(table.parameters()):
        pytest.skip("a frozen table, or one that applies gradients itself, has no parameters to train")
    optimizer = OPTIMIZERS[name](table.parameters())
    before = [parameter.detach().clone() for parameter in table.parameters()]
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = (table(some_ids(37), BAGS[:-1]) - 1).square().sum()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] != losses[0]
    assert any(not torch.equal(was, now) for was, now in zip(before, table.parameters(), strict=True))


@methods
def test_sparse_adam_trains_the_row_parameters(method: Method) -> None:
    table = build(method, sparse=True)
    rows = table.row_parameters()
    if not rows:
        pytest.skip("all parameters are small and have dense gradients")
    optimizer = torch.optim.SparseAdam(list(rows.values()), lr=0.1)
    before = [parameter.detach().clone() for parameter in rows.values()]
    table(some_ids(37), BAGS[:-1]).square().sum().backward()
    optimizer.step()
    assert any(not torch.equal(was, now) for was, now in zip(before, rows.values(), strict=True))


def test_parts_of_a_table_follow_its_choice() -> None:
    table = HotCold(hot_rows=5, cold=HotCold(hot_rows=5, cold=Dense())).build(37, 8)
    parameters = list(table.parameters())

    def kinds() -> list[bool]:
        table.zero_grad()
        table.rows(torch.arange(37)).sum().backward()
        return [gradient.is_sparse for gradient in gradients(parameters)]

    assert kinds() == [False] * 3
    table.use_sparse_gradients()
    assert kinds() == [True] * 3
    table.use_sparse_gradients(False)
    assert kinds() == [False] * 3


def gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


@methods
def test_only_a_dense_table_has_a_weight(method: Method) -> None:
    table = build(method)
    assert (table.num_embeddings, table.embedding_dim) == (37, 8)
    if isinstance(method, Dense):
        assert table.weight.shape == (37, 8)
        return
    assert not hasattr(table, "weight")
    with pytest.raises(AttributeError, match=rf"^a {method.name} table has no `weight`: .* materialize\(\)"):
        table.weight[torch.tensor([3])]
    output = nn.Linear(8, 37, bias=False)
    with pytest.raises(AttributeError, match="materialize"):
        output.weight = table.weight
    with pytest.raises(AttributeError, match="materialize"):
        table.weight = output.weight
    with pytest.raises(AttributeError, match="has no attribute 'wait'"):
        table.wait  # noqa: B018


@pytest.mark.parametrize("method", [Hashed(buckets=23), Quantized(rounding="learned", trainable=True)])
def test_state_dicts_keep_their_names(method: Method) -> None:
    """Checkpoints of earlier versions have numbers by these names."""
    table = build(method)
    assert next(iter(table.state_dict())) == next(name for name, _ in table.named_parameters()) == "weight"
    assert table.row_parameters()["weight"] is dict(table.named_parameters())["weight"]


@pytest.mark.parametrize("method", FITTABLE.values(), ids=FITTABLE.keys())
def test_a_padding_row_that_is_not_zero_stays_and_gets_no_gradient(method: Method) -> None:
    weight = torch.randn(37, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    table, free = (fitted(method, weight, padding_idx=padding) for padding in (36, None))
    assert torch.equal(table.materialize(), free.materialize())
    assert table.rows(torch.tensor(36)).abs().sum() > 0
    ids = some_ids(37)
    every = free.rows(torch.arange(37))
    expected = F.embedding(ids, every, padding_idx=36)
    found = table.rows(ids)
    torch.testing.assert_close(found, expected)
    if found.requires_grad:
        direction = torch.randn(9, 8, dtype=torch.float64)
        found.backward(direction)
        expected.backward(direction)
        for ours, wanted in zip(table.parameters(), free.parameters(), strict=True):
            zeros = torch.zeros_like(ours)
            given = (zeros if gradient is None else gradient for gradient in (ours.grad, wanted.grad))
            torch.testing.assert_close(*given, rtol=1e-9, atol=1e-11)


def fitted(method: Method, weight: Tensor, **options: object) -> Table:
    torch.manual_seed(0)
    return method.fit(weight, **options)


def test_optimizers_do_not_touch_the_padding_row() -> None:
    table = Dense().fit(torch.ones(37, 8), padding_idx=3, sparse=True)
    table.rows(torch.tensor([3, 4, 3])).sum().backward()
    (parameter,) = table.parameters()
    assert parameter.grad is not None
    assert parameter.grad._indices().tolist() == [[4]]


SEEDED = {
    "hashed": lambda seed: Hashed(buckets=23, seed=seed),
    "robe": lambda seed: Robe(size=300, block=4, seed=seed),
    "hot and hashed": lambda seed: HotCold(hot_rows=5, cold=Hashed(buckets=23, seed=seed)),
}


@pytest.mark.parametrize("make", SEEDED.values(), ids=SEEDED.keys())
def test_a_state_dict_of_another_hash_is_refused(make: Callable[[int], Method]) -> None:
    table, other, same = (build(make(seed)) for seed in (4, 5, 4))
    state = table.state_dict()
    before = other.materialize()
    name = next(name for name in state if name.endswith("hash_seed"))
    with pytest.raises(RuntimeError, match=rf"{name} is 4 in the state dict and 5 here: .* with seed=4"):
        other.load_state_dict(state)
    if not isinstance(other.method, HotCold):
        assert torch.equal(other.materialize(), before)
    with torch.no_grad():
        for parameter in same.parameters():
            parameter.zero_()
    same.load_state_dict(state)
    assert torch.equal(same.materialize(), table.materialize())


@pytest.mark.parametrize("make", SEEDED.values(), ids=SEEDED.keys())
def test_state_dicts_without_a_seed_load_as_before(make: Callable[[int], Method]) -> None:
    table, other = build(make(4)), make(4).build(37, 8, dtype=torch.float64)
    old = {name: value for name, value in table.state_dict().items() if not name.endswith("hash_seed")}
    assert set(old) == {name for name, _ in table.named_parameters()}
    other.load_state_dict(old)
    assert torch.equal(other.materialize(), table.materialize())


def test_tables_that_hash_nothing_have_no_seed() -> None:
    assert list(Hashed(buckets=40, seed=3).build(37, 8).state_dict()) == ["weight"]
    assert list(Sketch(dim=3, seed=4).build(37, 8).state_dict()) == ["stored", "transform"]


def test_shared_arrays_keep_the_seeds_of_their_tables() -> None:
    tables = nn.ModuleList([Robe(size=300, block=4).build(37, 8) for _ in range(2)])
    share_array(list(tables))
    state = tables.state_dict()
    assert [int(state[f"{place}.hash_seed"]) for place in range(2)] == [0, 1]
    alone = nn.ModuleList([Robe(size=300, block=4).build(37, 8) for _ in range(2)])
    with pytest.raises(RuntimeError, match=r"1\.hash_seed is 1 in the state dict and 0 here"):
        alone.load_state_dict(state)


LOOKUPS: dict[str, Callable[[Table], Tensor]] = {
    "rows": lambda table: table.rows(some_ids(11)),
    "few rows": lambda table: table.rows(torch.tensor([5])),
    "bags of one id": lambda table: table(some_ids(11)[:, None]),
    "bags": lambda table: table(some_ids(11), BAGS[:-1]),
}


def differentiates_bags(method: Method, use: str) -> bool:
    """Whether a lookup has second derivatives: torch's `embedding_bag` has none, and refuses."""
    if use in ("rows", "few rows"):
        return True
    if use == "bags":
        return isinstance(method, Frobenius) or (isinstance(method, MixedDimension) and method.bits is not None)
    return not isinstance(method, Dense | Hashed | MixedDimension) or getattr(method, "bits", None) is not None


@methods
@pytest.mark.parametrize("use", LOOKUPS)
def test_second_derivatives_are_right_or_refused(method: Method, use: str) -> None:
    table = build(method, 11, 4)
    names = [name for name, _ in table.named_parameters()]
    if not names or any(isinstance(part, LearnedRoundingTable) for part in table.modules()):
        pytest.skip(f"{method.name} has no parameter, or gradients that are estimates, by design")
    inputs = tuple(parameter.detach().clone().requires_grad_() for parameter in table.parameters())

    class Lookup(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = table

        def forward(self) -> Tensor:
            return LOOKUPS[use](self.table)

    def run(*values: Tensor) -> Tensor:
        replaced = {f"table.{name}": value for name, value in zip(names, values, strict=True)}
        return torch.func.functional_call(Lookup(), replaced, ())

    if differentiates_bags(method, use):
        assert torch.autograd.gradgradcheck(run, inputs, fast_mode=True)
    else:
        with pytest.raises(
            NotImplementedError, match="the derivative for '_embedding_bag_backward' is not implemented"
        ):
            torch.autograd.gradgradcheck(run, inputs, fast_mode=True)


@pytest.mark.parametrize("method", [TensorTrain(rank=4), Frobenius(), Robe(size=300, block=4)])
@pytest.mark.parametrize("sparse", [False, True])
def test_a_gradient_penalty_on_parameters(method: Method, sparse: bool) -> None:
    """The penalty's gradient for parameters alone, where no gradient flows into the lookup from above."""
    table = build(method, sparse=sparse)
    parameters = list(table.parameters())

    def penalty(*, create_graph: bool) -> Tensor:
        loss = table(some_ids(37)[:, None]).sum() + table.rows(some_ids(37)).square().sum()
        found = torch.autograd.grad(loss, parameters, create_graph=create_graph)
        return torch.stack([gradient.to_dense().square().sum() for gradient in found]).sum()

    slopes = torch.autograd.grad(penalty(create_graph=True), parameters)
    directions = [torch.randn_like(parameter) for parameter in parameters]
    sides = []
    for step in (1e-5, -2e-5):
        with torch.no_grad():
            for parameter, direction in zip(parameters, directions, strict=True):
                parameter.add_(direction, alpha=step)
        sides.append(float(penalty(create_graph=False)))
    found = sum(float((slope.to_dense() * way).sum()) for slope, way in zip(slopes, directions, strict=True))
    assert found == pytest.approx((sides[0] - sides[1]) / 2e-5, rel=1e-6)


def test_sparse_is_true_or_false() -> None:
    with pytest.raises(ConfigError, match="sparse must be True or False, not 'yes'"):
        TensorTrain(rank=2).build(37, 8, sparse="yes")


@methods
def test_a_negative_padding_idx_counts_from_the_end(method: Method) -> None:
    tables = [build(method, padding_idx=index) for index in (-3, 34)]
    assert [table.padding_idx for table in tables] == [34, 34]
    bags = torch.tensor([[34, 34], [34, 5]])
    pooled = tables[0](bags)
    assert not pooled[0].any()
    torch.testing.assert_close(pooled[1], tables[0].rows(torch.tensor(5)))


def test_a_padding_idx_beyond_the_rows_is_refused() -> None:
    Dense().build(10, 4, padding_idx=-10)
    for index in (10, -11):
        with pytest.raises(ConfigError, match=f"padding_idx {index} is not a row of a table of 10 rows"):
            Dense().build(10, 4, padding_idx=index)


@methods
def test_rows_of_integers_are_refused(method: Method) -> None:
    with pytest.raises(ConfigError, match=r"floating-point numbers, not torch\.int8"):
        method.build(37, 8, dtype=torch.int8)
