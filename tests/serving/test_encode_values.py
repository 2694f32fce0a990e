"""Encoder of Python values: the batches of the encoder of columns, or nothing where only that one may judge."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from holdall.common.errors import DataError
from holdall.data.encode import Encoder
from holdall.data.prepare import PrepareConfig, prepare
from holdall.serving import encode_values
from holdall.serving.encode_values import ValueEncoder
from holdall.serving.id_lookup import IdLookup, open_lookups
from holdall.serving.raw_rows import RowFormat
from holdall.serving.row_encoder import RowEncoder
from tests.serving.test_raw_rows import WRONG_VALUES, numpy_scalars, prepared, row_format

__all__ = ["prepared"]


def plain_rows(table: pa.Table) -> list[dict[str, Any]]:
    """Rows whose dense values are numbers, as those of JSON are."""
    rows = table.to_pylist()
    for row in rows:
        row["text"] = None if row["text"] in (None, "") else float(row["text"])
        row["decimal"] = None if row["decimal"] is None else float(row["decimal"])
        row["huge"] = None if row["huge"] is None else float(row["huge"])
    return rows


def encoders(folder: Path, hot_rows: int | None = None) -> tuple[ValueEncoder, Encoder, dict[str, IdLookup]]:
    form = row_format(folder)
    lookups = open_lookups(folder / "data", form.schema, form.reads)
    for lookup in lookups.values():
        lookup.hot_rows = lookup.hot_rows if hot_rows is None else hot_rows
    encoder = Encoder(form.schema, maps=lookups)
    return ValueEncoder(form, lookups, encoder.num_unseen), encoder, lookups


@pytest.mark.parametrize("form", ["dicts", "columns"])
@pytest.mark.parametrize(("many", "table_from"), [(1, 1000), (1000, 1000), (1000, 1)])
@pytest.mark.parametrize("hot_rows", [None, 0, 2])
def test_dicts_are_encoded_as_columns_are(
    hot_rows: int | None,
    many: int,
    table_from: int,
    form: str,
    prepared: tuple[Path, pa.Table],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(encode_values, "MANY", many)
    monkeypatch.setattr(encode_values, "TABLE_FROM", table_from)
    folder, table = prepared
    fast, encoder, lookups = encoders(folder, hot_rows)
    rows = plain_rows(table)
    rows[3] |= {"word": "never seen", "tags": ["never", "a"], "number": 12345, "flag": None}
    for part in (rows, rows[:1], rows[3:5], []):  # the second time around, values are in the dicts
        before = dict(encoder.num_unseen)
        expected = encoder.encode(row_format(folder).table(part))
        unseen = {name: count - before[name] for name, count in encoder.num_unseen.items()}
        before = dict(encoder.num_unseen)
        found = fast.encode(part if form == "dicts" else {name: tuple(row[name] for row in part) for name in rows[0]})
        assert found is not None
        assert found.dense.numpy().tobytes() == expected.dense.numpy().tobytes()
        assert torch.equal(found.ids.values, expected.ids.values)
        assert torch.equal(found.ids.offsets, expected.ids.offsets)  # type: ignore[arg-type]
        assert found.ids.values.dtype == expected.ids.values.dtype
        assert {name: count - before[name] for name, count in encoder.num_unseen.items()} == unseen
    assert all(number < lookup.hot_rows for lookup in lookups.values() for number in lookup.hot.values())


def test_columns_of_python_values_are_encoded_as_dicts_are(prepared: tuple[Path, pa.Table]) -> None:
    folder, table = prepared
    fast, encoder, _ = encoders(folder)
    rows = plain_rows(table)
    columns = {name: tuple(row[name] for row in rows) for name in rows[0]}
    expected, unseen = fast.encode(rows), dict(encoder.num_unseen)
    found = fast.encode(columns)
    assert found is not None
    assert expected is not None
    assert found.dense.numpy().tobytes() == expected.dense.numpy().tobytes()
    assert torch.equal(found.ids.values, expected.ids.values)
    assert torch.equal(found.ids.offsets, expected.ids.offsets)  # type: ignore[arg-type]
    assert encoder.num_unseen == {name: 2 * count for name, count in unseen.items()}
    first = "word"
    for wrong in ({first: columns[first]}, columns | {first: columns[first][1:]}, columns | {first: table[first]}, {}):
        assert fast.encode(wrong) is None


@pytest.mark.parametrize(("name", "value", "message"), WRONG_VALUES, ids=range(len(WRONG_VALUES)))
def test_rows_that_are_not_plain_are_left_to_the_other_encoder(
    name: str, value: Any, message: str, prepared: tuple[Path, pa.Table]
) -> None:
    folder, table = prepared
    fast, encoder, _ = encoders(folder)
    rows = plain_rows(table[:2])
    rows[1][name] = value
    before = dict(encoder.num_unseen)
    assert fast.encode(rows) is None
    assert encoder.num_unseen == before
    assert message


def test_rows_of_other_forms_are_left_to_the_other_encoder(prepared: tuple[Path, pa.Table]) -> None:
    folder, table = prepared
    fast, _, _ = encoders(folder)
    (row,) = plain_rows(table[:1])
    for wrong in ([1], ["row"], [None], [[row]], [{}], [numpy_scalars(row)], [{**row, "text": "1.5"}]):
        assert fast.encode(wrong) is None
    assert fast.encode([row]) is not None
    columns = {name: [value] for name, value in row.items()}
    for wrong in (
        {**columns, "word": ["a", "b"]},
        {**columns, "word": "a"},
        {**columns, "word": pa.array(["a"])},
        row,
        {},
    ):
        assert fast.encode(wrong) is None
    assert fast.encode(columns) is not None


def test_whole_numbers_that_are_written_as_floats_are_found(tmp_path: Path) -> None:
    (tmp_path / "schema.toml").write_text('label = "y"\n[[categorical]]\nname = "user"\ninteger = true')
    (tmp_path / "a.csv").write_text("y,user\n0,7.0\n1,\n0,12.0\n1,7\n")
    config = PrepareConfig(format="table", schema=tmp_path / "schema.toml", test=0.0)
    schema = prepare([tmp_path / "a.csv"], tmp_path / "data", config)
    rows = RowEncoder(RowFormat.of(schema, ["user"]), open_lookups(tmp_path / "data", schema, ["user"]))
    for user in ("7.0", 7, 7.0, "7", np.float32(7), "07"):
        assert rows.encode([{"user": user}]).ids.values.tolist() == [[0]], user
    assert rows.encode([{"user": user} for user in (None, "", float("nan"), 12.0)]).ids.values.tolist() == [
        [1, 1, 1, 2]
    ]
    assert rows.encode([{"user": 13}]).ids.values.tolist() == [[3]]
    with pytest.raises(DataError, match=r"feature 'user' is '7.5' in row 1, which is not the exact value"):
        rows.encode([{"user": "7"}, {"user": "7.5"}])
