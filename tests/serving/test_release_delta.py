"""`holdall release --since`: what changed since a bundle, in its methods, with the proof of the result."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import holdall
from holdall.cli import main
from holdall.common.errors import ConfigError, DataError, HoldallError
from holdall.data.dataset import DataSet
from holdall.data.id_map import load_id_map
from holdall.data.schema import Schema
from holdall.data.synthetic import SyntheticConfig, write_prepared
from holdall.evaluation.evaluate_model import score_split
from holdall.models import DLRMConfig
from holdall.serving.base_form import in_base_form
from holdall.serving.bundle import TABLES_FILE, Origin, Quality, open_bundle, write_bundle
from holdall.serving.bundle_model import stored_tensors
from holdall.serving.changed_rows import compare_tensors
from holdall.serving.delta import apply_deltas, open_delta
from holdall.serving.gate import GateError
from holdall.serving.publish import publish
from holdall.serving.published_folder import Published
from holdall.serving.release import release
from holdall.serving.release_delta import merge
from holdall.training.config import TrainConfig
from holdall.training.evaluate_run import load_model
from holdall.training.train import train

SMALL = {"dim": 8, "bottom": (8,), "top": (8,), "batch_size": 64, "device": "cpu", "save_every": 10}


def trained(data: Path, out: Path, **settings: Any) -> Path:
    train(data, out, TrainConfig.of(**{**SMALL, **settings}))
    return out


class Runs:
    """A run at step 40, at step 42 of it, and bundles of the first."""

    def __init__(self, data: Path, folder: Path, **settings: Any):
        self.data = data
        self.before = trained(data, folder / "before", steps=40, **settings)
        self.after = shutil.copytree(self.before, folder / "after")
        train(data, self.after, TrainConfig.of(**{**SMALL, "steps": 42, **settings}), resume=True)
        self.as_trained, self.small = folder / "as trained", folder / "small"
        release(self.before, self.as_trained, as_trained=True)

    def scores(self, bundle: holdall.Bundle) -> torch.Tensor:
        return score_split(bundle.model(), DataSet(self.data, "test")).logits


@pytest.fixture(scope="module")
def runs(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    runs = Runs(data, tmp_path_factory.mktemp("runs"))
    release(runs.before, runs.small, budget="1/4")
    return runs


def test_tables_as_trained_lead_to_the_bundle_of_the_new_step(runs: Runs, tmp_path: Path) -> None:
    report = release(runs.after, tmp_path / "delta", since=runs.as_trained)
    release(runs.after, tmp_path / "full", as_trained=True)
    base, full = open_bundle(runs.as_trained), open_bundle(tmp_path / "full")
    updated = apply_deltas(base, [open_delta(tmp_path / "delta")])
    assert updated.fingerprint == full.fingerprint == report.record.fingerprint
    assert updated.record.origin == full.record.origin
    assert updated.record.quality == full.record.quality
    assert torch.equal(runs.scores(updated), runs.scores(full))
    changed = open_delta(tmp_path / "delta").num_changed()["bags.tables.C3.weight"]
    assert changed is not None
    assert 0 < changed < 200  # two steps of 64 rows touch few of the 401 ids


def test_smaller_forms_keep_the_bytes_of_rows_that_did_not_change(runs: Runs, tmp_path: Path) -> None:
    base = open_bundle(runs.small)
    same = in_base_form(load_model(runs.before, device="cpu")[0], base)  # type: ignore[arg-type]
    assert compare_tensors(base.tables(), stored_tensors(same)[1]).sha256 == base.record.files[TABLES_FILE].sha256
    release(runs.after, tmp_path / "delta", since=runs.small)
    delta = open_delta(tmp_path / "delta")
    updated = apply_deltas(base, [delta])
    proof = updated.record.quality.proof
    assert proof is not None
    assert proof["auc"]["candidate"] == pytest.approx(holdall.evaluate(runs.after, "valid")["auc"], abs=0.02)
    unchanged = {name for name in base.tables().names() if "words" in name} - set(delta.num_changed())
    assert unchanged == {name for name in base.tables().names() if "words" in name}  # codebooks stay
    before, after = (holdall.load_model(run, device="cpu")[0] for run in (runs.before, runs.after))
    same_rows = (before.bags.table("C3").weight == after.bags.table("C3").weight).all(dim=1)  # type: ignore[union-attr]
    stored = [bundle.model().bags.table("C3").materialize() for bundle in (base, updated)]
    equal = (stored[0] == stored[1]).all(dim=1)
    assert same_rows.sum() > 200
    assert equal[same_rows].float().mean() > 0.9  # rows that share one stored row move with it
    assert equal[~same_rows].float().mean() < 0.5


def test_the_proof_is_held_against_a_limit(runs: Runs, tmp_path: Path) -> None:
    with pytest.raises(GateError, match=r"not proved to be within --max-auc-loss.*without --since"):
        release(runs.after, tmp_path / "delta", since=runs.small, max_auc_loss=0.0)
    assert list(tmp_path.iterdir()) == []


def test_a_delta_since_a_published_folder_goes_there(runs: Runs, tmp_path: Path) -> None:
    served = tmp_path / "served"
    publish(runs.as_trained, served)
    release(runs.after, tmp_path / "delta", since=served)
    publish(tmp_path / "delta", served)
    assert Published(served).current().step == 42
    merge(served, [], tmp_path / "merged")
    merge(runs.as_trained, [tmp_path / "delta"], tmp_path / "merged again")
    merged = open_bundle(tmp_path / "merged")
    assert merged.fingerprint == open_bundle(tmp_path / "merged again").fingerprint
    assert torch.equal(runs.scores(merged), runs.scores(Published(served).open()))
    release(runs.after, tmp_path / "nothing", since=[runs.as_trained, tmp_path / "delta"])
    assert open_delta(tmp_path / "nothing").num_changed() == {}


def test_values_are_forgotten(runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    id_map = load_id_map(runs.data, "C3", Schema.load(runs.data))
    value, kept = id_map.values[2].as_py(), id_map.values[3].as_py()
    (tmp_path / "forget.csv").write_text(f"feature,value\nC3,{value}\nC3,never seen\n")
    command = f"release {runs.after} --out {tmp_path / 'delta'} --forget {tmp_path / 'forget.csv'} --device cpu"
    main([*command.split(), "--since", str(runs.as_trained)])
    printed = capsys.readouterr()
    assert "withdrawn from table 'C3': 1 values" in printed.out
    assert "1 values of" in printed.err
    main(["release", str(runs.as_trained), "--merge", str(tmp_path / "delta"), "--out", str(tmp_path / "merged")])
    scorer = holdall.load(tmp_path / "merged")
    row = {column.name: 1 for column in scorer.schema.dense} | {"C1": "", "C2": ""}
    scores = scorer.score([{**row, "C3": text} for text in (value, "never seen", kept)])
    assert scores[0] == scores[1] != scores[2]
    weight = scorer.model.bags.table("C3").weight
    assert torch.equal(weight[2], weight[id_map.unseen])  # type: ignore[index]


FORGET = {
    "": "must begin with the line feature,value",
    "value,feature\n": "must begin with the line feature,value",
    "feature,value\nC3\n": "line 2 must be a feature and a value",
    "feature,value\nC3,\n": "line 2 must be a feature and a value",
    "feature,value\nC9,x\n": "reads no feature 'C9'",
    'feature,value\nC3,"x': "cannot be read as CSV",
}


@pytest.mark.parametrize("text", FORGET)
def test_a_file_of_values_that_cannot_be_read_is_refused(text: str, runs: Runs, tmp_path: Path) -> None:
    (tmp_path / "forget.csv").write_text(text)
    with pytest.raises(DataError, match=FORGET[text]):
        release(runs.after, tmp_path / "delta", since=runs.as_trained, forget=tmp_path / "forget.csv")


def test_options_that_contradict_are_refused(runs: Runs, tmp_path: Path) -> None:
    for option in ({"budget": "1/2"}, {"polish": 1}, {"as_trained": True}):
        with pytest.raises(ConfigError, match=r"--since keeps the methods .* leave --"):
            release(runs.after, tmp_path / "delta", since=runs.small, **option)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="name it with --since"):
        release(runs.after, tmp_path / "bundle", as_trained=True, forget=tmp_path / "forget.csv")
    with pytest.raises(HoldallError, match="is itself an input"):
        release(runs.after, runs.as_trained, since=runs.as_trained, overwrite=True)


def test_a_run_on_other_ids_is_refused(runs: Runs, tmp_path: Path) -> None:
    write_prepared(SyntheticConfig(rows=500, cardinalities=(50, 7, 401), num_dense=3), tmp_path / "data")
    other = trained(tmp_path / "data", tmp_path / "run", steps=2)
    with pytest.raises(DataError, match=r"was trained on other ids .*without --since"):
        release(other, tmp_path / "delta", since=runs.as_trained)


def test_a_run_of_another_model_is_refused(runs: Runs, tmp_path: Path) -> None:
    other = trained(runs.data, tmp_path / "run", steps=2, top=(4,))
    with pytest.raises(ConfigError, match=r"another settings .* without --since"):
        release(other, tmp_path / "delta", since=runs.as_trained)


def test_tables_on_disk_give_the_delta_of_those_in_memory(runs: Runs, tmp_path: Path) -> None:
    disk = Runs(runs.data, tmp_path, strategy="split", hot_bytes="1KB", tail="disk")
    release(disk.after, tmp_path / "delta", since=disk.as_trained)
    release(disk.after, tmp_path / "full", as_trained=True)
    updated = apply_deltas(open_bundle(disk.as_trained), [open_delta(tmp_path / "delta")])
    assert updated.fingerprint == open_bundle(tmp_path / "full").fingerprint


def test_inspect_describes_a_delta(runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    release(runs.after, tmp_path / "delta", since=runs.as_trained)
    main(["inspect", str(tmp_path / "delta")])
    assert "(step 40) to" in capsys.readouterr().out
    main(["inspect", str(tmp_path / "delta"), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["kind"] == "delta"
    assert found["base"] == open_bundle(runs.as_trained).fingerprint
    assert found["tensors"].keys() <= set(open_bundle(runs.as_trained).tables().names())


def test_a_bundle_without_calibration_still_has_deltas(runs: Runs, tmp_path: Path) -> None:
    small = open_bundle(runs.small)
    schema, config = Schema.load(runs.data), DLRMConfig(dim=8, bottom=(8,), top=(8,))
    origin, quality = Origin(run=None, checkpoint=None, step=1), Quality(table_bytes=1, dense_bytes=1)
    write_bundle(tmp_path / "older", small.model(mmap=False), config, schema, runs.data, origin, quality)
    assert open_bundle(tmp_path / "older").calibration() == {}
    release(runs.after, tmp_path / "delta", since=tmp_path / "older")
    assert apply_deltas(open_bundle(tmp_path / "older"), [open_delta(tmp_path / "delta")]).record.origin.step == 42
