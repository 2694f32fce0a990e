"""Errors for users: each message names what went wrong, where, and the fix.

A user can fix whatever raises a `HoldallError`; the command line prints its message without a traceback and exits with
2. A broken invariant of Holdall is an `assert`, and shows its traceback. Each class also derives from the error that
Python and PyTorch raise in such a place, so that code which expects that one catches it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class HoldallError(Exception):
    """Base of every error a user can cause and fix."""


class ConfigError(HoldallError, ValueError):
    """Option, or combination of options, that cannot work."""


class OwnModelError(ConfigError):
    """Model of one's own that a file names, and that was not given in this process."""

    def __init__(self, name: str):
        self.name = name
        super().__init__(
            f"'{name}' is a model of your own, and a file does not import code: give it again with --model {name}, or "
            f"in Python with holdall.register_model({name!r})"
        )


class DataError(HoldallError, ValueError):
    """Raw file or prepared data set with wrong content."""


class IdError(HoldallError, IndexError):
    """Lookup of a row that the table does not have, or offsets that do not describe bags."""


class TierError(HoldallError, RuntimeError):
    """Rows that could not be fetched to the device or written back."""


class CheckpointError(HoldallError, ValueError):
    """Checkpoint that is missing, damaged, or of another model."""


class NonFiniteLossError(HoldallError, ArithmeticError):
    """Loss that is not finite; the batch that caused it has been saved."""


class ProcessError(HoldallError, RuntimeError):
    """Processes of a run that failed to connect, disagree, or lost one of them."""


class MissingDependencyError(HoldallError, ImportError):
    """Optional package that is not installed; the message has the command that installs it."""

    def __init__(self, package: str, extra: str, purpose: str):
        super().__init__(f"{purpose} needs {package}, which is not installed: pip install 'holdall[{extra}]'")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """` (did you mean 'x'?)` when a known name is close to `name`, else the list of known names."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if close:
        return f" (did you mean '{close[0]}'?)"
    return f" (known: {', '.join(known)})"
