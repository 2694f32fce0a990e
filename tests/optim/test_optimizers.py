"""Row optimizers: equal to torch's where torch has one, and they touch only touched rows."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from holdall.common.errors import ConfigError
from holdall.data.batch import Ids
from holdall.embedding.bags import EmbeddingBags
from holdall.optim.config import OptimizerConfig
from holdall.optim.optimizer_kinds import NAMES
from holdall.optim.optimizers import Optimizers
from holdall.optim.table_bytes import count_table_bytes
from holdall.tables import Hashed, TensorTrain

ROWS = {"a": 50, "b": 7}


class Model(nn.Module):
    """Two tables and a linear layer, in float64."""

    def __init__(self, fused: bool):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.bags = EmbeddingBags.build(ROWS, 3, fused=fused, dtype=torch.float64, generator=generator)
        self.top = nn.Linear(6, 1, dtype=torch.float64)
        with torch.no_grad():
            self.top.weight.fill_(0.5)
            self.top.bias.zero_()

    def forward(self, ids: Ids) -> torch.Tensor:
        return self.top(self.bags(ids).flatten(1)).squeeze(1)


def batch(step: int) -> Ids:
    generator = torch.Generator().manual_seed(step)
    lengths = torch.randint(0, 4, (2 * 5,), generator=generator)
    limits = torch.tensor([20, 7]).repeat_interleave(5).repeat_interleave(lengths)  # ids 20..49 of 'a' never occur
    values = (torch.rand(int(lengths.sum()), generator=generator) * limits).long()
    return Ids(values, nn.functional.pad(lengths.cumsum(0), (1, 0)), 2)


def train(
    fused: bool, name: str, steps: int = 4, clip: float | None = None, eps: float = 1e-8, **numbers: float
) -> tuple[Model, Optimizers]:
    model = Model(fused)
    optimizers = Optimizers(model, OptimizerConfig(name=name, lr=0.1, eps=eps, **numbers))
    for step in range(steps):
        model(batch(step)).square().sum().backward()
        if clip is not None:
            optimizers.clip(clip)
        optimizers.step()
    return model, optimizers


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("clip", [None, 0.01])
def test_packed_updates_equal_sparse_gradient_updates(name: str, clip: float | None) -> None:
    packed, plain = train(True, name, clip=clip)[0], train(False, name, clip=clip)[0]
    for found, expected in zip(packed.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


DECAYED = [(name, {"weight_decay": 0.05}) for name in NAMES] + [
    ("sgd", {"momentum": 0.9}),
    ("sgd", {"momentum": 0.9, "weight_decay": 0.05}),
]
"""Optimizers with weight decay or momentum."""


@pytest.mark.parametrize(("name", "numbers"), DECAYED)
@pytest.mark.parametrize("clip", [None, 0.01])
def test_packed_updates_with_momentum_and_weight_decay(
    name: str, numbers: dict[str, float], clip: float | None
) -> None:
    packed, plain = (train(fused, name, clip=clip, **numbers)[0] for fused in (True, False))
    unlike = train(True, name, clip=clip)[0]
    for found, expected in zip(packed.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
    assert not torch.allclose(packed.bags.table("a").weight, unlike.bags.table("a").weight)


@pytest.mark.parametrize(
    ("name", "numbers", "reference"),
    [
        ("sgd", {"momentum": 0.9}, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
        (
            "sgd",
            {"momentum": 0.9, "weight_decay": 0.05},
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.05),
        ),
        ("sgd", {"weight_decay": 0.05}, lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.05)),
        ("adagrad", {"weight_decay": 0.05}, lambda p: torch.optim.Adagrad(p, lr=0.1, eps=1e-8, weight_decay=0.05)),
        ("adam", {"weight_decay": 0.05}, lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.05)),
        ("adamw", {"weight_decay": 0.05}, lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.05)),
        ("adamw", {}, lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.0)),
    ],
)
def test_momentum_and_weight_decay_equal_torch_where_every_step_touches_every_row(
    name: str, numbers: dict[str, float], reference: object
) -> None:
    """Torch's optimizers take no sparse gradients with these, so theirs are dense."""
    ours, theirs = Model(fused=True), Model(fused=False)
    theirs_optimizer = reference(theirs.parameters())
    optimizers = Optimizers(ours, OptimizerConfig(name=name, lr=0.1, **numbers))
    every = Ids(torch.stack([torch.arange(50), torch.arange(50) % 7]), None, 2)
    for step in range(5):
        for model in (ours, theirs):
            (model(every) - step).square().mean().backward()
        for parameter in theirs.parameters():
            parameter.grad = parameter.grad.to_dense()
        optimizers.step()
        theirs_optimizer.step()
        theirs_optimizer.zero_grad()
    for found, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize(("name", "numbers"), DECAYED)
def test_momentum_and_weight_decay_reach_touched_rows_only(name: str, numbers: dict[str, float]) -> None:
    model = Model(fused=True)
    optimizers = Optimizers(model, OptimizerConfig(name=name, lr=0.1, **numbers))
    model(Ids(torch.tensor([[3], [2]]), None, 2)).square().sum().backward()
    optimizers.step()
    before = model.bags.table("a").materialize()
    model(Ids(torch.tensor([[5], [2]]), None, 2)).square().sum().backward()
    optimizers.step()
    changed = (model.bags.table("a").materialize() != before).any(1)
    assert changed.nonzero().flatten().tolist() == [5]


def test_weight_decay_on_planted_numbers() -> None:
    """w = 2, g = 3, lr = 0.1, weight decay 0.5: 2 - 0.1 * (3 + 1), and then with the momentum of that."""
    model = Model(fused=True)
    optimizers = Optimizers(model, OptimizerConfig(name="sgd", lr=0.1, weight_decay=0.5, momentum=0.5))
    weight = model.bags.table("b").weight
    ids = Ids(torch.tensor([[0], [2]]), None, 2)
    for expected in (1.6, 1.6 - 0.1 * (0.5 * 4 + 3 + 0.8)):
        if expected == 1.6:
            weight.data[2] = 2.0
        (model.bags(ids)[:, 1] * 3.0).sum().backward()
        optimizers.step()
        assert weight[2].tolist() == pytest.approx([expected] * 3)


@pytest.mark.parametrize(
    ("name", "reference"),
    [
        ("sgd", lambda p: torch.optim.SGD(p, lr=0.1)),
        ("adagrad", lambda p: torch.optim.Adagrad(p, lr=0.1, eps=1e-8)),
    ],
)
def test_rows_equal_torch(name: str, reference: object) -> None:
    ours, _ = train(True, name)
    theirs = Model(fused=False)
    optimizer = reference(theirs.parameters())
    for step in range(4):
        optimizer.zero_grad()
        theirs(batch(step)).square().sum().backward()
        optimizer.step()
    for found, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-13)


def test_lazy_adam_equals_sparse_adam() -> None:
    """With an eps of almost 0: SparseAdam adds it before the bias correction, Adam (and ours) after."""
    ours, _ = train(True, "adam", eps=1e-30)
    theirs = Model(fused=False)
    sparse = torch.optim.SparseAdam([theirs.bags.table(name).weight for name in ROWS], lr=0.1, eps=1e-30)
    dense = torch.optim.Adam(theirs.top.parameters(), lr=0.1, eps=1e-30)
    for step in range(4):
        theirs.zero_grad()
        theirs(batch(step)).square().sum().backward()
        sparse.step()
        dense.step()
    for found, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_a_table_of_the_user_has_the_gradients_that_the_optimizer_needs(name: str) -> None:
    """Built with torch's dense gradients, also when the first backward ran before the optimizer was made."""
    results = []
    for sparse in (True, False):
        table = Hashed(buckets=9).build(30, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        table.use_sparse_gradients(sparse)
        table.rows(torch.tensor([3, 3, 7])).square().sum().backward()
        optimizers = Optimizers(table, OptimizerConfig(name=name, lr=0.1))
        optimizers.step()
        optimizers.zero_grad()
        table.rows(torch.tensor([3, 8])).square().sum().backward()
        (parameter,) = table.parameters()
        assert parameter.grad is not None
        assert parameter.grad.is_sparse
        optimizers.step()
        results.append(parameter.detach())
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)


def test_rowwise_adagrad_on_planted_numbers() -> None:
    model = Model(fused=True)
    before = model.bags.table("b").materialize()[2]
    optimizers = Optimizers(model, OptimizerConfig(name="rowwise_adagrad", lr=0.1, eps=0.0))
    ids = Ids(torch.tensor([[0], [2]]), None, 2)
    (model.bags(ids)[:, 1] * torch.tensor([3.0, 0.0, 4.0])).sum().backward()
    optimizers.step()
    state = optimizers.tensors()["rows.bags.tables.b.weight.sum"]
    assert state[2] == pytest.approx(25 / 3)
    moved = before - torch.tensor([3.0, 0.0, 4.0]) * 0.1 / (25 / 3) ** 0.5
    torch.testing.assert_close(model.bags.table("b").materialize()[2], moved)


def test_adam_of_the_network_beside_rowwise_adagrad_of_the_tables() -> None:
    """Rows and parts of compressed tables change as under `rowwise_adagrad`, the rest as under `adam`."""

    def trained(name: str) -> dict[str, torch.Tensor]:
        model = nn.ModuleDict({"bags": EmbeddingBags.build(ROWS, 4, {"a": TensorTrain(rank=2)})})
        model["top"] = nn.Linear(8, 1)
        for number, parameter in enumerate(model.parameters()):
            nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(number))
        optimizers = Optimizers(model, OptimizerConfig(name=name, lr=0.01, table_lr=0.1))
        model["top"](model["bags"](batch(0)).flatten(1)).sum().backward()
        optimizers.set_factor(0.5)
        optimizers.step()
        assert count_table_bytes(model, optimizers.config.kind).optimizer == sum(
            state.nbytes for key, state in optimizers.tensors().items() if ".bags." in key or key.startswith("rows.")
        )
        return {key: value.detach().clone() for key, value in model.state_dict().items()}

    mixed, adagrad, adam = (trained(name) for name in ("rowwise_adagrad_adam", "rowwise_adagrad", "adam"))
    for key, value in mixed.items():
        torch.testing.assert_close(value, adam[key] if key.startswith("top") else adagrad[key], rtol=0, atol=0)
    assert any(not torch.equal(mixed[key], adam[key]) for key in mixed if key.startswith("bags"))


@pytest.mark.parametrize("name", NAMES)
def test_untouched_rows_and_their_state_stay(name: str) -> None:
    before = Model(fused=True).bags.table("a").materialize()
    model, optimizers = train(True, name)
    after = model.bags.table("a").materialize()
    assert torch.equal(after[20:], before[20:])
    assert not torch.equal(after[:20], before[:20])
    for key, state in optimizers.tensors().items():
        if key.startswith("rows.bags.tables.a"):
            assert not state[20:].any()
            assert state[:20].any()


@pytest.mark.parametrize("name", NAMES)
def test_saved_state_continues_to_the_same_model(name: str) -> None:
    whole, _ = train(True, name, steps=6)
    model, optimizers = train(True, name, steps=3)
    state = {key: value.clone() for key, value in optimizers.tensors().items()}
    resumed = Model(fused=True)
    resumed.load_state_dict(model.state_dict())
    continued = Optimizers(resumed, OptimizerConfig(name=name, lr=0.1))
    for key, value in continued.tensors().items():
        value.copy_(state[key])
    continued.step_count = 3
    for step in range(3, 6):
        resumed(batch(step)).square().sum().backward()
        continued.step()
    for found, expected in zip(resumed.parameters(), whole.parameters(), strict=True):
        assert torch.equal(found, expected)


def test_clip_bounds_the_joint_norm() -> None:
    model = Model(fused=True)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizers = Optimizers(model, OptimizerConfig(name="sgd", lr=1.0))
    (1000 * model(batch(0))).square().sum().backward()
    assert optimizers.clip(0.25) > 0.25
    optimizers.step()
    moved = torch.cat([(value - before[name]).flatten() for name, value in model.state_dict().items()])
    assert moved.norm() == pytest.approx(0.25)


def test_the_factor_scales_every_learning_rate() -> None:
    frozen = Model(fused=True)
    optimizers = Optimizers(frozen, OptimizerConfig(name="sgd", lr=0.1))
    optimizers.set_factor(0.0)
    frozen(batch(0)).square().sum().backward()
    optimizers.step()
    for found, expected in zip(frozen.parameters(), Model(fused=True).parameters(), strict=True):
        assert torch.equal(found, expected)


def test_moving_the_model_after_its_optimizer_is_refused() -> None:
    model = Model(fused=True)
    Optimizers(model, OptimizerConfig())
    with pytest.raises(ConfigError, match="move the model first"):
        model.float()


def test_bad_settings() -> None:
    with pytest.raises(ConfigError, match=r"'name' must be .*did you mean 'adagrad'"):
        OptimizerConfig(name="adagard")
    with pytest.raises(ConfigError, match="above 0"):
        OptimizerConfig(lr=0.0)
    with pytest.raises(ConfigError, match="momentum goes with sgd, not with adam"):
        OptimizerConfig(name="adam", momentum=0.9)
    with pytest.raises(ConfigError, match="from 0 to below 1, not 1"):
        OptimizerConfig(name="sgd", momentum=1.0)
    with pytest.raises(ConfigError, match="weight decay must be 0 or more"):
        OptimizerConfig(weight_decay=-0.1)
