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

The device holds [ hot rows | rows this process owns and the step updates | rows fetched for its lookups ]; optimizer
state lies beside the first two. Rows that a process owns live on its host, with their state, and take no memory
until they are touched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from holdall.bags import EmbeddingBags
from holdall.batch import Ids
from holdall.dense_pack import DensePack
from holdall.errors import ConfigError
from holdall.kernels.row_gradient import RowGradient, join, sum_by_row
from holdall.parallel.collectives import Collectives, share_of_mean
from holdall.parallel.row_exchange import Way, sum_over_ranks
from holdall.parallel.shards import Shards, hot_rows_of, owned_rows
from holdall.tiers.far_rows import FarRows, LazyRows


@dataclass(frozen=True)
class Request:
    """The cold rows of a step, and those that others asked of this process for it."""

    keys: Tensor
    """[U] int64: the distinct cold rows of this process's samples, ascending (see `Shards.keys`)."""
    to: list[int]
    """How many of them each process owns."""
    wanted: Tensor
    """[N] local numbers of rows of this process that were asked for, in the order of who asked."""
    of: list[int]
    """How many of them each process asked for."""
    num_samples: int


@dataclass
class Working:
    """A request whose rows are on the device."""

    request: Request
    owned: Tensor
    """[O] int64: the distinct rows of `request.wanted`, ascending: row `owned[i]` is at place i of the owner's room."""
    places: Tensor
    """[N] the place of each row of `request.wanted`."""
    learns: bool


class TwoFoldPack(DensePack):
    """`host`'s tables with the first `hot_rows[name]` rows of each on all processes and the others dealt out.

    Made of a pack that every process built from the same seed, on `meta` where its rows should take no memory before
    they are touched; the pack's tables then keep no rows of their own.
    """

    def __init__(
        self, host: DensePack, hot_rows: Mapping[str, int], collectives: Collectives, device: torch.device | str = "cpu"
    ):
        self.tables, self.collectives, self.device = host.tables, collectives, torch.device(device)
        rows = {name: table.num_rows for name, table in self.tables.items()}
        self.shards = Shards(rows, hot_rows, collectives.world_size)
        self.hot_rows = self.shards.hot_rows
        self.num_hot = sum(self.hot_rows.values())
        self.dim, self.dtype = host.storage.shape[1], host.storage.dtype
        self.vector_dtype = host.vector_dtype
        self.hot_way: Way = "auto"
        self.collects, self.gradients = False, []
        self.slots: dict[str, Tensor] = {}
        self.far_slots: dict[str, FarRows] = {}
        self.working: Working | None = None
        self.owned_room = self.fetched_room = 0
        self.far = owned_rows(host, self.shards, collectives.rank)
        self.storage = hot_rows_of(host, self.hot_rows).to(self.device)
        for name, table in self.tables.items():
            like = torch.empty(rows[name], self.dim, dtype=self.dtype, device="meta")
            table.weight = nn.Parameter(like, requires_grad=host.tables[name].weight.requires_grad)

    # --- what DensePack promises -------------------------------------------------------------------------------------

    def repack(self) -> None:
        """The tables have no rows of their own that could have moved."""

    def allocate_slots(self, make: Callable[[Tensor], dict[str, Tensor]]) -> dict[str, Tensor]:
        num_updated = self.num_hot + self.owned_room
        self.slots = make(self.storage[:num_updated])
        shapes = make(torch.empty(self.far.tensor.shape, dtype=self.dtype, device="meta"))
        self.far_slots = {slot: FarRows(torch.zeros(like.shape, dtype=like.dtype)) for slot, like in shapes.items()}
        return self.slots

    def slot_views(self, name: str) -> dict[str, Tensor]:
        """None that are whole: see `shard` and `load_rows`."""
        return {}

    def row_numbers(self, rows: Tensor) -> Tensor:
        return rows.to(torch.int32).contiguous()

    def locate(self, ids: Tensor, names: Sequence[str], which: Tensor | None = None) -> Tensor:
        hot, near, number = self.shards.columns(names, ids.device)
        if which is not None:
            hot, near, number = hot[which], near[which], number[which]
        found = near + ids
        is_cold = ids >= hot
        if not bool(is_cold.any()):
            return found
        if self.working is None:
            raise ConfigError(
                "a cold row of a table that is spread over processes was looked up before it was fetched: call "
                "prepare(ids) on every process first"
            )
        keys = self.shards.keys((ids - hot)[is_cold], number.expand(ids.shape)[is_cold])
        fetched = self.working.request.keys
        assert bool(torch.isin(keys, fetched).all()), "these ids were not prepared"
        places = torch.searchsorted(fetched, keys)
        found[is_cold] = self._fetched_start + places
        return found

    @property
    def _fetched_start(self) -> int:
        return self.num_hot + self.owned_room

    # --- before the lookup -------------------------------------------------------------------------------------------

    def request(self, ids: Ids, features: Mapping[str, str]) -> Request:
        """Exchange the distinct cold rows of a batch, as numbers; may be done while another step is under way."""
        positions = [place for place, name in enumerate(features.values()) if name in self.tables]
        hot, _, number = self.shards.columns([list(features.values())[p] for p in positions], ids.values.device)
        if ids.offsets is None:
            values = ids.values if len(positions) == ids.num_features else ids.values[positions]
            hot, number = hot[:, None].expand(values.shape), number[:, None].expand(values.shape)
        else:
            pieces = [ids.bag(position)[0] for position in positions]
            which = torch.repeat_interleave(torch.tensor([p.numel() for p in pieces], device=ids.values.device))
            values, hot, number = torch.cat(pieces), hot[which], number[which]
        is_cold = values >= hot
        keys = torch.unique(self.shards.keys((values.long() - hot)[is_cold], number[is_cold]))
        owner, local = keys // self.shards.stride, keys % self.shards.stride
        to = torch.bincount(owner, minlength=self.collectives.world_size).tolist()
        of = self.collectives.exchange_sizes(to)
        narrow = torch.int32 if self.shards.stride < 2**31 else torch.int64
        wanted = self.collectives.all_to_all(local.to(narrow), to, of, kind="cold_ids").cpu().long()
        return Request(keys, to, wanted, of, ids.batch_size)

    @torch.no_grad()
    def bring(self, request: Request, *, learns: bool = True) -> None:
        """Exchange the rows of a request; without `learns` nothing will be updated, as in an evaluation."""
        self.finish()
        owned, places = torch.unique(request.wanted, return_inverse=True)
        self._make_room(owned.numel(), request.keys.numel())
        working = Working(request, owned, places.to(self.device), learns)
        room = slice(self.num_hot, self.num_hot + owned.numel())
        if owned.numel():
            self.storage[room] = self.far.read(owned).to(self.device)
            if learns:
                for slot, far in self.far_slots.items():
                    self.slots[slot][room] = far.read(owned).to(self.device)
        answers = self.storage[room].index_select(0, working.places)
        fetched = self.collectives.all_to_all(answers, request.of, request.to, kind="cold_rows")
        self.storage[self._fetched_start : self._fetched_start + fetched.shape[0]] = fetched.to(self.device)
        self.working = working

    @torch.no_grad()
    def finish(self) -> None:
        """Take the updated rows of the last step home, to the host of their owner; nothing is sent."""
        working, self.working = self.working, None
        if working is None or not working.learns or working.owned.numel() == 0:
            return
        room = slice(self.num_hot, self.num_hot + working.owned.numel())
        self.far.write(working.owned, self.storage[room].cpu())
        for slot, far in self.far_slots.items():
            far.write(working.owned, self.slots[slot][room].cpu())

    def _make_room(self, num_owned: int, num_fetched: int) -> None:
        """Rooms for so many rows; they grow by a quarter more, so that they seldom have to. Rooms must be empty."""
        if num_owned <= self.owned_room and num_fetched <= self.fetched_room:
            return
        if num_owned > self.owned_room:
            self.owned_room = num_owned + num_owned // 4 + 16
        if num_fetched > self.fetched_room:
            self.fetched_room = num_fetched + num_fetched // 4 + 16

        def grown(tensor: Tensor, num_rows: int) -> Tensor:
            larger = tensor.new_zeros(num_rows, *tensor.shape[1:])
            larger[: self.num_hot] = tensor[: self.num_hot]
            return larger

        self.slots = {slot: grown(state, self._fetched_start) for slot, state in self.slots.items()}
        self.storage = grown(self.storage, self._fetched_start + self.fetched_room)

    # --- after the backward ------------------------------------------------------------------------------------------

    @torch.no_grad()
    def exchange_gradients(self, scale: float | None = None) -> None:
        """Put the gradients that this process will apply, of all processes' samples, in the place of its own ones.

        `scale` multiplies the own ones first; None weighs means over shares by their samples (`share_of_mean`).
        """
        working = self.working
        assert working is not None, "prepare the step first"
        assert working.learns, "this step was prepared to look up alone"
        rows, sums = self._own_sums()
        is_hot = rows < self.num_hot
        num_hot = int(is_hot.sum())  # rows are ascending: hot ones come first
        num_missing = working.request.keys.numel() - (rows.numel() - num_hot)
        told = self.collectives.gather_sizes([num_hot, num_missing, working.request.num_samples])
        if scale is None:
            scale = share_of_mean(working.request.num_samples, [samples for _, _, samples in told])
        sums = sums * scale
        hot = self._sum_hot(rows[:num_hot], sums[:num_hot], [touched for touched, _, _ in told])
        some_missing = any(missing for _, missing, _ in told)
        cold = self._send_cold(rows[num_hot:] - self._fetched_start, sums[num_hot:], some_missing)
        self.gradients.clear()
        ids, grads = (torch.cat(parts) for parts in zip(hot, cold, strict=True))
        if ids.numel():
            self.gradients.append(RowGradient(ids, grads))

    def _own_sums(self) -> tuple[Tensor, Tensor]:
        """Distinct rows of the storage, ascending, and the gradient of each, in float32 or wider."""
        dtype = torch.float64 if self.dtype == torch.float64 else torch.float32
        if not self.gradients:
            empty = torch.empty(0, dtype=torch.int64, device=self.device)
            return empty, torch.empty(0, self.dim, dtype=dtype, device=self.device)
        rows, sums = sum_by_row(join(self.gradients))
        return rows, sums.to(dtype)

    def _sum_hot(self, rows: Tensor, sums: Tensor, touched: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Hot rows that any process touched and their gradients summed over processes: the same on all of them."""
        if self.collectives.world_size == 1 or not any(touched):
            return rows, sums
        everyones = sum_over_ranks(
            rows, sums, touched, self.num_hot, self.collectives, self.hot_way, kind="hot_gradients"
        )
        return sum_by_row(everyones)

    def _send_cold(self, places: Tensor, sums: Tensor, some_missing: bool) -> tuple[Tensor, Tensor]:
        """Rows of the storage that this process owns and their gradients, summed in the order of processes.

        A row that was fetched and not looked up has no gradient, which is not a gradient of zero: where any process has
        such rows, all say which ones they send.
        """
        assert self.working is not None
        request = self.working.request
        to, of, owned = request.to, request.of, self.working.places
        if some_missing:
            sends = torch.zeros(request.keys.numel(), dtype=torch.uint8, device=places.device)
            sends[places] = 1
            comes = self.collectives.all_to_all(sends, to, of, kind="cold_ids").to(self.device)
            to = [int(part.sum()) for part in sends.split(to)]
            of = [int(part.sum()) for part in comes.split(of)]
            owned = owned[comes.bool()]
        received = self.collectives.all_to_all(sums, to, of, kind="cold_gradients").to(self.device)
        return sum_by_row(RowGradient(owned + self.num_hot, received))

    # --- whole tables, for checkpoints -------------------------------------------------------------------------------

    def shard(self, name: str, *, touched: bool = False) -> tuple[Tensor, dict[str, Tensor]]:
        """`(ids, {"weight": rows, slot: state...})` of the cold rows of a table that this process keeps.

        With `touched` only of those that were ever updated, where that is known.
        """
        self.finish()
        ids, place = self.shards.kept(self.collectives.rank, name), self.shards.local_slice(self.collectives.rank, name)
        local = torch.arange(place.start, place.stop)
        if touched and isinstance(self.far, LazyRows):
            chosen = self.far.touched[place]
            ids, local = ids[chosen], local[chosen]
        return ids, {kind: far.read(local) for kind, far in self._far_rows().items()}

    def hot(self, name: str) -> dict[str, Tensor]:
        """The hot rows of a table and their state, as views: those of ids 0 to `hot_rows[name]` - 1."""
        start = int(self.shards.columns([name], torch.device("cpu"))[1])
        near = {"weight": self.storage, **self.slots}
        return {kind: tensor[start : start + self.hot_rows[name]] for kind, tensor in near.items()}

    @torch.no_grad()
    def full_state(self, name: str, to: int = 0) -> dict[str, Tensor]:
        """The whole table and its optimizer state, `{"weight": [R, dim], ...}`, on process `to`; {} on the others."""
        _, mine = self.shard(name)
        hot, number = self.hot(name), self.shards.number[name]
        whole: dict[str, Tensor] = {}
        for kind, rows in mine.items():
            sends = [rows.shape[0] if rank == to else 0 for rank in range(self.collectives.world_size)]
            here = self.collectives.rank == to
            comes = [int(count) if here else 0 for count in self.shards.counts[:, number]]
            received = self.collectives.all_to_all(rows, sends, comes, kind="whole_tables").cpu()
            if here:
                kept = [self.shards.kept(rank, name) for rank in range(self.collectives.world_size)]
                whole[kind] = rows.new_empty(self.tables[name].num_rows, *rows.shape[1:])
                whole[kind][: self.hot_rows[name]] = hot[kind].cpu()
                whole[kind][torch.cat(kept)] = received
        return whole

    @torch.no_grad()
    def load_rows(self, name: str, ids: Tensor, values: Mapping[str, Tensor]) -> None:
        """Take what this process keeps, hot or cold, of given rows of a table: of any that a checkpoint holds."""
        self.finish()
        rank, place = self.collectives.rank, self.shards.local_slice(self.collectives.rank, name)
        hot_rows, number = self.hot_rows[name], self.shards.number[name]
        is_hot = ids < hot_rows
        mine = ~is_hot & ((ids - hot_rows + number) % self.collectives.world_size == rank)
        local = place.start + (ids[mine] - hot_rows) // self.collectives.world_size
        far, hot = self._far_rows(), self.hot(name)
        for kind, rows in values.items():
            hot[kind][ids[is_hot].to(self.device)] = rows[is_hot].to(self.device)
            far[kind].write(local, rows[mine])

    def _far_rows(self) -> dict[str, FarRows]:
        return {"weight": self.far, **self.far_slots}


class TwoFold:
    """The two-fold packs of a model's tables, and what a step asks of them (see the top of this file)."""

    def __init__(self, bags: EmbeddingBags, packs: Sequence[TwoFoldPack]):
        self.bags, self.packs = bags, list(packs)

    def prepare(self, ids: Ids, *, learns: bool = True) -> None:
        """Fetch what a batch looks up, which may have no samples; every process calls it for its own share."""
        for pack in self.packs:
            pack.bring(pack.request(ids, self.bags.features), learns=learns)

    def exchange_gradients(self, scale: float | None = None) -> None:
        for pack in self.packs:
            pack.exchange_gradients(scale)

    def finish(self) -> None:
        """Take updated rows home: done by the next `prepare`, and before anything is saved."""
        for pack in self.packs:
            pack.finish()

    def full_state(self, to: int = 0) -> dict[str, dict[str, Tensor]]:
        """Every table of the packs, whole, on process `to` (see `TwoFoldPack.full_state`)."""
        return {name: pack.full_state(name, to) for pack in self.packs for name in pack.tables}


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
    bags.packs = list(packs)
    return TwoFold(bags, packs)
