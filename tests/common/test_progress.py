"""Progress of a run: plain lines without a terminal, a bar on one."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from holdall.common import progress as bars
from holdall.common.progress import SampleProgress, shows_bar


def test_plain_lines_where_there_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = {"now": 0.0}
    monkeypatch.setattr(bars, "monotonic", lambda: clock["now"])
    with SampleProgress(10_000, done=2_000, seconds=10) as progress:
        for clock["now"] in (4.0, 8.0, 12.0, 16.0):
            progress.update(1_000, loss=0.5)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "train 5,000/10,000  250 samples/s  loss 0.5000  0:00:20 left\n"


def test_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    with SampleProgress(10, seconds=0, quiet=True) as progress:
        progress.update(5)
    assert capsys.readouterr().err == ""


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(
        bars, "Console", lambda stderr: Console(file=screen, force_terminal=True, width=120, stderr=stderr)
    )
    with SampleProgress(1_000, label="valid") as progress:
        progress.update(400, loss=0.25)
    assert "valid" in screen.getvalue()
    assert "400/1,000" in screen.getvalue()
    assert "loss 0.2500" in screen.getvalue()


@pytest.mark.parametrize("has_widgets", [False, True])
def test_a_notebook_has_a_bar_if_it_can_draw_one(has_widgets: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bars, "find_spec", lambda name: object() if has_widgets else None)
    assert shows_bar(Console(force_jupyter=True, stderr=True)) is has_widgets
    assert not shows_bar(Console(file=io.StringIO(), stderr=True))
