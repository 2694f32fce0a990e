"""Folder of a run's checkpoints: finding the complete ones and removing old ones.

step-00001000/  step-00002000/       full checkpoints
hot-00002100/                        hot rows of a later step, loaded on top of a full one (see `hot_rows`)
....partial/                         a save in progress, or one that was killed
....replaced/                        a complete one that is about to be replaced by a new one of its step
"""

from __future__ import annotations

import os
import re
import shutil
import warnings
from pathlib import Path

from holdall.checkpoint.manifest import MANIFEST, read_manifest, restore_advice
from holdall.checkpoint.read_lock import removing
from holdall.common.errors import CheckpointError
from holdall.common.files import PARTIAL

REPLACED = ".replaced"
STEP, HOT = "step", "hot"


def checkpoint_name(kind: str, step: int) -> str:
    return f"{kind}-{step:08d}"


def latest(folder: Path) -> Path | None:
    """The complete checkpoint of the highest step in `folder`, or None. A save that was killed is not one."""
    found = complete(Path(folder))
    return found[-1][1] if found else None


def newest(folder: Path) -> Path | None:
    """The same, but one of a higher step without its manifest is refused: an older one would be another model."""
    found = _scan(Path(folder), STEP)
    if not found:
        return None
    path = found[-1][2]
    if not (path / MANIFEST).is_file() and path.exists():
        raise CheckpointError(f"{path} has no {MANIFEST}, so it is damaged: {restore_advice(path)}")
    return latest(folder)


def complete(folder: Path, kind: str = STEP) -> list[tuple[int, Path]]:
    """`(step, path)` of every complete checkpoint, oldest first; a replaced one before the one that replaces it."""
    found = []
    for step, _, path in _scan(folder, kind):
        if (path / MANIFEST).is_file():
            found.append((step, path))
        elif path.exists():  # else a run has removed it just now
            warnings.warn(f"{path} has no {MANIFEST} and is skipped: it is damaged, delete it", stacklevel=3)
    return found


def _scan(folder: Path, kind: str) -> list[tuple[int, bool, Path]]:
    """`(step, is_plain, path)` of every folder with the name of a checkpoint, in the order of `complete`."""
    found = []
    for path in folder.glob(f"{kind}-*"):
        match = re.fullmatch(kind + r"-(\d{8,})(\.replaced)?", path.name)
        if match is not None:
            found.append((int(match.group(1)), match.group(2) is None, path))
    return sorted(found)


def hot_parts(folder: Path) -> list[tuple[int, int, Path]]:
    """`(base, step, path)` of every hot part, oldest first; the base is -1 if its manifest cannot be read."""
    found = []
    for step, path in complete(folder, HOT):
        try:
            base = read_manifest(path).base
        except CheckpointError:
            base = None
        found.append((-1 if base is None else base, step, path))
    return found


def set_aside(path: Path) -> None:
    """Rename an earlier checkpoint of this step, so that at every moment one of them is complete."""
    if path.exists():
        aside = path.with_name(path.name + REPLACED)
        shutil.rmtree(aside, ignore_errors=True)
        os.rename(path, aside)


def prune(folder: Path, newest: Path, step: int, keep: int) -> None:
    """Remove all but `keep` full checkpoints after `newest` was written, with the hot parts of those removed.

    Checkpoints of later steps are removed first: they are damaged, else the run would have resumed from them. Hot parts
    of later steps are removed too.
    """
    others = [(number, path) for number, path in complete(folder) if path != newest]
    replaced = [path for number, path in others if number == step]
    rest = sorted((number < step, number, path) for number, path in others if number != step)
    removed = rest[: max(0, len(rest) - (keep - 1))]
    for path in replaced + [path for _, _, path in removed]:
        _remove(path)
    kept = {number for _, number, _ in rest[len(removed) :] if number < step}
    for base, hot_step, path in hot_parts(folder):
        if base not in kept or hot_step > step:
            _remove(path)


def prune_hot(folder: Path, newest: Path, base: int) -> None:
    """Remove other hot parts of the same base after `newest` was written, and those whose base was removed."""
    bases = {step for step, _ in complete(folder)}
    for other, _, path in hot_parts(folder):
        if path != newest and (other == base or other not in bases):
            _remove(path)


def remove_unfinished(folder: Path, kind: str) -> None:
    for path in folder.glob(f"{kind}-*{PARTIAL}"):
        shutil.rmtree(path, ignore_errors=True)


def _remove(path: Path) -> None:
    """Remove a checkpoint, unless it is being read: then a later save removes it."""
    with removing(path) as is_free:
        if not is_free:
            return
        partial = path.with_name(path.name + PARTIAL)  # a kill halfway leaves nothing that looks complete
        shutil.rmtree(partial, ignore_errors=True)
        os.rename(path, partial)
        shutil.rmtree(partial, ignore_errors=True)
