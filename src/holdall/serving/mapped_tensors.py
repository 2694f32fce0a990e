"""Tensors in one safetensors file, written a block of rows at a time and read as views of a memory map.

Every tensor starts at a multiple of 64 bytes, as in memory, since products of matrices depend on it in their last bits.
Where tensors are packed in memory they are one range of the file, too.
"""

from __future__ import annotations

import itertools
import json
import math
import mmap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from holdall.common.errors import DataError
from holdall.common.memory import available_memory

CURE = "copy the bundle again, or make it again with `holdall release`"
ALIGNMENT = 64
"""Bytes that a tensor is aligned to; that of torch's allocator."""
PADDING = "padding."
"""Prefix of the tensors between others that align those: safetensors allows no gaps."""
BLOCK_BYTES = 1 << 24
"""Bytes that are written at a time."""
MAX_SHARE_OF_MEMORY = 0.5
"""Share of the available memory up to which a file is read with the pages around a lookup, which fills the page cache
sooner."""
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Linux's value, where Python does not have the name
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class ReadByRows(Protocol):
    """Tensor whose rows are read a block at a time."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> torch.dtype: ...
    def read(self, rows: Tensor) -> Tensor:
        """[U, ...] on the host."""


AnyTensor: TypeAlias = Tensor | ReadByRows


def write_tensors(path: Path, tensors: Mapping[str, AnyTensor], joined: Sequence[Sequence[str]] = ()) -> None:
    """Write tensors, from any device and from any storage that is read by rows, in memory of one block.

    The tensors of each of the `joined` groups follow one another without padding.
    """
    inside = {name for group in joined for name in group[1:]}
    order = dict.fromkeys([*itertools.chain.from_iterable(joined), *tensors])
    entries: dict[str, dict[str, Any]] = {}
    blocks: list[Iterator[Any]] = []
    end = 0
    for name in order:
        tensor = tensors[name]
        if name not in inside and (gap := -end % ALIGNMENT):
            entries[f"{PADDING}{len(entries)}"] = _entry("U8", [gap], end, end + gap)
            blocks.append(iter([bytes(gap)]))
            end += gap
        start, end = end, end + math.prod(tensor.shape) * tensor.dtype.itemsize
        entries[name] = _entry(_NAMES[tensor.dtype], list(tensor.shape), start, end)
        blocks.append(block.reshape(-1).view(torch.uint8).numpy().data for _, block in row_blocks(tensor))
    header = json.dumps(entries).encode()
    header += b" " * (-(8 + len(header)) % ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for block in itertools.chain.from_iterable(blocks):
            file.write(block)


def _entry(dtype: str, shape: list[int], start: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def row_blocks(tensor: AnyTensor) -> Iterator[tuple[int, Tensor]]:
    """Rows of a tensor, some at a time, contiguous and on the host, each block with its first row.

    A tensor without dimensions is one row.
    """
    num_rows = tensor.shape[0] if tensor.shape else 1
    step = max(1, BLOCK_BYTES // max(1, math.prod(tensor.shape[1:]) * tensor.dtype.itemsize))
    for start in range(0, num_rows, step):
        stop = min(start + step, num_rows)
        if isinstance(tensor, Tensor):
            rows = tensor.detach()[start:stop] if tensor.dim() else tensor.detach()[None]
        else:
            rows = tensor.read(torch.arange(start, stop))
        yield start, rows.cpu().contiguous()


class MappedTensors:
    """Tensors of a file, by name, as views of one memory map.

    Nothing is read but the header; a page takes memory once it is read, and the system may reclaim that memory. A write
    to a tensor goes to a private copy of the page, or with `shared` to the file. Without `mmap` the whole file is read
    into memory.
    """

    def __init__(self, path: Path, *, mmap: bool = True, shared: bool = False):
        self.path = path
        try:
            with safe_open(path, framework="np"):  # validates types, shapes and offsets; "pt" reserves memory
                pass
            with path.open("r+b" if shared else "rb") as file:
                length = int.from_bytes(file.read(8), "little")
                entries = json.loads(file.read(length))
                mapped = _mapped(file.fileno(), shared)
        except (SafetensorError, OSError, ValueError) as error:
            raise DataError(f"{path} is not a valid safetensors file ({error}): {CURE}") from error
        entries.pop("__metadata__", None)
        content = torch.frombuffer(mapped, dtype=torch.uint8)
        self._map = mapped if mmap else None
        self.content = content if mmap else content.clone()
        """[bytes of the file] uint8."""
        self._start = 8 + length
        self._places: dict[str, tuple[int, int]] = {}
        self._tensors: dict[str, Tensor] = {}
        for name, entry in entries.items():
            if name.startswith(PADDING):
                continue
            if entry["dtype"] not in _DTYPES:
                raise DataError(f"{path}: tensor '{name}' has the type {entry['dtype']}, which tables do not have")
            self._places[name] = (entry["data_offsets"][0], entry["data_offsets"][1])
            self._tensors[name] = self._view(*self._places[name], _DTYPES[entry["dtype"]], entry["shape"])

    def _view(self, start: int, end: int, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        start, end = self._start + start, self._start + end
        if start % dtype.itemsize:
            raise DataError(f"{self.path} has a tensor at byte {start}, which is not aligned to {dtype}: {CURE}")
        return self.content[start:end].view(dtype).view(*shape)

    def expect_lookups(self) -> None:
        """Have a read take its own pages only, where the file is not small against the memory.

        By default the system reads what is around a page as well: of a file larger than memory that is 700 KB and 1.8
        ms a lookup in the place of 4 KB and 0.1 ms, and pages that other lookups need are reclaimed for it.
        """
        if self._map is None or not hasattr(mmap, "MADV_RANDOM"):
            return
        if len(self.content) > MAX_SHARE_OF_MEMORY * available_memory()["host"]:
            self._map.madvise(mmap.MADV_RANDOM)

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def names(self) -> list[str]:
        return list(self._tensors)

    def place(self, name: str) -> slice:
        """Bytes of the file that a tensor has."""
        start, end = self._places[name]
        return slice(self._start + start, self._start + end)

    def joined(self, names: Sequence[str]) -> Tensor:
        """Tensors [R_i, dim] that follow one another in the file, as one [sum of R_i, dim]."""
        for before, after in itertools.pairwise(names):
            if self._places[before][1] != self._places[after][0]:
                raise DataError(f"{self.path} has '{after}' in another place than after '{before}': {CURE}")
        first = self._tensors[names[0]]
        num_rows = sum(self._tensors[name].shape[0] for name in names)
        return self._view(
            self._places[names[0]][0], self._places[names[-1]][1], first.dtype, (num_rows, *first.shape[1:])
        )


def _mapped(descriptor: int, shared: bool) -> mmap.mmap:
    """The bytes of a file: a map, private unless `shared`, for which the system reserves no memory."""
    if hasattr(mmap, "MAP_PRIVATE"):
        flags, access = mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE | _NO_RESERVE, mmap.PROT_READ | mmap.PROT_WRITE
        return mmap.mmap(descriptor, 0, flags=flags, prot=access)
    return mmap.mmap(descriptor, 0, access=mmap.ACCESS_WRITE if shared else mmap.ACCESS_COPY)
