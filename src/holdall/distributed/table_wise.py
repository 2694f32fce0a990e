"""Table-wise parallelism (the butterfly shuffle of DLRM): each table on one process, pooled vectors exchanged.

A step, on every process, on its share of the batch:

    bags.prepare(batch.ids)         # ids to the owners of their tables, who pool them for all; vectors back
    loss(model(batch)).backward()   # reads those vectors
    bags.exchange_gradients()       # gradients of vectors to the owners, whose tables take them from there
    optimizers.step()               # each table once, by its owner

Gradients are those of the mean over all processes' samples, so the result is that of one process on all of them. Of the
vectors [B_r, F, dim] of a process, those of other processes' tables are sent twice: about 2 (W - 1) / W * 4 F dim bytes
a sample, and the ids. Collectives are outside of autograd, so that a process whose share is empty, or whose loss
ignores some vectors, makes the same calls as the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holdall.common.errors import ConfigError
from holdall.data.batch import Ids
from holdall.distributed.collectives import Collectives, share_of_mean
from holdall.embedding.bags import EmbeddingBags


def assign_tables(num_bytes: Mapping[str, int], loads: Mapping[str, float], world_size: int) -> dict[str, int]:
    """Owner of each table, chosen so that bytes and load (lookups, say) are balanced over processes.

    Greedy: tables in descending order of their share of all bytes or of all load, the larger; each goes to the process
    whose own larger share is smallest with it.
    """
    all_bytes, all_loads = max(1, sum(num_bytes.values())), max(1e-30, sum(loads.values()))
    shares = {name: (num_bytes[name] / all_bytes, loads[name] / all_loads) for name in num_bytes}
    assigned = [(0.0, 0.0)] * world_size
    owners: dict[str, int] = {}
    for name in sorted(shares, key=lambda name: (-max(shares[name]), -sum(shares[name]))):
        more = [tuple(had + part for had, part in zip(one, shares[name], strict=True)) for one in assigned]
        chosen = min(range(world_size), key=lambda rank: (max(more[rank]), sum(more[rank]), rank))
        assigned[chosen] = (more[chosen][0], more[chosen][1])
        owners[name] = chosen
    return {name: owners[name] for name in num_bytes}


class TableWiseBags(EmbeddingBags):
    """Tables of this process, out of `bags`, which every process builds from the same seed.

    `owners` has the process of each table. Dense tables built on `meta` get their rows on `device`, only at their
    owner; the others stay on their device.
    """

    def __init__(
        self,
        bags: EmbeddingBags,
        owners: Mapping[str, int],
        collectives: Collectives,
        device: torch.device | str = "cpu",
    ):
        nn.Module.__init__(self)  # not EmbeddingBags': a process may have no table
        if any(pack.collects for pack in bags.packs):
            raise ConfigError("the tables have an optimizer already: shard them first, then make the optimizer")
        names = dict.fromkeys(bags.features.values())
        wrong = [name for name in names if not 0 <= owners.get(name, -1) < collectives.world_size]
        if wrong:
            raise ConfigError(f"table '{wrong[0]}' needs an owner from 0 to {collectives.world_size - 1}")
        self.collectives, self.owners = collectives, {name: owners[name] for name in names}
        self.dim, self.features, self.fused = bags.dim, dict(bags.features), bags.fused
        self.output_device = None
        self._vector_dtype, self._limits = bags.vector_dtype, bags._limits
        self.dtype = bags.vector_dtype or next(bags.parameters()).dtype
        self.device = torch.device(device)
        self._num_bytes = bags.num_bytes()
        own = {name: bags.table(name) for name in names if owners[name] == collectives.rank}
        self._set_tables(own, None, device)
        all_owners = [owners[name] for name in self.features.values()]
        self.positions = [[p for p, o in enumerate(all_owners) if o == rank] for rank in range(collectives.world_size)]
        """Positions in the batch of the features whose tables each process owns."""
        self._narrow = torch.int32 if int(self._limits.max()) <= 2**31 else torch.int64
        self._sizes: list[int] = []
        self._pooled: Tensor | None = None
        """[sum of sizes, P, dim]: vectors that this process looked up for all of them, with their autograd graph."""
        self._vectors: Tensor | None = None
        """[B, F, dim]: vectors that this process received."""

    def num_bytes(self) -> int:
        """Bytes of all tables, of all processes."""
        return self._num_bytes

    # --- before the model --------------------------------------------------------------------------------------------

    def prepare(self, ids: Ids, *, training: bool = True) -> Tensor:
        """Exchange the vectors [B, F, dim] of this process's samples, which `forward` then returns; B may be 0.

        Without `training` nothing will be updated, as in an evaluation. A collective call.
        """
        if ids.batch_size:
            self.check(ids)
        kind = (ids.offsets is not None, ids.weights is not None)
        gathered = self.collectives.gather_sizes([ids.batch_size, *map(int, kind)])
        self._sizes = [size for size, _, _ in gathered]
        kinds = {(bool(bagged), bool(weighs)) for size, bagged, weighs in gathered if size}
        if len(kinds) > 1:
            raise ConfigError("processes have batches of different kinds: bags, or weights, on some of them only")
        if not ids.batch_size:
            ids = self._no_samples(*(kinds.pop() if kinds else kind))
        collected = self._collect_one_hot(ids) if ids.offsets is None else self._collect_bags(ids, ids.offsets)
        own = self.positions[self.collectives.rank]
        with torch.set_grad_enabled(training):
            if own:
                self._pooled = self._look_up(collected, own)
            else:
                self._pooled = torch.empty(sum(self._sizes), 0, self.dim, dtype=self.dtype, device=self.device)
        to, of = self._counts()
        with torch.no_grad():
            flat = self._pooled.reshape(-1, self.dim)
            received = self.collectives.all_to_all(flat, to, of, kind="pooled_vectors").to(self.device)
            vectors = received.new_empty(ids.batch_size, self.num_features, self.dim)
            for positions, piece in zip(self.positions, received.split(of), strict=True):
                vectors[:, positions] = piece.view(ids.batch_size, len(positions), self.dim)
        self._vectors = vectors.requires_grad_(training)
        return vectors

    def _counts(self) -> tuple[list[int], list[int]]:
        """Vectors that this process sends to each process, and receives from each."""
        rank = self.collectives.rank
        to = [size * len(self.positions[rank]) for size in self._sizes]
        return to, [self._sizes[rank] * len(positions) for positions in self.positions]

    def _no_samples(self, bagged: bool, weighs: bool) -> Ids:
        """Empty share of the same kind as those of the other processes."""
        shape = (0,) if bagged else (self.num_features, 0)
        values = torch.empty(shape, dtype=self._narrow)
        offsets = torch.zeros(1, dtype=torch.int64) if bagged else None
        return Ids(values, offsets, self.num_features, torch.empty(shape, dtype=self.dtype) if weighs else None)

    def _collect_one_hot(self, ids: Ids) -> Ids:
        """Ids of all processes' samples for the features of this process; other features have zeros."""
        num_own, num_all = len(self.positions[self.collectives.rank]), sum(self._sizes)
        of = [num_own * size for size in self._sizes]

        def collect(rows: Tensor, kind: str) -> Tensor:
            pieces = self._send([rows[position] for position in range(self.num_features)], of, kind)
            return self._scatter(_by_feature(pieces, [self._sizes] * num_own).view(num_own, num_all))

        weights = None if ids.weights is None else collect(ids.weights.to(self.dtype), "weights")
        return Ids(collect(ids.values.to(self._narrow), "ids"), None, self.num_features, weights)

    def _collect_bags(self, ids: Ids, offsets: Tensor) -> Ids:
        """The same for bags; bags of other features are empty."""
        num_own = len(self.positions[self.collectives.rank])
        lengths = offsets.diff().view(self.num_features, ids.batch_size)
        pieces = self._send(list(lengths.to(torch.int32)), [num_own * size for size in self._sizes], "lengths")
        theirs = [piece.view(num_own, size).long() for piece, size in zip(pieces, self._sizes, strict=True)]
        of = [int(piece.sum()) for piece in theirs]
        cuts = [[int(piece[feature].sum()) for piece in theirs] for feature in range(num_own)]
        bounds = lengths.sum(1).tolist()

        def collect(flat: Tensor, kind: str) -> Tensor:
            return _by_feature(self._send(flat.split(bounds), of, kind), cuts)

        weights = None if ids.weights is None else collect(ids.weights.to(self.dtype), "weights")
        all_lengths = self._scatter(torch.cat(theirs, dim=1))
        values = collect(ids.values.to(self._narrow), "ids")
        return Ids(values, F.pad(all_lengths.reshape(-1).cumsum(0), (1, 0)), self.num_features, weights)

    def _send(self, by_feature: Sequence[Tensor], of: Sequence[int], kind: str) -> list[Tensor]:
        """Send the numbers of every feature to the owner of its table; receive `of[r]` numbers from process r."""
        nothing = by_feature[0][:0]
        parts = [torch.cat([nothing, *(by_feature[p] for p in positions)]) for positions in self.positions]
        received = self.collectives.all_to_all(torch.cat(parts), [part.numel() for part in parts], of, kind=kind)
        return list(received.to(self.device).split(list(of)))

    def _scatter(self, own: Tensor) -> Tensor:
        """Rows of this process's features [P, B], placed among those of all features [F, B]; zeros elsewhere."""
        everything = own.new_zeros(self.num_features, own.shape[1])
        everything[self.positions[self.collectives.rank]] = own
        return everything

    # --- interface of EmbeddingBags ----------------------------------------------------------------------------------

    def forward(self, ids: Ids, positions: Sequence[int] | None = None) -> Tensor:
        """Vectors that `prepare` received for these samples."""
        if self._vectors is None or self._vectors.shape[0] != ids.batch_size:
            raise ConfigError(
                "vectors of tables on several processes were looked up before they were exchanged: call prepare(ids) "
                "on every process first"
            )
        return self._vectors if positions is None else self._vectors[:, list(positions)]

    def rows(self, ids: Ids, position: int) -> Tensor:
        raise ConfigError(
            "this model reads single rows of a bag, and table-wise processes exchange pooled vectors: use two-fold"
        )

    def packed_rows(self, ids: Ids) -> tuple[Tensor, ...] | None:
        """None: the rows are on other processes."""
        return None

    # --- after the backward ------------------------------------------------------------------------------------------

    def exchange_gradients(self, scale: float | None = None) -> None:
        """Send the gradients of the vectors to the owners of their tables, and backpropagate them there.

        `scale` multiplies the gradients of this process first; None weighs means over shares by their samples
        (`share_of_mean`). A collective call.
        """
        vectors, pooled = self._vectors, self._pooled
        assert vectors is not None, "prepare the step first"
        assert pooled is not None
        self._vectors = self._pooled = None
        if scale is None:
            scale = share_of_mean(vectors.shape[0], self._sizes)
        grad = torch.zeros_like(vectors) if vectors.grad is None else vectors.grad * scale
        parts = [grad[:, positions].reshape(-1, self.dim) for positions in self.positions]
        of, to = self._counts()
        received = self.collectives.all_to_all(torch.cat(parts), to, of, kind="gradients_of_vectors").to(self.device)
        if pooled.requires_grad:
            pooled.backward(received.view(pooled.shape))


def _by_feature(pieces: Sequence[Tensor], cuts: Sequence[Sequence[int]]) -> Tensor:
    """Reorder pieces from (source, feature) to (feature, source) order; `cuts[feature][source]` are lengths."""
    split = [piece.split([cut[source] for cut in cuts]) if cuts else () for source, piece in enumerate(pieces)]
    ordered = [parts[feature] for feature in range(len(cuts)) for parts in split]
    return torch.cat([pieces[0][:0], *ordered])
