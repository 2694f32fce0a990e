"""Checkpoints: bit-exact round trips, memory, pruning, every kind of damage, and a kill at every step of a save."""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from holdall import checkpoint
from holdall.common.errors import CheckpointError, ConfigError
from holdall.common.files import write_json
from tests.edits import edit_json

STATE = {"config": {"lr": 0.1}, "epoch": 2, "position": [3, 1 << 40], "best": None}


def some_tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "table": torch.randn(100, 4, generator=generator),
        "sums": torch.rand(100, generator=generator),
        "bias": torch.randn(3, generator=generator),
        "rng": generator.get_state()[:64].clone(),
    }


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    """Bit for bit, so that NaN equals NaN and -0.0 is not 0.0."""
    return list(left) == list(right) and all(
        left[name].dtype == right[name].dtype
        and left[name].shape == right[name].shape
        and torch.equal(as_bytes(left[name]), as_bytes(right[name]))
        for name in left
    )


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


class TestRoundTrip:
    @pytest.mark.parametrize("dtype", [*checkpoint.DTYPES.values()], ids=[*checkpoint.DTYPES])
    def test_every_type_bit_exactly(self, tmp_path: Path, dtype: torch.dtype):
        raw = torch.randint(0, 2 if dtype == torch.bool else 256, (24, dtype.itemsize), dtype=torch.uint8)
        tensors = {"x": raw.view(dtype), "empty": torch.empty(0, 5, dtype=dtype), "scalar": raw[0].view(dtype)[0]}
        path = checkpoint.save(tmp_path, 7, tensors, STATE, shard_bytes=10)
        loaded, state = checkpoint.load(path)
        assert same(loaded, tensors)
        assert state == STATE

    @pytest.mark.parametrize("shard_bytes", [12, 16, 17, 200, 1600, 1 << 30])
    def test_any_shard_size(self, tmp_path: Path, shard_bytes: int):
        tensors = some_tensors()
        path = checkpoint.save(tmp_path, 1, tensors, STATE, shard_bytes=shard_bytes)
        assert same(checkpoint.load(path)[0], tensors)
        into = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
        assert checkpoint.load_into(path, into) == STATE
        assert same(into, tensors)

    @settings(derandomize=True, deadline=None, max_examples=40)
    @given(
        shapes=st.lists(st.lists(st.integers(0, 7), max_size=3), max_size=5),
        shard_bytes=st.integers(1, 300),
    )
    def test_any_shapes(self, tmp_path_factory: pytest.TempPathFactory, shapes: list[list[int]], shard_bytes: int):
        folder = tmp_path_factory.mktemp("shapes")
        tensors = {f"t{number}": torch.randn(shape) for number, shape in enumerate(shapes)}
        path = checkpoint.save(folder, 1, tensors, {}, shard_bytes=shard_bytes)
        assert same(checkpoint.load(path)[0], tensors)

    def test_a_large_tensor_is_cut_by_rows_and_small_ones_are_not(self, tmp_path: Path):
        tensors = {"small": torch.zeros(10, 4), "large": torch.arange(400.0).view(100, 4)}  # 160 and 1600 bytes
        path = checkpoint.save(tmp_path, 1, tensors, {}, shard_bytes=500)
        found = checkpoint.read(path)
        assert [(piece.start, piece.stop) for piece in found.tensors["small"].pieces] == [(0, 10)]
        assert [(p.start, p.stop) for p in found.tensors["large"].pieces] == [(0, 31), (31, 62), (62, 93), (93, 100)]
        content = [load_file(path / piece.shard)["large"] for piece in found.tensors["large"].pieces]
        assert torch.equal(torch.cat(content), tensors["large"])

    def test_views_of_one_storage_and_tensors_that_are_not_contiguous(self, tmp_path: Path):
        buffer = torch.randn(20, 6)
        weight = torch.nn.Parameter(torch.randn(3, 2))
        tensors = {
            "front": buffer[:8], "back": buffer[8:], "overlap": buffer[5:10], "again": buffer[:8],
            "turned": buffer.t(), "columns": buffer[:, 1:3], "weight": weight, "tied": weight,
        }  # fmt: skip
        for shard_bytes in (100, 1 << 30):
            path = checkpoint.save(tmp_path, 1, tensors, {}, shard_bytes=shard_bytes)
            assert same(checkpoint.load(path)[0], {name: tensor.detach() for name, tensor in tensors.items()})

    def test_loads_into_views_and_parameters(self, tmp_path: Path):
        tensors = {"table": torch.randn(6, 4), "weight": torch.randn(3)}
        path = checkpoint.save(tmp_path, 1, tensors, {}, shard_bytes=40)
        buffer = torch.zeros(4, 10)
        weight = torch.nn.Parameter(torch.zeros(3))
        checkpoint.load_into(path, {"table": buffer[:, 2:8].t(), "weight": weight})
        assert torch.equal(buffer[:, 2:8].t(), tensors["table"])
        assert buffer[:, :2].abs().sum() == buffer[:, 8:].abs().sum() == 0
        assert torch.equal(weight.detach(), tensors["weight"])

    def test_random_state_continues(self, tmp_path: Path):
        generator = torch.Generator().manual_seed(5)
        torch.rand(3, generator=generator)
        path = checkpoint.save(tmp_path, 1, {"rng": generator.get_state()}, {})
        expected = torch.rand(4, generator=generator)
        generator.set_state(checkpoint.load(path)[0]["rng"])
        assert torch.equal(torch.rand(4, generator=generator), expected)

    def test_prefix_reads_a_part_and_only_its_shards(self, tmp_path: Path):
        tensors = {"model.w": torch.ones(4), "optimizer.w": torch.zeros(4)}
        path = checkpoint.save(tmp_path, 1, tensors, STATE, shard_bytes=16)
        (path / checkpoint.read(path).tensors["optimizer.w"].pieces[0].shard).unlink()
        assert same(checkpoint.load(path, prefix="model.")[0], {"model.w": torch.ones(4)})
        into = {"model.w": torch.zeros(4)}
        assert checkpoint.load_into(path, into, prefix="model.") == STATE
        assert torch.equal(into["model.w"], torch.ones(4))

    def test_contiguous_host_tensors_are_written_from_where_they_are(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        table = torch.randn(100, 4)
        written = []

        def spy(tensors: dict[str, torch.Tensor], file: Path) -> None:
            written.extend(tensor.untyped_storage().data_ptr() for tensor in tensors.values())
            save_file(tensors, file)

        monkeypatch.setattr(checkpoint.saving, "save_file", spy)
        checkpoint.save(tmp_path, 1, {"table": table, "half": table[50:]}, {}, shard_bytes=400)
        assert set(written) == {table.untyped_storage().data_ptr()}

    def test_a_state_that_json_cannot_hold_is_refused_before_writing(self, tmp_path: Path):
        with pytest.raises(TypeError):
            checkpoint.save(tmp_path, 1, {}, {"x": torch.zeros(1)})
        assert list(tmp_path.iterdir()) == []


class TestFolder:
    def test_keeps_the_newest(self, tmp_path: Path):
        for step in (1, 2, 3, 10):
            checkpoint.save(tmp_path, step, {"x": torch.full((2,), step)}, {}, keep=2)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003", "step-00000010"]
        assert checkpoint.latest(tmp_path) == tmp_path / "step-00000010"

    def test_never_removes_what_it_just_wrote(self, tmp_path: Path):
        for step in (5, 6, 2):
            path = checkpoint.save(tmp_path, step, {}, {}, keep=1)
        assert [entry.name for entry in tmp_path.iterdir()] == [path.name] == ["step-00000002"]

    def test_replaces_a_checkpoint_of_the_same_step(self, tmp_path: Path):
        checkpoint.save(tmp_path, 1, {"x": torch.zeros(2)}, {"n": 1})
        path = checkpoint.save(tmp_path, 1, {"x": torch.ones(3)}, {"n": 2})
        assert checkpoint.load(path)[1] == {"n": 2}
        assert [entry.name for entry in tmp_path.iterdir()] == ["step-00000001"]

    def test_steps_sort_as_numbers(self, tmp_path: Path):
        for step in (99_999_999, 100_000_000):
            checkpoint.save(tmp_path, step, {}, {})
        assert checkpoint.latest(tmp_path) == tmp_path / "step-100000000"

    def test_latest_passes_over_what_is_not_complete(self, tmp_path: Path):
        assert checkpoint.latest(tmp_path / "absent") is None
        path = checkpoint.save(tmp_path, 1, {}, {})
        shutil.copytree(path, tmp_path / "step-00000002.partial")
        shutil.copytree(path, tmp_path / "step-3")
        (tmp_path / "notes.txt").write_text("x")
        assert checkpoint.latest(tmp_path) == path
        (tmp_path / "step-00000009").mkdir()
        with pytest.warns(UserWarning, match="step-00000009 has no manifest"):
            assert checkpoint.latest(tmp_path) == path

    def test_next_save_clears_what_a_killed_one_left(self, tmp_path: Path):
        (tmp_path / "step-00000001.partial").mkdir()
        (tmp_path / "step-00000001.partial" / "shard-00000.safetensors").write_bytes(b"half")
        checkpoint.save(tmp_path, 2, {}, {})
        assert [entry.name for entry in tmp_path.iterdir()] == ["step-00000002"]

    @pytest.mark.parametrize("options", [{"keep": 0}, {"shard_bytes": 0}])
    def test_refuses_options_that_cannot_work(self, tmp_path: Path, options: dict[str, int]):
        with pytest.raises(ConfigError, match="keep >= 1"):
            checkpoint.save(tmp_path, 1, {}, {}, **options)


def edit_manifest(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    edit_json(path / "manifest.json", change)


def edit_without_hash(path: Path) -> None:
    text = (path / "manifest.json").read_text()
    (path / "manifest.json").write_text(text.replace('"step": ', '"step": 1'))


def alter_byte(path: Path) -> None:
    file = path / "shard-00001.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def truncate(path: Path) -> None:
    file = path / "shard-00001.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def garbage_header(path: Path) -> None:
    """A file that matches its manifest, so that only the parser can find the damage."""
    file = path / "shard-00001.safetensors"
    content = b"\xff" * file.stat().st_size
    file.write_bytes(content)
    edit_manifest(path, lambda m: m["shards"][1].update(sha256=hashlib.sha256(content).hexdigest()))


def other_content(path: Path) -> None:
    """A valid shard with the right hash and a tensor of another shape."""
    file = path / "shard-00000.safetensors"
    save_file({name: torch.zeros(1000) for name in load_file(file)}, file)
    content = file.read_bytes()
    edit_manifest(path, lambda m: m["shards"][0].update(bytes=len(content), sha256=hashlib.sha256(content).hexdigest()))


def escape(path: Path) -> None:
    """A valid shard outside the folder."""
    (path / "shard-00000.safetensors").rename(path.parent / "x")

    def change(manifest: dict[str, Any]) -> None:
        manifest["shards"][0]["file"] = "../x"
        for tensor in manifest["tensors"].values():
            for piece in tensor["pieces"]:
                if piece["shard"] == "shard-00000.safetensors":
                    piece["shard"] = "../x"

    edit_manifest(path, change)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated shard": (truncate, r"shard-00001.safetensors has \d+ bytes where its manifest says \d+.*restore it"),
    "altered byte": (alter_byte, r"shard-00001.safetensors has been altered .*restore it"),
    "missing shard": (lambda p: (p / "shard-00001.safetensors").unlink(), "shard-00001.safetensors is missing.*resto"),
    "missing manifest": (lambda p: (p / "manifest.json").unlink(), "has no manifest.json.*newest complete.*00000001"),
    "empty manifest": (lambda p: (p / "manifest.json").write_text(""), "manifest.json cannot be read as JSON"),
    "manifest not UTF-8": (lambda p: (p / "manifest.json").write_bytes(b"\xff\xfe{"), "manifest.json cannot be read"),
    "edited manifest": (edit_without_hash, "manifest.json was changed after it was written: .*restore it from a copy"),
    "other version": (lambda p: edit_manifest(p, lambda m: m.update(version=99)), "version 99, this Holdall reads"),
    "other format": (lambda p: edit_manifest(p, lambda m: m.update(format="holdall-data")), "is not a holdall-check"),
    "no shards listed": (
        lambda p: edit_manifest(p, lambda m: m.pop("shards")),
        "manifest.json: 'shards' is missing: restore it",
    ),
    "path traversal": (escape, r"'\.\./x' is not the name of a shard"),
    "garbage header": (garbage_header, "shard-00001.safetensors is not a valid safetensors file .*restore it"),
    "other content": (other_content, "shard-00000.safetensors holds .* not what its manifest says"),
    "rows left out": (lambda p: edit_manifest(p, lambda m: m["tensors"]["table"]["pieces"].pop()), "do not cover it"),
    "rows stored twice": (
        lambda p: edit_manifest(p, lambda m: m["tensors"]["table"]["pieces"][1].update(start=0, stop=43)),
        "do not follow one another",
    ),
    "rows that are not whole": (
        lambda p: edit_manifest(p, lambda m: m["tensors"]["table"]["pieces"][0].update(start=0.0)),
        r"'tensors\.table\.pieces\[0\]\.start' must be a whole number of at least 0, not 0\.0",
    ),
    "unknown type": (lambda p: edit_manifest(p, lambda m: m["tensors"]["table"].update(dtype="load")), "unknown type"),
    "too large": (
        lambda p: edit_manifest(p, lambda m: m["tensors"]["bias"].update(shape=[3, 1 << 50])),
        "larger than the shards",
    ),
}


class TestDamage:
    @pytest.mark.filterwarnings("ignore:.*has no manifest")
    @pytest.mark.parametrize("kind", DAMAGE)
    @pytest.mark.parametrize("into", [False, True])
    def test_is_refused_and_the_checkpoint_before_it_still_loads(self, tmp_path: Path, kind: str, into: bool):
        damage, message = DAMAGE[kind]
        tensors = some_tensors()
        checkpoint.save(tmp_path, 1, tensors, STATE, shard_bytes=700)
        path = checkpoint.save(tmp_path, 2, some_tensors(seed=1), {}, shard_bytes=700)
        damage(path)
        load = partial(checkpoint.load_into, tensors=some_tensors()) if into else checkpoint.load
        with pytest.raises(CheckpointError, match=f"step-00000002.*{message}"):
            load(path)
        shutil.rmtree(path)  # the cure the messages name
        found = checkpoint.latest(tmp_path)
        assert found is not None
        assert same(checkpoint.load(found)[0], tensors)

    def test_sizes_are_compared_without_verify(self, tmp_path: Path):
        path = checkpoint.save(tmp_path, 1, some_tensors(), {}, shard_bytes=700)
        truncate(path)
        with pytest.raises(CheckpointError, match="bytes where its manifest says"):
            checkpoint.load(path, verify=False)

    def test_verify_is_what_sees_an_altered_byte(self, tmp_path: Path):
        path = checkpoint.save(tmp_path, 1, some_tensors(), {}, shard_bytes=700)
        alter_byte(path)
        assert not same(checkpoint.load(path, verify=False)[0], some_tensors())

    def test_nothing_is_copied_when_a_later_shard_is_damaged(self, tmp_path: Path):
        path = checkpoint.save(tmp_path, 1, some_tensors(), {}, shard_bytes=700)
        alter_byte(path)
        into = {name: torch.zeros_like(tensor) for name, tensor in some_tensors().items()}
        with pytest.raises(CheckpointError):
            checkpoint.load_into(path, into)
        assert all(int(tensor.count_nonzero()) == 0 for tensor in into.values())

    def test_a_checkpoint_under_the_name_of_another_step(self, tmp_path: Path):
        path = checkpoint.save(tmp_path, 3, some_tensors(), {})
        copied = shutil.copytree(path, tmp_path / "step-00000009")
        with pytest.raises(CheckpointError, match=r"step-00000009 has the manifest of step 3: restore it"):
            checkpoint.read(copied)
        assert checkpoint.read(shutil.copytree(path, tmp_path / "kept")).step == 3

    def test_no_such_checkpoint(self, tmp_path: Path):
        with pytest.raises(CheckpointError, match="not a complete checkpoint"):
            checkpoint.load(tmp_path / "step-00000001")

    @pytest.mark.slow
    @settings(derandomize=True, deadline=None, max_examples=50)
    @given(data=st.data())
    def test_any_edit_of_the_manifest_loads_right_or_is_refused(
        self, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
    ):
        tensors = some_tensors()
        path = checkpoint.save(tmp_path_factory.mktemp("fuzz"), 1, tensors, STATE, shard_bytes=700)
        manifest = json.loads((path / "manifest.json").read_text())
        place: Any = manifest
        while True:
            key = data.draw(
                st.sampled_from(sorted(place)) if isinstance(place, dict) else st.integers(0, len(place) - 1)
            )
            if not isinstance(place[key], dict | list) or not place[key] or data.draw(st.booleans()):
                break
            place = place[key]
        numbers = st.integers(-2, 101) | st.integers() | st.floats()
        place[key] = data.draw(
            st.none() | st.booleans() | numbers | st.text(max_size=3) | st.lists(numbers, max_size=3) | st.just({})
        )
        write_json(path / "manifest.json", manifest, hashed=data.draw(st.booleans()))
        try:
            loaded, _ = checkpoint.load(path)
        except CheckpointError:
            return
        assert same(loaded, {name: tensors[name] for name in loaded})


class TestMismatch:
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"table": torch.zeros(101, 4)}, r"'table' has shape \[100, 4\] in the checkpoint and \[101, 4\] here"),
            ({"bias": torch.zeros(3, dtype=torch.float64)}, "'bias' is float32 in the checkpoint and torch.float64"),
            ({"extra": torch.zeros(1)}, "'extra' is missing from the checkpoint"),
            ({"bias": None}, "'bias' is in the checkpoint only"),
        ],
    )
    def test_names_what_differs(self, tmp_path: Path, change: dict[str, torch.Tensor | None], message: str):
        path = checkpoint.save(tmp_path, 1, some_tensors(), {})
        into = {name: tensor for name, tensor in {**some_tensors(3), **change}.items() if tensor is not None}
        before = {name: tensor.clone() for name, tensor in into.items()}
        with pytest.raises(CheckpointError, match=f"of another schema or model, 1 tensors differ: {message}"):
            checkpoint.load_into(path, into)
        assert same(into, before)

    def test_lists_the_first_few(self, tmp_path: Path):
        path = checkpoint.save(tmp_path, 1, {f"t{i}": torch.zeros(1) for i in range(9)}, {})
        with pytest.raises(CheckpointError, match=r"9 tensors differ: 't0' .*'t1' .*'t2' .*only; \.\.\.: use the data"):
            checkpoint.load_into(path, {})


class TestDiskFull:
    @pytest.mark.parametrize(
        ("function", "error"),
        [
            ("save_file", OSError(errno.ENOSPC, "No space left on device")),
            ("save_file", SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")),
            ("fsync_file", OSError(errno.ENOSPC, "No space left on device")),
            ("write_json", OSError(errno.ENOSPC, "No space left on device")),
        ],
    )
    def test_says_so_and_leaves_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, error: Exception
    ):
        checkpoint.save(tmp_path, 1, some_tensors(), STATE)

        def full(*arguments: object, **options: object) -> None:
            raise error

        monkeypatch.setattr(checkpoint.saving, function, full)
        with pytest.raises(CheckpointError, match=r"the disk is full while writing .*step-00000002: free some space"):
            checkpoint.save(tmp_path, 2, some_tensors(), STATE, keep=1)
        assert [entry.name for entry in tmp_path.iterdir()] == ["step-00000001"]
        assert same(checkpoint.load(tmp_path / "step-00000001")[0], some_tensors())

    def test_a_folder_that_cannot_be_made(self, tmp_path: Path):
        (tmp_path / "file").write_text("in the way")
        with pytest.raises(CheckpointError, match="cannot be written"):
            checkpoint.save(tmp_path / "file", 1, {}, {})


# Forks once a kill point from a process that has started no thread. In the child, an audit hook counts what the save
# asks of the operating system (open, mkdir, rename, remove, ...) and kills the process just before request number n.
KILLER = """
import os, shutil, sys
from pathlib import Path
import torch
from holdall import checkpoint

root, step, keep = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
base = root / "base"
checkpoint.save(base, 1, {"x": torch.zeros(50, 2)}, {"version": "old"}, shard_bytes=200)
for number in range(1000):
    folder = root / f"kill-{number:03d}"
    shutil.copytree(base, folder)
    child = os.fork()
    if child == 0:
        count = 0
        def hook(event, arguments):
            global count
            if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree", "os.scandir"):
                if count == number:
                    os._exit(9)
                count += 1
        sys.addaudithook(hook)
        checkpoint.save(folder, step, {"x": torch.ones(50, 2)}, {"version": "new"}, keep=keep, shard_bytes=200)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if code == 0:
        break
    assert code == 9, code
"""


class TestKill:
    @pytest.mark.slow
    @pytest.mark.parametrize(("step", "keep"), [(2, 1), (1, 2)], ids=["next step", "same step"])
    def test_at_any_moment_the_last_complete_one_loads(self, tmp_path: Path, step: int, keep: int):
        subprocess.run([sys.executable, "-c", KILLER, str(tmp_path), str(step), str(keep)], check=True, timeout=120)
        versions = []
        for folder in sorted(tmp_path.glob("kill-*")):
            found = checkpoint.latest(folder)
            assert found is not None, folder
            tensors, state = checkpoint.load(found)
            versions.append(state["version"])
            assert torch.equal(tensors["x"], torch.full((50, 2), float(state["version"] == "new"))), folder
            path = checkpoint.save(folder, 3, tensors, {}, keep=1)
            assert [entry.name for entry in folder.iterdir()] == [path.name], folder
        assert len(versions) > 15
        assert versions == sorted(versions, reverse=True)  # old until one moment, new from then on
        assert set(versions) == {"old", "new"}

    @pytest.mark.slow
    def test_within_a_shard(self, tmp_path: Path):
        script = """
import os, sys
from pathlib import Path
import torch
from holdall import checkpoint

def half(tensors, file):
    Path(file).write_bytes(b"half a shard")
    os._exit(9)

folder = Path(sys.argv[1])
checkpoint.save(folder, 1, {"x": torch.zeros(5)}, {})
checkpoint.saving.save_file = half
checkpoint.save(folder, 2, {"x": torch.ones(5)}, {}, keep=1)
"""
        killed = subprocess.run([sys.executable, "-c", script, str(tmp_path)], timeout=120)
        assert killed.returncode == 9
        assert (tmp_path / "step-00000002.partial" / "shard-00000.safetensors").exists()
        found = checkpoint.latest(tmp_path)
        assert found == tmp_path / "step-00000001"
        assert torch.equal(checkpoint.load(found)[0]["x"], torch.zeros(5))
