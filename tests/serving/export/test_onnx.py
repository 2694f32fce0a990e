"""ONNX exports: onnxruntime scores as the bundle does, and tables stay as small as they are."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pytest
import torch

from holdall.common.errors import IdError
from holdall.data.batch import Batch, Ids
from holdall.data.dataset import DataSet
from holdall.data.loader import Loader
from holdall.data.schema import Schema
from holdall.serving.bundle import open_bundle
from holdall.serving.export.export import open_export
from holdall.serving.export.onnx_session import open_session
from tests.serving.export.conftest import Case

pytestmark = pytest.mark.slow
onnx = pytest.importorskip("onnx")

Exported = Callable[[str], Case]


def rows(case: Case, size: int) -> Batch:
    """The first rows of the validation split."""
    return next(iter(Loader(DataSet(case.data, "valid"), size, shuffle="none").epoch(0)))


@pytest.mark.parametrize("name", ["methods", "bags", "external", "tbsm", "ncf"])
def test_scores_are_those_of_the_bundle(name: str, exported: Exported) -> None:
    case = exported(name)
    scorer = open_export(case.path)
    bundle = open_bundle(case.bundle)
    assert (scorer.fingerprint, scorer.step) == (bundle.fingerprint, 7)
    for size in (1, 2, 100):
        batch = rows(case, size)
        with torch.no_grad():
            expected = case.model(batch)
        torch.testing.assert_close(scorer.logits(batch), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(torch.from_numpy(scorer.scores(batch)), expected.sigmoid(), rtol=0, atol=1e-5)
    assert float(expected.std()) > 1e-3
    assert scorer.record.check["rows"] > 0
    assert 0 <= scorer.record.check["score"] <= scorer.record.check["limit"] == 1e-5
    assert scorer.logits(rows(case, 5).without_samples()).shape == scorer.scores(batch.without_samples()).shape == (0,)


def test_the_inputs_are_described(exported: Exported) -> None:
    case = exported("bags")
    record = open_export(case.path).record
    session = open_session(case.path / record.model_file)
    assert [(one["name"], one["shape"]) for one in record.inputs] == [
        (one.name, one.shape) for one in session.get_inputs()
    ]
    assert [one["name"] for one in record.inputs] == [
        "dense",
        "ids",
        "C2.values",
        "C2.offsets",
        "C3.values",
        "C3.offsets",
    ]
    assert [one.name for one in session.get_outputs()] == [one["name"] for one in record.outputs] == ["score", "logit"]
    first, second, _ = record.features
    schema = Schema.load(case.data)
    assert (first["input"], first["column"], first["ids"]) == ("ids", 0, "ids/C1.arrow")
    assert (second["input"], second["rows"], second["unseen"]) == ("C2", 901, schema.features[1].unseen)
    assert [(column["name"], column["transform"]) for column in record.dense] == [("I1", "log"), ("I2", "log")]
    for file in ("ids/C1.arrow", "schema.json"):
        assert (case.path / file).read_bytes() == (case.bundle / file).read_bytes()
    assert {"torch", "onnx", "opset"} <= record.versions.keys()


def test_banded_tables_stay_small_and_shared_codebooks_are_stored_once(exported: Exported) -> None:
    case = exported("bags")
    model = onnx.load(case.path / "model.onnx")
    largest = max(np.prod(tensor.dims) for tensor in model.graph.initializer)
    assert largest < 1000  # codes of 4 bits, or numbers of a codebook; the tables stand for 16 * 901
    assert onnx.TensorProto.UINT8 in {tensor.data_type for tensor in model.graph.initializer}
    methods = onnx.load(exported("methods").path / "model.onnx")
    assert [list(tensor.dims) for tensor in methods.graph.initializer].count([32, 16]) == 1


def test_a_model_tells_nothing_of_the_machine_that_made_it(exported: Exported) -> None:
    for path in (exported("bags").path, exported("ncf").path):
        files = [*path.rglob("*.onnx"), path / "export.json"]
        assert len(files) == 2
        for content in (file.read_bytes() for file in files):
            for trace in (b"traced_model.py", b"site-packages", str(path.parent).encode()):
                assert trace not in content


def test_ids_that_are_no_rows(exported: Exported) -> None:
    """The scorer names them as the bundle does; for other programs the row scores NaN, and no other row."""
    case = exported("ncf")
    scorer = open_export(case.path)
    batch = rows(case, 4)
    values = torch.stack([batch.ids.bag(position)[0] for position in scorer.inputs.positions])
    session = open_session(case.path / scorer.record.model_file)
    ids = values.t().numpy().astype(np.int64)
    ids[2, 1] = 10**6
    score, logit = session.run(None, {"ids": ids})
    assert np.isnan(score).tolist() == np.isnan(logit).tolist() == [False, False, True, False]
    wrong = batch.ids.values.clone()
    assert batch.ids.offsets is not None
    wrong[0] = 10**6
    with pytest.raises(IdError, match="has id 1000000 but its table has"):
        scorer.logits(Batch(batch.dense, Ids(wrong, batch.ids.offsets, batch.ids.num_features), batch.label))


def test_weights_above_two_gigabytes_are_in_a_file_of_their_own(exported: Exported) -> None:
    case = exported("external")
    document = json.loads((case.path / "export.json").read_text())
    assert "model.onnx.data" in document["files"]
    assert (case.path / "model.onnx.data").stat().st_size >= 4 * 122 * 4
