"""TorchRec's tests of `EmbeddingBagCollection`, and of the models that take one, on `BagCollection`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from holdall.integrations.torchrec import BagCollection
from tests.peers import suites
from tests.peers.stand_ins import Overlay, refusals

FILES = ("modules/tests/test_embedding_modules.py", "models/tests/test_dlrm.py", "models/tests/test_deepfm.py")
"""Below the folder `torchrec` of TorchRec's repository; only tests that build a collection are counted."""
TORCHSCRIPT = "TorchScript cannot compile the tables; the test passes with torch.jit.script left out"


class _Builder:
    """`EmbeddingBagCollection(tables, is_weighted, device)` that builds TorchRec's and hands its tables over."""

    def __init__(self) -> None:
        self.built = 0

    def __call__(self, tables: Sequence[Any], is_weighted: bool = False, device: Any = None) -> BagCollection:
        import torchrec

        self.built += 1
        collection = torchrec.EmbeddingBagCollection(tables=tables, is_weighted=is_weighted, device=device)
        with refusals():
            return BagCollection.of(collection, device=collection.device)


def run(folder: Path, only: str = "") -> dict[str, list[suites.Case]]:
    """Outcomes of the tests that build a collection, by file."""
    found = {}
    for name in FILES:
        path = next((p for p in (folder / name, folder / "torchrec" / name) if p.exists()), None)
        if path is None:
            raise FileNotFoundError(f"no {name} in {folder}: give the folder `torchrec` of TorchRec's repository")
        module: Any = suites.load_leniently(path, f"torchrec_{path.stem}")
        builder = module.EmbeddingBagCollection = _Builder()
        cases = suites.run(module, lambda builder=builder: builder.built, only)
        failed = {case.name for case in cases if case.outcome == "failed"}
        module.torch = _without_script()
        again = {c.name: c for c in suites.run(module, lambda builder=builder: builder.built, only) if c.name in failed}
        for case in cases:
            if case.name in failed and again[case.name].outcome == "passed":
                case.outcome, case.message = "expected", TORCHSCRIPT
        found[name] = [case for case in cases if case.lookups]
    return found


def _without_script() -> Overlay:
    return Overlay(torch, jit=SimpleNamespace(script=lambda module: module))
