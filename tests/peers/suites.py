"""Runs of a published unittest file: the outcome of every test, with a name that survives a change of torch."""

from __future__ import annotations

import importlib.util
import sys
import unittest
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any


@dataclass
class Case:
    """A test of a suite that ran."""

    name: str
    outcome: str
    """"passed", "failed" or "skipped"."""
    message: str = ""
    lookups: int = 0
    """Lookups in tables of Holdall."""


class _Missing(ModuleType):
    """Module that the installed library does not have: a test that uses it is skipped."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def skip(*arguments: Any, **options: Any) -> Any:
            raise unittest.SkipTest(f"the installed library has no {self.__name__}.{name}")

        return skip


def load_leniently(path: Path, name: str) -> ModuleType:
    """The module of a file, with stubs for modules of its library that the installed version lacks."""
    while True:
        try:
            return load(path, name)
        except ModuleNotFoundError as error:
            missing = error.name or ""
            if missing.partition(".")[0] != "torchrec" or missing in sys.modules:
                raise
            for i in range(2, missing.count(".") + 2):
                part = ".".join(missing.split(".")[:i])
                if part not in sys.modules and importlib.util.find_spec(part) is None:
                    stub = sys.modules[part] = _Missing(part)
                    stub.__path__ = []


def load(path: Path, name: str) -> ModuleType:
    """The module of a file, under a name of its own."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, path  # noqa: PT018
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


class _Result(unittest.TestResult):
    """Outcomes by test; a test with subtests fails when one of them does."""

    def __init__(self, count: Any):
        super().__init__()
        self.cases: dict[str, Case] = {}
        self._count = count
        self._before = 0

    def startTest(self, test: unittest.TestCase) -> None:  # noqa: N802
        super().startTest(test)
        self._before = self._count()
        self.cases[_name(test)] = Case(_name(test), "passed")

    def stopTest(self, test: unittest.TestCase) -> None:  # noqa: N802
        super().stopTest(test)
        self.cases[_name(test)].lookups = self._count() - self._before

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:  # noqa: N802
        self.cases[_name(test)] = Case(_name(test), "skipped", reason)

    def addError(self, test: unittest.TestCase, error: Any) -> None:  # noqa: N802
        self._failed(test, error)

    def addFailure(self, test: unittest.TestCase, error: Any) -> None:  # noqa: N802
        self._failed(test, error)

    def addSubTest(self, test: unittest.TestCase, subtest: unittest.TestCase, error: Any) -> None:  # noqa: N802
        if error is not None:
            self._failed(test, error)

    def _failed(self, test: unittest.TestCase, error: Any) -> None:
        lines = [line for line in str(error[1]).split("To execute this test")[0].splitlines() if line.strip()]
        words = f"{error[0].__name__}: {' '.join(lines[:3])}"
        self.cases[_name(test)] = Case(_name(test), "failed", words[:300])


def _name(test: unittest.TestCase) -> str:
    return ".".join(test.id().split(".")[-2:])


def run(module: ModuleType, count: Any = lambda: 0, only: str = "") -> list[Case]:
    """Run the tests of a module whose name contains `only`; `count` is the number of lookups so far."""
    result = _Result(count)
    for case in _flat(unittest.defaultTestLoader.loadTestsFromModule(module)):
        if only in _name(case):
            case.run(result)
    return list(result.cases.values())


def _flat(suite: Any) -> list[unittest.TestCase]:
    if isinstance(suite, unittest.TestCase):
        return [suite]
    return [case for part in suite for case in _flat(part)]
