"""The core imports with torch, numpy, pyarrow, safetensors and rich alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SOURCE = Path(__file__).resolve().parent.parent / "src"
OPTIONAL = ("polars", "tyro", "tensorboard", "fastapi", "uvicorn", "msgspec", "onnx", "onnxruntime", "pandas", "igraph")
ONLY_WITH_EXTRAS = ("holdall.cli", "holdall.__main__", "holdall.serving.server")

SCRIPT = f"""
import importlib, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {OPTIONAL}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
for name in sys.argv[1:]:
    importlib.import_module(name)
"""


def modules() -> list[str]:
    names = []
    for path in sorted((SOURCE / "holdall").rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return names


def run(*names: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", SCRIPT, *names], capture_output=True, text=True, timeout=300)


def test_every_module_imports_without_the_optional_packages() -> None:
    wanted = [name for name in modules() if not name.startswith(ONLY_WITH_EXTRAS) and not name.endswith("_triton")]
    assert "holdall.tables.frobenius" in wanted
    result = run(*wanted)
    assert result.returncode == 0, result.stderr


POSIX_MODULES = ("fcntl", "resource", "termios", "pwd", "grp", "posix_ipc")
POSIX_NAMES = {
    "os": "sched_getaffinity posix_fadvise posix_fallocate fork getppid getuid geteuid pwrite pread statvfs sysconf "
    "O_DIRECTORY O_NOFOLLOW O_DIRECT ST_RDONLY register_at_fork",
    "signal": "SIGKILL SIGHUP SIGQUIT SIGUSR1 SIGUSR2 SIGALRM",
    "mmap": "MADV_RANDOM MADV_DONTNEED MADV_WILLNEED MAP_SHARED MAP_PRIVATE PROT_READ PROT_WRITE",
    "socket": "SO_REUSEPORT AF_UNIX",
}
"""Modules and names that Windows does not have; macOS lacks some of them."""

WITHOUT_POSIX = f"""
import importlib, sys
import asyncio, multiprocessing, pyarrow, torch  # what others need is imported before

for module in {POSIX_MODULES}:
    sys.modules[module] = None
for module, names in {POSIX_NAMES}.items():
    for name in names.split():
        if hasattr(importlib.import_module(module), name):
            delattr(importlib.import_module(module), name)
for name in sys.argv[1:]:
    importlib.import_module(name)
"""


def test_every_module_imports_without_what_only_posix_has() -> None:
    wanted = [name for name in modules() if not name.startswith("holdall.serving.server") and "triton" not in name]
    assert "holdall.common.folder_lock" in wanted
    command = [sys.executable, "-c", WITHOUT_POSIX, *wanted]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr


def test_the_command_line_names_what_to_install() -> None:
    result = run("holdall.cli")
    assert result.returncode != 0
    assert "pip install 'holdall[cli]'" in result.stderr


def test_the_server_names_what_to_install() -> None:
    result = run("holdall.serving.server.run")
    assert result.returncode != 0
    assert "pip install 'holdall[serve]'" in result.stderr


def test_the_package_itself_imports_nothing_heavy() -> None:
    code = "import sys, holdall; print([name for name in ('torch', 'numpy', 'pyarrow', 'rich') if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert result.stdout.strip() == "[]", result.stderr


HELP = """
import contextlib, io, sys
from holdall.cli import COMMANDS, main

for words in ([], *([name] for name in COMMANDS)):
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()) as out:
        main([*words, "--help"])
    assert "usage: holdall" in out.getvalue(), words
print([name for name in ("torch", "numpy", "pyarrow", "polars") if name in sys.modules])
"""


def test_help_imports_nothing_heavy() -> None:
    result = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True, timeout=300)
    assert result.stdout.strip() == "[]", result.stderr


def test_every_public_name_is_there() -> None:
    import holdall

    assert "train" in holdall.__all__
    for name in holdall.__all__:
        assert getattr(holdall, name).__name__ if callable(getattr(holdall, name)) else getattr(holdall, name)
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = holdall.trian
