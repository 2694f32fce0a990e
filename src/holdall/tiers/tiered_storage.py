"""Storage of a pack of dense tables in tiers: all rows in host memory or on disk, hot ones on the device too.

The host has every row, the tables concatenated, as in a `DensePack`: checkpoints read and write those. The device has

    [ hot rows of table 1 | hot rows of table 2 | ... | staging buffer of a step | staging buffer of another | ... ]

and optimizer state is laid out like the rows, on both. The device owns the hot rows, until `flush` copies them to the
host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from holdall.common.errors import ConfigError
from holdall.embedding.dense_pack import DensePack
from holdall.tiers.host_rows import HostRows, stored_rows
from holdall.tiers.lazy_tensor import LazyTensor
from holdall.tiers.staging import Staging
from holdall.tiers.traffic import TierTraffic
from holdall.tiers.working_set import WorkingSet


class TieredStorage(DensePack):
    """`host`'s tables with the first `hot_rows[name]` rows of each on `device`, and staging buffers for steps.

    `refill` gives the device its hot rows.
    """

    def __init__(
        self,
        host: DensePack,
        hot_rows: Mapping[str, int],
        device: torch.device | str,
        *,
        num_buffers: int = 1,
        folder: Path | None = None,
    ):
        for name in host.tables:
            if not 0 <= hot_rows[name] <= host.tables[name].num_rows:
                raise ConfigError(
                    f"table '{name}' cannot have {hot_rows[name]} hot rows: it has {host.tables[name].num_rows} rows"
                )
        self.host = host
        self.tables, self.starts = host.tables, host.starts
        self.collects, self.gradients, self._stand_ins = False, [], []
        self.device = torch.device(device)
        self.hot_rows = {name: hot_rows[name] for name in host.tables}
        self.device_starts: dict[str, int] = {}
        """First hot row of each table in the device's storage."""
        num_hot = 0
        for name, rows in self.hot_rows.items():
            self.device_starts[name] = num_hot
            num_hot += rows
        self.staging = Staging(num_hot, num_buffers)
        self.storage = torch.empty(num_hot, host.storage.shape[1], dtype=host.storage.dtype, device=self.device)
        self.slots: dict[str, Tensor] = {}
        self.host_rows, self._new_host_rows = stored_rows(host, folder)
        self.host_slots: dict[str, HostRows] = {}
        self.traffic = TierTraffic()
        self.synchronize: Callable[[], None] = lambda: None
        """Waits until all rows are written back; set by a pipeline that writes back in the background."""

    def repack(self) -> None:
        """Keep the tables' weights views of the host's storage, where it has one."""
        if not self.lazy:
            self.host.collects = self.collects
            self.host.repack()

    def allocate_slots(self, make: Callable[[Tensor], dict[str, Tensor]]) -> dict[str, Tensor]:
        self.slots = make(self.storage)
        shapes = make(torch.empty(self.host.storage.shape, dtype=self.storage.dtype, device="meta"))
        self.host_slots = {slot: self._new_host_rows(state) for slot, state in shapes.items()}
        return self.slots

    def device_tensors(self) -> list[Tensor]:
        """The device's weights and optimizer state."""
        return [self.storage, *self.slots.values()]

    def host_tensors(self) -> list[HostRows]:
        """The host's weights and optimizer state, in the order of `device_tensors`."""
        return [self.host_rows, *(self.host_slots[slot] for slot in self.slots)]

    def row_bytes(self) -> int:
        """Bytes of a row and its state."""
        return sum(tensor[:1].nbytes for tensor in self.device_tensors())

    # --- staging buffers ---------------------------------------------------------------------------------------------

    def buffer_views(self, working: WorkingSet) -> list[Tensor]:
        """The rows of a working set, weights and state, as views of its staging buffer."""
        start = self.staging.start(working.buffer)
        return [tensor[start : start + working.rows.numel()] for tensor in self.device_tensors()]

    def reserve(self, num_rows: int) -> None:
        """Grow the staging buffers to so many rows each, and some to spare. Nothing may be moving."""
        if num_rows <= self.staging.buffer_rows:
            return
        names, tensors = list(self.slots), self.device_tensors()
        self.storage, self.slots = self.storage[:0].clone(), {}  # `tensors` now has the only references
        self.storage, *slots = self.staging.grow(num_rows, tensors)
        self.slots = dict(zip(names, slots, strict=True))

    # --- hot rows ----------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Copy the hot rows and their state to the host, a slice a table: the host then has every row up to date."""
        self.synchronize()
        with torch.no_grad():
            for host, tensor in zip(self.host_tensors(), self.device_tensors(), strict=True):
                for name, hot in self._hot_slices(tensor):
                    host.write_slice(self.starts[name], hot)
                    self.traffic.flushed += hot.nbytes

    def refill(self) -> None:
        """Copy the hot rows and their state from the host, as after loading a checkpoint into it."""
        touched = self.host_rows.touched
        with torch.no_grad():
            for host, tensor in zip(self.host_tensors(), self.device_tensors(), strict=True):
                for name, hot in self._hot_slices(tensor):
                    start = self.starts[name]
                    written = touched is None or bool(touched[start : start + hot.shape[0]].any())
                    self.traffic.flushed += host.copy_slice(start, hot, written=written)

    def _hot_slices(self, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The hot rows of each table in one of the device's tensors."""
        for name, rows in self.hot_rows.items():
            yield name, tensor[self.device_starts[name] : self.device_starts[name] + rows]

    # --- checkpoints -------------------------------------------------------------------------------------------------

    @property
    def lazy(self) -> bool:
        """Whether rows take no memory until they are written; the tables' weights are on `meta` then."""
        return self.host.storage.is_meta

    def slot_views(self, name: str) -> dict[str, Any]:
        if self.lazy:
            return {slot: self._saved(rows, name, {"std": 0.0, "seed": 0}) for slot, rows in self.host_slots.items()}
        return {slot: self.host.view(rows.tensor, name) for slot, rows in self.host_slots.items()}

    def saved_weight(self, name: str) -> LazyTensor:
        """The rows of a lazy table, as a checkpoint saves them."""
        table = self.tables[name]
        return self._saved(self.host_rows, name, {"std": table.init_std, "seed": table.seed})

    def _saved(self, rows: HostRows, name: str, initial: dict[str, Any]) -> LazyTensor:
        assert self.host_rows.touched is not None
        return LazyTensor(rows, self.host_rows.touched, self.starts[name], self.tables[name].num_rows, initial)
