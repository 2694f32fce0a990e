"""Put a model in its places: hot rows and the dense part on a device, the rest of its tables on the host."""

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
from holdall.tiers.hot_refresh import HotRefresh
from holdall.tiers.kernel_mover import KernelIsFaster, always
from holdall.tiers.lazy_tensor import LazyTensor
from holdall.tiers.tiered_pack import TieredPack
from holdall.tiers.traffic import Traffic


class Tiers:
    """The tiered packs of a placed model, and what a training step asks of them."""

    def __init__(self, bags: EmbeddingBags, packs: list[TieredPack], device: torch.device | str):
        self.bags, self.packs, self.device = bags, packs, torch.device(device)

    def fetch(self, ids: Ids) -> None:
        """Bring the rows a batch needs, before its lookup: what `Pipeline` does, for a step by hand."""
        for pack in self.packs:
            working = pack.needed(ids, self.bags.features)
            pack.forward(working, [])
            while num_rows := pack.num_missing(working):
                pack.reserve(num_rows)
                working = pack.needed(ids, self.bags.features, again=True)
                pack.forward(working, [])
            pack.bring(working)
            pack.enter(working)
            pack.working = working

    def count_hot(self, ids: Ids) -> None:
        """Take note of a batch that needed hot rows only."""
        for pack in self.packs:
            pack.count_hot(ids, self.bags.features)

    def begin_hot_step(self, ids: Ids) -> None:
        """Begin the step of a batch, on the device, that needs hot rows only: nothing is fetched for it."""
        for pack in self.packs:
            pack.working = pack.only_hot(ids, self.bags.features)
            pack.enter(pack.working)

    def end_hot_step(self) -> None:
        """After the update of such a step."""
        for pack in self.packs:
            pack.working = None

    @property
    def has_fixed_addresses(self) -> bool:
        """Whether the lookups of the current step read fixed addresses, safe to capture in a CUDA graph."""
        return all(pack.working is not None and pack.working.entered is not None for pack in self.packs)

    def write_back(self) -> None:
        """Return those rows to the host, after their update."""
        for pack in self.packs:
            assert pack.working is not None, "no rows were fetched"
            pack.write_back(pack.working)
            pack.working = None

    def flush(self) -> None:
        for pack in self.packs:
            pack.flush()

    def refresh(self) -> int:
        """Let hotter rows take the places of colder ones; how many did."""
        return sum(pack.renumbering.refresh(pack) for pack in self.packs if pack.renumbering is not None)

    @contextmanager
    def in_order_of_ids(self) -> Iterator[None]:
        """Inside, the host's rows, which must have been flushed, lie in the order of ids: what a checkpoint holds."""
        with ExitStack() as stack:
            for pack in self.packs:
                if pack.renumbering is not None:
                    stack.enter_context(pack.renumbering.in_order_of_ids(pack))
            yield

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint keeps beyond the rows: where rows have changed places, by pack."""
        return {
            f"hot.{number}.{name}": tensor
            for number, pack in enumerate(self.packs)
            if pack.renumbering is not None
            for name, tensor in pack.renumbering.tensors().items()
        }

    def lazy_weights(self) -> dict[str, LazyTensor]:
        """The rows of tables that have none of their own, by the name of their parameter in the bags."""
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
    def traffic(self) -> Traffic:
        """Bytes moved so far, by all packs."""
        names = Traffic.__dataclass_fields__
        return Traffic(**{name: sum(getattr(pack.traffic, name) for pack in self.packs) for name in names})


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
    """Leave the packed dense tables of a model on the host, and move their hot rows and everything else to `device`.

    `hot_rows` is how many rows of each table are hot. Call it once, before the optimizer is made. With `refreshes`, the
    hot rows may be exchanged for others (see `HotRefresh`). `num_buffers` is how many steps can have rows on the device
    at a time (see `holdall.tiers.staging.buffers_for`).

    Dense tables that were built on `meta` get rows that take no place until they are touched. `tails` says where the
    rows of each that are not hot live: `host`, as where it is silent; `disk`, in files under `folder`, which must not
    hold any yet; `device`, whole tables there, with nothing to move.

    `fetch_by` says who moves rows between host and device: `copy`, the host gathers them and copies them in one piece;
    `kernel`, a kernel on the device reads and writes them where they lie, for which the host's rows, all of them, are
    locked in memory; `auto`, a kernel where it can and `kernel_is_faster` says so.
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
    for number, (tail, pack) in enumerate(_by_tail(bags.packs, tails or {}, device)):
        if tail == "device":
            whole.append(pack)
            continue
        place_of = folder / str(number) if folder is not None and tail == "disk" else None
        packs.append(
            TieredPack(
                pack,
                hot_rows,
                device,
                num_buffers=num_buffers,
                folder=place_of,
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
    """The tables of packs regrouped by where their tails live; those of `device` get their rows there."""
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
