"""One-hot lookup in tables of bands: rows, codes on a grid, or sums of codewords, each band of ids stored its own way.

    rows:   row_i = data[(i - start) * S // n]                S rows for the n ids of the band (S = n: one each)
    grid:   row_i = zero_i + step_i * data[i - start]         codes of 8 or 4 bits, `extra` [n, 2] has zero and step
    words:  row_i = sum over p of extra[p * num_words + data[i - start, p]]      codes of 8 or 4 bits

A lookup reads what a row stores and writes `dim` numbers. On a GPU one launch looks up all tables (`bands_triton`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from holdall.kernels.dispatch import INTERPRETED, Path, takes_triton

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
MAX_PARTS = 8
"""Most codewords of a row that the kernel adds up."""


NOTHING, NUMBERED, SUMMED = range(3)
"""How `band_gradients_triton` computes the gradient of a band."""


class StoredBand(NamedTuple):
    """Tensors of the ids from `start` to before `end` of a table."""

    start: int
    end: int
    kind: Literal["rows", "grid", "words"]
    data: Tensor
    """[S, dim] rows, or codes [end - start, width] uint8."""
    extra: Tensor | None = None
    """Grid [end - start, 2], or codewords [.., dim]."""
    bits: int = 8
    parts: int = 1
    """Codewords of a row."""
    num_words: int = 0
    """Codewords of each part."""


class BandColumn(NamedTuple):
    """Table of some bands, which cover its ids in order: ids are line `source`, vectors column `target`."""

    bands: Sequence[StoredBand]
    source: int
    target: int


def fits_triton(bands: Sequence[StoredBand]) -> bool:
    """Whether the kernel takes a table of these bands."""
    for band in bands:
        tensors = [band.data] if band.extra is None else [band.data, band.extra]
        if not all((t.is_cuda or INTERPRETED) and t.is_contiguous() for t in tensors):
            return False
        if tensors[-1].dtype not in FLOATS or band.parts > MAX_PARTS:
            return False
        if band.kind == "grid" and tensors[1].data_ptr() % (2 * tensors[1].element_size()):
            return False  # one load reads zero and step
    return True


def write_band_columns(columns: Sequence[BandColumn], values: Tensor, out: Tensor, *, path: Path | None = None) -> None:
    """Write the vectors of ids `values` [F, B] into columns of `out` [B, F', dim], in its type; no gradients.

    Other columns do not change. Callers that look up the same tables again make a `bands_triton.BandLaunch` once.
    """
    if takes_triton("the lookup in bands", values, path, fits=all(fits_triton(column.bands) for column in columns)):
        from holdall.kernels.bands_triton import BandLaunch

        BandLaunch(columns, values.device).write(values, out)
        return
    for column in columns:
        out[:, column.target] = band_rows_reference(column.bands, values[column.source].long(), out.shape[2])


def band_rows_reference(bands: Sequence[StoredBand], ids: Tensor, dim: int) -> Tensor:
    """Reference by the formulas: float32 rows [B, dim] of int64 ids."""
    found: Tensor | None = None
    for band in bands:
        inside = (ids >= band.start) & (ids < band.end)
        rows = _rows_of_band(band, torch.where(inside, ids - band.start, 0), dim)
        found = rows if found is None else torch.where(inside[:, None], rows, found)
    assert found is not None
    return found


def _rows_of_band(band: StoredBand, ids: Tensor, dim: int) -> Tensor:
    if band.kind == "rows":
        return band.data[ids * band.data.shape[0] // (band.end - band.start)].float()
    assert band.extra is not None
    codes = band.data[ids]
    if band.bits == 4:
        codes = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(1)
    if band.kind == "grid":
        zero, step = band.extra[ids].float().split(1, dim=1)
        return zero + step * codes[:, :dim]
    words = [band.extra[codes[:, part].long() + part * band.num_words].float() for part in range(band.parts)]
    return torch.stack(words).sum(0)
