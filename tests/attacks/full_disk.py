"""Trials on a disk that fills: a small tmpfs in a mount namespace of its own, where the system allows that."""

from __future__ import annotations

import ctypes
import os
import pickle
import sys
import tempfile
from pathlib import Path

from tests.attacks.artifacts import Trial
from tests.attacks.command import chooser, run
from tests.attacks.interruptions import WRITERS, Undisturbed, bytes_of, judge, undisturbed
from tests.attacks.workspace import copied, snapshot

CLONE_NEWNS, CLONE_NEWUSER, MS_REMOUNT = 0x20000, 0x10000000, 32


class NotAllowedError(OSError):
    """Mounting is not allowed here."""


def fill_disk(healthy: Path, name: str, seed: str) -> Trial | None:
    """Run a command on a disk too small for it, then again on a larger one; None where mounting is not allowed."""
    expected = undisturbed(healthy, name)
    receive, send = os.pipe()
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        found: object = None
        try:
            found = _on_small_disk(healthy, name, seed, expected)
        except NotAllowedError:
            pass
        except BaseException as error:
            found = error
        finally:
            os.write(send, pickle.dumps(found))
            os._exit(0)
    os.close(send)
    with os.fdopen(receive, "rb") as pipe:
        found = pickle.load(pipe)
    os.waitpid(pid, 0)
    if isinstance(found, BaseException):
        raise found
    assert found is None or isinstance(found, Trial)
    return found


def _on_small_disk(healthy: Path, name: str, seed: str, expected: Undisturbed) -> Trial:
    writer = WRITERS[name]
    chosen = chooser(seed)
    disk = Path(tempfile.mkdtemp(prefix="disk-"))
    needs = max(expected.bytes, 4096)
    if writer.replaces is not None:  # the new one is complete before the old one is removed
        needs += bytes_of(healthy / writer.replaces)
    free = chosen.randrange(0, needs, 4096)
    mount(disk, 64 << 20)
    with copied(healthy, disk) as folder:
        status = os.statvfs(disk)
        used = (status.f_blocks - status.f_bfree) * status.f_bsize
        mount(disk, used + free, MS_REMOUNT)
        before = snapshot(folder)
        ended = run(writer.words, folder)
        mount(disk, 64 << 20, MS_REMOUNT)
        outcome, note = judge(writer, folder, before, ended, expected.result)
    return Trial(name, seed, f"{free} bytes free on the disk", writer.words, outcome, note)


_private = False


def mount(place: Path, size: int, flags: int = 0) -> None:
    """A tmpfs of `size` bytes; in a namespace of this process, which becomes its own with the first one."""
    global _private
    libc = ctypes.CDLL(None, use_errno=True)
    if not _private:
        user, group = os.getuid(), os.getgid()
        if libc.unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0:
            raise NotAllowedError(ctypes.get_errno(), "unshare")
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
        _private = True
    if libc.mount(b"attack", bytes(place), b"tmpfs", flags, f"size={size}".encode()) != 0:
        raise NotAllowedError(ctypes.get_errno(), "mount")
