"""Packages of compiled code: the scores of the bundle, weights stored once, and no load that was not asked for."""

from __future__ import annotations

import json
import os
import shutil
import zipfile
from pathlib import Path

import pytest
import torch

import holdall
from holdall.common.errors import ConfigError, DataError
from holdall.common.files import write_json
from holdall.data.dataset import DataSet
from holdall.data.loader import Loader
from holdall.models import DLRMConfig
from holdall.tables import Bands, Hashed, Quantized, Shared
from tests.serving.export.made_up import bundle_of, clicks

needs_compiler = pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="no C++ compiler")


@needs_compiler
@pytest.mark.slow
def test_a_package_scores_as_the_bundle_and_stores_weights_once(tmp_path: Path) -> None:
    """One test for all that takes a package: compiling one takes seconds."""
    data = clicks(tmp_path / "data", (300, 9, 9, 9))
    methods = {"C1": Bands(((40, Quantized(4)), (None, Shared(rows=2))))}
    bundle, model = bundle_of(tmp_path / "bundle", data, DLRMConfig(dim=4, bottom=(), top=()), methods)
    batches = [next(iter(Loader(DataSet(data, "valid"), size, shuffle="none").epoch(0))) for size in (1, 100)]
    with torch.no_grad():  # before the export, which then finds the kept numbers of the 10 pairs: a constant
        expected = [model(batch) for batch in batches]
    package = tmp_path / "package"
    holdall.export(bundle, package, format="pt2")
    scorer = holdall.open_export(package, run_code=True)
    assert scorer.fingerprint == holdall.open_bundle(bundle).fingerprint
    for batch, logits in zip(batches, expected, strict=True):
        torch.testing.assert_close(scorer.logits(batch), logits, rtol=1e-5, atol=1e-5)
    assert scorer.record.check["score"] <= 1e-5
    weights = model.bags.table("C1").parts[0].codes.numpy().tobytes()
    assert (package / "weights.safetensors").read_bytes().count(weights) == 1
    with zipfile.ZipFile(package / "model.pt2") as archive:
        assert not [name for name in archive.namelist() if weights in archive.read(name)]
    with pytest.raises(ConfigError, match=r"compiled code, which executes when it is loaded: pass run_code=True"):
        holdall.open_export(package)
    for name, value in (("torch", "2.0.0"), ("machine", "abacus"), ("instructions", "AVX1024")):
        other = tmp_path / name
        shutil.copytree(package, other)
        document = json.loads((other / "export.json").read_text())
        document["versions"][name] = value
        write_json(other / "export.json", document, hashed=True)
        with pytest.raises(DataError, match=rf"was compiled for {name} {value}, and this is .*--format onnx"):
            holdall.open_export(other, run_code=True)
    changed = tmp_path / "changed"
    shutil.copytree(package, changed)
    with (changed / "model.pt2").open("r+b") as file:
        file.seek(1000)
        file.write(b"x")
    with pytest.raises(DataError, match=r"model.pt2 was changed"):
        holdall.open_export(changed, run_code=True)


@needs_compiler
def test_hashes_are_refused_by_name(tmp_path: Path) -> None:
    data = clicks(tmp_path / "data", (300, 40))
    methods = {"C2": Bands(((5, Quantized()), (None, Hashed(buckets=7))))}
    bundle, _ = bundle_of(tmp_path / "bundle", data, DLRMConfig(dim=4, bottom=(), top=()), methods)
    with pytest.raises(ConfigError, match=r"table 'C2' is stored by hashed, .*use --format onnx, or release"):
        holdall.export(bundle, tmp_path / "out", format="pt2")
    assert not (tmp_path / "out").exists()


def test_a_missing_compiler_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match=r"there is no no-such-compiler: install a compiler \(the package g\+\+"):
        holdall.export(tmp_path / "bundle", tmp_path / "out", format="pt2")
