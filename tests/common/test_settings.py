"""Types of settings that are given in a call."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdall import DLRMConfig, OptimizerConfig, OrderConfig, PlanConfig, PrepareConfig, ProfileConfig, ServerConfig
from holdall import TrainConfig as Config
from holdall.common.errors import ConfigError
from holdall.common.files import quoted
from holdall.training.train import train

WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "whole number": (lambda: Config(epochs="2"), "setting 'epochs' must be a whole number, not '2'"),
    "number of a part": (lambda: Config.of(lr="0.1"), "setting 'lr' must be a number, not '0.1'"),
    "number in a list": (lambda: Config.of(bottom=("8",)), r"setting 'bottom\[0\]' must be a whole number"),
    "fraction": (lambda: Config(batch_size=2.5), "setting 'batch_size' must be a whole number, not 2.5"),
    "bool": (lambda: Config.of(deterministic="yes"), "setting 'deterministic' must be true or false, not 'yes'"),
    "choice": (lambda: Config.of(strategy="spilt"), "did you mean 'split'"),
    "prepare": (lambda: PrepareConfig(test="0.1"), "setting 'test' must be a number"),
    "profile": (lambda: ProfileConfig(sample="0.1"), "setting 'sample' must be a number"),
    "order": (lambda: OrderConfig(hot="0.1"), "setting 'hot' must be a number"),
    "plan": (lambda: PlanConfig(world_size="2"), "setting 'world_size' must be a whole number"),
    "server": (lambda: ServerConfig(port="80"), "setting 'port' must be a whole number"),
    "optimizer": (lambda: OptimizerConfig(lr="0.1"), "setting 'lr' must be a number"),
    "model": (lambda: DLRMConfig(dim="16"), "every size of a dlrm model must be a whole number"),
    "dict": (lambda: train("data", "run", {"epochs": 2}), r"write TrainConfig.of\(epochs=2\)"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_value_of_another_type_is_refused_by_name(case: str) -> None:
    make, message = WRONG[case]
    with pytest.raises(ConfigError, match=message):
        make()


def test_paths_sizes_and_numpy_numbers_are_converted() -> None:
    assert Config.of(plan=Path("plan.json")).placement.plan == "plan.json"
    assert PrepareConfig(format="table", schema="x.toml").schema == Path("x.toml")
    assert Config.of(strategy="split", hot_bytes=1 << 20).placement.hot_bytes == "1048576"
    assert Config.of(budget=0.05).tables.budget == "0.05"
    assert Config.of(bottom=[8, 4]).model.bottom == (8, 4)
    size = Config(batch_size=np.int64(64)).batch_size
    assert (size, type(size)) == (64, int)


def test_paths_in_commands_are_quoted() -> None:
    assert quoted(Path("runs/a")) == "runs/a"
    assert quoted(Path("my runs/it's")) == """'my runs/it'"'"'s'"""
