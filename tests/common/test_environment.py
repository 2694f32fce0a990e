"""Environment of a measurement."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from holdall.common import environment

ROOT = Path(__file__).resolve().parents[2]


def test_the_commit_is_that_of_the_checkout_the_package_runs_from(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"rev-parse --show-toplevel": str(ROOT), "rev-parse HEAD": "0123abc", "status": ""}

    def git(folder: Path, *arguments: str) -> str | None:
        return next(answer for question, answer in answers.items() if " ".join(arguments).startswith(question))

    monkeypatch.setattr(environment, "_git", git)
    monkeypatch.setattr(environment, "_commit_of", environment._commit_of.__wrapped__)
    assert environment.checkout() == {"commit": "0123abc", "dirty": False}
    answers["status"] = " M README.md"
    assert environment.checkout() == {"commit": "0123abc", "dirty": True}


def test_a_process_asks_git_once(monkeypatch: pytest.MonkeyPatch) -> None:
    first = environment.checkout()
    monkeypatch.setattr(environment, "_git", lambda folder, *arguments: pytest.fail("asked again"))
    assert environment.checkout() == first


def test_an_environment_inside_another_repository_has_no_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    monkeypatch.setattr(environment, "__file__", str(tmp_path / "lib" / "holdall" / "common" / "environment.py"))
    (tmp_path / "lib" / "holdall").mkdir(parents=True)
    assert environment.checkout() == {"commit": None, "dirty": None}
