"""README.md and the shipped files: commands and code run, figures have run cards, configs parse."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import run as torchrun

from holdall.common.settings import overlay, read_toml
from holdall.data.prepare import PrepareConfig
from holdall.data.synthetic import preset, write_tsv
from holdall.training.config import TrainConfig
from tests import pages
from tests.distributed import harness

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
        if not command.startswith("holdall serve "):  # tests/serving/server
            pages.run(command)
    for run in (re.findall(r"--out (\S+)", command)[0] for command in commands if " train " in command):
        assert (tmp_path / run / "checkpoints").is_dir(), run


@pytest.mark.slow
def test_the_command_for_several_processes(data: Path, tmp_path: Path) -> None:
    """As torchrun reads it, in forked processes, with a small model. Only rank 0 prints."""
    (tmp_path / "data").symlink_to(data)
    (command,) = [command for command in pages.commands(README) if command.startswith("torchrun ")]
    read = torchrun.parse_args(shlex.split(command)[1:])
    assert (read.module, read.training_script) == (True, "holdall")
    words = [*read.training_script_args, *pages.SMALL["train"]]
    found = harness.run("tests.distributed.process_workers:command", int(read.nproc_per_node), str(tmp_path), words)
    assert all(code == 0 for _, _, code in found), found
    assert (tmp_path / "spread" / "checkpoints").is_dir()
    assert len(re.findall(r"trained \d+ steps", "".join(out for out, _, _ in found))) == 1
    assert "".join(err for _, err, _ in found).count("next: holdall evaluate") == 1


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


def test_results_are_those_of_their_run_cards() -> None:
    """Five lines; the figures of each, rounded as shown, from the card that it links to."""

    def card(name: str) -> dict[str, Any]:
        path = ROOT / "benchmarks" / "results" / f"{name}.json"
        return json.loads(path.read_text(encoding="utf-8"))["results"]

    gpu, disk = card("tiers_gpu"), card("tiers_disk")
    ahead, on_disk, in_memory = gpu["runs"]["kernel-2"], disk["runs"]["disk"], disk["runs"]["host"]
    (trainer,) = [r for r in card("gpu_trainer")["rows"] if (r["tables"], r["cuda graph"]) == ("dense", "on")]
    auc = {(row["set"], row["side"], row["budget"]): row["auc"] for row in card("accuracy")["means"]}
    from_start = [auc["criteo", name, "1/20"] for name in ("tensor_train", "frobenius", "hot_cold", "hot_tensor_train")]
    lines = [row for row in card("links")["lines"] if (row["model"], row["Gbit/s"]) == ("dlrm", 1.0)]
    ratios = [row["it / best of others"] for row in lines if row["way"].startswith("two-fold")]
    expected = {
        "tiers_gpu": [
            f"{gpu['table_bytes'] / 1e9:.0f} GB",
            f"{ahead['device_gb']:.1f} GB",
            f"{ahead['samples_per_second'] / 1e6:.1f}M samples/s",
            f"{ahead['over_all_on_device']:.2f} of the speed",
            f"{ahead['hot_share_of_lookups']:.1%} of lookups",
        ],
        "tiers_disk": [
            f"{disk['table_bytes'] / 1e9:.0f} GB",
            f"{on_disk['samples_per_second'] / 1e3:.1f}k samples/s",
            f"{on_disk['peak_memory_gb']:.1f} GB",
            f"{in_memory['samples_per_second'] / 1e3:.1f}k samples/s, {in_memory['peak_memory_gb']:.1f} GB",
        ],
        "gpu_trainer": [f"{trainer['M samples/s']:.1f}M samples/s"],
        "accuracy": [
            f"dense {auc['criteo', 'dlrm', '1']:.4f}",
            f"trained further {auc['criteo', 'hot_cold fit', '1/20']:.4f}",
            f"as `suggest` does without counts, {auc['criteo', 'auto', '1/20']:.4f}",
            f"{min(from_start):.4f} to {max(from_start):.4f}",
        ],
        "links": [f"{min(ratios):.1f} to {max(ratios):.1f} times"],
    }
    text = README.read_text(encoding="utf-8")
    section = text[text.index("## Results") : text.index("## Status")]
    shown = {name: line for line in section.splitlines() for name in re.findall(r"results/(\w+)\.json", line)}
    assert shown.keys() == expected.keys()
    missing = [(name, figure) for name, figures in expected.items() for figure in figures if figure not in shown[name]]
    assert missing == []


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.toml")), ids=lambda path: path.name)
def test_every_shipped_config_parses(path: Path) -> None:
    if path.name.startswith("table-"):
        from holdall.data.formats.table import load_layout

        assert load_layout(path)
    elif path.name.startswith("prepare-"):
        overlay(PrepareConfig(), read_toml(path), path.name)
    else:
        overlay(TrainConfig(), read_toml(path), path.name)
