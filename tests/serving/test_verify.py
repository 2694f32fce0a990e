"""`holdall verify`: a bundle that scores as its run did passes; a changed transform, id or weight is named."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

import holdall
from holdall.cli import main
from holdall.common.errors import ConfigError, DataError, HoldallError
from holdall.common.files import write_json
from holdall.data.batch import Batch
from holdall.data.id_map import IdMap, id_map_path
from holdall.data.identity import with_files
from holdall.data.prepare import PrepareConfig, prepare
from holdall.data.schema import Schema
from holdall.models import Model
from holdall.serving.bundle import Origin, Quality, write_bundle
from holdall.serving.export.onnx_session import OnnxScorer
from holdall.serving.published_folder import Published
from holdall.serving.release import TrainedRun
from holdall.serving.scorer import Scorer
from holdall.training.config import TrainConfig
from tests.serving.made_up import implicit_files, raw_files_of

FORMATS = ["csv", "parquet", "criteo", "avazu", "bookcrossing", "taobao"]
SMALL = TrainConfig.of(dim=4, bottom=(8,), top=(8,), batch_size=32, device="cpu", lr=0.5)


def trained(folder: Path, kind: str = "csv") -> Path:
    """Raw files, a data set folder with three splits, a run and its bundle in a folder."""
    if kind == "taobao":
        sources: list[Path] = [implicit_files(folder / "raw")]
        config = PrepareConfig(format="taobao", valid=0.5, max_length=3)
    else:
        sources, config = raw_files_of(folder, kind)
        config = replace(config, valid=0.2, test=0.2)
    prepare(sources, folder / "data", config)
    holdall.train(folder / "data", folder / "run", SMALL)
    holdall.release(folder / "run", folder / "bundle", as_trained=True, device="cpu")
    return folder


@pytest.fixture(scope="module")
def shops(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("shops"))


def verify(folder: Path, bundle: str = "bundle", **options: Any) -> holdall.VerifyReport:
    return holdall.verify(folder / bundle, folder / "run", device="cpu", **options)


def num_rows(folder: Path) -> int:
    return sum(split.rows for split in Schema.load(folder / "data").splits.values())


@pytest.mark.parametrize("kind", FORMATS)
def test_a_bundle_of_every_format_passes(kind: str, tmp_path: Path) -> None:
    folder = trained(tmp_path, kind)
    report = verify(folder)
    assert report.passed, report.mismatches
    assert report.rows == num_rows(folder) > 50
    assert report.largest_difference <= 1e-6
    assert report.notes[0].startswith("raw rows are those of ")
    assert verify(folder, rows=37).rows == 37


def test_a_published_folder_stands_for_its_current_bundle(shops: Path, tmp_path: Path) -> None:
    after = shutil.copytree(shops / "run", tmp_path / "after")
    holdall.train(shops / "data", after, replace(SMALL, epochs=2), resume=True)
    shutil.rmtree(after / "best")  # the newest checkpoint is released in its place
    holdall.publish(shops / "bundle", tmp_path / "served")
    holdall.release(after, tmp_path / "delta", since=tmp_path / "served", device="cpu")
    holdall.publish(tmp_path / "delta", tmp_path / "served")
    holdall.release(after, tmp_path / "whole", as_trained=True, device="cpu")
    main(["verify", str(tmp_path / "served"), "--against", str(after), "--device", "cpu"])
    for name in ("served", "whole", "before"):
        bundle = shops / "bundle" if name == "before" else tmp_path / name
        main(["score", str(bundle), str(shops / "rows.csv"), "--out", str(tmp_path / f"{name}.csv")])
    assert (tmp_path / "before.csv").read_bytes() != (tmp_path / "whole.csv").read_bytes()
    assert (tmp_path / "served.csv").read_bytes() == (tmp_path / "whole.csv").read_bytes()
    served, whole = (holdall.evaluate(tmp_path / name, data=shops / "data") for name in ("served", "whole"))
    assert served == whole
    rows = Published(tmp_path / "served").current().deltas[0]
    damaged = tmp_path / "served" / rows / "rows.safetensors"
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.unlink()  # it may be a link to the file of the delta
    damaged.write_bytes(content)
    with pytest.raises(DataError, match=r"rows\.safetensors was changed"):
        holdall.verify(tmp_path / "served", after, device="cpu")


@pytest.mark.parametrize("kind", ["csv", "avazu"])
def test_other_splits_are_matched_too(kind: str, tmp_path: Path) -> None:
    sources, config = raw_files_of(tmp_path, kind)
    if kind == "avazu":
        config = replace(config, split="time", valid=0.25, test=0.25)
    else:
        text = sources[0].read_text().splitlines(keepends=True)
        sources[0].write_text("".join(text[:150]))
        (tmp_path / "last.csv").write_text("".join([text[0], *text[150:]]))
        sources, config = [*sources, tmp_path / "last.csv"], replace(config, test_from_last_file=True, valid=0.1)
    prepare(sources, tmp_path / "data", config)
    holdall.train(tmp_path / "data", tmp_path / "run", SMALL)
    holdall.release(tmp_path / "run", tmp_path / "bundle", as_trained=True, device="cpu")
    report = verify(tmp_path)
    assert report.passed, report.mismatches
    assert report.rows == num_rows(tmp_path)


def test_rows_are_rebuilt_from_the_id_maps_where_the_raw_files_are_gone(tmp_path: Path) -> None:
    folder = trained(tmp_path, "parquet")
    (folder / "rows.parquet").rename(folder / "moved")
    report = verify(folder)
    assert report.passed, report.mismatches
    assert report.rows == num_rows(folder)
    assert "dense values as stored, since the raw file" in report.notes[0]
    assert report.notes[0].endswith("is gone")
    (folder / "rows.parquet").write_bytes(b"other")
    assert verify(folder, rows=3).notes[0].endswith("has another size than it had")


def test_a_released_form_is_compared_with_its_own_scores(data: Path, tmp_path: Path) -> None:
    config = TrainConfig.of(dim=8, bottom=(8,), top=(8,), batch_size=256, device="cpu")
    holdall.train(data, tmp_path / "run", config)
    holdall.release(tmp_path / "run", tmp_path / "bundle", budget="1/2", device="cpu")
    report = verify(tmp_path, rows=2000)
    assert report.passed, report.mismatches
    assert report.difference_to_run is not None
    assert 0 < report.difference_to_run["mean"] <= report.difference_to_run["largest"] < 0.1
    assert "the bundle's own model" in report.notes[1]


# --- bundles that are wrong ------------------------------------------------------------------------------------------


def written(folder: Path, name: str, schema: Schema, data: Path, model: Model | None = None) -> Path:
    """Bundle with a schema, id maps or a model that are not the run's, and with right hashes."""
    run = TrainedRun.load(folder / "run", device="cpu")
    config = run.config.model.model_config()
    quality = Quality(table_bytes=1, dense_bytes=1)
    write_bundle(folder / name, model or run.model, config, schema, data, run.origin, quality, overwrite=True)
    return folder / name


def test_an_altered_transform_is_named(shops: Path) -> None:
    schema = Schema.load(shops / "data")
    price, age = schema.dense
    written(shops, "altered", replace(schema, dense=(price, replace(age, mean=age.mean + age.std))), shops / "data")
    report = verify(shops, "altered")
    assert not report.passed
    first, second, *_ = report.mismatches
    assert "fingerprint" in str(first)
    assert "rows.csv, row " in second.row
    assert second.what.startswith("dense column 'age' of ")
    assert float(second.expected) != float(second.found)
    assert report.num_mismatches > len(report.mismatches)  # all are counted, and the first are listed
    assert not any("'price'" in mismatch.what or "score" in mismatch.what for mismatch in report.mismatches)


def test_a_swapped_id_is_named(shops: Path) -> None:
    data = shops / "other"
    shutil.copytree(shops / "data", data)
    path = id_map_path(data, "shop")
    id_map = IdMap.load(path)
    values = id_map.values.to_pylist()
    one, two = values.index("a"), values.index("b")
    values[one], values[two] = "b", "a"
    IdMap(pa.array(values), id_map.counts, id_map.unseen).save(path)
    written(shops, "swapped", with_files(Schema.load(data), data), data)
    report = verify(shops, "swapped")
    wrong = {(m.what, m.expected, m.found) for m in report.mismatches[1:]}
    assert wrong == {
        ("feature 'shop' of 'a'", f"id {one}", f"id {two}"),
        ("feature 'shop' of 'b'", f"id {two}", f"id {one}"),
    }
    (shops / "rows.csv").rename(shops / "moved.csv")
    assert "feature 'shop'" in verify(shops, "swapped").mismatches[1].what
    (shops / "moved.csv").rename(shops / "rows.csv")


@pytest.mark.parametrize("part", ["table", "dense"])
def test_a_changed_weight_is_named(part: str, shops: Path) -> None:
    run = TrainedRun.load(shops / "run", device="cpu")
    model, maps = run.model, IdMap.load(id_map_path(shops / "data", "shop"))
    place = maps.values.to_pylist().index("a")
    with torch.no_grad():
        if part == "table":
            model.bags.table("shop").weight[place] += 1.0
        else:
            model.top[0].weight += 0.5  # type: ignore[union-attr,index]
    written(shops, "changed", run.schema, shops / "data", model)
    report = verify(shops, "changed")
    assert report.num_mismatches > 0
    causes = {mismatch.what for mismatch in report.mismatches}
    if part == "table":
        assert causes == {"the score (the vectors of 'shop' differ from the run's)"}
        assert report.num_mismatches < report.rows
    else:
        assert causes == {"the score (all vectors are the run's, so the dense part differs)"}
    assert report.mismatches[0].expected != report.mismatches[0].found


def test_raw_files_that_changed_are_told_from_a_wrong_bundle(tmp_path: Path) -> None:
    folder = trained(tmp_path)
    raw = folder / "rows.csv"
    before = raw.read_bytes()
    header, first, rest = before.split(b"\n", 2)
    raw.write_bytes(b"\n".join([header, rest.rstrip(b"\n") + b"7" * (len(first) + 1), b""]))  # as long, a row less
    with pytest.raises(DataError, match="changed after"):
        verify(folder)
    raw.write_bytes(b"\n".join([header, rest.rstrip(b"\n"), first, b""]))
    assert not verify(folder).passed


# --- other runs, logs, the command -----------------------------------------------------------------------------------


def test_a_bundle_of_another_run_or_data_set_is_refused(shops: Path, data: Path, tmp_path: Path) -> None:
    holdall.train(shops / "data", tmp_path / "run", TrainConfig.of(dim=4, device="cpu", seed=9))
    with pytest.raises(ConfigError, match="name the run that the bundle was released from"):
        holdall.verify(shops / "bundle", tmp_path / "run", device="cpu")
    run = TrainedRun.load(shops / "run", device="cpu")
    nowhere = replace(run, origin=Origin(run=None, checkpoint=None, step=None))
    other = Schema.load(data)
    config = run.config.model.model_config()
    quality = Quality(table_bytes=1, dense_bytes=1)
    write_bundle(tmp_path / "bundle", config.build(other), config, other, data, nowhere.origin, quality)
    with pytest.raises(HoldallError, match="has other dense than the data set of the run"):
        holdall.verify(tmp_path / "bundle", shops / "run", device="cpu")
    with pytest.raises(ConfigError, match="nothing to compare"):
        holdall.verify(shops / "bundle")


def test_logged_requests_are_scored_many_at_once(shops: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scorer, score = holdall.load(shops / "bundle"), Scorer.score
    row = {"price": 1.5, "age": None, "shop": "a", "day": 2, "tags": ["x"], "seen": []}
    entry = {"fingerprint": scorer.fingerprint, "rows": [row], "scores": scorer.score([row]).tolist()}
    log = tmp_path / "requests.jsonl"
    log.write_text(20 * (json.dumps(entry) + "\n"))
    batches: list[int] = []
    shown: list[int] = []

    def counted(self: Scorer, rows: Any) -> Any:
        batches.append(len(rows))
        return score(self, rows)

    monkeypatch.setattr(Scorer, "score", counted)
    monkeypatch.setattr("holdall.serving.verify.BATCH_ROWS", 8)
    monkeypatch.setattr("holdall.serving.verify.SampleProgress.update", lambda self, number: shown.append(number))
    assert holdall.verify(shops / "bundle", log=log).rows == 20
    assert batches == [8, 8, 4]
    assert sum(shown) == 20


def test_a_request_log_is_scored_again(shops: Path, tmp_path: Path) -> None:
    scorer = holdall.load(shops / "bundle")
    row = {"price": 1.5, "age": None, "shop": "a", "day": 2, "tags": ["x"], "seen": []}
    scores = scorer.score([row, {**row, "shop": "new"}]).tolist()
    entry = {"fingerprint": scorer.fingerprint, "rows": [row, {**row, "shop": "new"}], "scores": scores}
    log = tmp_path / "requests.jsonl"

    def write(*entries: dict[str, Any]) -> None:
        log.write_text("".join(json.dumps(one) + "\n" for one in entries))

    write(entry, {**entry, "fingerprint": "other"}, entry)
    report = holdall.verify(shops / "bundle", log=log)
    assert (report.passed, report.rows) == (True, 4)
    assert report.notes == [f"2 requests of {log} were scored again, 1 of other bundles were left out"]
    write(entry, {**entry, "scores": [scores[0], scores[1] + 1e-3]}, {**entry, "rows": [row, {"price": "x"}]})
    wrong, refused = holdall.verify(shops / "bundle", log=log).mismatches
    assert wrong.row == f"{log}, line 2, row 1"
    assert np.isclose(float(wrong.expected) - float(wrong.found), 1e-3, atol=1e-5)
    assert "refused (row 1" in refused.found
    write({**entry, "fingerprint": "other"})
    with pytest.raises(DataError, match="no request that this bundle answered"):
        holdall.verify(shops / "bundle", log=log)
    log.write_text('{"rows": []}\n')
    with pytest.raises(DataError, match=r"line 1.*'fingerprint' is missing.*is it a request log"):
        holdall.verify(shops / "bundle", log=log)


def test_an_export_scores_the_same_rows(shops: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    holdall.export(shops / "bundle", shops / "onnx")
    report = verify(shops, export=shops / "onnx")
    assert report.passed, report.mismatches

    class Off(OnnxScorer):
        def scores(self, batch: Batch) -> Any:
            return super().scores(batch) + 1e-3

    monkeypatch.setattr("holdall.serving.export.export.OnnxScorer", Off)
    report = verify(shops, export=shops / "onnx", rows=30)
    assert report.num_mismatches == 30
    assert report.mismatches[0].what == f"the score of the export {shops / 'onnx'}"
    with pytest.raises(ConfigError, match=r"name it .--against"):
        holdall.verify(shops / "bundle", log=shops / "none", export=shops / "onnx")
    run = TrainedRun.load(shops / "run", device="cpu")
    written(shops, "again", run.schema, shops / "data", run.config.model.model_config().build(run.schema))
    with pytest.raises(ConfigError, match="is an export of another bundle"):
        verify(shops, "again", export=shops / "onnx")
    document = json.loads((shops / "onnx" / "export.json").read_text())
    write_json(shops / "onnx" / "export.json", {**document, "target": "pt2"}, hashed=True)
    with pytest.raises(ConfigError, match="compiled code, which executes when it is loaded"):
        verify(shops, export=shops / "onnx")
    with pytest.raises(DataError, match="was compiled for machine unknown"):  # so it was about to be loaded
        verify(shops, export=shops / "onnx", run_code=True)


def test_the_command_ends_with_1_on_a_mismatch(shops: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--against", str(shops / "run"), "--device", "cpu"]
    main(["verify", str(shops / "bundle"), *words])
    assert "0 mismatches in 200 rows" in capsys.readouterr().out
    schema = Schema.load(shops / "data")
    price, age = schema.dense
    written(shops, "log", replace(schema, dense=(replace(price, transform="none"), age)), shops / "data")
    with pytest.raises(SystemExit) as ended:
        main(["verify", str(shops / "log"), *words, "--rows", "150", "--json"])
    assert ended.value.code == 1
    assert json.loads(capsys.readouterr().out)["rows"] == 150
