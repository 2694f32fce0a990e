"""Buckets, hashes and crosses: what `prepare` makes of raw values, encoders make of them to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from holdall.commands.fit import fit
from holdall.commands.inspect import inspect, show
from holdall.common.errors import ConfigError, DataError
from holdall.data.dataset import DataSet
from holdall.data.encode import encode_rows
from holdall.data.identity import ids_fingerprint
from holdall.data.prepare import PrepareConfig, prepare
from holdall.data.schema import Schema
from holdall.data.transforms import (
    bucket_names,
    bucket_texts,
    cross_texts,
    hashed_texts,
    on_grid,
    quantile_bounds,
    value_text,
)
from tests.data.raw_files import read_map

TOML = """
label = "y"
dense = ["price"]
categorical = [
  { name = "cheap", column = "price", bucket = [-1, 0.5, 10] },
  { name = "level", column = "price", buckets = 4 },
  "city",
  { name = "user", column = "user_id", hash = 16, integer = true },
  { name = "where", cross = ["city", "device"] },
  { name = "many", cross = ["cheap", "user", "city"], hash = 50 },
]
bag = [{ name = "tags", separator = "|", max_length = 3, hash = 5 }]
"""


def raw_table(num_rows: int = 300, seed: int = 0) -> pa.Table:
    draw = np.random.default_rng(seed)
    price = draw.normal(size=num_rows) * 10
    price[:4] = [-1, 0.5, 10, -0.0]
    cities = ["paris", "", "a&b", "a", "b\\", "\\&", "&", "naïve"]
    tags = ["|".join(draw.choice(["x", "y", "z", "", "w"], draw.integers(0, 5))) for _ in range(num_rows)]
    return pa.table(
        {
            "y": draw.integers(0, 2, num_rows),
            "price": pa.array(price, mask=draw.random(num_rows) < 0.1),
            "city": draw.choice(cities, num_rows).tolist(),
            "device": draw.choice(["phone", "b", "&b", ""], num_rows).tolist(),
            "user_id": pa.array(draw.integers(0, 40, num_rows).astype(np.float64), mask=draw.random(num_rows) < 0.1),
            "tags": tags,
        }
    )


def run(folder: Path, table: pa.Table, toml: str = TOML, kind: str = "parquet", **options: Any) -> Schema:
    folder.mkdir(exist_ok=True)
    (folder / "schema.toml").write_text(toml, encoding="utf-8")
    raw = folder / f"a.{kind}"
    if kind == "parquet":
        pq.write_table(table, raw)
    else:
        lines = [",".join("" if value is None else str(value) for value in row.values()) for row in table.to_pylist()]
        raw.write_text("\n".join([",".join(table.column_names), *lines]) + "\n", encoding="utf-8")
    options = {"test": 0.0, "overwrite": True, **options}
    return prepare([raw], folder / "out", PrepareConfig(format="table", schema=folder / "schema.toml", **options))


def named(table: pa.Table) -> pa.Table:
    """The columns under the names of the schema."""
    for name, column in (("cheap", "price"), ("level", "price"), ("user", "user_id")):
        table = table.append_column(name, table[column])
    return table


# --- one by one -----------------------------------------------------------------------------------------------------


def test_buckets_have_readable_names() -> None:
    assert bucket_names([0, 1, 2.5]) == ["below 0", "0 to 1", "1 to 2.5", "2.5 or more"]
    found = bucket_texts(np.array([-1.0, 0.0, 0.9, 1.0, 2.5, np.nan, 9e9]), [0, 1, 2.5])
    above = "2.5 or more"
    assert found.to_pylist() == ["below 0", "0 to 1", "0 to 1", "1 to 2.5", above, "", above]


def test_quantiles_divide_the_training_rows_evenly() -> None:
    values = np.arange(1000.0)
    bounds = quantile_bounds(on_grid(values), np.ones(1000, dtype=np.int64), 4)
    assert bounds == (250.0, 500.0, 750.0)
    heavy = np.where(values == 7, 10_000, 1)
    assert quantile_bounds(values, heavy, 4) == (8.0,)
    assert quantile_bounds(np.array([np.nan, 3.0]), np.array([5, 5]), 4) == ()
    assert quantile_bounds(np.array([1.0, 2.0, 3.0]), np.array([5, 0, 5]), 2) == (3.0,)


def test_the_grid_of_quantiles_keeps_comparisons() -> None:
    draw = np.random.default_rng(0)
    numbers = np.concatenate([draw.normal(size=2000) * 10.0 ** draw.integers(-20, 20, 2000), [0.0, -0.0]])
    grid = on_grid(numbers)
    assert (grid <= numbers).all()
    assert (on_grid(grid) == grid).all()
    for bound in draw.choice(grid, 50):
        assert ((numbers >= bound) == (grid >= bound)).all()


def test_hashes_are_the_same_for_ever() -> None:
    texts = pa.array(["ann", "", "bob", "x" * 300, "naïve"], pa.large_string())
    found = hashed_texts(texts, 1000).to_pylist()
    assert found == ["683", "", "952", "741", "343"]
    many = pa.array([text for text in texts.to_pylist() for _ in range(2000)], pa.large_string())
    assert hashed_texts(many, 1000).to_pylist() == [text for text in found for _ in range(2000)]


def test_different_values_have_different_crosses() -> None:
    pieces = ["", "a", "&", "\\", "a&", "\\&", "&\\", "a\\&b", "&&"]
    pairs = [(one, other) for one in pieces for other in pieces]
    sides = [pa.array([pair[side] for pair in pairs], pa.large_string()) for side in (0, 1)]
    assert len(set(cross_texts(sides).to_pylist())) == len(pairs)
    assert cross_texts([sides[0][1:2], sides[1][1:2]]).to_pylist() == ["&a"]


# --- prepare and encode ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_raw_rows_are_encoded_as_they_were_prepared(kind: str, tmp_path: Path) -> None:
    table = raw_table()
    schema = run(tmp_path, table, kind=kind)
    stored = DataSet(tmp_path / "out").slice(0, table.num_rows)
    assert torch.equal(encode_rows(tmp_path / "out", named(table)).ids.values, stored.ids.values)
    found = encode_rows(tmp_path / "out", table)
    assert torch.equal(found.dense, stored.dense)
    assert torch.equal(found.label, stored.label)
    assert torch.equal(found.ids.values, stored.ids.values)
    assert found.ids.offsets is not None
    assert stored.ids.offsets is not None
    assert torch.equal(found.ids.offsets, stored.ids.offsets)
    assert schema.feature("level").bucket is not None
    assert Schema.load(tmp_path / "out") == schema


def test_csv_and_parquet_are_prepared_alike(tmp_path: Path) -> None:
    schemas = [run(tmp_path / kind, raw_table(), kind=kind) for kind in ("parquet", "csv")]
    assert schemas[0].features == schemas[1].features
    assert schemas[0].ids == schemas[1].ids
    files = [schema.splits["train"].files[0].sha256 for schema in schemas]
    assert files[0] == files[1]


def test_id_maps_have_what_transforms_made(tmp_path: Path) -> None:
    table = raw_table()
    run(tmp_path, table)
    maps = {name: dict(read_map(tmp_path / "out", name)) for name in ("cheap", "level", "user", "where", "many")}
    assert {text for text in maps["cheap"] if text} == {"below -1", "-1 to 0.5", "0.5 to 10", "10 or more"}
    given = table["price"].drop_null().to_numpy()
    assert maps["cheap"]["10 or more"] == (given >= 10).sum()
    assert maps["cheap"][""] == table["price"].null_count
    level = [count for text, count in maps["level"].items() if text]
    assert len(level) == 4
    assert max(level) - min(level) <= 3
    assert all(text is None or text == "" or 0 <= int(text) < 16 for text in maps["user"])
    rows = table.to_pylist()
    assert maps["where"]["paris&phone"] == sum((row["city"], row["device"]) == ("paris", "phone") for row in rows)
    assert all(text is None or 0 <= int(text) < 50 for text in maps["many"])


def test_one_row_is_transformed_as_many_are(tmp_path: Path) -> None:
    table = raw_table()
    schema = run(tmp_path, table)
    maps = {name: [text for text, _ in read_map(tmp_path / "out", name)] for name in schema.cardinalities}
    stored = DataSet(tmp_path / "out").slice(0, table.num_rows)
    for row, values in enumerate(named(table).to_pylist()[:60]):
        for place, feature in enumerate(schema.features):
            if feature.one_hot:
                text = value_text(feature, values.get, lambda v: "" if v is None else f"{v:.0f}" if v != str(v) else v)
                assert maps[feature.name][int(stored.ids.bag(place)[0][row])] == text


def test_another_rule_is_another_data_set(tmp_path: Path) -> None:
    table = pa.table({"y": [0, 1], "c": ["", ""]})
    toml = 'label = "y"\ncategorical = [{{ name = "c", hash = {} }}]'
    first, second = (run(tmp_path / str(size), table, toml.format(size)) for size in (10, 20))
    assert first.ids == second.ids
    assert ids_fingerprint(first) != ids_fingerprint(second)


def test_a_constant_column_has_one_bucket(tmp_path: Path) -> None:
    table = pa.table({"y": [0, 1, 1], "n": [3.0, 3.0, None]})
    schema = run(tmp_path, table, 'label = "y"\ncategorical = [{ name = "n", buckets = 5 }]')
    assert schema.features[0].bucket == ()
    assert read_map(tmp_path / "out", "n") == [("any number", 2), ("", 1), (None, 0)]
    assert encode_rows(tmp_path / "out", {"n": [7.0, None]}).ids.values.tolist() == [[0, 1]]


def test_inspect_says_what_features_are_made_by(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path, raw_table())
    show(inspect(tmp_path / "out"))
    shown = capsys.readouterr().out
    for words in ("4 buckets", "hash below 16", "cross of city and device", "hash below 5"):
        assert words in shown


def test_a_fitted_model_reads_the_columns_that_it_was_fitted_on(tmp_path: Path) -> None:
    table = raw_table()
    decoy = table.append_column("cheap", pa.array(np.full(table.num_rows, 99.0)))
    categorical = [{"name": "cheap", "column": "price", "bucket": [0, 5]}, {"name": "x", "cross": ["cheap", "city"]}]
    model = fit(decoy, label="y", categorical=categorical, dense=["user_id"], out=tmp_path / "fit")
    assert np.array_equal(model.predict(decoy), model.predict(table))


# --- bad input ------------------------------------------------------------------------------------------------------


def test_what_is_no_number_is_refused_by_row(tmp_path: Path) -> None:
    table = pa.table({"y": [0, 1], "n": ["3", "much"]})
    toml = 'label = "y"\ncategorical = [{ name = "n", bucket = [1] }]'
    with pytest.raises(DataError, match=r"line 3: column 'n' holds 'much', which is not a finite number"):
        run(tmp_path, table, toml, kind="csv")
    assert run(tmp_path, table, toml, bad_rows="skip").splits["train"].rows == 1
    with pytest.raises(DataError, match="column 'n' is 'x' in row 0, which is not a number"):
        encode_rows(tmp_path / "out", {"n": ["x"]})
    with pytest.raises(DataError, match=r"column 'n' of .* is of type list<.*numbers are needed here"):
        run(tmp_path, pa.table({"y": [0], "n": [[1]]}), toml)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("bucket = [3, 1]", r"bucket of 'n' is \[3.0, 1.0\], but must be ascending"),
        ("bucket = []", "must be ascending numbers"),
        ("bucket = ['a']", "bucket of 'n' lists 'a', which is no finite number"),
        ("buckets = 1", "buckets of 'n' is 1, but must be 2 to 10,000"),
        ("hash = 0", "hash of 'n' is 0, but must be 1 or more"),
        ("hash = 3000000000", "below 2"),
        ("bucket = [1], buckets = 4", "has two of bucket, buckets and cross"),
        ("cross = ['a']", "must name two columns or more"),
        ("cross = ['a', 'a']", "must name two columns or more, each once"),
        ("cross = ['a', 'b'], column = 'c'", "has no column of its own"),
        ("cross = ['a', 'd']", "names the dense column 'd': add a categorical feature of that column with bucket"),
        ("cross = ['a', 'q']", r"'q', which is of buckets that are known after.*give its bounds"),
        ("cross = ['a', 't']", "'t', which is a bag: name features of one value"),
        ("cross = ['a', 'y']", "column 'y' is the label and also feature 'n'"),
        ("hash = 10, table = 'z'", "share table 'z' have different transforms"),
        ("bukket = [1]", "unknown key 'bukket' in categorical 'n'.*bucket"),
    ],
)
def test_transforms_that_make_no_sense_are_refused(entry: str, message: str, tmp_path: Path) -> None:
    toml = (
        f"label = 'y'\ndense = ['d']\ncategorical = [{{ name = 'q', buckets = 3 }}, 'z', {{ name = 'n', {entry} }}]\n"
    )
    table = pa.table({"y": [0], "d": [1.0], "q": [1.0], "z": ["z"], "t": ["t"], "a": ["a"], "n": ["1"]})
    with pytest.raises(ConfigError, match=message):
        run(tmp_path, table, toml + "bag = [{ name = 't', separator = ' ' }]")
