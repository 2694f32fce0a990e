"""What PyTorch code does with gradients, on packed tables: zero_grad, clipping, scaling, freezing, penalties.

The reference is the same model without packs, whose tables have ordinary gradients in `weight.grad`.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from holdall.common.errors import ConfigError
from holdall.data.batch import Ids
from holdall.embedding.bags import EmbeddingBags
from holdall.optim.config import OptimizerConfig
from holdall.optim.optimizer_kinds import NAMES
from holdall.optim.optimizers import Optimizers

ROWS = {"a": 20, "b": 7, "c": 5}


class Model(nn.Module):
    """Three tables and a linear layer, in float64."""

    def __init__(self, fused: bool = True):
        super().__init__()
        self.bags = EmbeddingBags.build(
            ROWS, 3, fused=fused, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
        )
        self.top = nn.Linear(9, 1, dtype=torch.float64)
        with torch.no_grad():
            self.top.weight.copy_(torch.linspace(-1, 1, 9)[None])
            self.top.bias.zero_()

    def forward(self, ids: Ids) -> Tensor:
        return self.top(self.bags(ids).flatten(1)).squeeze(1)


def batch(step: int, size: int = 6) -> Ids:
    generator = torch.Generator().manual_seed(step)
    return Ids(torch.stack([torch.randint(rows, (size,), generator=generator) for rows in ROWS.values()]), None, 3)


def loss_of(model: Model, step: int) -> Tensor:
    return (model(batch(step)) - 1).square().sum()


def both(name: str = "adagrad") -> list[tuple[Model, Optimizers]]:
    """A model with packs and one without, from the same weights, with optimizers."""
    models = [Model(fused=True), Model(fused=False)]
    return [(model, Optimizers(model, OptimizerConfig(name=name, lr=0.1))) for model in models]


def assert_same(packed: nn.Module, plain: nn.Module) -> None:
    for (name, found), expected in zip(packed.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14, msg=lambda text, n=name: f"{n}: {text}")


def by_hand(model: Model) -> None:
    for parameter in model.parameters():
        parameter.grad = None


ZERO: dict[str, Callable[[Model], None]] = {
    "to none": lambda model: model.zero_grad(),
    "to zero": lambda model: model.zero_grad(set_to_none=False),
    "by hand": by_hand,
    "by an optimizer of torch": lambda model: torch.optim.SGD(model.parameters()).zero_grad(),
    "by a foreach optimizer": lambda model: torch.optim.SGD(model.parameters(), foreach=True).zero_grad(False),
}


@pytest.mark.parametrize("zero", ZERO.values(), ids=ZERO)
def test_zero_grad_drops_a_bad_batch(zero: Callable[[Model], None]) -> None:
    for model, optimizers in both():
        before = {name: value.clone() for name, value in model.state_dict().items()}
        (loss_of(model, 0) * torch.nan).backward()
        zero(model)
        optimizers.zero_grad()
        optimizers.step()  # nothing to apply
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    (packed, ours), (plain, theirs) = both()
    for model, optimizers in ((packed, ours), (plain, theirs)):
        for step in range(3):
            loss_of(model, step).backward()
            optimizers.step()
            (loss_of(model, step + 50) * torch.nan).backward()
            zero(model)  # skipped, and the next backward collects anew
    assert_same(packed, plain)
    assert all(bool(torch.isfinite(parameter).all()) for parameter in packed.parameters())


@pytest.mark.parametrize("zero", ZERO.values(), ids=ZERO)
def test_zero_grad_before_the_step_leaves_nothing_to_apply(zero: Callable[[Model], None]) -> None:
    model, optimizers = both("sgd")[0]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    loss_of(model, 0).backward()
    zero(model)
    optimizers.step()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("zero", ZERO.values(), ids=ZERO)
@pytest.mark.parametrize("fused", [True, False])
def test_zero_grad_after_clipping_drops_what_was_clipped(fused: bool, zero: Callable[[Model], None]) -> None:
    models = [Model(fused), Model(fused)]
    skips, never = (Optimizers(model, OptimizerConfig(name="sgd", lr=0.1)) for model in models)
    for step in range(3):
        loss_of(models[0], step + 50).backward()
        assert float(skips.clip(0.01)) > 0.01
        zero(models[0])  # skipped
        for model, optimizers in zip(models, (skips, never), strict=True):
            loss_of(model, step).backward()
            optimizers.step()
    assert_same(*models)


@pytest.mark.parametrize("fused", [True, False])
def test_a_backward_after_clipping_adds_to_what_was_clipped(fused: bool) -> None:
    models = [Model(fused), Model(fused)]
    ours, reference = (Optimizers(model, OptimizerConfig(name="sgd", lr=0.1)) for model in models)
    loss_of(models[0], 0).backward()
    norm = float(ours.clip(0.5))
    loss_of(models[0], 1).backward()
    ours.step()
    (loss_of(models[1], 0) * (0.5 / norm) + loss_of(models[1], 1)).backward()
    reference.step()
    assert_same(*models)


def test_backward_passes_add_up_until_the_step() -> None:
    (packed, ours), (plain, theirs) = both()
    for model, optimizers in ((packed, ours), (plain, theirs)):
        for start in (0, 10):
            model.zero_grad()
            for step in range(start, start + 3):
                loss_of(model, step).backward()
            optimizers.step()
    assert_same(packed, plain)


def test_zero_grad_of_one_table_drops_its_rows_alone() -> None:
    (packed, ours), (plain, theirs) = both()
    for model, optimizers in ((packed, ours), (plain, theirs)):
        loss_of(model, 0).backward()
        model.bags.table("b").zero_grad()
        loss_of(model, 1).backward()
        model.bags.table("c").zero_grad(set_to_none=False)
        optimizers.step()
    assert_same(packed, plain)


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_clip_grad_norm_clips(name: str, norm_type: float) -> None:
    (packed, ours), (plain, theirs) = both(name)
    norms = []
    for model, optimizers in ((packed, ours), (plain, theirs)):
        for step in range(3):
            loss_of(model, step).backward()
            loss_of(model, step + 7).backward()
            for parameter in model.parameters():  # torch clips sparse gradients by their stored values
                if parameter.grad is not None and parameter.grad.is_sparse:
                    parameter.grad = parameter.grad.coalesce()
            norms.append(float(torch.nn.utils.clip_grad_norm_(_densified(model), 0.25, norm_type)))
            optimizers.step()
    assert norms[0] > 0.25
    assert norms[:3] == pytest.approx(norms[3:])
    assert_same(packed, plain)


def _densified(model: Model) -> list[nn.Parameter]:
    """The parameters, with stand-ins for sparse gradients, which torch's norms do not take: their values."""
    found = []
    for parameter in model.parameters():
        if parameter.grad is not None and parameter.grad.is_sparse:
            holder = nn.Parameter(torch.empty_like(parameter.grad._values()))
            holder.grad = parameter.grad._values()
            found.append(holder)
        else:
            found.append(parameter)
    return found


def test_clip_grad_norm_equals_the_clip_of_optimizers() -> None:
    models = [both("sgd")[0] for _ in range(2)]
    for model, _ in models:
        loss_of(model, 0).backward()
    whole = torch.nn.utils.clip_grad_norm_(models[0][0].parameters(), 0.25)
    assert float(whole) == pytest.approx(models[1][1].clip(0.25))
    for _, optimizers in models:
        optimizers.step()
    torch.testing.assert_close(
        list(models[0][0].parameters()), list(models[1][0].parameters()), rtol=1e-5, atol=1e-6
    )  # torch divides by the norm + 1e-6


def test_the_norm_of_one_table_is_its_own() -> None:
    packed, plain = both("sgd")
    for model, _ in (packed, plain):
        loss_of(model, 0).backward()
    norms = [float(torch.nn.utils.get_total_norm([packed[0].bags.table(n).weight.grad])) for n in ROWS]
    expected = [float(plain[0].bags.table(n).weight.grad.to_dense().norm()) for n in ROWS]
    assert norms == pytest.approx(expected)
    assert min(norms) > 0


def test_clip_grad_value_and_unscaling() -> None:
    packed, plain = both("sgd")
    loss_of(packed[0], 0).backward()
    loss_of(plain[0], 0).backward()
    torch.nn.utils.clip_grad_value_(packed[0].parameters(), 0.1)
    for parameter in plain[0].parameters():
        grad = parameter.grad.to_dense().clamp_(-0.1, 0.1)
        parameter.grad = grad.to_sparse(1) if parameter.grad.is_sparse else grad
    for _, optimizers in (packed, plain):
        optimizers.step()
    assert_same(packed[0], plain[0])

    scaled, reference = both("sgd")[0], both("sgd")[0]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    (scaler.scale(loss_of(scaled[0], 0))).backward()
    scaler.unscale_(torch.optim.SGD(scaled[0].parameters(), lr=0.1))
    loss_of(reference[0], 0).backward()
    for _, optimizers in (scaled, reference):
        optimizers.step()
    torch.testing.assert_close(list(scaled[0].parameters()), list(reference[0].parameters()), rtol=1e-6, atol=1e-7)


def test_gradients_can_be_looked_at() -> None:
    packed, plain = both("sgd")
    for model, _ in (packed, plain):
        loss_of(model, 0).backward()
    for ours, theirs in zip(packed[0].bags.parameters(), plain[0].bags.parameters(), strict=True):
        found, expected = ours.grad, theirs.grad.to_dense()
        assert found is not None
        assert found.shape == expected.shape
        for look in (Tensor.abs, Tensor.mean, Tensor.sum, Tensor.std, Tensor.isnan):
            torch.testing.assert_close(look(found), look(expected))
        assert bool(torch.isfinite(found).all())
    packed[0].zero_grad()
    (loss_of(packed[0], 0) * torch.inf).backward()
    assert not all(bool(torch.isfinite(parameter.grad).all()) for parameter in packed[0].bags.parameters())


def test_an_optimizer_of_torch_refuses_rows_that_it_cannot_read() -> None:
    model, _ = both("sgd")[0]
    loss_of(model, 0).backward()
    with pytest.raises(ConfigError, match=r"gradient of table 'a' is collected by row .* the other parameters only"):
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert "collected by row" in repr(model.bags.table("a").weight.grad)


@pytest.mark.parametrize("name", NAMES)
def test_freezing_a_table_stops_its_updates_and_its_state(name: str) -> None:
    (packed, ours), (plain, theirs) = both(name)
    for model, optimizers in ((packed, ours), (plain, theirs)):
        for step in range(6):
            model.bags.table("b").requires_grad_(not 2 <= step < 4)
            frozen = model.bags.table("b").materialize()
            state = {key: value.clone() for key, value in optimizers.tensors().items() if "tables.b" in key}
            loss_of(model, step).backward()
            optimizers.step()
            same = torch.equal(model.bags.table("b").materialize(), frozen)
            assert same == (2 <= step < 4)
            kept = all(torch.equal(value, optimizers.tensors()[key]) for key, value in state.items())
            assert kept == (2 <= step < 4 or name == "sgd")
            assert optimizers.has_frozen == (2 <= step < 4)
    assert_same(packed, plain)


def test_freezing_the_model_stops_everything() -> None:
    model, optimizers = both()[0]
    loss_of(model, 0).backward()
    optimizers.step()
    model.requires_grad_(False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert not loss_of(model, 1).requires_grad
    optimizers.step()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    model.requires_grad_(True)
    loss_of(model, 1).backward()
    optimizers.step()
    assert not any(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_what_was_frozen_from_the_start_is_refused_when_it_learns() -> None:
    model = Model()
    model.bags.table("b").requires_grad_(False)
    optimizers = Optimizers(model, OptimizerConfig(name="sgd"))
    loss_of(model, 0).backward()
    optimizers.step()
    model.requires_grad_(True)
    loss_of(model, 0).backward()
    with pytest.raises(ConfigError, match=r"'bags.tables.b.weight' has a gradient but was frozen when"):
        optimizers.step()


def test_a_penalty_on_the_weights_themselves_is_applied() -> None:
    """Gradients that autograd computes for a weight, dense or sparse, are not left out of the update."""
    (packed, ours), (plain, theirs) = both("sgd")
    for model, optimizers in ((packed, ours), (plain, theirs)):
        for step in range(3):
            rows = model.bags.table("c")(torch.tensor([[1], [1], [3]]))
            loss = loss_of(model, step) + rows.square().sum()
            if model is packed:
                loss = loss + model.bags.table("b").weight.square().sum()
            loss.backward()
            if model is plain:
                table = model.bags.table("b")
                table.weight.grad = (table.weight.grad.to_dense() + 2 * table.weight.detach()).to_sparse(1)
            optimizers.step()
    assert_same(packed, plain)


def test_autograd_grad_of_packed_tables_is_refused_and_collects_nothing() -> None:
    model, optimizers = both("sgd")[0]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ConfigError, match=r"torch.autograd.grad cannot give gradients of tables that have an optimi"):
        torch.autograd.grad(loss_of(model, 0), list(model.parameters()))
    (found,) = torch.autograd.grad(loss_of(model, 0), [model.top.bias])
    assert found.any()
    optimizers.step()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("hook", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_that_would_not_be_called_is_refused(hook: str) -> None:
    """Without packs it is called; with them, autograd has no gradient to call it with."""
    packed, plain = both("sgd")
    called = []
    for model, _ in (packed, plain):
        getattr(model.bags.table("b").weight, hook)(lambda *_: called.append(1))
    loss_of(plain[0], 0).backward()
    assert called == [1]
    with pytest.raises(ConfigError, match="the weight of table 'b' has a hook for its gradient, which is not called"):
        loss_of(packed[0], 0).backward()


def test_weights_of_lookups_learn_or_are_refused() -> None:
    packed, plain = both("sgd")
    weights = torch.ones(3, 6, dtype=torch.float64, requires_grad=True)
    ids = Ids(batch(0).values, None, 3, weights)
    plain[0](ids).sum().backward()
    assert weights.grad is not None
    with pytest.raises(ConfigError, match="weights of lookups have no gradient where the tables have an optimizer"):
        packed[0](ids)
    with torch.no_grad():
        torch.testing.assert_close(packed[0](ids), plain[0](ids))


def test_gradients_do_not_keep_a_model_alive() -> None:
    model, optimizers = both()[0]
    loss_of(model, 0).backward()
    alive = weakref.ref(model.bags.packs[0])
    del model, optimizers
    gc.collect()
    assert alive() is None
