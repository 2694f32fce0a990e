"""docs/your-data.md: its files are read, its commands and its program run, its options exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from holdall.cli import main
from holdall.common.settings import overlay, parts_of
from holdall.data.dataset import DataSet
from holdall.data.formats.registry import FORMATS
from holdall.data.id_map import load_id_maps
from holdall.data.prepare import PrepareConfig
from holdall.data.schema import Schema

PAGE = Path(__file__).parents[2] / "docs/your-data.md"


def blocks(kind: str) -> list[str]:
    """Fenced blocks of the page with this word after the opening fence."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), flags=re.M | re.S)
    return [text for found, text in fenced if found == kind]


def test_the_walk_through_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.chdir(tmp_path)
    (rows, *_), (schema_text, *_), (commands, *_) = blocks("csv"), blocks("toml"), blocks("bash")
    Path("clicks.csv").write_text(rows)
    Path("clicks.toml").write_text(schema_text)
    for command in commands.splitlines():
        program, *arguments = shlex.split(command)
        assert program == "holdall"
        main(arguments)
    schema = Schema.load(Path("data"))
    assert sum(split.rows for split in schema.splits.values()) == len(rows.splitlines()) - 1
    assert [feature.name for feature in schema.features] == ["user", "site", "tags"]
    assert "auc" in capsys.readouterr().out


def test_the_reader_of_ones_own_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    *_, program = blocks("python")
    exec(compile(program, str(PAGE), "exec"), {"__name__": "events"})
    assert sum(split.rows for split in Schema.load(Path("events")).splits.values()) == 50
    assert len(DataSet("events", "train")) > 30
    assert load_id_maps("events")["seen"].values[0].as_py() == "a"


def options(words: list[str], config: type, others: set[str]) -> dict[str, object]:
    """Options of a command by field of its settings; `others` are those of the command itself."""
    kinds = {name: kind for part in (config, *parts_of(config).values()) for name, kind in get_type_hints(part).items()}
    given: dict[str, object] = {}
    for word, value in zip(words, [*words[1:], ""], strict=True):
        if word.startswith("--") and (name := word[2:].replace("-", "_")) not in others:
            kind = next((kind for kind in (bool, int, float) if kind in (kinds[name], *get_args(kinds[name]))), str)
            given[name] = kind(value) if kind is not bool else True
    return given


def test_every_command_on_the_page_has_options_that_exist() -> None:
    commands = [shlex.split(line) for block in blocks("") for line in block.splitlines() if line.startswith("holdall ")]
    seen = set()
    for _, verb, *words in commands:
        assert verb == "prepare"  # others run, in tests/test_docs.py
        config = overlay(PrepareConfig(), options(words, PrepareConfig, {"out"}), " ".join(words))
        seen.add(config.format)
    assert seen == {"criteo", "avazu", "movielens", "taobao", "bookcrossing", "table"} <= set(FORMATS)
