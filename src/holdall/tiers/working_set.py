"""Working set of a step: the rows that it needs and that are not hot, and their slots in a staging buffer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor


@dataclass
class WorkingSet:
    """Distinct rows, ascending: row `rows[i]` is in slot i of its staging buffer."""

    rows: Tensor
    """[U] int64 row numbers of the host's storage, on the device of the ids."""
    located: Tensor | None = None
    """[B, P] row numbers of the device's storage, for the ids of a one-hot batch."""
    names: Sequence[str] = ()
    """The tables of those P features."""
    buffer: int = 0
    """Number of its staging buffer."""
    located_in_buffer: bool = False
    """Whether `located` refers to the set's own buffer; to the first one otherwise."""
    num_host_lookups: int | None = None
    """Lookups of rows that are not hot; None where only the device has the number."""
    source: Tensor | None = None
    """[U] int64: the buffer and slot that own a row, by `kernels.host_rows.find_in_buffers`; -1 for none."""
    looked_up: Tensor | None = None
    """Rows of all lookups, in order of ids, which the step counts; None where hot rows are not exchanged."""
    fixed_located: Tensor | None = None
    """`located` in the set's own buffer, at a fixed address, safe to capture in a CUDA graph."""


@dataclass
class CopySet(WorkingSet):
    """Working set whose size the host has; `source` is of the rows at `owned` only."""

    owned: Tensor | None = None
    """Slots of the rows that other staging buffers own, if there are any."""
    unowned: Tensor | None = None
    """Slots of the other rows then."""

    @cached_property
    def host_rows(self) -> Tensor:
        """`rows` on the host; on a GPU this waits for it."""
        return self.rows.cpu()


@dataclass
class KernelSet(WorkingSet):
    """Working set whose size only the device has: `rows` [C] fills its buffer, padded with NO_ROW."""

    counts: Tensor | None = None
    """[3] int32 on the device: host lookups, distinct host rows, rows that other buffers own."""
    max_lookups: int = 0
    """Host lookups that were processed at most."""
    fixed_addresses: bool = False
    """Whether the next step in its buffer has its tensors at the same addresses: safe to capture in a CUDA graph."""
    host_counts: Tensor | None = None
    """`counts` on the host, after `counted`."""
    counted: Any = None
    """CUDA event; None once `host_counts` is complete."""

    def wait_for_counts(self) -> tuple[int, int, int]:
        assert self.host_counts is not None
        if self.counted is not None:
            self.counted.synchronize()
            self.counted = None
        num_lookups, num_rows, num_owned = self.host_counts.tolist()
        return num_lookups, num_rows, num_owned
