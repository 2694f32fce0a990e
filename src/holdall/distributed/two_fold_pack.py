"""Pack of dense tables with hot rows replicated on every process and cold rows sharded (see `two_fold`).

The storage on the device is [ hot rows | owned rows that the step updates | rows fetched for lookups ]; optimizer state
has the first two parts. The rows that a process owns are on its host, with their state, and take no memory until they
are touched.
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
from holdall.distributed.row_gradient_exchange import RowReduction, sum_over_ranks
from holdall.distributed.sharded_tensor import ShardedTensor
from holdall.distributed.shards import Shards, hot_rows_of, owned_rows
from holdall.embedding.dense_pack import DensePack
from holdall.kernels.row_gradient import RowGradient, join, sum_by_row
from holdall.tiers.host_rows import HostRows
from holdall.tiers.staging import with_spare


@dataclass(frozen=True)
class Request:
    """Cold rows that a step needs, and owned rows that other processes requested for it."""

    keys: Tensor
    """[U] int64: the distinct cold rows of this process's samples, ascending (see `Shards.keys`)."""
    keys_per_owner: list[int]
    """Number of keys that each process owns."""
    requested: Tensor
    """[N] local numbers of owned rows that were requested, in the order of the requesting ranks."""
    requested_per_rank: list[int]
    """Number of rows that each process requested."""
    num_samples: int
    looked_up: tuple[Tensor, Tensor, Tensor] | None = None
    """With one id per feature: the ids [F, B], a mask of the cold ones, and the index of each cold one in `keys`."""


@dataclass(frozen=True)
class PrefetchedRows:
    """Rows of a request that were fetched during the step before: those that this step does not update."""

    request: Request
    rows: Tensor
    """[U - late, dim] in the order of `request.keys`."""
    arrived: Tensor
    """[U] bool: the keys of these rows."""
    sent: Tensor
    """[N] bool: rows of `request.requested` that were sent."""


@dataclass
class StepRows:
    """Rows of the current step, on the device."""

    request: Request
    keys: Tensor
    """`request.keys` on the device."""
    owned: Tensor
    """[O] int64: the distinct rows of `request.requested`, ascending: the owned part of the storage."""
    places: Tensor
    """[N] the index in the owned part of each row of `request.requested`."""
    training: bool
    all_hot: bool = False
    """Whether no process needs any cold row for this step."""


class TwoFoldPack(DensePack):
    """Tables of `host` with the first `hot_rows[name]` rows of each on all processes and the others sharded.

    Every process builds `host` from the same seed; on `meta`, its rows take no memory before they are touched. The
    tables of `host` are left without rows of their own.
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
        self.hot_reduction: RowReduction = "auto"
        self.collects, self.gradients, self._stand_ins = False, [], []
        self.slots: dict[str, Tensor] = {}
        self.host_slots: dict[str, HostRows] = {}
        self.step_rows: StepRows | None = None
        self.max_owned = self.max_fetched = 0
        """Rows that the last two parts of the storage can hold."""
        self.host_rows = owned_rows(host, self.shards, collectives.rank)
        self.storage = hot_rows_of(host, self.hot_rows).to(self.device)
        for name, table in self.tables.items():
            like = torch.empty(rows[name], self.dim, dtype=self.dtype, device="meta")
            table.weight = nn.Parameter(like, requires_grad=host.tables[name].weight.requires_grad)

    # --- interface of DensePack --------------------------------------------------------------------------------------

    def repack(self) -> None:
        """Do nothing: the tables have no rows of their own that could have moved."""

    def allocate_slots(self, make: Callable[[Tensor], dict[str, Tensor]]) -> dict[str, Tensor]:
        num_updated = self.num_hot + self.max_owned
        self.slots = make(self.storage[:num_updated])
        shapes = make(torch.empty(self.host_rows.tensor.shape, dtype=self.dtype, device="meta"))
        self.host_slots = {slot: HostRows(torch.zeros(like.shape, dtype=like.dtype)) for slot, like in shapes.items()}
        return self.slots

    def slot_views(self, name: str) -> dict[str, Any]:
        """Optimizer state of a table, for a checkpoint (see `ShardedTensor`)."""
        return {slot: ShardedTensor(self, name, slot) for slot in self.host_slots}

    def row_numbers(self, rows: Tensor) -> Tensor:
        return rows.to(torch.int32).contiguous()

    def locate(self, ids: Tensor, names: Sequence[str], which: Tensor | None = None) -> Tensor:
        hot, hot_start, number = self.shards.columns(names, ids.device)
        known = None if self.step_rows is None else self.step_rows.request.looked_up
        if known is not None and _same_view(known[0].t(), ids):
            values, is_cold, places = known
            located = hot_start[:, None] + values
            located[is_cold] = self._fetched_start + places
            return located.t()
        if which is not None:
            hot, hot_start, number = hot[which], hot_start[which], number[which]
        found = hot_start + ids
        is_cold = ids >= hot
        if not bool(is_cold.any()):
            return found
        if self.step_rows is None:
            raise ConfigError(
                "a cold row of a sharded table was looked up before it was fetched: call "
                "prepare(ids) on every process first"
            )
        keys = self.shards.keys((ids - hot)[is_cold], number.expand(ids.shape)[is_cold])
        fetched = self.step_rows.keys
        assert bool(torch.isin(keys, fetched).all()), "these ids were not prepared"
        places = torch.searchsorted(fetched, keys)
        found[is_cold] = self._fetched_start + places
        return found

    @property
    def _fetched_start(self) -> int:
        return self.num_hot + self.max_owned

    # --- before the lookup -------------------------------------------------------------------------------------------

    def request(self, ids: Ids, features: Mapping[str, str], collectives: Collectives | None = None) -> Request:
        """Exchange the row numbers of a batch's distinct cold rows. A collective call.

        During another step, `collectives` must be those of another group.
        """
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
        per_owner = torch.bincount(owner, minlength=collectives.world_size).tolist()
        per_rank = collectives.exchange_sizes(per_owner)
        narrow = torch.int32 if self.shards.stride < 2**31 else torch.int64
        requested = collectives.all_to_all(local.to(narrow), per_owner, per_rank, kind="cold_ids").cpu().long()
        whole = ids.offsets is None and len(positions) == ids.num_features
        looked_up = (ids.values, is_cold, places) if whole else None
        return Request(keys, per_owner, requested, per_rank, ids.batch_size, looked_up)

    @property
    def updated_rows(self) -> Tensor:
        """Local numbers of the owned rows that the current step updates."""
        return torch.empty(0, dtype=torch.int64) if self.step_rows is None else self.step_rows.owned

    def prefetch(self, request: Request, updated: Tensor, collectives: Collectives) -> PrefetchedRows:
        """Exchange the rows of a request that are not in their owner's `updated`. A collective call, on a thread."""
        per_owner, per_rank = request.keys_per_owner, request.requested_per_rank
        sent = torch.isin(request.requested, updated, invert=True)
        arrived = collectives.all_to_all(sent.to(torch.uint8), per_rank, per_owner, kind="cold_ids").cpu().bool()
        send, receive = _counts(sent, per_rank), _counts(arrived, per_owner)
        rows = collectives.all_to_all(self.host_rows.read(request.requested[sent]), send, receive, kind="cold_rows")
        return PrefetchedRows(request, rows, arrived, sent)

    @torch.no_grad()
    def fetch(self, request: Request, *, training: bool = True, prefetched: PrefetchedRows | None = None) -> None:
        """Exchange the rows of a request that were not prefetched; without `training` nothing will be updated. A
        collective call."""
        self.finish()
        per_owner, per_rank = request.keys_per_owner, request.requested_per_rank
        owned, places = torch.unique(request.requested, return_inverse=True)
        self._grow(owned.numel(), request.keys.numel())
        step_rows = StepRows(request, request.keys.to(self.device), owned, places.to(self.device), training)
        part = slice(self.num_hot, self.num_hot + owned.numel())
        if owned.numel():
            self.storage[part] = self.host_rows.read(owned).to(self.device)
            if training:
                for slot, state in self.host_slots.items():
                    self.slots[slot][part] = state.read(owned).to(self.device)
        fetched = self.storage[self._fetched_start : self._fetched_start + request.keys.numel()]
        if prefetched is None:
            answers = self.storage[part].index_select(0, step_rows.places)
            fetched.copy_(self.collectives.all_to_all(answers, per_rank, per_owner, kind="cold_rows"))
        else:
            late, missing = ~prefetched.sent, ~prefetched.arrived
            answers = self.storage[part].index_select(0, step_rows.places[late.to(self.device)])
            send, receive = _counts(late, per_rank), _counts(missing, per_owner)
            rows = self.collectives.all_to_all(answers, send, receive, kind="cold_rows")
            fetched[missing.to(self.device)] = rows.to(self.device)
            fetched[prefetched.arrived.to(self.device)] = prefetched.rows.to(self.device)
        self.step_rows = step_rows

    def prepare_hot(self, num_samples: int) -> None:
        """Prepare a step that needs only hot rows on every process, in the place of `fetch`."""
        self.finish()
        empty, zeros = torch.empty(0, dtype=torch.int64), [0] * self.collectives.world_size
        request = Request(empty, zeros, empty, zeros, num_samples)
        on_device = empty.to(self.device)
        self.step_rows = StepRows(request, on_device, empty, on_device, training=True, all_hot=True)

    @torch.no_grad()
    def finish(self) -> None:
        """Write the updated rows of the last step back to the host of their owner; nothing is sent."""
        last, self.step_rows = self.step_rows, None
        if last is None or not last.training or last.owned.numel() == 0:
            return
        part = slice(self.num_hot, self.num_hot + last.owned.numel())
        self.host_rows.write(last.owned, self.storage[part].cpu())
        for slot, state in self.host_slots.items():
            state.write(last.owned, self.slots[slot][part].cpu())

    def _grow(self, num_owned: int, num_fetched: int) -> None:
        """Grow the storage to `num_owned` and `num_fetched` rows, and a quarter more; drops all but the hot rows."""
        if num_owned <= self.max_owned and num_fetched <= self.max_fetched:
            return
        if num_owned > self.max_owned:
            self.max_owned = with_spare(num_owned)
        if num_fetched > self.max_fetched:
            self.max_fetched = with_spare(num_fetched)

        def grown(tensor: Tensor, num_rows: int) -> Tensor:
            larger = tensor.new_zeros(num_rows, *tensor.shape[1:])
            larger[: self.num_hot] = tensor[: self.num_hot]
            return larger

        self.slots = {slot: grown(state, self._fetched_start) for slot, state in self.slots.items()}
        self.storage = grown(self.storage, self._fetched_start + self.max_fetched)

    # --- after the backward ------------------------------------------------------------------------------------------

    @torch.no_grad()
    def exchange_gradients(self, scale: float | None = None) -> None:
        """Replace the gradients of this process's samples by those that it applies, of all processes' samples.

        `scale` multiplies its own gradients first; None weighs means over shares by their samples (`share_of_mean`). A
        collective call.
        """
        current = self.step_rows
        assert current is not None, "prepare the step first"
        assert current.training, "this step was prepared for lookups only"
        rows, sums = self._own_sums()
        is_hot = rows < self.num_hot
        num_hot = int(is_hot.sum())  # rows are ascending: hot ones come first
        num_missing = current.request.keys.numel() - (rows.numel() - num_hot)
        sizes = self.collectives.gather_sizes([num_hot, num_missing, current.request.num_samples])
        if scale is None:
            scale = share_of_mean(current.request.num_samples, [samples for _, _, samples in sizes])
        sums = sums * scale
        hot = self._sum_hot(rows[:num_hot], sums[:num_hot], [touched for touched, _, _ in sizes])
        some_missing = any(missing for _, missing, _ in sizes)
        self.gradients.clear()
        ids, grads = hot
        if not current.all_hot:
            cold = self._send_cold(rows[num_hot:] - self._fetched_start, sums[num_hot:], some_missing)
            ids, grads = (torch.cat(parts) for parts in zip(hot, cold, strict=True))
        if ids.numel():
            self.gradients.append(RowGradient(ids, grads))

    def _own_sums(self) -> tuple[Tensor, Tensor]:
        """Distinct rows of the storage with a gradient, ascending, and their gradients in float32 or wider."""
        dtype = torch.float64 if self.dtype == torch.float64 else torch.float32
        if not self.collected():
            empty = torch.empty(0, dtype=torch.int64, device=self.device)
            return empty, torch.empty(0, self.dim, dtype=dtype, device=self.device)
        rows, sums = sum_by_row(join(self.gradients))
        return rows, sums.to(dtype)

    def _sum_hot(self, rows: Tensor, sums: Tensor, touched: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Hot rows that any process touched, and their gradients summed over processes: the same bits on all."""
        if self.collectives.world_size == 1 or not any(touched):
            return rows, sums
        gradient = sum_over_ranks(
            rows, sums, touched, self.num_hot, self.collectives, self.hot_reduction, kind="hot_gradients"
        )
        return sum_by_row(gradient)

    def _send_cold(self, places: Tensor, sums: Tensor, some_missing: bool) -> tuple[Tensor, Tensor]:
        """Owned rows of the storage and their gradients, summed in the order of processes.

        A row that was fetched and not looked up has no gradient, which differs from a gradient of zero. If any process
        has such rows (`some_missing`), all send a mask of their gradients first.
        """
        assert self.step_rows is not None
        request = self.step_rows.request
        send, receive, owned = request.keys_per_owner, request.requested_per_rank, self.step_rows.places
        if some_missing:
            sent = torch.zeros(request.keys.numel(), dtype=torch.uint8, device=places.device)
            sent[places] = 1
            arrived = self.collectives.all_to_all(sent, send, receive, kind="cold_ids").to(self.device)
            send, receive = _counts(sent, send), _counts(arrived, receive)
            owned = owned[arrived.bool()]
        received = self.collectives.all_to_all(sums, send, receive, kind="cold_gradients").to(self.device)
        return sum_by_row(RowGradient(owned + self.num_hot, received))

    # --- for checkpoints ---------------------------------------------------------------------------------------------

    def hot(self, name: str, kind: str) -> Tensor:
        """View of the hot rows of a table (kind `weight`) or of their optimizer state (kind: its slot)."""
        start = int(self.shards.columns([name], torch.device("cpu"))[1])
        on_device = self.storage if kind == "weight" else self.slots[kind]
        return on_device[start : start + self.hot_rows[name]]

    def cold(self, kind: str) -> HostRows:
        """Owned rows of all tables (kind `weight`), or their optimizer state (kind: its slot)."""
        return self.host_rows if kind == "weight" else self.host_slots[kind]

    def weight(self, name: str) -> ShardedTensor:
        """Rows of a table, for a checkpoint."""
        return ShardedTensor(self, name, "weight")


def _counts(chosen: Tensor, sizes: Sequence[int]) -> list[int]:
    """Number of chosen elements in each of consecutive parts of these sizes."""
    return [int(part.sum()) for part in chosen.split(list(sizes))]


def _same_view(one: Tensor, other: Tensor) -> bool:
    """Whether both are the same view of the same memory."""
    return one.shape == other.shape and one.stride() == other.stride() and one.data_ptr() == other.data_ptr()
