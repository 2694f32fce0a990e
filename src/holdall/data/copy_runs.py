"""Copies of runs of neighbouring rows out of several arrays, most of them by one indexed copy an array.

Runs of one length that begin at the same remainder are rows of a wider matrix, whose row is a whole run. So a call of
torch copies all runs of an array, without Python's time for each run, without the GIL, and on several threads.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from holdall.data.chunk_order import Runs
from holdall.data.columns import Array, offsets_of


def copy_runs(parts: Sequence[Array], starts: Sequence[int], runs: Runs) -> Array:
    """The rows of the runs, one after the other; row `starts[i] + j` is `parts[i][j]`, `starts` has the end as well."""
    offsets = offsets_of(runs.lengths)
    made = np.empty((int(offsets[-1]), *parts[0].shape[1:]), dtype=parts[0].dtype)
    size = int(runs.lengths.max(initial=1))
    bounds = np.asarray(starts)
    part_of = np.searchsorted(bounds, runs.starts, side="right") - 1
    whole = (runs.lengths == size) & (runs.starts + size <= bounds[part_of + 1])
    left = np.ones(len(runs.starts), dtype=bool)
    for part in np.unique(part_of[whole]).tolist():
        own = np.flatnonzero(whole & (part_of == part))
        from_row, to_row = runs.starts[own] - starts[part], offsets[own]
        aligned = (from_row % size == from_row[0] % size) & (to_row % size == to_row[0] % size)
        from_row, to_row = from_row[aligned], to_row[aligned]
        rows = _as_runs(parts[part], int(from_row[0] % size), size).index_select(0, torch.from_numpy(from_row // size))
        _as_runs(made, int(to_row[0] % size), size).index_copy_(0, torch.from_numpy(to_row // size), rows)
        left[own[aligned]] = False
    for run in np.flatnonzero(left).tolist():
        _copy_one(parts, starts, int(runs.starts[run]), made[int(offsets[run]) : int(offsets[run + 1])])
    return made


def _as_runs(array: Array, first: int, size: int) -> Tensor:
    """The rows from `first` on as a matrix with a run of `size` rows in each of its rows."""
    number = (len(array) - first) // size
    return torch.from_numpy(array)[first : first + number * size].view(number, -1)


def _copy_one(parts: Sequence[Array], starts: Sequence[int], row: int, made: Array) -> None:
    """Fill `made` with the rows from `row` on, which may be in several parts."""
    part = int(np.searchsorted(starts, row, side="right")) - 1
    done = 0
    while done < len(made):
        found = parts[part][row + done - starts[part] :][: len(made) - done]
        made[done : done + len(found)] = found
        done, part = done + len(found), part + 1
