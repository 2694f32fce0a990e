"""Commands of Holdall run in forked processes, so that a signal, a hang or a fault ends one command and not the test.

The process that forks must never run a command itself: threads of torch, polars and Arrow do not survive a fork.
`pool` starts such processes.
"""

from __future__ import annotations

import errno
import gc
import os
import random
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any

LIMIT = 60.0
"""Seconds after which a command hangs; an undamaged one takes less than one."""

MEMORY = 24 << 30
"""Most bytes of address space, so that a size out of a damaged file does not take the machine's memory."""

MODULES = (
    *("torch._dynamo", "torch.utils.tensorboard", "numpy.ctypeslib", "tyro.extras", "typeguard", "igraph", "polars"),
    *("holdall.cli", "holdall.commands.doctor", "holdall.commands.inspect", "holdall.commands.metrics"),
    *("holdall.commands.plan", "holdall.commands.simulate", "holdall.popularity.communities"),
    *("holdall.popularity.render", "holdall.report.popularity", "holdall.training.train", "rich._emoji_codes"),
)
"""All that commands import, lazily too."""

WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.link", "os.symlink")
"""Audit events of the interpreter that change a folder, beside `open` with one of these flags."""


@dataclass(frozen=True)
class Ended:
    """End of a command: its exit code (negative: the signal), what it printed, and the changes of files it made."""

    code: int
    out: str
    err: str
    hung: bool = False
    changes: int = 0
    left: tuple[str, ...] = ()  # in its temporary folder

    @property
    def says(self) -> str:
        """Last line on stderr."""
        return (self.err.strip().splitlines() or [""])[-1]

    @property
    def note(self) -> str:
        """Exit code with the first line on stderr, where there are more, and the last."""
        first = self.err.strip().splitlines()[:1]
        return f"exit {self.code}: {' ... '.join(dict.fromkeys([*first, self.says]))[:400]}"


@dataclass(frozen=True)
class Fault:
    """Something that happens before the `at`-th change of a file below the command's folder; the first is 1."""

    at: int
    kind: str = "kill"  # or `pause`, until `go_on`; or the name of an error, such as ENOSPC


class Running:
    """Command in a process of its own, with its folder as the current directory."""

    def __init__(self, words: str, folder: Path, fault: Fault | None = None):
        self._said = Path(tempfile.mkdtemp(prefix="said-"))
        (self._said / "tmp").mkdir()
        for name in ("out", "err", "changes"):  # there even if the command is killed before its first line
            (self._said / name).touch()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            _run(words.split(), folder, self._said, fault)
        with suppress(PermissionError, ProcessLookupError):
            os.setpgid(self.pid, self.pid)  # here too, so that a kill finds the group at any moment
        self._descriptor = os.pidfd_open(self.pid)
        self._status: int | None = None

    def paused(self, limit: float = LIMIT) -> bool:
        """Whether the command stops at its fault; False when it ends or the limit passes before."""
        deadline = time.monotonic() + limit
        while time.monotonic() < deadline:
            pid, status = os.waitpid(self.pid, os.WUNTRACED | os.WNOHANG)
            if pid:
                self._status = None if os.WIFSTOPPED(status) else status
                return os.WIFSTOPPED(status)
            time.sleep(0.002)
        return False

    def go_on(self) -> None:
        if self._status is None:
            os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        with suppress(ProcessLookupError):  # it has just ended
            os.killpg(self.pid, signal.SIGKILL)

    def ends_within(self, seconds: float) -> bool:
        """Whether the command ends in this time."""
        return bool(select.select([self._descriptor], [], [], max(seconds, 0))[0])

    def wait(self, limit: float = LIMIT) -> Ended:
        hung = not self.ends_within(limit)
        if hung:
            self.kill()
        status = os.waitpid(self.pid, 0)[1] if self._status is None else self._status
        os.close(self._descriptor)
        out, err = ((self._said / name).read_text(encoding="utf-8", errors="replace") for name in ("out", "err"))
        changes = int((self._said / "changes").read_text() or 0)
        left = tuple(sorted(os.listdir(self._said / "tmp")))
        shutil.rmtree(self._said, ignore_errors=True)
        return Ended(os.waitstatus_to_exitcode(status), out, err, hung, changes, left)


def run(words: str, folder: Path, fault: Fault | None = None, limit: float = LIMIT) -> Ended:
    """Run a command to its end."""
    return Running(words, folder, fault).wait(limit)


def _run(words: list[str], folder: Path, said: Path, fault: Fault | None) -> None:
    """Body of the forked process."""
    code = 1
    try:
        os.setpgid(0, 0)
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(said / name, os.O_WRONLY | os.O_CREAT), number)
        os.chdir(folder)
        os.environ |= {"TMPDIR": str(said / "tmp"), "XDG_CACHE_HOME": str(said / "cache"), "COLUMNS": "120"}
        tempfile.tempdir = None
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        _count_changes(folder.resolve(), said / "changes", fault)
        from holdall.cli import main

        main(words)
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _count_changes(folder: Path, file: Path, fault: Fault | None) -> None:
    """Count the changes of files below `folder`, and cause the fault before the one it names."""
    counter = os.open(file, os.O_WRONLY | os.O_CREAT)
    count = 0

    def hook(event: str, args: tuple[Any, ...]) -> None:
        nonlocal count
        if event == "open":
            if not isinstance(args[2], int) or not args[2] & WRITES:
                return
        elif event not in CHANGES:
            return
        if not isinstance(args[0], str | bytes | os.PathLike):
            return
        if not os.path.abspath(os.fsdecode(args[0])).startswith(f"{folder}/"):
            return
        count += 1
        os.pwrite(counter, str(count).encode(), 0)
        if fault is None or count < fault.at:
            return
        if fault.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault.kind == "pause":
            if count == fault.at:
                os.kill(os.getpid(), signal.SIGSTOP)
        elif event in ("open", "os.mkdir"):  # a full disk still renames and removes
            number = getattr(errno, fault.kind)
            raise OSError(number, os.strerror(number), os.fsdecode(args[0]))

    sys.addaudithook(hook)


def pool(workers: int, modules: tuple[str, ...] = MODULES) -> ProcessPoolExecutor:
    """Processes that have imported what commands need and run nothing but trials."""
    os.environ |= {"OMP_NUM_THREADS": "1", "POLARS_MAX_THREADS": "1"}
    return ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_import, initargs=(modules,))


def _import(modules: tuple[str, ...]) -> None:
    """Import all that commands import, once, so that a forked command starts at once."""
    for name in modules:
        import_module(name)
    if modules:
        import torch

        torch.set_num_threads(1)
    gc.freeze()  # a collection in a forked command would touch, and so copy, all of it


def in_process(function: Callable[..., Any], *args: Any, modules: tuple[str, ...] = MODULES) -> Any:
    """Result of a function in a new process of one worker; for tests, whose own process may have threads."""
    with pool(1, modules) as workers:
        return workers.submit(function, *args).result()


def chooser(*seed: int | str) -> random.Random:
    """Random choices that depend on the seed alone."""
    return random.Random("/".join(map(str, seed)))
