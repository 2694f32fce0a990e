"""`holdall score`: the scores of evaluation for raw files of every format, in order, whole or not at all."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest
import torch

import holdall
from holdall.cli import main
from holdall.common.errors import ConfigError, DataError
from holdall.data.batch import Ids
from holdall.data.dataset import DataSet
from holdall.data.encode import Encoder
from holdall.data.formats.open_to_score import open_to_score
from holdall.data.prepare import prepare
from holdall.data.schema import Schema
from holdall.evaluation.evaluate_model import score_split
from holdall.models import DLRMConfig
from holdall.serving import file_rows, score_files
from holdall.serving.bundle import Origin, Quality, write_bundle
from holdall.serving.file_rows import encoded_file, read_schema
from holdall.serving.scorer import load
from tests.data.raw_files import prepare_films
from tests.serving.made_up import raw_files_of, shop_rows

SMALL = DLRMConfig(dim=4, bottom=(8,), top=(8,))


def bundle_of(data: Path, out: Path) -> Path:
    """Untrained model of a data set as a bundle; tables are drawn wide, so that every id changes the score."""
    schema = Schema.load(data)
    model = SMALL.build(schema)
    with torch.no_grad():
        for pack in model.bags.packs:
            pack.storage.normal_()
    quality = Quality(table_bytes=1, dense_bytes=1)
    write_bundle(out, model, SMALL, schema, data, Origin(run=None, checkpoint=None, step=None), quality)
    return out


def expected_scores(bundle: Path, data: Path) -> np.ndarray:
    return torch.sigmoid(score_split(load(bundle).model, DataSet(data, "train")).logits).numpy()


@pytest.mark.parametrize("kind", ["csv", "parquet", "criteo", "avazu", "bookcrossing"])
def test_scores_are_those_of_evaluation_for_every_format(kind: str, tmp_path: Path) -> None:
    sources, config = raw_files_of(tmp_path, kind)
    prepare(sources, tmp_path / "data", config)
    if config.schema:
        config.schema.unlink()  # the bundle knows
    bundle = bundle_of(tmp_path / "data", tmp_path / "bundle")
    report = holdall.score(bundle, sources, tmp_path / "scores.parquet")
    found = pq.read_table(tmp_path / "scores.parquet")
    expected = expected_scores(bundle, tmp_path / "data")
    assert found.column_names == ["label", "score"]
    np.testing.assert_allclose(found["score"].to_numpy(), expected, atol=1e-6)
    assert len(set(expected.tolist())) > 3
    split = score_split(load(bundle).model, DataSet(tmp_path / "data", "train"))
    assert found["label"].to_pylist() == split.labels.int().tolist()
    metrics = holdall.evaluate(bundle, "train", data=tmp_path / "data")
    assert report.auc == pytest.approx(metrics["auc"], abs=1e-6)
    assert report.logloss == pytest.approx(metrics["logloss"], abs=1e-6)
    assert (report.rows, report.refused, report.labelled) == (len(expected), 0, len(expected))
    assert set(report.unseen.values()) == {0.0}


def test_implicit_data_is_scored_from_a_table(tmp_path: Path) -> None:
    data = prepare_films(tmp_path)
    bundle = bundle_of(data, tmp_path / "bundle")
    rows = [{"user": 3, "item": 5, "year": "1905", "genres": ["a"]}, {"user": 4, "item": 4, "year": "", "genres": []}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    with pytest.raises(ConfigError, match="has events of users, and no rows to score"):
        holdall.score(bundle, tmp_path, tmp_path / "scores.parquet", format="movielens")
    holdall.score(bundle, tmp_path / "rows.parquet", tmp_path / "scores.parquet")
    found = pq.read_table(tmp_path / "scores.parquet")
    np.testing.assert_allclose(found["score"].to_numpy(), load(bundle).score(rows), atol=1e-6)
    assert found["label"].null_count == 2


@pytest.fixture
def shops(tmp_path: Path) -> Path:
    sources, config = raw_files_of(tmp_path, "parquet")
    prepare(sources, tmp_path / "data", config)
    bundle_of(tmp_path / "data", tmp_path / "bundle")
    return tmp_path


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_refused_rows_keep_their_place_and_are_listed(kind: str, shops: Path) -> None:
    rows = shop_rows().head(20).with_columns(pl.col("stars").cast(pl.String))
    rows[4, "stars"], rows[9, "stars"] = "many", ""
    raw = shops / f"new.{kind}"
    rows.write_csv(raw) if kind == "csv" else rows.write_parquet(raw)
    with pytest.raises(DataError, match=r"new.*line \d+: the label .* is 'many' .*lists them in scores.bad_rows.tsv"):
        holdall.score(shops / "bundle", raw, shops / "scores.parquet")
    assert not list(shops.glob("scores*"))
    report = holdall.score(shops / "bundle", raw, shops / "scores.parquet", bad_rows="skip", keep=["unused", "day"])
    found = pq.read_table(shops / "scores.parquet")
    assert (report.rows, report.refused, report.labelled) == (20, 1, 18)
    good = [row for row in range(20) if row != 4]
    expected = expected_scores(shops / "bundle", shops / "data")[:20]
    np.testing.assert_allclose(found["score"].take(good).to_numpy(), expected[good], atol=1e-6)
    assert [row for row in range(20) if not found["score"][row].is_valid] == [4]
    assert [row for row in range(20) if not found["label"][row].is_valid] == [4, 9]
    assert [None if value is None else int(value) for value in found["unused"].to_pylist()] == [
        None if row == 4 else row for row in range(20)
    ]
    assert found.column_names == ["unused", "day", "label", "score"]
    _, line = (shops / "scores.bad_rows.tsv").read_text().splitlines()
    assert line.split("\t")[:2] == [str(raw), "6" if kind == "csv" else "5"]
    rows[4, "stars"] = "1"
    rows.write_csv(raw) if kind == "csv" else rows.write_parquet(raw)
    holdall.score(shops / "bundle", raw, shops / "scores.parquet", overwrite=True)
    assert not (shops / "scores.bad_rows.tsv").exists()  # it was of the older scores


def test_the_output_is_whole_or_absent(shops: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw, out = shops / "rows.parquet", shops / "scores.csv"
    holdall.score(shops / "bundle", raw, out)
    before = out.read_bytes()
    with pytest.raises(ConfigError, match=r"exists already.*--overwrite"):
        holdall.score(shops / "bundle", raw, out)

    monkeypatch.setattr(score_files.Counts, "report", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        holdall.score(shops / "bundle", raw, out, overwrite=True)
    assert out.read_bytes() == before
    assert [path.name for path in shops.glob("*scores*")] == ["scores.csv"]
    table = pa_csv.read_csv(out)
    np.testing.assert_allclose(table["score"].to_numpy(), expected_scores(shops / "bundle", shops / "data"), atol=1e-6)


def test_outputs_that_would_do_harm_are_refused(shops: Path) -> None:
    bundle, raw = shops / "bundle", shops / "rows.parquet"
    for out, message in {
        shops / "scores.json": "neither Parquet nor CSV",
        raw: "is itself an input",
        shops / "data.parquet": "is a folder",
    }.items():
        (shops / "data.parquet").mkdir(exist_ok=True)
        with pytest.raises(ConfigError, match=message):
            holdall.score(bundle, raw, out, overwrite=True)
    for keep, message in {("score",): "is written anyway", ("day", "day"): "is named twice"}.items():
        with pytest.raises(ConfigError, match=message):
            holdall.score(bundle, raw, shops / "scores.parquet", keep=keep)
    with pytest.raises(DataError, match=r"has no column 'dya' .did you mean 'day'"):
        holdall.score(bundle, raw, shops / "scores.parquet", keep=["dya"])
    pq.write_table(pq.read_table(raw).append_column("lists", pa.array([[1]] * 200)), shops / "lists.parquet")
    with pytest.raises(ConfigError, match="CSV file cannot hold list"):
        holdall.score(bundle, shops / "lists.parquet", shops / "scores.csv", keep=["lists"])


def test_a_model_that_diverged_is_named_with_the_row(shops: Path) -> None:
    scorer = load(shops / "bundle")
    id_of = Encoder(shops / "data").ids("shop", pa.array(["a"]))[0]
    with torch.no_grad():
        scorer.model.bags.table("shop").weight[id_of] = torch.nan
    first = shop_rows()["shop id"].to_list().index("a") + 1
    with pytest.raises(DataError, match=f"rows.parquet, row {first}: the model gives nan"):
        holdall.score(scorer, shops / "rows.parquet", shops / "scores.parquet")


def test_shares_of_unseen_values_are_of_all_values(shops: Path) -> None:
    rows = shop_rows(40).with_columns(
        pl.Series("shop id", ["a", "new", "a", "other"] * 10), pl.Series("tags", ["x|new", ""] * 20)
    )
    rows.drop("stars").write_parquet(shops / "new.parquet")
    report = holdall.score(shops / "bundle", shops / "new.parquet", shops / "scores.parquet")
    assert report.unseen == {"shop": 0.5, "day": 0.0, "tags": 0.5, "seen": 0.0}
    assert (report.labelled, report.auc, report.logloss) == (0, None, None)


def nasty_files(folder: Path) -> dict[str, pa.Table]:
    """Parquet tables that the readers of `prepare` take, in part: types, nulls, dictionaries, values to refuse."""
    plain = shop_rows(30).to_arrow().cast(
        pa.schema([("stars", pa.int64()), ("cost", pa.float64()), ("age", pa.int64()), ("shop id", pa.string()),
                   ("day", pa.int64()), ("tags", pa.string()), ("seen", pa.string()), ("unused", pa.int64())])
    )  # fmt: skip

    def with_column(name: str, values: pa.Array | pa.ChunkedArray) -> pa.Table:
        return plain.set_column(plain.column_names.index(name), name, values)

    shop = plain["shop id"]
    broken = pa.array([b"a", b"\xff\xfe", b"b"] * 10, pa.binary()).view(pa.string())
    return {
        "plain": plain,
        "dictionary": with_column("shop id", shop.dictionary_encode()),
        "large": with_column("shop id", shop.cast(pa.large_string())),
        "integers": with_column("shop id", pa.array([1, None, -5] * 10, pa.int16())),
        "booleans": with_column("shop id", pa.array([True, None, False] * 10)),
        "lists": with_column("tags", pa.array([["x", None, ""], None, ["y", "z", "x"]] * 10)),
        "not utf-8": with_column("shop id", broken),
        "too long": with_column("shop id", pa.array(["a", "b" * 70_000, None] * 10)),
        "nan": with_column("cost", pa.array([1.0, float("nan"), None] * 10)),
        "huge": with_column("cost", pa.array([1.0, 1e39, None] * 10)),
        "halves": with_column("cost", pa.array(np.array([1.0, 2.5, 7.0] * 10, dtype=np.float16))),
        "texts": with_column("cost", pa.array(["1.5", "", "x"] * 10)),
        "labels": with_column("stars", pa.array([None, float("inf"), 4.0] * 10)),
        "no labels": plain.drop_columns(["stars"]),
    }  # fmt: skip


@pytest.mark.parametrize("name", list(nasty_files(Path())))
def test_the_fast_path_of_parquet_gives_the_rows_of_the_plain_one(name: str, shops: Path) -> None:
    pq.write_table(nasty_files(shops)[name], shops / "rows.parquet", row_group_size=11)
    scorer = load(shops / "bundle")
    raw = open_to_score([shops / "rows.parquet"], shops / "out.parquet", read_schema(scorer))
    fast, plain = (list(encoded_file(scorer, raw, raw.files[0], fast=fast)) for fast in (True, False))

    def rows(blocks: list[file_rows.EncodedRows]) -> list[Any]:
        found = []
        for block in blocks:
            offsets = block.batch.ids.offsets
            assert offsets is not None
            found += [
                (
                    block.first_row + int(place),
                    block.label[row].as_py(),
                    block.batch.dense[row].tolist(),
                    [
                        block.batch.ids.values[
                            offsets[f * len(block.batch) + row] : offsets[f * len(block.batch) + row + 1]
                        ].tolist()
                        for f in range(4)
                    ],
                )
                for row, place in enumerate(block.places)
            ]
        return found

    assert rows(fast) == rows(plain)
    refused = [[(row.line, row.reason) for block in blocks for row in block.refused] for blocks in (fast, plain)]
    assert refused[0] == refused[1]
    assert bool(refused[0]) == (name in ("not utf-8", "too long", "nan", "huge", "texts", "labels"))
    assert len(rows(fast)) + len(refused[0]) == sum(block.num_rows for block in fast) == 30


def test_dictionary_arrays_are_encoded_like_their_values(shops: Path) -> None:
    encoder = Encoder(shops / "data")
    values = pa.array(["a", None, "new", "b", "a", "ç"])
    indices = pa.array([2, None, 0, 1, 2, 4], pa.int8())
    coded = pa.DictionaryArray.from_arrays(indices, pa.array(["new", "b", "a", "unused", "ç"]))
    for given in (coded, pa.chunked_array([coded[:2], coded[2:]]), pa.chunked_array([], coded.type)):
        ids = encoder.ids("shop", given)
        assert ids.tolist() == Encoder(shops / "data").ids("shop", values[: len(given)]).tolist()
    assert encoder.num_unseen["shop"] == 2
    with pytest.raises(DataError, match="in row 4"):
        encoder.ids("shop", pa.DictionaryArray.from_arrays([0, 0, 0, 0, 1], ["a", "b" * 70_000]))


def test_a_slice_of_bags_has_their_values() -> None:
    bags = [[[1, 2], [], [3]], [[4], [5, 6], []]]
    lengths = torch.tensor([len(bag) for feature in bags for bag in feature])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    values = torch.tensor([value for feature in bags for bag in feature for value in bag])
    ids = Ids(values, offsets, 2, weights=values * 0.5)
    part = ids.slice(1, 3)
    assert part.batch_size == 2
    for feature in range(2):
        found, bounds, weights = part.bag(feature)
        assert bounds is not None
        assert weights is not None
        pieces = [found[start:end].tolist() for start, end in itertools.pairwise(bounds)]
        assert pieces == bags[feature][1:]
        assert torch.equal(weights, found * 0.5)


def test_the_command_prints_rows_metrics_and_unseen_shares(shops: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["score", str(shops / "bundle"), str(shops / "rows.parquet"), "--out", str(shops / "scores.parquet")]
    main([*words, "--keep", "unused"])
    said = capsys.readouterr().out
    assert "200 rows in" in said
    assert "200 rows have a label: AUC 0." in said
    assert "training had every value" in said
    main([*words, "--overwrite", "--json"])
    assert json.loads(capsys.readouterr().out)["rows"] == 200
