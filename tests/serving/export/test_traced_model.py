"""Traced models: the scores of the model itself, for every method, model and kind of feature."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from holdall.common.errors import ConfigError
from holdall.data.schema import Schema
from holdall.models import CONFIGURATIONS, Model, ModelConfig
from holdall.models.dcn import DCNConfig
from holdall.models.deepfm import DeepFMConfig
from holdall.models.dlrm import DLRMConfig
from holdall.serving.export.export_check import check_batches
from holdall.serving.export.model_inputs import ModelInputs
from holdall.serving.export.traced_model import TracedModel, sum_of_bags
from tests.serving.export.made_up import clicks, histories
from tests.tables.cases import CASES

SMALL = DLRMConfig(dim=16, bottom=(8,), top=(8,))


@pytest.fixture(scope="module")
def bags(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return clicks(tmp_path_factory.mktemp("data") / "bags", (600, 900), bag_lengths=(1, 4))


@pytest.fixture(scope="module")
def events(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return histories(tmp_path_factory.mktemp("data") / "events")


def differences(model: Model, config: ModelConfig, schema: Schema) -> list[float]:
    """Largest difference of logits of each check batch."""
    model = model.requires_grad_(False).eval()
    batches = list(check_batches(schema, model))
    expected = [model(batch) for batch in batches]
    inputs = ModelInputs.of(config, schema)
    traced = TracedModel(model, inputs)
    found = []
    for batch, logits in zip(batches, expected, strict=True):
        arrays = inputs.arrays(batch)
        score, logit = traced(*(torch.from_numpy(arrays[given.name]) for given in inputs))
        torch.testing.assert_close(score, logit.sigmoid())
        found.append(float((logit - logits).abs().max().detach()))
    return found


@pytest.mark.parametrize("name", CASES)
def test_every_method(name: str, bags: Path) -> None:
    schema = Schema.load(bags)
    assert max(differences(SMALL.build(schema, CASES[name]), SMALL, schema)) < 1e-6


@pytest.mark.parametrize(
    "config",
    [
        DLRMConfig(dim=8, bottom=(8,), top=(8,), interaction="concat"),
        DCNConfig(dim=8, top=(8,), structure="parallel"),
        DCNConfig(dim=8, bottom=(8,), top=(8,), rank=2),
        DeepFMConfig(dim=8, top=(8,)),
    ],
    ids=["concat", "parallel", "ranks", "deepfm"],
)
def test_models_of_clicks(config: ModelConfig, bags: Path) -> None:
    schema = Schema.load(bags)
    assert max(differences(config.build(schema), config, schema)) < 1e-5


@pytest.mark.parametrize("name", ["ncf", "gmf", "ncf-mlp", "tbsm", "din", "two-tower", "dlrm"])
def test_models_of_histories(name: str, events: Path) -> None:
    schema, config = Schema.load(events), CONFIGURATIONS[name].scaled(0.1)
    assert max(differences(config.build(schema), config, schema)) < 1e-5


def test_check_batches_have_the_rows_that_matter(bags: Path) -> None:
    schema = Schema.load(bags)
    model = SMALL.build(schema, CASES["bands of frozen and trained rows"])
    many, single, empty = check_batches(schema, model)
    assert (len(single), len(empty)) == (1, 3)
    first, second = (set(many.ids.bag(position)[0].tolist()) for position in (0, 1))
    edges = {0, 1, 2, 4, 5, 8, 9, 19, 20}
    assert edges | {schema.features[0].unseen, schema.features[0].num_rows - 1} <= first
    assert edges | {schema.features[1].unseen} <= second
    offsets = many.ids.bag(1)[1]
    assert offsets is not None
    assert {0, 4} <= set(offsets.diff().tolist())
    assert empty.ids.bag(1)[0].numel() == 0
    assert float(many.dense.max()) > 21


def test_rows_that_cannot_be_score_nan_and_no_others(events: Path) -> None:
    """Ids outside of a table, offsets that do not fit, and histories of several lengths."""
    schema, config = Schema.load(events), CONFIGURATIONS["tbsm"].scaled(0.1)
    model = config.build(schema).requires_grad_(False).eval()
    batch = next(check_batches(schema, model))
    inputs = ModelInputs.of(config, schema)
    traced = TracedModel(model, inputs)
    sound = {name: torch.from_numpy(array) for name, array in inputs.arrays(batch).items()}
    expected = traced(*(sound[name] for name in traced.names))[1]

    def nan_rows(**changed: Tensor) -> list[int]:
        given = {**sound, **{name.replace("__", "."): tensor for name, tensor in changed.items()}}
        logit = traced(*(given[name] for name in traced.names))[1]
        kept = ~logit.isnan()
        torch.testing.assert_close(logit[kept], expected[kept])
        return logit.isnan().nonzero()[:, 0].tolist()

    ids = sound["ids"].clone()
    ids[3, 0], ids[5, 1] = -1, 10**9
    assert nan_rows(ids=ids) == [3, 5]
    values, offsets = sound["history.values"].clone(), sound["history.offsets"]
    row = int((offsets.diff() > 0).nonzero()[4])
    values[offsets[row]] = 10**9
    assert nan_rows(history__values=values) == [row]
    everything = list(range(len(batch)))
    longer, falling, late = offsets.clone(), offsets.clone(), offsets + 1
    longer[-1] += 1
    falling[7] = falling[-1]
    for wrong in (longer, falling, late):
        assert nan_rows(history__offsets=wrong) == everything
    shifted = offsets.clone()
    assert int(offsets.diff()[9]) > 0
    shifted[9] += 1
    assert nan_rows(history__offsets=shifted) == [8, 9]


def test_sums_of_bags_without_ids_at_either_end() -> None:
    rows = torch.tensor([[1.0], [2.0], [4.0], [99.0]])
    offsets = torch.tensor([0, 0, 2, 2, 3, 3])
    assert sum_of_bags(rows, offsets)[:, 0].tolist() == [0, 3, 0, 4, 0]


def test_what_a_traced_model_cannot_take(bags: Path) -> None:
    schema = Schema.load(bags)
    model = SMALL.build(schema)
    inputs = ModelInputs.of(SMALL, schema)
    batch = next(check_batches(schema, model))
    weighted = batch.ids.__class__(batch.ids.values, batch.ids.offsets, 2, torch.ones(batch.ids.values.shape))
    with pytest.raises(ConfigError, match="takes no weights of ids"):
        inputs.arrays(type(batch)(dense=batch.dense, ids=weighted, label=batch.label))
    model.bags.vector_dtype = torch.bfloat16
    with pytest.raises(ConfigError, match=r"vectors in torch.bfloat16: an export has float32 only"):
        TracedModel(model, inputs)
