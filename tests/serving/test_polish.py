"""Polish of smaller forms: it trains what is stored, and is kept where rows that were held back say so."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from holdall.data.dataset import DataSet
from holdall.data.synthetic import SyntheticConfig, write_prepared
from holdall.serving import polish as module
from holdall.serving.bundle import open_bundle
from holdall.serving.forms import Form, Forms
from holdall.serving.polish import chosen_logloss, polish
from holdall.serving.proof import halves
from holdall.serving.release import release
from holdall.training.config import TrainConfig
from holdall.training.evaluate_run import load_model
from holdall.training.train import train


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A data set with a large table, and a run on it."""
    folder = tmp_path_factory.mktemp("polish")
    write_prepared(SyntheticConfig(rows=12_000, cardinalities=(60, 3000), num_dense=2), folder / "data")
    config = TrainConfig.of(dim=8, bottom=(8,), top=(8,), batch_size=256, optimizer="adagrad", lr=0.05, device="cpu")
    train(folder / "data", folder / "run", config)
    return folder / "data", folder / "run"


@pytest.fixture
def forms(run: tuple[Path, Path]) -> Forms:
    model, config, _, _ = load_model(run[1], device="cpu")
    return Forms(model, config, run[0])


def spoilt(form: Form) -> Form:
    """The form with a last layer that is off, as training can mend."""
    with torch.no_grad():
        for parameter in form.model.top.parameters():
            parameter.add_(0.1)
    return form


def test_a_spoilt_form_is_mended(forms: Forms) -> None:
    form = spoilt(forms.fit("1/10"))
    choosing, _ = halves(len(DataSet(forms.data, "valid")))
    before = copy.deepcopy(form.model.state_dict())
    model, found = polish(forms, form.model, 1, choosing)
    assert found.rate in module.RATES
    assert found.logloss < found.logloss_before == chosen_logloss(forms, form.model, choosing)
    assert found.logloss == chosen_logloss(forms, model, choosing)
    after = model.state_dict()
    assert {name: tensor.dtype for name, tensor in after.items()} == {name: t.dtype for name, t in before.items()}
    assert model.bags.num_bytes() == form.num_bytes
    trained = [name for name in after if not torch.equal(after[name], before[name])]
    frozen = [name for name in before if name.rsplit(".", 1)[-1] in ("codes", "grid")]
    assert frozen
    assert not set(frozen) & set(trained)
    assert any(name.startswith("bags.") for name in trained)
    assert any(name.startswith("top.") for name in trained)
    assert all(torch.equal(tensor, before[name]) for name, tensor in form.model.state_dict().items())


def test_what_is_not_better_is_not_kept(forms: Forms, monkeypatch: pytest.MonkeyPatch) -> None:
    form = forms.fit("1/10")
    choosing, _ = halves(len(DataSet(forms.data, "valid")))
    monkeypatch.setattr(module, "RATES", (1000.0,))  # the run's rate times 1,000 diverges
    model, found = polish(forms, form.model, 1, choosing)
    assert model is form.model
    assert (found.rate, found.logloss) == (None, found.logloss_before)


def test_a_rate_is_given_up_after_two_evaluations_without_gain(forms: Forms, monkeypatch: pytest.MonkeyPatch) -> None:
    form = forms.fit("1/10")
    choosing, _ = halves(len(DataSet(forms.data, "valid")))
    losses = iter([0.5, 0.4, 0.41, 0.42, 0.6, 0.3, 0.6, 0.6, 0.7, 0.7])
    monkeypatch.setattr(module, "chosen_logloss", lambda *_: next(losses))
    _, found = polish(forms, form.model, 3, choosing)
    assert (found.rate, found.logloss) == (module.RATES[1], 0.3)
    assert next(losses, None) is None


def test_a_polished_form_is_proved_on_the_other_half(run: tuple[Path, Path], tmp_path: Path) -> None:
    data, folder = run
    report = release(folder, tmp_path / "bundle", budget="1/10", polish=1, device="cpu")
    proving = halves(len(DataSet(data, "valid")))[1]
    assert report.quality.proof is not None
    assert report.quality.proof["auc"]["rows"] == int(proving.sum())
    (row,) = report.quality.front
    assert row["polish"]["logloss"] <= row["polish"]["logloss_before"]
    assert open_bundle(tmp_path / "bundle").model().bags.num_bytes() == report.quality.table_bytes
