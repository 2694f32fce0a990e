"""Encoder of Arrow columns: the batches of the same values as Python objects, and the same unseen counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from holdall.data.id_map import IdMap, id_map_path
from holdall.data.schema import DenseColumn, Feature, Schema
from holdall.serving import encode_arrays
from holdall.serving.id_lookup import open_lookups
from holdall.serving.raw_rows import RowFormat
from holdall.serving.row_encoder import RowEncoder

KNOWN = ["a", "", "17", "-3", "true", "é", "日本語", "12345678", "longer than a word", "255", "18446744073709551615"]
TEXTS = ["a", None, "", "é", "日本語", "unseen", "longer than a word", "x" * 3000, "12345678", "a\x00"]
BOOLEANS = pa.array([True, None, False, True])
SIGNED = [pa.int8(), pa.int16(), pa.int32(), pa.int64()]
UNSIGNED = [pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()]
COLUMNS: list[list[pa.Array]] = [
    [pa.array(TEXTS)],
    [pa.array(TEXTS, pa.large_string())],
    [pa.array(TEXTS).dictionary_encode()],
    [pa.array(TEXTS)[2:7]],
    [pa.array(TEXTS, pa.large_string())[3:], pa.array(TEXTS)[:3], pa.array([], pa.string())],
    [pa.DictionaryArray.from_arrays(pa.array([2, 0, None, 1], pa.int8()), pa.array(["a", None, "é"]))[1:]],
    *([pa.array([17, None, -3, 120], kind)] for kind in SIGNED),
    *([pa.array([17, None, 255, 0], kind)] for kind in UNSIGNED),
    [pa.array([-(2**63), 2**63 - 1, 10**18])],
    [pa.array([2**64 - 1, 0], pa.uint64())[0:1]],
    [BOOLEANS],
    [BOOLEANS[1:], pa.array(["true", "1"])],
    [pa.nulls(5)],
]
DENSE: list[list[pa.Array]] = [
    [pa.array([1.5, None, -2.0, 3e38])[1:]],
    [pa.array([1.5, None, 0.1], pa.float32())],
    [pa.array([2**53 + 1, None, -(2**63)]), pa.array([2**64 - 1], pa.uint64())],
    [BOOLEANS[1:]],
    [pa.nulls(3)],
    [pa.array([7, -7], pa.int8())],
]


@pytest.fixture(params=[None, 0], ids=["hot", "cold"])
def encoder(request: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RowEncoder:
    """Encoder of a dense column of each transform, and of two features of which the model reads the last."""
    monkeypatch.setattr(encode_arrays, "TABLE_FROM", 1)
    values = [*KNOWN[:4], None, *KNOWN[4:]]
    features = tuple(Feature(name=name, num_rows=len(values), unseen=4) for name in ("not read", "f"))
    dense = (DenseColumn(name="d"), DenseColumn(name="e", transform="none", missing=0.5))
    for feature in features:
        path = id_map_path(tmp_path, feature.name)
        path.parent.mkdir(exist_ok=True)
        IdMap(pa.array(values, pa.string()), np.arange(len(values))[::-1], 4).save(path)
    schema = Schema(label="label", dense=dense, features=features)
    lookups = open_lookups(tmp_path, schema, ["f"])
    if request.param is not None:
        lookups["f"].hot_rows = request.param
    return RowEncoder(RowFormat(schema, frozenset(["f"])), lookups)


def both(encoder: RowEncoder, columns: dict[str, list[pa.Array]]) -> None:
    """Assert that arrays and Python values give the same."""
    before = dict(encoder.num_unseen)
    found = encoder.encode_arrays(columns)
    assert found is not None
    counted = {name: count - before[name] for name, count in encoder.num_unseen.items()}
    lists = {name: [value for part in parts for value in part.to_pylist()] for name, parts in columns.items()}
    expected = encoder.values.encode(lists)
    assert expected is not None
    assert found.dense.numpy().tobytes() == expected.dense.numpy().tobytes()
    assert found.ids.values.dtype == expected.ids.values.dtype
    assert torch.equal(found.ids.values, expected.ids.values)
    assert encoder.num_unseen == {name: before[name] + 2 * count for name, count in counted.items()}


@pytest.mark.parametrize("parts", COLUMNS, ids=lambda parts: "+".join(str(part.type) for part in parts))
def test_features_are_encoded_as_their_python_values(parts: list[pa.Array], encoder: RowEncoder) -> None:
    number = sum(map(len, parts))
    dense = [pa.array(np.arange(number))]
    both(encoder, {"d": dense, "e": dense, "f": parts})


@pytest.mark.parametrize("parts", DENSE, ids=lambda parts: "+".join(str(part.type) for part in parts))
def test_dense_columns_are_encoded_as_their_python_values(parts: list[pa.Array], encoder: RowEncoder) -> None:
    both(encoder, {"d": parts, "e": parts[::-1], "f": [pa.array(["a"] * sum(map(len, parts)))]})


@pytest.mark.parametrize(
    "wrong",
    [
        {"f": pa.array([1.0, 2.0])},
        {"f": pa.array(["a", "x" * (1 << 20)])},
        {"d": pa.array([1.0, float("nan")])},
        {"d": pa.array([1.0, 1e39])},
        {"e": pa.array(["1", "2"])},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_what_is_not_plainly_right_is_left_to_python(wrong: dict[str, pa.Array], encoder: RowEncoder) -> None:
    columns = {"d": pa.array([1, 2]), "e": pa.array([1, 2]), "f": pa.array(["a", "b"])} | wrong
    before = dict(encoder.num_unseen)
    assert encoder.encode_arrays({name: [column] for name, column in columns.items()}) is None
    assert encoder.num_unseen == before
