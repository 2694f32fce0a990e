"""Reader of a published folder: the bundle that is current in it, with the deltas that are applied to it.

`Published.current` is cheap enough to be called every second. The writer is `publish`; the format is in
docs/formats.md.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from holdall.common.decode import Count
from holdall.common.errors import DataError
from holdall.common.files import read_json
from holdall.serving.bundle import Bundle, open_bundle
from holdall.serving.delta import apply_deltas, open_delta

FORMAT = "holdall-published"
VERSION = 1
CURRENT_FILE = "current.json"
COPY_NAME = re.compile(r"(\d{6,})-(bundle|delta)-[0-9a-f]{12}")
"""Names of the folders in a published folder: number, kind and fingerprint."""
_CURE = "copy the folder again, or publish a bundle to a new one"


@dataclass(frozen=True, kw_only=True)
class Target:
    """Model in a published folder: a bundle, and the deltas that are applied to it, in order."""

    bundle: str
    deltas: tuple[str, ...] = ()
    fingerprint: str
    """That of the bundle with its deltas."""
    step: Count | None
    ids_fingerprint: str | None
    published: str
    """UTC time."""

    @property
    def names(self) -> tuple[str, ...]:
        """Folders that it needs."""
        return (self.bundle, *self.deltas)


@dataclass(frozen=True, kw_only=True)
class PublishedRecord(Target):
    """Content of `current.json`."""

    kind: Literal["published"]
    history: tuple[Target, ...] = ()
    """Targets before this one, the newest first."""

    @property
    def targets(self) -> tuple[Target, ...]:
        """The current target and those before it."""
        own = Target(**{field.name: getattr(self, field.name) for field in fields(Target)})
        return (own, *self.history)


class Published:
    """Reader of a published folder.

    published = Published("served")
    target = published.current()           # every second
    bundle = published.open(target)        # when it is another one than before
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self._seen: tuple[int, ...] = ()
        self._targets: tuple[Target, ...] = ()

    def current(self) -> Target:
        """The target that is served; `current.json` is read only if it was replaced since the last call."""
        return self.targets()[0]

    def targets(self) -> tuple[Target, ...]:
        """The current target and those before it that one can go back to, the newest first."""
        file = self.folder / CURRENT_FILE
        try:
            found = file.stat()
        except OSError as error:
            raise DataError(
                f"{self.folder} is not a published folder, since {CURRENT_FILE} cannot be read ({error.strerror}): "
                f"make one with `holdall publish BUNDLE --to {self.folder}`"
            ) from None
        seen = (found.st_ino, found.st_dev, found.st_size, found.st_mtime_ns)
        if seen != self._seen:
            targets = read_json(file, PublishedRecord, format=FORMAT, version=VERSION, cure=_CURE).targets
            for name in (name for target in targets for name in target.names):
                if COPY_NAME.fullmatch(name) is None:
                    raise DataError(f"{file} names a folder that is not its own ({name[:60]!r}): {_CURE}")
            self._seen, self._targets = seen, targets
        return self._targets

    def open(self, target: Target | None = None, *, verify: bool = False) -> Bundle:
        """The bundle of a target, or of the current one, with its deltas; `verify` as for `open_bundle`."""
        target = self.current() if target is None else target
        for name in target.names:
            if (self.folder / name).is_symlink():
                raise DataError(f"{self.folder / name} is a link, which a published folder does not have: {_CURE}")
        bundle = open_bundle(self.folder / target.bundle, verify=verify)
        bundle = apply_deltas(bundle, [open_delta(self.folder / name, verify=verify) for name in target.deltas])
        if bundle.fingerprint != target.fingerprint:
            raise DataError(f"{self.folder / target.names[-1]} is another one than {CURRENT_FILE} says: {_CURE}")
        return bundle


def is_published(path: Path) -> bool:
    """Whether a folder says that it is a published folder."""
    return (path / CURRENT_FILE).exists()


def open_current(path: str | Path, *, verify: bool = False) -> Bundle:
    """The bundle at `path`, or the current one of a published folder; `verify` as for `open_bundle`."""
    if is_published(Path(path)):
        return Published(path).open(verify=verify)
    return open_bundle(path, verify=verify)


def describe_published(path: Path) -> dict[str, Any]:
    """A JSON-able description of a published folder."""
    first, *others = Published(path).targets()
    return {"kind": "published", "path": str(path), **asdict(first), "history": [asdict(other) for other in others]}
