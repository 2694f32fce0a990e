"""Output folders: whole or absent, and replaced only where that is right."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from holdall.common import output_folder as module
from holdall.common.errors import HoldallError
from holdall.common.folder_lock import locked
from holdall.common.output_folder import MARK, FolderKind, Output, output_folder, refuse_other_file
from holdall.data.schema import DATA_SET
from tests.common.killed import killed_at_each_change

DATA = FolderKind("data set", "schema.json", "holdall-data", without=("run.json",))


def write(out: Path, content: str, **options: object) -> None:
    with output_folder(out, DATA, **options) as folder:  # type: ignore[arg-type]
        (folder / "ids").mkdir()
        (folder / "ids/a.arrow").write_text(content)
        (folder / "rows.arrow").write_text(content)
        (folder / "schema.json").write_text(json.dumps({"format": "holdall-data", "version": 1, "is": content}))


def write_half(out: Path, error: Exception) -> None:
    with output_folder(out, DATA, overwrite=True) as folder:
        (folder / "half").write_text("half")
        raise error


def whole(out: Path) -> str | None:
    """Content of a folder that `write` wrote, None if there is none; fails if it is not complete."""
    if not out.exists():
        return None
    content = json.loads((out / "schema.json").read_text())["is"]
    assert (out / "rows.arrow").read_text() == content
    assert (out / "ids/a.arrow").read_text() == content
    return str(content)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_folder_is_complete_or_absent(tmp_path: Path) -> None:
    write(tmp_path / "a/out", "new")
    assert whole(tmp_path / "a/out") == "new"
    assert names(tmp_path / "a/out") == {"ids", "rows.arrow", "schema.json"}
    assert names(tmp_path / "a") == {"out"}
    with pytest.raises(ZeroDivisionError):
        write_half(tmp_path / "b/out", ZeroDivisionError())
    assert names(tmp_path) == {"a"}


def test_only_a_folder_of_the_same_kind_is_replaced(tmp_path: Path) -> None:
    out = tmp_path / "out"
    write(out, "old")
    with pytest.raises(HoldallError, match=r"the data set folder .*out exists already.*--overwrite"):
        write(out, "new")
    write(out, "new", overwrite=True)
    assert whole(out) == "new"
    assert names(tmp_path) == {"out"}
    for name, files in {
        "notes": {"letter.txt": "dear"},
        "schemas": {"schema.json": '{"format": "something else"}'},
        "damaged": {"schema.json": '{"format": "holdall-data'},
        "nested": {"schema.json": "[" * 100_000},
        "run": {"schema.json": '{"format": "holdall-data"}', "run.json": "{}"},
    }.items():
        (tmp_path / name).mkdir()
        for file, text in files.items():
            (tmp_path / name / file).write_text(text)
        with pytest.raises(HoldallError, match=r"is not a data set folder .*--overwrite leaves it alone"):
            write(tmp_path / name, "new", overwrite=True)
        assert names(tmp_path / name) == set(files)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(HoldallError, match="is a file: name a data set folder"):
        write(tmp_path / "file", "new", overwrite=True)
    assert (tmp_path / "file").read_text() == "mine"
    (tmp_path / "empty").mkdir()
    write(tmp_path / "empty", "new", overwrite=True)
    assert whole(tmp_path / "empty") == "new"


def test_a_folder_with_another_artifact_in_it_is_kept(tmp_path: Path) -> None:
    out = tmp_path / "out"
    write(out, "old")
    (out / "runs/first").mkdir(parents=True)
    (out / "runs/first/run.json").write_text("{}")
    with pytest.raises(HoldallError, match=r"has another folder of Holdall in it \(.*out/runs/first\)"):
        write(out, "new", overwrite=True)
    assert (out / "runs/first/run.json").exists()
    assert whole(out) == "old"


@pytest.mark.parametrize("overwrite", [True, False])
def test_places_that_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overwrite: bool) -> None:
    data = tmp_path / "project/data"
    write(data, "old")
    monkeypatch.chdir(tmp_path / "project/data/ids")
    for out in (Path("."), Path(".."), Path("../.."), data):
        with pytest.raises(HoldallError, match="is the current directory, or around it"):
            write(out, "new", overwrite=overwrite)
    monkeypatch.chdir("/")
    with pytest.raises(HoldallError, match="is itself an input"):
        write(data, "new", overwrite=overwrite, inputs=[data])
    (tmp_path / "link").symlink_to(data)
    with pytest.raises(HoldallError, match=r"is around the input .*rows\.arrow"):
        write(tmp_path / "link", "new", overwrite=overwrite, inputs=[data / "rows.arrow"])
    (tmp_path / "broken").symlink_to(tmp_path / "nowhere")
    with pytest.raises(HoldallError, match=r"is a link to .*nowhere, which does not exist"):
        write(tmp_path / "broken", "new", overwrite=overwrite)
    assert whole(data) == "old"
    assert names(tmp_path) == {"project", "link", "broken"}


def test_a_link_stays_and_its_folder_is_replaced(tmp_path: Path) -> None:
    write(tmp_path / "disk/data", "old")
    (tmp_path / "link").symlink_to(tmp_path / "disk/data")
    write(tmp_path / "link", "new", overwrite=True)
    assert (tmp_path / "link").is_symlink()
    assert whole(tmp_path / "disk/data") == "new"
    assert names(tmp_path / "disk") == {"data"}


@pytest.mark.parametrize("suffix", [".partial", ".replaced"])
@pytest.mark.parametrize("kind", ["folder", "file", "link", "data set", "ours of another name"])
def test_temporary_names_of_others_are_kept(tmp_path: Path, suffix: str, kind: str) -> None:
    out, other = tmp_path / "out", tmp_path / f"out{suffix}"
    write(out, "old")
    if kind == "folder":
        other.mkdir()
        (other / "letter.txt").write_text("dear")
    elif kind == "file":
        other.write_text("dear")
    elif kind == "link":
        (tmp_path / "mine").mkdir()
        other.symlink_to("mine")
    else:
        write(other, "mine")
        if kind == "ours of another name":
            module.write_mark(other, "partial", of="other")
    before = names(other) if other.is_dir() else other.read_text()
    with pytest.raises(HoldallError, match=rf"out\{suffix} is in the way"):
        write(out, "new", overwrite=True)
    assert whole(out) == "old"
    assert (names(other) if other.is_dir() else other.read_text()) == before


def test_a_kill_at_any_moment_leaves_the_old_or_the_new_folder(tmp_path: Path) -> None:
    """After each kill the next start of any kind succeeds, and leaves nothing behind."""
    out = tmp_path / "out"

    def work() -> None:
        write(out, "new", overwrite=True)

    found = set()
    for _ in killed_at_each_change(work, before=lambda: write(out, "old", overwrite=True)):
        found.add(whole(out))
        if not out.exists():
            assert whole(tmp_path / "out.replaced") == "old"
        with pytest.raises(HoldallError, match="exists already"):  # also where it first gets its name back
            write(out, "later")
        assert whole(out) in ("old", "new")
        write(out, "later", overwrite=True)
        assert whole(out) == "later"
        assert names(tmp_path) == {"out"}
        assert MARK not in names(out)
    assert found == {"old", "new", None}


def test_a_folder_written_in_place_is_replaced_without_loss(tmp_path: Path) -> None:
    out = tmp_path / "out"

    def write_in_place(content: str, error: type[BaseException] | None = None) -> None:
        with locked(out):
            output = Output(out, DATA, overwrite=True)
            output.recover()
            output.refuse_existing()
            with output.in_place():
                (out / "ids").mkdir()
                (out / "ids/a.arrow").write_text(content)
                (out / "rows.arrow").write_text(content)
                if error is not None:
                    raise error
                (out / "schema.json").write_text(json.dumps({"format": "holdall-data", "is": content}))

    write_in_place("first")
    with pytest.raises(KeyboardInterrupt):
        write_in_place("second", KeyboardInterrupt)
    assert whole(out) == "first"
    for number in killed_at_each_change(lambda: write_in_place("new"), before=lambda: write_in_place("old")):
        both = [folder for folder in (out, tmp_path / "out.replaced") if (folder / "schema.json").exists()]
        assert both, number
        with locked(out):
            Output(out, DATA).recover()
        assert whole(out) in ("old", "new")
        assert names(tmp_path) == {"out"}


def test_two_writers_at_once_change_nothing_of_each_other(tmp_path: Path) -> None:
    with output_folder(tmp_path / "out", DATA) as folder:
        (folder / "schema.json").write_text('{"format": "holdall-data"}')
        for overwrite in (True, False):
            with pytest.raises(HoldallError, match=rf"process {os.getpid()} on .* is writing to"):
                write(tmp_path / "out", "other", overwrite=overwrite)
        assert names(folder) == {"schema.json", MARK}
    assert names(tmp_path / "out") == {"schema.json"}


def test_a_full_disk_keeps_the_old_folder(tmp_path: Path) -> None:
    write(tmp_path / "out", "old")
    with pytest.raises(HoldallError, match=r"the disk is full while writing .*out"):
        write_half(tmp_path / "out", OSError(errno.ENOSPC, "No space left on device"))
    assert whole(tmp_path / "out") == "old"
    assert names(tmp_path) == {"out"}


def test_a_file_of_another_format_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    refuse_other_file(file, "holdall-plan")
    file.write_text('{"format": "holdall-plan"}')
    refuse_other_file(file, "holdall-plan")
    for text in ('{"format": "holdall-data"}', '{"name": "package"}', "[]", "not JSON", ""):
        file.write_text(text)
        with pytest.raises(HoldallError, match="exists and is not a holdall-plan document"):
            refuse_other_file(file, "holdall-plan")
    with pytest.raises(HoldallError, match="is a folder"):
        refuse_other_file(tmp_path, "holdall-plan")


def test_a_file_in_the_place_of_a_folder_is_named_as_such(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for overwrite in (False, True):
        with pytest.raises(HoldallError, match="file is a file: name a data set folder that does not exist yet"):
            Output(tmp_path / "file", DATA_SET, overwrite=overwrite).refuse_existing()
    with pytest.raises(NotADirectoryError) as caught, locked(tmp_path / "file" / "below" / "out"):
        pass
    assert caught.value.filename == str(tmp_path / "file" / "below" / "out")


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC])
def test_errors_of_the_lock_file_name_the_output(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(number, os.strerror(number), "the lock file")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(OSError, match=os.strerror(number)) as caught, locked(tmp_path / "out"):
        pass
    assert (caught.value.errno, caught.value.filename) == (number, str(tmp_path / "out"))
