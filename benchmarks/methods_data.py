"""Prepared folders of the comparison of table methods, and one archive of them for a machine without the raw files."""

from __future__ import annotations

import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.accuracy import Work
from holdall.common.errors import HoldallError
from holdall.data.schema import SCHEMA_FILE
from holdall.data.synthetic import preset, write_prepared

PLANTED = "planted"
PLANTED_ROWS = 130_000


def find_folders(names: Sequence[str], work: Work, prepared: Path | None, source: Path) -> dict[str, Path]:
    """The prepared folder of every set; sets that are nowhere are left out, and said so."""
    own = work.folder / "data"
    if prepared is not None and prepared.is_file():
        unpack(prepared, own)
        prepared = own
    found: dict[str, Path] = {}
    for name in names:
        if prepared is not None and (prepared / name / SCHEMA_FILE).exists():
            found[name] = prepared / name
        elif name == PLANTED:
            found[name] = own / name
            if not (own / name / SCHEMA_FILE).exists():
                write_prepared(preset("criteo-kaggle", scale=0.01, rows=PLANTED_ROWS), own / name, valid=0.1, test=0.2)
        else:
            try:
                found[name] = work.prepared(name, source)
            except HoldallError as error:
                print(f"left out: {error}")
    return found


def pack(folders: Mapping[str, Path], archive: Path) -> None:
    """Write the files that training and scoring read, without the maps of ids and the ranking cases."""
    with tarfile.open(archive, "w:xz") as file:
        for name, folder in folders.items():
            for path in sorted(folder.iterdir()):
                if path.is_file() and not path.name.startswith(("ranking-", "bad_rows")):
                    file.add(path, f"{name}/{path.name}")


def unpack(archive: Path, folder: Path) -> None:
    """Unpack an archive of `pack`, once."""
    with tarfile.open(archive, "r:xz") as file:
        names = file.getnames()
        if all((folder / name).exists() for name in names):
            return
        file.extractall(folder, filter="data")
