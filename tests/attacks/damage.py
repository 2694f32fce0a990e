"""Damages of files, each chosen by a seed: bytes, names, and the structure of JSON documents."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from holdall.common.files import HASH_KEY

Damage = Callable[[Path, Sequence[Path], random.Random], str]
"""Damages a file, given the other files of its artifact; returns a description."""


def flip(path: Path, others: Sequence[Path], chosen: random.Random) -> str:
    data = bytearray(path.read_bytes())
    places = [chosen.randrange(len(data)) for _ in range(chosen.choice((1, 1, 3)))]
    for place in places:
        data[place] ^= 1 << chosen.randrange(8)
    path.write_bytes(data)
    return f"bits flipped in bytes {places}"


def truncate(path: Path, others: Sequence[Path], chosen: random.Random) -> str:
    length = chosen.choice((chosen.randrange(path.stat().st_size), path.stat().st_size - 1))
    os.truncate(path, length)
    return f"cut to {length} bytes"


def grow(path: Path, others: Sequence[Path], chosen: random.Random) -> str:
    more = chosen.choice((b"\0", b"x" * 100, path.read_bytes(), chosen.randbytes(5000)))
    with path.open("ab") as file:
        file.write(more)
    return f"{len(more)} bytes appended"


def zero(path: Path, others: Sequence[Path], chosen: random.Random) -> str:
    data = bytearray(path.read_bytes())
    start = chosen.randrange(len(data))
    length = min(chosen.choice((1, 16, 512)), len(data) - start)
    data[start : start + length] = bytes(length)
    path.write_bytes(data)
    return f"{length} zeros at byte {start}"


def noise(path: Path, others: Sequence[Path], chosen: random.Random) -> str:
    path.write_bytes(chosen.randbytes(path.stat().st_size))
    return "bytes replaced by noise"


def empty(path: Path, others: Sequence[Path], chosen: random.Random) -> str:
    path.write_bytes(b"")
    return "emptied"


def delete(path: Path, others: Sequence[Path], chosen: random.Random) -> str:
    path.unlink()
    return "deleted"


def folder(path: Path, others: Sequence[Path], chosen: random.Random) -> str:
    path.unlink()
    path.mkdir()
    return "replaced by a folder"


def link(path: Path, others: Sequence[Path], chosen: random.Random) -> str:
    path.unlink()
    target = chosen.choice((path.name, "nowhere", "/dev/null", ".", *(os.path.relpath(o, path.parent) for o in others)))
    path.symlink_to(target)
    return f"replaced by a link to {target}"


def swap(path: Path, others: Sequence[Path], chosen: random.Random) -> str:
    other = chosen.choice(others)
    spare = path.with_name(path.name + ".spare")
    os.rename(path, spare)
    os.rename(other, path)
    os.rename(spare, other)
    return f"swapped with {other.name}"


def copy_over(path: Path, others: Sequence[Path], chosen: random.Random) -> str:
    other = chosen.choice(others)
    shutil.copyfile(other, path)
    return f"replaced by a copy of {other.name}"


def duplicate(path: Path, others: Sequence[Path], chosen: random.Random) -> str:
    digits = "".join(character for character in path.stem if character.isdigit())
    name = path.name.replace(digits, f"{int(digits) + 1:0{len(digits)}}") if digits else f"copy-{path.name}"
    while path.with_name(name).exists():
        name = f"more-{name}"
    shutil.copyfile(path, path.with_name(name))
    return f"copied to {name}"


def deep_json(path: Path, others: Sequence[Path], chosen: random.Random) -> str:
    """Nesting that exhausts the stack of a recursive reader."""
    depth = chosen.choice((200, 5_000, 200_000))
    opening, closing = chosen.choice((('{"a":', "}"), ("[", "]")))
    text = opening * depth + "1" + closing * depth
    if path.suffix == ".jsonl":
        path.write_text(f"{path.read_text()}{text}\n")
        return f"a line nested {depth} deep"
    document = json.loads(path.read_text())
    key = chosen.choice(list(document))
    document[key] = "@"
    path.write_text(json.dumps(document).replace('"@"', text, 1))
    return f"'{key}' nested {depth} deep"


def huge_json(path: Path, others: Sequence[Path], chosen: random.Random) -> str:
    """Megabytes of text, keys or digits."""
    key, write = chosen.choice(
        (
            ("string", lambda: json.dumps("x" * 4_000_000)),
            ("list", lambda: json.dumps(list(range(300_000)))),
            ("keys", lambda: json.dumps({f"k{number}": 1 for number in range(100_000)})),
            ("digits", lambda: "9" * 100_000),
        )
    )
    text = write()
    if path.suffix == ".jsonl":
        path.write_text(f'{path.read_text()}{{"step": {text}}}\n')
        return f"a line with a huge {key}"
    document = json.loads(path.read_text())
    place = chosen.choice(list(document))
    document[place] = "@"
    path.write_text(json.dumps(document).replace('"@"', text, 1))
    return f"'{place}' a huge {key}"


VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2**31, 2**63, 10**30, 0.5, -0.0, float("nan"), float("inf"), "", "x", "\0", "[/bold]", "0",
    "../../run.json", "/etc/passwd", [], [None], [[]], {}, {"": None}, {"a": 1}, [1, 2, 3],
)  # fmt: skip


def change_json(path: Path, others: Sequence[Path], chosen: random.Random) -> str:
    """A value of another type or range, a missing or a repeated entry, anywhere in the document."""
    lines = path.read_text().splitlines(keepends=True) if path.suffix == ".jsonl" else [path.read_text()]
    number = chosen.randrange(len(lines))
    document = json.loads(lines[number])
    holder, key, where = _somewhere(document, chosen)
    what = chosen.choice(("value", "value", "value", "remove", "repeat"))
    if what == "value":
        holder[key] = chosen.choice(VALUES)
        described = f"{where} = {holder[key]!r}"
    elif what == "remove":
        del holder[key]
        described = f"{where} removed"
    else:
        if isinstance(holder, list):
            holder.append(holder[key])
        else:
            holder[f"{key}2"] = holder[key]
        described = f"{where} repeated"
    lines[number] = json.dumps(document) + "\n"
    path.write_text("".join(lines))
    return described


def change_unhashed(path: Path, others: Sequence[Path], chosen: random.Random) -> str:
    """The same in a document without its own hash, such as earlier versions wrote: only its types can be checked."""
    document = json.loads(path.read_text())
    document.pop(HASH_KEY, None)
    path.write_text(json.dumps(document))
    return f"without hash, {change_json(path, others, chosen)}"


def _somewhere(document: Any, chosen: random.Random) -> tuple[Any, Any, str]:
    """An entry of a JSON document, at any depth: what has it, its key, and its path in words."""
    holder, key, where = document, chosen.choice(list(document)), ""
    while True:
        where = f"{where}/{key}"
        inner = holder[key]
        if not isinstance(inner, dict | list) or not inner or chosen.random() < 0.2:
            return holder, key, where
        holder = inner
        key = chosen.choice(list(inner)) if isinstance(inner, dict) else chosen.randrange(len(inner))


def deep_toml(path: Path, others: Sequence[Path], chosen: random.Random) -> str:
    depth = chosen.choice((100, 2_000, 50_000))
    arrays, tables = "[" * depth + "]" * depth, "{a=" * depth + "}" * depth
    text = chosen.choice((f"x = {arrays}", f"x = {tables}", "a." * depth + "x = 1"))
    path.write_text(f"{text}\n{path.read_text()}")
    return f"nested {depth} deep"


TOML_VALUES = (
    "-1", "0", "1", "true", "''", "'x'", "[]", "[1, 'x']", "{}", "{a = 1}", "nan", "inf", "9" * 30, "1979-05-27",
    f"'{'x' * 300}'", "'\\u0000'", '"\\u0000"', "'[/bold]'", "9" * 5000, "1e400", "'../..'", "[[]]",
)  # fmt: skip


def change_toml(path: Path, others: Sequence[Path], chosen: random.Random) -> str:
    lines = path.read_text().splitlines()
    number = chosen.choice([number for number, line in enumerate(lines) if "=" in line])
    name = lines[number].partition("=")[0]
    value = chosen.choice(TOML_VALUES)
    lines[number] = f"{name}= {value}"
    path.write_text("\n".join(lines) + "\n")
    return f"{name.strip()} = {value[:40]}"


BYTES: tuple[Damage, ...] = (flip, flip, flip, truncate, grow, zero, noise, empty, delete, folder, link, duplicate)
PAIRS: tuple[Damage, ...] = (swap, swap, copy_over)
JSON: tuple[Damage, ...] = (deep_json, huge_json, change_json, change_json)
TOML: tuple[Damage, ...] = (deep_toml, change_toml, change_toml, change_toml)


def damages(path: Path, others: Sequence[Path]) -> tuple[Damage, ...]:
    """Damages that suit a file; some are listed more than once, as they are more often chosen."""
    suited = BYTES
    if others:
        suited += PAIRS
    if path.suffix in (".json", ".jsonl"):
        suited += JSON
    if path.suffix == ".json":
        suited += (change_unhashed,) * 4
    if path.suffix == ".toml":
        suited += TOML
    return suited
