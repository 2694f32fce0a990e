"""Trials of interrupted commands: killed, or refused by the disk; then run again.

After the interruption no input has changed, and what the command was to replace is still there, or replaced as a whole.
Run again, the command gives the result of one that was not interrupted, and nothing else is left behind.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.numpy import load_file

from tests.attacks.artifacts import Reader, Trial, first_difference, made, printed, refused, trained, without_times
from tests.attacks.command import Ended, Fault, Running, chooser, run
from tests.attacks.workspace import DISK, ORDER, PREPARE, TRAIN, copied, snapshot


@dataclass(frozen=True)
class Writer(Reader):
    """Command that writes; `again` is how it is run after an interruption, when not by the same words."""

    again: str | None = None
    replaces: str | None = None  # the artifact that it replaces


def counted(name: str) -> Callable[[Path, Ended], Any]:
    """Profile without times, and its counts."""

    def result(folder: Path, ended: Ended) -> Any:
        counts = load_file(folder / name.replace(".json", ".safetensors"))
        numbers = {table: counts[table].tolist() for table in sorted(counts)}
        return [without_times(json.loads((folder / name).read_text())), numbers]

    return result


SIX = f"train data {TRAIN} --steps 6 --out new"
NINE = f"train data {TRAIN} --steps 9 --out run"
RELEASE = "release run --device cpu"
WRITERS: dict[str, Writer] = {
    "prepare": Writer(f"{PREPARE} --out new", made("new"), ("new",)),
    "prepare --overwrite": Writer(
        f"{PREPARE} --seed 1 --out data --overwrite", made("data"), ("data",), replaces="data"
    ),
    "train": Writer(SIX, trained("new"), ("new",), again=f"{SIX} --resume"),
    "train --tail disk": Writer(f"{SIX} {DISK}", trained("new"), ("new",), again=f"{SIX} {DISK} --resume"),
    "train --overwrite": Writer(f"{NINE} --seed 3 --overwrite", trained("run"), ("run",), replaces="run"),
    "train --resume": Writer(f"{NINE} --resume", trained("run"), ("run",)),
    "order": Writer(f"{ORDER} --out new", made("new"), ("new",)),
    "order --overwrite": Writer(
        f"{ORDER} --hot 0.2 --out ordered --overwrite", made("ordered"), ("ordered",), replaces="ordered"
    ),
    "profile": Writer("profile data --out new.json", counted("new.json"), ("new.json", "new.safetensors")),
    "profile again": Writer(
        "profile data --split valid --out popularity.json",
        counted("popularity.json"),
        ("popularity.json", "popularity.safetensors"),
    ),
    "release": Writer(f"{RELEASE} --budget 1/2 --out new", made("new"), ("new",)),
    "release --overwrite": Writer(
        f"{RELEASE} --as-trained --out bundle --overwrite", made("bundle"), ("bundle",), replaces="bundle"
    ),
    "release --since": Writer("release run --since base --device cpu --out new", made("new"), ("new",)),
    "release --merge": Writer("release served --merge --out new", made("new"), ("new",)),
    "publish": Writer("publish bundle --to new", made("new"), ("new",)),
    "publish again": Writer("publish bundle --to served", made("served"), ("served",)),
    "evaluate": Writer("evaluate run --device cpu --json", printed),
    "evaluate --tail disk": Writer("evaluate disk-run --device cpu --json", printed),
}


@dataclass(frozen=True)
class Undisturbed:
    """Command that ran without interruption: its result, changes of files, seconds and bytes."""

    result: Any
    changes: int
    seconds: float
    bytes: int


_UNDISTURBED: dict[tuple[Path, str], Undisturbed] = {}


def undisturbed(healthy: Path, name: str) -> Undisturbed:
    """The command run to its end, once per process."""
    if (healthy, name) not in _UNDISTURBED:
        with copied(healthy) as folder:
            size, start = bytes_of(folder), time.monotonic()
            ended = run(WRITERS[name].words, folder)
            seconds = time.monotonic() - start
            if ended.code != 0 or ended.left:
                raise RuntimeError(f"{name} ended with {ended.code} and left {ended.left}: {ended.err}")
            result = WRITERS[name].result(folder, ended)
            _UNDISTURBED[healthy, name] = Undisturbed(result, ended.changes, seconds, bytes_of(folder) - size)
    return _UNDISTURBED[healthy, name]


def bytes_of(folder: Path) -> int:
    """Bytes of all files, each rounded up to pages."""
    return sum(-(-path.stat().st_size // 4096) * 4096 for path in folder.rglob("*") if path.is_file())


def interrupt(healthy: Path, name: str, how: str, seed: str) -> Trial:
    """Interrupt a command: `kill` before a change of a file, `kill in time`, or an error such as ENOSPC."""
    chosen = chooser(seed)
    writer, expected = WRITERS[name], undisturbed(healthy, name)
    with copied(healthy) as folder:
        before = snapshot(folder)
        if how == "kill in time":
            wait = chosen.uniform(0, 1.1 * expected.seconds)
            attack = f"killed after {wait:.3f} s"
            running = Running(writer.words, folder)
            if not running.ends_within(wait):
                running.kill()
            ended = running.wait()
        else:
            at = chosen.randint(1, max(expected.changes, 1))
            attack = f"{how} before change {at} of {expected.changes}"
            ended = run(writer.words, folder, Fault(at, how))
        outcome, note = judge(writer, folder, before, ended, expected.result)
    return Trial(name, seed, attack, writer.words, outcome, note)


def judge(writer: Writer, folder: Path, before: dict[str, str], ended: Ended, expected: Any) -> tuple[str, str]:
    """Outcome of an interrupted command, after running it again where it did not complete."""
    if ended.hung:
        return "hang", "when interrupted"
    if ended.code not in (0, -9) and not refused(writer.words, ended):
        return "traceback", ended.note
    if ended.left:
        return "left", f"in the temporary folder: {ended.left[:3]}"
    after = snapshot(folder)
    changed = [name for name in before if before[name] != after.get(name) and name.split("/")[0] not in writer.writes]
    if changed:
        return "lost", f"changed {changed[:3]}"
    if writer.replaces is not None and not _old_or_new(writer, folder, before, ended, expected):
        return "lost", f"{writer.replaces} is neither the old one nor the new one"
    if ended.code != 0 or result_of(writer, folder, ended) != expected:
        again = run(writer.again or writer.words, folder)
        if again.code == 2 and "exists already" in again.says and ended.code == -9:
            again = ended  # killed when the result was complete
        elif again.code != 0:
            return "lost", f"exit {again.code} when run again: {again.says[:300]}"
        found = result_of(writer, folder, again)
        if found != expected:
            return "silent", f"another result when run again: {first_difference(expected, found)}"
    after = snapshot(folder)
    left = [name for name in after if name not in before and name.split("/")[0] not in writer.writes]
    left += [name for name in after if name.endswith((".partial", ".replaced"))]
    if left:
        return "left", f"{left[:3]}"
    return ("refused", ended.says) if ended.code == 2 else ("identical", "")


def _old_or_new(writer: Writer, folder: Path, before: dict[str, str], ended: Ended, expected: Any) -> bool:
    """Whether the old artifact is somewhere, as it was, or the new one is complete in its place."""
    if result_of(writer, folder, ended) == expected:
        return True
    if writer.replaces == "run" and _is_new_run(folder / "run"):
        return True
    old = {key.split("/", 1)[1]: value for key, value in before.items() if key.startswith(f"{writer.replaces}/")}
    places = [path for path in folder.iterdir() if path.is_dir()]
    places += [inner for path in places for inner in path.iterdir() if inner.is_dir()]
    return any(old.items() <= snapshot(place).items() for place in places)


def _is_new_run(run_folder: Path) -> bool:
    """Whether a run of other settings is there with a checkpoint to continue from, which is when the old one goes."""
    if not (run_folder / "run.json").is_file():
        return False
    settings = json.loads((run_folder / "run.json").read_text())["config"]["train"]
    return settings["seed"] == 3 and any(run_folder.glob("checkpoints/step-????????/manifest.json"))


def result_of(writer: Writer, folder: Path, ended: Ended) -> Any:
    """Result of a command, or the error that comes in its place."""
    try:
        return writer.result(folder, ended)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        return repr(error)
