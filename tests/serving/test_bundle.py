"""Bundles: the model that was released comes back to the bit, and a bundle that was changed is refused."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from holdall.common.errors import DataError, HoldallError
from holdall.common.files import write_json
from holdall.data.dataset import DataSet
from holdall.data.prepare import PrepareConfig, prepare
from holdall.data.schema import DATA_SET, Schema
from holdall.evaluation.evaluate_model import score_split
from holdall.models import CONFIGURATIONS, DLRMConfig, Model, ModelConfig
from holdall.serving.bundle import BUNDLE_FILE, TABLES_FILE, Origin, Quality, open_bundle, write_bundle
from holdall.serving.mapped_tensors import MappedTensors
from holdall.tables import Bands, Codes, Dense, Quantized, Shared
from tests.common.killed import killed_at_each_change
from tests.serving.made_up import implicit_files
from tests.tables.cases import CASES

ORIGIN = Origin(run=None, checkpoint=None, step=None)
SMALL = DLRMConfig(dim=16, bottom=(8,), top=(8,))


def write(out: Path, model: Model, config: ModelConfig, data: Path, *, overwrite: bool = False) -> None:
    quality = Quality(table_bytes=model.bags.num_bytes(), dense_bytes=1)
    write_bundle(out, model, config, Schema.load(data), data, ORIGIN, quality, overwrite=overwrite)


def scores(model: Model, data: Path) -> Tensor:
    return score_split(model, DataSet(data, "valid")).logits


@pytest.fixture(scope="module")
def wide_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Clicks whose tables have as many rows as the smallest codebooks of the methods need."""
    from holdall.data.synthetic import SyntheticConfig, write_prepared

    out = tmp_path_factory.mktemp("data") / "wide"
    write_prepared(SyntheticConfig(rows=3000, cardinalities=(600, 900), num_dense=2), out)
    return out


@pytest.mark.parametrize("name", CASES)
def test_every_method_comes_back_to_the_bit(name: str, wide_data: Path, tmp_path: Path) -> None:
    model = SMALL.build(Schema.load(wide_data), CASES[name])
    write(tmp_path / "bundle", model, SMALL, wide_data)
    bundle = open_bundle(tmp_path / "bundle")
    assert set(bundle.methods.values()) == {CASES[name]}
    for mmap in (True, False):
        assert torch.equal(scores(bundle.model(mmap=mmap), wide_data), scores(model, wide_data))
    assert bundle.model().bags.num_bytes() == model.bags.num_bytes()


def test_dense_tables_of_several_types_come_back(data: Path, tmp_path: Path) -> None:
    schema = Schema.load(data)
    first, second, third = (feature.name for feature in schema.features)
    model = SMALL.build(schema, {first: Dense("bfloat16"), second: Shared(rows=2), third: Dense("float16")})
    model.bags.vector_dtype = torch.float32
    write(tmp_path / "bundle", model, SMALL, data)
    loaded = open_bundle(tmp_path / "bundle").model()
    assert loaded.bags.vector_dtype == torch.float32
    assert torch.equal(scores(loaded, data), scores(model, data))


@pytest.mark.parametrize("name", ["dlrm", "dcn", "dcn-mlperf", "deepfm"])
def test_every_model_of_click_logs_comes_back(name: str, bag_data: Path, tmp_path: Path) -> None:
    config = CONFIGURATIONS[name].scaled(0.05)
    model = config.build(Schema.load(bag_data))
    write(tmp_path / "bundle", model, config, bag_data)
    bundle = open_bundle(tmp_path / "bundle")
    assert bundle.model_config == config
    assert torch.equal(scores(bundle.model(), bag_data), scores(model, bag_data))


@pytest.mark.parametrize("name", ["ncf", "gmf", "ncf-mlp", "tbsm", "din", "two-tower"])
def test_every_model_of_implicit_data_comes_back(name: str, tmp_path: Path) -> None:
    data = tmp_path / "data"
    prepare([str(implicit_files(tmp_path / "raw"))], data, PrepareConfig(format="taobao", valid=0.1))
    config = CONFIGURATIONS[name]
    model = config.build(Schema.load(data), Bands(((3, Quantized()), (None, Shared(rows=2)))))
    write(tmp_path / "bundle", model, config, data)
    loaded = open_bundle(tmp_path / "bundle").model()
    assert torch.equal(scores(loaded, data), scores(model, data))
    assert (tmp_path / "bundle" / "items.arrow").exists()


def test_tables_are_views_of_the_file(data: Path, tmp_path: Path) -> None:
    model = SMALL.build(Schema.load(data))
    write(tmp_path / "bundle", model, SMALL, data)
    (pack,) = open_bundle(tmp_path / "bundle").model().bags.packs
    with (tmp_path / "bundle" / TABLES_FILE).open("r+b") as file:  # a page that was not read yet shows the change
        content = file.read()
        place = content.index(model.bags.packs[0].storage.detach().numpy().tobytes())
        file.seek(place)
        file.write(torch.full((1,), 42.0).numpy().tobytes())
    assert float(pack.storage.detach()[0, 0]) == 42.0
    weights = [table.weight for table in pack.tables.values()]
    assert weights[0].data_ptr() == pack.storage.data_ptr()


def test_a_write_does_not_reach_the_file(data: Path, tmp_path: Path) -> None:
    model = SMALL.build(Schema.load(data))
    write(tmp_path / "bundle", model, SMALL, data)
    before = (tmp_path / "bundle" / TABLES_FILE).read_bytes()
    with torch.no_grad():
        open_bundle(tmp_path / "bundle").model().bags.packs[0].storage.zero_()
    assert (tmp_path / "bundle" / TABLES_FILE).read_bytes() == before


def test_a_shared_codebook_is_stored_once(wide_data: Path, tmp_path: Path) -> None:
    model = SMALL.build(Schema.load(wide_data), Codes(2, 8, "all"))
    write(tmp_path / "bundle", model, SMALL, wide_data)
    codebook = 2 * 256 * 16 * 4
    codes = 2 * sum(Schema.load(wide_data).cardinalities.values())
    size = (tmp_path / "bundle" / TABLES_FILE).stat().st_size
    assert codes + codebook <= size < codes + codebook + 2000
    first, second = open_bundle(tmp_path / "bundle").model().bags.tables.values()
    assert first.codebook.words is second.codebook.words


def test_the_file_is_ordinary_safetensors(data: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model = SMALL.build(Schema.load(data), Quantized())
    write(tmp_path / "bundle", model, SMALL, data)
    stored = load_file(tmp_path / "bundle" / TABLES_FILE)
    own = model.state_dict()
    assert sum(name.endswith("codes") for name in stored) == 3
    assert all(torch.equal(tensor, own[name]) for name, tensor in stored.items() if not name.startswith("padding."))


# --- bundles that were changed -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sound(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("bundles") / "sound"
    write(out, SMALL.build(Schema.load(data)), SMALL, data)
    return out


def edit(folder: Path, change: Callable[[dict], None]) -> None:  # type: ignore[type-arg]
    """Change `bundle.json` as someone would who knows the format: its hash is right again."""
    document = json.loads((folder / BUNDLE_FILE).read_text())
    change(document)
    write_json(folder / BUNDLE_FILE, document, hashed=True)


def truncate(folder: Path) -> None:
    os.truncate(folder / TABLES_FILE, 1000)


def alter(folder: Path) -> None:
    content = bytearray((folder / TABLES_FILE).read_bytes())
    content[-1] ^= 1
    (folder / TABLES_FILE).write_bytes(content)


def remove(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def retype(folder: Path) -> None:
    text = (folder / BUNDLE_FILE).read_text()
    (folder / BUNDLE_FILE).write_text(text.replace('"dim": 16', '"dim": 17'))


def leave(folder: Path) -> None:
    edit(folder, lambda found: found["files"].update({"../outside": found["files"].pop("schema.json")}))


def link(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder.parent / "moved")
    (folder / "model.safetensors").symlink_to(folder.parent / "moved")


def link_folder(folder: Path) -> None:
    (folder / "ids").rename(folder.parent / "moved ids")
    (folder / "ids").symlink_to(folder.parent / "moved ids")


def unlist(folder: Path) -> None:
    edit(folder, lambda found: found["files"].pop("model.safetensors"))


def newer(folder: Path) -> None:
    edit(folder, lambda found: found.update(version=2))


def other_family(folder: Path) -> None:
    edit(folder, lambda found: found["model"].update(family="os.system"))


CHANGES: dict[Callable[[Path], None], str] = {
    truncate: "tables.safetensors has 1,000 bytes instead of .* truncated",
    alter: "tables.safetensors was changed",
    remove: "model.safetensors is missing",
    retype: "bundle.json was changed after it was written",
    leave: "names a file outside its folder",
    link: "model.safetensors is a link",
    link_folder: "ids is a link",
    unlist: "does not list model.safetensors",
    newer: "holdall-bundle version 2, this Holdall reads version 1",
    other_family: "unknown model family",
}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_changed_bundle_is_refused(change: Callable[[Path], None], sound: Path, tmp_path: Path) -> None:
    folder = tmp_path / "bundle"
    shutil.copytree(sound, folder)
    change(folder)
    with pytest.raises(DataError, match=CHANGES[change]):
        open_bundle(folder).model()


def test_methods_of_another_size_are_refused(sound: Path, tmp_path: Path) -> None:
    folder = tmp_path / "bundle"
    shutil.copytree(sound, folder)
    edit(folder, lambda found: next(iter(found["tables"].values())).update(method=Quantized().to_json()))
    with pytest.raises(DataError, match=r"tables.safetensors has no tensor '.*codes', which the model needs"):
        open_bundle(folder).model()


@pytest.mark.parametrize("dim", [2**62, 0, 17])
def test_models_that_cannot_be_are_refused(dim: int, sound: Path, tmp_path: Path) -> None:
    folder = tmp_path / "bundle"
    shutil.copytree(sound, folder)
    edit(folder, lambda found: found["model"].update(dim=dim))
    with pytest.raises(DataError, match=r"cannot be built|at least 1|in the place of"):
        open_bundle(folder).model()


def test_what_is_no_bundle_is_refused(data: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no bundle"):
        open_bundle(tmp_path / "nothing")
    with pytest.raises(DataError, match="does not exist"):
        open_bundle(data)


def test_only_a_bundle_is_overwritten(data: Path, sound: Path, tmp_path: Path) -> None:
    model = SMALL.build(Schema.load(data))
    shutil.copytree(sound, tmp_path / "old")
    with pytest.raises(HoldallError, match="exists already"):
        write(tmp_path / "old", model, SMALL, data)
    write(tmp_path / "old", model, SMALL, data, overwrite=True)
    assert torch.equal(scores(open_bundle(tmp_path / "old").model(), data), scores(model, data))
    shutil.copytree(data, tmp_path / "clicks")
    with pytest.raises(HoldallError, match="is not a bundle folder"):
        write(tmp_path / "clicks", model, SMALL, data, overwrite=True)
    assert not DATA_SET.matches(tmp_path / "old")  # which has a schema, too


def test_a_fingerprint_names_the_content(data: Path, sound: Path, tmp_path: Path) -> None:
    model = open_bundle(sound).model()
    write(tmp_path / "same", model, SMALL, data)
    assert open_bundle(tmp_path / "same").fingerprint == open_bundle(sound).fingerprint
    with torch.no_grad():
        model.bags.packs[0].storage[0, 0] += 1
    write(tmp_path / "other", model, SMALL, data)
    assert open_bundle(tmp_path / "other").fingerprint != open_bundle(sound).fingerprint
    record = open_bundle(sound).record
    for read_otherwise in (
        replace(record, vector_dtype="bfloat16"),
        replace(record, model={**record.model, "interaction": "concat"}),
    ):
        assert read_otherwise.files == record.files
        assert read_otherwise.fingerprint != record.fingerprint


def test_an_error_leaves_nothing(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("holdall.serving.bundle.write_json", fail)
    with pytest.raises(HoldallError, match="the disk is full"):
        write(tmp_path / "bundle", SMALL.build(Schema.load(data)), SMALL, data)
    assert list(tmp_path.iterdir()) == []


def test_a_kill_leaves_a_whole_bundle_or_none(data: Path, tmp_path: Path) -> None:
    model, out = SMALL.build(Schema.load(data)), tmp_path / "bundle"
    found = []
    for _ in killed_at_each_change(lambda: write(out, model, SMALL, data), lambda: shutil.rmtree(out, True)):
        found.append(out.exists())
        if out.exists():
            assert torch.equal(scores(open_bundle(out).model(), data), scores(model, data))
    assert found[-1]
    assert found.count(False) > 5


@pytest.mark.skipif(sys.platform != "linux", reason="reads what the system says of its memory maps")
@pytest.mark.parametrize(("memory", "random"), [(1_000_000_000, False), (1_000, True)])
def test_lookups_of_tables_that_do_not_fit_read_no_other_pages(
    memory: int, random: bool, wide_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "bundle", SMALL.build(Schema.load(wide_data)), SMALL, wide_data)
    monkeypatch.setattr("holdall.serving.mapped_tensors.available_memory", lambda: {"host": memory})
    model = open_bundle(tmp_path / "bundle").model()
    maps = Path("/proc/self/smaps").read_text().split(str(tmp_path / "bundle" / TABLES_FILE))[1]
    flags = next(line for line in maps.splitlines() if line.startswith("VmFlags:"))
    assert ("rr" in flags.split()) == random
    assert len(scores(model, wide_data))


@pytest.mark.skipif(sys.platform != "linux", reason="other systems may not have files with holes")
def test_tables_of_many_times_the_memory_are_mapped(tmp_path: Path) -> None:
    num_rows = 1 << 28
    entries = {"rows": {"dtype": "F32", "shape": [num_rows, 1024], "data_offsets": [0, num_rows * 4096]}}
    header = json.dumps(entries).encode()
    header += b" " * (-(8 + len(header)) % 64)
    with (tmp_path / "tables").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + num_rows * 4096)  # a TB, of which nothing is on disk
        file.seek(-4096, os.SEEK_END)
        file.write(torch.arange(1024.0).numpy().tobytes())
    assert torch.equal(MappedTensors(tmp_path / "tables")["rows"][-1], torch.arange(1024.0))
