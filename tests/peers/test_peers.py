"""Other people's tests and models (`make peers`); each part is skipped without its library or its folder of tests."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

from tests.peers import libraries
from tests.peers.expected import verdict

pytestmark = pytest.mark.slow

ACCEPTED = ("works", "skipped", "refused", "expected difference")


def folder(name: str) -> Path:
    variable = f"HOLDALL_{name.upper()}_TESTS"
    if variable not in os.environ:
        pytest.skip(f"{variable} does not name the folder of {name}'s tests: see docs/compatibility.md")
    return Path(os.environ[variable])


def test_pytorchs_tests_of_embeddings() -> None:
    where = folder("pytorch")
    if importlib.util.find_spec("expecttest") is None:
        pytest.skip("expecttest is not installed: see tests/peers/requirements.txt")
    from tests.peers import pytorch_suite, replay

    cases, record = pytorch_suite.run(where)
    found = {case.name: verdict(case) for case in cases}
    assert {name: one for name, one in found.items() if one[0] not in ACCEPTED} == {}
    assert sum(outcome == "works" for outcome, _ in found.values()) >= 155
    assert {
        method: one.different for method, one in replay.compare(record.lookups[::20]).items() if one.different
    } == {}


def test_torchrecs_tests_of_collections() -> None:
    where = folder("torchrec")
    if libraries.version("torchrec") is None:
        pytest.skip("torchrec is not installed: see tests/peers/requirements-no-deps.txt")
    from tests.peers import torchrec_suite

    found = {case.name: verdict(case) for cases in torchrec_suite.run(where).values() for case in cases}
    assert {name: one for name, one in found.items() if one[0] not in ACCEPTED} == {}


@pytest.mark.parametrize("library", libraries.LIBRARIES)
def test_compress_on_the_models_of(library: str) -> None:
    if libraries.version(library) is None:
        pytest.skip(f"{library} is not installed: see tests/peers/requirements.txt")
    found = {outcome.name: (outcome.outcome, outcome.sentence) for outcome in libraries.check_models(library)}
    assert found
    assert {name: one for name, one in found.items() if one[0] not in ACCEPTED} == {}
