"""The gallery of examples: every section runs from top to bottom in an empty folder, on fewer rows."""

from __future__ import annotations

import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest
from torch.distributed import run as torchrun

from tests import pages
from tests.distributed import harness
from tests.planning.made_up_hardware import hardware

pytestmark = pytest.mark.slow

PAGE = pages.ROOT / "docs" / "examples.md"
SECTIONS = {
    text.splitlines()[0]: pages.commands_of(text) for text in PAGE.read_text(encoding="utf-8").split("\n## ")[1:]
}
FEWER = 40
"""Rows on the page for one in the tests."""


def run_script(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A script of the page, in this process."""
    fewer = [str(int(word) // FEWER) if word.isdigit() else word for word in words]
    monkeypatch.setattr(sys, "argv", fewer)
    runpy.run_path(fewer[0], run_name="__main__")


def run_processes(command: str, folder: Path) -> None:
    """A command under torchrun, as torchrun reads it, in forked processes with a small model."""
    read = torchrun.parse_args(shlex.split(command)[1:])
    assert (read.module, read.training_script) == (True, "holdall")
    words = [*read.training_script_args, *pages.SMALL["train"]]
    found = harness.run("tests.distributed.process_workers:command", int(read.nproc_per_node), str(folder), words)
    assert all(code == 0 for _, _, code in found), found


def test_there_are_five() -> None:
    assert len(SECTIONS) == 5
    assert all(SECTIONS.values())


@pytest.mark.parametrize("name", SECTIONS)
def test_it_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    pages.write_modules(PAGE, tmp_path)
    for command in SECTIONS[name]:
        program, *words = shlex.split(command)
        if program == "python":
            run_script(words, monkeypatch)
        elif program == "torchrun":
            run_processes(command, tmp_path)
        elif words[0] == "hardware":
            hardware().save(tmp_path / "hardware.json")
        else:
            assert program == "holdall", command
            pages.run(command)
        for out in re.findall(r"--out (\S+)", command):
            assert (tmp_path / out).exists(), command
