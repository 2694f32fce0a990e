"""Decoding of JSON and TOML by type hints: values that fit, and one sentence for each that does not."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, NotRequired, TypedDict

import pytest

from holdall.common.decode import (
    MAX_DEPTH,
    NOT_STORED,
    Count,
    NonNegativeFloat,
    PositiveInt,
    decode,
    parse_json,
    parse_toml,
    shown,
)
from holdall.common.errors import ConfigError, DataError, HoldallError
from holdall.common.files import read_json
from holdall.common.settings import read_toml

DEEP = "[" * 100_000 + "]" * 100_000


class Note(TypedDict):
    text: str
    author: NotRequired[str]


@dataclass(frozen=True, kw_only=True)
class Table:
    rows: PositiveInt
    share: NonNegativeFloat = 0.5
    kind: Literal["hot", "cold"] = "hot"

    def __post_init__(self) -> None:
        if self.rows == 13:
            raise ConfigError("13 rows bring bad luck")


@dataclass(frozen=True, kw_only=True)
class Open:
    ignores_unknown: ClassVar[bool] = True

    name: str


@dataclass(frozen=True, kw_only=True)
class Document:
    tables: tuple[Table, ...] = ()
    by_name: dict[str, Table] = field(default_factory=dict)
    pair: tuple[int, str] = (0, "")
    counts: list[Count] = field(default_factory=list)
    rate: float = 0.0
    size: int | str | None = None
    on: bool = False
    folder: Path = Path()
    open: Open | None = None
    note: Note | None = None
    extra: Any = None
    path: str = field(default="", metadata=NOT_STORED)


def test_values_that_fit() -> None:
    given = {
        "tables": [{"rows": 3, "share": 1}],
        "by_name": {"a b": {"rows": 4, "kind": "cold"}},
        "pair": [1, "x"],
        "counts": [0, 2**64 - 1],
        "rate": 2,
        "size": "4GB",
        "on": True,
        "folder": "data",
        "open": {"name": "n", "colour": "red"},
        "note": {"text": "t", "colour": "red"},
        "extra": [{"any": None}],
    }
    found = decode(given, Document, "file")
    assert found == Document(
        tables=(Table(rows=3, share=1.0),),
        by_name={"a b": Table(rows=4, kind="cold")},
        pair=(1, "x"),
        counts=[0, 2**64 - 1],
        rate=2.0,
        size="4GB",
        on=True,
        folder=Path("data"),
        open=Open(name="n"),
        note={"text": "t", "colour": "red"},  # type: ignore[typeddict-unknown-key]
        extra=[{"any": None}],
    )
    assert isinstance(found.rate, float)
    assert isinstance(found.tables[0].share, float)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "file must be an object, not a list: mend it"),
        ({"tables": {}}, "file: 'tables' must be a list, not an object: mend it"),
        ({"tables": [{"rows": 1}, {"rows": 0}]}, "'tables[1].rows' must be a whole number of at least 1, not 0"),
        ({"tables": [{}]}, "'tables[0].rows' is missing"),
        ({"tables": [{"rows": 1, "rwos": 2}]}, "unknown field 'tables[0].rwos' (did you mean 'rows'?)"),
        ({"tables": [{"rows": 13}]}, "file: 'tables[0]': 13 rows bring bad luck: mend it"),
        ({"tables": [{"rows": True}]}, "'tables[0].rows' must be a whole number of at least 1, not True"),
        ({"tables": [{"rows": 1, "share": -0.5}]}, "'tables[0].share' must be a number of at least 0, not -0.5"),
        ({"by_name": {"a b": {"rows": "1"}}}, "'by_name['a b'].rows' must be a whole number of at least 1, not '1'"),
        ({"by_name": {"x": {"rows": 1, "kind": "hat"}}}, "must be 'hot' or 'cold', not 'hat' (did you mean 'hot'?)"),
        ({"pair": [1]}, "'pair' must be a list of 2 values, not of 1"),
        ({"pair": [1, 2]}, "'pair[1]' must be a string, not 2"),
        ({"counts": [1.0]}, "'counts[0]' must be a whole number of at least 0, not 1.0"),
        ({"counts": [2**64]}, "'counts[0]' must be a number of at most 64 bits, not a number of more than 64 bits"),
        ({"rate": 10**400}, "'rate' must be a number of at most 64 bits"),
        ({"rate": float("nan")}, "'rate' must be a finite number, not nan"),
        ({"rate": float("-inf")}, "'rate' must be a finite number, not -inf"),
        ({"rate": False}, "'rate' must be a number, not False"),
        ({"rate": None}, "'rate' must be a number, not null"),
        ({"size": 1.5}, "'size' must be a whole number or a string, not 1.5"),
        ({"on": 1}, "'on' must be true or false, not 1"),
        ({"folder": 1}, "'folder' must be a path, not 1"),
        ({"open": {}}, "'open.name' is missing"),
        ({"note": {"author": "me"}}, "'note.text' is missing"),
        ({"note": {"text": "t", "author": 1}}, "'note.author' must be a string, not 1"),
        ({"path": "x"}, "unknown field 'path'"),
        ({"open": {"name": "x" * 1000}, "rate": "y" * 1000}, f"must be a number, not '{'y' * 56}..."),
    ],
)
def test_values_that_do_not_fit(given: Any, message: str) -> None:
    with pytest.raises(DataError) as caught:
        decode(given, Document, "file", error=DataError, cure="mend it")
    assert message in str(caught.value)
    assert str(caught.value).startswith("file")
    assert str(caught.value).endswith(": mend it")


@pytest.mark.parametrize("kind", [list, dict])
def test_depth_is_bounded(kind: type) -> None:
    def nested(levels: int) -> Any:
        value: Any = 1
        for _ in range(levels):
            value = [value] if kind is list else {"a": value}
        return value

    assert decode({"extra": nested(MAX_DEPTH)}, Document, "file").extra == nested(MAX_DEPTH)
    with pytest.raises(ConfigError, match=r"'extra' is nested more than 64 levels deep"):
        decode({"extra": nested(MAX_DEPTH + 1)}, Document, "file")
    with pytest.raises(ConfigError, match=r"'rate' must be a number, not a[n ]"):
        decode({"rate": nested(100_000)}, Document, "file")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (DEEP, "nested too deeply"),
        ('{"a":' * 100_000 + "1" + "}" * 100_000, "nested too deeply"),
        (f'{{"a": {"9" * 5000}}}', "digits"),
        ('{"a": 1, "b": 2, "a": 1}', "an object has the key 'a' twice"),
        ('{"a": "\\ud800"}', "half of a surrogate pair"),
        ('{"\\uDFFF": 1}', "half of a surrogate pair"),
        (b"\xff\xfe", "can't decode byte"),
        ("", "Expecting value"),
        ('{"a": 1} x', "Extra data"),
    ],
)
def test_texts_that_are_not_json(text: str | bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(DataError) as caught:
        read_json(path, dict[str, Any], format="f", version=1)
    assert str(caught.value).startswith(f"{path} cannot be read as JSON (")
    assert str(caught.value).endswith("): make it or copy it again")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_surrogate_pair_is_a_character() -> None:
    assert parse_json(b'"\\ud83d\\ude00"', "file") == "\U0001f600"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"a = {DEEP}", "nested too deeply"),
        (f"b = 1\n{'a.' * 50_000}x = 1", "line 2 has a key of more than 64 parts"),
        (f"a = {'9' * 5000}", "digits"),
        ("a = 1\na = 2", "overwrite"),
        (b"a = '\xff'", "can't decode byte"),
    ],
)
def test_texts_that_are_not_toml(text: str | bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "file.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError) as caught:
        read_toml(path)
    assert str(caught.value).startswith(f"{path} cannot be read as TOML (")
    assert message in str(caught.value)


def test_a_folder_is_not_a_document(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read as JSON"):
        read_json(tmp_path, dict[str, Any], format="f", version=1)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_toml(tmp_path)


def test_a_huge_file_is_refused_before_it_is_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdall.common.files.MAX_TEXT_BYTES", 1000)
    path = tmp_path / "file"
    path.write_text(f"a = '{'x' * 1000}'")
    with pytest.raises(ConfigError, match=r"more than 1\.0 KB"):
        read_toml(path)
    path.write_text(json.dumps("x" * 1000))
    with pytest.raises(DataError, match=r"more than 1\.0 KB"):
        read_json(path, dict[str, Any], format="f", version=1)


@pytest.mark.parametrize(
    "document", [[], None, 3, {}, {"format": []}, {"format": "f"}, {"format": "f", "version": "1"}]
)
def test_documents_of_another_format(document: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text(json.dumps(document))
    with pytest.raises(HoldallError, match=r"is not a f document|has f version"):
        read_json(tmp_path / "file", dict[str, Any], format="f", version=1)


def test_values_are_shown_in_a_few_words() -> None:
    hexadecimal = parse_toml(f"a = 0x{'f' * 5000}".encode(), "file")["a"]
    assert shown(hexadecimal) == "a number of more than 64 bits"
    assert shown("x" * 10_000) == f"'{'x' * 56}..."
    assert shown("line\nbreak\ud800") == r"'line\nbreak\ud800'"
