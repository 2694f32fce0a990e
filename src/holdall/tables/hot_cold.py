"""Hot/cold table: the popular rows exact, the tail stored by any other method.

Ids are in order of popularity, so hot is a prefix: `id < hot_rows` is the whole test. FAE (arXiv:2103.00686) and the
cache of TT-Rec (arXiv:2101.11714) treat popular rows apart; here they are ordinary parameters, which train, are saved
and are counted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from holdall.common.eager import eager, has_values
from holdall.common.errors import ConfigError
from holdall.tables.dense import Dense, DenseTable
from holdall.tables.fitting import check_shape, relative_error
from holdall.tables.method import Method, TableOptions, dense_std, require
from holdall.tables.table import Table


@dataclass(frozen=True)
class HotCold(Method):
    """`row_i = hot[i]` for i < hot_rows, else row `i - hot_rows` of the cold table; bytes and flops are their sums."""

    name: ClassVar[str] = "hot_cold"

    hot_rows: int | float
    """Rows stored exactly: a number of rows, or a share of the table between 0 and 1."""
    cold: Method
    """Method of the other rows: trained, frozen (`Quantized`) or another `HotCold`."""

    def __post_init__(self) -> None:
        rows = self.hot_rows
        valid = 0 < rows < 1 if isinstance(rows, float) else isinstance(rows, int) and rows >= 0
        require(
            valid and not isinstance(rows, bool),
            self.name,
            f"hot_rows must be a number of rows of at least 0 or a share between 0 and 1, not {rows!r}",
        )
        require(isinstance(self.cold, Method), self.name, f"cold must be a table method, not {self.cold!r}")

    def split(self, num_rows: int) -> tuple[int, int]:
        """Number of hot rows of a table, and of cold ones."""
        hot = round(self.hot_rows * num_rows) if isinstance(self.hot_rows, float) else min(self.hot_rows, num_rows)
        return hot, num_rows - hot

    @property
    def trains(self) -> bool:
        return self.cold.trains

    def for_training(self) -> HotCold:
        return replace(self, cold=self.cold.for_training())

    def num_parameters(self, num_rows: int, dim: int) -> int:
        hot, cold = self.split(num_rows)
        return hot * dim + (self.cold.num_parameters(cold, dim) if cold else 0)

    def num_bytes(self, num_rows: int, dim: int, dtype: torch.dtype = torch.float32) -> int:
        hot, cold = self.split(num_rows)
        return hot * dim * dtype.itemsize + (self.cold.num_bytes(cold, dim, dtype) if cold else 0)

    def _build(self, num_rows: int, dim: int, options: TableOptions) -> HotColdTable:
        return HotColdTable(self, num_rows, dim, options)

    @classmethod
    def for_bytes(
        cls, num_rows: int, dim: int, num_bytes: int, cold: type[Method] | None = None, hot_share: float = 0.5
    ) -> HotCold:
        """Hot rows for `hot_share` of the bytes, and the largest setting of `cold` (Frobenius when None) for the rest.

        Where the rest is too little for the cold method, there are fewer hot rows; bytes that it leaves unused go to
        them.
        """
        if cold is None:
            from holdall.tables.frobenius import Frobenius

            cold = Frobenius
        require(0 <= hot_share <= 1, cls.name, f"hot_share must be from 0 to 1, not {hot_share}")
        if num_bytes >= 4 * num_rows * dim:
            return cls(hot_rows=num_rows, cold=Dense())
        hot = min(int(num_bytes * hot_share) // (4 * dim), num_rows - 1)
        while True:
            try:
                tail = cold.for_bytes(num_rows - hot, dim, num_bytes - 4 * dim * hot)
                break
            except ConfigError as error:
                if hot == 0:
                    raise ConfigError(
                        f"{cls.name}: its cold part does not fit, even without hot rows: {error}"
                    ) from None
                hot //= 2
        found = cls(hot_rows=hot, cold=tail)
        unused = (num_bytes - found.num_bytes(num_rows, dim)) // (4 * dim)
        larger = replace(found, hot_rows=min(hot + unused, num_rows - 1))
        return larger if larger.num_bytes(num_rows, dim) <= num_bytes else found


class HotColdTable(Table):
    """`hot`, a dense table of the first rows, and `cold`, the table of the others; either is None if it has no rows."""

    def __init__(self, method: HotCold, num_rows: int, dim: int, options: TableOptions):
        super().__init__(method, num_rows, dim, options)
        self.hot_rows, num_cold = method.split(num_rows)
        std = dense_std(num_rows) if options.init_std is None else options.init_std
        padding = options.padding_idx

        def part(of: Method, start: int, rows: int) -> Table | None:
            inside = padding is not None and start <= padding < start + rows
            its_padding = padding - start if padding is not None and inside else None
            return of._build(rows, dim, replace(options, init_std=std, padding_idx=its_padding)) if rows else None

        self.fixed_shapes: bool | None = None
        """Whether `_rows` computes both rows of every id and selects one, whatever the ids are; on a GPU when None."""
        self.hot = part(Dense(), 0, self.hot_rows)
        self.cold = part(method.cold, self.hot_rows, num_cold)

    def _rows(self, ids: Tensor) -> Tensor:
        if self.cold is None or self.hot is None:
            only = self.hot or self.cold
            assert only is not None
            return only._rows(ids)
        if self._has_fixed_shapes(ids) and ids.numel():
            return self._rows_of_both(ids)
        return self._rows_by_part(ids)

    @eager  # how many ids are hot depends on them
    def _rows_by_part(self, ids: Tensor) -> Tensor:
        """`_rows` with each id looked up in its part alone."""
        assert self.hot is not None
        assert self.cold is not None
        is_hot = ids < self.hot_rows
        num_hot = int(is_hot.sum())
        order = None
        if not bool(is_hot[:num_hot].all()):  # a prefix when ids are sorted, as they are in `forward`
            order = torch.cat((is_hot.nonzero(), (~is_hot).nonzero()))[:, 0]
            ids = ids[order]
        parts = []
        if num_hot > 0:
            parts.append(self.hot._rows(ids[:num_hot]))
        if num_hot < ids.numel() or not parts:
            parts.append(self.cold._rows(ids[num_hot:] - self.hot_rows).to(self._dtype))
        rows = parts[0] if len(parts) == 1 else torch.cat(parts)
        return rows if order is None else rows.index_select(0, _inverse(order))

    def _has_fixed_shapes(self, ids: Tensor) -> bool:
        if not has_values(ids):
            return True
        return ids.is_cuda if self.fixed_shapes is None else self.fixed_shapes

    def _rows_of_both(self, ids: Tensor) -> Tensor:
        """`_rows` in shapes that do not depend on the ids: nothing synchronizes, and a CUDA graph can capture it.

        Each id also looks up a row of the part it is not in; that row gets a gradient of zero. It is a row of another
        id, so that lazy optimizers touch no other rows (the first, in a batch whose ids are all hot or all cold).
        """
        assert self.hot is not None
        assert self.cold is not None
        is_hot = ids < self.hot_rows
        lowest, highest = torch.aminmax(ids)
        in_hot = torch.where(is_hot, ids, torch.where(lowest < self.hot_rows, lowest, 0))
        in_cold = (torch.where(is_hot, highest, ids) - self.hot_rows).clamp_(min=0)
        return torch.where(is_hot[:, None], self.hot._rows(in_hot), self.cold._rows(in_cold).to(self._dtype))

    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        plain = offsets is None and per_sample_weights is None and self.padding_idx is None
        if plain and input.dim() == 2 and input.shape[1] == 1 and self._has_fixed_shapes(input):
            return self._rows(self._checked(input).reshape(-1))  # finding distinct ids would synchronize
        return super().forward(input, offsets, per_sample_weights)

    @property
    def _dtype(self) -> torch.dtype:
        assert isinstance(self.hot, DenseTable)
        return self.hot.weight.dtype

    def row_parameters(self) -> dict[str, nn.Parameter]:
        parts = {"hot": self.hot, "cold": self.cold}
        return {
            f"{part}.{name}": parameter
            for part, table in parts.items()
            if table is not None
            for name, parameter in table.row_parameters().items()
        }

    @classmethod
    @torch.no_grad()
    def from_dense(cls, weight: Tensor, table: Table) -> Table:
        """The hot rows copied, the cold ones fitted by their own method, with its memory."""
        assert isinstance(table, HotColdTable)
        check_shape(weight, table)
        if table.hot is not None:
            type(table.hot).from_dense(weight[: table.hot_rows], table.hot)
        if table.cold is not None:
            try:
                table.cold = type(table.cold).from_dense(weight[table.hot_rows :], table.cold)
            except ConfigError as error:
                raise ConfigError(f"the cold part of a hot_cold table cannot be fitted: {error}") from None
        table.fit_error = relative_error(weight, table)
        return table


def _inverse(order: Tensor) -> Tensor:
    """The permutation that undoes `order`."""
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel(), device=order.device)
    return inverse
