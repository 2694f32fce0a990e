"""Loading of a checkpoint, by any number of processes, into any kind of tensors, and search for an undamaged one.

Every process reads the shards it needs, whatever number of processes wrote them. Each hash is compared by one process:
shards are assigned by size. If one process fails, all raise; before anything is copied, where damage can be detected.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from holdall.checkpoint.all_ranks import on_all_ranks
from holdall.checkpoint.folder import complete, latest, newest
from holdall.checkpoint.manifest import (
    DTYPES,
    MANIFEST,
    Checkpoint,
    Piece,
    Shard,
    StoredTensor,
    read_manifest,
    restore_advice,
)
from holdall.checkpoint.partial_tensors import ROWS, VALUES, PartialEntry, reset_targets, write_rows
from holdall.checkpoint.protocols import TensorByRows
from holdall.checkpoint.read_lock import reading
from holdall.common.errors import CheckpointError
from holdall.common.files import sha256
from holdall.distributed.processes import SINGLE_PROCESS, Processes


def read(path: Path) -> Checkpoint:
    """Read and check the manifest of the checkpoint at `path`."""
    path = Path(path)
    if not (path / MANIFEST).is_file():
        complete_one = latest(path) or latest(path.parent)
        other = f" (the newest complete one there is {complete_one})" if complete_one else ""
        raise CheckpointError(f"{path} has no {MANIFEST}, so it is not a complete checkpoint: use another one{other}")
    return read_manifest(path)


def load(path: Path, *, prefix: str = "", verify: bool = True) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """`(tensors, state)` of a checkpoint, the tensors on the host.

    `prefix` selects the tensors whose names start with it; only shards that hold them are read. `verify` compares
    their hashes; sizes are always compared.
    """
    checkpoint = read(path)
    tensors = {
        name: _allocate(checkpoint.path, name, logical.dtype, logical.shape)
        for name, logical in checkpoint.logical.items()
        if name.startswith(prefix)
    }
    return tensors, load_into(path, tensors, prefix=prefix, verify=verify)


def load_into(
    path: Path,
    tensors: Mapping[str, Tensor | TensorByRows],
    *,
    prefix: str = "",
    verify: bool = True,
    processes: Processes = SINGLE_PROCESS,
) -> dict[str, Any]:
    """Copy a checkpoint into existing `tensors`, on any device, and return its state.

    Names (those that start with `prefix`), shapes and types must be the same on both sides; nothing is copied
    otherwise, nor when a shard is damaged. Shards are memory-mapped: no second copy of the state is made. What was
    saved of a lazy tensor loads into an ordinary one, and the other way round.

    A collective call. Every process passes the tensors it has; each tensor of the checkpoint must be on some process.
    A sharded tensor is given every row, and takes its own.
    """
    checkpoint = on_all_ranks(processes, lambda: read(path))
    if checkpoint.base is not None:
        raise CheckpointError(
            f"{path} holds the hot rows of a step after {checkpoint.base} only: load the checkpoint of that step, then "
            f"this one over it (load_hot_into)"
        )
    logical = {name: tensor for name, tensor in checkpoint.logical.items() if name.startswith(prefix)}
    anywhere = set().union(*processes.gather(sorted(tensors)))
    on_all_ranks(processes, lambda: _refuse_mismatch(checkpoint.path, logical, tensors, anywhere))
    wanted = {name: tensor for name, tensor in checkpoint.tensors.items() if name.startswith(prefix)}
    verify_shards(checkpoint, wanted.values(), hashes=verify, processes=processes)

    def copy() -> None:
        lazy = {name: entry for name, entry in checkpoint.lazy.items() if name in tensors}
        reset_targets(tensors, lazy, str(checkpoint.path))
        copy_shards(checkpoint, tensors)

    on_all_ranks(processes, copy)
    return checkpoint.state


def load_newest(
    folders: Iterable[Path], tensors: Mapping[str, Tensor | TensorByRows], *, prefix: str = ""
) -> tuple[Path, dict[str, Any]] | None:
    """`load_into` from the newest complete checkpoint of the first folder that has one; its path and state, or None.

    A run may save into the folders meanwhile. It leaves a checkpoint that is being read in place. If it has removed or
    replaced one before all of it was read, the newest one is loaded again.
    """
    folders = list(folders)
    while (path := next((path for path in map(newest, folders) if path is not None), None)) is not None:
        found, failure = _identity(path), None
        with reading(path):
            try:
                state = load_into(path, tensors, prefix=prefix)
            except CheckpointError as error:
                failure = error
            is_same = found is not None and found == _identity(path)
        if is_same and failure is not None:
            raise failure
        if is_same:
            return path, state
    return None


def _identity(path: Path) -> tuple[int, int] | None:
    """Folder behind a path and the time of its last change; None if there is none."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns


def latest_sound(folder: Path, processes: Processes = SINGLE_PROCESS) -> Path | None:
    """The newest complete checkpoint in `folder` that is not damaged, or None when there is none at all.

    Damaged ones are skipped with a warning (from rank 0) that names the file and the damage. Every shard is read and
    hashed, each by one process, so `load_into` need not verify it again.
    """
    folder = Path(folder)
    names = processes.on_rank_zero(lambda: [path.name for _, path in reversed(complete(folder))])
    damages: list[str] = []
    for name in names:
        damage = find_damage(folder / name, processes)
        if damage is None:
            for skipped in damages if processes.rank == 0 else []:
                warnings.warn(f"{skipped}; this run resumes from {name}", stacklevel=2)
            return folder / name
        damages.append(damage)
    if damages:
        raise CheckpointError(f"every checkpoint in {folder} is damaged: {'; '.join(damages)}")
    return None


def find_damage(path: Path, processes: Processes = SINGLE_PROCESS) -> str | None:
    """Error message of the lowest rank that finds a checkpoint damaged; None when it is not."""
    found = None
    try:
        checkpoint = read(path)
        own = _assigned_shards(checkpoint, list(checkpoint.shards), processes)
        _verify(checkpoint, list(checkpoint.shards), own)
    except CheckpointError as error:
        found = str(error)
    return next((message for message in processes.gather(found) if message is not None), None)


# --- damage ----------------------------------------------------------------------------------------------------------


def verify_shards(
    checkpoint: Checkpoint, tensors: Iterable[StoredTensor], *, hashes: bool, processes: Processes = SINGLE_PROCESS
) -> None:
    """Compare the shards that hold `tensors` with the manifest: sizes on every process, hashes on one of them."""
    needed = sorted({piece.shard for tensor in tensors for piece in tensor.pieces})
    own = _assigned_shards(checkpoint, needed, processes) if hashes else []
    on_all_ranks(processes, lambda: _verify(checkpoint, needed, own))


def _assigned_shards(checkpoint: Checkpoint, shards: list[str], processes: Processes) -> list[str]:
    """Shards that this process hashes: largest first, each assigned to the process with the fewest bytes so far."""
    loads = [0] * processes.world_size
    own = []
    for name in sorted(shards, key=lambda name: (-checkpoint.shards[name].bytes, name)):
        rank = loads.index(min(loads))
        loads[rank] += checkpoint.shards[name].bytes
        if rank == processes.rank:
            own.append(name)
    return sorted(own)


def _verify(checkpoint: Checkpoint, sizes: Iterable[str], hashes: Iterable[str]) -> None:
    for name in sizes:
        _verify_shard(checkpoint, checkpoint.shards[name], hashes=False)
    with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
        for _ in pool.map(lambda name: _verify_shard(checkpoint, checkpoint.shards[name], hashes=True), hashes):
            pass


def _verify_shard(checkpoint: Checkpoint, shard: Shard, *, hashes: bool) -> None:
    file = checkpoint.path / shard.file
    try:
        size = file.stat().st_size
        if size != shard.bytes:
            raise CheckpointError(
                f"{file} has {size} bytes where its manifest says {shard.bytes}: {restore_advice(checkpoint.path)}"
            )
        if hashes and sha256(file) != shard.sha256:
            raise CheckpointError(
                f"{file} has been altered since it was written (its SHA-256 differs): {restore_advice(checkpoint.path)}"
            )
    except FileNotFoundError:
        raise CheckpointError(f"{file} is missing: {restore_advice(checkpoint.path)}") from None
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read ({error}): {restore_advice(checkpoint.path)}") from error


def _refuse_mismatch(
    path: Path,
    stored: Mapping[str, StoredTensor | PartialEntry],
    tensors: Mapping[str, Tensor | TensorByRows],
    anywhere: Iterable[str],
) -> None:
    """Raise unless names, shapes and types of both sides agree; `anywhere` are the names on any process."""
    known = set(anywhere)
    differences = [f"'{name}' is missing from the checkpoint" for name in tensors if name not in stored]
    differences += [f"'{name}' is in the checkpoint only" for name in stored if name not in known]
    differences += shape_differences(stored, tensors)
    if differences:
        listed = "; ".join(sorted(differences)[:3]) + ("; ..." if len(differences) > 3 else "")
        raise CheckpointError(
            f"{path} is of another schema or model, {len(differences)} tensors differ: {listed}: "
            f"use the data set, model and optimizer it was trained with"
        )


def shape_differences(
    stored: Mapping[str, StoredTensor | PartialEntry], tensors: Mapping[str, Tensor | TensorByRows]
) -> list[str]:
    """Messages on the tensors of both sides that differ in shape or type."""
    differences = []
    for name in stored.keys() & tensors.keys():
        there, here = stored[name], tensors[name]
        if there.shape != tuple(here.shape):
            differences.append(f"'{name}' has shape {list(there.shape)} in the checkpoint and {list(here.shape)} here")
        elif DTYPES[there.dtype] != here.dtype:
            differences.append(f"'{name}' is {there.dtype} in the checkpoint and {here.dtype} here")
    return differences


# --- copying ---------------------------------------------------------------------------------------------------------


def _allocate(path: Path, name: str, dtype: str, shape: tuple[int, ...]) -> Tensor:
    try:
        return torch.empty(shape, dtype=DTYPES[dtype])
    except (RuntimeError, TypeError) as error:  # torch's errors for out of memory, and for sizes past 2^63
        needed = math.prod(shape) * DTYPES[dtype].itemsize
        raise CheckpointError(f"{path}: no memory for '{name}', which needs {needed} bytes") from error


def copy_shards(checkpoint: Checkpoint, tensors: Mapping[str, Tensor | TensorByRows]) -> None:
    """Copy the stored values of `tensors` into them, shard after shard."""
    by_shard: dict[str, list[tuple[str, Piece]]] = {}
    for name, entry in checkpoint.logical.items():
        if name in tensors:
            stored = name if isinstance(entry, StoredTensor) else name + VALUES
            for piece in checkpoint.tensors[stored].pieces:
                by_shard.setdefault(piece.shard, []).append((name, piece))
    for shard, pieces in by_shard.items():
        with _opened(checkpoint, shard) as content, torch.no_grad():
            for name, piece in pieces:
                _copy_piece(checkpoint, content, name, piece, tensors[name])


@contextmanager
def _opened(checkpoint: Checkpoint, shard: str) -> Iterator[Any]:
    file = checkpoint.path / shard
    try:
        with safe_open(file, framework="pt") as content:
            yield content
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{file} is not a valid safetensors file ({error}): {restore_advice(checkpoint.path)}"
        ) from error


def _copy_piece(checkpoint: Checkpoint, content: Any, name: str, piece: Piece, target: Tensor | TensorByRows) -> None:
    if name in checkpoint.lazy:
        source = _read_piece(checkpoint, content, name + VALUES, piece)
        write_rows(target, _row_numbers(checkpoint, name, piece.start, piece.stop), source)
        return
    source = _read_piece(checkpoint, content, name, piece)
    if isinstance(target, Tensor):
        target = target.detach()
        (target[piece.start : piece.stop] if target.dim() else target).copy_(source)
    else:
        write_rows(target, torch.arange(piece.start, piece.stop), source)


def _read_piece(checkpoint: Checkpoint, content: Any, name: str, piece: Piece) -> Tensor:
    """A piece, memory-mapped from its shard; raises unless its shape and type are those of the manifest."""
    stored, source = checkpoint.tensors[name], content.get_tensor(name)
    shape = (piece.stop - piece.start, *stored.shape[1:]) if stored.shape else ()
    if tuple(source.shape) != shape or source.dtype != DTYPES[stored.dtype]:
        raise CheckpointError(
            f"{checkpoint.path / piece.shard} holds '{name}' as {source.dtype} {list(source.shape)}, not what its "
            f"manifest says: {restore_advice(checkpoint.path)}"
        )
    return source


def _row_numbers(checkpoint: Checkpoint, name: str, start: int, stop: int) -> Tensor:
    """[stop - start] int64: entries `start` to `stop` of the row numbers of a lazy tensor.

    Row numbers are cut into other pieces than values.
    """
    found = []
    for piece in checkpoint.tensors[name + ROWS].pieces:
        if piece.start < stop and start < piece.stop:
            with _opened(checkpoint, piece.shard) as content:
                rows = _read_piece(checkpoint, content, name + ROWS, piece)
                found.append(rows[max(start - piece.start, 0) : stop - piece.start].clone())
    rows = torch.cat(found) if found else torch.empty(0, dtype=torch.int64)
    if rows.numel() and (int(rows.min()) < 0 or int(rows.max()) >= checkpoint.lazy[name].shape[0]):
        raise CheckpointError(
            f"{checkpoint.path} has rows of '{name}' from {int(rows.min())} to {int(rows.max())}, of which there are "
            f"{checkpoint.lazy[name].shape[0]}: {restore_advice(checkpoint.path)}"
        )
    return rows
