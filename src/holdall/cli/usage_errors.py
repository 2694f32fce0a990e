"""Errors of tyro about the words of a command, in the style of all others: one sentence with the place and the cure.

tyro prints a box: paragraphs between rules, the last of which names the help.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from textwrap import dedent

STYLE = re.compile(r"\x1b\[[0-9;]*m")
FRAME = "│╭╮╰╯─|+- "
NO_TYPE = r"Error parsing (\S+): no type matching"
FROM = r"could be instantiated from \[(.*)\]"
REASONS = {
    r"Error parsing (\S+): invalid literal for int\(\) with base 10: (.*)": r"\1 takes a whole number, not \2",
    r"Error parsing (\S+): could not convert string to float: (.*)": r"\1 takes a number, not \2",
    rf"{NO_TYPE} \{{None\}}\|INT {FROM}": r"\1 takes a whole number, not \2",
    rf"{NO_TYPE} \{{None\}}\|FLOAT {FROM}": r"\1 takes a number, not \2",
    rf"{NO_TYPE} .*INT \.\.\..* {FROM}": r"\1 takes whole numbers, not \2",
    r"Missing value for argument '(\S+)'.*": r"\1 needs a value",
    r"Unrecognized options: (-[^,]*).*": r"there is no option \1",
    r"Unrecognized or misplaced options: (-\S+) .*": r"there is no option \1",
    r"Unrecognized options: ([^,]+).*": r"\1 is one word too many",
}
"""Sentences of tyro, and ours."""
CHOICES = re.compile(r"^invalid choice (.*) for argument '(\S+)'\. Expected one of \((.*)\)$")


def usage_error(box: str, given: Sequence[str]) -> str | None:
    """The sentence for what tyro printed about these words; None if it is not such a box."""
    parts: list[list[str]] = [[]]
    for line in STYLE.sub("", box).splitlines()[1:-1]:
        if line.strip(FRAME):
            parts[-1].append(line.strip("│|").rstrip())
        else:
            parts.append([])
    paragraphs = [dedent("\n".join(part)).splitlines() for part in parts if part]
    if not paragraphs:
        return None
    text = " ".join(line.strip() for line in paragraphs[0]).rstrip(".")
    if text.startswith("Missing from"):
        names = [line.strip() for line in paragraphs[0] if re.match(r" {4}\S", line)]
        text = f"{' and '.join(names)} must be given"
    text = CHOICES.sub(_choices, text)
    for pattern, ours in REASONS.items():
        text = re.sub(f"^{pattern}$", ours, text)
    meant = [name for part in paragraphs[1:] for line in part for name in re.findall(r"^ {4}(--[\w-]+)", line)]
    hint = f" (did you mean {meant[0]}?)" if meant and text.startswith("there is no option") else ""
    command = " ".join(["holdall", *given[:1]]) if given and not given[0].startswith("-") else "holdall"
    return f"{text}{hint}: see `{command} --help`"


def _choices(found: re.Match[str]) -> str:
    """The choices of an option, in the order of its type; sorted where it may also be absent, since tyro has a set."""
    given, option, choices = found.groups()
    names = choices.split(", ")
    if "'None'" in names:
        names = sorted(name for name in names if name != "'None'")
    return f"{option} is one of {', '.join(names)}, not {given}"
