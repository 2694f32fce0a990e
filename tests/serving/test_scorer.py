"""Scorer: the scores of evaluation, to the bit, for every method, model and precision; raw rows, ranks and vectors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor

import holdall
from holdall.common.errors import ConfigError, DataError, HoldallError
from holdall.data.batch import Batch
from holdall.data.dataset import DataSet
from holdall.data.id_map import load_id_maps
from holdall.data.loader import Loader
from holdall.data.prepare import PrepareConfig, prepare
from holdall.data.schema import Schema
from holdall.evaluation.evaluate_model import score_split
from holdall.models import CONFIGURATIONS, Model, ModelConfig, TwoTowerConfig
from holdall.serving.bundle import Origin, Quality, write_bundle
from holdall.tables import Bands, Dense, Quantized, Shared
from tests.serving.made_up import implicit_files
from tests.serving.test_bundle import SMALL, wide_data, write
from tests.tables.cases import CASES

__all__ = ["wide_data"]


def batches(data: Path) -> list[Batch]:
    return list(Loader(DataSet(data, "valid"), 64, shuffle="none").epoch(0))


def evaluated(model: Model, data: Path) -> Tensor:
    """Logits as evaluation computes them, in batches of the size of `batches`."""
    return score_split(model, DataSet(data, "valid"), batch_size=64).logits


def raw_rows(data: Path) -> list[dict[str, Any]]:
    """The rows of a split as people have them: texts of ids, and numbers before their transform."""
    schema, maps = Schema.load(data), load_id_maps(data)
    rows = []
    for batch in batches(data):
        for place in range(len(batch)):
            row: dict[str, Any] = {}
            for index, column in enumerate(schema.dense):
                stored = float(batch.dense[place, index])
                row[column.name] = float(np.expm1(np.float64(stored))) if column.transform == "log" else stored
            for position, feature in enumerate(schema.features):
                values, offsets, _ = batch.ids.bag(position)
                bag = values[place : place + 1] if offsets is None else values[offsets[place] : offsets[place + 1]]
                texts = [maps[feature.name].values[int(number)].as_py() or "never seen" for number in bag]
                row[feature.name] = texts[0] if feature.one_hot else texts
            rows.append(row)
    return rows


def check_equal(folder: Path, model: Model, data: Path) -> None:
    """Logits of a bundle equal those of evaluation; those of raw rows do, where dense values come back."""
    scorer = holdall.load(folder)
    expected = evaluated(model, data)
    assert torch.equal(torch.cat([scorer.logits(batch) for batch in batches(data)]), expected)
    scores = np.concatenate([scorer.score(batch) for batch in batches(data)])
    assert scores.dtype == np.float32
    assert np.array_equal(scores, torch.sigmoid(expected).numpy())
    rows = raw_rows(data)
    again = scorer.encode(rows[:64])
    ids, stored = again.ids, batches(data)[0].ids
    assert torch.equal(ids.values, stored.values)
    assert ids.offsets is stored.offsets is None or torch.equal(ids.offsets, stored.offsets)  # type: ignore[arg-type]
    np.testing.assert_allclose(scorer.score(rows), torch.sigmoid(expected).numpy(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_every_method_scores_as_evaluation(name: str, wide_data: Path, tmp_path: Path) -> None:
    model = SMALL.build(Schema.load(wide_data), CASES[name])
    write(tmp_path / "bundle", model, SMALL, wide_data)
    check_equal(tmp_path / "bundle", model, wide_data)


@pytest.mark.parametrize("vectors", [torch.float32, torch.bfloat16, torch.float16, None])
@pytest.mark.parametrize("rows", ["float32", "bfloat16", "float16"])
def test_every_precision_scores_as_evaluation(
    rows: str, vectors: torch.dtype | None, data: Path, tmp_path: Path
) -> None:
    if rows != "float32" and vectors is None:
        vectors = torch.float32  # the layers are float32
    first, *others = Schema.load(data).features
    methods = {first.name: Quantized(4), **{feature.name: Dense(rows) for feature in others}}
    model = SMALL.build(Schema.load(data), methods)
    model.bags.vector_dtype = vectors
    write(tmp_path / "bundle", model, SMALL, data)
    if vectors in (torch.bfloat16, torch.float16):
        with pytest.raises(RuntimeError, match="dtype"):  # evaluation needs autocast for it, and so does the scorer
            evaluated(model, data)
        with pytest.raises(RuntimeError, match="dtype"):
            holdall.load(tmp_path / "bundle").logits(batches(data)[0])
    else:
        check_equal(tmp_path / "bundle", model, data)


@pytest.mark.parametrize("name", ["dlrm", "dcn", "dcn-mlperf", "deepfm"])
def test_every_model_of_click_logs_scores_as_evaluation(name: str, bag_data: Path, tmp_path: Path) -> None:
    config = CONFIGURATIONS[name].scaled(0.05)
    model = config.build(Schema.load(bag_data))
    write(tmp_path / "bundle", model, config, bag_data)
    check_equal(tmp_path / "bundle", model, bag_data)


@pytest.fixture(scope="module")
def implicit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("implicit")
    prepare([str(implicit_files(folder / "raw"))], folder / "data", PrepareConfig(format="taobao", valid=0.1))
    return folder / "data"


@pytest.mark.parametrize("name", ["ncf", "gmf", "ncf-mlp", "tbsm", "din", "two-tower"])
def test_every_model_of_implicit_data_scores_as_evaluation(name: str, implicit: Path, tmp_path: Path) -> None:
    config: ModelConfig = CONFIGURATIONS[name]
    model = config.build(Schema.load(implicit), Bands(((3, Quantized()), (None, Shared(rows=2)))))
    write(tmp_path / "bundle", model, config, implicit)
    scorer = holdall.load(tmp_path / "bundle")
    expected = evaluated(model, implicit)
    assert torch.equal(torch.cat([scorer.logits(batch) for batch in batches(implicit)]), expected)
    needed = [*scorer.reads, *(column.name for column in scorer.schema.dense)]
    rows = [{name: row[name] for name in needed} for row in raw_rows(implicit)]
    np.testing.assert_allclose(scorer.score(rows), torch.sigmoid(expected).numpy(), rtol=0, atol=1e-6)


TOWERS = TwoTowerConfig(
    dim=4, tower=(8, 6), user=("user", "history", "num_events"), item=("item", "brand", "category"), temperature=0.5
)


def test_vectors_of_towers(implicit: Path, tmp_path: Path) -> None:
    """Products of vectors are the logits, and the file of all items has the vectors of their rows."""
    model = TOWERS.build(Schema.load(implicit))
    write(tmp_path / "bundle", model, TOWERS, implicit)
    scorer = holdall.load(tmp_path / "bundle")
    rows = raw_rows(implicit)
    users, items = scorer.user_vectors(rows), scorer.item_vectors(rows)
    assert users.shape == items.shape == (len(rows), 6)
    logits = scorer.logits(scorer.encode(rows)).numpy()
    np.testing.assert_allclose((users * items).sum(1) / 0.5, logits, rtol=0, atol=1e-5)
    alone = [{name: row[name] for name in ("item", "brand", "category")} for row in rows]
    assert np.array_equal(scorer.item_vectors(alone), items)
    with pytest.raises(DataError, match="num_events"):
        scorer.user_vectors(alone)
    assert scorer.item_vectors([]).shape == (0, 6)
    num_rows = scorer.write_item_vectors(tmp_path / "items.parquet")
    table = pq.read_table(tmp_path / "items.parquet")
    assert num_rows == len(table) == scorer.schema.feature("item").num_rows
    assert table["id"].to_pylist() == list(range(num_rows))
    written = dict(zip(table["value"].to_pylist(), table["vector"].to_pylist(), strict=True))
    for row, vector in zip(rows, items, strict=True):
        if row["item"] in written:
            np.testing.assert_allclose(written[row["item"]], vector, rtol=0, atol=1e-6)
    with pytest.raises(ConfigError, match="exists already"):
        scorer.write_item_vectors(tmp_path / "items.parquet")


def test_models_without_towers_and_items_without_attributes(data: Path, implicit: Path, tmp_path: Path) -> None:
    write(tmp_path / "dlrm", SMALL.build(Schema.load(data)), SMALL, data)
    with pytest.raises(ConfigError, match="DLRM has no towers: use vectors"):
        holdall.load(tmp_path / "dlrm").item_vectors([])
    config = replace(TOWERS, user=("user",), item=("item", "num_events"))
    write(tmp_path / "bundle", config.build(Schema.load(implicit)), config, implicit)
    with pytest.raises(ConfigError, match=r"reads 'num_events', and .* does not know it of every item: give the items"):
        holdall.load(tmp_path / "bundle").write_item_vectors(tmp_path / "items.parquet")
    assert not (tmp_path / "items.parquet").exists()


def test_a_run_scores_as_its_bundle(data: Path, tmp_path: Path) -> None:
    config = holdall.TrainConfig.of(epochs=1, batch_size=256, device="cpu", bottom=(8,), top=(8,))
    holdall.train(data, tmp_path / "run", config)
    holdall.release(tmp_path / "run", tmp_path / "bundle", as_trained=True)
    run, bundle = holdall.load(tmp_path / "run"), holdall.load(tmp_path / "bundle")
    assert run.step == bundle.step
    assert run.step is not None
    assert run.step > 0
    assert run.fingerprint != bundle.fingerprint
    assert bundle.fingerprint == holdall.load(tmp_path / "bundle").fingerprint
    for batch in batches(data):
        assert torch.equal(run.logits(batch), bundle.logits(batch))
    rows = raw_rows(data)[:9]
    assert np.array_equal(run.score(rows), bundle.score(rows))
    with pytest.raises(DataError, match="neither a bundle, a published folder nor a run"):
        holdall.load(data)


# --- what else a scorer does --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def scorer(bag_data: Path, tmp_path_factory: pytest.TempPathFactory) -> holdall.Scorer:
    out = tmp_path_factory.mktemp("bundles") / "bundle"
    schema = Schema.load(bag_data)
    model = SMALL.build(schema, Bands(((3, Dense()), (None, Quantized()))))
    quality = Quality(table_bytes=1, dense_bytes=1)
    write_bundle(out, model, SMALL, schema, bag_data, Origin(run=None, checkpoint=None, step=7), quality)
    return holdall.load(out)


def test_ranking_is_scoring_with_the_user_s_values(scorer: holdall.Scorer, bag_data: Path) -> None:
    rows = raw_rows(bag_data)[:20]
    first = scorer.schema.features[0].name
    dense = scorer.schema.dense[0].name
    user = {name: rows[0][name] for name in (first, dense)}
    items = [{name: value for name, value in row.items() if name not in user} for row in rows]
    expected = scorer.score([{**item, **user} for item in items])
    np.testing.assert_allclose(scorer.rank(user, items), expected, rtol=0, atol=1e-6)
    assert len(scorer.rank(user, [])) == 0
    assert np.array_equal(scorer.rank({**user, "not read": object()}, items), scorer.rank(user, items))
    np.testing.assert_allclose(scorer.rank({}, rows), scorer.score(rows), rtol=0, atol=1e-6)
    table = pa.Table.from_pylist(items)
    np.testing.assert_allclose(scorer.rank(user, table), expected, rtol=0, atol=1e-6)
    with pytest.raises(DataError, match=f"the user's values: row 0: feature '{first}' is 1.5, which is not"):
        scorer.rank({first: 1.5}, items)
    with pytest.raises(DataError, match="the user has every column"):
        scorer.rank(rows[0], [{}])
    with pytest.raises(DataError, match=f"row 0: feature '{scorer.schema.features[2].name}' is missing"):
        scorer.rank(user, [{name: items[0][name] for name in items[0] if name != scorer.schema.features[2].name}])


def test_a_user_s_dense_values_are_computed_once(data: Path, tmp_path: Path) -> None:
    model = SMALL.build(Schema.load(data))
    write(tmp_path / "bundle", model, SMALL, data)
    scorer = holdall.load(tmp_path / "bundle")
    rows = raw_rows(data)[:30]
    dense = [column.name for column in scorer.schema.dense]
    for names in (dense, [*dense, "C1"], ["C1", "C3"], dense[:1]):
        user = {name: rows[0][name] for name in names}
        items = [{name: value for name, value in row.items() if name not in user} for row in rows]
        expected = scorer.score([{**item, **user} for item in items])
        np.testing.assert_allclose(scorer.rank(user, items), expected, rtol=0, atol=1e-6)
        columns = {name: [item[name] for item in items] for name in items[0]}
        np.testing.assert_allclose(scorer.rank(user, columns), expected, rtol=0, atol=1e-6)


def test_unseen_values_are_counted(scorer: holdall.Scorer, bag_data: Path) -> None:
    row = raw_rows(bag_data)[0]
    first, bag = scorer.schema.features[0], scorer.schema.features[1]
    assert first.one_hot
    assert not bag.one_hot
    before = scorer.num_unseen
    batch = scorer.encode([{**row, first.name: "what", bag.name: ["is", "this"]}, row])
    after = scorer.num_unseen
    assert batch.ids.bag(0)[0][0] == first.unseen
    assert after[first.name] - before[first.name] == 1
    assert after[bag.name] - before[bag.name] == 2


def test_an_explained_row_tells_what_values_became(scorer: holdall.Scorer, bag_data: Path) -> None:
    first, bag, _ = scorer.schema.features
    hottest = load_id_maps(bag_data)[first.name]
    row = {**raw_rows(bag_data)[0], first.name: hottest.values[0].as_py(), bag.name: ["never seen"]}
    row[scorer.schema.dense[0].name] = None
    before = scorer.num_unseen
    explained = scorer.explain_row(row)
    assert scorer.num_unseen == before
    assert explained.dense[0].raw is None
    assert explained.dense[0].value == scorer.schema.dense[0].missing
    found = explained.values[0]
    assert (found.id, found.is_unseen, found.count) == (0, False, int(hottest.counts[0]))
    assert found.stored == "Dense(), ids 0 to 2"
    unseen = explained.values[1]
    assert (unseen.name, unseen.raw, unseen.id, unseen.is_unseen) == (bag.name, "never seen", bag.unseen, True)
    text = str(explained)
    assert f"id {bag.unseen:,} (unseen)" in text
    assert "missing" in text
    with pytest.raises(DataError, match="row 0: dense column"):
        scorer.explain_row({})


def test_vectors_are_the_rows_of_the_table(scorer: holdall.Scorer, bag_data: Path, tmp_path: Path) -> None:
    feature = scorer.schema.features[2]
    table = scorer.model.bags.table(feature.name)
    rows = table.materialize().numpy()
    values = load_id_maps(bag_data)[feature.name].values
    texts = [values[1].as_py(), "never seen", values[5].as_py()]
    assert np.array_equal(scorer.vectors(feature.name, texts), rows[[1, feature.unseen, 5]])
    assert scorer.vectors(feature.name, []).shape == (0, scorer.model.bags.dim)
    path = tmp_path / "vectors.parquet"
    assert scorer.write_vectors(feature.name, path) == feature.num_rows
    written = pq.read_table(path)
    assert written.column_names == ["id", "value", "count", "vector"]
    assert np.array_equal(np.array(written["vector"].to_pylist(), dtype=np.float32), rows)
    assert written["value"].to_pylist() == values.to_pylist()
    assert written["id"].to_pylist() == list(range(feature.num_rows))
    with pytest.raises(ConfigError, match="exists already"):
        scorer.write_vectors(feature.name, path)
    with pytest.raises(HoldallError, match="no feature named 'x'"):
        scorer.vectors("x", ["a"])


def test_a_warm_up_leaves_no_trace(scorer: holdall.Scorer) -> None:
    before = scorer.num_unseen
    scorer.warm_up()
    assert scorer.num_unseen == before
    assert scorer.step == 7
    assert "step=7" in repr(scorer)


def test_no_rows_have_no_scores(scorer: holdall.Scorer) -> None:
    assert scorer.score([]).shape == (0,)
