"""What every test shares: one thread, since the work is tiny and cores may be busy, and small prepared data sets."""

from __future__ import annotations

import gc
import signal
from collections.abc import Generator
from pathlib import Path

import pytest
import torch

from holdall.data.synthetic import SyntheticConfig, write_prepared

torch.set_num_threads(1)

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell that starts the suite in the background ignores Ctrl-C for it, and for every command that a test starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect without garbage collections, and leave modules and tests, which stay to the end, out of later ones."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """4,000 clicks with three one-hot features; train, valid and test."""
    out = tmp_path_factory.mktemp("data") / "clicks"
    write_prepared(SyntheticConfig(rows=4000, cardinalities=(50, 7, 400), num_dense=3), out)
    return out


@pytest.fixture(scope="session")
def bag_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """1,500 clicks with bags of up to four ids beside one-hot features."""
    out = tmp_path_factory.mktemp("data") / "bags"
    config = SyntheticConfig(rows=1500, cardinalities=(50, 7, 400), num_dense=2, bag_lengths=(1, 4, 3))
    write_prepared(config, out)
    return out
