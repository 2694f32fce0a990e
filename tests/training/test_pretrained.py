"""Pretrained rows: vectors by raw value in the tables of a fresh run, for every place that rows are stored in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import holdall
from holdall.common.errors import CheckpointError, ConfigError, DataError, HoldallError
from holdall.data.id_map import load_id_maps
from holdall.serving.vectors import feature_rows
from holdall.tables.hashed import HashedTable
from holdall.training.config import TrainConfig
from holdall.training.tracking import read_run

SMALL = TrainConfig.of(dim=4, bottom=(4,), top=(4,), batch_size=128, steps=2, min_rows=1)
FEATURE = "C3"  # the largest, of 400 values


class Stop(holdall.Callback):
    """Ends a run before its first step: its checkpoint has the rows that it starts with."""

    def on_start(self, run: Path, settings: dict[str, Any], step: int) -> None:
        raise holdall.StopTraining


def start(data: Path, out: Path, config: TrainConfig, *, quiet: bool = True) -> holdall.Scorer:
    holdall.train(data, out, config, quiet=quiet, callbacks=[Stop()])
    return holdall.load(out)


def rows_of(scorer: holdall.Scorer) -> np.ndarray:
    return feature_rows(scorer.model, FEATURE, np.arange(scorer.schema.feature(FEATURE).num_rows))


def write(path: Path, values: Any, vectors: Any, kind: pa.DataType | None = None) -> Path:
    vector = pa.array(vectors, kind or pa.list_(pa.float32()))
    pq.write_table(pa.table({"value": values, "vector": vector}), path)
    return path


def given(path: Path) -> TrainConfig:
    return SMALL.replace(pretrained=(f"{FEATURE}={path}",))


@pytest.fixture(scope="module")
def written(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray]:
    """Vectors of a trained run, as its scorer writes them, and its rows."""
    folder = tmp_path_factory.mktemp("written")
    holdall.train(data, folder / "run", SMALL.replace(steps=20), quiet=True)
    scorer = holdall.load(folder / "run")
    scorer.write_vectors(FEATURE, folder / "vectors.parquet")
    return folder / "vectors.parquet", rows_of(scorer)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"strategy": "host"},
        {"strategy": "split", "hot_bytes": "2KB"},
        {"strategy": "split", "hot_bytes": "2KB", "tail": "disk", "refresh_hot": 5},
        {"strategy": "hot-batches", "hot_bytes": "4KB"},
    ],
    ids=["plain", "host", "split", "disk", "hot batches"],
)
def test_a_run_starts_with_the_vectors_of_another(
    settings: dict[str, Any], data: Path, tmp_path: Path, written: tuple[Path, np.ndarray]
) -> None:
    path, rows = written
    config = given(path).replace(seed=5, **settings)
    assert np.array_equal(rows_of(start(data, tmp_path / "run", config)), rows)
    (kept,) = read_run(tmp_path / "run")["pretrained"]  # type: ignore[typeddict-item]
    assert (kept["table"], kept["rows"], kept["unknown"], kept["error"]) == (FEATURE, len(rows), 0, 0.0)
    with pytest.raises(CheckpointError, match="was trained with pretrained="):
        holdall.train(data, tmp_path / "run", config.replace(pretrained=()), resume=True, quiet=True)
    holdall.train(data, tmp_path / "run", config, resume=True, quiet=True)
    assert not np.array_equal(rows_of(holdall.load(tmp_path / "run")), rows)


def test_values_without_a_vector_start_as_usual(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = load_id_maps(data)[FEATURE].values.to_pylist()
    chosen = [7, 0, 250]
    path = write(
        tmp_path / "some.parquet",
        [*(values[i] for i in chosen), "never seen", "nor this"],
        np.arange(20.0).reshape(5, 4).tolist(),
        pa.list_(pa.float64(), 4),
    )
    usual = rows_of(start(data, tmp_path / "usual", SMALL))
    found = rows_of(start(data, tmp_path / "run", given(path), quiet=False))
    assert np.array_equal(found[chosen], np.arange(12.0, dtype=np.float32).reshape(3, 4))
    others = np.setdiff1d(np.arange(len(usual)), chosen)
    assert np.array_equal(found[others], usual[others])
    text = capsys.readouterr().err
    assert f"pretrained: 3 of {len(usual)} rows of table '{FEATURE}' start as in {path}; 2 values of the file" in text


def test_rows_in_bf16_are_the_vectors_rounded(data: Path, tmp_path: Path, written: tuple[Path, np.ndarray]) -> None:
    path, rows = written
    found = rows_of(start(data, tmp_path / "run", given(path).replace(table_dtype="bf16")))
    assert np.allclose(found, rows, rtol=2**-8)
    assert 0 < read_run(tmp_path / "run")["pretrained"][0]["error"] < 2**-8  # type: ignore[typeddict-item]


def test_compressed_tables_are_fitted(
    data: Path, tmp_path: Path, written: tuple[Path, np.ndarray], capsys: pytest.CaptureFixture[str]
) -> None:
    path, rows = written
    config = given(path).replace(method="quantized", setting=("bits=8", "rounding=stochastic", "trainable=true"))
    found = rows_of(start(data, tmp_path / "run", config, quiet=False))
    assert np.abs(found - rows).max() <= np.abs(rows).max() / 127
    assert "the table stores them to 0." in capsys.readouterr().err


def test_a_method_without_a_fit_is_refused(
    data: Path, tmp_path: Path, written: tuple[Path, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every method of Holdall has a fit; a method that derives from `Method` elsewhere may have none."""
    monkeypatch.delattr(HashedTable, "from_dense")
    message = "table 'C3' is stored by Hashed.* has no fit to given rows.*keep the table dense"
    with pytest.raises(ConfigError, match=message):
        start(data, tmp_path / "run", given(written[0]).replace(method="hashed", setting=("buckets=20",)))
    assert not (tmp_path / "run").exists()


def test_wrong_files_are_refused(data: Path, tmp_path: Path) -> None:
    values = load_id_maps(data)[FEATURE].values.to_pylist()
    first, ones = values[0], [[1.0] * 4]
    path = tmp_path / "vectors.parquet"
    cases: list[tuple[Any, str]] = [
        (lambda: write(path, [first], [[1.0] * 3]), "row 1: a vector of 3 numbers, but rows of the tables have 4"),
        (lambda: write(path, [first, values[1]], [*ones, None]), "row 2: no vector"),
        (
            lambda: write(path, [first], [[1.0, 2.0, 3.0, float("inf")]]),
            "row 1: a number of its vector is missing or not",
        ),
        (lambda: write(path, [first], [[1.0, 2.0, 3.0, None]]), "row 1: a number of its vector is missing or not"),
        (lambda: write(path, [first, "x", first], ones * 3), f"row 3: value {first} is there twice"),
        (
            lambda: write(path, ["x", "y"], ones * 2),
            f"none of its 2 values is one of feature '{FEATURE}'.*compared as text",
        ),
        (lambda: write(path, [1.5], ones), "column 'value' is double: store the values as text"),
        (lambda: write(path, [first], ["a"], pa.string()), "column 'vector' is string, not a list"),
        (lambda: pq.write_table(pa.table({"id": [1]}), path), "no column 'value' .it has id."),
        (lambda: path.write_text("text"), "cannot be read as Parquet"),
        (path.unlink, "no file .*vectors.parquet"),
    ]
    for make, message in cases:
        make()
        with pytest.raises(DataError, match=message):
            start(data, tmp_path / "run", given(path))
        assert not (tmp_path / "run").exists()


def test_wrong_names_are_refused(data: Path, tmp_path: Path, written: tuple[Path, np.ndarray]) -> None:
    for pretrained, message in (
        (("C3",), "--pretrained takes feature=file"),
        ((f"C3={written[0]}", "C3=other"), "two files for feature 'C3'"),
        ((f"X={written[0]}",), "no feature named 'X'"),
    ):
        with pytest.raises(HoldallError, match=message):
            start(data, tmp_path / "run", SMALL.replace(pretrained=pretrained))
