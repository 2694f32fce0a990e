"""Errors for users: one base, and each also the error that Python or PyTorch raises in such a place."""

from __future__ import annotations

import pytest

from holdall.common import errors
from holdall.embedding.bags import EmbeddingBags


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (errors.ConfigError, ValueError),
        (errors.DataError, ValueError),
        (errors.CheckpointError, ValueError),
        (errors.IdError, IndexError),
        (errors.TierError, RuntimeError),
        (errors.ProcessError, RuntimeError),
        (errors.NonFiniteLossError, ArithmeticError),
        (errors.MissingDependencyError, ImportError),
    ],
)
def test_an_error_is_the_one_that_python_has_for_it(
    error: type[errors.HoldallError], expected: type[Exception]
) -> None:
    assert issubclass(error, errors.HoldallError)
    assert issubclass(error, expected)


def test_a_setting_that_cannot_work_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="at least one table"):
        EmbeddingBags({})
