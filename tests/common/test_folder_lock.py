"""Lock of an output path for one writing process."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from holdall.common import folder_lock
from holdall.common.errors import HoldallError
from holdall.common.folder_lock import lock_file, locked

HOLDER = """
import sys, time
from pathlib import Path
from holdall.common.folder_lock import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""
RACER = """
import os, sys
from pathlib import Path
from holdall.common.errors import HoldallError
from holdall.common.folder_lock import locked
for round in range(int(sys.argv[2])):
    sys.stdin.readline()
    try:
        with locked(Path(sys.argv[1])):
            print("won", flush=True)
            sys.stdin.readline()
    except HoldallError:
        print("lost", flush=True)
        sys.stdin.readline()
    print("over", flush=True)
"""


def test_one_at_a_time_and_the_holder_is_named(tmp_path: Path) -> None:
    own = f"process {os.getpid()} on {socket.gethostname()} is writing to .*run: wait for it or end it, or choose"
    with locked(tmp_path / "run"):
        for _ in range(2):  # one that was refused does not release it
            with pytest.raises(HoldallError, match=own), locked(tmp_path / "run"):
                pytest.fail("locked twice")
        with pytest.raises(HoldallError, match=own), locked(tmp_path / "run", timeout=0.2):
            pytest.fail("locked twice")
        with locked(tmp_path / "other"):
            pass
    with locked(tmp_path / "run"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_two_names_of_a_folder_have_one_lock(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to("run")
    with locked(tmp_path / "run"), pytest.raises(HoldallError), locked(tmp_path / "link"):
        pytest.fail("locked twice")


def test_the_lock_outlives_a_change_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with locked(tmp_path / "run"):
        (tmp_path / "run").rename(tmp_path / "old")
        (tmp_path / "run").mkdir()
        with pytest.raises(HoldallError), locked(tmp_path / "run"):
            pytest.fail("locked twice")


def test_folders_above_are_made_and_removed(tmp_path: Path) -> None:
    with locked(tmp_path / "a/b/run"):
        assert (tmp_path / "a/b").is_dir()
    assert list(tmp_path.iterdir()) == []
    with locked(tmp_path / "a/b/run"):
        (tmp_path / "a/b/run").touch()
    assert (tmp_path / "a/b/run").exists()


def test_a_lock_that_its_holder_removes_is_not_taken_for_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The holder ends between opening and locking: the file that was opened is no longer the lock."""
    file = lock_file(tmp_path / "run")
    original = folder_lock._flock
    opened = []

    def flock(descriptor: int) -> bool | None:
        opened.append(os.fstat(descriptor).st_ino)
        if len(opened) == 1:
            file.rename(tmp_path / "removed")  # its inode stays in use, so that the next file has another
        return original(descriptor)

    file.touch()
    monkeypatch.setattr(folder_lock, "_flock", flock)
    with locked(tmp_path / "run"):
        assert len(set(opened)) == 2
        assert os.stat(file).st_ino == opened[1]


@pytest.mark.slow
def test_the_lock_of_a_killed_process_is_taken_over(tmp_path: Path) -> None:
    run = tmp_path / "run"
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(run)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(HoldallError, match=f"process {holder.pid} on"), locked(run):
        pytest.fail("locked twice")
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    assert lock_file(run).exists()
    with locked(run):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_of_several_processes_exactly_one_gets_the_lock(tmp_path: Path) -> None:
    rounds, count = 30, 4
    command = [sys.executable, "-c", RACER, str(tmp_path / "run"), str(rounds)]
    racers = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(count)]
    for _ in range(rounds):
        for word in (["won"] + ["lost"] * (count - 1), ["over"] * count):
            for racer in racers:
                assert racer.stdin is not None
                racer.stdin.write("go\n")
                racer.stdin.flush()
            said = [racer.stdout.readline().strip() for racer in racers if racer.stdout is not None]
            assert sorted(said, reverse=True) == sorted(word, reverse=True)
    for racer in racers:
        racer.communicate()
        assert racer.returncode == 0


@pytest.mark.parametrize("missing", [True, False], ids=["no fcntl", "no flock"])
def test_without_flock_the_file_is_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: bool) -> None:
    class NoLocks:
        LOCK_EX = LOCK_NB = 0

        @staticmethod
        def flock(descriptor: int, how: int) -> None:
            raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(folder_lock, "fcntl", None if missing else NoLocks)
    with (
        locked(tmp_path / "run"),
        pytest.raises(
            HoldallError, match=r"process \d+ on .* and remove .*\.run\.holdall-lock if it has ended already"
        ),
        locked(tmp_path / "run"),
    ):
        pytest.fail("locked twice")
    with locked(tmp_path / "run"):
        pass


def test_the_lock_is_in_the_folder_where_nothing_can_be_made_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run").mkdir()
    monkeypatch.setattr(os, "access", lambda path, how: path != tmp_path)
    with locked(tmp_path / "run"):
        assert [path.name for path in (tmp_path / "run").iterdir()] == [".holdall-lock"]
        with pytest.raises(HoldallError), locked(tmp_path / "run"):
            pytest.fail("locked twice")
    assert list((tmp_path / "run").iterdir()) == []


def test_a_lock_file_that_is_a_link_to_nothing_is_refused(tmp_path: Path) -> None:
    file = lock_file(tmp_path / "run")
    file.symlink_to("nowhere")
    ended = subprocess.run([sys.executable, "-c", HOLDER, str(tmp_path / "run")], capture_output=True, timeout=60)
    assert f"{file} is a link: remove it" in ended.stderr.decode()
    assert file.is_symlink()
