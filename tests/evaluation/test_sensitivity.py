"""Sensitivity of a model to its tables, against finite changes of its rows."""

from pathlib import Path

import pytest
import torch

from holdall import DataSet, DLRMConfig, Loader
from holdall.common.errors import DataError
from holdall.data.synthetic import preset, write_prepared
from holdall.evaluation.sensitivity import sensitivity
from holdall.models.model import Model


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("sensitivity") / "data"
    write_prepared(preset("criteo-kaggle", scale=0.001, rows=600), out, valid=0.1, test=0.1)
    return out


def build(data: Path) -> Model:
    config = DLRMConfig(dim=4, bottom=(8,), top=(8,))
    return config.build(DataSet(data).schema, generator=torch.Generator().manual_seed(0))


def test_it_forecasts_the_change_of_the_logits(data: Path) -> None:
    model = build(data)
    batches = list(Loader(DataSet(data, "train"), 128, shuffle="none").epoch(0))
    name = next(iter(model.bags.features.values()))
    matrix = sensitivity(model, batches)[name]
    change = 1e-3 * torch.randn(4, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        before = torch.cat([model(batch) for batch in batches]).double()
        model.bags.table(name).weight.add_(change)
        after = torch.cat([model(batch) for batch in batches]).double()
    moved = float((after - before).square().mean())
    assert moved == pytest.approx(float(change.double() @ matrix @ change.double()), rel=0.02)


def test_it_leaves_the_model_as_it_was(data: Path) -> None:
    model = build(data).train()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    batches = list(Loader(DataSet(data, "train"), 128, shuffle="none").epoch(0))
    sensitivity(model, batches, max_batches=2)
    assert model.training
    assert not model.bags._forward_hooks
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())


def test_no_batch_is_an_error(data: Path) -> None:
    with pytest.raises(DataError, match="at least one batch"):
        sensitivity(build(data), [])
