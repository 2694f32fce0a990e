"""Quantised table: every row has its own grid of 256 or 16 levels, and a number is a code of 8 or 4 bits.

Frozen codes are for serving. Training has two forms: `stochastic` stores nothing but the codes while it trains,
`learned` trains floating point numbers through their rounding, and `freeze()` turns them into codes afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holdall.common.eager import eager, transforms
from holdall.common.errors import ConfigError
from holdall.kernels.row_gradient import RowGradient, join
from holdall.tables import code_updates
from holdall.tables.code_updates import GradientShare
from holdall.tables.fitting import block_slices, check_shape, relative_error, row_blocks
from holdall.tables.method import Method, TableOptions, dense_std, require
from holdall.tables.rounding import (
    best_row_grid,
    dequantize,
    pack_pairs,
    quantize,
    row_grid,
    unpack_pairs,
)
from holdall.tables.table import Table

MAX_PENDING = 10_000
"""Backward passes after which gradients that were not applied are an error rather than a leak."""


@dataclass(frozen=True)
class Quantized(Method):
    """`row_i = zero_i + step_i * code_i`, codes of `bits` bits, zero and step in the table's dtype (float32: 8 bytes).

    A row takes `ceil(dim * bits / 8) + 8` bytes in float32, and 4 less by `scales` of 16 bits. Rounding to the nearest
    level misses Gaussian rows by 0.4% (8 bits) and 6% (4 bits) of their norm at dim 16. A table that is not trainable
    has no parameters: its rows are fitted or loaded.
    """

    name: ClassVar[str] = "quantized"

    bits: Literal[8, 4] = 8
    """Bits of a code. Trained in 8 bits, rows are as good as dense ones; in 4, the noise of rounding costs popular rows
    quality (0.003 to 0.005 of AUC on the Criteo sample, where all rows have 4 bits)."""
    rounding: Literal["nearest", "stochastic", "learned"] = "nearest"
    """Rounding of a number to a code: to the nearest, stochastically (right in the mean), or (when training) by a
    learned step. Learned rounding stores float numbers, and counts them, until `freeze()`."""
    trainable: bool = False
    scales: Literal["float16", "bfloat16"] | None = None
    """Type of zero and step; that of the table when None. float16 is the more precise, up to numbers of 65,504."""
    state_bits: Literal[32, 8] = 32
    """Bits of the optimizer's number of a row that trains by stochastic rounding, where it keeps one number for each
    row (`rowwise_adagrad`). In 8 bits (`optim.byte_state`) it trains as well as in 32."""

    def __post_init__(self) -> None:
        require(self.bits in (8, 4), self.name, f"bits must be 8 or 4, not {self.bits!r}")
        known = ("nearest", "stochastic", "learned")
        require(self.rounding in known, self.name, f"rounding must be one of {known}, not {self.rounding!r}")
        types = (None, "float16", "bfloat16")
        require(self.scales in types, self.name, f"scales must be one of {types[1:]}, not {self.scales!r}")
        require(self.state_bits in (32, 8), self.name, f"state_bits must be 32 or 8, not {self.state_bits!r}")
        require(
            self.scales is None or self.rounding != "learned",
            self.name,
            "learned rounding stores no scales until freeze(): leave scales out",
        )
        if self.trainable:
            require(
                self.bits == 8 or self.rounding == "stochastic",
                self.name,
                "4 bits train by stochastic rounding: choose it, or bits=8",
            )
            require(
                self.rounding != "nearest",
                self.name,
                "training with rounding='nearest' would lose every update below half a step: "
                "choose rounding='stochastic' or 'learned'",
            )
        else:
            require(self.rounding != "learned", self.name, "learned rounding is for training: set trainable=True")

    @property
    def _learned(self) -> bool:
        return self.rounding == "learned"

    @property
    def trains(self) -> bool:
        return self.trainable

    def for_training(self) -> Quantized:
        """Stochastic rounding, which stores codes alone."""
        return self if self.trainable else replace(self, rounding="stochastic", trainable=True)

    @property
    def levels(self) -> int:
        """The largest code."""
        return 2**self.bits - 1

    def row_width(self, dim: int) -> int:
        """Bytes of a row's codes."""
        return -(-dim * self.bits // 8)

    def grid_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Type of zero and step in a table of type `dtype`."""
        return dtype if self.scales is None else getattr(torch, self.scales)

    def num_parameters(self, num_rows: int, dim: int) -> int:
        return num_rows * (dim + 1) if self._learned else 0

    def num_bytes(self, num_rows: int, dim: int, dtype: torch.dtype = torch.float32) -> int:
        if self._learned:
            return self.num_parameters(num_rows, dim) * dtype.itemsize
        return num_rows * (self.row_width(dim) + 2 * self.grid_dtype(dtype).itemsize)

    def _build(self, num_rows: int, dim: int, options: TableOptions) -> QuantizedTable | LearnedRoundingTable:
        table: QuantizedTable | LearnedRoundingTable
        if self._learned:
            table = LearnedRoundingTable(self, num_rows, dim, options)
        elif self.trainable:
            table = StochasticRoundingTable(self, num_rows, dim, options)
        else:
            table = QuantizedTable(self, num_rows, dim, options)
        std = dense_std(num_rows) if options.init_std is None else options.init_std
        table.initialize(std, options.generator)
        return table

    @classmethod
    def for_bytes(cls, num_rows: int, dim: int, num_bytes: int) -> Quantized:
        options = (cls(bits=8), cls(bits=4))
        for method in options:
            if method.num_bytes(num_rows, dim) <= num_bytes:
                return method
        smallest = options[-1].num_bytes(num_rows, dim)
        raise ConfigError(f"{cls.name}: {num_rows} rows of dim {dim} take at least {smallest} bytes, not {num_bytes}")


class QuantizedTable(Table):
    """Frozen codes: `codes` [num_rows, row_width] uint8 and `grid` [num_rows, 2] (zero, step), both buffers."""

    def __init__(self, method: Quantized, num_rows: int, dim: int, options: TableOptions):
        super().__init__(method, num_rows, dim, options)
        self.method: Quantized = method
        width, device = method.row_width(dim), options.device
        self.register_buffer("codes", torch.zeros(num_rows, width, dtype=torch.uint8, device=device))
        self.register_buffer("grid", torch.zeros(num_rows, 2, dtype=method.grid_dtype(options.dtype), device=device))
        self.codes: Tensor
        self.grid: Tensor

    def initialize(self, std: float, generator: torch.Generator | None = None) -> None:
        """Draw fresh rows, block by block: the table never exists in floating point. None on the meta device."""
        if self.codes.is_meta:
            return
        dtype = torch.promote_types(self.row_dtype, torch.float32)
        for place in block_slices(self.num_rows, self.dim):
            rows = torch.empty(place.stop - place.start, self.dim, dtype=dtype, device=self.device)
            rows.normal_(0.0, std, generator=generator)
            if self.padding_idx is not None and place.start <= self.padding_idx < place.stop:
                rows[self.padding_idx - place.start] = 0
            self._store(place, rows, row_grid(rows, self.method.levels, self.grid.dtype), generator)

    def _store(
        self, place: slice | Tensor, rows: Tensor, grid: Tensor, generator: torch.Generator | None = None
    ) -> None:
        """Round rows to their grids and store both."""
        codes = quantize(rows, grid, self.method.levels, self.method.rounding == "stochastic", generator)
        self.codes[place] = codes if self.method.bits == 8 else pack_pairs(codes)
        self.grid[place] = grid

    def _rows(self, ids: Tensor) -> Tensor:
        return self._stored_rows(ids)

    def _stored_rows(self, ids: Tensor) -> Tensor:
        """Rows [U, dim] as they are stored, without gradients."""
        grid = self.grid.index_select(0, ids)
        return dequantize(self._codes(ids), grid if self.method.scales is None else grid.to(self.row_dtype))

    def _codes(self, ids: Tensor) -> Tensor:
        """Codes [U, dim] of rows, one to a byte."""
        codes = self.codes.index_select(0, ids)
        return codes if self.method.bits == 8 else unpack_pairs(codes, self.dim)

    def _apply(self, fn: Any, recurse: bool = True) -> QuantizedTable:
        super()._apply(fn, recurse)
        self.grid = self.grid.to(self.method.grid_dtype(self.grid.dtype))  # scales keep their type in casts
        return self

    def freeze(self) -> QuantizedTable:
        """This table without training: the same codes, shared."""
        frozen = _frozen_like(self, self.grid.dtype if self.method.scales is None else self.row_dtype, "meta")
        frozen.codes, frozen.grid = self.codes, self.grid
        return frozen

    @classmethod
    @torch.no_grad()
    def from_dense(cls, weight: Tensor, table: Table) -> Table:
        """Round every row on its own grid, in blocks; the memory is one block.

        8 bits use the range of the row, 4 bits search for a grid of less error. Stochastic rounding draws from torch's
        global generator.
        """
        assert isinstance(table, QuantizedTable)
        check_shape(weight, table)
        choose = row_grid if table.method.bits == 8 else best_row_grid
        limit = torch.finfo(table.grid.dtype).max
        for ids, rows in row_blocks(weight, table.device):
            beyond = rows.abs().amax(dim=1) > limit
            if bool(beyond.any()):
                row, name = int(ids[beyond][0]), str(table.grid.dtype).removeprefix("torch.")
                raise ConfigError(
                    f"quantized: row {row} has a number beyond {limit:,.0f}, the largest of its scales in {name}: use "
                    "scales='bfloat16', or None"
                )
            table._store(ids, rows, choose(rows, table.method.levels, table.grid.dtype))
        table.fit_error = relative_error(weight, table)
        return table


class StochasticRoundingTable(QuantizedTable):
    """Codes that train, without a copy in floating point: low-precision training as in Li et al., arXiv:2212.05735.

    There is no parameter for an optimizer. A backward pass stores the gradients of the rows it looked up here, several
    add up, and `apply_gradients(lr)` takes one step of SGD: touched rows are decoded, updated and rounded
    stochastically. A row keeps its grid while it fits, so that numbers without gradient do not move at all.
    `Optimizers` take the steps of any optimizer, with state for each row or number (`optim.code_rows`).
    """

    has_one_grid: ClassVar[bool] = False
    """Whether all rows have one grid, [1, 2], that does not change."""

    def __init__(self, method: Quantized, num_rows: int, dim: int, options: TableOptions):
        super().__init__(method, num_rows, dim, options)
        self.pending: list[RowGradient | GradientShare] = []
        """Gradients of backward passes that were not applied."""

    def _rows(self, ids: Tensor) -> Tensor:
        rows = self._stored_rows(ids)
        return self._collected(rows, ids) if torch.is_grad_enabled() else rows

    @eager
    def _collected(self, rows: Tensor, ids: Tensor) -> Tensor:
        """The rows as a leaf of the graph whose gradient is stored here."""
        if transforms() or torch.compiler.is_exporting():
            raise ConfigError(
                "a quantized table that trains by stochastic rounding collects its gradients itself, which torch.func "
                "and torch.export do not allow: look rows up within torch.no_grad(), or freeze() the table"
            )

        rows = rows.detach().requires_grad_()
        rows.register_hook(lambda gradient: self.collect(RowGradient(ids, gradient)))
        return rows

    def collect(self, gradient: RowGradient | GradientShare) -> None:
        """Store the gradient of a backward pass until it is applied."""
        if len(self.pending) >= MAX_PENDING:
            raise ConfigError(
                f"{MAX_PENDING} backward passes went through a trainable quantized table and none of their "
                "gradients was applied: call apply_gradients(lr) at every step, or zero_pending()"
            )
        self.pending.append(gradient)

    def own_gradient(self) -> RowGradient:
        """All gradients that were not applied, at least one, as one."""
        return join([each.own(self.row_dtype) if isinstance(each, GradientShare) else each for each in self.pending])

    def pending_gradient(self) -> tuple[Tensor, Tensor]:
        """Distinct ids [U], ascending, and the gradient [U, dim] of each that has not been applied."""
        for touched in code_updates.sum_pending([self]):
            return touched.ids, touched.gradients
        return torch.empty(0, dtype=torch.int64, device=self.device), self.grid.new_empty(
            0, self.dim, dtype=self.row_dtype
        )

    def zero_pending(self) -> None:
        """Drop the gradients that were not applied."""
        self.pending.clear()

    def apply_gradients(self, lr: float) -> None:
        """One step of SGD on the rows touched since the last one, rounded by torch's global generator."""
        self.apply_row_update(lambda _, gradients: -lr * gradients)

    def apply_row_update(self, change: Callable[[Tensor, Tensor], Tensor], keys: tuple[int, int] | None = None) -> None:
        """Add `change(ids [U], gradients [U, dim])` [U, dim] to the touched rows, and drop their gradients.

        The hook for an optimizer with state of its own; ids are distinct and ascending. `keys` are those of
        `code_updates.apply_row_updates`.
        """
        code_updates.apply_row_updates(
            [self], lambda touched, gradients: change(touched[0].ids, gradients), None if keys is None else [keys]
        )


class LearnedRoundingTable(Table):
    """Float rows that are rounded to 8 bits whenever they are looked up, with a learned step for every row.

    `row = step * round(clamp(w / step, -127, 127))`, `step = exp(log_step) * max|w| / 127`. Gradients are those of
    learned step size quantisation (Esser et al., arXiv:1902.08153): straight through to w where it is not clipped, and
    `round(w/step) - w/step` (or the clip) to the step. The step is learned as a factor of the row's own range, because
    fresh rows are tiny and grow a hundredfold: an absolute step would first clip them and then overshoot. These
    gradients are estimates: their own derivatives are those of the formulas with the rounding held fixed.

    `stored` [num_rows, dim] and `log_step` [num_rows, 1] count as floating point numbers; `freeze()` gives the table of
    codes with the same rows.
    """

    def __init__(self, method: Quantized, num_rows: int, dim: int, options: TableOptions):
        super().__init__(method, num_rows, dim, options)
        self.method: Quantized = method
        stored = nn.Parameter(torch.empty(num_rows, dim, dtype=options.dtype, device=options.device))
        self.register_parameter("weight", stored)
        self.log_step = nn.Parameter(torch.zeros(num_rows, 1, dtype=options.dtype, device=options.device))

    @property
    def stored(self) -> nn.Parameter:
        """Numbers before rounding; `weight` in state dicts, but it is not the table's weight."""
        stored = self._parameters["weight"]
        assert stored is not None
        return stored

    @torch.no_grad()
    def initialize(self, std: float, generator: torch.Generator | None = None) -> None:
        """Draw fresh rows."""
        self.stored.normal_(0.0, std, generator=generator)
        if self.padding_idx is not None:
            self.stored[self.padding_idx].zero_()

    def _rows(self, ids: Tensor) -> Tensor:
        weight = F.embedding(ids, self.stored, sparse=self.sparse)
        codes, step = _rounded(weight, F.embedding(ids, self.log_step, sparse=self.sparse))
        return codes * step

    def row_parameters(self) -> dict[str, nn.Parameter]:
        return {"weight": self.stored, "log_step": self.log_step}

    @torch.no_grad()
    def freeze(self) -> QuantizedTable:
        """The frozen table of 8-bit codes whose rows are the rounded rows of this one."""
        frozen = _frozen_like(self, self.stored.dtype, self.device)
        for place in block_slices(self.num_rows, self.dim):
            codes, step = _rounded(self.stored[place], self.log_step[place])
            frozen.codes[place] = (codes.round() + 128).to(torch.uint8)
            frozen.grid[place] = torch.cat((-128 * step, step), dim=1)
        return frozen

    @classmethod
    @torch.no_grad()
    def from_dense(cls, weight: Tensor, table: Table) -> Table:
        """Copy the numbers, and take the range of each row; the error is that of their rounding."""
        assert isinstance(table, LearnedRoundingTable)
        check_shape(weight, table)
        for ids, rows in row_blocks(weight, table.device):
            table.stored[ids] = rows.to(table.stored.dtype)
        table.log_step.zero_()
        table.fit_error = relative_error(weight, table)
        return table


def _rounded(weight: Tensor, log_step: Tensor) -> tuple[Tensor, Tensor]:
    """Whole numbers [U, dim] from -127 to 127 and the step [U, 1] of every row, with gradients as if not rounded."""
    largest = weight.detach().abs().amax(dim=1, keepdim=True).clamp(min=torch.finfo(weight.dtype).tiny * 127)
    step = log_step.exp() * (largest / 127)
    # Clip just inside the next level, so that rounding in w / step never clips the largest number's gradient.
    clipped = (weight / step).clamp(-127.49, 127.49)
    return clipped + (clipped.round() - clipped).detach(), step


def _frozen_like(table: QuantizedTable | LearnedRoundingTable, dtype: torch.dtype, device: object) -> QuantizedTable:
    """A table of frozen codes like `table`, all zeros."""
    options = TableOptions(
        mode=table.mode,
        padding_idx=table.padding_idx,
        include_last_offset=table.include_last_offset,
        dtype=dtype,
        device=device,  # type: ignore[arg-type]
    )
    return QuantizedTable(
        Quantized(bits=table.method.bits, scales=table.method.scales), table.num_rows, table.dim, options
    )
