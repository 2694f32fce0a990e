"""Loader of the batches of a split: shuffled by seed, divided among processes, prefetched, resumable.

The order of an epoch is a function of (seed, epoch, batch size, rows) and nothing else, so a position in the data is
two numbers, and any number of processes sees the same global batches.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict, get_args

import numpy as np

from holdall.common.decode import Count, decode
from holdall.common.errors import CheckpointError, ConfigError, DataError
from holdall.common.settings import refuse_other_types
from holdall.common.summary import Summarised, Summary
from holdall.common.worker_thread import prefetched
from holdall.data.batch import Batch
from holdall.data.chunk_order import ChunkOrder, Runs
from holdall.data.dataset import DataSet
from holdall.data.shuffle import Shuffle as Shuffle

COPIED_ROWS = 1 << 16
"""Rows of `chunks` that are copied at once, in as many batches as they make: small batches of a set of many files would
read a few rows of each."""
Ranges = list[tuple[int, int]]
"""Ranges of rows: first row, and the one after the last."""


@dataclass(frozen=True)
class Position:
    """Position in the data, the same for every rank: the part of an epoch that has been read."""

    epoch: int
    batch: int
    """Global batches of the epoch read so far: the `start_batch` to resume at."""
    sample: int
    """Samples of the epoch read so far, by all ranks."""


class StoredPosition(TypedDict):
    """Position as a checkpoint has it, beside the settings that it belongs to."""

    epoch: Count
    sample: Count


class Loader(Summarised):
    """Batches of a split; `batch_size` is the global one, of which each rank gets its contiguous share.

    Orders of an epoch, by `shuffle`:

    - `chunks` (or True): every batch has short runs of neighbours from everywhere (`data.chunk_order`), copied. Files
      that are sorted by label, user or time train as files in random order do.
    - `blocks`: the rows, taken as a ring, are cut into contiguous blocks of `batch_size` from a starting row that the
      epoch draws, and the blocks come in an order that the epoch draws; the block that is short, if any, comes last. A
      batch is one contiguous slice of the mapped files, so nothing is copied, and files are read from end to end. It
      does *not* mix rows: it is for files whose rows are in random order.
    - `rows`: a full random permutation; every batch is gathered and copied. Needs 8 bytes per row and random reads, so
      it is for sets that fit in memory.
    - `none` (or False): file order.

    Every row comes exactly once an epoch, but for `rows % batch_size` of them when `drop_last`. Rank r of W gets rows
    `n * r // W .. n * (r + 1) // W` of a global batch of n: shares differ by one sample at most, and are empty for some
    ranks when n < W. `prefetch` batches are made, and their pages read, by a thread ahead of use; 0 makes each on
    demand. With `prefetch_to_device` the consumer copies batches in a thread of its own: batches that are views of the
    files are then made on demand, too.
    """

    def __init__(
        self,
        data: DataSet | str | Path,
        batch_size: int,
        *,
        shuffle: Shuffle | bool = "chunks",
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        drop_last: bool = False,
        prefetch: int = 2,
        prefetch_to_device: bool = False,
    ):
        data = data if isinstance(data, DataSet) else DataSet(data)
        if isinstance(shuffle, bool):
            shuffle = "chunks" if shuffle else "none"
        if shuffle not in get_args(Shuffle):
            raise ConfigError(f"shuffle is {shuffle!r}: choose chunks, blocks, rows or none")
        refuse_other_types(int, batch_size=batch_size, seed=seed, prefetch=prefetch)
        if batch_size < 1:
            raise ConfigError(f"the batch size is {batch_size}: it must be at least 1")
        if not 0 <= rank < world_size:
            raise ConfigError(f"rank {rank} of a world of {world_size}: ranks go from 0 to {world_size - 1}")
        if seed < 0:
            raise ConfigError(f"the seed is {seed}: it must be 0 or more")
        if prefetch < 0:
            raise ConfigError(f"prefetch is {prefetch}: it must be 0 (no thread) or more")
        if len(data) == 0:
            raise DataError(f"split '{data.split}' of {data.folder} has no rows: choose another split or prepare more")
        if drop_last and len(data) < batch_size:
            raise ConfigError(
                f"a batch of {batch_size} is more than the {len(data)} rows of split '{data.split}', and drop_last "
                f"drops what is not a full batch: lower the batch size"
            )
        self.data = data
        self.batch_size = batch_size
        self.shuffle: Shuffle = shuffle
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.drop_last = drop_last
        self.prefetch = prefetch
        self.prefetch_to_device = prefetch_to_device

    def _summary(self) -> Summary:
        return Summary(
            f"Loader of {str(self.data.folder)!r}, split '{self.data.split}': {len(self.data):,} rows in batches of "
            f"{self.batch_size:,}, shuffle '{self.shuffle}', seed {self.seed}, rank {self.rank} of {self.world_size}"
        )

    @property
    def num_batches(self) -> int:
        """Batches an epoch."""
        if self.drop_last:
            return len(self.data) // self.batch_size
        return -(-len(self.data) // self.batch_size)

    def global_size(self, batch: int) -> int:
        """Rows of global batch number `batch` of an epoch, over all ranks: fewer in the last one."""
        return min(self.batch_size, len(self.data) - batch * self.batch_size)

    @property
    def num_samples(self) -> int:
        """Samples an epoch, over all ranks."""
        return min(len(self.data), self.num_batches * self.batch_size)

    def epoch(self, epoch: int, start_batch: int = 0) -> Iterator[Batch]:
        """Batches `start_batch`.. of an epoch, this rank's share of each. Closing the iterator stops its thread."""
        if not 0 <= start_batch <= self.num_batches:
            raise ConfigError(f"batch {start_batch} of an epoch of {self.num_batches}")
        if self.prefetch == 0 or (self.prefetch_to_device and self._gives_views):
            return self._batches(epoch, start_batch)
        if self._gives_views:
            return self._read_ahead(epoch, start_batch)
        return prefetched(self._batches(epoch, start_batch), self.prefetch, "loader")

    @property
    def _gives_views(self) -> bool:
        """Whether batches are views of the files."""
        return self.shuffle in ("blocks", "none")

    def state(self, epoch: int, num_given: int) -> dict[str, Any]:
        """State of the loader after `num_given` batches of an epoch, as JSON for a checkpoint."""
        if num_given >= self.num_batches:
            epoch, num_given = epoch + 1, 0
        return {"epoch": epoch, "sample": num_given * self.batch_size, **self._order()}

    def load_state(self, state: dict[str, Any]) -> Position:
        """Position to resume at, with `epoch(position.epoch, position.batch)`. The number of processes may have
        changed; settings that decide the order of the samples may not."""
        for name, value in self._order().items():
            if state.get(name) != value:
                raise CheckpointError(
                    f"the checkpoint was made with {name} {state.get(name)!r} and this run has {value!r}, so it cannot "
                    f"resume at the same sample: use the same {name}, or start a new run"
                )
        position = decode(state, StoredPosition, "the checkpoint", inside="state.data", error=CheckpointError)
        epoch, sample = position["epoch"], position["sample"]
        if sample % self.batch_size or sample >= self.num_samples:
            raise CheckpointError(f"the checkpoint is at sample {sample} of an epoch of {self.num_samples}")
        return Position(epoch=epoch, batch=sample // self.batch_size, sample=sample)

    def _order(self) -> dict[str, Any]:
        """Settings that the order of samples depends on, besides the epoch."""
        return {
            "rows": len(self.data),
            "batch_size": self.batch_size,
            "shuffle": self.shuffle,
            "seed": self.seed,
            "drop_last": self.drop_last,
        }

    def _batches(self, epoch: int, start_batch: int) -> Iterator[Batch]:
        if self.shuffle == "rows":
            order = np.random.default_rng([self.seed, epoch]).permutation(len(self.data))
            for start, stop in self._shares(np.arange(start_batch, self.num_batches)):
                yield self.data.take(order[start:stop])
        elif self.shuffle == "chunks":
            yield from self._chunked(epoch, start_batch)
        else:
            for ranges in self._ranges(epoch, start_batch):
                yield self._view(ranges)

    def _chunked(self, epoch: int, start_batch: int) -> Iterator[Batch]:
        order = ChunkOrder(len(self.data), self.batch_size, (self.seed, epoch))
        at_once = max(1, COPIED_ROWS // self.batch_size)
        for first in range(start_batch, self.num_batches, at_once):
            shares = list(self._shares(np.arange(first, min(first + at_once, self.num_batches))))
            sizes = [stop - start for start, stop in shares]
            yield from self.data.take_runs(Runs.join([order.runs(*share) for share in shares]), sizes)

    def _ranges(self, epoch: int, start_batch: int) -> Iterator[Ranges]:
        """This rank's rows of each batch that is a view of the files."""
        rng = np.random.default_rng([self.seed, epoch])
        num_rows, first_row = len(self.data), 0
        blocks = np.arange(self.num_batches)
        if self.shuffle == "blocks":
            first_row = int(rng.integers(num_rows))
            rng.shuffle(blocks[: num_rows // self.batch_size])  # the short block, if there is one, stays last
        for start, stop in self._shares(blocks[start_batch:]):
            yield self._on_ring(first_row + start, first_row + stop)

    def _read_ahead(self, epoch: int, start_batch: int) -> Iterator[Batch]:
        """Views of the files, whose pages a thread reads; files that were truncated since then are refused."""

        def read() -> Iterator[tuple[Batch, Ranges]]:
            for ranges in self._ranges(epoch, start_batch):
                batch = self._view(ranges)
                page_in(batch)
                yield batch, ranges

        with closing(prefetched(read(), self.prefetch, "loader")) as batches:
            for batch, ranges in batches:
                for start, stop in ranges:
                    self.data.refuse_truncated(start, stop)
                yield batch

    def _shares(self, blocks: np.ndarray) -> Iterator[tuple[int, int]]:
        """This rank's rows of each block."""
        for block in blocks.tolist():
            start = block * self.batch_size
            size = min(self.batch_size, len(self.data) - start)
            yield start + size * self.rank // self.world_size, start + size * (self.rank + 1) // self.world_size

    def _on_ring(self, start: int, stop: int) -> Ranges:
        """Rows start..stop counted modulo the number of rows: two ranges where they pass the end."""
        num_rows = len(self.data)
        if start >= num_rows:
            start, stop = start - num_rows, stop - num_rows
        if stop <= num_rows:
            return [(start, stop)]
        return [(start, num_rows), (0, stop - num_rows)]

    def _view(self, ranges: Ranges) -> Batch:
        """One range as a view; two are copied."""
        return self.data.slice(*ranges[0]) if len(ranges) == 1 else self.data.join(*ranges)


def page_in(batch: Batch) -> None:
    """Read one element of each page of a batch, so that this call waits for the disk and not the training step.

    Torch rather than numpy, because torch releases the GIL while a page is read.
    """
    for tensor in (batch.dense, batch.ids.values.t()):
        if tensor.numel():
            tensor.reshape(-1)[:: mmap.PAGESIZE // tensor.element_size()].sum()
