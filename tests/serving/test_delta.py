"""Deltas: a base with any sequence of them is the full bundle bit for bit, and what does not fit is refused."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from holdall.common.checked_files import FileHash
from holdall.common.errors import ConfigError, DataError, HoldallError
from holdall.common.files import write_json
from holdall.data.id_map import load_id_map
from holdall.data.schema import Schema
from holdall.models import DLRMConfig, Model
from holdall.serving.bundle import MODEL_FILE, TABLES_FILE, Bundle, Origin, Quality, open_bundle, write_bundle
from holdall.serving.bundle_model import stored_tensors
from holdall.serving.delta import DELTA_FILE, ROWS_FILE, TOMBSTONES_FILE, UpdatedBundle, apply_deltas, open_delta
from holdall.serving.scorer import load_bundle
from holdall.serving.write_delta import merge_deltas, write_delta
from holdall.tables import (
    Bands,
    Clustered,
    Codes,
    Dense,
    Hashed,
    HotCold,
    MemCom,
    Method,
    MixedDimension,
    Quantized,
    Robe,
    Shared,
    Table,
    TensorTrain,
)
from holdall.tables.bands import BandsTable
from holdall.tables.codes import CodesTable
from holdall.tables.dense import DenseTable
from holdall.tables.fixed_grid import FixedGridTable
from holdall.tables.mixed_dimension import MixedDimensionTable
from holdall.tables.quantized import QuantizedTable
from tests.common.killed import killed_at_each_change

SMALL = DLRMConfig(dim=4, bottom=(4,), top=(4,))
QUALITY = Quality(table_bytes=1, dense_bytes=1)
METHODS: tuple[Method, ...] = (
    Dense(),
    Dense("float16"),
    Quantized(),
    Quantized(bits=4, scales="float16"),
    Codes(2, 4, "all"),
    Bands(((20, Dense("float16")), (100, Quantized()), (200, Codes(1, 4, "all")), (None, Shared(rows=3)))),
    HotCold(hot_rows=5, cold=Quantized()),
    Shared(rows=3),
    TensorTrain(rank=2),
    Hashed(buckets=30),
    Robe(size=64, block=4),
    MemCom(buckets=5),
    Clustered(clusters=6),
    MixedDimension(dim=2),
    Bands(((30, Quantized()), (None, MixedDimension(dim=2, bits=8, trainable=True)))),
)
NUM_SEQUENCES = 3 * len(METHODS)


def origin(step: int | None) -> Origin:
    return Origin(run=None, checkpoint=None, step=step)


def write_full(out: Path, model: Model, data: Path, step: int | None = None) -> Bundle:
    write_bundle(out, model, SMALL, Schema.load(data), data, origin(step), QUALITY)
    return open_bundle(out)


def make_delta(out: Path, model: Model, base: Bundle, step: int | None = None, **options: object) -> Path:
    write_delta(out, model, SMALL, base, origin(step), lambda _: QUALITY, **options)  # type: ignore[arg-type]
    return out


@torch.no_grad()
def change_rows(tensor: Tensor, rows: Tensor, draw: random.Random) -> None:
    """New numbers in some rows, special ones among them; codes are those of other rows, which are valid."""
    if not tensor.is_floating_point():
        tensor[rows] = tensor[torch.tensor([draw.randrange(len(tensor)) for _ in rows.tolist()], dtype=torch.int64)]
        return
    values = torch.randn(len(rows), *tensor.shape[1:])
    values.view(-1)[::7] = draw.choice((0.0, -0.0, float("nan"), float("inf"), 1e-40))
    tensor[rows] = values.to(tensor.dtype)


def change(model: Model, draw: random.Random) -> None:
    """One training step, as it were: a few, many, all or no rows of each stored tensor, and the dense part."""
    dense, tables = stored_tensors(model)
    for tensor in tables.values():
        assert isinstance(tensor, Tensor)
        count = draw.choice((0, 1, 1, 3, len(tensor) // 2, len(tensor)))
        rows = torch.tensor(draw.sample(range(len(tensor)), min(count, len(tensor))), dtype=torch.int64)
        change_rows(tensor, rows, draw)
    with torch.no_grad():
        next(iter(dense.values())).add_(draw.random())


def contents(folder: Path) -> dict[str, bytes]:
    """All files of a bundle but `bundle.json`, which has the time when it was made."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "bundle.json"]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def model_of(methods: list[Method], data: Path, seed: int) -> Model:
    torch.manual_seed(seed)
    schema = Schema.load(data)
    return SMALL.build(schema, dict(zip([feature.name for feature in schema.features], methods, strict=True)))


def some_methods(seed: int) -> list[Method]:
    """A method for each of the three tables, in another pair each time; the middle one, of 7 rows, has no codebooks."""
    other = seed + seed // len(METHODS)
    middle = (Dense(), Quantized(), Shared(rows=3))
    return [METHODS[seed % len(METHODS)], middle[seed % len(middle)], METHODS[other % len(METHODS)]]


@torch.no_grad()
def overwrite(table: Table, ids: list[int], unseen: int, start: int = 0) -> None:
    """The content of the unseen row, or zeros where it is in another band, in the place of some rows."""
    if isinstance(table, MixedDimensionTable):
        overwrite(table.narrow, ids, unseen, start)
    if isinstance(table, BandsTable):
        for band, part in zip(table.bands, table.parts, strict=True):
            overwrite(part, ids, unseen, start + band.start)
    rounded = {QuantizedTable: ("codes", "grid"), CodesTable: ("codes",), FixedGridTable: ("codes",)}
    names: dict[type[Table], tuple[str, ...]] = {DenseTable: ("weight",), **rounded}
    for name in names.get(type(table), ()):
        stored = table.get_parameter(name) if name == "weight" else table.get_buffer(name)
        for row in (number - start for number in ids if start <= number < start + table.num_rows):
            stored[row] = stored[unseen - start] if start <= unseen < start + table.num_rows else 0


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_a_base_and_any_sequence_of_deltas_is_the_full_bundle(
    part: int, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)
    features = Schema.load(data).features
    for seed in range(part, NUM_SEQUENCES, 4):
        draw, folder = random.Random(seed), tmp_path / str(seed)
        folder.mkdir()
        model = model_of(some_methods(seed), data, seed)
        base = write_full(folder / "base", model, data, 0)
        deltas, here, withdrawn = [], base, dict[str, list[int]]()
        for step in range(1, draw.randint(1, 4) + 1):
            change(model, draw)
            new: dict[str, np.ndarray] = {}
            if draw.random() < 0.3:
                feature = draw.choice(features)
                known = {feature.unseen, *withdrawn.get(feature.name, [])}
                ids = draw.sample([number for number in range(feature.num_rows) if number not in known], 2)
                new[feature.name] = np.sort(np.array(ids))
                withdrawn.setdefault(feature.name, []).extend(ids)
            made = make_delta(folder / f"delta-{step}", model, here, step, withdrawn=new)
            deltas.append(open_delta(made))
            here = apply_deltas(base, deltas) if draw.random() < 0.5 else apply_deltas(here, deltas[-1:])
        for feature in features:
            overwrite(model.bags.table(feature.name), withdrawn.get(feature.name, []), feature.unseen)
        full = write_full(folder / "full", model, data)
        assert here.tables().content.numpy().tobytes() == (full.path / TABLES_FILE).read_bytes()
        assert here.dense_tensors().content.numpy().tobytes() == (full.path / MODEL_FILE).read_bytes()
        left_out = {name: lookup.withdrawn.tolist() for name, lookup in here.id_lookups().items()}
        assert left_out == {name: sorted(withdrawn.get(name, [])) for name in left_out}
        cut = draw.randint(0, len(deltas))
        merge_deltas(apply_deltas(base, deltas[:cut]), deltas[cut:], folder / "merged")
        merged = open_bundle(folder / "merged")
        assert merged.fingerprint == here.fingerprint
        assert merged.record.origin.step == len(deltas)
        if withdrawn:
            for name in (TABLES_FILE, MODEL_FILE):
                assert (merged.path / name).read_bytes() == (full.path / name).read_bytes()
        else:
            assert here.fingerprint == full.fingerprint
            assert contents(folder / "merged") == contents(folder / "full")
        assert left_out == {name: lookup.withdrawn.tolist() for name, lookup in merged.id_lookups().items()}
        if len(deltas) > 1:
            for wrong in (deltas[1:], deltas[::-1], [*deltas[:-2], deltas[-1]]):
                with pytest.raises(DataError, match="was made for another bundle"):
                    apply_deltas(base, wrong)
        shutil.rmtree(folder)


# --- small cases ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def base(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    model = model_of([Dense(), Dense(), Quantized()], data, 0)
    return write_full(tmp_path_factory.mktemp("bundles") / "base", model, data, 10)


def changed(base: Bundle, rows: dict[str, list[int]]) -> Model:
    """The model of a bundle with other numbers in some rows of its dense tables."""
    model = base.model(mmap=False)
    with torch.no_grad():
        for name, places in rows.items():
            model.bags.table(name).weight[places] += 1.0  # type: ignore[index]
    return model


@pytest.fixture(scope="module")
def sound(base: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = changed(base, {"C1": [3, 5, 40]})
    return make_delta(
        tmp_path_factory.mktemp("deltas") / "sound", model, base, 20, withdrawn={"C3": np.array([4, 9, 100])}
    )


def test_only_rows_that_changed_are_stored(base: Bundle, sound: Path) -> None:
    stored = load_file(sound / ROWS_FILE)
    assert stored["index.bags.tables.C1.weight"].tolist() == [3, 5, 40]
    expected = base.model().bags.table("C1").weight[[3, 5, 40]] + 1.0  # type: ignore[index]
    assert torch.equal(stored["rows.bags.tables.C1.weight"], expected)
    assert open_delta(sound).num_changed() == {
        "bags.tables.C1.weight": 3,
        "bags.tables.C3.codes": 3,
        "bags.tables.C3.grid": 3,
    }
    assert open_delta(sound).num_withdrawn() == {"C3": 3}


def test_a_tensor_is_stored_whole_where_more_than_half_changed(base: Bundle, tmp_path: Path) -> None:
    make_delta(tmp_path / "delta", changed(base, {"C2": [0, 1, 2, 3, 4], "C1": list(range(25))}), base)
    assert open_delta(tmp_path / "delta").num_changed() == {"bags.tables.C1.weight": 25, "bags.tables.C2.weight": None}


def test_nothing_changed_is_a_delta_without_rows(base: Bundle, tmp_path: Path) -> None:
    delta = open_delta(make_delta(tmp_path / "delta", base.model(), base, 30))
    assert delta.num_changed() == {}
    assert apply_deltas(base, [delta]).fingerprint == base.fingerprint


def test_a_model_of_another_form_is_refused(base: Bundle, data: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no tensor .* release a new bundle, without --since"):
        make_delta(tmp_path / "delta", model_of([Dense(), Dense(), Dense()], data, 0), base)
    with pytest.raises(ConfigError, match=r"float16 .* in .*float32 .* release a new bundle"):
        make_delta(tmp_path / "delta", model_of([Dense("float16"), Dense(), Quantized()], data, 0), base)
    other = DLRMConfig(dim=4, bottom=(4,), top=(5,))
    with pytest.raises(ConfigError, match="another settings than"):
        write_delta(tmp_path / "delta", other.build(Schema.load(data)), other, base, origin(1), lambda _: QUALITY)
    assert list(tmp_path.iterdir()) == []


def test_a_withdrawn_value_scores_as_one_never_seen(base: Bundle, sound: Path, data: Path, tmp_path: Path) -> None:
    id_map = load_id_map(base.path, "C3", base.schema)
    value, kept = id_map.values[9].as_py(), id_map.values[10].as_py()
    updated = apply_deltas(base, [open_delta(sound)])
    merge_deltas(base, [open_delta(sound)], tmp_path / "merged")
    for bundle in (updated, open_bundle(tmp_path / "merged")):
        scorer = load_bundle(bundle)
        row = dict.fromkeys(("C1", "C2"), "") | dict.fromkeys([column.name for column in base.schema.dense], 1)
        scores = scorer.score([{**row, "C3": text} for text in (value, "never seen", kept)])
        assert scores[0] == scores[1] != scores[2]
        assert scorer.num_unseen["C3"] == 2
        assert [bundle.id_lookups()["C3"].text(number) for number in (9, 10)] == [None, kept]
        assert value not in bundle.id_lookups()["C3"].rows(0, 20)[0].to_pylist()
        assert scorer.step == 20
        assert scorer.explain_row({**row, "C3": value}).values[-1].is_unseen
    assert load_bundle(base).score([{**row, "C3": value}]) != scores[0]
    left = pa.ipc.open_file(tmp_path / "merged" / "ids" / "C3.arrow").read_all()["value"].combine_chunks()
    texts = [text for text in left.to_pylist() if text is not None]
    assert value not in texts
    assert kept in texts
    assert left.buffers()[2].to_pybytes()[: left.nbytes].rstrip(b"\0") == "".join(texts).encode()


def test_what_was_withdrawn_stays_so_in_later_deltas(base: Bundle, sound: Path, tmp_path: Path) -> None:
    merge_deltas(base, [open_delta(sound)], tmp_path / "merged")
    for number, here in enumerate((apply_deltas(base, [open_delta(sound)]), open_bundle(tmp_path / "merged"))):
        model = base.model(mmap=False)  # training went on with all values
        delta = open_delta(make_delta(tmp_path / f"delta-{number}", model, here, 30, withdrawn={"C3": np.array([5])}))
        after = apply_deltas(here, [delta])
        codes = after.model().bags.table("C3").codes
        unseen = base.schema.feature("C3").unseen
        assert all(torch.equal(codes[row], codes[unseen]) for row in (4, 5, 9, 100))
        merge_deltas(here, [delta], tmp_path / f"merged-{number}")
        assert open_bundle(tmp_path / f"merged-{number}").fingerprint == after.fingerprint
        left_out = open_bundle(tmp_path / f"merged-{number}").id_lookups()["C3"].withdrawn
        assert left_out.tolist() == [4, 5, 9, 100]
    assert contents(tmp_path / "merged-0") == contents(tmp_path / "merged-1")


def test_only_touched_pages_are_changed_in_memory(base: Bundle, sound: Path) -> None:
    before = contents(base.path)
    tables = apply_deltas(base, [open_delta(sound)]).tables()
    assert not torch.equal(tables["bags.tables.C1.weight"], base.tables()["bags.tables.C1.weight"])
    assert contents(base.path) == before


def test_a_kill_leaves_a_whole_delta_or_none(base: Bundle, tmp_path: Path) -> None:
    model, out = changed(base, {"C1": [1]}), tmp_path / "delta"
    found = []
    for _ in killed_at_each_change(
        lambda: make_delta(out, model, base, 20, withdrawn={"C3": np.array([7])}), lambda: shutil.rmtree(out, True)
    ):
        found.append(out.exists())
        if out.exists():
            assert apply_deltas(base, [open_delta(out)]).id_lookups()["C3"].withdrawn.tolist() == [7]
    assert found[-1]
    assert found.count(False) > 5
    assert [path.name for path in tmp_path.iterdir()] == ["delta"]


def test_an_error_of_the_proof_leaves_nothing(base: Bundle, tmp_path: Path) -> None:
    def fail(_: Bundle) -> Quality:
        raise HoldallError("not as good")

    with pytest.raises(HoldallError, match="not as good"):
        write_delta(tmp_path / "delta", base.model(), SMALL, base, origin(1), fail)
    assert list(tmp_path.iterdir()) == []


# --- deltas that were changed ---------------------------------------------------------------------------------------


def edit(folder: Path, change: Callable[[dict], None]) -> None:  # type: ignore[type-arg]
    """Change `delta.json` as someone would who knows the format: its hash is right again."""
    document = json.loads((folder / DELTA_FILE).read_text())
    change(document)
    write_json(folder / DELTA_FILE, document, hashed=True)


def list_again(folder: Path, name: str) -> None:
    """List a changed file with its new size and hash."""
    found = FileHash.of(folder / name)
    edit(folder, lambda document: document["files"].update({name: {"bytes": found.bytes, "sha256": found.sha256}}))


def rows(change: Callable[[dict[str, Tensor]], None]) -> Callable[[Path], None]:
    def attack(folder: Path) -> None:
        tensors = load_file(folder / ROWS_FILE)
        tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith("padding.")}
        change(tensors)
        save_file(tensors, folder / ROWS_FILE)
        list_again(folder, ROWS_FILE)

    return attack


def tombstones(tables: list[str | None], ids: list[int]) -> Callable[[Path], None]:
    def attack(folder: Path) -> None:
        columns = pa.table({"table": pa.array(tables, pa.string()), "id": pa.array(ids, pa.int64())})
        with pa.OSFile(str(folder / TOMBSTONES_FILE), "wb") as file, pa.ipc.new_file(file, columns.schema) as writer:
            writer.write_table(columns)
        list_again(folder, TOMBSTONES_FILE)

    return attack


def truncate(folder: Path) -> None:
    os.truncate(folder / ROWS_FILE, 100)


def alter(folder: Path) -> None:
    content = bytearray((folder / ROWS_FILE).read_bytes())
    content[-1] ^= 1
    (folder / ROWS_FILE).write_bytes(content)


def link(folder: Path) -> None:
    (folder / ROWS_FILE).rename(folder.parent / "moved")
    (folder / ROWS_FILE).symlink_to(folder.parent / "moved")


def leave(folder: Path) -> None:
    edit(folder, lambda found: found["files"].update({"../outside": found["files"].pop(ROWS_FILE)}))


def nameless(folder: Path) -> None:
    edit(folder, lambda found: found["files"].update({"": found["files"][ROWS_FILE]}))


def noise(folder: Path) -> None:
    (folder / TOMBSTONES_FILE).write_bytes(random.Random(0).randbytes(500))
    list_again(folder, TOMBSTONES_FILE)


C1 = "bags.tables.C1.weight"
ATTACKS: dict[str, tuple[Callable[[Path], None], str]] = {
    "truncated": (truncate, "rows.safetensors has 100 bytes instead of .* truncated"),
    "altered": (alter, "rows.safetensors was changed"),
    "missing": (lambda folder: (folder / ROWS_FILE).unlink(), "rows.safetensors is missing"),
    "link": (link, "rows.safetensors is a link"),
    "outside": (leave, "names a file outside its folder"),
    "without a name": (nameless, "names a file outside its folder"),
    "retyped": (
        lambda folder: (folder / DELTA_FILE).write_text((folder / DELTA_FILE).read_text().replace("20", "21")),
        "delta.json was changed after it was written",
    ),
    "newer": (lambda folder: edit(folder, lambda found: found.update(version=2)), "version 2, this Holdall reads"),
    "unlisted": (lambda folder: edit(folder, lambda found: found["files"].pop(ROWS_FILE)), "does not list rows"),
    "without schema": (lambda folder: edit(folder, lambda found: found["files"].pop("schema.json")), "does not list"),
    "wrong base": (lambda folder: edit(folder, lambda found: found.update(base="0" * 64)), "made for another bundle"),
    "other model": (
        lambda folder: edit(folder, lambda found: found["result"]["model"].update(dim=8)),
        "leads to a bundle with other model",
    ),
    "other tables": (
        lambda folder: edit(folder, lambda found: found["result"]["tables"].pop("C1")),
        "leads to a bundle with other tables",
    ),
    "other files": (
        lambda folder: edit(folder, lambda found: found["result"]["files"].pop("tables.safetensors")),
        "leads to a bundle with other files",
    ),
    "other dense part": (
        lambda folder: edit(folder, lambda found: found["result"]["files"]["model.safetensors"].update(sha256="0")),
        "leads to a bundle with another model.safetensors",
    ),
    "row out of range": (rows(lambda found: found[f"index.{C1}"].add_(100)), "names row 140, and there are 5"),
    "negative row": (rows(lambda found: found[f"index.{C1}"].sub_(4)), "names row -1"),
    "unsorted rows": (rows(lambda found: found.update({f"index.{C1}": torch.tensor([5, 3, 40])})), "ascending order"),
    "repeated rows": (rows(lambda found: found.update({f"index.{C1}": torch.tensor([3, 3, 40])})), "or twice"),
    "index of floats": (rows(lambda found: found.update({f"index.{C1}": torch.rand(3)})), "index of torch.float32"),
    "index of a matrix": (
        rows(lambda found: found.update({f"index.{C1}": torch.zeros(3, 1, dtype=torch.int32)})),
        "index of torch.int32",
    ),
    "no index": (rows(lambda found: found.__delitem__(f"index.{C1}")), "rows without their index"),
    "no rows": (rows(lambda found: found.__delitem__(f"rows.{C1}")), "without its rows"),
    "other type": (rows(lambda found: found.update({f"rows.{C1}": torch.zeros(3, 4).double()})), "in the place of"),
    "other width": (rows(lambda found: found.update({f"rows.{C1}": torch.zeros(3, 5)})), "in the place of"),
    "other number": (rows(lambda found: found.update({f"rows.{C1}": torch.zeros(2, 4)})), "in the place of"),
    "whole of another shape": (
        rows(lambda found: found.update({"whole.bags.tables.C2.weight": torch.zeros(9, 4)})),
        "in the place of",
    ),
    "twice": (rows(lambda found: found.update({f"whole.{C1}": torch.zeros(51, 4)})), "twice"),
    "unknown tensor": (rows(lambda found: found.update({"whole.os.system": torch.zeros(1)})), "none of the base"),
    "unknown prefix": (rows(lambda found: found.update({"x": torch.zeros(1)})), "none of the base"),
    "tombstones of noise": (noise, "tombstones.arrow cannot be read"),
    "tombstone of no table": (tombstones(["X"], [1]), "names a table 'X'"),
    "tombstone out of range": (tombstones(["C3"], [10**6]), "names row 1000000"),
    "tombstones unsorted": (tombstones(["C3", "C3"], [7, 3]), "ascending order"),
    "tombstone without a table": (tombstones([None], [3]), "empty places"),
    "tombstone of the unseen row": (tombstones(["C2"], [7]), "withdraws its unseen row"),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_a_changed_delta_is_refused(name: str, base: Bundle, sound: Path, tmp_path: Path) -> None:
    attack, sentence = ATTACKS[name]
    folder = shutil.copytree(sound, tmp_path / "delta")
    attack(folder)
    with pytest.raises(DataError, match=sentence):
        apply_deltas(base, [open_delta(folder)])


def test_a_merge_that_is_not_what_the_delta_says_is_refused(base: Bundle, sound: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(sound, tmp_path / "delta")
    rows(lambda found: found[f"rows.{C1}"].add_(1.0))(folder)
    with pytest.raises(DataError, match=r"tables.safetensors was changed"):
        merge_deltas(base, [open_delta(folder)], tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_what_is_no_delta_is_refused(base: Bundle, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no delta"):
        open_delta(tmp_path / "nothing")
    with pytest.raises(DataError, match=r"delta.json does not exist"):
        open_delta(base.path)


def test_deltas_can_be_applied_one_after_the_other(base: Bundle, sound: Path) -> None:
    updated = apply_deltas(base, [open_delta(sound)])
    assert isinstance(updated, UpdatedBundle)
    assert apply_deltas(base, []) is base
    with pytest.raises(DataError, match="was made for another bundle"):
        apply_deltas(updated, [open_delta(sound)])
