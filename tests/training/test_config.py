"""Training settings in parts: given by name or by part, read from flat files and from files with sections."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
import re
import tomllib

import pytest

from holdall.common.errors import ConfigError
from holdall.common.settings import overlay, sections, settings_marked
from holdall.planning.model_settings import ModelSettings
from holdall.training.config import TrainConfig
from holdall.training.setting_groups import OptimizerSettings, PlacementSettings

SPLIT = TrainConfig(
    steps=3,
    model=ModelSettings(dim=8, top=(16,)),
    placement=PlacementSettings(strategy="split", hot_bytes="1MB"),
    optimizer=OptimizerSettings(optimizer="adam"),
)


def test_settings_are_given_by_name_or_by_part() -> None:
    assert TrainConfig.of(steps=3, dim=8, top=(16,), strategy="split", hot_bytes="1MB", optimizer="adam") == SPLIT
    assert TrainConfig.of(placement=SPLIT.placement, prefetch=2).placement == PlacementSettings(
        strategy="split", hot_bytes="1MB", prefetch=2
    )


def test_changes_by_name_leave_the_rest_of_a_part() -> None:
    changed = SPLIT.replace(model="rmc2", hot_bytes="2MB", lr=0.5, steps=4)
    assert (changed.model.model, changed.model.dim, changed.model.top) == ("rmc2", 8, (16,))
    assert (changed.placement.strategy, changed.placement.hot_bytes) == ("split", "2MB")
    assert (changed.optimizer.optimizer, changed.optimizer.lr, changed.steps) == ("adam", 0.5, 4)
    assert SPLIT.optimizer.lr is None


def test_settings_can_be_copied() -> None:
    assert pickle.loads(pickle.dumps(SPLIT)) == copy.deepcopy(SPLIT) == SPLIT
    assert dataclasses.replace(SPLIT, steps=4) == SPLIT.replace(steps=4)


def test_names_that_do_not_exist() -> None:
    with pytest.raises(ConfigError, match=r"unknown setting 'hot_byte' \(did you mean 'hot_bytes'"):
        TrainConfig.of(hot_byte="1MB")
    with pytest.raises(
        ConfigError, match=r"model takes ModelSettings, not 'rmc2': write TrainConfig.of\(model='rmc2'\)"
    ):
        TrainConfig(model="rmc2")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"dim is a setting of the part 'model': write TrainConfig.of\(dim=8\)"):
        TrainConfig(dim=8)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match=r"'strategy' must be .* not 'spilt' .did you mean 'split'"):
        TrainConfig.of(strategy="spilt")


def test_run_json_is_flat() -> None:
    document = json.loads(json.dumps(SPLIT.to_json()))
    assert document.keys() == sections(TrainConfig).keys()
    assert not any(isinstance(value, dict) for value in document.values())
    assert (document["model"], document["optimizer"], document["hot_bytes"]) == ("dlrm", "adam", "1MB")
    assert TrainConfig.from_json(document) == SPLIT


def test_a_removed_setting_keeps_the_value_that_is_left() -> None:
    assert TrainConfig.from_json({**SPLIT.to_json(), "consistency": "exact"}) == SPLIT
    with pytest.raises(ConfigError, match="'consistency' was removed and only its value 'exact' is left, not 'stale'"):
        TrainConfig.from_json({**SPLIT.to_json(), "consistency": "stale"})


@pytest.mark.parametrize(
    "text",
    [
        'steps = 3\ndim = 8\ntop = [16]\nstrategy = "split"\nhot-bytes = "1MB"\noptimizer = "adam"',
        'steps = 3\n[model]\ndim = 8\ntop = [16]\n[placement]\nstrategy = "split"\nhot-bytes = "1MB"\n'
        '[optimizer]\noptimizer = "adam"',
        'steps = 3\nstrategy = "split"\noptimizer = "adam"\n[model]\ndim = 8\ntop = [16]\n'
        '[placement]\nhot_bytes = "1MB"',
    ],
    ids=["flat", "sections", "both"],
)
def test_files_with_and_without_sections(text: str) -> None:
    assert overlay(TrainConfig(), tomllib.loads(text), "run.toml") == SPLIT


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[placement]\nhot_byte = '1MB'", "unknown setting 'hot_byte' in [placement] (did you mean 'hot_bytes'?)"),
        ("[placement]\nlr = 0.1", "setting 'lr' does not belong in [placement]: write it in [optimizer]"),
        ("[placement]\nsteps = 3", "setting 'steps' does not belong in [placement]: write it before the first section"),
        ("[placment]\ntail = 'disk'", "unknown section [placment] (did you mean 'placement'?)"),
        ("lr = 0.1\n[optimizer]\nlr = 0.2", "setting 'lr' is given twice"),
        ("[optimizer]\nlr = 'fast'", "setting 'lr' must be a number, not 'fast'"),
    ],
)
def test_bad_sections(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"run.toml: {message}")):
        overlay(TrainConfig(), tomllib.loads(text), "run.toml")


def test_settings_that_may_change() -> None:
    """On resume, with the strategy, and from process to process."""
    length, files = {"epochs", "steps"}, {"save_every", "save_hot_every", "save_in_background", "keep", "log_every"}
    device = {"device", "threads", "kernels", "cuda_graph", "timeout"}
    assert settings_marked(TrainConfig, "may_change_on_resume") == length | files | device | {"keep_best"}
    rows = {"strategy", "hot_bytes", "tail", "profile", "hardware", "prefetch", "fetch_by", "merge_every"}
    assert settings_marked(TrainConfig, "may_change_with_strategy") == rows
    assert settings_marked(TrainConfig, "may_differ_by_rank") == {"device", "threads", "kernels"}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, (0.001, 0.1)),
        ({"optimizer": "rowwise_adagrad"}, (0.002, 0.06)),
        ({"model": "dcn", "optimizer": "adagrad"}, (0.002, 0.06)),
        ({"model": "deepfm"}, (0.001, 0.02)),
        ({"model": "two-tower"}, (0.0003, 0.1)),
        ({"table_lr": 0.5}, (0.001, 0.5)),
        ({"lr": 0.01}, (0.01, None)),
        ({"lr": 0.01, "table_lr": 0.5}, (0.01, 0.5)),
        ({"optimizer": "adam"}, (0.01, None)),
        ({"model": "neumf"}, (0.001, 0.2)),
        ({"model": "neumf", "optimizer": "rowwise_adagrad"}, (0.01, None)),
    ],
)
def test_rates(settings: dict[str, object], expected: tuple[float, float | None]) -> None:
    found = TrainConfig.of(**settings).optimizer_config()
    assert (found.lr, found.table_lr) == expected
