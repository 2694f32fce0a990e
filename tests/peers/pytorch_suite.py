"""PyTorch's `test/nn/test_embedding.py` on tables of Holdall."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch

from tests.peers import stand_ins, suites


def run(folder: Path, only: str = "") -> tuple[list[suites.Case], stand_ins.Record]:
    """Every test of the file in `folder` (PyTorch's `test`, or its `nn`), and the lookups they made."""
    path = next((p for p in (folder / "nn" / "test_embedding.py", folder / "test_embedding.py") if p.exists()), None)
    if path is None:
        raise FileNotFoundError(f"no nn/test_embedding.py in {folder}: give the folder `test` of PyTorch's repository")
    module = suites.load(path, "pytorch_test_embedding")
    torch.manual_seed(0)
    record = stand_ins.install(module)
    with _words_not_compared(module):
        cases = suites.run(module, lambda: len(record.lookups), only)
    return cases, record


@contextmanager
def _words_not_compared(module: ModuleType) -> Iterator[None]:
    """Accept a refusal of Holdall where a test wants one of torch's, whatever its words."""
    base: Any = module.NNTestCase
    original = base.assertRaisesRegex

    def assert_raises_regex(self: Any, expected: Any, regex: Any, *arguments: Any, **options: Any) -> Any:
        if not arguments:
            return _Raises(original(self, expected, ""), regex)
        with _Raises(original(self, expected, ""), regex):
            return arguments[0](*arguments[1:], **options)

    with mock.patch.object(base, "assertRaisesRegex", assert_raises_regex):
        yield


class _Raises:
    """Context manager that wants an error with given words, or a refusal of Holdall."""

    def __init__(self, inner: Any, regex: Any):
        self._inner, self._regex = inner, re.compile(regex)

    def __enter__(self) -> Any:
        return self._inner.__enter__()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        refused = isinstance(error, stand_ins.RefusedError) or "RefusedError" in str(error)  # or within torch.compile
        if refused or error is None or self._regex.search(str(error)):
            return bool(self._inner.__exit__(kind, error, trace))
        return False
