"""Named configurations, changes to them by the settings of a run, and their JSON form."""

from __future__ import annotations

import json

import pytest

from holdall.common.errors import ConfigError
from holdall.data.schema import Schema
from holdall.models import CONFIGURATIONS, DCNConfig, DLRMConfig, NCFConfig, TBSMConfig, configuration
from holdall.training.config import TrainConfig
from tests.models.made_up import HISTORY_FAMILIES, click_batch, clicks, histories, history_batch


def schema_for(family: str) -> Schema:
    if family in HISTORY_FAMILIES:
        return histories()
    return clicks(0 if family == "ncf" else 3, user=5, item=6)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_every_configuration_scores_a_batch(name: str) -> None:
    schema = schema_for(configuration(name).family)
    config = TrainConfig.of(model=name, model_scale=1 / 8)
    batch = history_batch(schema, [2] * 6) if configuration(name).family in HISTORY_FAMILIES else click_batch(schema)
    assert config.build_model(schema)(batch).shape == (6,)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (TrainConfig.of(model="rmc2", dim=8, top=(64,)), DLRMConfig(dim=8, bottom=(512, 256, 64), top=(64,))),
        (
            TrainConfig.of(model="dcn", bottom=(32,), model_setting=("rank=4", "structure=parallel", "cross-layers=2")),
            DCNConfig(bottom=(32,), rank=4, structure="parallel", cross_layers=2),
        ),
        (TrainConfig.of(model="gmf", model_setting=("factors=64",)), NCFConfig(parts="gmf", factors=64)),
        (
            TrainConfig.of(model="tbsm", dim=4, model_setting=("event=9", "length=3", "bottom=8,4")),
            TBSMConfig(dim=4, event=(9,), length=3, bottom=(8, 4)),
        ),
        (TrainConfig.of(model="tbsm", model_setting=("top=",)), TBSMConfig(top=())),
    ],
)
def test_settings_change_the_named_configuration(config: TrainConfig, expected: object) -> None:
    assert config.model.model_config() == expected
    again = TrainConfig.from_json(json.loads(json.dumps(config.to_json())))
    assert again == config
    assert again.model.model_config() == expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": "ncf", "bottom": (8,)}, r"ncf has no 'bottom' \(known: factors, item, num_layers, parts, user"),
        ({"model": "gmf", "dim": 8}, "ncf has no 'dim'"),
        ({"model": "dcn", "interaction": "dot"}, "dcn has no 'interaction'"),
        ({"model": "ncf", "model_setting": ("factor=8",)}, r"ncf has no 'factor' \(did you mean 'factors'"),
        ({"model": "ncf", "model_setting": ("factors",)}, "--model-setting takes name=value, not 'factors'"),
        ({"model": "ncf", "model_setting": ("factors=big",)}, "model ncf: setting 'factors' must be a whole number"),
        ({"model": "tbsm", "model_setting": ("event=4,x",)}, r"setting 'event\[1\]' must be a whole number, not 'x'"),
        ({"model": "dcn", "model_setting": ("structure=flat",)}, "must be 'stacked' or 'parallel'"),
        ({"model": "deepfm", "bottom": (8,)}, r"deepfm has no 'bottom' \(known: dim, top"),
        ({"model": "deepfm", "dim": 1}, "dim must be 2 or more, not 1"),
        ({"model": "din", "model_setting": ("attention=",), "bottom": (3,)}, "din has no 'bottom'"),
        ({"model": "din", "model_setting": ("activation=dice",)}, "must be 'prelu' or 'relu', not 'dice'"),
        ({"model": "two-tower", "top": (3,)}, "two-tower has no 'top'"),
        ({"model": "two-tower", "model_setting": ("temperature=0",)}, "temperature must be above 0"),
        ({"model": "two-tower", "model_setting": ("tower=x",)}, r"setting 'tower\[0\]' must be a whole number"),
        ({"model": "two-tower", "negatives": 8}, "takes the items of its batch as negatives: leave --negatives out"),
        ({"model": "dcn", "model_scale": 0.0}, "a factor above 0, not by 0.0"),
        ({"model": "rmc5"}, "unknown model 'rmc5' \\(did you mean 'rmc"),
    ],
)
def test_what_does_not_go_together(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainConfig.of(**settings)


def test_scaling() -> None:
    assert configuration("rmc3").scaled(0.5) == DLRMConfig(dim=64, bottom=(256, 128), top=(256, 256, 128))
    assert DCNConfig(bottom=None, rank=None, top=(3,)).scaled(0.1) == DCNConfig(bottom=None, rank=None, top=(1,))
    assert configuration("dcn-mlperf").scaled(2).rank == 1024
    assert NCFConfig(factors=8).scaled(4).tower == (128, 64, 32)
    assert TrainConfig.of(model="rmc3", model_scale=0.5, top=(7,)).model.model_config() == DLRMConfig(
        dim=64, bottom=(256, 128), top=(7,)
    )
