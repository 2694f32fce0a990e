"""One suite over every method: copies, the meta device, transforms, export and the compiler work, or say why not."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from holdall.common.errors import ConfigError
from holdall.tables import Dense, Frobenius, Hashed, HotCold, Method, Quantized, Robe, Table, TensorTrain
from holdall.tables.quantized import StochasticRoundingTable
from tests.tables.cases import BAGS, CASES, build, some_ids

methods = pytest.mark.parametrize("method", CASES.values(), ids=CASES.keys())

LOOKUPS: dict[str, Callable[[Table], Tensor]] = {
    "rows": lambda table: table.rows(some_ids(37)),
    "bags of one id": lambda table: table(some_ids(37)[:, None]),
    "bags of three ids": lambda table: table(some_ids(37).reshape(3, 3)),
    "bags by offsets": lambda table: table(some_ids(37), BAGS[:-1]),
}
lookups = pytest.mark.parametrize("look_up", LOOKUPS.values(), ids=LOOKUPS.keys())

UNCHECKED = r"checked by value, which torch\.export and torch\.vmap do not allow: .* check_bounds = False"


class Lookup(nn.Module):
    """A lookup as the forward of a module."""

    def __init__(self, table: Table, look_up: Callable[[Table], Tensor]):
        super().__init__()
        self.table, self.look_up = table, look_up

    def forward(self) -> Tensor:
        return self.look_up(self.table)


class Rows(nn.Module):
    def __init__(self, table: Table):
        super().__init__()
        self.table = table

    def forward(self, ids: Tensor) -> Tensor:
        return self.table.rows(ids)


class Bags(nn.Module):
    """Bags of three ids each and bags by offsets: one export of both takes half the time of two."""

    def __init__(self, table: Table):
        super().__init__()
        self.table = table

    def forward(self, ids: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        return self.table(ids.reshape(3, 3)), self.table(ids, offsets)


def collects_gradients(table: Table) -> bool:
    return any(isinstance(part, StochasticRoundingTable) for part in table.modules())


def by_torch_save(table: Table) -> Table:
    file = io.BytesIO()
    torch.save(table, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert isinstance(loaded, Table)
    return loaded


COPIES: dict[str, Callable[[Table], Table]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda table: pickle.loads(pickle.dumps(table)),
    "torch.save": by_torch_save,
}


@methods
@pytest.mark.parametrize("make", COPIES.values(), ids=COPIES.keys())
def test_copies_predict_and_train_on(method: Method, make: Callable[[Table], Table]) -> None:
    table = build(method)
    output = table(some_ids(37), BAGS[:-1])
    if output.requires_grad:
        output.square().sum().backward()
    twin = make(table)
    assert torch.equal(twin(some_ids(37), BAGS[:-1]), output)
    assert twin.method == method
    before = table.materialize()
    with torch.no_grad():
        for tensor in (*twin.parameters(), *twin.buffers()):
            tensor.zero_()
    assert torch.equal(table.materialize(), before)
    loss = twin(some_ids(37), BAGS[:-1]).square().sum()
    if loss.requires_grad:
        loss.backward()


@methods
def test_a_table_without_memory_has_shapes(method: Method) -> None:
    table = build(method).to("meta")
    ids = some_ids(37).to("meta")
    assert all(tensor.is_meta for tensor in (*table.parameters(), *table.buffers()))
    for mode in ("sum", "mean", "max"):
        table.mode = mode
        for part in table.modules():
            if isinstance(part, Table):
                part.mode = mode
        output = table(ids, BAGS[:-1].to("meta"))
        assert output.is_meta
        assert output.shape == (4, 8)
    assert table(ids[:, None]).shape == (9, 8)
    assert table.rows(ids.reshape(3, 3)).shape == (3, 3, 8)


@methods
@pytest.mark.parametrize("assign", [False, True])
def test_a_table_built_without_memory_is_filled_later(method: Method, assign: bool) -> None:
    table = method.build(37, 8, dtype=torch.float64, device="meta")
    assert all(tensor.is_meta for tensor in (*table.parameters(), *table.buffers()))
    assert table.num_bytes() == method.num_bytes(37, 8, torch.float64)
    expected = build(method)
    if not assign:
        table.to_empty(device="cpu")
    table.load_state_dict(expected.state_dict(), assign=assign)
    assert torch.equal(table(some_ids(37), BAGS[:-1]), expected(some_ids(37), BAGS[:-1]))


@methods
@lookups
def test_functional_call(method: Method, look_up: Callable[[Table], Tensor]) -> None:
    table, other = build(method), build(method)
    with torch.no_grad():
        for tensor in (*other.parameters(), *other.buffers()):
            tensor.zero_()
    once = {value.data_ptr(): name for name, value in table.state_dict().items()}  # torch wants tied parameters once
    state = {f"table.{name}": table.state_dict()[name] for name in once.values()}
    with torch.no_grad():
        found = torch.func.functional_call(Lookup(other, look_up), state, ())
        assert torch.equal(found, look_up(table))
        assert not look_up(other).any()


@methods
@lookups
def test_functional_gradients(method: Method, look_up: Callable[[Table], Tensor]) -> None:
    table = build(method)
    module = Lookup(table, look_up)
    parameters = {name: parameter.detach() for name, parameter in module.named_parameters()}
    if not parameters:
        pytest.skip("no parameters")

    def loss(values: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(module, values, ()).square().sum()

    if collects_gradients(table):
        with pytest.raises(ConfigError, match=r"collects its gradients itself, which torch\.func"):
            torch.func.grad(loss)(parameters)
        return
    found = torch.func.grad(loss)(parameters)
    look_up(table).square().sum().backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-9, atol=1e-11)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@methods
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_vmap_over_ids(method: Method, mode: str) -> None:
    table = build(method, mode=mode, padding_idx=36)
    ids = some_ids(37).reshape(3, 3)

    def bag(line: Tensor) -> Tensor:
        return table(line[None])[0]

    with torch.no_grad():
        with pytest.raises(ConfigError, match=UNCHECKED):
            torch.vmap(table.rows)(ids)
        with pytest.raises(ConfigError, match=UNCHECKED):
            torch.vmap(bag)(ids)
        expected = table.rows(ids), table(ids)
        table.check_bounds = False
        torch.testing.assert_close(torch.vmap(table.rows)(ids), expected[0])
        torch.testing.assert_close(torch.vmap(bag)(ids), expected[1])


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@methods
def test_gradients_by_sample(method: Method) -> None:
    table = build(method)
    table.check_bounds = False
    module, ids = Rows(table), some_ids(37)
    parameters = {name: parameter.detach() for name, parameter in module.named_parameters()}
    if not parameters or collects_gradients(table):
        pytest.skip("no parameters, or gradients that the table collects itself")

    def loss(values: dict[str, Tensor], id: Tensor) -> Tensor:
        return torch.func.functional_call(module, values, (id,)).square().sum()

    found = torch.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, ids)
    table.rows(ids).square().sum().backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(found[name].sum(0), parameter.grad, rtol=1e-9, atol=1e-11)


@pytest.mark.slow
@methods
def test_export(method: Method) -> None:
    table = build(method)
    module, ids = Rows(table), some_ids(37)
    with torch.no_grad():
        with pytest.raises(ConfigError, match=UNCHECKED):
            torch.export.export(module, (ids,))
        expected = table.rows(torch.arange(20)), Bags(table)(ids, BAGS[:-1])
        table.check_bounds = False
        shapes = ({0: torch.export.Dim.DYNAMIC},)
        rows = torch.export.export(module, (ids,), dynamic_shapes=shapes).module()
        torch.testing.assert_close(rows(torch.arange(20)), expected[0])
        bags = torch.export.export(Bags(table), (ids, BAGS[:-1])).module()
        torch.testing.assert_close(bags(ids, BAGS[:-1]), expected[1])


COMPILED: list[Method] = [
    Dense(),
    Hashed(buckets=23),
    Robe(size=300, block=4),
    Quantized(),
    Frobenius(),
    TensorTrain(rank=4),
]


@pytest.mark.slow
@pytest.mark.parametrize("method", COMPILED, ids=lambda method: method.name)
def test_a_full_graph(method: Method) -> None:
    table = build(method)
    ids = some_ids(37)

    def look_up() -> Tensor:
        return table.rows(ids)

    compiled = torch.compile(look_up, backend="aot_eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="check_ids reads values of tensors, so it cannot be"):
        compiled()
    table.check_bounds = False
    results = []
    for function in (compiled, look_up):
        table.zero_grad()
        output = function()
        if output.requires_grad:
            output.square().sum().backward()
        results.append([output.detach(), *(parameter.grad for parameter in table.parameters())])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "part"),
    [(TensorTrain(rank=4), "_pool_distinct"), (HotCold(hot_rows=5, cold=Dense()), "_pool_distinct")],
    ids=lambda value: getattr(value, "name", value),
)
def test_a_full_graph_of_bags_is_refused(method: Method, part: str) -> None:
    table = build(method)
    table.check_bounds = False
    compiled = torch.compile(table, backend="aot_eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=f"{part} reads values of tensors, so it cannot be"):
        compiled(some_ids(37).reshape(3, 3))
    torch._dynamo.reset()
