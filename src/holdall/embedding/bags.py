"""All tables of a model behind one call: `bags(batch.ids) -> [B, F, dim]`.

Dense tables of one width and type lie end to end in one storage (a `DensePack`), so that a batch is looked up, and its
rows are updated, in one operation instead of one a table. Compressed tables are looked up together where their method
can (`Table.batch_key`), and one by one otherwise.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holdall.common.eager import eager
from holdall.common.errors import ConfigError, did_you_mean
from holdall.data.batch import Ids, features_at
from holdall.embedding.dense_pack import DensePack, FusedLookup, PackedLookup
from holdall.embedding.id_checks import check_feature, check_ids
from holdall.embedding.mixed_lookup import PlacedLookup, Placement
from holdall.kernels.dispatch import takes_triton
from holdall.tables import Dense, Method, Table
from holdall.tables.dense import DenseTable


class EmbeddingBags(nn.Module):
    """The tables of a model and the features that look them up.

    `features` maps each feature, in the order of a batch's ids, to the name of its table; by default every table is the
    feature of its own name. `fused=False` turns packing off: every table is called on its own and its gradients are
    ordinary sparse ones.
    """

    def __init__(
        self,
        tables: Mapping[str, Table],
        features: Mapping[str, str] | None = None,
        *,
        fused: bool = True,
        generator: torch.Generator | None = None,
        device: torch.device | str = "cpu",
    ):
        super().__init__()
        if not tables:
            raise ConfigError("a model needs at least one table")
        dims = {table.dim for table in tables.values()}
        if len(dims) > 1:
            raise ConfigError(f"all tables must give vectors of one dim, these have {sorted(dims)}")
        self.dim = dims.pop()
        self.features = dict(features) if features is not None else {name: name for name in tables}
        for feature, looked_up in self.features.items():
            if looked_up not in tables:
                raise ConfigError(f"feature '{feature}' looks up table '{looked_up}'{did_you_mean(looked_up, tables)}")
        self.fused = fused
        self.deliver_to: torch.device | None = None
        """Where vectors go when it is not where the tables are; ids are then brought to the tables."""
        self._vector_dtype: torch.dtype | None = None
        self._set_tables(tables, generator, device)
        self._limits = torch.tensor([tables[name].num_rows for name in self.features.values()])

    @property
    def vector_dtype(self) -> torch.dtype | None:
        """Type of looked-up vectors and of their gradients; that of the tables when None."""
        return self._vector_dtype

    @vector_dtype.setter
    def vector_dtype(self, dtype: torch.dtype | None) -> None:
        self._vector_dtype = dtype
        for pack in self.packs:
            pack.vector_dtype = dtype

    def _set_tables(
        self, tables: Mapping[str, Table], generator: torch.Generator | None, device: torch.device | str
    ) -> None:
        self.packs = self._pack(tables, generator, device) if self.fused else []
        self.vector_dtype = self._vector_dtype
        self._placements: dict[tuple[Any, ...], Placement] = {}
        self.tables = nn.ModuleDict({module_name(name): table for name, table in tables.items()})
        for table in tables.values():
            table.check_bounds = False  # `check` does it for all of them at once, and can name the feature

    def replace_tables(self, tables: Mapping[str, Table]) -> None:
        """Put other tables of the same rows and dim in the place of those of the same names."""
        if any(pack.collects for pack in self.packs):
            raise ConfigError("the tables have an optimizer already: replace tables first, then make the optimizer")
        everything = {name: self.table(name) for name in dict.fromkeys(self.features.values())}
        for name, table in tables.items():
            if name not in everything:
                raise ConfigError(f"there is no table '{name}'{did_you_mean(name, everything)}")
            old = everything[name]
            if (table.num_rows, table.dim, table.mode) != (old.num_rows, old.dim, old.mode):
                raise ConfigError(f"table '{name}' can only be replaced by one of the same rows, dim and mode")
            everything[name] = table
        self._set_tables(everything, None, "cpu")

    @classmethod
    def build(
        cls,
        cardinalities: Mapping[str, int],
        dim: int,
        method: Method | Mapping[str, Method] | None = None,
        *,
        features: Mapping[str, str] | None = None,
        mode: str = "sum",
        fused: bool = True,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        dense_device: torch.device | str | None = None,
        generator: torch.Generator | None = None,
    ) -> EmbeddingBags:
        """Freshly initialised tables; `method` is one for all, or one by table name with dense where absent.

        Dense tables are drawn straight into their shared storage: memory never holds them twice. They lie on `device`
        like the others, unless `dense_device` says else; on `meta` they have a seed but no rows yet.
        """
        tables = {}
        for name, num_rows in cardinalities.items():
            chosen = method.get(name, Dense()) if isinstance(method, Mapping) else method or Dense()
            place = "meta" if fused and isinstance(chosen, Dense) and mode != "max" else device
            tables[name] = chosen.build(num_rows, dim, mode=mode, dtype=dtype, device=place, generator=generator)
        return cls(tables, features, fused=fused, generator=generator, device=dense_device or device)

    @staticmethod
    def _pack(
        tables: Mapping[str, Table], generator: torch.Generator | None, device: torch.device | str
    ) -> list[DensePack]:
        groups: dict[tuple[Any, ...], dict[str, DenseTable]] = {}
        for name, table in tables.items():
            if type(table) is DenseTable and table.mode != "max" and table.padding_idx is None:
                groups.setdefault((table.weight.dtype, table.mode), {})[name] = table
        return [
            DensePack(group, generator, device if first.weight.is_meta else first.weight.device)
            for group in groups.values()
            for first in [next(iter(group.values()))]
        ]

    @property
    def num_features(self) -> int:
        return len(self.features)

    def table(self, name: str) -> Table:
        """The table of that name."""
        table = self.tables[module_name(name)]
        assert isinstance(table, Table)
        return table

    def num_bytes(self) -> int:
        """Bytes of all tables; what several of them share counts once."""
        return sum(tensor.numel() * tensor.element_size() for tensor in (*self.parameters(), *self.buffers()))

    def forward(self, ids: Ids, positions: Sequence[int] | None = None) -> Tensor:
        """Pooled vectors [B, F, dim] of every feature, or of the features at `positions` alone, in that order."""
        self.check(ids)
        if self.deliver_to is not None:
            return Delivered.apply(self._look_up(ids.to("cpu"), positions), self.deliver_to)
        return self._look_up(ids, positions)

    def _look_up(self, ids: Ids, positions: Sequence[int] | None) -> Tensor:
        chosen = range(self.num_features) if positions is None else positions
        tables = list(self.features.values())
        placement = self._placement(ids, chosen)
        if placement is not None:
            return self._look_up_placed(placement, ids)
        for pack in self.packs:
            if all(tables[position] in pack.tables for position in chosen) and self._reads_storage(pack):
                return self._lookup(pack, list(chosen), ids)
        columns = self._look_up_packed(chosen, ids)
        if self.fused and (ids.offsets is not None or ids.weights is not None) and positions is None and not columns:
            pooled = self._pool_together(ids)
            if pooled is not None:
                return pooled if self.vector_dtype is None else pooled.to(self.vector_dtype)
        if self.fused and ids.offsets is None and ids.weights is None:
            columns.update(self._look_up_together([position for position in chosen if position not in columns], ids))
        for position in chosen:
            if position not in columns:
                columns[position] = self._look_up_one(position, ids)
        found = [columns[position] for position in chosen]
        return torch.stack(found if self.vector_dtype is None else [v.to(self.vector_dtype) for v in found], dim=1)

    def _look_up_packed(self, positions: Sequence[int], ids: Ids) -> dict[int, Tensor]:
        """Vectors [B, dim] of the features that packs look up, by position: one gather a pack."""
        tables = list(self.features.values())
        columns: dict[int, Tensor] = {}
        for pack in self.packs:
            packed = [position for position in positions if tables[position] in pack.tables]
            if packed and self._reads_storage(pack):
                columns.update(zip(packed, self._lookup(pack, packed, ids).unbind(1), strict=True))
        return columns

    def _look_up_one(self, position: int, ids: Ids) -> Tensor:
        """Vectors [B, dim] of one feature, from its own table."""
        values, offsets, weights = ids.bag(position)
        table = self.table(list(self.features.values())[position])
        if offsets is None:
            values, weights = values[:, None], None if weights is None else weights[:, None]
        else:
            offsets = offsets if table.include_last_offset else offsets[:-1]
        # Inside autocast too, what a table computes is in its own type.
        with torch.autocast(values.device.type, enabled=False):
            return table(values, offsets, weights)

    def _placement(self, ids: Ids, chosen: Sequence[int]) -> Placement | None:
        """Who writes which column, where kernels of several kinds write into one output; None for other ways."""
        if not self.fused or ids.offsets is not None or ids.weights is not None or ids.values.device.type == "meta":
            return None
        here = [pack for pack in self.packs if type(pack) is DensePack and pack.storage.device == ids.values.device]
        packs = [pack for pack in here if self._reads_storage(pack) and _fits(pack)]
        names = list(self.features.values())
        if any(all(names[position] in pack.tables for position in chosen) for pack in self.packs):
            return None  # one kernel does it all, see `_lookup`
        if not takes_triton("the lookup", ids.values):
            return None
        key = (tuple(chosen), *(id(pack) for pack in packs))
        if key not in self._placements:
            tables = {position: self.table(names[position]) for position in chosen}
            self._placements[key] = Placement(tables, packs, names)
        placement = self._placements[key]
        for pack in packs:
            pack.repack()
        return placement if placement.worthwhile and len(tuple(chosen)) == len(set(chosen)) else None

    def _look_up_placed(self, placement: Placement, ids: Ids) -> Tensor:
        """[B, F, dim], every kernel writing its own columns; in the type of `torch.autocast` where that is on."""
        left = [position for position, _ in placement.rest]
        columns = self._look_up_packed(left, ids)
        columns.update(self._look_up_together([position for position in left if position not in columns], ids))
        rest = [columns[position] if position in columns else self._look_up_one(position, ids) for position in left]
        kind = ids.values.device.type
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
        elif self.vector_dtype is not None:
            dtype = self.vector_dtype
        else:
            dtype = functools.reduce(torch.promote_types, [*placement.dtypes(), *(vectors.dtype for vectors in rest)])
        return PlacedLookup.apply(placement, ids.values, dtype, len(rest), *placement.parameters(), *rest)

    def rows(self, ids: Ids, position: int) -> Tensor:
        """Rows [L, dim] of every id of one feature, in the order of its bags and not pooled; weights play no part.

        Gradients take the way that those of `forward` take.
        """
        self._check_feature(ids, position)
        if self.deliver_to is not None:
            return Delivered.apply(self._rows(ids.to("cpu"), position), self.deliver_to)
        return self._rows(ids, position)

    def _rows(self, ids: Ids, position: int) -> Tensor:
        values = ids.bag(position)[0]
        name = list(self.features.values())[position]
        for pack in self.packs:
            if name in pack.tables and self._reads_storage(pack):
                pack.repack()
                parameters = [table.weight for table in pack.tables.values()]
                rows = pack.locate(values.long()[:, None], [name])[:, 0]
                return PackedLookup.apply(pack, rows, None, None, False, *parameters)
        table = self.table(name)
        if values.numel() == 0:
            return table.rows(values)
        rows = table(values[:, None])  # bags of one id: each distinct row is made once, as in `forward`
        return rows if self.vector_dtype is None else rows.to(self.vector_dtype)

    def _look_up_together(self, positions: Sequence[int], ids: Ids) -> dict[int, Tensor]:
        """Vectors [B, dim] of one id a sample from compressed tables that can share a call, by position."""
        names = list(self.features.values())
        groups: dict[Hashable, list[int]] = {}
        for position in positions:
            key = self.table(names[position]).batch_key()
            if key is not None:
                groups.setdefault((type(self.table(names[position])), key), []).append(position)
        columns: dict[int, Tensor] = {}
        for group in groups.values():
            if len(group) > 1:
                tables = [self.table(names[position]) for position in group]
                values = features_at(ids.values, group)
                rows = tables[0].rows_many(tables, values.long())
                columns.update(zip(group, rows.unbind(0), strict=True))
        return columns

    def _pool_together(self, ids: Ids) -> Tensor | None:
        """Pooled bags [B, F, dim] where all tables are of one kind that pools them in one call, else None."""
        tables = [self.table(name) for name in self.features.values()]
        keys = {(type(table), table.mode, table.batch_key()) for table in tables}
        if len(keys) > 1 or tables[0].batch_key() is None:
            return None
        return tables[0].pool_many(tables, ids.values.reshape(-1), ids.offsets, ids.weights)

    @staticmethod
    def _reads_storage(pack: DensePack) -> bool:
        """Whether lookups go to the shared storage: not when their gradients belong into `weight.grad`."""
        return pack.collects or not torch.is_grad_enabled()

    def _lookup(self, pack: DensePack, positions: Sequence[int], ids: Ids) -> Tensor:
        """[B, len(positions), dim] from a pack, with one gather."""
        pack.repack()
        tables = list(self.features.values())
        names = [tables[position] for position in positions]
        if takes_triton("the lookup", pack.storage, fits=_fits(pack)):
            fused = self._fused_lookup(pack, positions, names, ids)
            if fused is not None:
                return fused
        mean = next(iter(pack.tables.values())).mode == "mean"
        parameters = [table.weight for table in pack.tables.values()]
        if ids.offsets is None and ids.weights is None:
            # Sample-major, as batches lie in their files: the result is contiguous for the interaction that follows.
            values = features_at(ids.values, positions)
            return PackedLookup.apply(pack, pack.locate(values.t(), names), None, None, mean, *parameters)
        size = ids.batch_size
        if ids.offsets is None:
            rows = pack.locate(features_at(ids.values, positions).t(), names).t().reshape(-1)
            offsets = torch.arange(rows.numel() + 1, device=rows.device)
            weights = None if ids.weights is None else features_at(ids.weights, positions).reshape(-1)
        else:
            pieces = [ids.bag(position) for position in positions]
            lengths = torch.cat([bounds.diff() for _, bounds, _ in pieces if bounds is not None])
            which = torch.repeat_interleave(lengths.view(len(positions), size).sum(1))
            rows = pack.locate(torch.cat([values for values, _, _ in pieces]), names, which)
            offsets = F.pad(lengths.cumsum(0), (1, 0))
            weights = None if ids.weights is None else torch.cat([w for _, _, w in pieces if w is not None])
        vectors = PackedLookup.apply(pack, rows.long(), offsets, weights, mean, *parameters)
        return vectors.view(len(positions), size, self.dim).transpose(0, 1)

    def _fused_lookup(self, pack: DensePack, positions: Sequence[int], names: Sequence[str], ids: Ids) -> Tensor | None:
        """`_lookup` in one kernel, without waiting for the device; None for bags of some of the features.

        Inside `torch.autocast` the vectors come in its type, which saves writing and reading them in float32.
        """
        everything = list(positions) == list(range(self.num_features))
        kind = pack.storage.device.type
        own = pack.vector_dtype or pack.storage.dtype
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else own
        mean = next(iter(pack.tables.values())).mode == "mean"
        parameters = [table.weight for table in pack.tables.values()]
        offsets = weights = None
        if ids.offsets is None:
            rows = pack.row_numbers(pack.locate(features_at(ids.values, positions).t(), names))
            if ids.weights is not None:
                rows, weights = rows.t().reshape(-1), features_at(ids.weights, positions).reshape(-1)
                offsets = torch.arange(rows.numel() + 1, device=rows.device)
        elif everything:
            offsets, weights = ids.offsets, ids.weights
            bag = torch.repeat_interleave(offsets.diff(), output_size=ids.values.numel())
            rows = pack.row_numbers(pack.locate(ids.values, names, bag // ids.batch_size))
        else:
            return None
        return FusedLookup.apply(pack, rows, offsets, weights, mean, len(positions), dtype, *parameters)

    def packed_rows(self, ids: Ids) -> tuple[Tensor, ...] | None:
        """`(storage [R, dim], rows [B, F])` such that `storage[rows]` is the result, for operations that read them by
        themselves; None unless every feature is one-hot and kernels can read it so. With compressed tables a third
        tensor `others` [.., dim] holds their rows, freshly made: row -1 - k stands for its row k."""
        names = list(self.features.values())
        if ids.offsets is not None or ids.weights is not None:
            return None
        packs = [pack for pack in self.packs if any(name in pack.tables for name in names)]
        if len(packs) != 1 or not self._reads_storage(packs[0]):
            return None
        (pack,) = packs
        if not takes_triton("the lookup", pack.storage, fits=_fits(pack)):
            return None
        self.check(ids)
        if any(name not in pack.tables for name in names):
            placement = self._placement(ids, range(self.num_features))
            if placement is None or placement.rest or len(set(placement.dtypes())) != 1:
                return None
            return placement.row_numbers(ids.values, pack.storage.dtype)
        pack.repack()
        rows = pack.row_numbers(pack.locate(ids.values.t(), names))
        return pack.storage, rows

    def addresses(self) -> Hashable:
        """Where packed tables and their optimizer state are, and how large: what grew can lie where it did before, and
        its state elsewhere."""
        tensors = (tensor for pack in self.packs for tensor in (pack.storage, *pack.slots.values()))
        return tuple((tensor.data_ptr(), tensor.shape) for tensor in tensors)

    @eager
    def check(self, ids: Ids) -> None:
        """Raise `IdError`, naming feature, id and sample, unless every id is a row of its table.

        Reads the ids, so a batch should be checked on the host, before it is copied to a device; ids that are already
        on a device are not read back.
        """
        check_ids(ids, list(self.features), self._limits)

    @eager
    def _check_feature(self, ids: Ids, position: int) -> None:
        check_feature(ids, position, list(self.features)[position], int(self._limits[position]))

    def _apply(self, fn: Any, recurse: bool = True) -> EmbeddingBags:
        super()._apply(fn, recurse)
        self._placements.clear()
        for pack in self.packs:
            pack.repack()
        return self


class Delivered(torch.autograd.Function):
    """Vectors of the host on a device, whose gradients come back through memory that a GPU copies to at full speed."""

    @staticmethod
    def forward(ctx: Any, vectors: Tensor, device: torch.device) -> Tensor:
        return vectors.to(device, non_blocking=device.type == "cuda" and vectors.is_pinned())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,) = grads
        if grad.device.type != "cuda":
            return grad.cpu(), None
        home = torch.empty(grad.shape, dtype=grad.dtype, pin_memory=True)
        home.copy_(grad, non_blocking=True)
        torch.cuda.current_stream(grad.device).synchronize()
        return home, None


def _fits(pack: DensePack) -> bool:
    """Whether the kernels read this pack's storage."""
    return pack.storage.dtype in (torch.float32, torch.bfloat16, torch.float16) and pack.storage.shape[1] <= 4096


def module_name(name: str) -> str:
    """A table's name as torch allows it for a submodule: no dots, not empty, no attribute of the dict (`items`)."""
    name = name.replace(".", "·")
    return f"{name}·" if not name or hasattr(nn.ModuleDict, name) or name == "training" else name
