"""`holdall schema infer`: files with a planted meaning of every column, and the schemas guessed from them."""

from __future__ import annotations

import gzip
import random
import tomllib
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from holdall.cli import main
from holdall.common.errors import ConfigError, DataError
from holdall.data.formats.table import load_layout
from holdall.data.infer_schema import schema
from holdall.data.prepare import PrepareConfig, prepare
from tests.data.raw_files import read_map


def rentals(count: int = 400) -> pl.DataFrame:
    """Rented clothes: a label of three words, ids with missing ones, several tags, prose and dates."""
    draw = random.Random(0)
    tags = ["lace", "silk", "black", "summer"]
    return pl.DataFrame(
        {
            "review_id": range(count),
            "fit": [draw.choice(["fit", "fit", "small", "large"]) for _ in range(count)],
            "user_id": [draw.choice([None, *map(float, range(1000, 1040))]) for _ in range(count)],
            "price": [round(draw.uniform(5, 90), 2) for _ in range(count)],
            "age": [draw.choice([None, *range(18, 70)]) for _ in range(count)],
            "balance": [round(draw.gauss(0, 100), 2) for _ in range(count)],
            "month": [draw.randint(1, 12) for _ in range(count)],
            "height": [f"5' {draw.randint(0, 11)}\"" for _ in range(count)],
            "tags": ["|".join(draw.sample(tags, draw.randint(0, 3))) for _ in range(count)],
            "zip": [f"{draw.randint(1, 60):05}" for _ in range(count)],
            "text": [" ".join(f"w{draw.randint(0, 999)}" for _ in range(12)) for _ in range(count)],
            "day": [f"April {draw.randint(1, 30)}, 2016" for _ in range(count)],
            "shop": ["one"] * count,
        }
    )


def roles(toml: str) -> dict[str, Any]:
    """The parsed schema, with names in the place of entries."""
    found = tomllib.loads(toml)
    for role in ("dense", "categorical", "bag"):
        found[role] = [entry if isinstance(entry, str) else entry["name"] for entry in found.get(role, [])]
    return found


def test_a_csv_file_is_prepared_with_its_guessed_schema(tmp_path: Path) -> None:
    rentals().write_csv(tmp_path / "rentals.csv")
    toml = schema(tmp_path / "rentals.csv")
    found = roles(toml)
    assert found["label"] == {"column": "fit", "positive": "== fit"}
    assert found["dense"] == ["price", "age", "balance"]
    assert found["categorical"] == ["user_id", "month", "height", "zip"]
    assert found["bag"] == ["tags"]
    for name in ("review_id", "text", "day", "shop"):
        assert f"#   {name}: " in toml
    assert "# an id by its name, 40 different, written as floats because some are missing" in toml
    (tmp_path / "schema.toml").write_text(toml, encoding="utf-8")
    layout = load_layout(tmp_path / "schema.toml")
    assert [dense.transform for dense in layout.dense] == [None, None, "standard"]
    made = prepare(
        [tmp_path / "rentals.csv"], tmp_path / "data", PrepareConfig(format="table", schema=tmp_path / "schema.toml")
    )
    assert sum(split.positives for split in made.splits.values()) == (rentals()["fit"] == "fit").sum()
    values = {value for value, _ in read_map(tmp_path / "data", "user_id")}
    assert {"1000", "", None} < values
    assert "1000.0" not in values


def test_parquet_is_guessed_as_csv_is(tmp_path: Path) -> None:
    frame = rentals().with_columns(
        pl.col("tags").str.split("|"), when=pl.datetime(2020, 1, 1), is_new=pl.Series([True, False] * 200)
    )
    frame.write_parquet(tmp_path / "rentals.parquet")
    rentals().write_csv(tmp_path / "rentals.csv")
    text, typed = roles(schema(tmp_path / "rentals.csv")), roles(schema(tmp_path / "rentals.parquet"))
    assert typed["categorical"] == [*text["categorical"], "is_new"]
    assert [typed[role] for role in ("label", "dense", "bag")] == [text[role] for role in ("label", "dense", "bag")]


def test_files_without_a_header_have_numbered_columns(tmp_path: Path) -> None:
    draw = random.Random(0)
    lines = [f"{draw.randint(0, 1)}\t{draw.randint(0, 900)}\t{draw.choice('abc')}" for _ in range(200)]
    with gzip.open(tmp_path / "log.tsv.gz", "wt") as file:
        file.write("\n".join(lines))
    found = roles(schema(tmp_path / "log.tsv.gz"))
    assert (found["label"], found["dense"], found["categorical"]) == ("column0", ["column1"], ["column2"])
    assert found["csv"] == {"separator": "\t", "header": False, "columns": ["column0", "column1", "column2"]}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (["0", "1"], "click"),
        (["True", "False"], "click"),
        (["1", "2", "3", "4", "5"], {"column": "click", "positive": ">= 4"}),
        (["no", "yes"], {"column": "click", "positive": "== yes"}),
        (["-1", "1"], {"column": "click", "positive": ">= 1"}),
    ],
)
def test_a_label_has_the_rule_that_its_values_need(values: list[str], expected: Any, tmp_path: Path) -> None:
    lines = [f"{values[n % len(values)]},{'abc'[n % 3]}" for n in range(60)]
    (tmp_path / "a.csv").write_text("\n".join(["click,c", *lines]))
    assert roles(schema(tmp_path / "a.csv"))["label"] == expected


def test_quotes_encodings_and_words_for_missing_values_are_found(tmp_path: Path) -> None:
    lines = [f'{n % 2};"caf\xe9; {n % 3}";{"NULL" if n % 5 == 0 else n * 1.5}' for n in range(60)]
    (tmp_path / "a.csv").write_bytes("\n".join(["y;place;x", *lines]).encode("latin-1"))
    found = roles(schema(tmp_path / "a.csv"))
    assert found["csv"] == {"separator": ";", "encoding": "latin-1", "missing": ["NULL"]}
    assert (found["dense"], found["categorical"]) == (["x"], ["place"])
    (tmp_path / "b.csv").write_text("\n".join(["y,size", *(f'{n % 2},5{n % 9}"' for n in range(60))]))
    assert roles(schema(tmp_path / "b.csv"))["csv"] == {"quote": ""}


def test_what_cannot_be_guessed_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("\n".join(["a,b", *(f"{n % 7},{'xyz'[n % 3]}" for n in range(60))]))
    with pytest.raises(DataError, match=r"no column looks like a label, .*: name it .--label."):
        schema(tmp_path / "a.csv")
    assert roles(schema(tmp_path / "a.csv", label="a"))["label"] == {"column": "a", "positive": ">= 5"}
    with pytest.raises(ConfigError, match=r"there is no column 'c' to be the label \(known: a, b\)"):
        schema(tmp_path / "a.csv", label="c")
    (tmp_path / "b.csv").write_text("click,x\n" + "".join(f"{n % 2},\n" for n in range(9)))
    with pytest.raises(DataError, match=r"no column is numbers or recurring values .x: it has no values."):
        schema(tmp_path / "b.csv")


def test_the_command_prints_the_schema(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rentals().write_csv(tmp_path / "rentals.csv")
    main(["schema", "infer", str(tmp_path / "rentals.csv")])
    printed = capsys.readouterr().out
    assert printed == schema(tmp_path / "rentals.csv")
    main(["schema", "infer", str(tmp_path / "rentals.csv"), "--out", str(tmp_path / "schema.toml")])
    assert (tmp_path / "schema.toml").read_text(encoding="utf-8") == printed
    with pytest.raises(SystemExit):
        main(["schema", "infer", str(tmp_path / "rentals.csv"), "--out", str(tmp_path / "schema.toml")])
    assert "schema.toml exists: name another file" in capsys.readouterr().err
