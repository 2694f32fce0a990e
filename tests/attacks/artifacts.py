"""Trials of damaged artifacts: one file damaged, one command that reads it, and how that ends.

| outcome | meaning |
| --- | --- |
| `identical` | exit 0 and the result of the undamaged artifact, to the digit |
| `refused` | exit 2 and one sentence; nothing changed on disk |
| `edited` | exit 0 and another result, of a file that people write by hand |
| `silent` | exit 0 and another result |
| `traceback` | an error of Python, a signal, another exit code, or no single sentence |
| `lost` | a file that was there is gone or changed |
| `left` | refused, but new files were left behind |
| `hang` | not ended within the limit |
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.attacks.command import Ended, chooser, run
from tests.attacks.damage import change_unhashed, damages
from tests.attacks.workspace import NCF, ORDER, PLAN, PREPARE, TRAIN, copied, snapshot

GOOD = ("identical", "refused", "edited")
BAD = ("silent", "traceback", "lost", "left", "hang")


@dataclass(frozen=True)
class Trial:
    """One trial: what was attacked, how, by which command it was read, and how that ended."""

    kind: str
    seed: str
    attack: str
    command: str
    outcome: str
    note: str = ""


@dataclass(frozen=True)
class Reader:
    """Command that reads artifacts; `writes` are the names it may make or change."""

    words: str
    result: Callable[[Path, Ended], Any]
    writes: tuple[str, ...] = ()


VOLATILE = {
    *("samples_per_second", "started", "date", "took_seconds", "published"),
    *("hot_share_of_lookups", "moved_bytes_per_sample", "flushed_bytes_per_sample"),  # of the steps since a resume
}


def printed(folder: Path, ended: Ended) -> Any:
    """JSON on stdout without times."""
    return without_times(json.loads(ended.out))


def trained(name: str) -> Callable[[Path, Ended], Any]:
    """Shards of the newest checkpoint and the log of a run folder, without times."""

    def result(folder: Path, ended: Ended) -> Any:
        newest = max((folder / name / "checkpoints").glob("step-????????"))
        shards = [hashlib.sha256(shard.read_bytes()).hexdigest() for shard in sorted(newest.glob("*.safetensors"))]
        rows = (folder / name / "metrics.jsonl").read_text().splitlines()
        return [newest.name, shards, [without_times(json.loads(row)) for row in rows]]

    return result


def made(*names: str) -> Callable[[Path, Ended], Any]:
    """Digests of new files, or of all files below new folders, but not of what describes them."""

    def result(folder: Path, ended: Ended) -> Any:
        found = {}
        for name in names:
            inside = [path for kind in ("*.arrow", "*.safetensors") for path in sorted((folder / name).rglob(kind))]
            for path in inside if (folder / name).is_dir() else [folder / name]:
                found[str(path.relative_to(folder))] = hashlib.sha256(path.read_bytes()).hexdigest()
        return found

    return result


def without_times(value: Any) -> Any:
    """A JSON document without what differs between two runs."""
    if isinstance(value, dict):
        return {key: without_times(inner) for key, inner in value.items() if key not in VOLATILE}
    if isinstance(value, list):
        return [without_times(inner) for inner in value]
    return re.sub(r"[\d.]+ \w+ free", "free", value) if isinstance(value, str) else value


FOUR = f"{TRAIN} --steps 4 --out new"
SIMULATE = "simulate plan-2.json --hardware hardware.json --data data --world-size 8 --json"
READERS: dict[str, Reader] = {
    "train": Reader(f"train data {FOUR}", trained("new"), ("new",)),
    "train split": Reader(
        f"train data {FOUR} --strategy split --hot-bytes 200 --profile popularity.json", trained("new"), ("new",)
    ),
    "train --resume": Reader(f"train data {TRAIN} --steps 9 --resume --out run", trained("run"), ("run",)),
    "train --plan": Reader("train data --plan plan.json --steps 4 --deterministic --out new", trained("new"), ("new",)),
    "train --config": Reader("train data --config train.toml --out new", trained("new"), ("new",)),
    "train implicit": Reader(f"train implicit {NCF} --steps 3 --out new", trained("new"), ("new",)),
    "train ordered": Reader(f"train ordered {FOUR}", trained("new"), ("new",)),
    "evaluate": Reader("evaluate run --device cpu --json", printed),
    "evaluate --group-by": Reader("evaluate run --device cpu --group-by user --split valid --json", printed),
    "evaluate implicit": Reader("evaluate implicit-run --device cpu --json", printed),
    "evaluate plan-run": Reader("evaluate plan-run --device cpu --json", printed),
    "profile": Reader("profile data --out new.json --json", printed, ("new.json", "new.safetensors")),
    "order": Reader(f"{ORDER} --out new", made("new"), ("new",)),
    "order --like": Reader("order data --like ordered --out new", made("new"), ("new",)),
    "plan": Reader(f"{PLAN} --json", printed),
    "plan --profile": Reader(f"{PLAN} --profile popularity.json --json", printed),
    "plan --edited": Reader("plan data --hardware hardware.json --edited plan.json --json", printed),
    "simulate": Reader(SIMULATE, printed),
    "simulate --profile": Reader(f"{SIMULATE} --profile popularity.json", printed),
    "evaluate bundle": Reader("evaluate bundle --data data --device cpu --json", printed),
    "release": Reader("release run --as-trained --device cpu --out new", made("new"), ("new",)),
    "release --since": Reader("release run --since base --device cpu --out new", made("new"), ("new",)),
    "release --merge": Reader("release base --merge delta --out new", made("new"), ("new",)),
    "release --merge served": Reader("release served --merge --out new", made("new"), ("new",)),
    "publish": Reader("publish base --to new", made("new"), ("new",)),
    "publish --back": Reader("publish --back --to served", made("served"), ("served",)),
    "inspect bundle": Reader("inspect bundle --json", printed),
    "inspect delta": Reader("inspect delta --json", printed),
    "inspect served": Reader("inspect served --json", printed),
    "inspect data": Reader("inspect data --json", printed),
    "inspect implicit": Reader("inspect implicit --json", printed),
    "inspect ordered": Reader("inspect ordered --json", printed),
    "inspect run": Reader("inspect run --json", printed),
    "inspect checkpoint": Reader("inspect run/checkpoints/step-00000006 --json", printed),
    "doctor": Reader("doctor data --json", printed),
    "doctor --verify": Reader("doctor data plan.json --verify --json", printed),
    "prepare": Reader(f"{PREPARE} --out new", made("new"), ("new",)),
    "prepare --config": Reader("prepare clicks.csv --config prepare.toml --out new", made("new"), ("new",)),
}


@dataclass(frozen=True)
class Artifact:
    """Artifact on disk: its files by glob, the commands that read it, and whether people write it by hand."""

    files: tuple[str, ...]
    readers: tuple[str, ...]
    by_hand: bool = False


ARTIFACTS: dict[str, Artifact] = {
    "data set": Artifact(
        ("data/**/*",),
        (
            *("train", "train split", "train --resume", "train --plan", "evaluate", "evaluate --group-by", "profile"),
            *("order", "plan", "release", "inspect data", "doctor", "doctor --verify", "simulate"),
        ),
    ),
    "implicit data set": Artifact(("implicit/**/*",), ("train implicit", "evaluate implicit", "inspect implicit")),
    "ordered data set": Artifact(("ordered/**/*",), ("train ordered", "order --like", "inspect ordered")),
    "run": Artifact(("run/*.json",), ("train --resume", "evaluate", "release", "inspect run")),
    "log": Artifact(("run/metrics.jsonl",), ("train --resume", "inspect run"), by_hand=True),
    "checkpoint": Artifact(
        ("run/checkpoints/**/*",), ("train --resume", "evaluate", "inspect run", "inspect checkpoint")
    ),
    "implicit run": Artifact(
        ("implicit-run/*.json", "implicit-run/best/**/*", "implicit-run/checkpoints/**/*"), ("evaluate implicit",)
    ),
    "run of a plan": Artifact(("plan-run/*.json", "plan-run/checkpoints/**/*"), ("evaluate plan-run",)),
    "bundle": Artifact(("bundle/**/*",), ("evaluate bundle", "inspect bundle")),
    "base": Artifact(("base/**/*",), ("release --since", "release --merge", "publish")),
    "delta": Artifact(("delta/**/*",), ("release --merge", "inspect delta")),
    "published folder": Artifact(("served/**/*",), ("release --merge served", "publish --back", "inspect served")),
    "profile": Artifact(("popularity.*",), ("plan --profile", "simulate --profile", "train split")),
    "hardware": Artifact(("hardware.json",), ("plan", "simulate", "plan --edited")),
    "plan": Artifact(
        ("plan.json", "plan-2.json"), ("train --plan", "plan --edited", "simulate", "doctor --verify"), by_hand=True
    ),
    "settings": Artifact(("train.toml", "prepare.toml"), ("train --config", "prepare --config"), by_hand=True),
    "schema": Artifact(("schema.toml",), ("prepare", "prepare --config"), by_hand=True),
}


def files_of(folder: Path, artifact: Artifact) -> list[Path]:
    found = {path for pattern in artifact.files for path in folder.glob(pattern) if path.is_file()}
    return sorted(found)


def damage_artifact(healthy: Path, name: str, seed: str, reader_name: str | None = None) -> Trial:
    """Damage one file of a copy of the artifacts, and run one of the commands that read it."""
    chosen = chooser(seed)
    artifact = ARTIFACTS[name]
    reader_name = reader_name or chosen.choice(artifact.readers)
    reader = READERS[reader_name]
    expected = expected_result(healthy, reader_name)
    with copied(healthy) as folder:
        files = files_of(folder, artifact)
        path = chosen.choice(files)
        alike = [other for other in files if other != path and other.suffix == path.suffix]
        damage = chosen.choice(damages(path, alike))
        attack = f"{path.relative_to(folder)} {damage(path, alike, chosen)}"
        before = snapshot(folder)
        ended = run(reader.words, folder)
        by_hand = artifact.by_hand or damage is change_unhashed
        outcome, note = judge(reader, folder, before, ended, expected, by_hand=by_hand)
    return Trial(name, seed, attack, reader_name, outcome, note)


def expected_result(healthy: Path, reader_name: str) -> Any:
    """Result of a command on undamaged artifacts, computed once and kept beside them."""
    kept = healthy.parent / "expected" / f"{reader_name}.json"
    if not kept.exists():
        reader = READERS[reader_name]
        with copied(healthy) as folder:
            ended = run(reader.words, folder)
            if ended.code != 0:
                raise RuntimeError(f"{reader_name} ended with {ended.code} on undamaged artifacts: {ended.err}")
            result = reader.result(folder, ended)
        kept.parent.mkdir(exist_ok=True)
        partial = kept.with_suffix(f".{chooser().random()}")
        partial.write_text(json.dumps(result))
        partial.rename(kept)
    return json.loads(kept.read_text())


def judge(
    reader: Reader, folder: Path, before: dict[str, str], ended: Ended, expected: Any, *, by_hand: bool = False
) -> tuple[str, str]:
    """Outcome of a command, and a note where it is a bad one."""
    after = snapshot(folder)
    allowed = reader.writes if ended.code == 0 else ()
    changed = [name for name in before if before[name] != after.get(name) and name.split("/")[0] not in allowed]
    new = [name for name in after if name not in before and name.split("/")[0] not in reader.writes]
    left = [name for name in after if name not in before] if ended.code != 0 else new
    if ended.hung:
        return "hang", ""
    if changed:
        return "lost", f"changed {changed[:3]}: {ended.says}"
    if ended.code == 0:
        try:
            result = json.loads(json.dumps(reader.result(folder, ended)))
        except (ValueError, KeyError, OSError) as error:
            result = repr(error)
        if result == expected:
            return ("left", f"{left[:3]}") if left else ("identical", "")
        return ("edited", "") if by_hand else ("silent", first_difference(expected, result))
    if refused(reader.words, ended):
        return ("left", f"{left[:3]}: {ended.says}") if left else ("refused", ended.says)
    return "traceback", ended.note


def refused(words: str, ended: Ended) -> bool:
    """Whether a command ended with exit 2 and one sentence, or is `doctor` and reports problems."""
    if words.startswith("doctor ") and ended.code == 1:
        return "Traceback" not in ended.err and bool(json.loads(ended.out)["problems"])
    lines = ended.err.splitlines()
    sentences = [line for line in lines if line.startswith("holdall: ") and not line.startswith("holdall: warning: ")]
    if "Traceback" in ended.err or "Exception" in ended.err:
        return False
    return ended.code == 2 and len(sentences) == 1 and sentences[0] == lines[-1]  # progress may stand before it


def first_difference(expected: Any, found: Any, where: str = "") -> str:
    """Place of the first difference of two JSON documents, with both values."""
    if isinstance(expected, dict) and isinstance(found, dict):
        for key in [*expected, *found]:
            if expected.get(key) != found.get(key):
                return first_difference(expected.get(key), found.get(key), f"{where}/{key}")
    if isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        for number, (one, other) in enumerate(zip(expected, found, strict=True)):
            if one != other:
                return first_difference(one, other, f"{where}/{number}")
    return f"{where}: {str(expected)[:80]} became {str(found)[:80]}"
