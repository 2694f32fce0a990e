"""Check of the built wheel in empty environments, without and with the extra `cli`: `python tools/check_wheel.py`.

Takes minutes, since torch is installed, and is run by hand. `--python` names another interpreter, such as python3.13.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CORE = """
import importlib.util, sys, holdall
assert "site-packages" in holdall.__file__, holdall.__file__
for name in ("polars", "tyro", "fastapi"):
    assert importlib.util.find_spec(name) is None, name
table = holdall.TensorTrain(rank=4).build(1000, 8)
assert table(__import__("torch").arange(6).view(2, 3)).shape == (2, 8)
print(holdall.__version__)
"""
NO_EXTRA = "pip install 'holdall[cli]'"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", default=sys.executable)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wheel = build(folder)
        check_files(wheel)
        install(given.python, folder / "core", str(wheel))
        print("core:", run(folder, "core/bin/python", "-c", CORE).strip())
        said = run(folder, "core/bin/holdall", "--version", code=2)
        assert NO_EXTRA in said, said
        install(given.python, folder / "cli", f"{wheel}[cli]")
        print("cli:", run(folder, "cli/bin/holdall", "--version").strip())
        said = run(folder, "cli/bin/holdall", "demo", "--rows", "5000", "--out", "demo")
        assert "the best possible" in said, said
        print("the wheel works without extras, and with the extra cli")


def build(folder: Path) -> Path:
    subprocess.run([sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, ROOT], check=True)
    return next(folder.glob("*.whl"))


def check_files(wheel: Path) -> None:
    """Raise unless every tracked file of the package is in the wheel, and nothing else but its metadata."""
    listed = subprocess.run(["git", "ls-files", "src"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    wanted = {line.removeprefix("src/") for line in listed.splitlines()}
    found = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert found == wanted, sorted(found ^ wanted)


def install(python: str, folder: Path, what: str) -> None:
    subprocess.run([python, "-m", "venv", folder], check=True)
    subprocess.run(
        [folder / "bin/python", "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt", what], check=True
    )


def run(folder: Path, program: str, *words: str, code: int = 0) -> str:
    """Output of a program in an environment that has nothing else of Python in it."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run([folder / program, *words], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


if __name__ == "__main__":
    main()
