"""Id maps: from a value to its id and back, exactly."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdall.common.errors import DataError
from holdall.data import id_index
from holdall.data import id_map as module
from holdall.data.id_index import hash_one, hash_strings, mixed
from holdall.data.id_map import IdMap, id_dtype


def make(values: list[str | None]) -> IdMap:
    return IdMap(pa.array(values, pa.string()), np.arange(len(values))[::-1], values.index(None))


def test_apply_finds_ids_missing_and_unseen() -> None:
    ids = make(["b", "", None, "été", "a" * 1000]).apply(["été", None, "", "b", "bb", "a" * 1000, "a" * 999])
    assert ids.tolist() == [3, 1, 1, 0, 2, 4, 2]
    assert ids.dtype == np.int32


def test_missing_is_unseen_when_training_had_no_missing_value() -> None:
    assert make(["b", None]).apply([None, "", "b"]).tolist() == [1, 1, 0]


def test_integers_booleans_and_dictionaries_are_known_by_their_text() -> None:
    found = make(["12", "true", None])
    assert found.apply(np.array([12, -1])).tolist() == [0, 2]
    assert found.apply([True, False]).tolist() == [1, 2]
    assert found.apply(
        pa.chunked_array([pa.array(["12"]).dictionary_encode(), pa.array(["x"]).dictionary_encode()])
    ).tolist() == [0, 2]
    with pytest.raises(DataError, match=r"value 0 is 1.5, which is not the exact value of a whole number"):
        found.apply([1.5])


def test_values_whose_hashes_collide_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_of_three(strings: pa.LargeStringArray) -> np.ndarray:
        return np.array([len(text or "") % 3 for text in strings.to_pylist()], dtype=np.uint64)

    monkeypatch.setattr(id_index, "hash_strings", one_of_three)
    values: list[str | None] = [f"value {number}" for number in range(200)]
    values[77] = None
    ids = make(values).apply([f"value {number}" for number in range(210)])
    assert ids.tolist() == [*range(200), *[77] * 10]


@settings(derandomize=True, deadline=None, max_examples=50)
@given(st.lists(st.text(max_size=300)))
def test_one_text_has_the_hash_of_many(texts: list[str]) -> None:
    hashes = mixed(hash_strings(pa.array(texts, pa.large_string())))
    assert [hash_one(text) for text in texts] == hashes.tolist()


def test_only_distinct_values_of_many_are_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(id_index, "DISTINCT_FROM", 4)
    assert make(["b", None, "a"]).apply(["a", "b", "a", "c", "a", "b"]).tolist() == [2, 0, 2, 1, 2, 0]


@settings(derandomize=True, deadline=None, max_examples=50)
@given(known=st.lists(st.text(max_size=9), unique=True), queries=st.lists(st.text(max_size=3)), data=st.data())
def test_apply_is_a_dictionary(known: list[str], queries: list[str], data: st.DataObject) -> None:
    unseen = data.draw(st.integers(0, len(known)))
    values: list[str | None] = [*known[:unseen], None, *known[unseen:]]
    wanted = {value: id for id, value in enumerate(values) if value is not None}
    queries += known
    found = make(values)
    for query in queries:
        assert found.index.find_one(query, lambda id: found.values[id].as_py()) == wanted.get(query)
    assert found.apply(pa.array(queries, pa.string())).tolist() == [wanted.get(query, unseen) for query in queries]


def test_a_map_survives_the_disk_in_several_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROWS_PER_BATCH", 3)
    original = make(["d", "c", "", "b", None, "a", "\x00", "é"])
    original.save(tmp_path / "c.arrow")
    assert pa.ipc.open_file(str(tmp_path / "c.arrow")).num_record_batches == 3
    loaded = IdMap.load(tmp_path / "c.arrow")
    assert loaded.values.to_pylist() == ["d", "c", "", "b", None, "a", "\x00", "é"]
    assert loaded.counts.tolist() == [7, 6, 5, 4, 3, 2, 1, 0]
    assert (loaded.unseen, loaded.num_rows) == (4, 8)
    assert loaded.apply(["a", "q", "é"]).tolist() == [5, 4, 7]


def test_damaged_maps_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "c.arrow"
    with pytest.raises(DataError, match=r"c\.arrow is missing"):
        IdMap.load(path)
    make(["a", None]).save(path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DataError, match="cannot be read"):
        IdMap.load(path)
    for columns in ({"value": pa.array(["a"]), "count": [1]}, {"x": [1]}):
        table = pa.table(columns)
        with pa.ipc.new_file(str(path), table.schema) as writer:
            writer.write_table(table)
        with pytest.raises(DataError, match=r"unseen rows|not an id map"):
            IdMap.load(path)


def test_ids_are_64_bit_only_where_they_must_be() -> None:
    assert id_dtype(2**31 - 1) is np.int32
    assert id_dtype(2**31) is np.int64


def test_withdrawn_values_are_unseen_and_gone(tmp_path: Path) -> None:
    full = make(["a", "bb", "ccc", None, "d"])
    left = full.without(np.array([1, 4]))
    assert left.apply(["a", "bb", "ccc", "d", "x"]).tolist() == [0, 3, 2, 3, 3]
    assert full.apply(["bb"]).tolist() == [1]
    assert left.counts.tolist() == [full.counts[0], 0, full.counts[2], full.counts[3], 0]
    left.save(tmp_path / "c.arrow")
    loaded = IdMap.load(tmp_path / "c.arrow")
    assert loaded.unseen == 3
    assert loaded.apply(["a", "bb", "ccc", "d", "x"]).tolist() == [0, 3, 2, 3, 3]
    assert b"bb" not in (tmp_path / "c.arrow").read_bytes()


@pytest.mark.parametrize("named", [b"0", b"9", b"x", b"-1", b""])
def test_a_map_that_names_no_unseen_row_is_refused(named: bytes, tmp_path: Path) -> None:
    schema = pa.schema([("value", pa.string()), ("count", pa.int64())], metadata={b"unseen": named})
    table = pa.table({"value": ["a", None, None], "count": [2, 1, 0]}).cast(schema)
    with pa.ipc.new_file(str(tmp_path / "c.arrow"), schema) as writer:
        writer.write_table(table)
    with pytest.raises(DataError, match="0 unseen rows instead of one"):
        IdMap.load(tmp_path / "c.arrow")
