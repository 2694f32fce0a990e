"""Every JSON that is read, with each field of a wrong type, removed or there twice: one sentence, never a traceback.

The files are those of version 0.1.0, which have no hash of their content, so that the decoder sees what was changed.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from holdall.checkpoint.manifest import read_manifest
from holdall.common.errors import HoldallError
from holdall.data.schema import Schema
from holdall.planning.machine.hardware import Hardware
from holdall.planning.plan import Plan
from holdall.popularity.profile import Profile
from holdall.training.config import TrainConfig
from holdall.training.run_checkpoints import RunCheckpoints
from holdall.training.tracking import read_metrics, read_run

FIXTURES = Path(__file__).parent / "fixtures" / "v0.1.0"
CHECKPOINT = "runs/split/checkpoints/step-00000006"
DEEP = "a value that is nested 100,000 deep"
WRONG: list[Any] = [None, [], "text", True, 1.5, 10**30, {"a": {}}, DEEP]
FREE = ("source", "machine", "hardware", "versions", "resumed", "dirty", "data", "forecast", "of")
"""Fields whose content is for people, or for a reader of its own."""

Place = tuple[str | int, ...]


def read_checkpoint(path: Path) -> Any:
    found = read_manifest(path.parent)
    return found, RunCheckpoints._state(path.parent, None, found.state)


def read_settings(path: Path) -> Any:
    record = read_run(path.parent)
    return record, TrainConfig.from_json(record["config"]["train"])


READERS: dict[str, Callable[[Path], Any]] = {
    "data/schema.json": lambda path: Schema.load(path.parent),
    "plan.json": Plan.load,
    "hardware.json": Hardware.load,
    "popularity.json": Profile.load,
    "runs/split/run.json": read_settings,
    "runs/split/metrics.jsonl": lambda path: read_metrics(path.parent),
    f"{CHECKPOINT}/manifest.json": read_checkpoint,
    "runs/hot-batches/checkpoints/step-00000006/manifest.json": read_checkpoint,
}


def places(value: Any, place: Place = ()) -> Iterator[Place]:
    """The places of a document; of a list, and of an object with many keys, the first one."""
    keys: list[str | int] = list(value) if isinstance(value, dict) else list(range(len(value)))
    if isinstance(value, list) or (len(keys) > 20 and place and place[-1] != "train"):
        keys = keys[:1]
    for key in keys:
        yield (*place, key)
        if isinstance(value[key], dict | list):
            yield from places(value[key], (*place, key))


def holder(document: Any, place: Place) -> Any:
    for key in place[:-1]:
        document = document[key]
    return document


def text_of(document: Any) -> str:
    return json.dumps(document).replace(json.dumps(DEEP), "[" * 100_000 + "]" * 100_000) + "\n"


def outcome(read: Callable[[Path], Any], path: Path, text: str) -> str | None:
    """The sentence of the refusal; None if the file is read."""
    path.write_text(text, encoding="utf-8")
    try:
        read(path)
    except HoldallError as error:
        sentence = str(error)
    else:
        return None
    assert "\n" not in sentence
    assert len(sentence) < 700
    return sentence


@pytest.fixture(params=READERS)
def artifact(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Callable[[Path], Any], Path, Any]:
    """A reader, a copy of its file, and the document in it."""
    path = tmp_path / Path(request.param).name
    shutil.copytree((FIXTURES / request.param).parent, tmp_path, dirs_exist_ok=True)
    text = path.read_text(encoding="utf-8")
    return READERS[request.param], path, json.loads(text.splitlines()[0] if path.suffix == ".jsonl" else text)


@pytest.mark.slow
def test_wrong_types(artifact: tuple[Callable[[Path], Any], Path, Any]) -> None:
    read, path, document = artifact
    assert outcome(read, path, text_of(document)) is None
    for number, place in enumerate(places(document)):
        changed = copy.deepcopy(document)
        for value in WRONG if number == 0 else WRONG[:-1]:  # nested too deep: refused before any place is read
            holder(changed, place)[place[-1]] = value
            refused = outcome(read, path, text_of(changed))
            original = holder(document, place)[place[-1]]
            typed = not any(key in FREE for key in place) and isinstance(original, int | float | str)
            known = path.name != "metrics.jsonl" or place[-1] in ("step", "split")
            if value == DEEP or (typed and known and isinstance(value, list | dict)):
                assert refused, f"{place} was read with {value!r}"


def test_removed_fields(artifact: tuple[Callable[[Path], Any], Path, Any]) -> None:
    read, path, document = artifact
    sentences = []
    for place in places(document):
        changed = copy.deepcopy(document)
        del holder(changed, place)[place[-1]]
        sentences.append(outcome(read, path, text_of(changed)))
    assert any(sentence and "is missing" in sentence for sentence in sentences)


def test_fields_that_are_there_twice(artifact: tuple[Callable[[Path], Any], Path, Any]) -> None:
    read, path, document = artifact
    for place in places(document):
        if isinstance(place[-1], str):
            key = json.dumps(place[-1])
            refused = outcome(read, path, text_of(document).replace(f"{key}: ", f"{key}: 1, {key}: ", 1))
            assert refused is not None
            assert "twice" in refused
