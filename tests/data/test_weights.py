"""Weights of rows: from the raw column through the data folder and batches to the loss and the metrics."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from holdall.commands.fit import fit
from holdall.common.errors import ConfigError, DataError
from holdall.data.batch import Batch
from holdall.data.dataset import DataSet
from holdall.data.encode import encode_rows
from holdall.data.infer_schema import schema as infer
from holdall.data.negatives import positive_rate
from holdall.data.passes import relative
from holdall.data.prepare import PrepareConfig, prepare
from holdall.data.schema import Schema, WeightColumn
from holdall.evaluation.metrics import BinaryMetrics
from holdall.popularity.renumber import RenumberedFolder
from holdall.runtime.packed_batch import packed
from holdall.training.config import TrainConfig
from holdall.training.evaluate_run import evaluate
from holdall.training.tracking import load_batch, save_batch
from holdall.training.train import train
from tests.data.raw_files import read_split

TOML = 'label = "y"\nweight = "w"\ndense = ["x"]\ncategorical = ["c"]\n'


def frame(num_rows: int = 400, seed: int = 0) -> pa.Table:
    draw = np.random.default_rng(seed)
    user = draw.integers(0, 20, num_rows)
    label = (draw.random(num_rows) < 0.2 + 0.6 * (user % 2)).astype(int)
    weight = draw.integers(0, 4, num_rows) * 0.5
    return pa.table({"y": label, "w": weight, "x": draw.random(num_rows), "c": [f"u{n}" for n in user]})


def run(folder: Path, rows: str | pa.Table, toml: str = TOML, **options: Any) -> Schema:
    (folder / "schema.toml").write_text(toml, encoding="utf-8")
    raw = folder / ("a.csv" if isinstance(rows, str) else "a.parquet")
    if isinstance(rows, str):
        raw.write_text(rows, encoding="utf-8")
    else:
        pq.write_table(rows, raw)
    options = {"test": 0.0, "overwrite": True, **options}
    return prepare([raw], folder / "out", PrepareConfig(format="table", schema=folder / "schema.toml", **options))


# --- the data folder ------------------------------------------------------------------------------------------------


def test_weights_are_stored_over_their_mean(tmp_path: Path) -> None:
    schema = run(tmp_path, "y,w,x,c\n1,2,1,a\n0,0,1,b\n1,4,1,a\n0,10,1,b\n")
    assert schema.weight is not None
    assert (schema.weight.name, schema.weight.mean) == ("w", 4.0)
    assert read_split(tmp_path / "out", "train")["weight"] == [0.5, 0.0, 1.0, 2.5]
    assert schema.splits["train"].weights == (2.5, 1.5)
    assert Schema.load(tmp_path / "out") == schema
    data = DataSet(tmp_path / "out")
    assert positive_rate(data) == (1.5 + 0.5) / 5
    weights = [0.5, 0.0, 1.0, 2.5]
    for batch, rows in ((data.slice(1, 3), [1, 2]), (data.take(np.array([3, 0])), [3, 0])):
        assert batch.weight is not None
        assert batch.weight.tolist() == [weights[row] for row in rows]


def test_a_folder_without_weights_is_as_before(tmp_path: Path) -> None:
    schema = run(tmp_path, frame(), TOML.replace('weight = "w"\n', ""))
    assert schema.weight is None
    assert "weight" not in read_split(tmp_path / "out", "train")
    assert DataSet(tmp_path / "out").slice(0, 3).weight is None


def test_many_files_and_orders_keep_weights_with_their_rows(tmp_path: Path) -> None:
    run(tmp_path, frame(), rows_per_file=37)
    (tmp_path / "ordered").mkdir()
    RenumberedFolder(tmp_path / "out", {}).write(tmp_path / "ordered", {}, lambda stage, done, total: None)
    for folder in (tmp_path / "out", tmp_path / "ordered"):
        data = DataSet(folder)
        rows = np.random.default_rng(1).permutation(len(data))
        taken = data.take(rows)
        assert taken.weight is not None
        everything = np.array(read_split(folder, "train")["weight"], dtype=np.float32)
        assert taken.weight.tolist() == everything[rows].tolist()


@pytest.mark.parametrize("wrong", ["-1", "", "nan", "inf", "much"])
@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_a_wrong_weight_is_refused_by_row(wrong: str, kind: str, tmp_path: Path) -> None:
    text = f"y,w,x,c\n1,2,1,a\n0,{wrong},1,b\n"
    numbers = {"": None, "much": None}
    value = numbers[wrong] if wrong in numbers else float(wrong)
    table = pa.table({"y": [1, 0], "w": [2.0, value], "x": [1.0, 1.0], "c": ["a", "b"]})
    line = 3 if kind == "csv" else 2
    with pytest.raises(DataError, match=rf"line {line}: the weight \(column 'w'\) is .*no finite number of 0 or more"):
        run(tmp_path, text if kind == "csv" else table)
    run(tmp_path, text if kind == "csv" else table, bad_rows="skip")
    assert read_split(tmp_path / "out", "train")["weight"] == [1.0]


def test_weights_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="'w' gives every training row the weight 0"):
        run(tmp_path, "y,w,x,c\n1,0,1,a\n0,0,1,b\n")
    with pytest.raises(ConfigError, match="column 'y' is the label and also the weight"):
        run(tmp_path, "y,w,x,c\n1,0,1,a\n", TOML.replace('"w"', '"y"'))
    with pytest.raises(DataError, match="has no column 'v'"):
        run(tmp_path, "y,w,x,c\n1,0,1,a\n", TOML.replace('"w"', '"v"'))
    with pytest.raises(DataError, match=r"9e\+06, more than 1e\+06 times the mean of the training rows \(3\)"):
        relative(np.array([1.0, 9e6]), WeightColumn(name="w", mean=3.0))


def test_raw_rows_are_encoded_with_their_weights(tmp_path: Path) -> None:
    table = frame(50)
    run(tmp_path, table)
    batch, stored = encode_rows(tmp_path / "out", table), DataSet(tmp_path / "out").slice(0, 50)
    assert batch.weight is not None
    assert stored.weight is not None
    assert torch.equal(batch.weight, stored.weight)
    with pytest.raises(DataError, match=r"the weight 'w' is -1\.0 in row 0"):
        encode_rows(tmp_path / "out", {"w": [-1.0], "x": [1.0], "c": ["u1"]})


def test_a_weight_is_guessed_by_a_name_that_says_so(tmp_path: Path) -> None:
    table = frame()
    for name, role in (("sample_weight", 'weight = "sample_weight"  # its name; numbers from 0 to 1.5'), ("w", "")):
        pq.write_table(table.rename_columns({"w": name}), tmp_path / "a.parquet")
        made = infer(tmp_path / "a.parquet")
        assert role in made
        assert ("\nweight =" in made) == bool(role)


# --- batches --------------------------------------------------------------------------------------------------------


def weighted_batch(tmp_path: Path) -> Batch:
    run(tmp_path, frame(8))
    return DataSet(tmp_path / "out").slice(0, 8)


def test_batches_carry_weights(tmp_path: Path) -> None:
    batch = weighted_batch(tmp_path)
    assert batch.weight is not None
    block = packed(batch)
    for copy in (batch.to("cpu"), block, block.to("cpu"), block.to_memory(torch.empty(4096, dtype=torch.uint8))):
        assert copy.weight is not None
        assert torch.equal(copy.weight, batch.weight)
    for made in (batch.empty_like(), block.empty_like()):
        made.fill(batch)
        assert made.weight is not None
        assert torch.equal(made.weight, batch.weight)
    part = batch.slice(2, 5)
    assert part.weight is not None
    assert torch.equal(part.weight, batch.weight[2:5])
    assert batch.without_samples().weight is not None
    save_batch(tmp_path / "batch", batch)
    loaded = load_batch(tmp_path / "batch")
    assert loaded.weight is not None
    assert torch.equal(loaded.weight, batch.weight)


# --- training -------------------------------------------------------------------------------------------------------


def trained(folder: Path, data: Path, name: str, **settings: Any) -> dict[str, Any]:
    config = TrainConfig.of(batch_size=64, epochs=2, dim=4, bottom=(8,), top=(8,), shuffle="none", **settings)
    return train(data, folder / name, config, quiet=True)


def losses(folder: Path) -> list[float]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


def test_weights_of_one_train_the_model_without_weights(tmp_path: Path) -> None:
    table = frame()
    plain, ones = tmp_path / "plain", tmp_path / "ones"
    for folder, toml in ((plain, TOML.replace('weight = "w"\n', "")), (ones, TOML)):
        folder.mkdir()
        run(folder, table.set_column(1, "w", pa.array(np.full(len(table), 3.0))), toml, valid=0.2)
        trained(folder, folder / "out", "run", log_every=1)
    assert losses(plain / "run") == losses(ones / "run")
    assert len(losses(plain / "run")) > 5


def test_a_weight_of_two_is_the_row_twice(tmp_path: Path) -> None:
    users = [f"u{n // 4:02}" for n in range(64)]  # as often in both folders, so that ids are the same
    table = frame(64).set_column(3, "c", pa.array(users))
    weight = np.tile([1, 2, 1, 0], 16)
    weighted, repeated = tmp_path / "weighted", tmp_path / "repeated"
    rows = np.repeat(np.arange(64), weight)
    for folder, raw in ((weighted, table.set_column(1, "w", pa.array(weight))), (repeated, table.take(rows))):
        folder.mkdir()
        run(folder, raw, TOML if folder == weighted else TOML.replace('weight = "w"\n', ""))
        trained(folder, folder / "out", "run", log_every=1, optimizer="sgd", lr=0.1)
    found = [evaluate(folder / "run", "train") for folder in (weighted, repeated)]
    for metric in ("auc", "logloss", "calibration", "accuracy", "normalized_entropy"):
        assert found[0][metric] == pytest.approx(found[1][metric], rel=1e-5), metric
    assert found[0]["samples"] == 64
    assert losses(weighted / "run") == pytest.approx(losses(repeated / "run"), rel=1e-5)


def test_fit_takes_weights(tmp_path: Path) -> None:
    table = pl.from_arrow(frame(600))
    model = fit(table, label="y", weight="w", categorical=["c"], dense=["x"], out=tmp_path / "fit")
    weighted, plain = model.evaluate(table), model.evaluate(table.drop("w"))
    assert weighted["samples"] == plain["samples"] == 600
    assert weighted["logloss"] != plain["logloss"]
    assert len(model.predict(table.drop("w", "y"))) == 600


def test_metrics_are_sums_of_weights() -> None:
    draw = np.random.default_rng(3)
    logit = torch.from_numpy(draw.normal(size=300).round(1)).float()
    label = torch.from_numpy((draw.random(300) < 0.4).astype(np.float32))
    weight = torch.from_numpy(draw.integers(0, 5, 300) / 4).float()
    parts = [BinaryMetrics(), BinaryMetrics()]
    for metrics, part in zip(parts, (slice(0, 100), slice(100, 300)), strict=True):
        metrics.update(logit[part], label[part], weight[part])
    parts[0].merge(parts[1])
    found = parts[0].compute()
    rows = np.repeat(np.arange(300), (weight * 4).long().numpy())
    repeated = BinaryMetrics()
    repeated.update(logit[rows], label[rows])
    for name, expected in repeated.compute().items():
        if name not in ("samples", "positives"):
            assert found[name] == pytest.approx(expected, rel=1e-9), name
    assert (found["samples"], found["positives"]) == (300, int(label.sum()))


def test_metrics_without_weight_are_refused() -> None:
    metrics = BinaryMetrics()
    metrics.update(torch.zeros(2), torch.tensor([0.0, 1.0]), torch.zeros(2))
    with pytest.raises(DataError, match="all 2 rows weigh 0"):
        metrics.compute()
    metrics.update(torch.tensor([float("nan")]), torch.ones(1), torch.zeros(1))
    with pytest.raises(DataError, match="1 logits are not finite"):
        metrics.compute()
