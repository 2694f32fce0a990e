"""Where the rows that are not on the device live: in host memory, or in a file larger than it.

Rows of large tables need no storage until they are touched: what is stored is the exclusive-or of a row's bits with
those of its initial values, so untouched rows are zeros, which neither memory nor a sparse file holds, and the row that
comes back is exact to the bit. (`holdall.tables.initial_rows` makes the initial values from seed and row number.)
"""

from __future__ import annotations

import mmap
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from holdall.common.errors import ConfigError, TierError
from holdall.common.sizes import readable_bytes
from holdall.embedding.dense_pack import DensePack
from holdall.tables.initial_rows import initial_rows

_BITS = {
    torch.float32: torch.int32,
    torch.float64: torch.int64,
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
}
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Linux's value, where Python does not know the name
RESIDENT_BYTES = 1 << 30
"""Mapped pages of a file that may stay with the process before it lets go of them (the system keeps them cached)."""


def exceeds_resident(num_bytes: int) -> bool:
    """Whether a file of so many bytes is more than may stay mapped."""
    return num_bytes > RESIDENT_BYTES


class HostRows:
    """Rows [R, ...] in host memory. What is stored of a row (`raw`) may be another thing than its values."""

    def __init__(self, tensor: Tensor):
        self.tensor = tensor

    def read_raw(self, rows: Tensor, out: Tensor | None = None) -> Tensor:
        """What is stored of the named rows [U] int64, into `out` if given."""
        return torch.index_select(self.tensor, 0, rows, out=out)

    def write_raw(self, rows: Tensor, raw: Tensor) -> None:
        """Replace what is stored of the named rows, which are distinct."""
        self.tensor.index_copy_(0, rows, raw)

    def decode_(self, rows: Tensor, raw: Tensor) -> Tensor:
        """Turn what is stored of rows into their values, in place, on the device where both are."""
        return raw

    def encode(self, rows: Tensor, values: Tensor) -> Tensor:
        """What to store for these values of rows, on the device where both are."""
        return values

    def read(self, rows: Tensor, out: Tensor | None = None) -> Tensor:
        """The values of the named rows."""
        return self.decode_(rows, self.read_raw(rows, out))

    def write(self, rows: Tensor, values: Tensor) -> None:
        """Replace the values of the named rows."""
        self.write_raw(rows, self.encode(rows, values))

    def read_slice(self, start: int, stop: int) -> Tensor:
        return self.tensor[start:stop]

    def write_slice(self, start: int, values: Tensor) -> None:
        self.tensor[start : start + values.shape[0]].copy_(values)


def unreserved(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros in memory that is taken when it is first written to, page by page, and may be more than there is."""
    num_bytes = max(1, torch.Size(shape).numel() * dtype.itemsize)
    anywhere = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
    numbers = torch.frombuffer(anywhere, dtype=torch.uint8)[: torch.Size(shape).numel() * dtype.itemsize]
    return numbers.view(dtype).view(*shape)


class MappedFile:
    """A file that was just made, as long as `num_bytes` and empty: it takes no disk until it is written to."""

    def __init__(self, path: Path, num_bytes: int):
        self.path, self.num_bytes = path, num_bytes
        path.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(path.parent).free
        if num_bytes > free:
            raise ConfigError(
                f"{path} may grow to {readable_bytes(num_bytes)} and its disk has {readable_bytes(free)} left: free "
                f"{readable_bytes(num_bytes - free)}, or name a folder on another disk"
            )
        self._file = path.open("x+b")
        self._file.truncate(num_bytes)
        self._map = mmap.mmap(self._file.fileno(), num_bytes)
        self._map.madvise(mmap.MADV_RANDOM)  # no reading ahead: the rows of a step lie anywhere
        self._touched = 0

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.frombuffer(self._map, dtype=dtype).view(*shape)

    def before_access(self, num_rows: int) -> None:
        """Refuse a file that has become shorter, whose pages would end the process, and bound what is resident."""
        size = os.fstat(self._file.fileno()).st_size
        if size < self.num_bytes or not self.path.exists():
            raise TierError(
                f"{self.path} was truncated or removed while it was in use ({size:,} of {self.num_bytes:,} bytes): go "
                f"on from the last checkpoint, and leave the file alone"
            )
        self._touched += num_rows * mmap.PAGESIZE
        if self._touched > RESIDENT_BYTES and exceeds_resident(self.num_bytes):
            self._map.madvise(mmap.MADV_DONTNEED)
            self._touched = 0


class DiskRows(HostRows):
    """Rows in a file, zeros at first."""

    def __init__(self, path: Path, shape: Sequence[int], dtype: torch.dtype):
        num_bytes = max(1, torch.Size(shape).numel() * dtype.itemsize)
        self.file = MappedFile(path, num_bytes)
        super().__init__(self.file.tensor(shape, dtype))

    def read_raw(self, rows: Tensor, out: Tensor | None = None) -> Tensor:
        self.file.before_access(rows.numel())
        return super().read_raw(rows, out)

    def write_raw(self, rows: Tensor, raw: Tensor) -> None:
        self.file.before_access(rows.numel())
        super().write_raw(rows, raw)


@dataclass(frozen=True)
class InitialValues:
    """Initial values of the rows of several tables that lie end to end."""

    starts: Tensor
    """[T] int64: the first row of each table, ascending from 0."""
    seeds: Tensor
    """[T] int64."""
    stds: Tensor
    """[T] float32."""

    def rows(self, rows: Tensor, dim: int) -> Tensor:
        """[U, dim] float32: how the named rows begin."""
        table = torch.searchsorted(self.starts, rows, right=True) - 1
        return initial_rows(rows - self.starts[table], dim, self.seeds[table], self.stds[table])

    def to(self, device: torch.device) -> InitialValues:
        return InitialValues(self.starts.to(device), self.seeds.to(device), self.stds.to(device))


class LazyRows(HostRows):
    """Rows over a `store` of zeros: a row is what `beginnings` say, exclusive-or what is stored.

    `touched` [R] bool says which rows were ever written: a byte a row.
    """

    def __init__(self, store: HostRows, beginnings: InitialValues):
        super().__init__(store.tensor)
        self.store = store
        self.touched = torch.zeros(store.tensor.shape[0], dtype=torch.bool)
        self.beginnings = beginnings
        self._beginnings = {torch.device("cpu"): beginnings}

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
        if rows.device not in self._beginnings:
            self._beginnings[rows.device] = self._beginnings[torch.device("cpu")].to(rows.device)
        values = self._beginnings[rows.device].rows(rows, self.tensor.shape[1]).to(self.tensor.dtype)
        return values.view(_BITS[self.tensor.dtype])

    def read_slice(self, start: int, stop: int) -> Tensor:
        return self.read(torch.arange(start, stop))

    def write_slice(self, start: int, values: Tensor) -> None:
        self.write(torch.arange(start, start + values.shape[0]), values.cpu())


def stored_rows(host: DensePack, folder: Path | None) -> tuple[HostRows, Callable[[str, Tensor], HostRows]]:
    """Where the rows of a pack live, and a function that makes room for more of the same, by name and shape.

    The storage of the pack itself; or, if it has none yet, memory or files (with a `folder`) of rows that take no place
    until they are touched.
    """
    if not host.storage.is_meta:
        return HostRows(host.storage), lambda name, like: HostRows(torch.zeros(like.shape, dtype=like.dtype))

    def new(name: str, like: Tensor) -> HostRows:
        if folder is None:
            return HostRows(unreserved(like.shape, like.dtype))
        return DiskRows(folder / f"{name}.rows", like.shape, like.dtype)

    tables = host.tables.values()
    seeds = [table.seed for table in tables if table.seed is not None]
    assert len(seeds) == len(host.tables), "every table draws a seed"
    beginnings = InitialValues(
        starts=torch.tensor([host.starts[name] for name in host.tables]),
        seeds=torch.tensor(seeds),
        stds=torch.tensor([table.init_std for table in tables]),
    )
    return LazyRows(new("weight", host.storage), beginnings), new
