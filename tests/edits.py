"""Edits of artifacts: those that a writer could have made, with new hashes, and damage, without."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from holdall.common.files import HASH_KEY, write_json
from holdall.data.identity import with_files
from holdall.data.schema import Schema


def edit_json(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change a JSON document and give it the hash of its new content, if it had one."""
    document = json.loads(path.read_text(encoding="utf-8"))
    change(document)
    write_json(path, document, hashed=HASH_KEY in document)


def list_again(folder: Path) -> None:
    """Give the files beside the splits of a data folder the hashes of their new content."""
    with_files(Schema.load(folder), folder).save(folder)


def flip_bit(path: Path, place: float = 0.5) -> None:
    """Change one bit of a file, at a share of its length."""
    content = bytearray(path.read_bytes())
    content[int(place * (len(content) - 1))] ^= 1
    path.write_bytes(content)


def swap(first: Path, second: Path) -> None:
    """Exchange two files."""
    between = first.with_name(first.name + ".swapped")
    first.rename(between)
    second.rename(first)
    between.rename(second)
