"""PyTorch's transforms on whole models: compile, export, functional_call with grad, copies, the meta device."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from holdall.data.batch import Batch, Ids
from holdall.kernels import interaction
from holdall.models import Model, ModelConfig
from holdall.models.dcn import DCNConfig
from holdall.models.deepfm import DeepFMConfig
from holdall.models.dlrm import DLRMConfig
from tests.models.made_up import click_batch, clicks

SCHEMA = clicks(2, a=20, b=7, c=30)
BATCH = click_batch(SCHEMA)
CONFIGS: dict[str, ModelConfig] = {
    "dlrm": DLRMConfig(dim=4, bottom=(8,), top=(8,)),
    "dcn": DCNConfig(dim=4, top=(8,)),
    "deepfm": DeepFMConfig(dim=4, top=(8,)),
}


class OfTensors(nn.Module):
    """A model on the tensors of a batch, as `torch.export` takes them."""

    def __init__(self, model: Model):
        super().__init__()
        self.model = model

    def forward(self, dense: Tensor, values: Tensor) -> Tensor:
        return self.model(Batch(dense=dense, ids=Ids(values, None, len(SCHEMA.features)), label=dense[:, 0]))


@pytest.fixture(params=CONFIGS.values(), ids=CONFIGS)
def model(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Model:
    monkeypatch.setattr(interaction, "_PAIRS", {})  # as in a new process
    torch.manual_seed(0)
    return request.param.build(SCHEMA)


@pytest.mark.slow
@pytest.mark.parametrize("learns", [False, True])
def test_compiled_in_one_graph(model: Model, learns: bool) -> None:
    compiled = torch.compile(OfTensors(model), backend="aot_eager", fullgraph=True)
    with torch.set_grad_enabled(learns):
        found = compiled(BATCH.dense, BATCH.ids.values)
        torch.testing.assert_close(found, model(BATCH))
    if learns:
        found.sum().backward()
        gradients = [parameter.grad.to_dense() for parameter in model.parameters()]
        model.zero_grad()
        model(BATCH).sum().backward()
        torch.testing.assert_close(gradients, [parameter.grad.to_dense() for parameter in model.parameters()])


@pytest.mark.slow
def test_exported_and_usable_afterwards(model: Model) -> None:
    program = torch.export.export(OfTensors(model), (BATCH.dense, BATCH.ids.values))
    found = program.module()(BATCH.dense, BATCH.ids.values)
    torch.testing.assert_close(found, model(BATCH))
    assert not [name for name, tensor in interaction._PAIRS.items() if type(tensor[0]) is not Tensor]


def test_grad_of_functional_call(model: Model) -> None:
    given = {name: parameter.detach() for name, parameter in model.named_parameters()}
    found = torch.func.grad(lambda p: torch.func.functional_call(model, p, (BATCH,)).square().sum())(given)
    model(BATCH).square().sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name].to_dense(), parameter.grad.to_dense(), msg=lambda text, n=name: n + text)


def test_copy_and_meta(model: Model) -> None:
    assert torch.equal(copy.deepcopy(model)(BATCH), model(BATCH))
    assert model.to("meta")(BATCH.to("meta")).shape == (len(BATCH),)
