"""Data-parallel training equals one process on the concatenated batch, with the same result on every rank."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.distributed import gradient_workers as workers
from tests.distributed.harness import run

pytestmark = pytest.mark.slow

HERE = "tests.distributed.gradient_workers"


def close(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Equal up to the order of sums in float64."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_allclose(found[name], tensor.numpy(), rtol=1e-9, atol=1e-11, err_msg=name)


def same_bits(first: dict[str, Any], second: dict[str, Any]) -> bool:
    return first.keys() == second.keys() and all(np.array_equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("num", [1, 2, 3, 4])
def test_equals_one_process_on_the_whole_batch(num: int) -> None:
    """Every optimizer, bags, compressed tables; the batches of 7 and 1 samples leave uneven and empty shares."""
    results = run(f"{HERE}:all_cases", num)
    for case in workers.cases():
        name = "/".join(map(str, case))
        close(results[0][name], workers.alone(*case))
        assert all(same_bits(results[0][name], other[name]) for other in results[1:]), name


def test_gradients_are_clipped_by_their_joint_norm() -> None:
    expected = workers.alone("adagrad", True, "dense", 0.05)
    results = run(f"{HERE}:clipped", 2)
    close(results[0], expected)
    assert same_bits(*results)
    free = workers.alone("adagrad", True, "dense")
    assert any(not np.allclose(free[name], expected[name]) for name in expected)
