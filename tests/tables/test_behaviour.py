"""One suite over every method: a table means what `nn.EmbeddingBag` over its materialised rows means."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from holdall.common.errors import ConfigError, IdError
from holdall.tables import METHODS, Method, Table, method_from_json
from holdall.tables.method import dense_std
from holdall.tables.quantized import LearnedRoundingTable, StochasticRoundingTable
from tests.tables.cases import BAGS, CASES, SHAPES, build, some_ids

methods = pytest.mark.parametrize("method", CASES.values(), ids=CASES.keys())
shapes = pytest.mark.parametrize(("num_rows", "dim"), SHAPES)


def dense_gradients(table: Table) -> list[Tensor]:
    """Gradients of every parameter, and those that tables which update their own codes have collected."""
    found = [
        torch.zeros_like(p) if p.grad is None else p.grad.to_dense() if p.grad.is_sparse else p.grad
        for p in table.parameters()
    ]
    for part in table.modules():
        if isinstance(part, StochasticRoundingTable):
            ids, gradient = part.pending_gradient()
            found.append(gradient.new_zeros(part.num_rows, part.dim).index_add(0, ids, gradient))
    return found


def backward(table: Table, loss: Tensor) -> None:
    """`loss.backward()` from clean gradients; a frozen table has none."""
    table.zero_grad()
    for part in table.modules():
        if isinstance(part, StochasticRoundingTable):
            part.zero_pending()
    if loss.requires_grad:
        loss.backward()
    else:
        assert not list(table.parameters()), "a table with parameters must give them gradients"


def gradients_of(table: Table, output: Tensor) -> list[Tensor]:
    """Gradient of every parameter for a fixed random direction of the output."""
    direction = torch.randn(output.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    backward(table, (output * direction).sum())
    return dense_gradients(table)


def assert_same_function(table: Table, output: Tensor, expected: Tensor) -> None:
    """Equal outputs and equal gradients of every parameter; `expected` is computed from `table.rows(all ids)`."""
    torch.testing.assert_close(output, expected, rtol=1e-10, atol=1e-12)
    gradients = gradients_of(table, output)
    for found, wanted in zip(gradients, gradients_of(table, expected), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-11)


def all_rows(table: Table) -> Tensor:
    return table.rows(torch.arange(table.num_rows))


@methods
@shapes
def test_rows_are_the_materialised_rows(method: Method, num_rows: int, dim: int) -> None:
    table = build(method, num_rows, dim)
    weight = table.materialize()
    assert weight.shape == (num_rows, dim)
    ids = some_ids(num_rows).reshape(3, 3)
    torch.testing.assert_close(table.rows(ids), weight[ids], rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(table.materialize(ids), weight[ids], rtol=1e-12, atol=1e-13)


@methods
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("padding_idx", [None, 36])
def test_bags_with_offsets(method: Method, mode: str, padding_idx: int | None) -> None:
    table = build(method, mode=mode, padding_idx=padding_idx)
    ids, offsets = some_ids(37), BAGS[:-1]
    expected = F.embedding_bag(ids, all_rows(table), offsets, mode=mode, padding_idx=padding_idx)
    assert_same_function(table, table(ids, offsets), expected)


@methods
@shapes
def test_bags_of_every_shape(method: Method, num_rows: int, dim: int) -> None:
    table = build(method, num_rows, dim)
    ids = some_ids(num_rows)
    assert_same_function(table, table(ids, BAGS[:-1]), F.embedding_bag(ids, all_rows(table), BAGS[:-1], mode="sum"))


@methods
def test_bags_with_the_last_offset(method: Method) -> None:
    table = build(method, include_last_offset=True)
    ids = some_ids(37)
    expected = F.embedding_bag(ids, all_rows(table), BAGS, mode="sum", include_last_offset=True)
    assert_same_function(table, table(ids, BAGS), expected)


@methods
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_two_dimensional_input(method: Method, mode: str) -> None:
    table = build(method, mode=mode)
    ids = some_ids(37, 12).reshape(4, 3)
    assert_same_function(table, table(ids), F.embedding_bag(ids, all_rows(table), mode=mode))


@methods
@pytest.mark.parametrize("padding_idx", [None, 36])
def test_per_sample_weights_and_their_gradient(method: Method, padding_idx: int | None) -> None:
    table = build(method, padding_idx=padding_idx)
    ids = some_ids(37)
    ours = torch.rand(9, dtype=torch.float64).requires_grad_()
    theirs = ours.detach().clone().requires_grad_()
    output = table(ids, BAGS[:-1], ours)
    expected = F.embedding_bag(
        ids, all_rows(table), BAGS[:-1], mode="sum", per_sample_weights=theirs, padding_idx=padding_idx
    )
    assert_same_function(table, output, expected)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-9, atol=1e-12)


@methods
def test_int32_ids(method: Method) -> None:
    table = build(method)
    ids = some_ids(37)
    torch.testing.assert_close(table(ids.int(), BAGS[:-1].int()), table(ids, BAGS[:-1]), rtol=0, atol=0)


@methods
def test_no_lookups_at_all(method: Method) -> None:
    table = build(method)
    output = table(torch.empty(0, dtype=torch.int64), torch.tensor([0, 0, 0]))
    assert output.shape == (3, 8)
    assert not output.any()


@methods
def test_two_uses_in_one_step_add_up(method: Method) -> None:
    table = build(method)
    ids = some_ids(37)
    twice = table(ids, BAGS[:-1]) + 2 * table(ids.flip(0), BAGS[:-1])
    weight = all_rows(table)
    expected = F.embedding_bag(ids, weight, BAGS[:-1], mode="sum")
    expected = expected + 2 * F.embedding_bag(ids.flip(0), weight, BAGS[:-1], mode="sum")
    assert_same_function(table, twice, expected)


@methods
def test_gradcheck(method: Method) -> None:
    """Numerical gradients of every parameter."""
    table = build(method, 11, 4)
    names = [name for name, _ in table.named_parameters()]
    if not names or any(isinstance(part, LearnedRoundingTable) for part in table.modules()):
        pytest.skip(f"{method.name} has no parameter, or gradients that are not those of its rounding, by design")
    ids, offsets = torch.tensor([0, 10, 10, 3, 7]), torch.tensor([0, 2, 2])
    parameters = dict(table.named_parameters())

    def run(*values: Tensor) -> Tensor:
        replaced = {**parameters, **dict(zip(names, values, strict=True))}
        return torch.func.functional_call(table, replaced, (ids, offsets))

    inputs = tuple(parameters[name].detach().clone().requires_grad_() for name in names)
    assert torch.autograd.gradcheck(run, inputs, eps=1e-6, atol=1e-6)


@methods
def test_json_round_trip(method: Method) -> None:
    assert method_from_json(json.loads(json.dumps(method.to_json()))) == method
    assert METHODS[method.name] is type(method)


@methods
@shapes
def test_bytes_are_counted_without_building(method: Method, num_rows: int, dim: int) -> None:
    for dtype in (torch.float32, torch.float64):
        table = build(method, num_rows, dim, dtype=dtype)
        stored = [*table.parameters(), *table.buffers()]
        assert table.num_bytes() == sum(t.numel() * t.element_size() for t in stored)
        assert method.num_bytes(num_rows, dim, dtype) == table.num_bytes()


@methods
def test_state_dict_restores_the_rows(method: Method) -> None:
    table = build(method)
    torch.manual_seed(1)
    other = method.build(37, 8, dtype=torch.float64)
    assert not torch.equal(other.materialize(), table.materialize())
    other.load_state_dict(table.state_dict())
    assert torch.equal(other.materialize(), table.materialize())


@methods
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision_is_close_to_float64(method: Method, dtype: torch.dtype) -> None:
    table = build(method, 37, 16)
    lower = build(method, 37, 16)
    lower.load_state_dict(table.state_dict())
    lower.to(dtype)
    ids = some_ids(37)
    found = lower(ids, BAGS[:-1])
    assert found.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 6e-2
    expected = table(ids, BAGS[:-1])
    assert (found.double() - expected).norm() <= tolerance * expected.norm()
    backward(lower, found.double().sum())
    assert all(torch.isfinite(gradient).all() for gradient in dense_gradients(lower))


@pytest.mark.slow
@pytest.mark.parametrize(
    "method", {type(build(method)): method for method in reversed(CASES.values())}.values(), ids=str
)
def test_dynamo_gives_the_same(method: Method) -> None:
    """The first case of every class of table: a compilation takes seconds."""
    table = build(method)
    ids = some_ids(37)
    compiled = torch.compile(table, backend="aot_eager")
    torch.testing.assert_close(compiled(ids, BAGS[:-1]), table(ids, BAGS[:-1]), rtol=1e-9, atol=1e-12)
    torch._dynamo.reset()


@methods
def test_initial_rows_look_like_dense_ones(method: Method) -> None:
    """Mean 0 and the dense deviation within 5%, and a Gaussian shape: a Kolmogorov-Smirnov distance below 0.03.

    Twenty thousand rows of dim 16 are drawn; several seeds are pooled because methods with few factors share them
    between rows, so one seed's sample deviation is itself random.
    """
    num_rows, dim = 20_000, 16
    tables = [method.build(num_rows, dim, generator=torch.Generator().manual_seed(seed)) for seed in range(8)]
    sample = torch.arange(0, num_rows, 7)
    values = torch.stack([table.materialize(sample) for table in tables]).double() / dense_std(num_rows)
    assert abs(values.mean()) < 0.05
    assert abs(values.std() - 1) < 0.05
    ordered = values.flatten().sort().values
    normal = torch.special.ndtr(ordered)
    empirical = torch.arange(1, ordered.numel() + 1, dtype=torch.float64) / ordered.numel()
    assert (normal - empirical).abs().max() < 0.03


@methods
def test_the_same_generator_gives_the_same_table(method: Method) -> None:
    first, second, third = (method.build(37, 8, generator=torch.Generator().manual_seed(seed)) for seed in (5, 5, 6))
    assert torch.equal(first.materialize(), second.materialize())
    assert not torch.equal(first.materialize(), third.materialize())


@methods
@pytest.mark.parametrize("bad", [-1, 37, 2**40])
def test_ids_out_of_range_are_named(method: Method, bad: int) -> None:
    table = build(method)
    ids = some_ids(37)
    ids[4] = bad
    with pytest.raises(IdError, match=rf"id {bad} at position 4 .* 37 rows"):
        table(ids, BAGS[:-1])
    with pytest.raises(IdError, match=rf"id {bad} at position 4"):
        table.rows(ids)


@methods
@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([1, 2, 3], "start at 0"),
        ([0, 5, 3], "offset 2 is 3 after 5"),
        ([0, -2, 3], "offset 1 is -2 after 0"),
        ([0, 4, 10], "last offset is 10, but there are 9 ids"),
        ([], "offsets is empty"),
    ],
)
def test_offsets_that_are_no_bags(method: Method, offsets: list[int], message: str) -> None:
    with pytest.raises(IdError, match=message):
        build(method)(some_ids(37), torch.tensor(offsets, dtype=torch.int64))


@methods
def test_wrong_arguments(method: Method) -> None:
    table = build(method)
    ids = some_ids(37)
    with pytest.raises(ConfigError, match=r"int64 or int32, not torch\.float32"):
        table(ids.float(), BAGS[:-1])
    with pytest.raises(ConfigError, match="needs offsets"):
        table(ids)
    with pytest.raises(ConfigError, match="offsets must be None"):
        table(ids.reshape(3, 3), BAGS[:-1])
    with pytest.raises(ConfigError, match="per_sample_weights has shape"):
        table(ids, BAGS[:-1], torch.ones(4, dtype=torch.float64))
    with pytest.raises(ConfigError, match="mode='sum' only"):
        build(method, mode="mean")(ids, BAGS[:-1], torch.ones(9, dtype=torch.float64))
    with pytest.raises(ConfigError, match="num_rows of at least 1"):
        method.build(0, 8)
    with pytest.raises(ConfigError, match="dim of at least 1"):
        method.build(8, 0)
    with pytest.raises(ConfigError, match="padding_idx 37"):
        method.build(37, 8, padding_idx=37)
    with pytest.raises(ConfigError, match="unknown option"):
        method.build(37, 8, colour="blue")
