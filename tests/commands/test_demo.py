"""The demo, with fewer rows: every stage leaves its artifact and the table compares with the best possible."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from holdall.cli import main
from holdall.commands.demo import demo
from holdall.commands.inspect import inspect
from holdall.common.errors import HoldallError

pytestmark = pytest.mark.slow


def test_the_demo_goes_the_whole_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "demo"
    main(["demo", "--out", str(out), "--rows", "6000"])
    printed = capsys.readouterr().out
    aucs = {name: float(auc) for name, auc in re.findall(r"(dense|compressed|best possible).*?(0\.\d{4})", printed)}
    assert aucs.keys() == {"dense", "compressed", "best possible"}
    assert max(aucs["dense"], aucs["compressed"]) <= aucs["best possible"] + 0.03
    assert inspect(out / "data")["kind"] == "data"
    for run in ("dense", "compressed"):
        assert inspect(out / run)["checkpoint"]
    with pytest.raises(HoldallError, match="exists already"):
        demo(out)
    with pytest.raises(SystemExit):
        main(["demo", "--out", str(out)])
    assert "exists already" in capsys.readouterr().err


def test_overwrite_replaces_demos_of_010_and_nothing_like_them(tmp_path: Path) -> None:
    out = tmp_path / "demo"
    demo(out, rows=600)
    (out / "demo.json").unlink()
    (out / "notes.txt").write_text("mine")
    with pytest.raises(HoldallError, match="not a demo folder"):
        demo(out, rows=600, overwrite=True)
    assert (out / "notes.txt").read_text() == "mine"
    (out / "notes.txt").unlink()
    demo(out, rows=700, overwrite=True)
    assert json.loads((out / "demo.json").read_text())["rows"] == 700
