"""The README and the shipped files tell the truth: its commands run, its code runs, its tree and configs are real."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from holdall.cli import main
from holdall.common.settings import overlay, read_toml
from holdall.data.prepare import PrepareConfig
from holdall.data.synthetic import preset, write_tsv
from holdall.training.config import TrainConfig

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")

FAST = ["--dim", "4", "--bottom", "8", "--top", "8"]


def blocks(language: str) -> list[str]:
    """The fenced blocks of one language, '' for those that name none."""
    return [
        text for name, text in re.findall(r"^```(\w*)\n(.*?)^```", README, flags=re.DOTALL | re.M) if name == language
    ]


def test_the_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every `holdall` command of the README, in order, in one folder, on a small log; only sizes are made smaller."""
    monkeypatch.chdir(tmp_path)
    for day in (0, 1):
        write_tsv(preset("criteo-kaggle", scale=5e-4, rows=2000, seed=day), tmp_path / f"day_{day}.tsv.gz")
    commands = [line for block in blocks("bash") for line in block.splitlines() if line.startswith("holdall ")]
    assert {shlex.split(command)[1] for command in commands} >= {"prepare", "train", "evaluate", "inspect"}
    for command in commands:
        words = shlex.split(command, comments=True)[1:]
        main([*words, *FAST] if words[0] == "train" else words)
    assert (tmp_path / "run" / "checkpoints").is_dir()
    assert (tmp_path / "small" / "checkpoints").is_dir()


def test_the_make_targets_exist() -> None:
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    used = {line.split()[1] for block in blocks("bash") for line in block.splitlines() if line.startswith("make ")}
    assert used
    assert used <= set(targets)


@pytest.mark.parametrize("code", blocks("python"), ids=lambda code: code.splitlines()[0][:30])
def test_the_library_examples_run(code: str, tmp_path: Path) -> None:
    write_tsv(preset("criteo-kaggle", scale=1e-3, rows=2000), tmp_path / "clicks.tsv.gz")
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr


def test_the_architecture_page_lists_every_module() -> None:
    result = subprocess.run(
        [sys.executable, ROOT / "tools" / "architecture.py", "--check"], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.toml")), ids=lambda path: path.name)
def test_every_shipped_config_parses(path: Path) -> None:
    if path.name.startswith("table-"):
        from holdall.data.formats.custom import load_layout

        assert load_layout(path)
    elif path.name.startswith("prepare-"):
        overlay(PrepareConfig(), read_toml(path), path.name)
    else:
        overlay(TrainConfig(), read_toml(path), path.name)


def test_figures_in_the_readme_have_a_card() -> None:
    """Every benchmark that the README names has its run card beside it."""
    named = set(re.findall(r"benchmarks/results/([\w.-]+)", README))
    assert named
    for name in named:
        assert (ROOT / "benchmarks" / "results" / name).exists(), name
