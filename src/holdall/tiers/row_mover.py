"""Interface through which the rows of a step move between the host and a staging buffer on the device.

The rows of a step are found, fetched before it computes, and written back after it. If an earlier step in
flight has the same row, that step's staging buffer has the newest copy: the row is not fetched from the host but
forwarded from buffer to buffer, once the earlier step is done. Implemented by `CopyMover` and `KernelMover`; called by
`Pipeline`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Generic, NamedTuple, TypeVar

from torch import Tensor

from holdall.tiers.tiered_storage import TieredStorage
from holdall.tiers.working_set import WorkingSet

AnySet = TypeVar("AnySet", bound=WorkingSet)


class FeatureTables(NamedTuple):
    """The T features of a batch whose tables are in one pack."""

    positions: Sequence[int]
    """Of the features in the batch."""
    names: tuple[str, ...]
    """Their tables."""
    hot: Tensor
    """[T] int64: hot rows of each table."""
    device_starts: Tensor
    """[T] int64: first hot row of each table in the device's storage."""
    host_starts: Tensor
    """[T] int64: first row of each table in the host's storage."""


class RowMover(ABC, Generic[AnySet]):
    """Mover of the rows of a pack, weights and optimizer state alike.

    It adds the bytes and rows that it moves for steps to the pack's `traffic`.
    """

    fixed_addresses: ClassVar[bool]
    """Whether it moves rows by launches alone, on tensors at fixed addresses: nothing waits for the device, and the
    launches are safe to capture in CUDA graphs."""

    def __init__(self, pack: TieredStorage):
        self.pack = pack

    @abstractmethod
    def find(self, places: Tensor, tables: FeatureTables, buffer: int, *, temporary: bool) -> AnySet:
        """Working set of a one-hot batch, for a staging buffer.

        `places` [F, B] are row numbers within the tables, those of `tables` at its positions. They are `temporary` if
        the next batch in this buffer has them at another address.
        """

    @abstractmethod
    def working_set(self, rows: Tensor, num_lookups: int, buffer: int) -> AnySet:
        """Working set of rows, distinct and ascending, that so many lookups need."""

    @abstractmethod
    def find_owners(self, working: AnySet, newest_first: Sequence[AnySet]) -> None:
        """Note the rows that the staging buffers of earlier steps own: each is owned by the newest that has it."""

    @abstractmethod
    def required_rows(self, working: AnySet) -> int:
        """Rows that staging buffers must have for this set; 0 if it fits. On a GPU this may wait for it."""

    @abstractmethod
    def fetch(self, working: AnySet, *, counted: bool = True) -> None:
        """Copy rows from the host into the set's buffer, except those that other buffers own.

        A set that does not fit is left for the caller to see (`required_rows`). Traffic is counted if `counted`.
        """

    @abstractmethod
    def forward(self, working: AnySet) -> None:
        """Copy the rows that other buffers own into the set's; their steps must be done."""

    @abstractmethod
    def write_back(self, working: AnySet) -> None:
        """Copy the rows of the set, updated, to the host."""

    @abstractmethod
    def host_rows_added(self) -> None:
        """Prepare host rows that the pack has now and did not have before: weights, or optimizer state."""

    @abstractmethod
    def buffers_replaced(self) -> None:
        """Drop what depends on the addresses of the staging buffers. Nothing may be moving."""

    @abstractmethod
    def configure(self, *, beside_steps: bool, graphs: bool) -> None:
        """Whether rows move while steps compute, and whether launches are captured in CUDA graphs."""
