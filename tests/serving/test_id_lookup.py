"""Lookups in mapped id maps: those of the map in memory, with and without an index, and little memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import holdall
from holdall.common.errors import DataError
from holdall.common.files import write_json
from holdall.data import id_map as id_maps
from holdall.data.id_map import IdMap, id_map_path, load_id_maps
from holdall.data.identity import with_files
from holdall.data.schema import DenseColumn, Feature, Schema
from holdall.models import DLRMConfig
from holdall.serving.bundle import BUNDLE_FILE, open_bundle
from holdall.serving.id_lookup import IdLookup, index_path, share_hot_rows, write_index
from holdall.tables import Bands, Codes, Hashed, Quantized, Shared
from tests.serving.test_bundle import SMALL, write


def lookup_of(folder: Path, values: list[str | None], *, indexed: bool) -> tuple[IdLookup, IdMap]:
    made = IdMap(pa.array(values, pa.string()), np.arange(len(values))[::-1], values.index(None))
    path = folder / "f.arrow"
    made.save(path)
    if indexed:
        write_index(index_path(path), made)
    feature = Feature(name="f", num_rows=len(values), unseen=made.unseen)
    return IdLookup(path, index_path(path) if indexed else None, feature), made


@pytest.mark.parametrize("indexed", [True, False])
@settings(derandomize=True, deadline=None, max_examples=20)
@given(known=st.lists(st.text(max_size=5), unique=True), queries=st.lists(st.text(max_size=3)), data=st.data())
def test_a_mapped_map_is_the_map(
    indexed: bool, known: list[str], queries: list[str], data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    unseen = data.draw(st.integers(0, len(known)))
    values: list[str | None] = [*known[:unseen], None, *known[unseen:]]
    rows_per_batch = data.draw(st.integers(1, 5))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(id_maps, "ROWS_PER_BATCH", rows_per_batch)
        lookup, made = lookup_of(tmp_path_factory.mktemp("map"), values, indexed=indexed)
    queries += known
    assert lookup.apply(pa.array(queries, pa.string())).tolist() == made.apply(pa.array(queries, pa.string())).tolist()
    lookup.hot_rows = data.draw(st.integers(0, len(values)))
    for _ in range(2):
        assert [lookup.id_of(text) for text in queries] == made.apply(pa.array(queries, pa.string())).tolist()
    assert all(number < lookup.hot_rows for number in lookup.hot.values())
    assert lookup.longest == made.longest
    assert [lookup.text(number) for number in range(len(values))] == values
    assert [lookup.count(number) for number in range(len(values))] == made.counts.tolist()
    start = data.draw(st.integers(0, len(values)))
    texts, counts = lookup.rows(start, len(values))
    assert texts.to_pylist() == values[start:]
    assert counts.tolist() == made.counts[start:].tolist()


def test_a_full_prefix_is_kept(tmp_path: Path) -> None:
    lookup, _ = lookup_of(tmp_path, ["b", "", None, "a", "c"], indexed=True)
    lookup.hot_rows = 4
    lookup.fill()
    assert lookup.hot == {"b": 0, "": 1, None: 1, "a": 3}
    assert lookup.id_of("c") == 4
    assert "c" not in lookup.hot


def test_hot_rows_are_shared_out(tmp_path: Path) -> None:
    class Rows:
        def __init__(self, num_rows: int):
            self.num_rows, self.hot_rows = num_rows, -1

    maps: list[Any] = [Rows(1000), Rows(5), Rows(30), Rows(1000)]
    share_hot_rows(maps, 105)
    assert [found.hot_rows for found in maps] == [35, 5, 30, 35]


def test_an_index_of_another_map_is_refused(tmp_path: Path) -> None:
    lookup_of(tmp_path, ["b", None, "a", "c"], indexed=True)
    os.rename(tmp_path / "f.index", tmp_path / "other")
    lookup_of(tmp_path, ["b", None], indexed=True)
    os.rename(tmp_path / "other", tmp_path / "f.index")
    found = IdLookup(tmp_path / "f.arrow", tmp_path / "f.index", Feature(name="f", num_rows=2, unseen=1))
    with pytest.raises(DataError, match="is not the index of a map of 2 rows"):
        found.id_of("b")
    with pytest.raises(DataError, match="does not fit"):
        IdLookup(tmp_path / "f.arrow", None, Feature(name="f", num_rows=3, unseen=1))
    with pytest.raises(DataError, match="does not fit"):
        IdLookup(tmp_path / "f.arrow", None, Feature(name="f", num_rows=2, unseen=0))


def test_a_bundle_without_an_index_scores_the_same(data: Path, tmp_path: Path) -> None:
    write(tmp_path / "bundle", SMALL.build(Schema.load(data)), SMALL, data)
    names = [feature.name for feature in Schema.load(data).features]
    assert all(f"ids/{name}.index" in open_bundle(tmp_path / "bundle").record.files for name in names)
    maps = load_id_maps(data)
    row: dict[str, Any] = {name: maps[name].values[3].as_py() for name in names}
    row |= {column.name: 1.0 for column in Schema.load(data).dense}
    expected = holdall.load(tmp_path / "bundle").score([row])
    document = json.loads((tmp_path / "bundle" / BUNDLE_FILE).read_text())
    for name in names:
        del document["files"][f"ids/{name}.index"]
        (tmp_path / "bundle" / "ids" / f"{name}.index").write_bytes(b"not listed, so not read")
    write_json(tmp_path / "bundle" / BUNDLE_FILE, document, hashed=True)
    assert np.array_equal(holdall.load(tmp_path / "bundle").score([row]), expected)


def test_a_changed_index_is_refused(data: Path, tmp_path: Path) -> None:
    write(tmp_path / "bundle", SMALL.build(Schema.load(data)), SMALL, data)
    path = next((tmp_path / "bundle" / "ids").glob("*.index"))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"\.index was changed"):
        holdall.load(tmp_path / "bundle")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="resident memory is read from /proc")
def test_tables_and_maps_are_not_read_into_memory(tmp_path: Path) -> None:
    """A table of 512 MB and its map of 45 MB take no memory of their own, which the system could not reclaim."""
    num_rows, config = 2_000_000, DLRMConfig(dim=64, bottom=(4,), top=(4,))
    data = tmp_path / "data"
    (data / "ids").mkdir(parents=True)
    texts = pa.array(np.arange(num_rows - 1)).cast(pa.string())
    values = pa.concat_arrays([texts, pa.array([None], pa.string())])
    IdMap(values, np.arange(num_rows)[::-1], num_rows - 1).save(id_map_path(data, "c"))
    feature = Feature(name="c", num_rows=num_rows, unseen=num_rows - 1)
    with_files(Schema(label="y", dense=(DenseColumn(name="x"),), features=(feature,)), data).save(data)
    model = config.build(Schema.load(data), device="meta").to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, 0.5) if parameter.numel() < 1000 else None
    write(tmp_path / "bundle", model, config, data)
    del model, values, texts
    holdall.load(tmp_path / "bundle")  # reads all files once, for their hashes
    before = own_bytes()
    scorer = holdall.load(tmp_path / "bundle")
    rows = [{"x": 1.0, "c": str(number)} for number in range(0, num_rows, num_rows // 500)]
    assert len(np.unique(scorer.encode(rows).ids.values)) == len(rows)
    assert scorer.score(rows).shape == (len(rows),)
    assert own_bytes() - before < 30e6


def own_bytes() -> int:
    """Resident memory that is not a view of a file."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("RssAnon:")[1].split()[0])


@pytest.mark.slow
def test_loading_and_scoring_import_nothing_heavy(data: Path, tmp_path: Path) -> None:
    """Ready in a second: neither torch's compiler nor pandas, which take longer to import than a bundle to open."""
    methods = {"C3": Bands(((5, Quantized()), (200, Codes(2, 4)), (None, Shared(rows=2)))), "C2": Hashed(buckets=3)}
    write(tmp_path / "bundle", SMALL.build(Schema.load(data), methods), SMALL, data)
    code = (
        "import sys, holdall, holdall.serving.scorer\n"
        f"scorer = holdall.load({str(tmp_path / 'bundle')!r})\n"
        "scorer.warm_up()\n"
        "scorer.score([dict.fromkeys(['I1', 'I2', 'I3', 'C1', 'C2', 'C3'])])\n"
        "print([name for name in ('torch._dynamo', 'sympy', 'pandas', 'polars') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert result.stdout.strip() == "[]", result.stderr
