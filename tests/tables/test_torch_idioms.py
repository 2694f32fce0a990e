"""One suite over every method: a table takes part in what PyTorch users do with an `nn.EmbeddingBag`."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor, nn

from holdall.common.errors import ConfigError
from holdall.tables import Dense, HotCold, Method, TensorTrain
from tests.tables.cases import BAGS, CASES, build, some_ids

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


def test_sparse_is_true_or_false() -> None:
    with pytest.raises(ConfigError, match="sparse must be True or False, not 'yes'"):
        TensorTrain(rank=2).build(37, 8, sparse="yes")
