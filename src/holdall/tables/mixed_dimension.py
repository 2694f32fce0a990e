"""Mixed-dimension table: narrow rows, and one small matrix that widens them to the model's dim.

Ginart, Naumov, Mudigere, Yang and Zou, "Mixed Dimension Embeddings with Application to Memory-Efficient Recommendation
Systems", arXiv:1909.11810 (2019). Tables of popular rows stay wide, the long ones become narrow: `mixed_dimensions`
gives each table its width by the paper's power rule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holdall.common.errors import ConfigError
from holdall.tables.dense import DenseTable
from holdall.tables.fitting import check_shape, relative_error, row_blocks
from holdall.tables.fixed_grid import FixedGridTable
from holdall.tables.method import Method, TableOptions, dense_std, require
from holdall.tables.quantized import Quantized
from holdall.tables.table import Table


@dataclass(frozen=True)
class MixedDimension(Method):
    """`row_i = N[i] @ P` with a narrow N [num_rows, k] and one projection P [k, dim]; no projection when k >= dim,
    unless N is `trainable` codes, whose scale P has.

    The table has rank k. It takes `k * (num_rows + dim)` numbers, and `2 * k * dim` flops per row: in sum and mean mode
    narrow rows are pooled before they are widened, so that is per bag. With `bits`, a narrow row takes
    `k * bits / 8 + 8` bytes; with `trainable` too, k bytes, and its optimizer state one where it is one number a row.
    """

    name: ClassVar[str] = "mixed_dimension"

    dim: int
    """Width k of the stored rows."""
    bits: Literal[8, 4] | None = None
    """Bits of a number of the narrow rows, rounded as `Quantized` does; such rows are fitted and not trained, the
    projection may be. None: narrow rows are not rounded."""
    trainable: bool = False
    """Whether narrow rows of 8 bits train, by stochastic rounding on one grid for all of them (`FixedGridTable`)."""

    def __post_init__(self) -> None:
        require(isinstance(self.dim, int) and self.dim >= 1, self.name, f"dim must be at least 1, not {self.dim!r}")
        require(self.bits in (8, 4, None), self.name, f"bits must be 8, 4 or none, not {self.bits!r}")
        require(
            not self.trainable or self.bits == 8,
            self.name,
            f"trainable is for narrow rows of bits=8, not {self.bits!r}: those of bits=None train without it",
        )

    @property
    def trains(self) -> bool:
        return self.bits is None or self.trainable

    def num_parameters(self, num_rows: int, dim: int) -> int:
        width = min(self.dim, dim)
        projection = width * dim if width < dim or self.trainable else 0
        return projection if self.bits else num_rows * width + projection

    def num_bytes(self, num_rows: int, dim: int, dtype: torch.dtype = torch.float32) -> int:
        rounded = 0
        if self.trainable:
            rounded = FixedGridTable.bytes_of(num_rows, min(self.dim, dim), dtype)
        elif self.bits:
            rounded = Quantized(bits=self.bits).num_bytes(num_rows, min(self.dim, dim), dtype)
        return rounded + super().num_bytes(num_rows, dim, dtype)

    def _build(self, num_rows: int, dim: int, options: TableOptions) -> MixedDimensionTable:
        return MixedDimensionTable(self, num_rows, dim, options)

    @classmethod
    def for_bytes(cls, num_rows: int, dim: int, num_bytes: int) -> MixedDimension:
        numbers = num_bytes // 4
        if numbers >= num_rows * dim:
            return cls(dim=dim)
        width = numbers // (num_rows + dim)
        smallest = 4 * min(num_rows * dim, num_rows + dim)
        require(width >= 1, cls.name, f"{num_rows} rows of dim {dim} take at least {smallest} bytes, not {num_bytes}")
        return cls(dim=width)


class MixedDimensionTable(Table):
    """`narrow`, a table [num_rows, k], dense or rounded, and `projection` [k, dim].

    Fresh rows are exactly Gaussian, before they are rounded: N is, and the columns of P have one norm. Both have the
    same root mean square, so that an optimizer with one learning rate trains both.
    """

    def __init__(self, method: MixedDimension, num_rows: int, dim: int, options: TableOptions):
        super().__init__(method, num_rows, dim, options)
        self.method: MixedDimension = method
        std = dense_std(num_rows) if options.init_std is None else options.init_std
        width = min(method.dim, dim)
        is_widened = width < dim or method.trainable
        if is_widened:
            std = (std / width**0.5) ** 0.5
        options = replace(options, init_std=std)
        self.narrow: Table
        if method.trainable:
            self.narrow = FixedGridTable(num_rows, width, options)
        elif method.bits:
            self.narrow = Quantized(bits=method.bits)._build(num_rows, width, options)
        else:
            self.narrow = DenseTable(method, num_rows, width, options)
        self.narrow.check_bounds = False  # checked here
        self.projection: nn.Parameter | None = None
        if is_widened:
            directions = torch.empty(width, dim, dtype=options.dtype, device=options.device)
            directions.normal_(generator=options.generator)
            self.projection = nn.Parameter(F.normalize(directions, dim=0) * (std * width**0.5))

    def _rows(self, ids: Tensor) -> Tensor:
        return self._widened(self.narrow._rows(ids))

    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        if self.mode == "max":  # max needs wide rows
            return super().forward(input, offsets, per_sample_weights)
        return self._widened(self.narrow(self._checked(input), offsets, per_sample_weights))

    def _widened(self, narrow: Tensor) -> Tensor:
        return narrow if self.projection is None else narrow @ self.projection

    def row_parameters(self) -> dict[str, nn.Parameter]:
        return {f"narrow.{name}": parameter for name, parameter in self.narrow.row_parameters().items()}

    @classmethod
    @torch.no_grad()
    def from_dense(cls, weight: Tensor, table: Table) -> Table:
        """The truncated SVD, which is the best fit of its rank, from two passes over blocks of rows.

        The first sums the Gram matrix [dim, dim], whose top k eigenvectors V are the projection; the second projects.
        Memory is one block, and the narrow rows where they are to be rounded. As in a fresh table the scale is shared
        evenly by the two factors.
        """
        assert isinstance(table, MixedDimensionTable)
        check_shape(weight, table)
        directions = torch.eye(table.dim, dtype=torch.float64, device=table.device)
        if table.projection is not None:
            gram = torch.zeros_like(directions)
            for _, rows in row_blocks(weight, table.device):
                gram += rows.T @ rows
            width = table.projection.shape[0]
            eigenvalues, eigenvectors = torch.linalg.eigh(gram)
            narrow_rms = float(eigenvalues[-width:].clamp(min=0).sum() / (table.num_rows * width)) ** 0.5
            scale = (narrow_rms * table.dim**0.5) ** 0.5 or 1.0  # eigenvectors have a root mean square of dim**-0.5
            table.projection.copy_(eigenvectors[:, -width:].T * scale)
            directions = eigenvectors[:, -width:] / scale
        if isinstance(table.narrow, DenseTable):
            for ids, rows in row_blocks(weight, table.device):
                table.narrow.weight[ids] = (rows @ directions).to(table.narrow.weight.dtype)
        else:
            narrow = torch.cat([(rows @ directions).to(weight.dtype) for _, rows in row_blocks(weight, table.device)])
            if isinstance(table.narrow, FixedGridTable):
                assert table.projection is not None
                largest = narrow.abs().amax().clamp(min=torch.finfo(narrow.dtype).tiny)
                table.projection.mul_(largest)
                narrow /= largest
            type(table.narrow).from_dense(narrow, table.narrow)
        table.fit_error = relative_error(weight, table)
        return table


def mixed_dimensions(
    popularity: Mapping[str, int | Sequence[int] | Tensor],
    base_dim: int,
    temperature: float = 0.3,
    round_to: int = 1,
) -> dict[str, MixedDimension]:
    """The width of every table by the power rule: `d_f = base_dim * (p_f / max p) ** temperature`.

    p_f is how often an average row of table f is looked up. `popularity` gives for every table either the counts of its
    rows, and p_f is their mean, or its number of rows, and p_f is one over it: each sample looks every table up once.
    Temperature 0 makes all tables `base_dim` wide, 1 makes width proportional to popularity; 0.3 is what the authors'
    code starts from. Widths are rounded to the nearest multiple of `round_to`, from `round_to` up to `base_dim`.
    """
    if base_dim < 1 or not 1 <= round_to <= base_dim:
        raise ConfigError(f"base_dim must be at least round_to and that at least 1, not {base_dim} and {round_to}")
    if not 0 <= temperature <= 1:
        raise ConfigError(f"the temperature of mixed dimensions must be from 0 to 1, not {temperature}")
    if len({isinstance(value, int) for value in popularity.values()}) > 1:
        raise ConfigError("popularity must give counts for every table or numbers of rows for every table, not both")
    looked_up = {name: _mean_popularity(name, value) for name, value in popularity.items()}
    most = max(looked_up.values(), default=1.0) or 1.0
    widths = {name: base_dim * (value / most) ** temperature for name, value in looked_up.items()}
    return {
        name: MixedDimension(dim=min(base_dim, max(1, round(width / round_to)) * round_to))
        for name, width in widths.items()
    }


def _mean_popularity(name: str, value: int | Sequence[int] | Tensor) -> float:
    if isinstance(value, int):
        if value < 1:
            raise ConfigError(f"table '{name}' needs at least 1 row, not {value}")
        return 1.0 / value
    counts = torch.as_tensor(value, dtype=torch.float64)
    if counts.numel() == 0 or bool((counts < 0).any()):
        raise ConfigError(f"the counts of table '{name}' must be one number of at least 0 for each of its rows")
    return float(counts.mean())
