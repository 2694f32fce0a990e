"""Export folders: whole or not at all, checked against the bundle, and refused once they are changed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import holdall
from holdall.cli.run_command import main
from holdall.common.errors import ConfigError, DataError, HoldallError, MissingDependencyError
from holdall.common.files import write_json
from holdall.data.schema import DATA_SET
from holdall.models import DLRMConfig
from holdall.serving.export import export as module
from holdall.serving.export.export_check import check_export
from holdall.serving.export.export_folder import EXPORT, EXPORT_FILE, ExportRecord, read_record, write_record
from holdall.serving.export.exported_scorer import ExportedScorer
from holdall.serving.export.model_inputs import Arrays
from holdall.serving.export.traced_model import TracedModel
from tests.serving.export.made_up import BANDS, bundle_of, clicks

SMALL = DLRMConfig(dim=16, bottom=(8,), top=(8,))


class FakeScorer(ExportedScorer):
    """The bundle's own model in the place of a runtime, off by `off`."""

    off = 0.0

    def __init__(self, path: Path, record: ExportRecord, **_: object):
        super().__init__(path, record)
        bundle = json.loads((path / record.model_file).read_text())
        self._model = TracedModel(holdall.open_bundle(bundle).model(), self.inputs)

    def _run(self, arrays: Arrays) -> Arrays:
        logit = self._model(*(torch.from_numpy(arrays[name]) for name in self._model.names))[1] + self.off
        return {"score": logit.sigmoid().numpy(), "logit": logit.numpy()}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundles")
    data = clicks(folder / "data", (600, 700), bag_lengths=(1, 3))
    return bundle_of(folder / "bundle", data, SMALL, BANDS)[0]


@pytest.fixture(autouse=True)
def _without_a_runtime(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of the bundle in the place of an ONNX file, so that an export takes no time."""

    def write(folder: Path, model: TracedModel, examples: tuple[Tensor, ...]) -> dict[str, str]:
        (folder / "model.onnx").write_text(json.dumps(str(bundle)))
        return {"opset": "20"}

    monkeypatch.setattr(module.onnx_file, "write_onnx", write)
    monkeypatch.setattr(module, "OnnxScorer", FakeScorer)


@pytest.fixture
def sound(bundle: Path, tmp_path: Path) -> Path:
    holdall.export(bundle, tmp_path / "export")
    return tmp_path / "export"


@pytest.mark.parametrize("off", [2e-3, -2e-4, float("nan"), float("inf")])
def test_an_export_that_scores_otherwise_is_not_kept(
    off: float, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeScorer, "off", off)
    with pytest.raises(HoldallError, match=r"scores .* made-up rows otherwise than the bundle.*nothing was kept"):
        holdall.export(bundle, tmp_path / "export")
    assert list(tmp_path.iterdir()) == []


def test_what_was_measured_is_written(bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeScorer, "off", 2e-6)
    report = holdall.export(bundle, tmp_path / "export")
    check = json.loads((tmp_path / "export" / EXPORT_FILE).read_text())["check"]
    assert report.record.check == check
    assert 1e-7 < check["score"] < 1e-6 < check["logit"] < 3e-6
    assert check["rows"] == 512 + 1 + 3
    scorer = holdall.open_export(tmp_path / "export")
    assert check_export(scorer, holdall.open_bundle(bundle).model()).to_json() == check


def test_only_an_export_is_overwritten(bundle: Path, sound: Path, tmp_path: Path) -> None:
    before = (sound / EXPORT_FILE).read_bytes()
    with pytest.raises(HoldallError, match=r"the model export folder .* exists already"):
        holdall.export(bundle, sound)
    holdall.export(bundle, sound, format="triton", overwrite=True)
    assert (sound / EXPORT_FILE).read_bytes() != before
    assert (sound / "models" / "holdall" / "config.pbtxt").exists()
    assert not (sound / "model.onnx").exists()
    holdall.export(bundle, sound, overwrite=True)
    with pytest.raises(HoldallError, match="is itself an input"):
        holdall.export(bundle, bundle, overwrite=True)
    shutil.copytree(bundle, tmp_path / "other")
    with pytest.raises(HoldallError, match="is not a model export folder"):
        holdall.export(bundle, tmp_path / "other", overwrite=True)
    assert not DATA_SET.matches(sound)
    assert EXPORT.matches(sound)


def test_an_exporter_that_fails_names_methods_and_cure(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("\nno operator for aten.magic\nand a long story")

    monkeypatch.setattr(module.onnx_file, "write_onnx", fail)
    sentence = r"stored by bands, cannot be exported to onnx \(no operator for aten.magic\): release it .*--as-trained"
    with pytest.raises(ConfigError, match=sentence):
        holdall.export(bundle, tmp_path / "export")
    assert list(tmp_path.iterdir()) == []


def test_what_is_missing_or_unknown_is_named(bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"--format onyx is unknown \(did you mean 'onnx'"):
        holdall.export(bundle, tmp_path / "export", format="onyx")  # type: ignore[arg-type]
    with pytest.raises(DataError, match="no bundle"):
        holdall.export(tmp_path / "nothing", tmp_path / "export")
    with pytest.raises(DataError, match="no export"):
        holdall.open_export(tmp_path / "nothing")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match=r"export to ONNX needs onnx, .* pip install 'holdall\[onnx\]'"):
        holdall.export(bundle, tmp_path / "export")


def test_the_command_and_inspect(bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "export")
    main(["export", str(bundle), "--format", "triton", "--name", "clicks", "--out", out])
    text = " ".join(capsys.readouterr().out.split())
    assert "516 made-up rows: scores differ from those of the bundle by at most" in text
    assert "input C2.offsets int64 [rows + 1]" in text
    main(["export", str(bundle), "--format", "onnx", "--out", out, "--overwrite", "--json"])
    document = json.loads(capsys.readouterr().out)
    assert (document["kind"], document["target"]) == ("export", "onnx")
    main(["inspect", out])
    assert "bundle " + document["bundle"]["fingerprint"][:12] in capsys.readouterr().out
    assert holdall.inspect(out) == document


# --- exports that were changed -----------------------------------------------------------------------------------


def truncate(folder: Path) -> None:
    os.truncate(folder / "ids" / "C1.arrow", 100)


def alter(folder: Path) -> None:
    (folder / "model.onnx").write_text("x" * (folder / "model.onnx").stat().st_size)


def retype(folder: Path) -> None:
    text = (folder / EXPORT_FILE).read_text()
    (folder / EXPORT_FILE).write_text(text.replace('"opset": "20"', '"opset": "21"'))


def leave(folder: Path) -> None:
    edit(folder, lambda found: found["files"].update({"../outside": found["files"].pop("schema.json")}))


def link(folder: Path) -> None:
    (folder / "model.onnx").rename(folder.parent / "moved")
    (folder / "model.onnx").symlink_to(folder.parent / "moved")


def unlist(folder: Path) -> None:
    edit(folder, lambda found: found["files"].pop("model.onnx"))


def climb(folder: Path) -> None:
    edit(folder, lambda found: found.update(model_file="ids/../model.onnx"))


def forget(folder: Path) -> None:
    edit(folder, lambda found: found["bundle"].pop("fingerprint"))


def misstep(folder: Path) -> None:
    edit(folder, lambda found: found["bundle"].update(step="seven"))


def edit(folder: Path, change: Callable[[dict], object]) -> None:  # type: ignore[type-arg]
    document = json.loads((folder / EXPORT_FILE).read_text())
    change(document)
    write_json(folder / EXPORT_FILE, document, hashed=True)


CHANGES: dict[Callable[[Path], None], str] = {
    truncate: "C1.arrow has 100 bytes instead of .* truncated",
    alter: "model.onnx was changed",
    retype: "export.json was changed after it was written",
    leave: "names a file outside its folder",
    link: "model.onnx is a link, which an export does not have",
    unlist: "does not list model.onnx",
    climb: r"does not list ids/\.\./model.onnx",
    forget: "export.json does not say which bundle and step were exported",
    misstep: "export.json does not say which bundle and step were exported",
}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_changed_export_is_refused(change: Callable[[Path], None], sound: Path) -> None:
    change(sound)
    with pytest.raises(DataError, match=CHANGES[change]) as error:
        holdall.open_export(sound)
    assert "holdall export" in str(error.value)


def test_a_file_that_is_no_model_is_refused(sound: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxruntime")
    monkeypatch.undo()
    with pytest.raises(DataError, match=r"onnxruntime cannot run .*model.onnx"):
        holdall.open_export(sound)


def test_the_record_comes_back(sound: Path, tmp_path: Path) -> None:
    record = read_record(sound)
    (tmp_path / "copy").mkdir()
    write_record(tmp_path / "copy", record)
    assert (tmp_path / "copy" / EXPORT_FILE).read_bytes() == (sound / EXPORT_FILE).read_bytes()
    assert np.isfinite(record.check["score"])
