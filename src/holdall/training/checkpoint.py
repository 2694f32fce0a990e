"""Checkpoints that are whole or absent: `FOLDER/step-00001000/{shard-00000.safetensors, ..., manifest.json}`.

A checkpoint is written under another name: shards, fsync, a manifest with their sizes and SHA-256 hashes, fsync, then
one rename. Killed at any moment, the last complete checkpoint is still there and `latest` finds it. Nothing in it can
execute code.

Tensors larger than a shard are cut along their first dimension, so that neither saving nor loading holds a second
copy: at most one shard is copied at a time (tensors on a GPU or not contiguous), none otherwise. A shard is hashed by
reading it back while the next one is written; loading with `verify` reads and hashes everything once before it copies.
`benchmarks/checkpoint.py` measures what that costs.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import shutil
import warnings
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from holdall.errors import CheckpointError, ConfigError, HoldallError
from holdall.files import PARTIAL, atomic_folder, fsync_file, read_json, sha256, write_json
from holdall.tiers.lazy_tensor import LazyTensor
from holdall.training.saved_rows import ROWS, VALUES, LazyEntry, TouchedValues, expanded, helpers, put_rows, start_anew

FORMAT = "holdall-checkpoint"
VERSION = 1
MANIFEST = "manifest.json"
REPLACED = ".replaced"  # suffix of a complete checkpoint in the moment before a new one of its step takes its place

_STEP_NAME = re.compile(r"step-(\d{8,})(\.replaced)?")
_SHARD_NAME = re.compile(r"shard-\d{5,}\.safetensors")
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
    """A tensor of the checkpoint; its pieces follow one another and cover it."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose manifest has been read and found sound; its shards have not been looked at."""

    path: Path
    step: int
    manifest: dict[str, Any]
    shards: dict[str, Shard]
    tensors: dict[str, StoredTensor]
    """As they lie in the shards."""
    lazy: dict[str, LazyEntry]
    """Tensors of which only the touched rows are there (see `saved_rows`)."""

    @property
    def state(self) -> dict[str, Any]:
        return self.manifest["state"]


def save(
    folder: Path,
    step: int,
    tensors: Mapping[str, Tensor | LazyTensor],
    state: Mapping[str, Any],
    *,
    keep: int = 2,
    shard_bytes: int = 1 << 30,
) -> Path:
    """Write `folder/step-<step>` and return its path; then remove all but the newest `keep` checkpoints.

    `state` is what JSON can hold (configuration, position in the data, metrics); random states go with the tensors.
    A checkpoint of the same step is replaced. Tensors that share memory are stored once each; of lazy ones, the rows
    that were touched.
    """
    if keep < 1 or shard_bytes < 1:
        raise ConfigError(f"checkpoints need keep >= 1 and shard_bytes >= 1, got {keep} and {shard_bytes}")
    json.dumps(state)  # refuses what JSON cannot hold before anything is written
    folder = Path(folder)
    path = folder / f"step-{step:08d}"
    _remove_unfinished(folder)
    plain, lazy = expanded(tensors)
    try:
        with atomic_folder(path) as partial:
            shards, stored = _write_shards(partial, plain, shard_bytes)
            manifest = {
                "format": FORMAT,
                "version": VERSION,
                "step": step,
                "shards": [asdict(shard) for shard in shards],
                "tensors": {name: asdict(tensor) for name, tensor in stored.items()},
                "lazy": {name: asdict(entry) for name, entry in lazy.items()},
                "state": dict(state),
            }
            write_json(partial / MANIFEST, manifest)
            _set_aside(path)
    except HoldallError as error:
        raise CheckpointError(f"{error} (earlier checkpoints in {folder} are untouched)") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written ({error}): choose a place that can be") from error
    _prune(folder, path, step, keep)
    return path


def read(path: Path) -> Checkpoint:
    """Read and check the manifest of the checkpoint at `path`."""
    path = Path(path)
    if not (path / MANIFEST).is_file():
        newest = latest(path) or latest(path.parent)
        other = f" (the newest complete one there is {newest})" if newest else ""
        raise CheckpointError(f"{path} has no {MANIFEST}, so it is not a complete checkpoint: use another one{other}")
    manifest = read_json(path / MANIFEST, format=FORMAT, version=VERSION, error=CheckpointError)
    try:
        shards = {entry["file"]: Shard(**entry) for entry in manifest["shards"]}
        tensors = {name: _stored_tensor(entry) for name, entry in manifest["tensors"].items()}
        lazy = {name: _lazy_entry(entry) for name, entry in manifest.get("lazy", {}).items()}
        checkpoint = Checkpoint(path, manifest["step"], manifest, shards, tensors, lazy)
        _check_manifest(checkpoint)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{path / MANIFEST} is damaged ({type(error).__name__}: {error}): {_cure(path)}"
        ) from error
    return checkpoint


def load(path: Path, *, prefix: str = "", verify: bool = True) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """`(tensors, state)` of a checkpoint, the tensors on the host.

    `prefix` selects the tensors whose names start with it; only shards that hold them are read. `verify` compares
    their hashes; sizes are always compared.
    """
    checkpoint = read(path)
    tensors = {
        name: _allocate(checkpoint.path, name, shown.dtype, shown.shape)
        for name, shown in _shown(checkpoint).items()
        if name.startswith(prefix)
    }
    return tensors, load_into(path, tensors, prefix=prefix, verify=verify)


def load_into(
    path: Path, tensors: Mapping[str, Tensor | LazyTensor], *, prefix: str = "", verify: bool = True
) -> dict[str, Any]:
    """Copy a checkpoint into existing `tensors`, on any device, and return its state.

    Names (those that start with `prefix`), shapes and types must be the same on both sides; nothing is copied
    otherwise, nor when a shard is damaged. Shards are memory-mapped: no second copy of the state is made. What was
    saved of a lazy tensor loads into an ordinary one, and the other way round.
    """
    checkpoint = read(path)
    wanted = {name: tensor for name, tensor in checkpoint.tensors.items() if name.startswith(prefix)}
    lazy = {name: entry for name, entry in checkpoint.lazy.items() if name.startswith(prefix)}
    _refuse_mismatch(checkpoint.path, {n: s for n, s in _shown(checkpoint).items() if n.startswith(prefix)}, tensors)
    _verify_shards(checkpoint, wanted.values(), hashes=verify)
    start_anew(tensors, lazy, str(checkpoint.path))
    rows = {name: _allocate(checkpoint.path, name + ROWS, "int64", wanted[name + ROWS].shape) for name in lazy}
    _copy_shards(
        checkpoint, {name + ROWS: wanted[name + ROWS] for name in lazy}, {n + ROWS: t for n, t in rows.items()}
    )
    rest = {name: stored for name, stored in wanted.items() if name not in {n + ROWS for n in lazy}}
    _copy_shards(checkpoint, rest, tensors, rows)
    return checkpoint.state


def _shown(checkpoint: Checkpoint) -> dict[str, StoredTensor | LazyEntry]:
    """The tensors of a checkpoint as they were given to `save`."""
    hidden = helpers(checkpoint.lazy)
    plain = {name: tensor for name, tensor in checkpoint.tensors.items() if name not in hidden}
    return {**plain, **checkpoint.lazy}


def latest(folder: Path) -> Path | None:
    """The complete checkpoint of the highest step in `folder`, or None. What a killed save left is not one."""
    complete = _complete(Path(folder))
    return complete[-1][1] if complete else None


# --- writing ---------------------------------------------------------------------------------------------------------


def _write_shards(
    folder: Path, tensors: Mapping[str, Tensor | TouchedValues], shard_bytes: int
) -> tuple[list[Shard], dict[str, StoredTensor]]:
    plan = _pack(tensors, shard_bytes)
    pieces: dict[str, list[Piece]] = {name: [] for name in tensors}
    # Both safetensors and hashlib let go of the interpreter lock, so one shard is hashed while the next is written.
    with ThreadPoolExecutor(max_workers=2, thread_name_prefix="checkpoint-hash") as pool:
        sealed = []
        for number, rows in enumerate(plan):
            file = folder / f"shard-{number:05d}.safetensors"
            _write_shard(file, {name: _host_rows(tensors[name], *bounds) for name, bounds in rows.items()})
            sealed.append(pool.submit(_seal, file))
            for name, (start, stop) in rows.items():
                pieces[name].append(Piece(file.name, start, stop))
        shards = [result.result() for result in sealed]
    stored = {
        name: StoredTensor(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tuple(pieces[name]))
        for name, tensor in tensors.items()
    }
    return shards, stored


def _pack(tensors: Mapping[str, Tensor | TouchedValues], shard_bytes: int) -> list[dict[str, tuple[int, int]]]:
    """Which rows of which tensors each shard holds, in order; only tensors larger than a shard are cut.

    A cut tensor fills its shards but for less than a row, so two pieces of one tensor never meet in a shard. A row
    larger than a shard gets a shard of its own.
    """
    shards: list[dict[str, tuple[int, int]]] = []
    room = 0
    for name, tensor in tensors.items():
        num_rows = tensor.shape[0] if tensor.dim() else 1
        row_bytes = tensor.nbytes // max(num_rows, 1)
        rows_in_piece = num_rows if tensor.nbytes <= shard_bytes else max(1, shard_bytes // row_bytes)
        for start in range(0, max(num_rows, 1), max(rows_in_piece, 1)):
            stop = min(start + rows_in_piece, num_rows)
            size = (stop - start) * row_bytes
            if not shards or size > room:
                shards.append({})
                room = shard_bytes
            shards[-1][name] = (start, stop)
            room -= size
    return shards


def _host_rows(tensor: Tensor | TouchedValues, start: int, stop: int) -> Tensor:
    if isinstance(tensor, TouchedValues):
        return tensor.piece(start, stop)
    rows = tensor.detach()
    if rows.dim():
        rows = rows[start:stop]
    return rows.contiguous().cpu()


def _write_shard(file: Path, tensors: dict[str, Tensor]) -> None:
    end = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].data_ptr()):
        if tensor.data_ptr() < end:  # safetensors refuses tensors that overlap, such as tied weights
            tensors[name] = tensor.clone()
        else:
            end = tensor.data_ptr() + tensor.nbytes
    try:
        save_file(tensors, file)
    except SafetensorError as error:
        if f"os error {errno.ENOSPC}" in str(error):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file)) from error
        raise CheckpointError(f"{file} cannot be written ({error})") from error


def _seal(file: Path) -> Shard:
    """Force a shard to disk and hash it as it reads back."""
    fsync_file(file)
    return Shard(file.name, file.stat().st_size, sha256(file))


# --- the folder ------------------------------------------------------------------------------------------------------


def _complete(folder: Path) -> list[tuple[int, Path]]:
    """`(step, path)` of every complete checkpoint, oldest first; a replaced one before the one that replaces it."""
    found = []
    for path in folder.glob("step-*"):
        match = _STEP_NAME.fullmatch(path.name)
        if match is None:
            continue
        if (path / MANIFEST).is_file():
            found.append((int(match.group(1)), match.group(2) is None, path))
        else:
            warnings.warn(f"{path} has no {MANIFEST} and is passed over: it is damaged, delete it", stacklevel=3)
    return [(step, path) for step, _, path in sorted(found)]


def _set_aside(path: Path) -> None:
    """Free the name of an earlier checkpoint of this step without there being a moment at which none is complete."""
    if path.exists():
        aside = path.with_name(path.name + REPLACED)
        shutil.rmtree(aside, ignore_errors=True)
        os.rename(path, aside)


def _prune(folder: Path, newest: Path, step: int, keep: int) -> None:
    others = [(number, path) for number, path in _complete(folder) if path != newest]
    replaced = [path for number, path in others if number == step]
    rest = [path for number, path in others if number != step]
    for path in replaced + rest[: max(0, len(rest) - (keep - 1))]:
        doomed = path.with_name(path.name + PARTIAL)  # so that a kill halfway leaves nothing that looks complete
        os.rename(path, doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def _remove_unfinished(folder: Path) -> None:
    for path in folder.glob(f"step-*{PARTIAL}"):
        shutil.rmtree(path, ignore_errors=True)


# --- reading ---------------------------------------------------------------------------------------------------------


def _stored_tensor(entry: dict[str, Any]) -> StoredTensor:
    pieces = tuple(Piece(**piece) for piece in entry["pieces"])
    return StoredTensor(entry["dtype"], tuple(entry["shape"]), pieces)


def _check_manifest(checkpoint: Checkpoint) -> None:
    """Raise ValueError unless shards have plain names and the pieces of every tensor cover it exactly."""
    if not isinstance(checkpoint.step, int) or not isinstance(checkpoint.state, dict):
        raise ValueError("the step is not a number or the state is not a table")
    for shard in checkpoint.shards.values():
        if not _SHARD_NAME.fullmatch(shard.file):  # above all: no way out of the folder
            raise ValueError(f"{shard.file!r} is not the name of a shard")
        if not isinstance(shard.bytes, int) or not isinstance(shard.sha256, str):
            raise ValueError(f"{shard.file} has no size or hash")
    for name, tensor in checkpoint.tensors.items():
        if tensor.dtype not in DTYPES:
            raise ValueError(f"tensor {name!r} has the unknown type {tensor.dtype!r}")
        if not all(isinstance(size, int) and size >= 0 for size in tensor.shape):
            raise ValueError(f"tensor {name!r} has the shape {tensor.shape}")
        row = 0
        for piece in tensor.pieces:
            if not isinstance(piece.start, int) or not isinstance(piece.stop, int):
                raise ValueError(f"a piece of tensor {name!r} has no rows")
            if piece.shard not in checkpoint.shards or piece.start != row or piece.stop < row:
                raise ValueError(f"the pieces of tensor {name!r} do not follow one another")
            row = piece.stop
        if not tensor.pieces or row != (tensor.shape[0] if tensor.shape else 1):
            raise ValueError(f"the pieces of tensor {name!r} do not cover it")
    for name in helpers(checkpoint.lazy):
        if name not in checkpoint.tensors:
            raise ValueError(f"{name!r} is missing")
    stored = sum(tensor.num_bytes for tensor in checkpoint.tensors.values())
    if stored > sum(shard.bytes for shard in checkpoint.shards.values()):
        raise ValueError("the tensors are larger than the shards")


def _verify_shards(checkpoint: Checkpoint, tensors: Iterable[StoredTensor], *, hashes: bool) -> None:
    """Compare the shards that hold `tensors` with the manifest."""
    needed = sorted({piece.shard for tensor in tensors for piece in tensor.pieces})
    with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
        for _ in pool.map(lambda name: _verify_shard(checkpoint, checkpoint.shards[name], hashes), needed):
            pass


def _verify_shard(checkpoint: Checkpoint, shard: Shard, hashes: bool) -> None:
    file = checkpoint.path / shard.file
    cure = _cure(checkpoint.path)
    try:
        size = file.stat().st_size
        if size != shard.bytes:
            raise CheckpointError(f"{file} has {size} bytes where its manifest says {shard.bytes}: {cure}")
        if hashes and sha256(file) != shard.sha256:
            raise CheckpointError(f"{file} has been altered since it was written (its SHA-256 differs): {cure}")
    except FileNotFoundError:
        raise CheckpointError(f"{file} is missing: {cure}") from None
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read ({error}): {cure}") from error


def _refuse_mismatch(
    path: Path, stored: Mapping[str, StoredTensor | LazyEntry], tensors: Mapping[str, Tensor | LazyTensor]
) -> None:
    differences = [f"'{name}' is missing from the checkpoint" for name in tensors if name not in stored]
    differences += [f"'{name}' is in the checkpoint only" for name in stored if name not in tensors]
    for name in stored.keys() & tensors.keys():
        there, here = stored[name], tensors[name]
        if there.shape != tuple(here.shape):
            differences.append(f"'{name}' has shape {list(there.shape)} in the checkpoint and {list(here.shape)} here")
        elif DTYPES[there.dtype] != here.dtype:
            differences.append(f"'{name}' is {there.dtype} in the checkpoint and {here.dtype} here")
    if differences:
        shown = "; ".join(sorted(differences)[:3]) + ("; ..." if len(differences) > 3 else "")
        raise CheckpointError(
            f"{path} is of another schema or model, {len(differences)} tensors differ: {shown}: "
            f"use the data set, model and optimizer it was trained with"
        )


def _lazy_entry(entry: dict[str, Any]) -> LazyEntry:
    initial = {"std": float(entry["initial"]["std"]), "seed": int(entry["initial"]["seed"])}
    if entry["dtype"] not in DTYPES:
        raise ValueError(f"a lazy tensor has the unknown type {entry['dtype']!r}")
    return LazyEntry(entry["dtype"], tuple(int(size) for size in entry["shape"]), initial)


def _allocate(path: Path, name: str, dtype: str, shape: tuple[int, ...]) -> Tensor:
    try:
        return torch.empty(shape, dtype=DTYPES[dtype])
    except (RuntimeError, TypeError) as error:  # torch's own words for out of memory, and for sizes past 2^63
        needed = math.prod(shape) * DTYPES[dtype].itemsize
        raise CheckpointError(f"{path}: no memory for '{name}', which needs {needed} bytes") from error


def _copy_shards(
    checkpoint: Checkpoint,
    stored: Mapping[str, StoredTensor],
    tensors: Mapping[str, Tensor | LazyTensor],
    rows: Mapping[str, Tensor] = {},
) -> None:
    """Copy every piece of `stored` to its place in `tensors`, shard after shard; of lazy ones, to rows `rows[name]`."""
    by_shard: dict[str, list[tuple[str, Piece]]] = {}
    for name, tensor in stored.items():
        for piece in tensor.pieces:
            by_shard.setdefault(piece.shard, []).append((name, piece))
    for shard, pieces in by_shard.items():
        file = checkpoint.path / shard
        try:
            with safe_open(file, framework="pt") as content, torch.no_grad():
                for name, piece in pieces:
                    source = content.get_tensor(name)
                    if not _fits_piece(source, stored[name], piece):
                        raise CheckpointError(
                            f"{file} holds '{name}' as {source.dtype} {list(source.shape)}, not what its manifest "
                            f"says: {_cure(checkpoint.path)}"
                        )
                    _copy_piece(source, name, piece, tensors, rows)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{file} is not a sound safetensors file ({error}): {_cure(checkpoint.path)}"
            ) from error


def _fits_piece(source: Tensor, stored: StoredTensor, piece: Piece) -> bool:
    shape = (piece.stop - piece.start, *stored.shape[1:]) if stored.shape else ()
    return tuple(source.shape) == shape and source.dtype == DTYPES[stored.dtype]


def _copy_piece(
    source: Tensor, name: str, piece: Piece, tensors: Mapping[str, Tensor | LazyTensor], rows: Mapping[str, Tensor]
) -> None:
    lazy = name.removesuffix(VALUES)
    if lazy != name and lazy in rows:
        put_rows(tensors[lazy], rows[lazy][piece.start : piece.stop], source)
        return
    target = tensors[name]
    if isinstance(target, LazyTensor):
        target.write(torch.arange(piece.start, piece.stop), source)
        return
    target = target.detach()
    (target[piece.start : piece.stop] if target.dim() else target).copy_(source)


def _cure(path: Path) -> str:
    return f"restore it from a copy, or delete {path} to go on from the checkpoint before it"
