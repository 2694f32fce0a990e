"""The errors Holdall raises for its users: what went wrong, where, and what to do about it.

Anything derived from `HoldallError` is the user's to fix; the command line prints its message without a traceback
and exits with 2. A broken invariant of ours is an `assert`, and shows its traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class HoldallError(Exception):
    """Base of every error a user can cause and cure."""


class ConfigError(HoldallError):
    """An option or a combination of options that cannot work."""


class DataError(HoldallError, ValueError):
    """A raw file or a prepared data set that is not what it should be."""


class IdError(HoldallError, IndexError):
    """A lookup of a row that the table does not have, or offsets that do not describe bags."""


class TierError(HoldallError):
    """Rows could not be brought to the device or taken home."""


class CheckpointError(HoldallError, ValueError):
    """A checkpoint that is missing, damaged, or of another model."""


class NonFiniteLossError(HoldallError, ArithmeticError):
    """Training met a loss that is not a number; the batch that caused it has been saved."""


class ProcessError(HoldallError, RuntimeError):
    """Processes of one run that could not meet, do not agree, or lost one of them."""


class MissingDependencyError(HoldallError, ImportError):
    """An optional package is needed; the message holds the exact line that installs it."""

    def __init__(self, package: str, extra: str, purpose: str):
        super().__init__(f"{purpose} needs {package}, which is not installed: pip install 'holdall[{extra}]'")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """` (did you mean 'x'?)` when a known name is close to `name`, else the list of known names."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if close:
        return f" (did you mean '{close[0]}'?)"
    return f" (known: {', '.join(known)})"
