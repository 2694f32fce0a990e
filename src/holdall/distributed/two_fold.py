"""Two-fold parallelism (P2RES): hot rows replicated on every process, each cold row on one.

A step, on every process, on its share of the batch:

    shared.prepare(batch.ids)       # distinct cold rows: their numbers to the owners, the rows back (two all-to-alls)
    loss(model(batch)).backward()   # reads [hot | fetched]; gradients of rows are not sent yet
    shared.exchange_gradients()     # hot: summed over processes; cold: to the owners (all-to-all), summed there
    optimizers.step()               # hot rows identically on all processes, each cold row once, by its owner

Gradients are those of the mean over all processes' samples, so the result is that of one process on all of them, up to
the order of sums. Hot gradients are summed in the order of processes, or by an all-reduce, so hot rows have the same
bits everywhere. Per process and step, a cold row of another process costs (4 + 2 * 4 dim) bytes; hot rows cost
2 (W - 1) / W * 4 (dim + 1) bytes each by all-reduce, or (W - 1) * (4 + 4 dim) bytes for each that was touched.

While a step is computed, the cold rows of the next one can be prefetched, except those that the current step updates,
which are fetched after it: the same rows as without prefetching, to the bit (`TwoFold.steps`).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from holdall.common.errors import ConfigError
from holdall.common.worker_thread import WorkerThread
from holdall.data.batch import Batch, Ids
from holdall.distributed.collectives import Collectives
from holdall.distributed.sharded_tensor import ShardedTensor
from holdall.distributed.two_fold_pack import PrefetchedRows, TwoFoldPack
from holdall.embedding.bags import EmbeddingBags, module_name


class TwoFold:
    """Two-fold packs of a model's tables, and the operations of a step on them (see the top of this file)."""

    def __init__(self, bags: EmbeddingBags, packs: Sequence[TwoFoldPack]):
        self.bags, self.packs = bags, list(packs)

    def prepare(self, ids: Ids, *, training: bool = True) -> None:
        """Fetch the cold rows of this process's share of a batch, which may be empty. A collective call."""
        for pack in self.packs:
            pack.fetch(pack.request(ids, self.bags.features), training=training)

    def prepare_hot(self, num_samples: int) -> None:
        """Prepare a batch that looks up only hot rows, on every process: nothing is fetched for it."""
        for pack in self.packs:
            pack.prepare_hot(num_samples)

    def steps(
        self,
        batches: Iterator[tuple[Batch, Batch]],
        ahead: Collectives | None = None,
        stage: Callable[[str], AbstractContextManager[None]] = lambda _: nullcontext(),
    ) -> Generator[tuple[Batch, Batch], None, None]:
        """The batches, each after its rows were fetched. Gradients must be applied before the next one is drawn.

        With `ahead`, collectives of a group of their own, a thread prefetches the rows of the next batch meanwhile.
        `stage("fetch")` is entered while the step waits for its rows.
        """
        if ahead is None:
            for batch, moved in batches:
                with stage("fetch"):
                    self.prepare(batch.ids)
                yield batch, moved
            return
        with WorkerThread("fetch") as thread:
            prefetched: Future[list[PrefetchedRows]] | None = None
            following = next(batches, None)
            while following is not None:
                batch, moved = following
                with stage("fetch"):
                    if prefetched is None:
                        self.prepare(batch.ids)
                    else:
                        for pack, rows in zip(self.packs, prefetched.result(), strict=True):
                            pack.fetch(rows.request, prefetched=rows)
                following = next(batches, None)
                if following is not None:
                    updated = [pack.updated_rows for pack in self.packs]
                    prefetched = thread.submit(self._prefetch, following[0].ids, updated, ahead)
                yield batch, moved

    def _prefetch(self, ids: Ids, updated: Sequence[Tensor], ahead: Collectives) -> list[PrefetchedRows]:
        return [
            pack.prefetch(pack.request(ids, self.bags.features, ahead), rows, ahead)
            for pack, rows in zip(self.packs, updated, strict=True)
        ]

    def exchange_gradients(self, scale: float | None = None) -> None:
        for pack in self.packs:
            pack.exchange_gradients(scale)

    def finish(self) -> None:
        """Write updated rows back to the host: done by the next `prepare`, and before a checkpoint."""
        for pack in self.packs:
            pack.finish()

    def weights(self) -> dict[str, ShardedTensor]:
        """Rows of every table, for a checkpoint, by the name of the parameter in the bags."""
        return {f"tables.{module_name(name)}.weight": pack.weight(name) for pack in self.packs for name in pack.tables}

    @torch.no_grad()
    def full_state(self, to: int = 0) -> dict[str, dict[str, Tensor]]:
        """Every full table and its optimizer state, `{name: {"weight": [R, dim], ...}}`, on process `to`; empty tables
        on the others. A collective call."""
        self.finish()
        return {name: self._full_table(pack, name, to) for pack in self.packs for name in pack.tables}

    def _full_table(self, pack: TwoFoldPack, name: str, to: int) -> dict[str, Tensor]:
        collectives, number = pack.collectives, pack.shards.number[name]
        here, full = collectives.rank == to, {}
        receives = [int(count) if here else 0 for count in pack.shards.counts[:, number]]
        for sharded in (pack.weight(name), *pack.slot_views(name).values()):
            rows = sharded.read(pack.shards.owned_ids(collectives.rank, name))
            sends = [rows.shape[0] if rank == to else 0 for rank in range(collectives.world_size)]
            received = collectives.all_to_all(rows, sends, receives, kind="whole_tables").cpu()
            if here:
                owned = [pack.shards.owned_ids(rank, name) for rank in range(collectives.world_size)]
                ids = torch.cat([torch.arange(pack.hot_rows[name]), *owned])
                full[sharded.kind] = torch.empty(sharded.shape, dtype=sharded.dtype)
                full[sharded.kind][ids] = torch.cat([pack.hot(name, sharded.kind).cpu(), received])
        return full


def two_fold(
    bags: EmbeddingBags, hot_rows: Mapping[str, int], collectives: Collectives, device: torch.device | str = "cpu"
) -> TwoFold:
    """Shard the packed dense tables of `bags`, which every process builds identically, before their optimizer is made.

    Compressed tables stay replicated: they have ordinary gradients, all-reduced with the dense part.
    """
    if any(pack.collects for pack in bags.packs):
        raise ConfigError("the tables have an optimizer already: shard them first, then make the optimizer")
    packs = [TwoFoldPack(pack, hot_rows, collectives, device) for pack in bags.packs]
    if not packs:
        raise ConfigError("the model has no dense tables to shard over processes: use --strategy data-parallel")
    bags.set_packs(packs)
    return TwoFold(bags, packs)
