"""Output folders: written whole or not at all, and replaced without ever losing the old one.

    with output_folder(out, DATA_SET, overwrite=True, inputs=files) as folder:
        ...                                   # files go to `<out>.partial`

`--overwrite` replaces only a folder of the same kind, which its marker file tells (`schema.json`, `run.json`). The new
folder is completed and synced first, then the old one is renamed to `<out>.replaced`, the new one takes the name, and
the old one is removed. A kill leaves the old or the new one whole; the next start cleans up. Only folders with our own
temporary mark are cleaned up: other ones of these names are refused.

A folder that is written in place is renamed first and removed later: `Output.in_place`, `training/run_folder.py`.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from holdall.common.errors import ConfigError, HoldallError
from holdall.common.files import PARTIAL, fsync_file, write_json
from holdall.common.folder_lock import locked

REPLACED = ".replaced"
"""Suffix of a folder that is about to be removed, when the one that replaces it is complete."""
MARK = ".holdall-temporary"
"""File in a folder that we may remove: it says what for."""
MARK_FORMAT = "holdall-temporary"
ARTIFACTS = ("schema.json", "run.json", "bundle.json", "delta.json", "export.json", "current.json")
"""Files that tell a data set, a run, a bundle, a delta, an export or a published folder: never removed with the folder
around it."""

Role = Literal["partial", "started", "replaced", "removed"]
"""A mark's reason: being written, begun in place, set aside, or being removed."""


@dataclass(frozen=True)
class FolderKind:
    """Kind of an output folder, and the file that tells it."""

    name: str
    marker: str
    format: str
    without: tuple[str, ...] = ()
    """Files that make it another kind: a run and a bundle have the schema of their data set, too."""
    parts: tuple[str, ...] = ()
    """Folders in it that are data sets or runs of their own."""

    def matches(self, folder: Path) -> bool:
        """Whether a folder is of this kind, of whatever version."""
        if any(os.path.lexists(folder / name) for name in self.without):
            return False
        return _format(folder / self.marker) == self.format


class Output:
    """Output path that this process has locked; `target` is the path without links."""

    def __init__(self, path: Path, kind: FolderKind, *, overwrite: bool = False):
        self.path, self.kind, self.overwrite = path, kind, overwrite
        self.target = Path(os.path.realpath(path))
        self.partial = self.target.with_name(self.target.name + PARTIAL)
        self.replaced = self.target.with_name(self.target.name + REPLACED)

    def recover(self) -> None:
        """Finish what a killed process began: remove what it replaced, or give that its name back."""
        if self.overwrite:
            self.refuse_in_the_way(self.replaced)
        if self.is_unstarted():
            self.remove_unstarted()
        elif self.target.is_dir():
            clear_mark(self.target)  # it is complete, or was about to be renamed
        mark = mark_of(self.replaced, self.target.name)
        if mark is None:
            return
        if self.target.is_dir() and is_blank(self.target):
            self.remove(self.target)
        if mark != "replaced":
            self.remove(self.replaced)
        elif not self.target.exists():
            self.restore()
        elif self.is_complete():
            self.remove(self.replaced)

    def refuse_in_the_way(self, folder: Path) -> None:
        """Raise if a temporary name is taken by something that is not ours."""
        if os.path.lexists(folder) and mark_of(folder, self.target.name) is None:
            raise HoldallError(f"{folder} is in the way, and is not of Holdall: rename it, or choose another output")

    def is_complete(self) -> bool:
        """Whether the path has a folder that may take the place of the one that was set aside."""
        return self.kind.matches(self.target)

    def is_unstarted(self) -> bool:
        """Whether the path has only what a process that was killed began to write in place."""
        mark = mark_of(self.target, self.target.name)
        has_artifact = any(os.path.lexists(self.target / name) for name in ARTIFACTS)
        return mark == "removed" or (mark == "started" and not has_artifact)

    def remove_unstarted(self) -> None:
        self.remove(self.target)

    def refuse_existing(self) -> None:
        """Raise if the path exists, unless it is a folder of the same kind that may be replaced."""
        if not self.target.exists():
            return
        if not self.target.is_dir():
            raise HoldallError(f"{self.path} is a file: name a {self.kind.name} folder that does not exist yet")
        if not self.overwrite:
            raise HoldallError(
                f"the {self.kind.name} folder {self.path} exists already: choose another name or pass --overwrite"
            )
        if is_blank(self.target):
            return
        if not self.kind.matches(self.target):
            raise HoldallError(
                f"{self.path} exists and is not a {self.kind.name} folder (it has no {self.kind.marker} of one), so "
                f"--overwrite leaves it alone: move it away or choose another output"
            )
        inner = _other_artifact(self.target, self.kind.parts)
        if inner is not None:
            raise HoldallError(
                f"{self.path} has another folder of Holdall in it ({inner}), so --overwrite leaves it alone: move that "
                f"one away or choose another output"
            )

    def set_aside(self) -> None:
        """Rename the existing folder, marked as ours; nothing if there is none."""
        if self.target.exists():
            write_mark(self.target, "replaced", of=self.target.name)
            os.rename(self.target, self.replaced)
            fsync_file(self.target.parent)

    def restore(self) -> None:
        """Give the folder that was set aside its name back."""
        os.rename(self.replaced, self.target)
        clear_mark(self.target)
        fsync_file(self.target.parent)

    def publish(self) -> None:
        """Give the complete, synced partial folder its name, in the place of an older one if there is one."""
        self.refuse_existing()
        self.set_aside()
        try:
            os.rename(self.partial, self.target)
        except BaseException:
            if self.replaced.exists():
                self.restore()
            raise
        clear_mark(self.target)
        fsync_file(self.target.parent)
        if self.replaced.exists():
            self.remove(self.replaced)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Make the folder itself, in the place of an older one, which is removed when the block ends without an error.

        Write its marker last; an error removes it and gives the older one its name back.
        """
        try:
            self.set_aside()
            self.target.mkdir()
            write_mark(self.target, "started", of=self.target.name)
            yield
        except BaseException:
            if mark_of(self.target, self.target.name) is not None:
                self.remove(self.target)
            if self.replaced.exists() and not self.target.exists():
                self.restore()
            raise
        clear_mark(self.target)
        if self.replaced.exists():
            self.remove(self.replaced)

    def remove(self, folder: Path, keep: str | None = None) -> None:
        """Remove a marked folder of this output, its mark last, so that a kill leaves one that is known to be ours.

        With `keep`, a pattern, files that match it stay, and so does the folder if there are some.
        """
        if not is_blank(folder):
            write_mark(folder, "removed", of=self.target.name)
        kept = False
        for entry in folder.iterdir():
            if keep is not None and entry.match(keep):
                kept = True
            elif entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            elif entry.name != MARK:
                entry.unlink()
        clear_mark(folder)
        if not kept:
            folder.rmdir()


@contextmanager
def output_folder(
    path: Path, kind: FolderKind, *, overwrite: bool = False, inputs: Iterable[Path] = ()
) -> Iterator[Path]:
    """Temporary folder that becomes `path` when the block ends without an error; else nothing is changed.

    Refused: a path that exists (unless `overwrite` may replace it), that has one of the `inputs` in it, or that another
    process writes to. Check the inputs before: the folder is locked, and an old one kept, while the block runs.
    """
    with _free_output(path, kind, overwrite, inputs) as output:
        if output.partial.exists():
            output.remove(output.partial)
        output.partial.mkdir()
        try:
            write_mark(output.partial, "partial", of=output.target.name)
            yield output.partial
            for file in sorted(output.partial.rglob("*")):
                fsync_file(file)
            fsync_file(output.partial)
            output.publish()
        except BaseException as error:
            if output.partial.exists():
                output.remove(output.partial)
            if isinstance(error, OSError) and error.errno == errno.ENOSPC:
                raise HoldallError(
                    f"the disk is full while writing {path}: free some space or choose another place, and run it "
                    f"again; nothing half-written was kept"
                ) from error
            raise


def check_output(path: Path, kind: FolderKind, *, overwrite: bool = False, inputs: Iterable[Path] = ()) -> None:
    """Raise if `output_folder` would refuse the path, for a command that computes for long before it writes."""
    with _free_output(path, kind, overwrite, inputs):
        pass


@contextmanager
def _free_output(path: Path, kind: FolderKind, overwrite: bool, inputs: Iterable[Path]) -> Iterator[Output]:
    """The output, locked, where it may be written."""
    refuse_place(path, inputs)
    with locked(path):
        output = Output(path, kind, overwrite=overwrite)
        output.refuse_in_the_way(output.partial)
        output.recover()
        output.refuse_existing()
        yield output


def refuse_place(path: Path, inputs: Iterable[Path] = ()) -> None:
    """Raise if an output is a broken link, the current directory, an input, or a folder around one of these."""
    refuse_broken_link(path)
    target = Path(os.path.realpath(path))
    here = Path.cwd()
    if target == here or target in here.parents:
        raise ConfigError(f"the output {path} is the current directory, or around it: name a folder of its own")
    for given in inputs:
        source = Path(os.path.realpath(given))
        if target == source or target in source.parents:
            where = "is itself an input" if target == source else f"is around the input {given}"
            raise ConfigError(f"the output {path} {where}, which is kept as it is: choose another output")


def refuse_broken_link(path: Path) -> None:
    if os.path.islink(path) and not os.path.exists(path):
        raise ConfigError(
            f"{path} is a link to {os.readlink(path)}, which does not exist: make that, or remove the link"
        )


def is_blank(folder: Path) -> bool:
    """Whether a folder has nothing in it but our marks and locks."""
    return all(entry.name.startswith(".holdall-") for entry in folder.iterdir())


def mark_of(folder: Path, of: str) -> Role | None:
    """Reason why a folder is ours to remove; None if it is not, or is marked for another name than `of`."""
    if folder.is_symlink() or not folder.is_dir():
        return None
    document = _read(folder / MARK)
    if document.get("format") == MARK_FORMAT and document.get("of") == of:
        role = document.get("role")
        return role if role in ("partial", "started", "replaced", "removed") else None
    return "partial" if is_blank(folder) else None


def write_mark(folder: Path, role: Role, *, of: str) -> None:
    """Mark a folder as one that may be removed; `of` is the name of the output."""
    write_json(folder / MARK, {"format": MARK_FORMAT, "version": 1, "of": of, "role": role})


def clear_mark(folder: Path) -> None:
    for name in (MARK, MARK + PARTIAL):
        (folder / name).unlink(missing_ok=True)


def refuse_other_file(path: Path, format: str) -> None:
    """Raise if a file cannot be made, or exists and is not a JSON document of this format; before the work for it."""
    refuse_broken_link(path)
    if path.is_dir():
        raise ConfigError(f"{path} is a folder: name the file to write")
    above = next(parent for parent in path.absolute().parents if os.path.lexists(parent))
    if not above.is_dir() or not os.access(above, os.W_OK):
        number = errno.ENOTDIR if not above.is_dir() else errno.EROFS if _is_read_only(above) else errno.EACCES
        raise OSError(number, os.strerror(number), str(path))
    if path.exists() and _format(path) != format:
        raise ConfigError(f"{path} exists and is not a {format} document, so it is kept as it is: name another file")


def _is_read_only(folder: Path) -> bool:
    """Whether a folder is on a disk that is mounted read-only; False where the system does not say."""
    return hasattr(os, "statvfs") and bool(os.statvfs(folder).f_flag & os.ST_RDONLY)


def _other_artifact(folder: Path, parts: tuple[str, ...]) -> Path | None:
    """A data set or run below a folder, if there is one beside its own parts."""
    for marker in ARTIFACTS:
        for found in folder.glob(f"*/**/{marker}"):
            if found.parent.relative_to(folder).as_posix() not in parts:
                return found.parent
    return None


def _format(path: Path) -> Any:
    return _read(path).get("format")


def _read(path: Path) -> dict[str, Any]:
    """A JSON document; an empty one if it cannot be read."""
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}
