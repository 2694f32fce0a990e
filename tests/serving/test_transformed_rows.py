"""Bundles of data with buckets, hashes, crosses, weights and times: raw rows score as they were trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from holdall.common.errors import DataError
from holdall.data.dataset import DataSet
from holdall.serving.bundle import open_bundle
from holdall.serving.release import release
from holdall.serving.score_files import score
from holdall.serving.scorer import Scorer, load
from holdall.serving.server.example import example_row
from holdall.serving.server.inference_protocol import metadata
from holdall.serving.server.row_types import RowReader
from holdall.serving.verify import verify
from holdall.serving.withdraw import find_withdrawal
from holdall.training.config import TrainConfig
from holdall.training.train import train
from tests.data.test_transforms import TOML, raw_table, run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("transformed")
    table = raw_table()
    times = np.random.default_rng(5).permutation(table.num_rows)
    table = table.append_column("w", pa.array(1.0 + times % 3)).append_column("when", pa.array(times))
    toml = TOML.replace('label = "y"', 'label = "y"\nweight = "w"\ntime = "when"')
    run(folder, table, toml, valid=0.2, test=0.1, split="time")
    train(folder / "out", folder / "run", TrainConfig.of(epochs=1, batch_size=64, dim=4, bottom=(8,), top=(8,)))
    release(folder / "run", folder / "bundle", as_trained=True)
    return folder


@pytest.fixture(scope="module")
def scorer(folder: Path) -> Scorer:
    return load(folder / "bundle")


def rows() -> list[dict[str, Any]]:
    """Rows under the names of raw columns, without label, weight and time."""
    return raw_table().drop_columns(["y"]).to_pylist()


def test_rows_of_every_form_have_the_same_ids(folder: Path, scorer: Scorer) -> None:
    table = raw_table().drop_columns(["y"])
    reference = scorer.encode(table)
    forms: list[Any] = [rows(), {name: table[name].to_pylist() for name in table.column_names}]
    for form in forms:
        for fast in (True, False):
            scorer._rows.fast = fast
            found = scorer.encode(form)
            assert torch.equal(found.ids.values, reference.ids.values)
            assert torch.equal(found.dense, reference.dense)
    scorer._rows.fast = True
    names = {"cheap": "price", "level": "price", "user": "user_id"}
    under_own_names = [{**row, **{name: row[column] for name, column in names.items()}} for row in rows()]
    assert torch.equal(scorer.encode(under_own_names).ids.values, reference.ids.values)
    parts = [DataSet(folder / "out", split) for split in ("train", "valid", "test")]
    assert sum(len(part) for part in parts) == len(reference)


@pytest.mark.parametrize("raw", [True, False])
def test_the_bundle_verifies(raw: bool, folder: Path) -> None:
    if not raw:
        (folder / "a.parquet").rename(folder / "away")
    try:
        report = verify(folder / "bundle", folder / "run")
    finally:
        if not raw:
            (folder / "away").rename(folder / "a.parquet")
    assert report.num_mismatches == 0
    assert report.rows == 300


def test_files_are_scored_as_rows_are(folder: Path, scorer: Scorer, tmp_path: Path) -> None:
    expected = scorer.score(rows())
    report = score(scorer, folder / "a.parquet", tmp_path / "scores.parquet")
    assert report.rows == 300
    assert np.array_equal(pq.read_table(tmp_path / "scores.parquet")["score"].to_numpy(), expected)
    assert np.array_equal(scorer.score(folder / "a.parquet"), expected)
    table = raw_table().drop_columns(["y"])
    lines = [",".join("" if value is None else str(value) for value in row.values()) for row in table.to_pylist()]
    (tmp_path / "a.csv").write_text("\n".join([",".join(table.column_names), *lines]) + "\n", encoding="utf-8")
    assert np.array_equal(scorer.score(tmp_path / "a.csv"), expected)


def test_items_are_ranked_with_crosses_of_both_sides(scorer: Scorer) -> None:
    given = rows()[:20]
    user = {name: given[0][name] for name in ("user_id", "city")}
    items = [{name: row[name] for name in ("price", "device", "tags")} for row in given]
    named_user = {"user": user["user_id"], "city": user["city"]}
    expected = scorer.score([{**item, **user} for item in items])
    assert np.abs(scorer.rank(named_user, items) - expected).max() < 1e-6


def test_a_row_is_explained_with_its_transforms(scorer: Scorer) -> None:
    row = {"price": 7.0, "city": "a&b", "device": "phone", "user_id": 3, "tags": ["x", "y"]}
    found = scorer.explain_row(row)
    values = {value.name: value for value in found.values}
    assert values["cheap"].mapped == "0.5 to 10"
    assert (values["where"].raw, values["where"].mapped) == ("city a&b, device phone", "a\\&b&phone")
    assert values["user"].raw == "3"
    assert 0 <= int(values["user"].mapped) < 16
    assert values["city"].mapped == "a&b"
    assert "0.5 to 10: id" in str(found)
    for value in found.values:
        assert value.is_unseen == (value.id == scorer.lookups[value.name].unseen)
        if not value.is_unseen:
            assert scorer.lookups[value.name].text(value.id) == value.mapped


def test_servers_ask_for_the_raw_columns(scorer: Scorer) -> None:
    reader = RowReader(scorer.schema, scorer.reads, 10, 1000)
    assert set(reader.names) == {"price", "cheap", "level", "city", "user", "device", "tags"}
    example = example_row(scorer)
    assert set(example) == set(reader.names)
    assert len(scorer.score([example])) == 1
    kinds = {entry["name"]: entry["datatype"] for entry in metadata("m", "1", scorer.schema, scorer.reads)["inputs"]}
    assert (kinds["cheap"], kinds["device"]) == ("FP32", "BYTES")
    scorer.warm_up()


def test_values_that_share_rows_cannot_be_withdrawn(folder: Path) -> None:
    bundle = open_bundle(folder / "bundle")
    with pytest.raises(DataError, match="'user' is a hash below 16, so no raw value has a row of its own"):
        find_withdrawal(bundle, {"user": ["3"]})
    with pytest.raises(DataError, match="values of 'city' are in the id map of the cross 'where'"):
        find_withdrawal(bundle, {"city": ["paris"]})


def test_missing_columns_are_named(scorer: Scorer) -> None:
    table = raw_table().drop_columns(["y", "device"])
    with pytest.raises(DataError, match="no column 'device'"):
        scorer.score(table)
    with pytest.raises(DataError, match=r"row 0: feature 'cheap' is 'x', which is not a finite number"):
        scorer.score([{**rows()[0], "cheap": "x"}])
