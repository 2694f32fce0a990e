"""Manifest of a checkpoint, `manifest.json`: read and checked before any other file of it."""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from holdall.checkpoint.partial_tensors import ROWS, VALUES, PartialEntry, stored_names
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
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Piece:
    """Rows `start` to `stop` of a tensor (0 to 1 of a scalar), stored in `shard` under the tensor's name."""

    shard: str
    start: int
    stop: int


@dataclass(frozen=True)
class StoredTensor:
    """Stored tensor; its pieces follow one another and cover it."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class Checkpoint:
    """Checkpoint whose manifest has been read and checked; its shards have not."""

    path: Path
    step: int
    manifest: dict[str, Any]
    shards: dict[str, Shard]
    tensors: dict[str, StoredTensor]
    """As stored in the shards."""
    lazy: dict[str, PartialEntry]
    """Tensors of which only some rows are stored (see `partial_tensors`)."""
    base: int | None = None
    """Step of the full checkpoint that this one of hot rows completes; None for a full one (see `hot_rows`)."""

    @property
    def state(self) -> dict[str, Any]:
        return self.manifest["state"]

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
    manifest = read_json(
        path / MANIFEST,
        dict[str, Any],
        format=FORMAT,
        version=VERSION,
        error=CheckpointError,
        cure=restore_advice(path),
    )
    try:
        shards = {entry["file"]: Shard(**entry) for entry in manifest["shards"]}
        tensors = {name: _stored_tensor(entry) for name, entry in manifest["tensors"].items()}
        base = manifest.get("base")
        lazy = {name: _lazy_entry(entry, base) for name, entry in manifest.get("lazy", {}).items()}
        checkpoint = Checkpoint(path, manifest["step"], manifest, shards, tensors, lazy, base)
        _check(checkpoint)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{path / MANIFEST} is damaged ({type(error).__name__}: {error}): {restore_advice(path)}"
        ) from error
    return checkpoint


def restore_advice(path: Path) -> str:
    """Advice on a damaged checkpoint, for error messages."""
    return f"restore it from a copy, or delete {path} to resume from the checkpoint before it"


def _stored_tensor(entry: dict[str, Any]) -> StoredTensor:
    pieces = tuple(Piece(**piece) for piece in entry["pieces"])
    return StoredTensor(entry["dtype"], tuple(entry["shape"]), pieces)


def _lazy_entry(entry: dict[str, Any], base: int | None) -> PartialEntry:
    initial = entry["initial"]
    if initial is not None:
        initial = {"std": float(initial["std"]), "seed": int(initial["seed"])}
    elif base is None:
        raise ValueError("it has no initial values for the rows that are not stored")
    if entry["dtype"] not in DTYPES:
        raise ValueError(f"a lazy tensor has the unknown type {entry['dtype']!r}")
    return PartialEntry(entry["dtype"], tuple(int(size) for size in entry["shape"]), initial)


def _check(checkpoint: Checkpoint) -> None:
    """Raise ValueError unless shards have plain names and the pieces of every tensor cover it exactly."""
    if not isinstance(checkpoint.step, int) or not isinstance(checkpoint.state, dict):
        raise ValueError("the step is not a number or the state is not a table")
    if checkpoint.base is not None and not isinstance(checkpoint.base, int):
        raise ValueError("the base is not a step")
    for shard in checkpoint.shards.values():
        if not _SHARD_NAME.fullmatch(shard.file):  # also keeps paths inside the folder
            raise ValueError(f"{shard.file!r} is not the name of a shard")
        if not isinstance(shard.bytes, int) or not isinstance(shard.sha256, str):
            raise ValueError(f"{shard.file} has no size or hash")
    for name, tensor in checkpoint.tensors.items():
        _check_tensor(name, tensor, checkpoint.shards)
    for name, entry in checkpoint.lazy.items():
        _check_lazy(name, entry, checkpoint.tensors)
    stored = sum(tensor.num_bytes for tensor in checkpoint.tensors.values())
    if stored > sum(shard.bytes for shard in checkpoint.shards.values()):
        raise ValueError("the tensors are larger than the shards")


def _check_lazy(name: str, entry: PartialEntry, tensors: dict[str, StoredTensor]) -> None:
    for stored_name in stored_names([name]):
        if stored_name not in tensors:
            raise ValueError(f"{stored_name!r} is missing")
    rows, values = tensors[name + ROWS], tensors[name + VALUES]
    if rows.dtype != "int64" or len(rows.shape) != 1:
        raise ValueError(f"{name + ROWS!r} are not row numbers")
    if values.dtype != entry.dtype or values.shape != (*rows.shape, *entry.shape[1:]):
        raise ValueError(f"{name + VALUES!r} does not fit its rows")


def _check_tensor(name: str, tensor: StoredTensor, shards: dict[str, Shard]) -> None:
    if tensor.dtype not in DTYPES:
        raise ValueError(f"tensor {name!r} has the unknown type {tensor.dtype!r}")
    if not all(isinstance(size, int) and size >= 0 for size in tensor.shape):
        raise ValueError(f"tensor {name!r} has the shape {tensor.shape}")
    row = 0
    for piece in tensor.pieces:
        if not isinstance(piece.start, int) or not isinstance(piece.stop, int):
            raise ValueError(f"a piece of tensor {name!r} has no rows")
        if piece.shard not in shards or piece.start != row or piece.stop < row:
            raise ValueError(f"the pieces of tensor {name!r} do not follow one another")
        row = piece.stop
    if not tensor.pieces or row != (tensor.shape[0] if tensor.shape else 1):
        raise ValueError(f"the pieces of tensor {name!r} do not cover it")
