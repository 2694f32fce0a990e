"""Id maps, item tables and ranking cases with other columns than theirs: one sentence that names the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from holdall.common.errors import ConfigError, DataError
from holdall.data.arrow_files import read_batch, write_batch
from holdall.data.dataset import DataSet
from holdall.data.id_map import IdMap
from holdall.data.items import ItemTable
from holdall.data.prepare import PrepareConfig, prepare
from holdall.data.ranking_cases import RankingCases
from holdall.data.schema import Schema
from tests.data.raw_files import write_lines

RATINGS = [f"{user}::{item}::5::{item}" for user in range(4) for item in range(user, user + 6)]
CHANGES: dict[str, Any] = {
    "missing": None,
    "text": lambda column: pa.array(["x"] * len(column)),
    "numbers": lambda column: pa.array([0.5] * len(column)),
    "nulls": lambda column: pa.nulls(len(column), column.type),
    "lists": lambda column: pa.array([[0]] * len(column)),
    "texts in lists": lambda column: pa.array([["x", "y"]] * len(column), pa.list_(pa.string(), 2)),
    "bytes": lambda column: pa.array([b"\xff"] * len(column)),
}


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An implicit data set whose files are not compared with their hashes, as in folders of earlier versions."""
    movies = [f"{item}::M (199{item})::Drama|Comedy" for item in range(9)]
    files = [write_lines(tmp_path / "ratings.dat", RATINGS), write_lines(tmp_path / "movies.dat", movies)]
    prepare(files, tmp_path / "data", PrepareConfig(format="movielens", candidates=2, valid=0.0))
    for module in ("items", "ranking_cases"):
        monkeypatch.setattr(f"holdall.data.{module}.check_other_file", lambda *args: None)
    return tmp_path / "data"


def change(path: Path, name: str, how: str) -> bool:
    """Change one column of a file; whether it is another one now."""
    batch = read_batch(path)
    columns = {other: batch[other] for other in batch.schema.names}
    if CHANGES[how] is None:
        del columns[name]
    else:
        columns[name] = CHANGES[how](columns[name])
    different = name not in columns or not columns[name].equals(batch[name])
    metadata = batch.schema.metadata
    del batch
    write_batch(path, pa.RecordBatch.from_pydict(columns).replace_schema_metadata(metadata))
    return different


@pytest.mark.parametrize("how", CHANGES)
@pytest.mark.parametrize("name", ["row", "user", "item", "negatives", "keep"])
def test_ranking_cases_with_wrong_columns_are_refused(data: Path, name: str, how: str) -> None:
    assert change(data / "ranking-test.arrow", name, how)
    with pytest.raises(DataError, match=r"ranking-test\.arrow .*prepare the data set again"):
        RankingCases.load(data)


ITEM_CHANGES = [("item", how) for how in CHANGES]
ITEM_CHANGES += [("year", how) for how in CHANGES if how != "missing"]  # a table without an attribute is a table
ITEM_CHANGES += [("genres", how) for how in CHANGES if how not in ("missing", "lists")]


@pytest.mark.parametrize(("name", "how"), ITEM_CHANGES)
def test_item_tables_with_wrong_columns_are_refused(data: Path, name: str, how: str) -> None:
    assert change(data / "items.arrow", name, how)
    with pytest.raises(DataError, match=r"items\.arrow .*prepare (the data set|it) again"):
        ItemTable.load(data, Schema.load(data))


@pytest.mark.parametrize("how", CHANGES)
@pytest.mark.parametrize("name", ["value", "count"])
def test_id_maps_with_wrong_columns_are_refused(data: Path, name: str, how: str) -> None:
    if (name, how) == ("value", "text"):
        how = "numbers"
    assert change(data / "ids/item.arrow", name, how)
    with pytest.raises(DataError, match=r"item\.arrow .*"):
        IdMap.load(data / "ids/item.arrow")


@pytest.mark.parametrize("values", [[-1, 0], [10**6, 0]])
def test_ids_and_rows_beyond_the_end_are_refused(data: Path, values: list[int]) -> None:
    cases = RankingCases.load(data)
    path = data / "ranking-test.arrow"
    good = read_batch(path)
    for name in ("row", "negatives"):
        column = (
            pa.array([values[0]] * len(cases)) if name == "row" else pa.array([values] * 4, pa.list_(pa.int32(), 2))
        )
        columns = {other: column if other == name else good[other] for other in good.schema.names}
        write_batch(path, pa.RecordBatch.from_pydict(columns))
        with pytest.raises(DataError, match=rf"ranking-test\.arrow has {values[0]} in column '{name}', where"):
            next(RankingCases.load(data).batches(DataSet(data, "test")))


def test_candidates_are_at_most_the_items_and_fit_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = write_lines(tmp_path / "ratings.dat", RATINGS)
    config = PrepareConfig(format="movielens", candidates=2**31 - 1, valid=0.0)
    prepare([raw], tmp_path / "data", config)
    cases = RankingCases.load(tmp_path / "data")
    assert cases.negatives.shape == (4, 8)
    assert cases.keep.sum(axis=1).tolist() == [2, 2, 2, 3]
    monkeypatch.setattr("holdall.data.implicit.MAX_CANDIDATES", 31)
    with pytest.raises(ConfigError, match="--candidates 8 for 4 held-out events is more than 31 in all"):
        prepare([raw], tmp_path / "again", config)
