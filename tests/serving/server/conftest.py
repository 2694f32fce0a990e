"""One server for the tests of a module that do not change it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdall.serving.scorer import Scorer, load
from holdall.serving.server.run import Server
from tests.serving.server.running import Client, made_bundle, running


@pytest.fixture(scope="session")
def bundle(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three dense columns I1 to I3 and three features C1 to C3."""
    return made_bundle(data, tmp_path_factory.mktemp("bundle") / "model")


@pytest.fixture(scope="session")
def bag_bundle(bag_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The features C2 and C3 are bags."""
    return made_bundle(bag_data, tmp_path_factory.mktemp("bundle") / "bags")


@pytest.fixture(scope="session")
def scorer(bundle: Path) -> Scorer:
    return load(bundle)


@pytest.fixture(scope="module")
def server(bundle: Path) -> Iterator[Server]:
    with running(bundle, max_rows=300, max_bytes=100_000) as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    client = Client(server)
    yield client
    client.http.close()


@pytest.fixture(scope="session")
def row(scorer: Scorer) -> dict[str, Any]:
    """A row that can be scored."""
    from holdall.serving.server.example import example_row

    return example_row(scorer)
