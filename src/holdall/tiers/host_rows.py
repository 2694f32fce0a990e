"""Rows in host memory or in memory-mapped files, with initial values that take no storage.

A lazy table stores the exclusive-or of a row's bits with the bits of its initial values. Rows that were never written
are stored as zeros, which take no pages of memory, and a row is read back exact to the bit.
(`holdall.tables.initial_rows` computes initial values from seed and row number.)
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from holdall.embedding.dense_pack import DensePack
from holdall.tables.initial_rows import initial_rows
from holdall.tiers.mapped_file import MappedFile

_BITS = {
    torch.float32: torch.int32,
    torch.float64: torch.int64,
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
}
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Linux's value, where Python does not have the name
FILL_ROWS = 1 << 18
"""Rows that are decoded at a time when lazy rows are copied to a device."""


class HostRows:
    """Rows [R, ...] in host memory. Subclasses may store something else (`raw`) than a row's values."""

    touched: Tensor | None = None
    """[R] bool: the rows that were ever written; None where that is not tracked."""
    initial: InitialValues | None = None
    """Initial values of rows that were never written; None where those are stored like all others."""
    on_disk = False

    def __init__(self, tensor: Tensor):
        self.tensor = tensor

    def read_raw(self, rows: Tensor, out: Tensor | None = None) -> Tensor:
        """The stored form of the given rows [U] int64, in `out` if given."""
        return torch.index_select(self.tensor, 0, rows, out=out)

    def write_raw(self, rows: Tensor, raw: Tensor) -> None:
        """Replace the stored form of the given rows, which are distinct."""
        self.tensor.index_copy_(0, rows, raw)

    def decode_(self, rows: Tensor, raw: Tensor) -> Tensor:
        """Turn the stored form of rows into their values, in place, on the device of both."""
        return raw

    def encode(self, rows: Tensor, values: Tensor) -> Tensor:
        """The stored form of these values of rows, on the device of both."""
        return values

    def read(self, rows: Tensor, out: Tensor | None = None) -> Tensor:
        """The values of the given rows."""
        return self.decode_(rows, self.read_raw(rows, out))

    def write(self, rows: Tensor, values: Tensor) -> None:
        """Replace the values of the given rows."""
        self.write_raw(rows, self.encode(rows, values))

    def read_slice(self, start: int, stop: int) -> Tensor:
        return self.tensor[start:stop]

    def write_slice(self, start: int, values: Tensor) -> None:
        self.tensor[start : start + values.shape[0]].copy_(values)

    def copy_slice(self, start: int, out: Tensor, *, written: bool) -> int:
        """Copy the rows from `start` on to `out`, on any device; the bytes moved. None was ever written if not
        `written`: nothing is moved then."""
        if not written:
            out.zero_()
            return 0
        out.copy_(self.read_slice(start, start + out.shape[0]))
        return out.nbytes


def unreserved(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros in memory whose pages are allocated on first write; their sum may exceed the memory of the machine."""
    num_bytes = max(1, torch.Size(shape).numel() * dtype.itemsize)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
    numbers = torch.frombuffer(memory, dtype=torch.uint8)[: torch.Size(shape).numel() * dtype.itemsize]
    return numbers.view(dtype).view(*shape)


class DiskRows(HostRows):
    """Rows in a memory-mapped file on the disk of a folder, zeros at first."""

    on_disk = True

    def __init__(self, folder: Path, shape: Sequence[int], dtype: torch.dtype):
        num_bytes = max(1, torch.Size(shape).numel() * dtype.itemsize)
        self.file = MappedFile(folder, num_bytes)
        super().__init__(self.file.tensor(shape, dtype))

    def read_raw(self, rows: Tensor, out: Tensor | None = None) -> Tensor:
        self.file.before_access(rows.numel())
        return super().read_raw(rows, out)

    def write_raw(self, rows: Tensor, raw: Tensor) -> None:
        self.file.before_access(rows.numel())
        super().write_raw(rows, raw)


@dataclass(frozen=True)
class InitialValues:
    """Initial values of the rows of several concatenated tables."""

    starts: Tensor
    """[T] int64: the first row of each table, ascending from 0."""
    seeds: Tensor
    """[T] int64."""
    stds: Tensor
    """[T] float32."""

    def rows(self, rows: Tensor, dim: int) -> Tensor:
        """[U, dim] float32: the initial values of the given rows."""
        table = torch.searchsorted(self.starts, rows, right=True) - 1
        return initial_rows(rows - self.starts[table], dim, self.seeds[table], self.stds[table])

    def to(self, device: torch.device) -> InitialValues:
        return InitialValues(self.starts.to(device), self.seeds.to(device), self.stds.to(device))


class LazyRows(HostRows):
    """Rows over a `store` of zeros: a row's values are its `initial` ones, exclusive-or what is stored.

    `touched` takes a byte a row.
    """

    touched: Tensor
    initial: InitialValues

    def __init__(self, store: HostRows, initial: InitialValues):
        super().__init__(store.tensor)
        self.store = store
        self.touched = torch.zeros(store.tensor.shape[0], dtype=torch.bool)
        self.initial, self.on_disk = initial, store.on_disk
        self._initial_on = {torch.device("cpu"): initial}

    def read_raw(self, rows: Tensor, out: Tensor | None = None) -> Tensor:
        return self.store.read_raw(rows, out)

    def write_raw(self, rows: Tensor, raw: Tensor) -> None:
        self.store.write_raw(rows, raw)
        self.touched[rows] = True

    def decode_(self, rows: Tensor, raw: Tensor) -> Tensor:
        raw.view(_BITS[raw.dtype]).bitwise_xor_(self._initial_bits(rows))
        return raw

    def encode(self, rows: Tensor, values: Tensor) -> Tensor:
        bits = values.contiguous().view(_BITS[values.dtype]) ^ self._initial_bits(rows)
        return bits.view(values.dtype)

    def _initial_bits(self, rows: Tensor) -> Tensor:
        if rows.device not in self._initial_on:
            self._initial_on[rows.device] = self.initial.to(rows.device)
        values = self._initial_on[rows.device].rows(rows, self.tensor.shape[1]).to(self.tensor.dtype)
        return values.view(_BITS[self.tensor.dtype])

    def read_slice(self, start: int, stop: int) -> Tensor:
        return self.read(torch.arange(start, stop))

    def write_slice(self, start: int, values: Tensor) -> None:
        self.write(torch.arange(start, start + values.shape[0]), values.cpu())

    def copy_slice(self, start: int, out: Tensor, *, written: bool) -> int:
        """Initial values are computed on the device of `out`, a block of rows at a time."""
        if written and out.device.type == "cpu":
            return super().copy_slice(start, out, written=True)
        for first in range(0, out.shape[0], FILL_ROWS):
            block = out[first : first + FILL_ROWS]
            rows = torch.arange(start + first, start + first + block.shape[0], device=out.device)
            stored = self.tensor[start + first :][: rows.numel()].to(out.device) if written else torch.zeros_like(block)
            block.copy_(self.decode_(rows, stored))
        return out.nbytes if written else 0


def stored_rows(host: DensePack, folder: Path | None) -> tuple[HostRows, Callable[[Tensor], HostRows]]:
    """Host rows of a pack, and a function that allocates more of the same kind, by shape.

    The storage of the pack itself; or, if it has none yet, lazy rows in memory or (with a `folder`) in files.
    """
    if not host.storage.is_meta:
        return HostRows(host.storage), lambda like: HostRows(torch.zeros(like.shape, dtype=like.dtype))

    def new(like: Tensor) -> HostRows:
        if folder is None:
            return HostRows(unreserved(like.shape, like.dtype))
        return DiskRows(folder, like.shape, like.dtype)

    tables = host.tables.values()
    seeds = [table.seed for table in tables if table.seed is not None]
    assert len(seeds) == len(host.tables), "every table draws a seed"
    initial = InitialValues(
        starts=torch.tensor([host.starts[name] for name in host.tables]),
        seeds=torch.tensor(seeds),
        stds=torch.tensor([table.init_std for table in tables]),
    )
    return LazyRows(new(host.storage), initial), new
