"""Row mover by kernels that read and write pinned host memory; row numbers stay on the device.

All host rows of the pack are pinned for that. Finding a step's rows and their owners, fetching them and writing them
back are then a dozen launches that wait for nothing. The host reads only the number of rows, a few steps
later, to detect overflow. See `holdall.kernels.host_rows_triton`.

The working sets of one staging buffer share their tensors, at fixed addresses, so that the launches can be captured in
CUDA graphs and replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from holdall.data.batch import features_at
from holdall.kernels.host_rows import NO_ROW, InitialRowParams
from holdall.runtime.launch_graphs import LaunchGraphs, address_key
from holdall.tables.hashing import stream
from holdall.tables.initial_rows import quantiles
from holdall.tiers.host_rows import InitialValues
from holdall.tiers.pinned_memory import pin
from holdall.tiers.row_mover import FeatureTables, RowMover
from holdall.tiers.staging import with_spare
from holdall.tiers.tiered_storage import TieredStorage
from holdall.tiers.working_set import KernelSet


@dataclass(frozen=True)
class SetTensors:
    """Tensors that the working sets of one staging buffer share; their fields as in `KernelSet`."""

    rows: Tensor
    located: Tensor
    """[L], for the lookups of the largest batch so far."""
    counts: Tensor
    source: Tensor
    host_counts: Tensor


class KernelMover(RowMover[KernelSet]):
    """Mover by kernels, of rows in host memory."""

    fixed_addresses = True

    def __init__(self, pack: TieredStorage):
        super().__init__(pack)
        self.max_lookups = 0
        """Host lookups of a batch that are processed at most."""
        self.beside_steps = False
        """Whether rows move while steps compute."""
        initial = pack.host_rows.initial
        self._initial = None if initial is None else _kernel_params(initial, pack.device)
        self._info: dict[tuple[str, ...], Tensor] = {}
        self._tensors: dict[int, SetTensors] = {}
        """By staging buffer."""
        self.launches = LaunchGraphs(pack.device)
        self.host_rows_added()

    def host_rows_added(self) -> None:
        """Pin the rows and state that are not pinned yet."""
        if self.pack.device.type != "cuda":
            return
        for host in self.pack.host_tensors():
            pin(host.tensor, host)
        if self.pack.host_rows.touched is not None:
            pin(self.pack.host_rows.touched, self.pack.host_rows)

    def buffers_replaced(self) -> None:
        self.launches.clear()

    def configure(self, *, beside_steps: bool, graphs: bool) -> None:
        self.beside_steps = beside_steps
        self.launches.off = not graphs

    # --- find --------------------------------------------------------------------------------------------------------

    def find(self, places: Tensor, tables: FeatureTables, buffer: int, *, temporary: bool) -> KernelSet:
        from holdall.kernels import host_rows_triton

        names, positions, samples = tables.names, tables.positions, places.shape[1]
        if names not in self._info:
            columns = (tables.hot, tables.device_starts, tables.host_starts)
            self._info[names] = torch.stack(columns, dim=1).contiguous()
        info, first, max_lookups = self._info[names], self.pack.staging.start(buffer), self.max_lookups
        tensors = self._tensors_of(buffer, samples * len(names))
        rows, counts = tensors.rows, tensors.counts
        located = tensors.located[: samples * len(names)].view(samples, len(names))

        def launch() -> None:
            chosen = features_at(places, positions)
            host_rows_triton.find_host_rows(chosen, info, located, rows, counts, max_lookups, first)

        what = ("find", names, tuple(positions), places.stride(), max_lookups, first)
        self.launches.run(None if temporary else (what, address_key(places, located, rows, counts)), launch)
        return KernelSet(
            rows,
            located,
            names,
            buffer,
            located_in_buffer=True,
            counts=counts,
            max_lookups=max_lookups,
            fixed_addresses=True,
        )

    def _tensors_of(self, buffer: int, num_lookups: int) -> SetTensors:
        """Those of a staging buffer, large enough for so many lookups."""
        pack, tensors = self.pack, self._tensors.get(buffer)
        buffer_rows = pack.staging.buffer_rows
        if tensors is None or tensors.rows.numel() != buffer_rows or tensors.located.numel() < num_lookups:
            narrow = torch.int32 if pack.storage.shape[0] < 2**31 else torch.int64
            rows = torch.empty(buffer_rows, dtype=torch.int64, device=pack.device)
            located = torch.empty(num_lookups, dtype=narrow, device=pack.device)
            counts = torch.empty(3, dtype=torch.int32, device=pack.device)
            host_counts = torch.empty(3, dtype=torch.int32, pin_memory=counts.is_cuda)
            self._tensors[buffer] = tensors = SetTensors(rows, located, counts, torch.empty_like(rows), host_counts)
        return tensors

    def working_set(self, rows: Tensor, num_lookups: int, buffer: int) -> KernelSet:
        device = self.pack.device
        padded = torch.full((self.pack.staging.buffer_rows,), NO_ROW, dtype=torch.int64, device=device)
        padded[: rows.numel()] = rows[: padded.numel()]
        counts = torch.tensor([num_lookups, rows.numel(), 0], dtype=torch.int32, device=device)
        return KernelSet(
            padded,
            buffer=buffer,
            num_host_lookups=num_lookups,
            counts=counts,
            max_lookups=max(self.max_lookups, num_lookups),
        )

    def find_owners(self, working: KernelSet, newest_first: Sequence[KernelSet]) -> None:
        from holdall.kernels import host_rows_triton

        rows, counts = working.rows, working.counts
        assert counts is not None
        buffers = [(other.buffer, other.rows) for other in reversed(newest_first) if other.rows.numel()]
        if buffers and rows.numel():
            source = self._tensors[working.buffer].source if working.fixed_addresses else torch.empty_like(rows)
            what = (
                "owners",
                address_key(source, *(theirs for _, theirs in buffers)),
                tuple(number for number, _ in buffers),
            )
            self._launch(what, working, lambda: host_rows_triton.find_in_buffers(rows, counts, buffers, source))
            working.source = source
        self._copy_counts(working)

    def _copy_counts(self, working: KernelSet) -> None:
        """Copy the counts of a set to the host, which waits for them when it needs them."""
        assert working.counts is not None
        on_gpu = working.counts.is_cuda
        if working.fixed_addresses:
            working.host_counts = self._tensors[working.buffer].host_counts
        else:
            working.host_counts = torch.empty(3, dtype=torch.int32, pin_memory=on_gpu)
        working.host_counts.copy_(working.counts, non_blocking=True)
        if on_gpu:
            working.counted = torch.cuda.current_stream(self.pack.device).record_event()

    def required_rows(self, working: KernelSet) -> int:
        num_lookups, num_rows, _ = working.wait_for_counts()
        if num_lookups > working.max_lookups:
            self.max_lookups = max(self.max_lookups, with_spare(num_lookups))
            return num_lookups  # the rows of some were not counted; there are no more rows than lookups
        if num_rows > working.rows.numel():
            return num_rows
        buffer_rows = self.pack.staging.buffer_rows
        return buffer_rows if working.rows.numel() != buffer_rows else 0  # found for buffers of another size

    # --- fetch, forward, write back ----------------------------------------------------------------------------------

    def fetch(self, working: KernelSet, *, counted: bool = True) -> None:
        """Traffic is counted by `write_back`, when the host has the number of rows."""
        self._copy(working, write_back=False)

    def forward(self, working: KernelSet) -> None:
        if working.source is not None:
            tensors = self.pack.device_tensors()
            self._launch(("forward", address_key(*tensors)), working, lambda: self._launch_forward(tensors, working))

    def write_back(self, working: KernelSet) -> None:
        self._copy(working, write_back=True)
        num_lookups, num_rows, num_owned = working.wait_for_counts()
        traffic, row_bytes = self.pack.traffic, self.pack.row_bytes()
        if working.num_host_lookups is None:
            assert working.located is not None
            traffic.hot_lookups += working.located.numel() - num_lookups
        traffic.fetched_rows += num_rows - num_owned
        traffic.fetched += (num_rows - num_owned) * row_bytes
        traffic.written_back += num_rows * row_bytes

    def _copy(self, working: KernelSet, *, write_back: bool) -> None:
        """Launch the copies of a set's rows into its buffer, or `write_back` to the host."""
        host, buffers = [host.tensor for host in self.pack.host_tensors()], self.pack.buffer_views(working)
        touched = self.pack.host_rows.touched if write_back else None
        what = ("copy", write_back, self.beside_steps, address_key(touched, *host, *buffers))
        self._launch(what, working, lambda: self._launch_copy(host, buffers, touched, working, write_back=write_back))

    def _launch(self, what: Hashable, working: KernelSet, launch: Callable[[], None]) -> None:
        """Run the launches of a set, named by `what`, which depend on nothing else but its buffer and tensors."""
        key = None
        if working.fixed_addresses:
            key = (what, working.buffer, address_key(working.rows, working.counts, working.source))
        self.launches.run(key, launch)

    def _launch_copy(
        self, host: list[Tensor], buffers: list[Tensor], touched: Tensor | None, working: KernelSet, *, write_back: bool
    ) -> None:
        from holdall.kernels import host_rows_triton

        assert working.counts is not None
        for number, (there, here) in enumerate(zip(host, buffers, strict=True)):
            host_rows_triton.copy_rows(
                _as_matrix(there),
                working.rows,
                working.counts,
                _as_matrix(here),
                write_back=write_back,
                source=None if write_back else working.source,
                initial=self._initial if number == 0 else None,
                touched=touched if number == 0 else None,
                shape=host_rows_triton.BESIDE_STEPS if self.beside_steps else host_rows_triton.WHOLE_DEVICE,
            )

    def _launch_forward(self, tensors: list[Tensor], working: KernelSet) -> None:
        from holdall.kernels import host_rows_triton

        assert working.counts is not None
        assert working.source is not None
        for tensor in tensors:
            host_rows_triton.copy_between_buffers(
                _as_matrix(tensor),
                working.source,
                working.counts,
                num_hot=self.pack.staging.num_hot,
                buffer_rows=self.pack.staging.buffer_rows,
                own_buffer=working.buffer,
                num_rows=working.rows.numel(),
            )


def _as_matrix(rows: Tensor) -> Tensor:
    """Rows as [R, W]."""
    return rows if rows.ndim == 2 else rows[:, None]


def _kernel_params(initial: InitialValues, device: torch.device) -> InitialRowParams:
    there = initial.to(device)
    return InitialRowParams(there.starts, there.seeds, there.stds, quantiles(device), (stream(0), stream(1)))
