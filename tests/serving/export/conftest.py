"""Exports that tests share: each takes seconds to make."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from holdall.models import CONFIGURATIONS, DCNConfig, DLRMConfig, Model
from holdall.serving.export.export import export
from holdall.tables import (
    Bands,
    Clustered,
    Codes,
    Dense,
    Frobenius,
    Hashed,
    HotCold,
    MemCom,
    Method,
    MixedDimension,
    Quantized,
    QuotientRemainder,
    Robe,
    Shared,
    Sketch,
    TensorRing,
    TensorTrain,
)
from tests.serving.export.made_up import BANDS, bundle_of, clicks, histories

METHODS: tuple[Method, ...] = (
    Dense(),
    Dense("bfloat16"),
    Quantized(),
    Quantized(4, scales="float16"),
    Quantized(scales="bfloat16"),
    Quantized(rounding="learned", trainable=True),
    Codes(2, 4, "all"),
    Codes(2, 4, "all"),
    Codes(1, 8),
    Shared(rows=24, dtype="float16"),
    Bands(((5, Dense()), (100, Quantized(4)), (None, Clustered(clusters=24)))),
    HotCold(3, HotCold(0.5, Shared(rows=9))),
    Hashed(buckets=23),
    MemCom(buckets=30, bias=True),
    QuotientRemainder(buckets=10, operation="concat"),
    Robe(size=300, block=4),
    Sketch(dim=5, chunks=3),
    MixedDimension(dim=3, bits=8),
    Frobenius(rank=3, terms=3),
    TensorTrain(rank=4),
    TensorRing(rank=2, cores=4),
)
"""One of every class, and those that are decoded by operations of their own."""


@dataclass(frozen=True)
class Case:
    """A bundle, its model and data, and an export of it."""

    data: Path
    bundle: Path
    model: Model
    path: Path


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    """Exports by name, each made when it is first asked for."""
    made: dict[str, Case] = {}

    def make(name: str) -> Case:
        folder = tmp_path_factory.mktemp(name)
        small: dict[str, Any] = {"dim": 16, "bottom": (8,), "top": (8,)}
        match name:
            case "methods":
                data = clicks(folder / "data", (600,) * len(METHODS))
                methods = {f"C{number}": method for number, method in enumerate(METHODS, start=1)}
                bundle, model = bundle_of(folder / "bundle", data, DLRMConfig(interaction="concat", **small), methods)
            case "bags":
                data = clicks(folder / "data", (600, 900, 7), bag_lengths=(1, 4, 3))
                bundle, model = bundle_of(folder / "bundle", data, DLRMConfig(**small), BANDS)
            case "external":
                data = clicks(folder / "data", (50, 70), num_dense=0)
                bundle, model = bundle_of(folder / "bundle", data, DCNConfig(dim=4, top=(8,), structure="parallel"))
            case "tbsm" | "ncf":
                data = histories(folder / "data")
                bundle, model = bundle_of(folder / "bundle", data, CONFIGURATIONS[name].scaled(0.2))
        with pytest.MonkeyPatch.context() as patch:
            if name == "external":
                patch.setattr("holdall.serving.export.onnx_file.MAX_FILE_BYTES", 0)
            export(bundle, folder / "export", format="triton" if name == "ncf" else "onnx")
        return Case(data, bundle, model, folder / "export")

    def get(name: str) -> Case:
        if name not in made:
            made[name] = make(name)
        return made[name]

    return get
