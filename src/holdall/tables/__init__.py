"""Methods of storing one embedding table, one file per method."""

from __future__ import annotations

from typing import Any

from holdall.common.decode import decode, shown
from holdall.common.errors import ConfigError, did_you_mean
from holdall.tables.bands import Bands
from holdall.tables.clustered import Clustered
from holdall.tables.codes import Codes, share_codebooks
from holdall.tables.dense import Dense
from holdall.tables.frobenius import Frobenius
from holdall.tables.hashed import Hashed
from holdall.tables.hot_cold import HotCold
from holdall.tables.memcom import MemCom
from holdall.tables.method import Method, TableOptions
from holdall.tables.mixed_dimension import MixedDimension, mixed_dimensions
from holdall.tables.quantized import Quantized
from holdall.tables.quotient_remainder import QuotientRemainder
from holdall.tables.robe import Robe
from holdall.tables.shared import Shared
from holdall.tables.sketch import Sketch
from holdall.tables.table import Table
from holdall.tables.tensor_ring import TensorRing
from holdall.tables.tensor_train import TensorTrain

METHODS: dict[str, type[Method]] = {
    method.name: method
    for method in (
        Dense,
        TensorTrain,
        TensorRing,
        Frobenius,
        Hashed,
        MemCom,
        QuotientRemainder,
        Robe,
        Sketch,
        MixedDimension,
        Quantized,
        Clustered,
        Codes,
        Shared,
        HotCold,
        Bands,
    )
}
"""Every method by its name in JSON and on the command line."""


def method_from_json(document: dict[str, Any]) -> Method:
    """The method that `Method.to_json` described; unknown names and settings are refused."""
    settings = dict(document)
    name = settings.pop("method", None)
    if not isinstance(name, str) or name not in METHODS:
        raise ConfigError(f"unknown table method {shown(name)}{did_you_mean(str(name)[:60], METHODS)}")
    settings = {key: _with_methods(value) for key, value in settings.items()}
    return decode(settings, METHODS[name], "", noun=f"{name}: ")


def _with_methods(value: Any, lists: int = 2) -> Any:
    """A setting with the methods that it is or has in its lists, which are nested in at most `lists` levels."""
    if isinstance(value, dict):
        return method_from_json(value)
    return [_with_methods(item, lists - 1) for item in value] if isinstance(value, list) and lists else value


__all__ = [
    "METHODS",
    "Bands",
    "Clustered",
    "Codes",
    "Dense",
    "Frobenius",
    "Hashed",
    "HotCold",
    "MemCom",
    "Method",
    "MixedDimension",
    "Quantized",
    "QuotientRemainder",
    "Robe",
    "Shared",
    "Sketch",
    "Table",
    "TableOptions",
    "TensorRing",
    "TensorTrain",
    "method_from_json",
    "mixed_dimensions",
    "share_codebooks",
]
