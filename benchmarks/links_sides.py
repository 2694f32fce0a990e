"""What `benchmarks.links` compares: one model whose tables are spread over processes in several ways.

Every side has `run(places)`, which trains on its share of the batches of these numbers and gives the loss of each, and
`stages`, where the time of its steps went. All begin with the same rows and layers, and use SGD.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holdall.data.batch import Batch, Ids
from holdall.data.schema import DenseColumn, Feature, Schema
from holdall.distributed.collectives import Collectives
from holdall.distributed.gradient_buckets import GradientBuckets
from holdall.distributed.processes import Processes
from holdall.distributed.shards import Shards
from holdall.distributed.table_wise import TableWiseBags, assign_tables
from holdall.distributed.two_fold import two_fold
from holdall.embedding.bags import EmbeddingBags
from holdall.models import DLRM, DLRMConfig
from holdall.optim.config import OptimizerConfig
from holdall.optim.optimizers import Optimizers
from holdall.tables import Dense
from holdall.tables.dense import DenseTable
from holdall.tables.initial_rows import initial_rows

NUM_DENSE = 13
LR = 0.05


def build_model(rows: Sequence[int], dim: int, interaction: str, hidden: tuple[int, ...]) -> DLRM:
    """The model every process begins with; its tables have seeds and no rows yet."""
    schema = Schema(
        label="click",
        dense=tuple(DenseColumn(name=f"I{i + 1}") for i in range(NUM_DENSE)),
        features=tuple(Feature(name=f"C{i + 1}", num_rows=n, unseen=n - 1) for i, n in enumerate(rows)),
    )
    torch.manual_seed(0)
    config = DLRMConfig(dim=dim, bottom=hidden, top=hidden, interaction=interaction)  # type: ignore[arg-type]
    return config.build(schema, dense_device="meta")


class Stages:
    """Seconds of steps by stage: `seconds[stage][step]` of the last run."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}
        self._last = 0.0

    def begin(self) -> None:
        self.seconds, self._last = {}, time.perf_counter()

    def end(self, stage: str) -> None:
        now = time.perf_counter()
        self.seconds.setdefault(stage, []).append(now - self._last)
        self._last = now


class Ours:
    """Tables spread by `two-fold`, `row-wise` (two-fold without hot rows), `table-wise` or `every lookup`.

    With `ahead`, which two-fold alone can do, the rows of the next batch are fetched while this one computes.
    """

    def __init__(
        self,
        way: str,
        model: DLRM,
        processes: Processes,
        hot: Mapping[str, int],
        batches: Sequence[Batch],
        *,
        ahead: bool = False,
    ) -> None:
        self.batches, self.world_size = batches, processes.world_size
        self.stages = Stages()
        self.collectives = Collectives(processes)
        sizes = {name: model.bags.table(name).num_rows for name in model.bags.features}
        shared: Any
        if way == "table-wise":
            owners = assign_tables(sizes, dict.fromkeys(sizes, 1.0), processes.world_size)
            shared = model.bags = TableWiseBags(model.bags, owners, self.collectives)
        elif way == "every lookup":
            shared = model.bags = EveryLookup(model.bags, self.collectives)
        else:
            shared = two_fold(model.bags, hot if way == "two-fold" else dict.fromkeys(sizes, 0), self.collectives)
        self.model, self.shared = model, shared
        self.optimizers = Optimizers(model, OptimizerConfig(name="sgd", lr=LR))
        dense = Collectives(processes, own_group=True)
        self.buckets = GradientBuckets(self.optimizers.dense_parameters.values(), dense)
        self.ahead = Collectives(processes, own_group=True) if ahead else None

    def run(self, places: Sequence[int]) -> list[Tensor]:
        self.stages.begin()
        return [self._step(batch) for batch in self._ready(places)]

    def _ready(self, places: Sequence[int]) -> Iterator[Batch]:
        """The batches, each when what it looks up is here."""
        if self.ahead is None:
            for place in places:
                self.shared.prepare(self.batches[place].ids)
                yield self.batches[place]
            return
        pairs = ((self.batches[place], self.batches[place]) for place in places)
        for batch, _ in self.shared.steps(pairs, self.ahead):
            yield batch

    def _step(self, batch: Batch) -> Tensor:
        stages = self.stages
        stages.end("exchange before")
        loss = F.binary_cross_entropy_with_logits(self.model(batch), batch.label)
        self.buckets.begin()
        (loss / self.world_size).backward()
        stages.end("compute")
        self.buckets.flush()
        self.shared.exchange_gradients(1.0)
        self.buckets.finish()
        stages.end("exchange after")
        self.optimizers.step()
        stages.end("update")
        return loss.detach()


class EveryLookup(EmbeddingBags):
    """Rows dealt to processes, and asked for lookup by lookup, each as often as it occurs: the plain way to shard rows.

    The owner sums the gradients of a row. One id a feature alone.
    """

    def __init__(self, bags: EmbeddingBags, collectives: Collectives):
        tables = {name: bags.table(name) for name in bags.features}
        self._shards = Shards(
            {n: t.num_rows for n, t in tables.items()}, dict.fromkeys(tables, 0), collectives.world_size
        )
        rank = collectives.rank
        num_kept = int(self._shards.counts[rank].sum())
        super().__init__({"kept": Dense().build(num_kept, bags.dim, device="meta")}, {"kept": "kept"})
        self.collectives, self._names = collectives, list(tables)
        self._vectors: Tensor | None = None
        kept = self.table("kept")
        assert isinstance(kept, DenseTable)
        with torch.no_grad():
            for name, table in tables.items():
                assert isinstance(table, DenseTable)
                fill(kept.weight[self._shards.local_slice(rank, name)], table, self._shards.owned_ids(rank, name))

    def prepare(self, ids: Ids) -> None:
        number = torch.arange(len(self._names))[:, None].expand(ids.values.shape)
        keys = self._shards.keys(ids.values.long(), number).t().reshape(-1)  # sample-major, as vectors are
        owner = keys // self._shards.stride
        self._order = torch.argsort(owner, stable=True)
        self._to = torch.bincount(owner, minlength=self.collectives.world_size).tolist()
        self._of = self.collectives.exchange_sizes(self._to)
        local = (keys % self._shards.stride)[self._order].int()
        wanted = self.collectives.all_to_all(local, self._to, self._of, kind="ids")
        self._answers = super().forward(Ids(wanted[None], None, 1))[:, 0]
        received = self.collectives.all_to_all(self._answers.detach(), self._of, self._to, kind="rows")
        vectors = torch.empty_like(received)
        vectors[self._order] = received
        self._vectors = vectors.view(ids.batch_size, len(self._names), -1).requires_grad_()

    def forward(self, ids: Ids, positions: Sequence[int] | None = None) -> Tensor:
        assert self._vectors is not None
        return self._vectors

    def exchange_gradients(self, scale: float) -> None:
        assert self._vectors is not None
        assert self._vectors.grad is not None
        gradients = (self._vectors.grad * scale).view(-1, self.dim)[self._order]
        self._vectors = None
        self._answers.backward(self.collectives.all_to_all(gradients, self._to, self._of, kind="gradients"))


def fill(rows: Tensor, table: DenseTable, ids: Tensor | None = None, block: int = 1 << 16) -> None:
    """Write the initial values of a table's rows (of all of them, or of those of `ids`)."""
    assert table.seed is not None
    for start in range(0, rows.shape[0], block):
        stop = min(start + block, rows.shape[0])
        chosen = torch.arange(start, stop) if ids is None else ids[start:stop]
        rows[start:stop] = initial_rows(chosen, rows.shape[1], table.seed, table.init_std)


class TorchRec:
    """TorchRec's `DistributedModelParallel`, tables placed by its own planner (table-wise), the rest in DDP."""

    def __init__(self, model: DLRM, processes: Processes, batches: Sequence[Batch]) -> None:
        import torch.distributed as dist
        import torchrec
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
        from torchrec.distributed.model_parallel import DistributedModelParallel
        from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology

        bags, self.stages = model.bags, Stages()
        names = list(bags.features)
        tables = [
            torchrec.EmbeddingBagConfig(
                name=name, num_embeddings=bags.table(name).num_rows, embedding_dim=bags.dim, feature_names=[name]
            )
            for name in names
        ]
        collection = torchrec.EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
        sharder = EmbeddingBagCollectionSharder(fused_params={"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": LR})
        # Its data-parallel tables have no gradient on a CPU (fbgemm 1.8), and row-wise ones no kernel.
        constraints = {name: ParameterConstraints(sharding_types=["table_wise"]) for name in names}
        topology = Topology(world_size=processes.world_size, compute_device="cpu", local_world_size=1)
        planner = EmbeddingShardingPlanner(topology=topology, batch_size=len(batches[0]), constraints=constraints)
        whole = _WithCollection(collection, model, names)
        plan = planner.collective_plan(whole, [sharder], dist.group.WORLD)
        self.model = DistributedModelParallel(whole, device=torch.device("cpu"), plan=plan, sharders=[sharder])
        for key, tensor in self.model.state_dict().items():
            name = key.split(".")[-2]
            if name in names:
                table = bags.table(name)
                assert isinstance(table, DenseTable)
                for shard in tensor.local_shards():
                    fill(shard.tensor, table)
        dense = [parameter for key, parameter in self.model.named_parameters() if "collection" not in key]
        self.optimizer = torch.optim.SGD(dense, lr=LR)
        self.batches = [
            (batch, torchrec.KeyedJaggedTensor.from_lengths_sync(
                names, batch.ids.values.reshape(-1).long(), torch.ones(batch.ids.values.numel(), dtype=torch.int64)
            ))
            for batch in batches
        ]  # fmt: skip

    def run(self, places: Sequence[int]) -> list[Tensor]:
        self.stages.begin()
        return [self._step(*self.batches[place]) for place in places]

    def _step(self, batch: Batch, features: Any) -> Tensor:
        loss = F.binary_cross_entropy_with_logits(self.model(batch.dense, features), batch.label)
        self.stages.end("forward with its exchange")
        loss.backward()
        self.stages.end("backward with its exchange")
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.stages.end("update")
        return loss.detach()


class _WithCollection(nn.Module):
    """Our model's layers over vectors of a TorchRec collection."""

    def __init__(self, collection: Any, model: DLRM, names: Sequence[str]) -> None:
        super().__init__()
        self.collection, self.bottom, self.top = collection, model.bottom, model.top
        self._score, self._names = [model.score], list(names)  # in a list: not a submodule

    def forward(self, dense: Tensor, features: Any) -> Tensor:
        vectors = self.collection(features)
        stacked = vectors.values().view(dense.shape[0], len(self._names), -1)
        keys = vectors.keys()  # in the order of the processes that have them
        return self._score[0](dense, stacked[:, [keys.index(name) for name in self._names]])
