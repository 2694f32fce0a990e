"""Placement of a model: hot rows and the dense part on a device, the other rows of its tables on the host or disk."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from torch import Tensor

from holdall.common.errors import ConfigError
from holdall.data.batch import Ids
from holdall.embedding.bags import EmbeddingBags, module_name
from holdall.embedding.dense_pack import DensePack
from holdall.models.model import Model
from holdall.tables.dense import DenseTable
from holdall.tiers.choose_mover import KernelIsFaster, always
from holdall.tiers.hot_refresh import HotRefresh
from holdall.tiers.lazy_tensor import LazyTensor
from holdall.tiers.tiered_pack import TieredPack
from holdall.tiers.traffic import TierTraffic


class Tiers:
    """The tiered packs of a placed model, as one."""

    def __init__(self, bags: EmbeddingBags, packs: list[TieredPack], device: torch.device | str):
        self.bags, self.packs, self.device = bags, packs, torch.device(device)

    def fetch(self, ids: Ids) -> None:
        """Fetch the rows of a batch before its lookup, as `Pipeline` does, for a step by hand."""
        for pack in self.packs:
            working = pack.find(ids, self.bags.features)
            pack.mover.find_owners(working, [])
            while num_rows := pack.mover.required_rows(working):
                pack.reserve(num_rows)
                working = pack.find(ids, self.bags.features, again=True)
                pack.mover.find_owners(working, [])
            pack.mover.fetch(working)
            pack.begin_step(working)

    def count_hot(self, ids: Ids) -> None:
        """Count the lookups of a batch that needs hot rows only."""
        for pack in self.packs:
            pack.count_hot(ids, self.bags.features)

    def begin_hot_step(self, ids: Ids) -> None:
        """Begin the step of a batch, on the device, that needs hot rows only; nothing is fetched."""
        for pack in self.packs:
            pack.begin_hot_step(ids, self.bags.features)

    def end_hot_step(self) -> None:
        """After the update of such a step."""
        for pack in self.packs:
            pack.end_step()

    @property
    def has_fixed_addresses(self) -> bool:
        """Whether the lookups of the current step read fixed addresses, safe to capture in a CUDA graph."""
        return all(pack.working is not None and pack.working.fixed_located is not None for pack in self.packs)

    def write_back(self) -> None:
        """Write the rows of the step back to the host, after their update."""
        for pack in self.packs:
            assert pack.working is not None, "no rows were fetched"
            pack.mover.write_back(pack.working)
            pack.end_step()

    def flush(self) -> None:
        for pack in self.packs:
            pack.flush()

    def refresh(self) -> int:
        """Exchange hot rows for hotter ones; how many became hot. No step may be under way."""
        assert all(pack.working is None for pack in self.packs), "a step is under way"
        return sum(pack.renumbering.refresh(pack) for pack in self.packs if pack.renumbering is not None)

    @contextmanager
    def in_order_of_ids(self) -> Iterator[None]:
        """Inside, the host's rows, which must have been flushed, are in order of ids, as a checkpoint saves them."""
        with ExitStack() as stack:
            for pack in self.packs:
                if pack.renumbering is not None:
                    stack.enter_context(pack.renumbering.in_order_of_ids(pack))
            yield

    def tensors(self) -> dict[str, Tensor]:
        """Tensors that a checkpoint saves beyond the rows: the maps of packs whose hot rows are exchanged."""
        return {
            f"hot.{number}.{name}": tensor
            for number, pack in enumerate(self.packs)
            if pack.renumbering is not None
            for name, tensor in pack.renumbering.tensors().items()
        }

    def lazy_weights(self) -> dict[str, LazyTensor]:
        """The rows of tables whose weights are on `meta`, by the name of their parameter in the bags."""
        return {
            f"tables.{module_name(name)}.weight": pack.saved_weight(name)
            for pack in self.packs
            if pack.lazy
            for name in pack.tables
        }

    def after_loading(self) -> None:
        """After a checkpoint was copied into the host's rows and `tensors`."""
        for pack in self.packs:
            if pack.renumbering is not None:
                pack.renumbering.after_loading(pack)
            pack.refill()

    @property
    def traffic(self) -> TierTraffic:
        """Bytes moved so far, by all packs."""
        names = TierTraffic.__dataclass_fields__
        return TierTraffic(**{name: sum(getattr(pack.traffic, name) for pack in self.packs) for name in names})


def place(
    model: Model,
    hot_rows: Mapping[str, int],
    device: torch.device | str,
    *,
    refreshes: bool = False,
    num_buffers: int = 1,
    tails: Mapping[str, str] | None = None,
    folder: Path | None = None,
    fetch_by: str = "copy",
    kernel_is_faster: KernelIsFaster = always,
) -> Tiers:
    """Keep the packed dense tables of a model on the host, and move their hot rows and everything else to `device`.

    `hot_rows` is the number of hot rows of each table. Call it once, before the optimizer is made. With `refreshes`,
    hot rows may be exchanged for others (see `HotRefresh`). `num_buffers` is how many steps can have rows on the device
    at a time (see `holdall.tiers.staging.buffers_for`).

    Dense tables that were built on `meta` get rows that take no memory until they are written. `tails` is where the
    rows of each that are not hot are stored: `host`, the default; `disk`, in new files on the disk of `folder`;
    `device`, whole tables there, with nothing to move.

    `fetch_by` chooses the `RowMover`: `copy`, the host gathers rows and copies them in one piece; `kernel`, kernels on
    the device read and write host memory, all of which is pinned; `auto`, kernels where possible, if `kernel_is_faster`
    returns True.
    """
    bags = model.bags
    if any(pack.collects for pack in bags.packs):
        raise ConfigError("the tables have an optimizer already: place the model first, then make the optimizer")
    packed = {name for pack in bags.packs for name in pack.tables}
    if not packed:
        raise ConfigError("the model has no dense tables to place: compressed ones are small, leave them on the device")
    if set(hot_rows) != packed:
        raise ConfigError(
            f"hot rows are given for tables {sorted(hot_rows)}, the model's dense ones are {sorted(packed)}"
        )
    for name in dict.fromkeys(bags.features.values()):
        if name not in packed:
            bags.table(name).to(device)
    move_dense_part(model, device)
    whole, packs = [], []
    for tail, pack in _by_tail(bags.packs, tails or {}, device):
        if tail == "device":
            whole.append(pack)
            continue
        packs.append(
            TieredPack(
                pack,
                hot_rows,
                device,
                num_buffers=num_buffers,
                folder=folder if tail == "disk" else None,
                fetch_by=fetch_by,
                kernel_is_faster=kernel_is_faster,
            )
        )
    if refreshes:
        for tiered in packs:
            tiered.renumbering = HotRefresh(tiered)
    bags.set_packs([*whole, *packs])
    return Tiers(bags, packs, device)


def _by_tail(
    packs: Sequence[DensePack], tails: Mapping[str, str], device: torch.device | str
) -> Iterator[tuple[str, DensePack]]:
    """The tables of packs regrouped by where their tails are stored; those of `device` are allocated there."""
    for pack in packs:
        groups: dict[str, dict[str, DenseTable]] = {}
        for name, table in pack.tables.items():
            groups.setdefault(tails.get(name, "host"), {})[name] = table
        for tail, tables in groups.items():
            if len(groups) == 1 and tail != "device":
                yield tail, pack
            else:
                yield tail, DensePack(tables, None, device if tail == "device" else pack.storage.device)


def move_dense_part(model: Model, device: torch.device | str) -> None:
    """Move everything of a model but its tables."""
    for child in model.children():
        if child is not model.bags:
            child.to(device)
    for parameter in model.parameters(recurse=False):
        parameter.data = parameter.data.to(device)
    for name, buffer in list(model.named_buffers(recurse=False)):
        setattr(model, name, buffer.to(device))
