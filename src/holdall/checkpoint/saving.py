"""Saving of a checkpoint, by one process or several.

Rank 0 makes the folder, under the name of an incomplete one. Every process writes its slices to shards of its own,
forces them to disk, reads them back and hashes them. Rank 0 checks that all shards are there, writes the manifest and
renames the folder. If any process fails, all raise, and everything written is removed. If a
process dies, the others raise when its connection is lost or times out; the next save removes the incomplete folder.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from holdall.checkpoint.all_ranks import on_all_ranks
from holdall.checkpoint.folder import (
    HOT,
    STEP,
    checkpoint_name,
    prune,
    prune_hot,
    remove_unfinished,
    set_aside,
)
from holdall.checkpoint.manifest import MANIFEST, Piece, Shard, StoredTensor, document
from holdall.checkpoint.partial_tensors import Saved
from holdall.checkpoint.protocols import TensorByRows
from holdall.checkpoint.row_assignment import RowAssignment, TensorSlice, assign_rows
from holdall.common.errors import CheckpointError, ConfigError, HoldallError
from holdall.common.files import PARTIAL, atomic_folder, fsync_file, sha256, write_json
from holdall.distributed.processes import SINGLE_PROCESS, PeerError, Processes

SHARD_BYTES = 1 << 30
SHARED_SECONDS = 5.0
"""Seconds until a file that one process wrote must be visible to the others: network file systems cache absence."""


@dataclass(frozen=True)
class SavePlan:
    """Save that the processes have agreed on: the slices of this one, and what rank 0 needs to complete it."""

    path: Path
    step: int
    assignment: RowAssignment
    state: dict[str, Any]
    shard_bytes: int
    keep: int = 1
    base: int | None = None
    """Step of the full checkpoint that this one of hot rows completes."""

    def copied(self, buffer: Tensor) -> SavePlan:
        """The same save with this process's slices copied to `buffer`: [copy_bytes] uint8 on the host."""
        slices, start = [], 0
        for part in self.assignment.slices:
            slices.append(part.copied(buffer[start : start + part.num_bytes]))
            start += _aligned(part.num_bytes)
        return replace(self, assignment=replace(self.assignment, slices=slices))

    @property
    def copy_bytes(self) -> int:
        return sum(_aligned(part.num_bytes) for part in self.assignment.slices)


def save(
    folder: Path,
    step: int,
    tensors: Mapping[str, Tensor | TensorByRows],
    state: Mapping[str, Any],
    *,
    keep: int = 2,
    shard_bytes: int = SHARD_BYTES,
    processes: Processes = SINGLE_PROCESS,
) -> Path:
    """Write `folder/step-<step>` and return its path; then remove all but the newest `keep` checkpoints.

    `state` is a JSON document (configuration, position in the data, metrics); rank 0's is written. Random states are
    passed as tensors. A checkpoint of the same step is replaced. Tensors that share memory are stored once each; of
    lazy ones the touched rows are. A collective call; `row_assignment` describes which process writes which rows.
    """
    return write(
        plan_save(folder, step, tensors, state, keep=keep, shard_bytes=shard_bytes, processes=processes), processes
    )


def plan_save(
    folder: Path,
    step: int,
    tensors: Mapping[str, Saved],
    state: Mapping[str, Any],
    *,
    keep: int = 2,
    shard_bytes: int = SHARD_BYTES,
    base: int | None = None,
    processes: Processes = SINGLE_PROCESS,
) -> SavePlan:
    """Agree with the other processes on a save, before anything is written. A collective call."""
    if keep < 1 or shard_bytes < 1:
        raise ConfigError(f"checkpoints need keep >= 1 and shard_bytes >= 1, got {keep} and {shard_bytes}")
    kept_state = json.loads(json.dumps(state))  # raises on what JSON cannot hold; a copy
    path = Path(folder) / checkpoint_name(STEP if base is None else HOT, step)
    return SavePlan(path, step, assign_rows(tensors, processes), kept_state, shard_bytes, keep, base)


def write(planned: SavePlan, processes: Processes = SINGLE_PROCESS) -> Path:
    """Write a planned save; all processes return, or all raise. A collective call."""
    path, folder = planned.path, planned.path.parent
    with ExitStack() as stack:

        def make() -> None:
            with _explained(path):
                remove_unfinished(folder, STEP if planned.base is None else HOT)
                stack.enter_context(atomic_folder(path))

        processes.on_rank_zero(make)
        written = processes.gather(on_all_ranks(processes, lambda: _write_part(planned, processes)))

        def finish() -> None:
            with _explained(path):
                partial = _partial(path)
                for rank, theirs in enumerate(written):
                    _refuse_unseen(partial, theirs["shards"], rank)
                write_json(partial / MANIFEST, _manifest(planned, written), hashed=True)
                set_aside(path)
                stack.pop_all().close()  # renames the folder: the checkpoint is complete
            if planned.base is None:
                prune(folder, path, planned.step, planned.keep)
            else:
                prune_hot(folder, path, planned.base)

        processes.on_rank_zero(finish)
    return path


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // 64) * 64


def _partial(path: Path) -> Path:
    return path.with_name(path.name + PARTIAL)


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Raise errors of writing the checkpoint `path` as `CheckpointError` that names the state of the folder."""
    try:
        yield
    except PeerError:
        raise
    except HoldallError as error:
        raise CheckpointError(f"{error} (earlier checkpoints in {path.parent} are untouched)") from error
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise CheckpointError(
                f"the disk is full while writing {path}: free some space or choose another place, and run it again; "
                f"nothing half-written was kept (earlier checkpoints in {path.parent} are untouched)"
            ) from error
        raise CheckpointError(f"{path} cannot be written ({error}): choose a place that can be") from error


# --- on every process ------------------------------------------------------------------------------------------------


def _write_part(planned: SavePlan, processes: Processes) -> dict[str, Any]:
    """Write the shards of this process; their entries for the manifest."""
    with _explained(planned.path):
        partial = _partial(planned.path)
        _await_folder(partial, processes.rank)
        prefix = "shard" if processes.world_size == 1 else f"shard-{processes.rank:05d}"
        shards, pieces = _write_shards(partial, prefix, planned.assignment.slices, planned.shard_bytes)
    return {"shards": [asdict(shard) for shard in shards], "pieces": [[name, asdict(piece)] for name, piece in pieces]}


def _await_folder(partial: Path, rank: int) -> None:
    end = time.monotonic() + SHARED_SECONDS
    while not partial.is_dir():
        if time.monotonic() > end:
            raise CheckpointError(
                f"rank {rank} does not see {partial}, which rank 0 has made: all processes must see the same folder, "
                f"so put the run on a file system that their hosts share"
            )
        time.sleep(0.05)


def _write_shards(
    folder: Path, prefix: str, slices: Sequence[TensorSlice], shard_bytes: int
) -> tuple[list[Shard], list[tuple[str, Piece]]]:
    pieces = []
    # Both safetensors and hashlib release the interpreter lock, so one shard is hashed while the next is written.
    with ThreadPoolExecutor(max_workers=2, thread_name_prefix="checkpoint-hash") as pool:
        hashed = []
        for number, content in enumerate(_pack(slices, shard_bytes)):
            file = folder / f"{prefix}-{number:05d}.safetensors"
            _write_shard(file, {part.name: part.rows(start, stop) for part, start, stop in content})
            hashed.append(pool.submit(_sync_and_hash, file))
            pieces += [(part.name, Piece(file.name, start, stop)) for part, start, stop in content]
        return [result.result() for result in hashed], pieces


def _pack(slices: Sequence[TensorSlice], shard_bytes: int) -> list[list[tuple[TensorSlice, int, int]]]:
    """`(slice, first row, last row)` of every shard, in order; only slices larger than a shard are cut.

    A cut slice fills its shards up to less than a row, so no shard has two pieces of one tensor. A row larger than a
    shard gets a shard of its own.
    """
    shards: list[list[tuple[TensorSlice, int, int]]] = []
    free = 0
    for part in slices:
        num_rows = part.stop - part.start
        rows_in_piece = num_rows if part.num_bytes <= shard_bytes else max(1, shard_bytes // part.row_bytes)
        for start in range(part.start, max(part.stop, part.start + 1), max(rows_in_piece, 1)):
            stop = min(start + rows_in_piece, part.stop)
            size = (stop - start) * part.row_bytes
            if not shards or size > free:
                shards.append([])
                free = shard_bytes
            shards[-1].append((part, start, stop))
            free -= size
    return shards


def _write_shard(file: Path, tensors: dict[str, Tensor]) -> None:
    end = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].data_ptr()):
        if tensor.data_ptr() < end:  # safetensors rejects tensors that overlap, such as tied weights
            tensors[name] = tensor.clone()
        else:
            end = tensor.data_ptr() + tensor.nbytes
    try:
        save_file(tensors, file)
    except SafetensorError as error:
        if f"os error {errno.ENOSPC}" in str(error):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file)) from error
        raise CheckpointError(f"{file} cannot be written ({error})") from error


def _sync_and_hash(file: Path) -> Shard:
    """Force a shard to disk, read it back and hash it."""
    fsync_file(file)
    return Shard(file.name, file.stat().st_size, sha256(file))


# --- on rank 0 -------------------------------------------------------------------------------------------------------


def _refuse_unseen(partial: Path, shards: Sequence[Mapping[str, Any]], rank: int) -> None:
    """Raise if rank 0 does not see the shards that another process wrote."""
    end = time.monotonic() + SHARED_SECONDS
    for shard in shards:
        file = partial / shard["file"]
        while not file.exists() or file.stat().st_size != shard["bytes"]:
            if time.monotonic() > end:
                raise CheckpointError(
                    f"rank 0 does not see {file} with the {shard['bytes']} bytes that rank {rank} has written: all "
                    f"processes must see the same folder, so put the run on a file system that their hosts share"
                )
            time.sleep(0.05)


def _manifest(planned: SavePlan, written: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    shards = [Shard(**shard) for theirs in written for shard in theirs["shards"]]
    pieces: dict[str, list[Piece]] = {name: [] for name in planned.assignment.stored}
    for theirs in written:
        for name, piece in theirs["pieces"]:
            pieces[name].append(Piece(**piece))
    tensors = {
        name: StoredTensor(dtype, shape, tuple(sorted(pieces[name], key=lambda piece: piece.start)))
        for name, (dtype, shape) in planned.assignment.stored.items()
    }
    return document(planned.step, shards, tensors, planned.assignment.lazy, planned.state, planned.base)
