"""Learning-rate schedule on planted values."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdall.common.errors import ConfigError
from holdall.optim.schedule import Schedule


def test_constant_by_default():
    assert [Schedule().factor(step) for step in (0, 1, 1_000_000)] == [1.0, 1.0, 1.0]


def test_warmup_rises_linearly_and_learns_from_the_first_step():
    schedule = Schedule(warmup_steps=4)
    assert [schedule.factor(step) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_warmup_plateau_and_quadratic_decay():
    schedule = Schedule(warmup_steps=2, decay_start=4, decay_steps=4)
    expected = [0.5, 1.0, 1.0, 1.0, 1.0, 0.5625, 0.25, 0.0625, 0.0, 0.0]
    assert [schedule.factor(step) for step in range(10)] == expected


def test_linear_decay_to_an_end_factor():
    schedule = Schedule(decay_steps=2, power=1, end_factor=0.5)
    assert [schedule.factor(step) for step in range(4)] == [1.0, 0.75, 0.5, 0.5]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"warmup_steps": -1}, "warmup_steps"),
        ({"decay_start": -2}, "decay_start"),
        ({"decay_steps": -3}, "decay_steps"),
        ({"power": 0.0}, "power"),
        ({"end_factor": 1.5}, "end_factor"),
        ({"warmup_steps": 10, "decay_start": 5, "decay_steps": 5}, "decay_start to 10"),
    ],
)
def test_refuses_what_cannot_work(options: dict, named: str):
    with pytest.raises(ConfigError, match=named):
        Schedule(**options)


@settings(derandomize=True, deadline=None, max_examples=50)
@given(
    warmup=st.integers(0, 20), plateau=st.integers(0, 20), decay=st.integers(0, 20), end=st.floats(0, 1),
    power=st.floats(0.5, 4),
)  # fmt: skip
def test_rises_then_falls_within_bounds(warmup: int, plateau: int, decay: int, end: float, power: float):
    schedule = Schedule(
        warmup_steps=warmup, decay_start=warmup + plateau, decay_steps=decay, end_factor=end, power=power
    )
    factors = [schedule.factor(step) for step in range(70)]
    assert all(0 <= factor <= 1 for factor in factors)
    assert factors[:warmup] == sorted(factors[:warmup])
    assert factors[warmup:] == sorted(factors[warmup:], reverse=True)
    assert factors[-1] == pytest.approx(end if decay else 1.0)
