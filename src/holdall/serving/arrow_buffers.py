"""Arrow arrays as arrays of numpy; Arrow's own conversion imports pandas where it is installed, for a second."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Array = npt.NDArray[Any]


def numbers_of(values: pa.Array) -> Array:
    """Integers or floats; any number where a value is null."""
    found = np.frombuffer(values.buffers()[1] or b"", dtype=values.type.to_pandas_dtype())
    return found[values.offset : values.offset + len(values)]


def bounds_of(values: pa.StringArray | pa.LargeStringArray) -> Array:
    """[N + 1] places in the bytes of the texts at which one ends and the next begins."""
    kind = np.int64 if pa.types.is_large_string(values.type) else np.int32
    offsets = values.buffers()[1]
    if not offsets:
        return np.zeros(1, dtype=kind)
    return np.frombuffer(offsets, dtype=kind)[values.offset : values.offset + len(values) + 1]


def bytes_of(values: pa.StringArray | pa.LargeStringArray) -> Array:
    """The bytes of texts, which `bounds_of` divides."""
    return np.frombuffer(values.buffers()[2] or b"", dtype=np.uint8)


def is_valid(values: pa.Array) -> Array:
    """[N] whether each value is not null."""
    bits = values.buffers()[0]
    if bits is None:
        return np.full(len(values), values.null_count == 0)
    whole = np.unpackbits(np.frombuffer(bits, dtype=np.uint8), bitorder="little")
    return whole[values.offset : values.offset + len(values)].astype(bool)
