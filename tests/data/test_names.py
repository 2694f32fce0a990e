"""Names that files, file systems or the console take otherwise: refused before the first pass, or shown as they are."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from holdall.cli import main
from holdall.common.errors import ConfigError
from holdall.data import id_map
from holdall.data.formats.table import load_layout
from holdall.data.layout import Layout, RawFeature
from holdall.data.prepare import PrepareConfig, prepare, prepare_raw
from holdall.data.raw_data import RawData
from holdall.data.sources import find_sources, natural
from tests.data.raw_files import read_map


def write_table(folder: Path, schema: str, name: str = "c") -> PrepareConfig:
    """A file whose second column is called `name`, and the options to read it."""
    (folder / "a.csv").write_text(f"y,{name}\n0,a\n1,b\n", encoding="utf-8")
    (folder / "schema.toml").write_text(schema, encoding="utf-8")
    return PrepareConfig(format="table", schema=folder / "schema.toml", test=0.0)


@pytest.mark.parametrize("name", ["c" * 250, "é" * 45, "/" * 90])
@pytest.mark.parametrize("key", ["name", "table"])
def test_names_that_are_too_long_for_a_file_are_refused_before_the_first_pass(
    tmp_path: Path, name: str, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdall.data.formats.table.read_text", None)  # nothing may be read
    own = f'name = "{name}"' if key == "name" else f'name = "c", table = "{name}"'
    config = write_table(tmp_path, f'label = "y"\ncategorical = [{{ {own}, column = "c" }}]')
    with pytest.raises(
        ConfigError, match=rf"of {len(name)} characters cannot be that of a file \(File name too long\)"
    ):
        prepare([tmp_path / "a.csv"], tmp_path / "out", config)
    assert not list(tmp_path.glob("out*"))


def test_the_cure_for_a_long_name_is_a_short_one(tmp_path: Path) -> None:
    long = "c" * 250
    config = write_table(tmp_path, f'label = "y"\ncategorical = [{{ name = "c", column = "{long}" }}]', long)
    prepare([tmp_path / "a.csv"], tmp_path / "out", config)
    assert read_map(tmp_path / "out", "c") == [("a", 1), ("b", 1), (None, 0)]


def test_names_that_are_one_file_are_refused_before_the_first_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdall.data.formats.table.read_text", None)
    monkeypatch.setattr(id_map, "quote", lambda name, safe: name.lower())  # as on file systems without upper case
    features = '[{ name = "C", column = "c" }, "c"]'
    config = write_table(tmp_path, f'label = "y"\ncategorical = {features}')
    with pytest.raises(ConfigError, match=r"the feature 'c' and another one have the same file name, c\.arrow"):
        prepare([tmp_path / "a.csv"], tmp_path / "out", config)


def test_names_that_differ_only_where_they_are_encoded_are_two_files(tmp_path: Path) -> None:
    names = ["a/b", "a%2Fb", "a%2fb", ".", "..", "a b", "e\u0301", "\u00e9"]
    features = ", ".join(f'{{ name = "{name}", column = "c" }}' for name in names)
    config = write_table(tmp_path, f'label = "y"\ncategorical = [{features}]')
    prepare([tmp_path / "a.csv"], tmp_path / "out", config)
    assert len(list((tmp_path / "out/ids").iterdir())) == len(names)
    assert {name: len(read_map(tmp_path / "out", name)) for name in names} == dict.fromkeys(names, 3)


def test_a_name_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x")
    layout = Layout(label="y", features=(RawFeature(name="\udcff", column="c"),))
    raw = RawData(layout=layout, files=[tmp_path / "a"], read=lambda path: (row for row in ()))
    with pytest.raises(ConfigError, match=r"'\\udcff'.* cannot be that of a file \(it is no text\)"):
        prepare_raw(raw, tmp_path / "out")


def test_markup_in_names_is_printed_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ("[red]c", "[/]", "[bold]x[/bold]", "[link=file:///]")
    features = ", ".join(f'{{ name = "{name}", column = "c" }}' for name in names)
    write_table(tmp_path, f'label = "[/y]"\ncategorical = [{features}]')
    (tmp_path / "a.csv").write_text("[/y],c\n0,a\n1,b\n")
    out = tmp_path / "[blue]out"
    main(["prepare", str(tmp_path / "a.csv"), "--format", "table", "--schema", str(tmp_path / "schema.toml"),
          "--test", "0", "--out", str(out)])  # fmt: skip
    printed = capsys.readouterr().out
    assert "label '[/y]'" in printed
    assert "[blue]out" in printed.replace("\n", "")
    for name in names:
        assert name in printed


def test_file_names_that_are_not_utf8_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    raw = Path(os.fsdecode(os.fsencode(tmp_path) + b"/a\xff.tsv"))
    try:
        raw.write_text("x")
    except OSError:
        pytest.skip("this file system has no such names")
    with pytest.raises(ConfigError, match=r"the name of .*/a\\xff\.tsv is not UTF-8: rename"):
        find_sources([raw], tmp_path / "out")
    with pytest.raises(ConfigError, match=r"the name of .*/a\\xff\.tsv is not UTF-8: rename"):
        prepare([f"{tmp_path}/*.tsv"], tmp_path / "out")
    with pytest.raises(SystemExit) as stop:
        main(["prepare", str(raw), "--out", str(tmp_path / "out")])
    assert stop.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1
    raw.rename(tmp_path / "a.tsv")
    with pytest.raises(ConfigError, match=r"the name of .*/out\\xfe is not UTF-8"):
        prepare([tmp_path / "a.tsv"], os.fsdecode(os.fsencode(tmp_path) + b"/out\xfe"))


def test_digits_that_are_no_numbers_can_be_sorted() -> None:
    assert sorted(["1²3", "1²10", "1²2"], key=natural) == ["1²2", "1²3", "1²10"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("dense = " + "[" * 100_000, "nested too deeply"),
        ("dense = " + "{a=" * 100_000, "nested too deeply"),
        ("dense" + ".a" * 5_000 + " = 1", "has a key of more than 64 parts"),
        ('label = "y"\ncategorical = [{a' + ".a" * 5_000 + " = 1}]", "unknown key 'a'"),
        (
            'label = "y"\n[[bag]]\nname = "c"\nmax_length = ' + "9" * 10,
            "max_length of 'c' is 9999999999, but must be 1",
        ),
        ('label = "y"\n[[bag]]\nname = "c"\nmax_length = ' + "9" * 5_000, "cannot be read as TOML"),
        ('[label]\ncolumn = "y"\npositive = ">= 1e999"', "compares with a number that is not finite"),
        ("\udcff", "cannot be read as TOML"),
    ],
)
def test_schemas_that_are_deep_or_huge_are_refused(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "schema.toml"
    path.write_text(text, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(ConfigError, match=r"schema\.toml") as error:
        load_layout(path)
    assert reason in str(error.value)
    assert len(str(error.value)) < 600
