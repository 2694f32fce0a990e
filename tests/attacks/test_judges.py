"""The attackers themselves: each bad end of a command gets its name."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.attacks.artifacts import Reader, judge, printed
from tests.attacks.command import Ended, chooser
from tests.attacks.damage import damages
from tests.attacks.workspace import snapshot

SENTENCE = "holdall: run.json is damaged: copy it again\n"
TRACEBACK = 'Traceback (most recent call last):\n  File "x.py", line 1\nKeyError: 3\n'
READER = Reader("evaluate run --json", printed, writes=("new",))


@pytest.mark.parametrize(
    ("ended", "outcome"),
    [
        (Ended(0, '{"auc": 0.5, "samples_per_second": 9}', ""), "identical"),
        (Ended(0, '{"auc": 0.6}', ""), "silent"),
        (Ended(0, "no JSON", ""), "silent"),
        (Ended(2, "", SENTENCE), "refused"),
        (Ended(2, "", "holdall: warning: an old one\n" + SENTENCE), "refused"),
        (Ended(2, "", "peak bytes: 1.4 KB\n" + SENTENCE), "refused"),
        (Ended(2, "", SENTENCE * 2), "traceback"),
        (Ended(2, "", SENTENCE + "and more\n"), "traceback"),
        (Ended(2, "", "Exception in thread Thread-1:\nKeyError: 3\n" + SENTENCE), "traceback"),
        (Ended(1, "", SENTENCE), "traceback"),
        (Ended(1, "", TRACEBACK), "traceback"),
        (Ended(2, "", ""), "traceback"),
        (Ended(-7, "", ""), "traceback"),
        (Ended(-9, "", "", hung=True), "hang"),
    ],
)
def test_ends_of_a_command(tmp_path: Path, ended: Ended, outcome: str) -> None:
    assert judge(READER, tmp_path, snapshot(tmp_path), ended, {"auc": 0.5})[0] == outcome


def test_another_result_of_a_file_written_by_hand_is_an_edit(tmp_path: Path) -> None:
    ended = Ended(0, '{"auc": 0.6}', "")
    assert judge(READER, tmp_path, snapshot(tmp_path), ended, {"auc": 0.5}, by_hand=True)[0] == "edited"


@pytest.mark.parametrize("change", ["changed", "deleted", "emptied"])
def test_changed_files_are_lost(tmp_path: Path, change: str) -> None:
    file = tmp_path / "kept.json"
    file.write_text("{}")
    before = snapshot(tmp_path)
    if change == "deleted":
        file.unlink()
    else:
        file.write_text("" if change == "emptied" else "{ }")
    for ended in (Ended(0, '{"auc": 0.5}', ""), Ended(2, "", SENTENCE)):
        assert judge(READER, tmp_path, before, ended, {"auc": 0.5})[0] == "lost"


def test_a_refused_command_leaves_nothing(tmp_path: Path) -> None:
    before = snapshot(tmp_path)
    (tmp_path / "new").mkdir()
    assert judge(READER, tmp_path, before, Ended(0, '{"auc": 0.5}', ""), {"auc": 0.5})[0] == "identical"
    assert judge(READER, tmp_path, before, Ended(2, "", SENTENCE), {"auc": 0.5})[0] == "left"


@pytest.mark.parametrize("name", ["rows.arrow", "plan.json", "metrics.jsonl", "train.toml"])
def test_every_damage_changes_the_folder(tmp_path: Path, name: str) -> None:
    text = "lr = 0.5\nseed = 3\n" if name.endswith("toml") else '{"a": [1, {"b": "c"}], "d": null}\n'
    path, other = tmp_path / name, tmp_path / f"other-{name}"
    for damage in damages(path, [other]):
        for seed in range(10):
            path.write_text(text)
            other.write_text(text.replace("3", "4").replace("null", "1"))
            before = snapshot(tmp_path)
            damage(path, [other], chooser(seed))
            assert snapshot(tmp_path) != before, (damage.__name__, seed)
            for left in tmp_path.iterdir():
                left.rmdir() if left.is_dir() and not left.is_symlink() else left.unlink()
