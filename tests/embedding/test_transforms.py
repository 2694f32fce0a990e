"""PyTorch's transforms on packed tables: functional_call, grad, vmap, compile, export, the meta device."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from holdall.common.errors import ConfigError, IdError
from holdall.data.batch import Ids
from holdall.embedding.bags import EmbeddingBags
from holdall.optim.config import OptimizerConfig
from holdall.optim.optimizers import Optimizers

ROWS = {"a": 20, "b": 7}
VALUES = torch.tensor([[3, 19, 3, 0], [6, 1, 1, 1]])
IDS = Ids(VALUES, None, 2)
BAGS = Ids(torch.tensor([3, 19, 3, 6, 1, 1]), torch.tensor([0, 2, 3, 3, 6]), 2)


class Model(nn.Module):
    """Two packed tables and a linear layer on ids [F, B]."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.bags = EmbeddingBags.build(ROWS, 3, dtype=torch.float64, generator=generator)
        self.top = nn.Linear(6, 1, dtype=torch.float64)

    def forward(self, values: Tensor) -> Tensor:
        return self.top(self.bags(Ids(values, None, 2)).flatten(1)).squeeze(1)


def with_optimizers(on: bool) -> tuple[Model, Optimizers | None]:
    torch.manual_seed(1)
    model = Model()
    return model, Optimizers(model, OptimizerConfig(name="sgd", lr=0.1)) if on else None


def parameters(model: nn.Module, factor: float = 1.0) -> dict[str, Tensor]:
    return {name: value.detach() * factor for name, value in model.named_parameters()}


@pytest.mark.parametrize("optimized", [False, True])
@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("ids", [IDS, BAGS], ids=["one-hot", "bags"])
def test_functional_call_reads_the_tensors_it_is_given(optimized: bool, learns: bool, ids: Ids) -> None:
    model, optimizers = with_optimizers(optimized)
    storage = model.bags.packs[0].storage
    with torch.set_grad_enabled(learns):
        before = model.bags(ids)
        given = parameters(model.bags, 2.0)
        found = torch.func.functional_call(model.bags, given, (ids,))
        torch.testing.assert_close(found, 2 * before)
        assert torch.equal(model.bags(ids), before)
    assert model.bags.packs[0].storage is storage
    assert all(torch.equal(value, parameters(model.bags, 2.0)[name]) for name, value in given.items())
    if optimizers is not None:
        model(VALUES).sum().backward()
        optimizers.step()
        assert not torch.equal(model.bags(ids), before)


def test_parameters_in_the_place_of_those_that_an_optimizer_updates_are_refused() -> None:
    model, _ = with_optimizers(True)
    other = Model()
    with pytest.raises(ConfigError, match="after their optimizer was made: make the Optimizers anew"):
        torch.func.functional_call(model, dict(other.named_parameters()), (VALUES,))
    with torch.no_grad():
        found = torch.func.functional_call(model, dict(other.named_parameters()), (VALUES,))
        assert torch.equal(found, other(VALUES))


@pytest.mark.parametrize("optimized", [False, True])
def test_grad_equals_that_of_autograd(optimized: bool) -> None:
    model, _ = with_optimizers(optimized)

    def loss(given: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, given, (VALUES,)).square().sum()

    found = torch.func.grad(loss)(parameters(model))
    reference = Model()
    reference.load_state_dict(model.state_dict())
    reference(VALUES).square().sum().backward()
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(found[name].to_dense(), parameter.grad.to_dense())
    assert not model.bags.packs[0].gradients


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap_over_models_runs_and_over_ids_is_refused() -> None:
    models = [with_optimizers(False)[0], Model()]
    stacked, _ = torch.func.stack_module_state(models)
    base = Model()
    found = torch.func.vmap(lambda given: torch.func.functional_call(base, given, (VALUES,)))(stacked)
    torch.testing.assert_close(found, torch.stack([model(VALUES) for model in models]))
    with pytest.raises(ConfigError, match="vmap cannot run over ids"):
        torch.func.vmap(base)(VALUES[None].expand(3, -1, -1))


@pytest.mark.slow
@pytest.mark.parametrize("learns", [False, True])
def test_compile_of_the_whole_model_in_one_graph(learns: bool) -> None:
    model, _ = with_optimizers(False)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.set_grad_enabled(learns):
        torch.testing.assert_close(compiled(VALUES), model(VALUES))
        with pytest.raises(RuntimeError, match="an id is not a row of its table: run the model uncompiled"):
            compiled(VALUES + 10)
    with pytest.raises(IdError, match="feature 'a' has id 29"):
        model(VALUES + 10)


@pytest.mark.slow
def test_compiled_training_with_optimizers_equals_uncompiled() -> None:
    """Their lookups break the graph; in one graph they are refused with the reason."""
    models = [with_optimizers(True) for _ in range(2)]
    compiled = torch.compile(models[0][0], backend="aot_eager")
    for step in range(4):
        for (model, optimizers), run in zip(models, (compiled, models[1][0]), strict=True):
            assert optimizers is not None
            if step == 2:
                run(VALUES).sum().backward()  # a bad batch
                model.zero_grad()
            (run((VALUES + step) % 7) - 1).square().sum().backward()
            optimizers.step()
    for found, expected in zip(models[0][0].parameters(), models[1][0].parameters(), strict=True):
        torch.testing.assert_close(found, expected)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="collect gradients by row, outside of a graph"):
        torch.compile(models[0][0], backend="aot_eager", fullgraph=True)(VALUES)


@pytest.mark.slow
@pytest.mark.parametrize("optimized", [False, True])
def test_export_has_the_tables_as_parameters_and_checks_ids(optimized: bool) -> None:
    model, _ = with_optimizers(optimized)
    size = torch.export.Dim("size", min=2)
    program = torch.export.export(model, (VALUES,), dynamic_shapes={"values": {1: size}})
    assert set(program.state_dict) == set(model.state_dict())
    exported = program.module()
    more = torch.cat([VALUES, VALUES], dim=1)
    torch.testing.assert_close(exported(more), model(more))
    with pytest.raises(RuntimeError, match="an id is not a row of its table"):
        exported(VALUES + 10)

    class Bagged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bags = model.bags

        def forward(self, values: Tensor, offsets: Tensor) -> Tensor:
            return self.bags(Ids(values, offsets, 2))

    assert BAGS.offsets is not None
    with pytest.raises(Exception, match="bags of several ids are not compiled or exported"):
        torch.export.export(Bagged(), (BAGS.values, BAGS.offsets))


def test_shapes_on_the_meta_device() -> None:
    model = Model().to("meta")
    assert model.bags(Ids(VALUES.to("meta"), None, 2)).shape == (4, 2, 3)
    assert model(VALUES.to("meta")).shape == (4,)
    built = EmbeddingBags.build(ROWS, 3, device="meta")
    assert all(parameter.is_meta for parameter in built.parameters())
    built.to_empty(device="cpu")
    built.load_state_dict(EmbeddingBags.build(ROWS, 3).state_dict())
    with torch.no_grad():
        assert torch.equal(built(IDS)[:, 0], built.table("a").materialize()[VALUES[0]])
