"""README.md and the shipped files: commands and code run, figures have run cards, configs parse."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from holdall.common.settings import overlay, read_toml
from holdall.data.prepare import PrepareConfig
from holdall.data.synthetic import preset, write_tsv
from holdall.training.config import TrainConfig
from tests import pages
from tests.distributed.harness import free_port

pytestmark = pytest.mark.slow

ROOT = pages.ROOT
README = ROOT / "README.md"


def test_it_is_one_page() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 150


def test_the_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command, in order, in one folder, on a small log; models are smaller, rates are made up."""
    monkeypatch.chdir(tmp_path)
    pages.set_up(tmp_path, data=False)
    commands = [command for command in pages.commands(README) if command.startswith("holdall ")]
    verbs = {command.split()[1] for command in commands}
    assert verbs >= {"prepare", "train", "evaluate", "inspect", "profile", "hardware", "plan"}
    for command in commands:
        pages.run(command)
    for run in (re.findall(r"--out (\S+)", command)[0] for command in commands if " train " in command):
        assert (tmp_path / run / "checkpoints").is_dir(), run


@pytest.mark.slow
def test_the_command_for_several_processes(data: Path, tmp_path: Path) -> None:
    """With this interpreter, a free port and a small model."""
    (tmp_path / "data").symlink_to(data)
    (command,) = [command for command in pages.commands(README) if command.startswith("torchrun ")]
    agent = [sys.executable, "-m", "torch.distributed.run", "--master-port", str(free_port())]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    words = [*agent, *shlex.split(command)[1:], *pages.SMALL["train"]]
    done = subprocess.run(words, capture_output=True, text=True, timeout=200, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "spread" / "checkpoints").is_dir()


def test_every_command_is_tested() -> None:
    """Those of other programs are the two make targets and the one under torchrun."""
    others = [command for command in pages.commands(README) if not command.startswith("holdall ")]
    assert [command.split()[0] for command in others] == ["make", "make", "torchrun"]


def test_the_make_targets_exist() -> None:
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    for page in (README, ROOT / "CONTRIBUTING.md"):
        used = {command.split()[1] for command in pages.commands(page) if command.startswith("make ")}
        assert used
        assert used <= set(targets), page.name


@pytest.mark.parametrize("code", pages.blocks(README, "python"), ids=lambda code: code.splitlines()[-1][:30])
def test_the_library_examples_run(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_tsv(preset("criteo-kaggle", scale=1e-3, rows=2000), tmp_path / "clicks.tsv.gz")
    pages.run_python(code, README)


def test_every_result_has_a_run_card() -> None:
    """Every line of the table of results names the card of its figures; test_docs.py checks the links."""
    text = README.read_text(encoding="utf-8")
    section = text[text.index("## Results") : text.index("## Status")]
    rows = [line for line in section.splitlines() if line.startswith("| ")][2:]
    assert len(rows) == 5
    assert all(re.search(r"benchmarks/results/\w+\.json", row) for row in rows)


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.toml")), ids=lambda path: path.name)
def test_every_shipped_config_parses(path: Path) -> None:
    if path.name.startswith("table-"):
        from holdall.data.formats.table import load_layout

        assert load_layout(path)
    elif path.name.startswith("prepare-"):
        overlay(PrepareConfig(), read_toml(path), path.name)
    else:
        overlay(TrainConfig(), read_toml(path), path.name)
