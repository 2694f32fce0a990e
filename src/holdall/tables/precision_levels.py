"""Levels of precision: the ways in which a band may be stored, and what every one of them loses on the rows of a table.

An error is the expected squared change of a lookup, summed over the expected lookups. With a sensitivity matrix
`S = mean of g g^T`, g the gradient of the model's logit by the looked-up vector, the change e of a row counts
`e^T S e`: its effect on the logit, to first order. Without one, all directions and tables count alike.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from holdall.tables.codebook_fit import decode, encode
from holdall.tables.codes import Codes
from holdall.tables.dense import Dense
from holdall.tables.method import Method
from holdall.tables.metric_kmeans import RowsToCode, metric_codewords
from holdall.tables.quantized import Quantized
from holdall.tables.shared import Shared

Array = npt.NDArray[np.float64]

MAX_CHUNK_ROWS = 1_024
"""Rows of a chunk whose errors are measured, at most; they stand for all of it."""
CODEBOOK_ROWS = 1 << 16
"""Rows of all tables that a codebook is fitted to, at most."""
GROWTH = 1.25
"""Ratio of the starts of two chunks that are next to each other, at most."""
SHRINKAGE = 0.1
"""Share of a sensitivity that is spread over all directions: it is an estimate, and codes must not ignore any."""

TAIL = Shared(1, dtype="float16")
EXACT: tuple[Method, ...] = (Dense("float16"), Quantized(8, scales="float16"), Quantized(4, scales="float16"))
LONG = tuple(Codes(parts, 8, "long", "float16") for parts in (3, 2, 1))
SHORT = tuple(Codes(parts, 4, "short", "float16") for parts in (2, 1))
LADDERS: tuple[tuple[Method, ...], ...] = (
    (*EXACT, *LONG, SHORT[-1]),
    (*EXACT, *LONG),
    (*EXACT, *LONG[1:]),
    (*EXACT, LONG[-1], SHORT[-1]),
    (*EXACT, *SHORT),
    (*EXACT, SHORT[-1]),
    EXACT,
)
"""Sets of levels that are tried, each from the most to the fewest bytes of a row: codebooks cost bytes of their own."""


@dataclass(frozen=True)
class RankedTable:
    """Rows of one table in popularity order, and what is known about their use."""

    weight: Tensor
    """Trained rows [num_rows, dim]; may be a memory map."""
    lookups: Tensor
    """Expected lookups [num_rows]."""
    transform: Tensor
    """[dim, dim]: the squared norm of `e @ transform` is what a change e of a row counts."""

    @property
    def importance(self) -> float:
        """What a change of 1 in a random direction counts."""
        return float(self.transform.square().sum()) / self.transform.shape[0]

    @property
    def coding_weights(self) -> Tensor:
        """What each row counts in the fit of codewords: the square root of what its errors count, so that the rows at
        the popular end of a band do not take all codewords."""
        return (self.lookups * self.importance).sqrt()


def transform_of(sensitivity: Tensor | None, dim: int) -> Tensor:
    """The matrix whose product with a row has the norm that `sensitivity` [dim, dim] gives it."""
    if sensitivity is None:
        return torch.eye(dim)
    even = torch.eye(dim, dtype=torch.float64) * sensitivity.trace().double() / dim
    values, vectors = torch.linalg.eigh((1 - SHRINKAGE) * sensitivity.double() + SHRINKAGE * even)
    return (vectors * values.clamp(min=0.0).sqrt()).float()


@dataclass(frozen=True)
class Curves:
    """Errors of one table by level, summed up from its first row to each of the places where a band may end."""

    ends: npt.NDArray[np.int64]
    """[K]: rows before each place; the first is 0, the last `num_rows`."""
    errors: dict[Method, Array]
    """Of each level, [K]: the error of all rows before a place."""
    tail: Array
    """[K]: the error of all rows from a place on, if they share one row."""


def chunk_ends(lookups: Tensor) -> npt.NDArray[np.int64]:
    """Places [K] where bands may end: where the expected lookups fall by a quarter, and in between where rows are many.

    They are taken as falling: a row in the tail that is looked up often does not open a place.
    """
    num_rows = lookups.shape[0]
    falling = torch.cummin(lookups.clamp(min=1e-9), dim=0).values.log2().div(np.log2(GROWTH)).floor()
    changes = ((falling[1:] != falling[:-1]).nonzero()[:, 0] + 1).numpy()
    grid = np.unique(np.floor(GROWTH ** np.arange(0, np.log(num_rows) / np.log(GROWTH) + 1)).astype(np.int64))
    return np.unique(np.concatenate(([0], changes, grid[grid < num_rows], [num_rows])))


def fit_codebooks(tables: Sequence[RankedTable], levels: Sequence[Codes]) -> dict[str, Tensor]:
    """Codewords [parts, 2^bits, dim], by name, of the codebooks of all levels, fitted to the rows of all tables."""
    widest = {level.codebook: level for level in sorted(levels, key=lambda level: level.parts)}
    found: dict[str, Tensor] = {}
    for name, level in widest.items():
        assert name is not None
        rows = [RowsToCode(table.weight, table.coding_weights, table.transform, level.parts) for table in tables]
        found[name] = metric_codewords(rows, 2**level.bits, CODEBOOK_ROWS).to(torch.float16).float()
    return found


def measure(table: RankedTable, levels: Sequence[Method], codebooks: Mapping[str, Tensor]) -> Curves:
    """Errors of the levels on the rows of a table, from at most `MAX_CHUNK_ROWS` rows of every chunk."""
    ends = chunk_ends(table.lookups)
    places, scales, chunks = [], [], []
    for chunk, (start, end) in enumerate(itertools.pairwise(ends.tolist())):
        step = -(-(end - start) // MAX_CHUNK_ROWS)
        chosen = torch.arange(start, end, step)
        places.append(chosen)
        scales.append(torch.full((len(chosen),), float(end - start) / len(chosen), dtype=torch.float64))
        chunks.append(np.full(len(chosen), chunk))
    place, chunk_of = torch.cat(places), np.concatenate(chunks)
    rows = table.weight[place].detach().float().cpu()
    lookups = table.lookups[place] * torch.cat(scales)

    def summed(values: Tensor) -> Array:
        return np.bincount(chunk_of, weights=values.double().numpy(), minlength=len(ends) - 1).astype(np.float64)

    errors = {}
    for level in levels:
        stored = _stored(rows, level, codebooks, table.transform)
        missed = ((rows - stored) @ table.transform).double().square().sum(dim=1)
        errors[level] = np.concatenate(([0.0], np.cumsum(summed(lookups * missed))))
    seen = (rows @ table.transform).double()
    mass = _from_each(summed(lookups))
    squares = _from_each(summed(lookups * seen.square().sum(dim=1)))
    sums = np.stack([_from_each(summed(lookups * seen[:, column])) for column in range(seen.shape[1])])
    tail = np.maximum(squares - np.square(sums).sum(axis=0) / np.maximum(mass, 1e-300), 0.0)
    return Curves(ends, errors, tail)


def coding_error(table: RankedTable, place: slice, parts: int, words: Tensor) -> float:
    """Error of the rows at `place` as codes of `parts` of these codewords [.., num_words, dim].

    Of many rows, the first `MAX_CHUNK_ROWS`, which are looked up most, and as many that stand for the others.
    """
    first = min(place.start + MAX_CHUNK_ROWS, place.stop)
    step = max(1, -(-(place.stop - first) // MAX_CHUNK_ROWS))
    chosen = torch.cat((torch.arange(place.start, first), torch.arange(first, place.stop, step)))
    scale = torch.where(chosen < first, 1.0, float(step))
    rows, words = table.weight[chosen].detach().float().cpu(), words[:parts].to(torch.float16).float()
    missed = (rows - decode(encode(rows @ table.transform, words @ table.transform), words)) @ table.transform
    return float((table.lookups[chosen] * scale * missed.double().square().sum(dim=1)).sum())


def _stored(rows: Tensor, level: Method, codebooks: Mapping[str, Tensor], transform: Tensor) -> Tensor:
    """`rows` [n, dim] as a band of this level gives them back; codes of the codewords that are nearest transformed."""
    if isinstance(level, Codes):
        assert level.codebook is not None
        words = codebooks[level.codebook][: level.parts]
        return decode(encode(rows @ transform, words @ transform), words)
    return level.fit(rows).materialize().float()


def _from_each(sums: Array) -> Array:
    """Sums [K] of the chunks from each place on, the last of none."""
    return np.concatenate((np.cumsum(sums[::-1])[::-1], [0.0]))
