"""Concurrent branches: on a CPU work runs in order, and the switch that turns branches off is undone."""

from __future__ import annotations

import contextlib

import torch

from holdall.kernels import side_stream
from holdall.kernels.side_stream import beside, one_after_the_other


def test_on_a_cpu_things_happen_in_order() -> None:
    done = []
    with beside(torch.device("cpu")) as other:
        done.append("beside")
    done.append("first")
    other.join()
    assert done == ["beside", "first"]


def test_the_switch_comes_back_on() -> None:
    with contextlib.suppress(ZeroDivisionError), one_after_the_other():
        assert not side_stream._overlaps
        _ = 1 / 0
    assert side_stream._overlaps
