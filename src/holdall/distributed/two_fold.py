"""Two-fold parallelism (P2RES): hot rows on every process, each cold row on one.

A step, on every process, on its share of the batch:

    shared.prepare(batch.ids)       # distinct cold rows: their numbers to the owners, the rows back (two all-to-alls)
    loss(model(batch)).backward()   # reads [hot | fetched]; gradients of rows stay here
    shared.exchange_gradients()     # hot: summed over processes; cold: to the owners (all-to-all), summed there
    optimizers.step()               # hot rows alike on all processes, each cold row once, by its owner

Gradients are those of the mean over all processes' samples, so the result is that of one process on all of them, up to
the order of sums. Hot gradients are summed in the order of processes, or by an all-reduce, so hot rows have the same
bits everywhere. Per process and step, a cold row costs (4 + 2 * 4 dim) bytes when it is another's; the hot rows cost
2 (W - 1) / W * 4 (dim + 1) bytes each by all-reduce, or (W - 1) * (4 + 4 dim) bytes for each that was touched.

Ahead of its step, while another is computed, a batch can fetch all cold rows but those that the other step updates,
which follow when it is done: the same rows as without, to the bit (`TwoFold.steps`).
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
from holdall.distributed.two_fold_pack import Early, TwoFoldPack
from holdall.embedding.bags import EmbeddingBags, module_name


class TwoFold:
    """The two-fold packs of a model's tables, and what a step asks of them (see the top of this file)."""

    def __init__(self, bags: EmbeddingBags, packs: Sequence[TwoFoldPack]):
        self.bags, self.packs = bags, list(packs)

    def prepare(self, ids: Ids, *, learns: bool = True) -> None:
        """Fetch what a batch looks up, which may have no samples; every process calls it for its own share."""
        for pack in self.packs:
            pack.bring(pack.request(ids, self.bags.features), learns=learns)

    def enter_hot(self, num_samples: int) -> None:
        """Say that the next batch looks up hot rows alone, on every process: nothing is fetched for it."""
        for pack in self.packs:
            pack.enter_hot(num_samples)

    def steps(
        self,
        batches: Iterator[tuple[Batch, Batch]],
        ahead: Collectives | None = None,
        stage: Callable[[str], AbstractContextManager[None]] = lambda _: nullcontext(),
    ) -> Generator[tuple[Batch, Batch], None, None]:
        """The batches, each when its rows are here and the gradients of the one before have been applied.

        Given collectives of a group of their own, `ahead`, a thread fetches the rows of the next batch meanwhile.
        `stage("fetch")` is entered for as long as the step waits for its rows.
        """
        if ahead is None:
            for batch, moved in batches:
                with stage("fetch"):
                    self.prepare(batch.ids)
                yield batch, moved
            return
        with WorkerThread("fetch") as thread:
            early: Future[list[Early]] | None = None
            coming = next(batches, None)
            while coming is not None:
                batch, moved = coming
                with stage("fetch"):
                    if early is None:
                        self.prepare(batch.ids)
                    else:
                        for pack, fetched in zip(self.packs, early.result(), strict=True):
                            pack.bring(fetched.request, early=fetched)
                coming = next(batches, None)
                if coming is not None:
                    early = thread.submit(self._fetch_early, coming[0].ids, [pack.busy for pack in self.packs], ahead)
                yield batch, moved

    def _fetch_early(self, ids: Ids, busy: Sequence[Tensor], ahead: Collectives) -> list[Early]:
        return [
            pack.fetch_early(pack.request(ids, self.bags.features, ahead), updated, ahead)
            for pack, updated in zip(self.packs, busy, strict=True)
        ]

    def exchange_gradients(self, scale: float | None = None) -> None:
        for pack in self.packs:
            pack.exchange_gradients(scale)

    def finish(self) -> None:
        """Take updated rows home: done by the next `prepare`, and before anything is saved."""
        for pack in self.packs:
            pack.finish()

    def weights(self) -> dict[str, ShardedTensor]:
        """The rows of every table, as a checkpoint takes them, by the name of the parameter in the bags."""
        return {f"tables.{module_name(name)}.weight": pack.weight(name) for pack in self.packs for name in pack.tables}

    @torch.no_grad()
    def full_state(self, to: int = 0) -> dict[str, dict[str, Tensor]]:
        """Every table, whole, and its optimizer state, `{name: {"weight": [R, dim], ...}}`, on process `to`; nothing of
        them on the others."""
        self.finish()
        return {name: self._whole(pack, name, to) for pack in self.packs for name in pack.tables}

    def _whole(self, pack: TwoFoldPack, name: str, to: int) -> dict[str, Tensor]:
        collectives, number = pack.collectives, pack.shards.number[name]
        here, whole = collectives.rank == to, {}
        comes = [int(count) if here else 0 for count in pack.shards.counts[:, number]]
        for spread in (pack.weight(name), *pack.slot_views(name).values()):
            rows = spread.read(pack.shards.kept(collectives.rank, name))
            sends = [rows.shape[0] if rank == to else 0 for rank in range(collectives.world_size)]
            received = collectives.all_to_all(rows, sends, comes, kind="whole_tables").cpu()
            if here:
                kept = [pack.shards.kept(rank, name) for rank in range(collectives.world_size)]
                ids = torch.cat([torch.arange(pack.hot_rows[name]), *kept])
                whole[spread.kind] = torch.empty(spread.shape, dtype=spread.dtype)
                whole[spread.kind][ids] = torch.cat([pack.hot(name, spread.kind).cpu(), received])
        return whole


def two_fold(
    bags: EmbeddingBags, hot_rows: Mapping[str, int], collectives: Collectives, device: torch.device | str = "cpu"
) -> TwoFold:
    """Spread the packed dense tables of `bags`, built alike on every process, before their optimizer is made.

    Compressed tables stay whole on every process: theirs are ordinary gradients, to be all-reduced with the dense part.
    """
    if any(pack.collects for pack in bags.packs):
        raise ConfigError("the tables have an optimizer already: spread them first, then make the optimizer")
    packs = [TwoFoldPack(pack, hot_rows, collectives, device) for pack in bags.packs]
    if not packs:
        raise ConfigError("the model has no dense tables to spread over processes: use --strategy data-parallel")
    bags.set_packs(packs)
    return TwoFold(bags, packs)
