"""Resuming with a damaged newest checkpoint: the one before is used, with a warning."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.inject import Fault
from tests.faults.launch import launch

pytestmark = pytest.mark.slow

WORDS = [
    "--save-every",
    "4",
    "--no-save-in-background",
    "--steps",
    "20",
    "--strategy",
    "two-fold",
    "--hot-bytes",
    "2KB",
]
SHARD = "shard-00001-00000.safetensors"


def truncate(shard: Path) -> None:
    shard.write_bytes(shard.read_bytes()[:-9])


def change_a_byte(shard: Path) -> None:
    content = bytearray(shard.read_bytes())
    content[-3] ^= 1
    shard.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "what"),
    [(truncate, "bytes where its manifest says"), (change_a_byte, "has been altered since it was written")],
)
def test_goes_on_from_the_one_before(
    damage: Callable[[Path], None],
    what: str,
    clicks: Path,
    tmp_path: Path,
    same_as_undisturbed: Callable[..., None],
) -> None:
    killed = launch(clicks, tmp_path / "run", WORDS, [Fault("step", 9, 0)], max_restarts=0)
    assert not killed.succeeded
    damage(tmp_path / "run" / "checkpoints" / "step-00000008" / SHARD)
    found = launch(clicks, tmp_path / "run", WORDS, scratch=tmp_path / "again")
    (said,) = found.said(0)
    assert f"step-00000008/{SHARD}" in said
    assert what in said
    assert "this run resumes from step-00000004" in said
    assert found.said(1) == [""]
    assert found.resumed() == [4]
    same_as_undisturbed(found, WORDS)
