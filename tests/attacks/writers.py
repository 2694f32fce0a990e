"""Trials of two commands at once on one folder.

Each command succeeds or is refused in one sentence; one succeeds at least. What it made is what it makes alone. The
first is paused before a change of a file while the second runs, or both simply run, the second after a while.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.attacks.artifacts import Trial, first_difference, refused
from tests.attacks.command import Ended, Fault, Running, chooser, run
from tests.attacks.interruptions import WRITERS, Writer, result_of, undisturbed
from tests.attacks.workspace import copied, snapshot

PAIRS: tuple[tuple[str, str], ...] = (
    ("train", "train"),
    ("prepare", "prepare"),
    ("order", "order"),
    ("profile", "profile"),
    ("train", "prepare"),
    ("prepare", "train"),
    ("order", "train"),
    ("train", "order"),
    ("prepare", "order"),
    ("train --resume", "train --resume"),
    ("train --overwrite", "train --overwrite"),
    ("train --overwrite", "train --resume"),
    ("train --resume", "train --overwrite"),
    ("train --resume", "evaluate"),
    ("prepare --overwrite", "prepare --overwrite"),
    ("order --overwrite", "order --overwrite"),
    ("train --tail disk", "train --tail disk"),
    ("publish again", "publish again"),
)


def two_at_once(healthy: Path, names: tuple[str, str], seed: str, *, pause: bool) -> Trial:
    """Run two commands on one folder at once."""
    chosen = chooser(seed)
    first, second = (WRITERS[name] for name in names)
    alone = [undisturbed(healthy, name) for name in names]
    with copied(healthy) as folder:
        before = snapshot(folder)
        if pause:
            at = chosen.randint(1, max(alone[0].changes, 1))
            attack = f"first paused before change {at} of {alone[0].changes}"
            running = Running(first.words, folder, Fault(at, "pause"))
            running.paused()
            others = run(second.words, folder)
            running.go_on()
            ends = [running.wait(), others]
        else:
            delay = chosen.choice((0.0, chosen.uniform(0, alone[0].seconds)))
            attack = f"second after {delay:.3f} s"
            running = Running(first.words, folder)
            running.ends_within(delay)
            other = Running(second.words, folder)
            ends = [running.wait(), other.wait()]
        outcome, note = _judge((first, second), folder, before, ends, [one.result for one in alone])
    return Trial(" + ".join(names), seed, attack, " + ".join(names), outcome, note)


def _judge(
    writers: tuple[Writer, Writer], folder: Path, before: dict[str, str], ends: list[Ended], alone: list[Any]
) -> tuple[str, str]:
    if any(ended.hung for ended in ends):
        return "hang", ""
    for writer, ended in zip(writers, ends, strict=True):
        if ended.code != 0 and not refused(writer.words, ended):
            return "traceback", f"{writer.words}: {ended.note}"
    if all(ended.code != 0 for ended in ends):
        return "lost", f"both were refused: {ends[0].says[:200]} / {ends[1].says[:200]}"
    writes = {name for writer in writers for name in writer.writes}
    after = snapshot(folder)
    changed = [name for name in before if before[name] != after.get(name) and name.split("/")[0] not in writes]
    if changed:
        return "lost", f"changed {changed[:3]}"
    left = [name for name in after if name not in before and name.split("/")[0] not in writes]
    left += [name for name in after if name.endswith((".partial", ".replaced"))]
    if left:
        return "left", f"{left[:3]}"
    return _results(writers, folder, ends, alone)


def _results(writers: tuple[Writer, Writer], folder: Path, ends: list[Ended], alone: list[Any]) -> tuple[str, str]:
    """Whether the folder has the result that one of the commands, of those that succeeded, makes alone."""
    note = ""
    same = []
    for writer, ended, expected in zip(writers, ends, alone, strict=True):
        if ended.code != 0:
            continue
        found = result_of(writer, folder, ended)
        if not writer.writes and found != expected:  # a reader sees what was there before, or what is there now
            expected = result_of(writer, folder, run(writer.words, folder))
            if found != expected:
                return "silent", first_difference(expected, found)
        if writer.writes:
            same.append(found == expected)
            note = note or ("" if found == expected else first_difference(expected, found))
    if not any(same):
        return "silent", f"exits {[ended.code for ended in ends]}: {note}"
    return ("identical" if all(ended.code == 0 for ended in ends) else "refused"), ""
