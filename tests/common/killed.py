"""Kills of a function before each of its changes to the file system, one after the other."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator

CHANGES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "os.link", "os.symlink")
KILLED, FAILED = 77, 78


def killed_at_each_change(work: Callable[[], object], before: Callable[[], object]) -> Iterator[int]:
    """Run `before` here and `work` in a child that ends, as by SIGKILL, before its n-th change; yields n = 1, 2, ...

    Ends when a child was not killed, because it made fewer changes. Opening a file to write is a change, too.
    """
    number = 0
    while True:
        number += 1
        before()
        child = os.fork()
        if child == 0:
            os._exit(_run(work, number))
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        assert code in (0, KILLED), f"the child ended with {code} instead of being killed at change {number}"
        yield number
        if code == 0:
            return


def _run(work: Callable[[], object], stop_at: int) -> int:
    changes = 0

    def audit(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal changes
        flags = arguments[2] if event == "open" and isinstance(arguments[2], int) else 0
        if event in CHANGES or flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            changes += 1
            if changes == stop_at:
                os._exit(KILLED)

    sys.addaudithook(audit)
    try:
        work()
    except BaseException:
        return FAILED
    return 0
