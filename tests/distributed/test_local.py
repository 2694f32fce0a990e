"""Local tables: equal to data-parallel where they must be, merged by how often each rank touched a row."""

from __future__ import annotations

import math

import numpy as np
import pytest

from holdall.common.errors import ConfigError
from holdall.training.config import TrainConfig
from tests.distributed.harness import run

pytestmark = pytest.mark.slow

HERE = "tests.distributed.local_workers"


@pytest.mark.parametrize("num", [2, 3])
def test_merging_every_step_is_data_parallel_on_rows_of_one_rank(num: int) -> None:
    for found in run(f"{HERE}:merged_every_step", num):
        assert found["local"].keys() == found["data-parallel"].keys()
        for name, tensor in found["data-parallel"].items():
            np.testing.assert_allclose(found["local"][name], tensor, rtol=1e-9, atol=1e-12, err_msg=name)


def test_rows_are_merged_by_touches() -> None:
    first, second = run(f"{HERE}:planted", 2)
    for name in ("weight", "sum"):
        scale = 10 if name == "sum" else 1
        expected = np.array([(3 * 1 + 1 * 5) / 4, 0.3, 0.1, 9.0]) * scale
        np.testing.assert_array_equal(first[name], second[name])
        np.testing.assert_allclose(first[name][:, 0], expected, rtol=1e-15)
        np.testing.assert_array_equal(first[name], first[name][:, :1].repeat(8, 1))
    squares = [(1 - 2) ** 2 + 0.3**2, (5 - 2) ** 2 + 0.1**2]  # of each rank, a number of a row
    assert first["norm"] == pytest.approx(math.sqrt(8 * sum(squares) / 2))
    assert first["touches"] == 0


def test_tables_part_until_they_are_merged() -> None:
    first, second = run(f"{HERE}:never_merged", 2)
    tables = [name for name in first["own"] if name.startswith("bags.")]
    others = [name for name in first["own"] if not name.startswith(("bags.", "rows."))]
    assert tables
    assert any(not np.array_equal(first["own"][name], second["own"][name]) for name in tables)
    for name in others:  # MLPs and their optimizer state never part
        np.testing.assert_array_equal(first["own"][name], second["own"][name])
    for name, tensor in first["merged"].items():
        np.testing.assert_array_equal(tensor, second["merged"][name])
    for found in (first, second):
        for name in tables:
            np.testing.assert_array_equal(found["seen"][name], first["merged"][name])
        for name, tensor in found["own"].items():  # an evaluation leaves each rank's own as it was
            np.testing.assert_array_equal(found["after"][name], tensor)
        assert found["norms"][0] > 0
        assert found["norms"][1] == 0
        assert found["merges"] == 1, "there was nothing left to merge the second time"
        assert found["difference_between_ranks"] == found["norms"][0]
        assert found["sent_bytes_per_sample"] > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"merge_every": 5}, "--merge-every goes with --strategy local"),
        ({"strategy": "local", "merge_every": 0}, "--merge-every must be at least 1"),
        ({"strategy": "local", "clip_norm": 1.0}, "no process of --strategy local has"),
        ({"strategy": "data-parallel", "timeout": 0.0}, "--timeout must be above 0"),
    ],
)
def test_settings_that_do_not_go_together(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainConfig.of(**options)  # type: ignore[arg-type]
