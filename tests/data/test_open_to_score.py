"""Raw files with rows to score: labels may be missing, and the data set folder knows how to read them."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from holdall.common.errors import ConfigError, DataError
from holdall.data.formats.avazu import CATEGORICAL
from holdall.data.formats.criteo import CRITEO
from holdall.data.formats.open_to_score import open_to_score
from holdall.data.formats.table import open_table
from holdall.data.identity import data_fingerprint, ids_fingerprint
from holdall.data.layout import Layout, RawFeature
from holdall.data.prepare import PrepareConfig, prepare, prepare_raw
from holdall.data.raw_data import RawData
from holdall.data.rows import Rows
from holdall.data.schema import Schema
from holdall.data.stored_layout import stored_layout
from tests.data.raw_files import criteo_line, prepare_films, write_lines

SCHEMA = """
label = {column = "stars", positive = ">= 4"}
dense = [{name = "price", column = "cost"}]
categorical = [{name = "shop", column = "shop id"}]
bag = [{name = "tags", separator = "|", max_length = 2}]
[csv]
separator = ";"
missing = ["-"]
"""
LINES = ["shop id;tags;cost;stars;unused", "a;x|y|z;1.5;5;", "b;;2;3;", "-;y;-;4;"]


def table(folder: Path) -> Schema:
    write_lines(folder / "shops.toml", SCHEMA.splitlines())
    raw = write_lines(folder / "shops.csv", LINES)
    return prepare([raw], folder / "out", PrepareConfig(format="table", schema=folder / "shops.toml", test=0.0))


def criteo(folder: Path) -> Schema:
    raw = write_lines(folder / "train.txt", [criteo_line(1, [3], ["a"]), criteo_line(0, [], ["b"])])
    return prepare([raw], folder / "out", PrepareConfig(test=0.0))


def read(raw: RawData) -> list[Rows]:
    return [rows for file in raw.files for rows in raw.read(file)]


def labels(raw: RawData) -> list[Any]:
    return [label for rows in read(raw) for label in rows.frame["label"].to_list()]


def opened(folder: Path, schema: Schema, *names: str, **options: Any) -> RawData:
    return open_to_score([folder / name for name in names], folder / "scores.parquet", schema, **options)


def test_the_layout_of_a_table_is_kept(tmp_path: Path) -> None:
    schema = table(tmp_path)
    found = stored_layout(Schema.load(tmp_path / "out"))
    assert found is not None
    config = PrepareConfig(format="table", schema=tmp_path / "shops.toml")
    assert found == ("table", open_table([tmp_path / "shops.csv"], tmp_path / "other", config).layout)
    (tmp_path / "shops.toml").unlink()
    (rows,) = read(opened(tmp_path, schema, "shops.csv"))
    assert rows.frame.to_dict(as_series=False) == {
        "label": [1, 0, 1],
        "dense0": [1.5, 2.0, None],
        "feature0": ["a", "b", ""],
        "feature1": [["x", "y"], [], ["y"]],
    }


def test_the_layout_does_not_count_for_fingerprints(tmp_path: Path) -> None:
    schema = table(tmp_path)
    assert schema.layout is not None
    without = replace(schema, layout=None)
    assert data_fingerprint(schema) == data_fingerprint(without)
    assert ids_fingerprint(schema) == ids_fingerprint(without)


def test_a_folder_without_a_layout_is_read_by_its_format(tmp_path: Path) -> None:
    schema = replace(criteo(tmp_path), layout=None)
    assert labels(opened(tmp_path, schema, "train.txt")) == [1, 0]
    shops = replace(schema, source={})
    plain = pa.table({"label": [0], **{name: ["1"] for name in CRITEO.used_columns if name != "label"}})
    pq.write_table(plain, tmp_path / "rows.parquet")
    assert labels(opened(tmp_path, shops, "rows.parquet")) == [0]


def test_a_damaged_layout_is_refused(tmp_path: Path) -> None:
    schema = table(tmp_path)
    document = json.loads(json.dumps(schema.layout))
    document["positive"]["comparison"] = "~"
    with pytest.raises(DataError, match=r"layout\.positive.*no comparison"):
        stored_layout(replace(schema, layout=document))
    with pytest.raises(DataError, match=r"layout\.format"):
        stored_layout(replace(schema, layout={"label": "x"}))


def test_criteo_test_files_have_no_label(tmp_path: Path) -> None:
    schema = criteo(tmp_path)
    lines = [criteo_line("", [3], ["a"]).removeprefix("\t"), criteo_line("", [4], ["b"]).removeprefix("\t")]
    with gzip.open(tmp_path / "test.txt.gz", "wt") as file:
        file.write("".join(f"{line}\n" for line in lines))
    (rows,) = read(opened(tmp_path, schema, "test.txt.gz"))
    assert rows.frame["label"].to_list() == [None, None]
    assert rows.frame["dense0"].to_list() == [3.0, 4.0]
    assert rows.frame["feature0"].to_list() == ["a", "b"]


def test_a_line_without_label_among_others_is_refused(tmp_path: Path) -> None:
    schema = criteo(tmp_path)
    lines = [criteo_line("", [3]).removeprefix("\t"), criteo_line(1), criteo_line(0), criteo_line("")]
    write_lines(tmp_path / "rows.txt", lines)
    (rows,) = read(opened(tmp_path, schema, "rows.txt"))
    assert rows.frame["label"].to_list() == [1, 0, None]
    assert rows.numbers.tolist() == [1, 2, 3]
    assert [(row.line, row.reason) for row in rows.refused] == [
        (1, "39 columns instead of 40 columns separated by '\\t'")
    ]


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_a_table_may_lack_the_label_column_or_some_labels(tmp_path: Path, kind: str) -> None:
    schema = table(tmp_path)
    name = f"rows.{kind}"

    def write(columns: dict[str, list[Any]]) -> None:
        if kind == "parquet":
            pq.write_table(pa.table(columns), tmp_path / name)
            return
        rows = [["" if value is None else str(value) for value in row] for row in zip(*columns.values(), strict=True)]
        write_lines(tmp_path / name, [";".join(row) for row in [list(columns), *rows]])

    given = {"shop id": ["a", "b"], "tags": ["x", "y"], "cost": [1.0, 2.0]}
    write(given)
    assert labels(opened(tmp_path, schema, name)) == [None, None]
    write({**given, "stars": [5, None]})
    assert labels(opened(tmp_path, schema, name)) == [1, None]
    write({**given, "stars": [5, float("inf")]})
    (rows,) = read(opened(tmp_path, schema, name))
    assert rows.frame["label"].to_list() == [1]
    assert "instead of a finite number" in rows.refused[0].reason


def test_rows_of_avazu_and_bookcrossing_need_no_label(tmp_path: Path) -> None:
    raw = write_lines(
        tmp_path / "a.csv", [",".join(["click", "hour", *CATEGORICAL]), "1,14102100," + ",".join("v" * 21)]
    )
    schema = prepare([raw], tmp_path / "avazu", PrepareConfig(format="avazu", test=0.0))
    write_lines(tmp_path / "b.csv", [",".join(["hour", *CATEGORICAL]), "14102101," + ",".join("w" * 21)])
    (rows,) = read(opened(tmp_path, schema, "b.csv"))
    assert rows.frame.select("label", "dense0", "feature0", "feature2").row(0) == (None, 1.0, "1", "w")

    books = tmp_path / "books"
    books.mkdir()
    write_lines(books / "Users.csv", ['"User-ID";"Location";"Age"', '"1";"x, y";"18"'])
    write_lines(books / "Books.csv", ["ISBN;Book-Title;Book-Author;Year-Of-Publication;Publisher", "7;t;w;1999;p"])
    write_lines(books / "Ratings.csv", ["User-ID;ISBN;Book-Rating", "1;7;7"])
    config = PrepareConfig(format="bookcrossing", test=0.0, positive=">= 7")
    schema = prepare([books], tmp_path / "out", config)
    write_lines(books / "Ratings.csv", ["User-ID;ISBN;Book-Rating", "1;7;6", "1;7;", "1;7;8"])
    raw_data = open_to_score([books], tmp_path / "scores.parquet", schema)
    (rows,) = [rows for rows in read(raw_data) if rows.num_rows]
    assert rows.frame["label"].to_list() == [0, None, 1]  # by the rule of the data set, repeated ones kept
    assert rows.frame["feature2"].to_list() == ["w"] * 3
    write_lines(books / "Ratings.csv", ["User-ID;ISBN", "1;7"])
    assert labels(open_to_score([books], tmp_path / "scores.parquet", schema)) == [None]


def test_implicit_data_is_scored_from_a_table(tmp_path: Path) -> None:
    schema = Schema.load(prepare_films(tmp_path))
    with pytest.raises(ConfigError, match=r"--format movielens has events of users.*Parquet or CSV.* user, item"):
        opened(tmp_path, schema, "ratings.dat", format="movielens")
    rows = {"user": [1, 2], "item": [3, 4], "year": ["1903", ""], "genres": [["a"], []]}
    pq.write_table(pa.table(rows), tmp_path / "rows.parquet")
    (found,) = read(opened(tmp_path, schema, "rows.parquet"))
    assert found.frame["feature0"].to_list() == ["1", "2"]
    assert found.frame["label"].to_list() == [None, None]


def test_formats_and_schemas_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    schema = table(tmp_path)
    with pytest.raises(ConfigError, match=r"--format criteo has no dense column 'price'.*name it in the schema"):
        opened(tmp_path, schema, "shops.csv", format="criteo")
    with pytest.raises(ConfigError, match=r"unknown format 'tabel' .did you mean 'table'"):
        opened(tmp_path, schema, "shops.csv", format="tabel")
    with pytest.raises(ConfigError, match="--schema goes with --format table"):
        opened(tmp_path, schema, "shops.csv", format="avazu", toml=tmp_path / "shops.toml")
    write_lines(tmp_path / "other.toml", SCHEMA.replace("bag =", "sequence =").splitlines())
    with pytest.raises(ConfigError, match="has a sequence where the model reads the bag 'tags'"):
        opened(tmp_path, schema, "shops.csv", toml=tmp_path / "other.toml")


def test_columns_that_the_model_does_not_read_may_be_missing(tmp_path: Path) -> None:
    schema = table(tmp_path)
    write_lines(tmp_path / "rows.csv", ["shop id", "a"])
    (rows,) = read(opened(tmp_path, replace(schema, dense=(), features=schema.features[:1]), "rows.csv"))
    assert rows.frame.to_dict(as_series=False) == {"label": [None], "feature0": ["a"]}


def test_prepare_insists_on_a_label(tmp_path: Path) -> None:
    features = (RawFeature(name="a", column="a"),)
    for layout in (Layout(label=None, features=features), Layout(label="y", label_optional=True, features=features)):
        raw = RawData(layout=layout, files=[], read=lambda path: iter(()))  # type: ignore[arg-type,return-value]
        with pytest.raises(ConfigError, match="rows to train on need one"):
            prepare_raw(raw, tmp_path / "out")
    write_lines(tmp_path / "rows.txt", [criteo_line("")])
    with pytest.raises(DataError, match=r"line 1: the label .column 'label'. is missing"):
        prepare([tmp_path / "rows.txt"], tmp_path / "out")
