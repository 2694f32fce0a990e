"""Forked commands: what is known of one that is killed at once, or at a change of a file."""

from __future__ import annotations

from pathlib import Path

from tests.attacks.command import Ended, Fault, Running, in_process, run


def test_a_command_that_is_killed_at_once(tmp_path: Path) -> None:
    assert in_process(_killed_at_once, tmp_path, modules=()) == Ended(-9, "", "")


def _killed_at_once(folder: Path) -> Ended:
    running = Running("inspect nowhere", folder)
    running.kill()
    return running.wait()


def test_changes_are_counted_and_fail(tmp_path: Path) -> None:
    whole, failed = in_process(_failed, tmp_path, modules=("holdall.cli", "polars"))
    assert (whole.code, failed.code) == (0, 2)
    assert whole.changes > failed.changes > 0
    assert "the disk is full" in failed.says
    assert {path.name for path in tmp_path.iterdir()} == {"clicks.csv", "schema.toml", "whole"}


def _failed(folder: Path) -> tuple[Ended, Ended]:
    (folder / "schema.toml").write_text('label = "y"\ncategorical = ["c"]\n')
    (folder / "clicks.csv").write_text("y,c\n" + "0,a\n1,b\n" * 50)
    prepare = "prepare clicks.csv --format table --schema schema.toml --out"
    return run(f"{prepare} whole", folder), run(f"{prepare} failed", folder, Fault(3, "ENOSPC"))
