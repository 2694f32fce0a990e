"""Lookups of table rows, counted over batches."""

from pathlib import Path

import torch

from holdall import DataSet, Loader
from holdall.data.id_map import IdMap
from holdall.data.prepare import PrepareConfig, prepare
from holdall.popularity.table_counts import stored_counts, table_counts


def test_counts_of_the_training_split_are_those_of_the_id_maps(tmp_path: Path) -> None:
    raw = tmp_path / "clicks.csv"
    lines = [f"{row % 2},{row % 7},{row % 3}" for row in range(100)]
    raw.write_text("\n".join(["click,user,item", *lines]) + "\n", encoding="utf-8")
    schema = tmp_path / "schema.toml"
    schema.write_text('label = "click"\ncategorical = ["user", "item"]\n', encoding="utf-8")
    prepare([raw], tmp_path / "data", PrepareConfig(format="table", schema=schema, valid=0.1, test=0.2))
    data = DataSet(tmp_path / "data", "train")
    counts = table_counts(Loader(data, 16, shuffle="none").epoch(0), data.schema)
    assert set(counts) == {"user", "item"}
    for name, found in counts.items():
        expected = IdMap.load(tmp_path / "data" / "ids" / f"{name}.arrow").counts
        assert torch.equal(found, torch.tensor(expected.tolist()))
        assert int(found.sum()) == len(data)


def test_stored_counts_of_features_that_share_a_table_are_added_up_once(tmp_path: Path) -> None:
    raw = tmp_path / "clicks.csv"
    lines = [f"{row % 2},{row % 7},{row % 3}" for row in range(100)]
    raw.write_text("\n".join(["click,bought,seen", *lines]) + "\n", encoding="utf-8")
    schema = tmp_path / "schema.toml"
    schema.write_text(
        'label = "click"\n[[categorical]]\nname = "bought"\ntable = "item"\n[[categorical]]\nname = "seen"\n'
        'table = "item"\n',
        encoding="utf-8",
    )
    prepare([raw], tmp_path / "data", PrepareConfig(format="table", schema=schema, valid=0.1, test=0.2))
    data = DataSet(tmp_path / "data", "train")
    counted = table_counts(Loader(data, 16, shuffle="none").epoch(0), data.schema)
    stored = stored_counts(data)
    assert list(stored) == ["item"]
    assert torch.equal(stored["item"], counted["item"])
    assert int(stored["item"].sum()) == 2 * len(data)
