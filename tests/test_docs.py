"""The pages in docs/ tell the truth: their commands run."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from holdall.cli import main
from holdall.data.prepare import PrepareConfig, prepare
from holdall.data.synthetic import preset, write_tsv
from tests.planning.made_up_hardware import hardware

DOCS = Path(__file__).resolve().parent.parent / "docs"
FAST = ["--dim", "4", "--bottom", "8", "--top", "8"]


def test_the_commands_for_tables_larger_than_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command of the page, in order, with smaller models; the hardware is made up instead of measured."""
    monkeypatch.chdir(tmp_path)
    write_tsv(preset("criteo-kaggle", scale=5e-4, rows=3000), tmp_path / "log.tsv.gz")
    prepare(["log.tsv.gz"], tmp_path / "data", PrepareConfig())
    hardware().save(tmp_path / "hardware.json")
    text = (DOCS / "larger-than-memory.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```bash\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    commands = [line for block in blocks for line in block.splitlines() if line.startswith("holdall ")]
    assert {shlex.split(command)[1] for command in commands} == {"profile", "doctor", "train", "hardware", "plan"}
    for command in commands:
        words = shlex.split(command, comments=True)[1:]
        if words[0] == "hardware":
            continue
        if words[0] == "plan":
            words += [*FAST, "--hardware", "hardware.json"]
        elif words[0] == "train" and "--plan" not in words:
            words += FAST
        main(words)
    for run in ("run", "disk-run", "hot-run", "planned"):
        assert (tmp_path / run / "checkpoints").is_dir(), run
    assert list((tmp_path / "figures").glob("*.svg"))


def test_the_commands_for_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command of the page, on this machine's CPU, with smaller models and batches."""
    monkeypatch.chdir(tmp_path)
    write_tsv(preset("criteo-kaggle", scale=5e-4, rows=2000), tmp_path / "log.tsv.gz")
    prepare(["log.tsv.gz"], tmp_path / "data", PrepareConfig())
    (block,) = re.findall(r"^```bash\n(.*?)^```", (DOCS / "gpu.md").read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    commands = [shlex.split(line, comments=True)[1:] for line in block.splitlines()]
    assert len(commands) == 3
    for words in commands:
        words = [{"cuda": "cpu", "65536": "512", "--compile": "--no-compile"}.get(word, word) for word in words]
        main([*words, *FAST])
        assert (tmp_path / words[words.index("--out") + 1] / "checkpoints").is_dir()
