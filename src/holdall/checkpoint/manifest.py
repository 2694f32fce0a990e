"""Manifest of a checkpoint, `manifest.json`: read and checked before any other file of it."""

from __future__ import annotations

import math
import re
from collections.abc import Container
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch

from holdall.checkpoint.partial_tensors import ROWS, VALUES, PartialEntry, stored_names
from holdall.common.decode import Count, shown
from holdall.common.errors import CheckpointError
from holdall.common.files import read_json

FORMAT = "holdall-checkpoint"
VERSION = 1
MANIFEST = "manifest.json"

_SHARD_NAME = re.compile(r"shard-\d{5,}(-\d{5,})?\.safetensors")
_DTYPE_NAMES = (
    "float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 int64 int32 int16 int8 uint64 uint32 uint16 uint8 bool"
)
DTYPES = {name: getattr(torch, name) for name in _DTYPE_NAMES.split()}


@dataclass(frozen=True)
class Shard:
    """One safetensors file, as the manifest lists it."""

    file: str
    bytes: Count
    sha256: str


@dataclass(frozen=True)
class Piece:
    """Rows `start` to `stop` of a tensor (0 to 1 of a scalar), stored in `shard` under the tensor's name."""

    shard: str
    start: Count
    stop: Count


@dataclass(frozen=True)
class StoredTensor:
    """Stored tensor; its pieces follow one another and cover it."""

    ignores_unknown: ClassVar[bool] = True

    dtype: str
    shape: tuple[Count, ...]
    pieces: tuple[Piece, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Content of `manifest.json`: shards with plain names, and tensors whose pieces cover them exactly."""

    ignores_unknown: ClassVar[bool] = True

    step: Count
    shards: tuple[Shard, ...]
    tensors: dict[str, StoredTensor]
    lazy: dict[str, PartialEntry] = field(default_factory=dict)
    state: dict[str, Any]
    base: Count | None = None

    def __post_init__(self) -> None:
        for shard in self.shards:
            if not _SHARD_NAME.fullmatch(shard.file):  # also keeps paths inside the folder
                raise CheckpointError(f"{shown(shard.file)} is not the name of a shard")
        shards = {shard.file for shard in self.shards}
        for name, tensor in self.tensors.items():
            _check_tensor(name, tensor, shards)
        for name, entry in self.lazy.items():
            _check_lazy(name, entry, self.tensors, is_full=self.base is None)
        if sum(tensor.num_bytes for tensor in self.tensors.values()) > sum(shard.bytes for shard in self.shards):
            raise CheckpointError("the tensors are larger than the shards")


@dataclass(frozen=True)
class Checkpoint:
    """Checkpoint whose manifest has been read and checked; its shards have not."""

    path: Path
    step: int
    state: dict[str, Any]
    shards: dict[str, Shard]
    tensors: dict[str, StoredTensor]
    """As stored in the shards."""
    lazy: dict[str, PartialEntry]
    """Tensors of which only some rows are stored (see `partial_tensors`)."""
    base: int | None = None
    """Step of the full checkpoint that this one of hot rows completes; None for a full one (see `hot_rows`)."""

    @property
    def logical(self) -> dict[str, StoredTensor | PartialEntry]:
        """The tensors as they were passed to `save`."""
        hidden = stored_names(self.lazy)
        plain = {name: tensor for name, tensor in self.tensors.items() if name not in hidden}
        return {**plain, **self.lazy}


def document(
    step: int,
    shards: list[Shard],
    tensors: dict[str, StoredTensor],
    lazy: dict[str, PartialEntry],
    state: dict[str, Any],
    base: int | None = None,
) -> dict[str, Any]:
    """The manifest of a checkpoint, to be written."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "step": step,
        **({} if base is None else {"base": base}),
        "shards": [asdict(shard) for shard in shards],
        "tensors": {name: asdict(tensor) for name, tensor in tensors.items()},
        "lazy": {name: asdict(entry) for name, entry in lazy.items()},
        "state": state,
    }


def read_manifest(path: Path) -> Checkpoint:
    """Read and check the manifest of the checkpoint at `path`."""
    cure = restore_advice(path)
    found = read_json(path / MANIFEST, Manifest, format=FORMAT, version=VERSION, error=CheckpointError, cure=cure)
    named = re.fullmatch(r"(?:step|hot)-(\d{8,})(?:\.replaced)?", path.name)
    if named is not None and int(named[1]) != found.step:
        raise CheckpointError(f"{path} has the manifest of step {found.step}: {cure}")
    shards = {shard.file: shard for shard in found.shards}
    return Checkpoint(path, found.step, found.state, shards, found.tensors, found.lazy, found.base)


def restore_advice(path: Path) -> str:
    """Advice on a damaged checkpoint, for error messages."""
    return f"restore it from a copy, or delete {path} to resume from the checkpoint before it"


def _check_lazy(name: str, entry: PartialEntry, tensors: dict[str, StoredTensor], *, is_full: bool) -> None:
    if entry.initial is None and is_full:
        raise CheckpointError(f"{name!r} has no initial values for the rows that are not stored")
    if entry.initial is not None and not (
        entry.initial.keys() == {"std", "seed"} and isinstance(entry.initial["seed"], int)
    ):
        raise CheckpointError(f"the initial values of {name!r} are not a std and a seed")
    for stored_name in stored_names([name]):
        if stored_name not in tensors:
            raise CheckpointError(f"{stored_name!r} is missing")
    rows, values = tensors[name + ROWS], tensors[name + VALUES]
    if rows.dtype != "int64" or len(rows.shape) != 1:
        raise CheckpointError(f"{name + ROWS!r} are not row numbers")
    if values.dtype != entry.dtype or values.shape != (*rows.shape, *entry.shape[1:]):
        raise CheckpointError(f"{name + VALUES!r} does not fit its rows")


def _check_tensor(name: str, tensor: StoredTensor, shards: Container[str]) -> None:
    if tensor.dtype not in DTYPES:
        raise CheckpointError(f"tensor {name!r} has the unknown type {shown(tensor.dtype)}")
    row = 0
    for piece in tensor.pieces:
        if piece.shard not in shards or piece.start != row or piece.stop < row:
            raise CheckpointError(f"the pieces of tensor {name!r} do not follow one another")
        row = piece.stop
    if not tensor.pieces or row != (tensor.shape[0] if tensor.shape else 1):
        raise CheckpointError(f"the pieces of tensor {name!r} do not cover it")
