"""The folder of a run's checkpoints: which of them are complete, and which may go.

step-00001000/  step-00002000/       full checkpoints
hot-00002100/                        hot rows of a later step, to be laid over a full one (see `hot_part`)
....partial/                         what a save that was killed left, or one that is under way
....replaced/                        a complete one in the moment before a new one of its step takes its place
"""

from __future__ import annotations

import os
import re
import shutil
import warnings
from pathlib import Path

from holdall.checkpoint.manifest import MANIFEST, read_manifest
from holdall.common.errors import CheckpointError
from holdall.common.files import PARTIAL

REPLACED = ".replaced"
STEP, HOT = "step", "hot"


def checkpoint_name(kind: str, step: int) -> str:
    return f"{kind}-{step:08d}"


def latest(folder: Path) -> Path | None:
    """The complete checkpoint of the highest step in `folder`, or None. What a killed save left is not one."""
    found = complete(Path(folder))
    return found[-1][1] if found else None


def complete(folder: Path, kind: str = STEP) -> list[tuple[int, Path]]:
    """`(step, path)` of every complete checkpoint, oldest first; a replaced one before the one that replaces it."""
    found = []
    for path in folder.glob(f"{kind}-*"):
        match = re.fullmatch(kind + r"-(\d{8,})(\.replaced)?", path.name)
        if match is None:
            continue
        if (path / MANIFEST).is_file():
            found.append((int(match.group(1)), match.group(2) is None, path))
        else:
            warnings.warn(f"{path} has no {MANIFEST} and is passed over: it is damaged, delete it", stacklevel=3)
    return [(step, path) for step, _, path in sorted(found)]


def hot_ones(folder: Path) -> list[tuple[int, int, Path]]:
    """`(base, step, path)` of every hot part, oldest first; of one that cannot be read the base is -1."""
    found = []
    for step, path in complete(folder, HOT):
        try:
            base = read_manifest(path).base
        except CheckpointError:
            base = None
        found.append((-1 if base is None else base, step, path))
    return found


def set_aside(path: Path) -> None:
    """Free the name of an earlier checkpoint of this step without there being a moment at which none is complete."""
    if path.exists():
        aside = path.with_name(path.name + REPLACED)
        shutil.rmtree(aside, ignore_errors=True)
        os.rename(path, aside)


def prune(folder: Path, newest: Path, step: int, keep: int) -> None:
    """After `newest` was written: leave `keep` full checkpoints, and of hot parts the newest of each.

    Checkpoints of later steps go first: they are damaged, else the run would have gone on from them. Hot parts go with
    their base, and so do those of steps that are still to come.
    """
    others = [(number, path) for number, path in complete(folder) if path != newest]
    replaced = [path for number, path in others if number == step]
    rest = sorted((number < step, number, path) for number, path in others if number != step)
    doomed = rest[: max(0, len(rest) - (keep - 1))]
    for path in replaced + [path for _, _, path in doomed]:
        _remove(path)
    kept = {number for _, number, _ in rest[len(doomed) :] if number < step}
    for base, hot_step, path in hot_ones(folder):
        if base not in kept or hot_step > step:
            _remove(path)


def prune_hot(folder: Path, newest: Path, base: int) -> None:
    """After the hot part `newest` was written: remove the others of its base, and those whose base has gone."""
    bases = {step for step, _ in complete(folder)}
    for other, _, path in hot_ones(folder):
        if path != newest and (other == base or other not in bases):
            _remove(path)


def remove_unfinished(folder: Path, kind: str) -> None:
    for path in folder.glob(f"{kind}-*{PARTIAL}"):
        shutil.rmtree(path, ignore_errors=True)


def _remove(path: Path) -> None:
    doomed = path.with_name(path.name + PARTIAL)  # so that a kill halfway leaves nothing that looks complete
    shutil.rmtree(doomed, ignore_errors=True)
    os.rename(path, doomed)
    shutil.rmtree(doomed, ignore_errors=True)
