"""A pack of dense tables whose hot rows are on every process and whose cold rows are dealt out (see `two_fold`).

The device holds [ hot rows | rows this process owns and the step updates | rows fetched for its lookups ]; optimizer
state lies beside the first two. Rows that a process owns live on its host, with their state, and take no memory
until they are touched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from holdall.common.errors import ConfigError
from holdall.data.batch import Ids
from holdall.distributed.collectives import Collectives, share_of_mean
from holdall.distributed.row_exchange import RowReduction, sum_over_ranks
from holdall.distributed.sharded_tensor import ShardedTensor
from holdall.distributed.shards import Shards, hot_rows_of, owned_rows
from holdall.embedding.dense_pack import DensePack
from holdall.kernels.row_gradient import RowGradient, join, sum_by_row
from holdall.tiers.host_rows import HostRows
from holdall.tiers.staging import with_spare


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
    looked_up: tuple[Tensor, Tensor, Tensor] | None = None
    """With one id a feature: the ids [F, B], which of them are cold, and the place of each cold one in `keys`."""


@dataclass(frozen=True)
class Early:
    """A request of which all rows are here that the step under way does not update."""

    request: Request
    rows: Tensor
    """[U - late, dim] in the order of `request.keys`."""
    here: Tensor
    """[U] bool: which of the keys these are."""
    sends: Tensor
    """[N] bool: which of `request.wanted` have been sent."""


@dataclass
class Working:
    """A request whose rows are on the device."""

    request: Request
    keys: Tensor
    """`request.keys` on the device."""
    owned: Tensor
    """[O] int64: the distinct rows of `request.wanted`, ascending: row `owned[i]` is at place i of the owner's room."""
    places: Tensor
    """[N] the place of each row of `request.wanted`."""
    learns: bool
    all_hot: bool = False
    """Whether no process needs any cold row for this step."""


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
        self.hot_way: RowReduction = "auto"
        self.collects, self.gradients = False, []
        self.slots: dict[str, Tensor] = {}
        self.far_slots: dict[str, HostRows] = {}
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
        self.far_slots = {slot: HostRows(torch.zeros(like.shape, dtype=like.dtype)) for slot, like in shapes.items()}
        return self.slots

    def slot_views(self, name: str) -> dict[str, Any]:
        """The optimizer state of a table, as a checkpoint takes it (see `ShardedTensor`)."""
        return {slot: ShardedTensor(self, name, slot) for slot in self.far_slots}

    def row_numbers(self, rows: Tensor) -> Tensor:
        return rows.to(torch.int32).contiguous()

    def locate(self, ids: Tensor, names: Sequence[str], which: Tensor | None = None) -> Tensor:
        hot, near, number = self.shards.columns(names, ids.device)
        known = None if self.working is None else self.working.request.looked_up
        if known is not None and _same_view(known[0].t(), ids):
            values, is_cold, places = known
            located = near[:, None] + values
            located[is_cold] = self._fetched_start + places
            return located.t()
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
        fetched = self.working.keys
        assert bool(torch.isin(keys, fetched).all()), "these ids were not prepared"
        places = torch.searchsorted(fetched, keys)
        found[is_cold] = self._fetched_start + places
        return found

    @property
    def _fetched_start(self) -> int:
        return self.num_hot + self.owned_room

    # --- before the lookup -------------------------------------------------------------------------------------------

    def request(self, ids: Ids, features: Mapping[str, str], collectives: Collectives | None = None) -> Request:
        """Exchange the distinct cold rows of a batch, as numbers; while another step is under way, over collectives of
        another group."""
        collectives = self.collectives if collectives is None else collectives
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
        keys, places = torch.unique(
            self.shards.keys((values.long() - hot)[is_cold], number[is_cold]), return_inverse=True
        )
        owner, local = keys // self.shards.stride, keys % self.shards.stride
        to = torch.bincount(owner, minlength=collectives.world_size).tolist()
        of = collectives.exchange_sizes(to)
        narrow = torch.int32 if self.shards.stride < 2**31 else torch.int64
        wanted = collectives.all_to_all(local.to(narrow), to, of, kind="cold_ids").cpu().long()
        whole = ids.offsets is None and len(positions) == ids.num_features
        looked_up = (ids.values, is_cold, places) if whole else None
        return Request(keys, to, wanted, of, ids.batch_size, looked_up)

    @property
    def busy(self) -> Tensor:
        """The rows of this process that the step under way updates."""
        return torch.empty(0, dtype=torch.int64) if self.working is None else self.working.owned

    def fetch_early(self, request: Request, busy: Tensor, collectives: Collectives) -> Early:
        """Exchange the rows of a request, but for those that are `busy` at their owner, who says which; by a thread."""
        sends = torch.isin(request.wanted, busy, invert=True)
        here = collectives.all_to_all(sends.to(torch.uint8), request.of, request.to, kind="cold_ids").cpu().bool()
        of, to = _counts(sends, request.of), _counts(here, request.to)
        rows = collectives.all_to_all(self.far.read(request.wanted[sends]), of, to, kind="cold_rows")
        return Early(request, rows, here, sends)

    @torch.no_grad()
    def bring(self, request: Request, *, learns: bool = True, early: Early | None = None) -> None:
        """Exchange the rows of a request that are not here early; without `learns` nothing will be updated, as in an
        evaluation."""
        self.finish()
        owned, places = torch.unique(request.wanted, return_inverse=True)
        self._make_room(owned.numel(), request.keys.numel())
        working = Working(request, request.keys.to(self.device), owned, places.to(self.device), learns)
        room = slice(self.num_hot, self.num_hot + owned.numel())
        if owned.numel():
            self.storage[room] = self.far.read(owned).to(self.device)
            if learns:
                for slot, far in self.far_slots.items():
                    self.slots[slot][room] = far.read(owned).to(self.device)
        fetched = self.storage[self._fetched_start : self._fetched_start + request.keys.numel()]
        if early is None:
            answers = self.storage[room].index_select(0, working.places)
            fetched.copy_(self.collectives.all_to_all(answers, request.of, request.to, kind="cold_rows"))
        else:
            late, missing = ~early.sends, ~early.here
            answers = self.storage[room].index_select(0, working.places[late.to(self.device)])
            of, to = _counts(late, request.of), _counts(missing, request.to)
            rows = self.collectives.all_to_all(answers, of, to, kind="cold_rows")
            fetched[missing.to(self.device)] = rows.to(self.device)
            fetched[early.here.to(self.device)] = early.rows.to(self.device)
        self.working = working

    def enter_hot(self, num_samples: int) -> None:
        """In the place of `bring`, for a step that needs hot rows alone on every process."""
        self.finish()
        nothing, nobody = torch.empty(0, dtype=torch.int64), [0] * self.collectives.world_size
        request = Request(nothing, nobody, nothing, nobody, num_samples)
        here = nothing.to(self.device)
        self.working = Working(request, here, nothing, here, learns=True, all_hot=True)

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
            self.owned_room = with_spare(num_owned)
        if num_fetched > self.fetched_room:
            self.fetched_room = with_spare(num_fetched)

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
        self.gradients.clear()
        ids, grads = hot
        if not working.all_hot:
            cold = self._send_cold(rows[num_hot:] - self._fetched_start, sums[num_hot:], some_missing)
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
            to, of = _counts(sends, to), _counts(comes, of)
            owned = owned[comes.bool()]
        received = self.collectives.all_to_all(sums, to, of, kind="cold_gradients").to(self.device)
        return sum_by_row(RowGradient(owned + self.num_hot, received))

    # --- what a checkpoint asks --------------------------------------------------------------------------------------

    def hot(self, name: str, kind: str) -> Tensor:
        """The hot rows of a table (kind `weight`) or their optimizer state: a view of those of ids 0 to hot_rows."""
        start = int(self.shards.columns([name], torch.device("cpu"))[1])
        near = self.storage if kind == "weight" else self.slots[kind]
        return near[start : start + self.hot_rows[name]]

    def cold(self, kind: str) -> HostRows:
        """The rows that this process keeps, of all tables, or their optimizer state."""
        return self.far if kind == "weight" else self.far_slots[kind]

    def weight(self, name: str) -> ShardedTensor:
        """The rows of a table, as a checkpoint takes them."""
        return ShardedTensor(self, name, "weight")


def _counts(chosen: Tensor, sizes: Sequence[int]) -> list[int]:
    """How many are chosen of each of the parts of these sizes."""
    return [int(part.sum()) for part in chosen.split(list(sizes))]


def _same_view(one: Tensor, other: Tensor) -> bool:
    """Whether both show the same numbers, by where these lie and not by what they are."""
    return one.shape == other.shape and one.stride() == other.stride() and one.data_ptr() == other.data_ptr()
