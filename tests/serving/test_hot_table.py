"""Table of hot values: the ids of their maps, and of no other texts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
from hypothesis import example, given, settings
from hypothesis import strategies as st

from holdall.data.id_map import IdMap
from holdall.data.schema import Feature
from holdall.serving.hot_table import PADDING, HotTable, words_of
from holdall.serving.id_lookup import IdLookup

TEXTS = st.lists(st.text(alphabet="ab\x00\x01\x07\x08\u00e9", max_size=9), unique=True, max_size=30)


def lookup_of(path: Path, values: list[str | None], hot_rows: int, withdrawn: list[int]) -> IdLookup:
    IdMap(pa.array(values, pa.string()), np.arange(len(values))[::-1], values.index(None)).save(path)
    feature = Feature(name="f", num_rows=len(values), unseen=values.index(None))
    lookup = IdLookup(path, None, feature, np.array(withdrawn, dtype=np.int64))
    lookup.hot_rows = hot_rows
    return lookup


def words(texts: list[str]) -> np.ndarray:
    data = [text.encode() for text in texts]
    sizes = np.array([len(one) for one in data], dtype=np.int64)
    whole = np.frombuffer(b"".join(data) + PADDING.tobytes(), dtype=np.uint8)
    return words_of(whole, np.cumsum(sizes) - sizes, sizes)


@settings(derandomize=True, deadline=None, max_examples=40)
@given(known=st.tuples(TEXTS, TEXTS), others=TEXTS, withdraws=st.booleans())
@example(known=(["a", "aaaaaaa\x01", "aaaaaaa", ""], ["a\x00", "b"]), others=["a\x00\x00", "\x01"], withdraws=True)
def test_texts_have_the_ids_of_their_own_map(
    known: tuple[list[str], list[str]], others: list[str], withdraws: bool, tmp_path_factory
) -> None:
    folder = tmp_path_factory.mktemp("maps")
    maps: list[list[str | None]] = [[None, *known[0]], [*known[1], None]]
    out = [1] if withdraws and known[0] else []
    lookups = [lookup_of(folder / f"{n}.arrow", values, 3, out if n == 0 else []) for n, values in enumerate(maps)]
    table, queries = HotTable(lookups), [*known[0], *known[1], *others]
    found = table.find(np.concatenate([words(queries)] * 2), lookups, [len(queries)] * 2).reshape(2, -1)
    for lookup, values, ids in zip(lookups, maps, found.tolist(), strict=True):
        for text, number in zip(queries, ids, strict=True):
            expected = lookup.id_of(text)
            assert number in (expected, -1)
            assert number < 12  # 4 rows in the table for each in a dict
            is_known = text in values and expected == values.index(text) < 12
            if is_known and len(text.encode()) < 8:
                assert number == expected


def test_values_that_find_no_slot_are_left_out(tmp_path: Path) -> None:
    values: list[str | None] = [*(str(number) for number in range(20_000)), None]
    lookup = lookup_of(tmp_path / "f.arrow", values, 20_000, [])
    found = HotTable([lookup]).find(words(values[:-1]), [lookup], [20_000])  # type: ignore[arg-type]
    assert set(np.flatnonzero(found != np.arange(20_000)).tolist()) == set(np.flatnonzero(found == -1).tolist())
    assert np.count_nonzero(found == -1) < 600
