"""Published folder: the bundle that servers score with, replaced between two of their requests.

    FOLDER/
      current.json                     the bundle that is served, and the ones before it
      000007-bundle-3f9ac0d1e2b4/      complete copies, named by number and fingerprint
      000008-delta-77b1d09c5a3e/       deltas that are applied to a bundle when it is loaded

`publish` puts a complete copy in, under a new name, and then replaces `current.json` in one step, so that a kill at any
moment leaves a folder that loads. The reader is `published_folder`; the format is in docs/formats.md.
"""

from __future__ import annotations

import datetime
import os
import shutil
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from holdall.common.checked_files import FileCheck, FileHash
from holdall.common.errors import ConfigError, DataError
from holdall.common.files import PARTIAL, atomic_folder, fsync_file, write_json
from holdall.common.folder_lock import locked
from holdall.common.output_folder import refuse_broken_link, refuse_place
from holdall.serving.bundle import BUNDLE_FILE, Bundle, Record, open_bundle
from holdall.serving.delta import DELTA_FILE, Delta, apply_deltas, is_delta, open_delta
from holdall.serving.mapped_tensors import CURE
from holdall.serving.published_folder import (
    COPY_NAME,
    CURRENT_FILE,
    FORMAT,
    VERSION,
    Published,
    PublishedRecord,
    Target,
    is_published,
)

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None  # type: ignore[assignment]

KEEP = 3
"""Targets that a published folder keeps: the current one and those before it."""
_FICLONE = 0x40049409  # Linux's request for a copy that shares the blocks of a file


@dataclass(frozen=True)
class Publication:
    """Result of `publish`."""

    folder: Path
    target: Target
    before: Target | None
    """Target that was current until now; None for the first."""

    @property
    def changed(self) -> bool:
        return self.before is None or self.before.fingerprint != self.target.fingerprint


def publish(
    path: str | Path | None,
    to: str | Path,
    *,
    back: bool = False,
    allow_older: bool = False,
    allow_other_ids: bool = False,
) -> Publication:
    """Make a bundle, or a delta, the current one of a published folder; servers of that folder take it within seconds.

    One that is damaged, of an earlier step than the current one, or of other ids is refused, and the old one stays
    current; `allow_older` and `allow_other_ids` accept the last two. A delta must have been made since the one that is
    current. One that is current already changes nothing. With `back`, and no `path`, the one before the current becomes
    current again. The last three are kept.
    """
    folder = Path(to)
    if back != (path is None):
        raise ConfigError("name a bundle or a delta to publish, or pass --back to go back to the one before")
    refuse_broken_link(folder)
    with locked(folder):
        targets = _existing(folder)
        if targets:
            _remove_unnamed(folder, targets)
        if path is None:
            return _go_back(folder, targets)
        refuse_place(folder, [Path(path)])
        source = open_delta(path) if is_delta(Path(path)) else open_bundle(path)
        if targets and targets[0].fingerprint == source.fingerprint:
            return Publication(folder, targets[0], targets[0])
        if isinstance(source, Delta):
            _refuse_delta(source, folder, targets)
        if targets:
            _refuse_replacement(source, targets[0], folder, allow_older, allow_other_ids)
        _remove_unnamed(folder, targets)
        target = _kept(source, targets) or _copied(source, folder, targets)
        others = tuple(one for one in targets if one.fingerprint != target.fingerprint)
        kept = (target, *others)[:KEEP]
        _write_current(folder, kept)
        _remove_unnamed(folder, kept)
        return Publication(folder, target, targets[0] if targets else None)


def _existing(folder: Path) -> tuple[Target, ...]:
    """Targets of a folder, none in a new one; raises for a folder of something else."""
    if is_published(folder):
        return Published(folder).targets()
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file: name a folder to publish to (--to)")
    for entry in folder.iterdir() if folder.exists() else ():
        ours = COPY_NAME.match(entry.name) or entry.name.startswith((".holdall-", CURRENT_FILE))
        if not ours:
            raise ConfigError(
                f"{folder} is not a published folder (it has {entry.name} and no {CURRENT_FILE}): name a new folder to "
                f"publish to (--to)"
            )
    return ()


def _refuse_delta(delta: Delta, folder: Path, targets: tuple[Target, ...]) -> None:
    """Raise if a delta cannot be applied to what is current."""
    if not targets:
        raise ConfigError(
            f"{delta.path} is a delta, and {folder} has no bundle yet: publish the bundle it was made for"
        )
    if delta.record.base != targets[0].fingerprint:
        raise DataError(
            f"{delta.path} was made for another bundle than the one that is current in {folder}: publish deltas in "
            f"their order, or make one with `holdall release RUN --since {folder}`"
        )
    apply_deltas(Published(folder).open(targets[0]), [delta])


def _refuse_replacement(
    source: Bundle | Delta, before: Target, folder: Path, allow_older: bool, allow_other_ids: bool
) -> None:
    """Raise if a bundle, or a delta, must not take the place of the current one."""
    record = _result(source)
    ids, step = record.data_set["ids_fingerprint"], record.origin.step
    if ids != before.ids_fingerprint and not allow_other_ids:
        raise DataError(
            f"{source.path} has other ids than the bundle that is current in {folder}, so it is of another data set: "
            f"publish it to a folder of its own, or pass --allow-other-ids if its data set follows the old one"
        )
    if step is not None and before.step is not None and step < before.step and not allow_older:
        raise DataError(
            f"{source.path} is of step {step:,}, and step {before.step:,} is current in {folder}: publish a newer one, "
            f"go back with --back, or pass --allow-older"
        )


def _result(source: Bundle | Delta) -> Record:
    """Description of a bundle, or of the one that a delta leads to."""
    return source.record.result if isinstance(source, Delta) else source.record


def _go_back(folder: Path, targets: tuple[Target, ...]) -> Publication:
    """The target before the current one made current; the folder of the other stays until the next publication."""
    if len(targets) < 2:
        raise ConfigError(f"{folder} has no bundle before the current one: publish the one to go back to")
    Published(folder).open(targets[1])  # a damaged one does not become current
    _write_current(folder, targets[1:])
    return Publication(folder, targets[1], targets[0])


def _kept(source: Bundle | Delta, targets: tuple[Target, ...]) -> Target | None:
    """A target of the same content, which needs no copy."""
    for target in targets:
        if target.fingerprint == source.fingerprint:
            return replace(target, published=_now())
    return None


def _write_current(folder: Path, targets: tuple[Target, ...]) -> None:
    record = PublishedRecord(**vars(targets[0]), kind="published", history=targets[1:])
    write_json(folder / CURRENT_FILE, {"format": FORMAT, "version": VERSION, **asdict(record)}, hashed=True)
    fsync_file(folder)


def _remove_unnamed(folder: Path, targets: tuple[Target, ...]) -> None:
    """Remove copies that no target needs, and what a killed publication left."""
    named = {name for target in targets for name in target.names}
    for entry in folder.iterdir() if folder.exists() else ():
        if COPY_NAME.fullmatch(entry.name.removesuffix(PARTIAL)) and entry.name not in named and not entry.is_symlink():
            shutil.rmtree(entry)


def _copied(source: Bundle | Delta, folder: Path, targets: tuple[Target, ...]) -> Target:
    """Target of a complete copy, under a new name, of a bundle, or of a delta to the current target."""
    changes = isinstance(source, Delta)
    kind, listed_in = ("delta", DELTA_FILE) if changes else ("bundle", BUNDLE_FILE)
    numbers = [int(found[1]) for entry in folder.glob("*") if (found := COPY_NAME.match(entry.name))]
    name = f"{max(numbers, default=0) + 1:06d}-{kind}-{source.fingerprint[:12]}"
    is_new = not folder.exists()
    try:
        with atomic_folder(folder / name) as partial:
            _copy_files(source.path, partial, {**source.record.files, listed_in: None}, listed_in)
    except BaseException:
        if is_new:
            with suppress(OSError):
                folder.rmdir()
        raise
    record = _result(source)
    return Target(
        bundle=targets[0].bundle if changes else name,
        deltas=(*targets[0].deltas, name) if changes else (),
        fingerprint=source.fingerprint,
        step=record.origin.step,
        ids_fingerprint=record.data_set["ids_fingerprint"],
        published=_now(),
    )


def _copy_files(source: Path, to: Path, files: dict[str, FileHash | None], listed_in: str) -> None:
    """Copy files by name; those whose bytes were copied, and have a hash, are compared with it."""
    copied: dict[Path, FileHash] = {}
    for name, hashes in files.items():
        target = to / name
        target.parent.mkdir(exist_ok=True)
        if not _shared(source / name, target):
            shutil.copyfile(source / name, target)
            if hashes is not None:
                copied[target] = hashes
    FileCheck(copied, listed_in=listed_in, cure=CURE).result()


def _shared(source: Path, target: Path) -> bool:
    """Whether a copy could be made without its bytes: by shared blocks, or else by a hard link."""
    if fcntl is not None:
        try:
            with source.open("rb") as read, target.open("wb") as written:
                fcntl.ioctl(written.fileno(), _FICLONE, read.fileno())
            return True
        except OSError:
            target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:
        return False
    return True


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
