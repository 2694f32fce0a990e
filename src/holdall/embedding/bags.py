"""All tables of a model behind one call: `bags(batch.ids) -> [B, F, dim]`.

Dense tables of one type lie end to end in one storage (a `DensePack`), so that a batch is looked up, and its rows are
updated, in one operation instead of one per table. Compressed tables are looked up in one call where their method can
(`Table.kernel_group`), and one by one otherwise. A `LookupPlan` groups the features once, when the tables are set.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from holdall.common.eager import eager
from holdall.common.errors import ConfigError, DataError, did_you_mean
from holdall.data.batch import Ids
from holdall.embedding.dense_pack import DensePack, pack_tables
from holdall.embedding.device_copy import CopyToDevice
from holdall.embedding.id_checks import check_feature, check_ids, check_traced_ids
from holdall.embedding.lookup_plan import LookupPlan
from holdall.embedding.pack_lookup import pack_rows
from holdall.tables import Dense, Method, Table, share_codebooks


class EmbeddingBags(nn.Module):
    """All tables of a model and the features that look them up.

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
        self.output_device: torch.device | None = None
        """Device that vectors of host tables are copied to; ids are then copied to the host. None: the tables' own."""
        self._vector_dtype: torch.dtype | None = None
        self._set_tables(tables, generator, device)
        self._limits = torch.tensor([tables[name].num_rows for name in self.features.values()])
        self.register_load_state_dict_post_hook(_repack)  # `assign=True` replaces the weights

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
        self.tables = nn.ModuleDict({module_name(name): table for name, table in tables.items()})
        for table in tables.values():
            table.use_sparse_gradients()  # a dense gradient would cost all rows at every step
            table.check_bounds = False  # `check` does it for all of them at once, and can name the feature
        self.set_packs(pack_tables(tables, generator, device) if self.fused else [])
        self.vector_dtype = self._vector_dtype

    def set_packs(self, packs: Sequence[DensePack]) -> None:
        """Put these packs of the dense tables in the place of those before, and plan lookups anew."""
        self.packs = list(packs)
        self.plan_lookups()

    def plan_lookups(self) -> None:
        """Plan lookups anew: call it after a single table was cast to another type or set to another kernel path."""
        names = self.features.values()
        tables = {name: self.table(name) for name in names if module_name(name) in self.tables}
        self._plan = LookupPlan(list(names), tables, self.packs, fused=self.fused)

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

        Dense tables are drawn straight into their shared storage: memory never holds them twice. They are on
        `dense_device`, or else on `device` like the others; on `meta` they have a seed but no rows yet.
        """
        tables = {}
        for name, num_rows in cardinalities.items():
            chosen = method.get(name, Dense()) if isinstance(method, Mapping) else method or Dense()
            place = "meta" if fused and isinstance(chosen, Dense) and mode != "max" else device
            tables[name] = chosen.build(num_rows, dim, mode=mode, dtype=dtype, device=place, generator=generator)
        share_codebooks(tables.values())
        return cls(tables, features, fused=fused, generator=generator, device=dense_device or device)

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
        """Pooled vectors [B, F, dim] of every feature, or of the features at `positions` alone, in that order.

        Ids and tables on `meta` have no values: the result has shape and type alone.
        """
        if ids.values.is_meta:
            return self._meta_vectors(ids, self.num_features if positions is None else len(positions))
        self.check(ids)
        if self.output_device is not None:
            return CopyToDevice.apply(self._look_up(ids.to("cpu"), positions), self.output_device)
        return self._look_up(ids, positions)

    def _meta_vectors(self, ids: Ids, num_features: int) -> Tensor:
        tensors = [*self.parameters(), *self.buffers()]
        if not all(tensor.is_meta for tensor in tensors):
            raise DataError("the ids are on meta and the tables are not: move both to one device")
        shape = (ids.batch_size, num_features, self.dim)
        dtype = self._vector_dtype or next(tensor.dtype for tensor in tensors if tensor.is_floating_point())
        wants_grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        return torch.empty(shape, dtype=dtype, device="meta", requires_grad=wants_grad)

    def _look_up(self, ids: Ids, positions: Sequence[int] | None) -> Tensor:
        return self._plan.look_up(ids, positions, self._vector_dtype)

    def rows(self, ids: Ids, position: int) -> Tensor:
        """Rows [L, dim] of every id of one feature, in the order of its bags and not pooled; weights play no part.

        Gradients go where those of `forward` go.
        """
        self._check_feature(ids, position)
        if self.output_device is not None:
            return CopyToDevice.apply(self._rows(ids.to("cpu"), position), self.output_device)
        return self._rows(ids, position)

    def _rows(self, ids: Ids, position: int) -> Tensor:
        values = ids.bag(position)[0]
        route = self._plan.route(ids, (position,))
        if route.only_pack is not None:
            return pack_rows(route.only_pack, values)
        ((_, table),) = route.unpacked
        if values.numel() == 0:
            return table.rows(values)
        rows = table(values[:, None])  # bags of one id: each distinct row is made once, as in `forward`
        return rows if self.vector_dtype is None else rows.to(self.vector_dtype)

    def packed_rows(self, ids: Ids) -> tuple[Tensor, ...] | None:
        """`(storage [R, dim], rows [B, F])` such that `storage[rows]` is the result, for operations that read rows by
        themselves; None unless every feature is one-hot and kernels can read rows so. With compressed tables a third
        tensor `others` [.., dim] has their rows, freshly made: row -1 - k stands for its row k."""
        if torch.compiler.is_compiling() or not self._plan.reads_packed_rows(ids):
            return None
        self.check(ids)
        return self._plan.packed_rows(ids)

    def addresses(self) -> Hashable:
        """Addresses and shapes of packed tables and their optimizer state.

        Shapes count too: a tensor that grew may get its old address again, while its optimizer state moved.
        """
        tensors = (tensor for pack in self.packs for tensor in (pack.storage, *pack.slots.values()))
        return tuple((tensor.data_ptr(), tensor.shape) for tensor in tensors)

    def check(self, ids: Ids) -> None:
        """Raise `IdError`, naming feature, id and sample, unless every id is a row of its table.

        Reads the ids, so a batch should be checked on the host, before it is copied to a device; ids that are already
        on a device are not read back.
        """
        if torch.compiler.is_compiling():
            check_traced_ids(ids, list(self.features), self._limits)
        else:
            check_ids(ids, list(self.features), self._limits)

    @eager
    def _check_feature(self, ids: Ids, position: int) -> None:
        check_feature(ids, position, list(self.features)[position], int(self._limits[position]))

    def __prepare_scriptable__(self) -> NoReturn:
        """Refusal that `torch.jit.script` reaches in the place of a compiler error."""
        raise ConfigError("TorchScript cannot compile EmbeddingBags: leave torch.jit.script out, or use torch.compile")

    def __getstate__(self) -> dict[str, Any]:
        """State for copies and pickles, without the plan: it refers to tensors and kernels of these very tables."""
        return {name: value for name, value in self.__dict__.items() if name != "_plan"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.plan_lookups()

    def _apply(self, fn: Any, recurse: bool = True) -> EmbeddingBags:
        super()._apply(fn, recurse)
        _repack(self)
        return self


def _repack(bags: nn.Module, _: Any = None) -> None:
    """Lay packed tables out anew if they were moved, cast or replaced."""
    assert isinstance(bags, EmbeddingBags)
    for pack in bags.packs:
        pack.repack()
    bags.plan_lookups()


def module_name(name: str) -> str:
    """A table's name as torch allows it for a submodule: no dots, not empty, no attribute of the dict (`items`)."""
    name = name.replace(".", "·")
    return f"{name}·" if not name or hasattr(nn.ModuleDict, name) or name == "training" else name
