"""Holdall trains recommendation models whose embedding tables do not fit.

    holdall.prepare(["clicks.tsv.gz"], "data")
    holdall.train("data", "run", holdall.TrainConfig(epochs=1))
    holdall.evaluate("run")

Every command of the command line is a function here with the same name. `__init__.pyi` lists the public names; each is
imported when it is first used, so that `import holdall` costs next to nothing.
"""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path
from typing import Any

__version__ = "0.2.0.dev0"

_STUB = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
_EXPORTS = {
    alias.asname or alias.name: (node.module or "", alias.name)
    for node in _STUB.body
    if isinstance(node, ast.ImportFrom)
    for alias in node.names
}
"""Public name -> the module that defines it, and its name there."""

__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'holdall' has no attribute '{name}'")
    module, original = _EXPORTS[name]
    found = globals()[name] = getattr(import_module(module), original)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})
