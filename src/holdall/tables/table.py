"""Base class of all tables: bounds checks, pooling, and the dense rows that a table represents.

A method only computes the rows of distinct ids (`_rows`). Bags, weights, padding, duplicates and bounds are here, so
they mean the same for all methods: exactly what `nn.EmbeddingBag` means.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Sequence
from itertools import chain
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holdall.common.eager import eager, has_values
from holdall.common.errors import ConfigError, IdError
from holdall.kernels.repeat_rows import rows_of_distinct
from holdall.tables.method import Method, TableOptions

HASH_SEED = "hash_seed"
"""Name of the seed of a table's hash in state dicts."""


class Table(nn.Module):
    """Table of `num_rows` rows of `dim` numbers, stored by some method; an `nn.EmbeddingBag` to its users."""

    has_weight: ClassVar[bool] = False
    """Whether there is a `weight` [num_rows, dim]; without one, `materialize` gives the rows."""
    _loads: bool = False
    """Whether a state dict is being loaded, whose `assign=True` sets parameters of any name."""

    def __init__(self, method: Method, num_rows: int, dim: int, options: TableOptions):
        super().__init__()
        self.method = method
        self.num_rows = num_rows
        self.dim = dim
        self.mode = options.mode
        self.padding_idx = options.padding_idx
        self.include_last_offset = options.include_last_offset
        self.sparse = options.sparse
        """Whether gradients of `row_parameters` are sparse; set it with `use_sparse_gradients`."""
        self.row_dtype = options.dtype
        """Type of looked-up rows, also where the numbers that they are made of are stored in others."""
        self.check_bounds = True
        """False only where a caller has checked the same ids already, as `EmbeddingBags` does."""
        self.fit_error: float | None = None
        """Relative Frobenius error of the last fit to given rows, when there was one."""

    @abstractmethod
    def _rows(self, ids: Tensor) -> Tensor:
        """Rows [U, dim] of 1-D int64 ids in range. Called with distinct ids by `forward`, with any ids by `rows`."""

    @classmethod
    def from_dense(cls, weight: Tensor, table: Table) -> Table:
        """Fit `table` to `weight` [num_rows, dim] by its method's best fit, and return it."""
        raise ConfigError(f"{table.method.name} has no fit to given rows; train it from the start instead")

    def fit_rows(self, weight: Tensor, counts: Tensor | None = None) -> None:
        """Fit this table to `weight` as `from_dense` does; row i counts `counts[i]` times where the fit weighs rows.

        Shared, Codes, Clustered and tables of bands weigh rows. The other methods fit each row alike.
        """
        type(self).from_dense(weight, self)

    def row_parameters(self) -> dict[str, nn.Parameter]:
        """Parameters that are gathered by row: with `sparse` their gradients are, and updates touch only touched rows.

        All others are small enough for a dense gradient, and always have one.
        """
        return {}

    def use_sparse_gradients(self, sparse: bool = True) -> None:
        """Give the row parameters sparse gradients from now on, or dense ones; the tables inside this one too."""
        for part in self.modules():
            if isinstance(part, Table):
                part.sparse = sparse

    @property
    def num_embeddings(self) -> int:
        """torch's name of `num_rows`."""
        return self.num_rows

    @property
    def embedding_dim(self) -> int:
        """torch's name of `dim`."""
        return self.dim

    def __getattr__(self, name: str) -> Tensor | nn.Module:
        if name == "weight" and not self.has_weight:
            raise AttributeError(self._why_no_weight())
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Tensor | nn.Module) -> None:
        if name == "weight" and not self.has_weight and not self._loads:
            raise AttributeError(self._why_no_weight())
        super().__setattr__(name, value)

    def _why_no_weight(self) -> str:
        return (
            f"a {self.method.name} table has no `weight`: it does not store its {self.num_rows} rows one by one; read "
            f"them with materialize(), or materialize(ids), as for a tied output layer, and give an output layer "
            f"that trains a weight of its own"
        )

    @property
    def device(self) -> torch.device:
        """Device of its parameters and buffers."""
        return next(chain(self.parameters(), self.buffers())).device

    def kernel_group(self) -> Hashable | None:
        """Key of the tables that one kernel call can look up; None where each table needs its own call.

        Tables of one class and equal keys share a call of `rows_many` or `pool_many`. The key names what a call needs
        to be equal: sizes, types, devices, and the kernel path where grouping depends on it.
        """
        return None

    @staticmethod
    def rows_many(tables: Sequence[Any], ids: Tensor) -> Tensor:
        """Rows [T, L, dim] of T tables of one `kernel_group` for ids [T, L]."""
        return torch.stack([table.rows(line) for table, line in zip(tables, ids, strict=True)])

    @staticmethod
    def pool_many(tables: Sequence[Any], ids: Tensor, offsets: Tensor | None, weights: Tensor | None) -> Tensor | None:
        """Pooled bags [B, T, dim] of T tables of one `kernel_group` and mode; None: one table after the other.

        Bags are table-major: `offsets` [T * B + 1] of ids [L], or one id per bag when None; `weights` [L].
        """
        return None

    def rows(self, ids: Tensor) -> Tensor:
        """Rows of `ids`, of shape (*ids.shape, dim): an `nn.Embedding`.

        The row of `padding_idx` is returned as it is and gets no gradient.
        """
        ids = self._checked(ids)
        rows = self._rows(ids.reshape(-1)).reshape(*ids.shape, self.dim)
        if self.padding_idx is None:
            return rows
        return torch.where((ids == self.padding_idx)[..., None], rows.detach(), rows)

    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        """Pooled rows, [bags, dim], with the arguments and the meaning of `nn.EmbeddingBag.forward`.

        Each distinct id is computed once, and its gradient is summed before the method's backward.
        """
        plain = offsets is None and per_sample_weights is None and self.padding_idx is None
        if plain and input.dim() == 2 and input.shape[1] == 1:  # bags of one id: nothing to pool, in any mode
            return rows_of_distinct(self._checked(input).reshape(-1), self._rows)
        input, offsets = self._bags(input, offsets, per_sample_weights)
        if per_sample_weights is not None:
            per_sample_weights = per_sample_weights.reshape(-1)
        if not has_values(input):
            return self._pool_each(self._rows(input), input, offsets, per_sample_weights)
        return self._pool_distinct(input, offsets, per_sample_weights)

    def materialize(self, ids: Tensor | None = None) -> Tensor:
        """The dense rows that the table represents, all of them or those of `ids`: the oracle of its tests."""
        if ids is None:
            ids = torch.arange(self.num_rows, device=self.device)
        with torch.no_grad():
            return self.rows(ids)

    def num_bytes(self) -> int:
        """Bytes of its parameters and of every index buffer."""
        tensors = [*self.parameters(), *self.buffers()]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def extra_repr(self) -> str:
        return f"{self.num_rows:,} rows, dim {self.dim}, {self.method}, {self.num_bytes():,} bytes"

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self.row_dtype = fn(torch.empty(0, dtype=self.row_dtype)).dtype
        return self

    # The seed of a hash decides which stored numbers a row has, so state dicts carry it beside them.

    def _hash_seed(self) -> int | None:
        """Seed of the hash that places rows, if the table has one."""
        return None

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        seed = self._hash_seed()
        if seed is not None:
            destination[prefix + HASH_SEED] = torch.tensor(seed)

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """As every module; state dicts of before 0.2.0 have no seed and load unchecked."""
        seed, name = self._hash_seed(), prefix + HASH_SEED
        stored = None if seed is None else state_dict.get(name)
        if stored is not None and int(stored) != seed:
            error_msgs.append(
                f"{name} is {int(stored)} in the state dict and {seed} here: rows would be made of the wrong numbers; "
                f"build the {self.method.name} table with seed={int(stored)}"
            )
            return
        self._loads = True
        try:
            super()._load_from_state_dict(
                state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
            )
        finally:
            self._loads = False
        if stored is not None and name in unexpected_keys:
            unexpected_keys.remove(name)

    # Helpers that give `forward` the meaning of nn.EmbeddingBag's.

    def _bags(self, input: Tensor, offsets: Tensor | None, weights: Tensor | None) -> tuple[Tensor, Tensor]:
        """Checked flat ids and the start of every bag (with the end of the last, when `include_last_offset`)."""
        input = self._checked(input)
        if weights is not None:
            if self.mode != "sum":
                raise ConfigError(f"per_sample_weights go with mode='sum' only, this table has mode='{self.mode}'")
            if weights.shape != input.shape:
                raise ConfigError(f"per_sample_weights has shape {tuple(weights.shape)}, input {tuple(input.shape)}")
        if input.dim() == 2:
            if offsets is not None:
                raise ConfigError("a 2-D input holds one bag a row: offsets must be None")
            size, length = input.shape
            num_offsets = size + 1 if self.include_last_offset else size
            offsets = torch.arange(num_offsets, device=input.device) * length
        elif input.dim() == 1:
            if offsets is None:
                raise ConfigError("a 1-D input needs offsets: the position where each bag starts")
            if self.check_bounds or has_values(offsets):
                check_offsets(offsets, input.numel(), include_last=self.include_last_offset)
            offsets = offsets.long()
        else:
            raise ConfigError(f"input must be 1-D (with offsets) or 2-D, not {input.dim()}-D")
        return input.reshape(-1), offsets

    @eager  # the number of distinct ids depends on them
    def _pool_distinct(self, ids: Tensor, offsets: Tensor, weights: Tensor | None) -> Tensor:
        distinct, inverse = torch.unique(ids, return_inverse=True)
        return self._pool(self._rows(distinct), distinct, inverse, offsets, weights)

    def _pool(self, rows: Tensor, distinct: Tensor, inverse: Tensor, offsets: Tensor, weights: Tensor | None) -> Tensor:
        """Pool rows [U, dim] of `distinct` ids over bags of positions `inverse` into them."""
        if rows.shape[0] == 0:  # no lookups at all: every bag is empty
            num_bags = offsets.numel() - int(self.include_last_offset)
            return rows.new_zeros(num_bags, self.dim) + rows.sum()
        padding = None
        if self.padding_idx is not None:
            found = torch.searchsorted(distinct, self.padding_idx)
            present = found < distinct.numel() and int(distinct[found]) == self.padding_idx
            padding = int(found) if present else None
        return F.embedding_bag(
            inverse,
            rows,
            offsets,
            mode=self.mode,
            per_sample_weights=None if weights is None else weights.to(rows.dtype),
            include_last_offset=self.include_last_offset,
            padding_idx=padding,
        )

    def _pool_each(self, rows: Tensor, ids: Tensor, offsets: Tensor, weights: Tensor | None) -> Tensor:
        """`_pool` of the rows [L, dim] of every id, in operations that read no values."""
        starts = offsets[:-1] if self.include_last_offset else offsets
        bag = torch.searchsorted(starts, torch.arange(ids.numel(), device=ids.device), right=True) - 1
        keep = torch.ones_like(ids, dtype=torch.bool) if self.padding_idx is None else ids != self.padding_idx
        if weights is not None:
            rows = rows * weights.to(rows.dtype)[:, None]
        counts = rows.new_zeros(starts.numel()).index_add(0, bag, keep.to(rows.dtype))[:, None]
        if self.mode == "max":
            rows = rows.masked_fill(~keep[:, None], -torch.inf)
            lowest = rows.new_full((starts.numel(), self.dim), -torch.inf)
            index = bag[:, None].expand(-1, self.dim)
            return lowest.scatter_reduce(0, index, rows, "amax").masked_fill(counts == 0, 0.0)
        sums = rows.new_zeros(starts.numel(), self.dim).index_add(0, bag, rows * keep[:, None])
        return sums / counts.clamp(min=1) if self.mode == "mean" else sums

    def _checked(self, ids: Tensor) -> Tensor:
        """`ids` as int64, after checking type and range."""
        if ids.dtype not in (torch.int64, torch.int32):
            raise ConfigError(f"ids must be int64 or int32, not {ids.dtype}")
        if self.check_bounds:
            check_ids(ids, self.num_rows)
        return ids.long()


def adds_sparse_gradients(parameter: Tensor) -> bool:
    """Whether torch adds up sparse gradients of a parameter: not in float16 on the CPU."""
    return parameter.is_cuda or parameter.dtype != torch.float16


def _can_check(values: Tensor) -> bool:
    """Whether there are values to check; an error where there are, but cannot be read."""
    if not values.is_meta and not has_values(values):
        raise ConfigError(
            "ids are checked by value, which torch.export and torch.vmap do not allow: check them before the lookup "
            "and set check_bounds = False on the table"
        )
    return not values.is_meta


@eager
def check_ids(ids: Tensor, num_rows: int) -> None:
    """Raise `IdError` naming the first id that is not a row, and its position."""
    if not _can_check(ids) or ids.numel() == 0:
        return
    lowest, highest = torch.aminmax(ids)
    if int(lowest) >= 0 and int(highest) < num_rows:
        return
    place = int(((ids.reshape(-1) < 0) | (ids.reshape(-1) >= num_rows)).nonzero()[0])
    raise IdError(
        f"id {int(ids.reshape(-1)[place])} at position {place} of the input is not a row of a table of "
        f"{num_rows} rows: ids go from 0 to {num_rows - 1}"
    )


@eager
def check_offsets(offsets: Tensor, num_ids: int, *, include_last: bool) -> None:
    """Raise `IdError` unless `offsets` starts at 0, never decreases and stays within `num_ids`."""
    if offsets.dim() != 1 or offsets.dtype not in (torch.int64, torch.int32):
        raise IdError(f"offsets must be a 1-D tensor of integers, not {offsets.dim()}-D {offsets.dtype}")
    if not _can_check(offsets):
        return
    if offsets.numel() == 0:
        if include_last or num_ids:
            raise IdError("offsets is empty: it needs the position where each bag starts")
        return
    if int(offsets[0]) != 0:
        raise IdError(f"offsets must start at 0, not at {int(offsets[0])}")
    falls = (offsets[1:] < offsets[:-1]).nonzero()
    if falls.numel():
        place = int(falls[0]) + 1
        raise IdError(
            f"offsets must not decrease, but offset {place} is {int(offsets[place])} after {int(offsets[place - 1])}"
        )
    last = int(offsets[-1])
    if last > num_ids or (include_last and last != num_ids):
        raise IdError(f"the last offset is {last}, but there are {num_ids} ids")
