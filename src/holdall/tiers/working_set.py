"""The rows of a step that are not hot: which they are, where in the device's storage they go, and who has them now."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor


@dataclass
class WorkingSet:
    """Rows distinct and ascending: row `rows[i]` is at place i of its room."""

    rows: Tensor
    """[U] int64 row numbers of the host's storage, where the ids are."""
    located: Tensor | None = None
    """[B, P] row numbers of the device's storage, for the ids of a one-hot batch."""
    names: Sequence[str] = ()
    """The tables of those P features."""
    in_room: bool = False
    """Whether `located` is of the room of this set, or as if that were the first."""
    room: int = 0
    source: Tensor | None = None
    """[U] int64: the other buffer with a newer copy of a row, by `kernels.host_rows.find_in_buffers`."""
    held: Tensor | None = None
    """Places of the rows that other rooms hold, where there are any."""
    fetched: Tensor | None = None
    """Places of the others then."""
    entered: Tensor | None = None
    """`located` in the room of this set, at an address that is the same for all steps; see `TieredPack.enter`."""

    @cached_property
    def host_rows(self) -> Tensor:
        """`rows` on the host; on a GPU this waits for it."""
        return self.rows.cpu()


@dataclass
class KernelSet(WorkingSet):
    """A working set that the host has not seen: `rows` [C] is as long as its room, and NO_ROW behind the last row."""

    counts: Tensor | None = None
    """[3] int32 on the device: far lookups, distinct far rows, rows that other rooms hold."""
    num_listed: int = 0
    """Far lookups that there was place for."""
    stays: bool = False
    """Whether its tensors are where those of the next step in its room will be."""
    seen: Tensor | None = None
    """`counts` on the host, once `counted`."""
    counted: Any = None
    """CUDA event; None when `seen` has been written."""

    def numbers(self) -> tuple[int, int, int]:
        """`counts`, waiting for them."""
        assert self.seen is not None
        if self.counted is not None:
            self.counted.synchronize()
            self.counted = None
        far, rows, held = self.seen.tolist()
        return far, rows, held
