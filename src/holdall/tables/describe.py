"""Short words for the method of a table, in reports and on the console."""

from __future__ import annotations

from dataclasses import fields

from holdall.tables.bands import Bands
from holdall.tables.codes import Codes
from holdall.tables.dense import Dense
from holdall.tables.method import Method
from holdall.tables.mixed_dimension import MixedDimension
from holdall.tables.quantized import Quantized
from holdall.tables.shared import Shared


def describe_method(method: Method, num_rows: int) -> str:
    """A method in one line: `8-bit 512, 4-bit 3,584, 2 codes 55,904, 1 row for the rest` for the rows of each band.

    Other methods have their name, and the settings that are not their defaults.
    """
    if not isinstance(method, Bands):
        return _brief(method)
    bands = [(band.method, band.end - band.start) for band in method.bands_of(num_rows)]
    return ", ".join(_band(kind, rows, is_last=index + 1 == len(bands)) for index, (kind, rows) in enumerate(bands))


def _band(method: Method, num_rows: int, *, is_last: bool) -> str:
    if isinstance(method, Shared):
        stored = min(method.rows, num_rows)
        return f"{stored:,} row{'s' * (stored > 1)} for {'the rest' if is_last else f'{num_rows:,}'}"
    word: str
    if isinstance(method, Dense):
        word = method.dtype or "dense"
    elif isinstance(method, Quantized):
        word = f"{method.bits}-bit"
    elif isinstance(method, Codes):
        word = f"{method.parts} code{'s' * (method.parts > 1)}"
    elif isinstance(method, MixedDimension) and method.trainable:
        word = f"{method.dim} number{'s' * (method.dim > 1)}"
    else:
        word = _brief(method)
    return f"{word} {num_rows:,}"


def _brief(method: Method) -> str:
    """A method with the settings that are not its defaults."""
    settings = {found.name: getattr(method, found.name) for found in fields(method)}
    chosen = [f"{name}={settings[name]!r}" for name in settings if settings[name] != getattr(type(method), name, ...)]
    return f"{type(method).__name__}({', '.join(chosen)})"
