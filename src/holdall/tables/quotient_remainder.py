"""Quotient-remainder table: an id is the pair of its quotient and its remainder by `buckets`, each with a small table.

Shi et al., "Compositional embeddings using complementary partitions for memory-efficient recommendation systems", 2019.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holdall.tables.fitting import FIT_GAIN, FIT_ROUNDS, check_shape, grid_tiles, relative_error
from holdall.tables.hashing import hash_ids, signs_of
from holdall.tables.method import Method, TableOptions, dense_std, require
from holdall.tables.table import Table


@dataclass(frozen=True)
class QuotientRemainder(Method):
    """`row(id) = remainder[id mod buckets] ∘ quotient[id div buckets]`, combined for every id before pooling.

    Stores `(buckets + ceil(num_rows / buckets)) * dim` numbers, half of that with "concat"; least when `buckets` is
    near sqrt(num_rows). No two ids have the same pair. More buckets than rows are stored as `num_rows`.
    """

    name: ClassVar[str] = "quotient_remainder"

    buckets: int
    """Rows of the remainder table."""
    operation: Literal["mult", "add", "concat"] = "mult"
    """Combination of the two rows: their product, their sum, or side by side.

    "concat" gives the first half of the dim to the remainder (the larger half, when dim is odd) and the second to the
    quotient. A dim of 1 has no second half: its ids with the same remainder share their one number.
    """

    def __post_init__(self) -> None:
        require(
            isinstance(self.buckets, int) and self.buckets >= 1,
            self.name,
            f"buckets must be at least 1, not {self.buckets!r}",
        )
        known = ("mult", "add", "concat")
        require(self.operation in known, self.name, f"operation must be one of {known}, not {self.operation!r}")

    def shapes(self, num_rows: int, dim: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Shapes of the remainder table and of the quotient table."""
        buckets = min(self.buckets, num_rows)
        widths = (dim - dim // 2, dim // 2) if self.operation == "concat" else (dim, dim)
        return (buckets, widths[0]), (-(-num_rows // buckets), widths[1])

    def num_parameters(self, num_rows: int, dim: int) -> int:
        return sum(rows * width for rows, width in self.shapes(num_rows, dim))

    @classmethod
    def for_bytes(cls, num_rows: int, dim: int, num_bytes: int) -> QuotientRemainder:
        """The product with the most buckets that fit: the most popular `buckets` ids then differ in a whole row."""
        budget = num_bytes // (4 * dim)
        fewest = math.isqrt(4 * num_rows - 1) + 1  # min over b of b + ceil(n / b) is ceil(2 sqrt(n))
        require(
            budget >= fewest,
            cls.name,
            f"a table of {num_rows} rows of dim {dim} takes at least {4 * dim * fewest} bytes, not {num_bytes}",
        )
        # The least number q of quotients with q * (budget - q) >= num_rows; that product grows until q = budget / 2.
        quotients = max(1, (budget - math.isqrt(budget * budget - 4 * num_rows) - 1) // 2)
        while quotients * (budget - quotients) < num_rows:
            quotients += 1
        return cls(buckets=min(num_rows, budget - quotients))

    def _build(self, num_rows: int, dim: int, options: TableOptions) -> QuotientRemainderTable:
        return QuotientRemainderTable(self, num_rows, dim, options)


class QuotientRemainderTable(Table):
    """`remainder` [buckets, width] and `quotient` [ceil(num_rows / buckets), width], both gathered by row."""

    method: QuotientRemainder

    def __init__(self, method: QuotientRemainder, num_rows: int, dim: int, options: TableOptions):
        super().__init__(method, num_rows, dim, options)
        self.init_std = dense_std(num_rows) if options.init_std is None else options.init_std
        (self.num_buckets, _), (_, width) = shapes = method.shapes(num_rows, dim)
        remainder, quotient = (torch.empty(shape, dtype=options.dtype, device=options.device) for shape in shapes)
        self.remainder = nn.Parameter(remainder)
        self.quotient = nn.Parameter(quotient) if width else None
        if not self.remainder.is_meta:
            self.initialize(options.generator)

    @torch.no_grad()
    def initialize(self, generator: torch.Generator | None = None) -> None:
        """Draw fresh tables whose combined rows are Gaussian with mean 0 and the deviation asked for.

        A product is exactly so when one factor is a random sign and the other Gaussian: the larger table, which has
        more to draw, is the Gaussian one, and both have the deviation sqrt(std).
        """
        tables = [table for table in (self.remainder, self.quotient) if table is not None]
        scale = {"mult": math.sqrt(self.init_std), "add": self.init_std / math.sqrt(2), "concat": self.init_std}
        for table in tables:
            table.normal_(0.0, scale[self.method.operation], generator=generator)
        if self.method.operation == "mult":
            smaller = min(tables, key=len)
            smaller.copy_(torch.where(smaller < 0, -scale["mult"], scale["mult"]))

    def digits(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Quotient and remainder of each id, in integers."""
        quotients = ids // self.num_buckets
        return quotients, ids - quotients * self.num_buckets

    def _rows(self, ids: Tensor) -> Tensor:
        quotients, remainders = self.digits(ids)
        rows = F.embedding(remainders, self.remainder, sparse=self.sparse)
        if self.quotient is None:
            return rows
        other = F.embedding(quotients, self.quotient, sparse=self.sparse)
        if self.method.operation == "mult":
            return rows * other
        return rows + other if self.method.operation == "add" else torch.cat([rows, other], dim=1)

    def row_parameters(self) -> dict[str, nn.Parameter]:
        named = {"remainder": self.remainder, "quotient": self.quotient}
        return {name: table for name, table in named.items() if table is not None}

    @classmethod
    @torch.no_grad()
    def from_dense(cls, weight: Tensor, table: Table) -> Table:
        """The least squares fit, reading `weight` a block at a time; memory is that of the table in float64, thrice.

        "add" and "concat" have a closed form (two passes over `weight`, the second to measure the error). For "mult"
        every column of `weight` is a grid of quotients by remainders, and its best rank-one approximation is found by
        power iteration (alternating least squares, as the last line of the grid may be incomplete): two passes a round,
        at most `FIT_ROUNDS` rounds, two when the product can equal `weight` exactly.
        """
        assert isinstance(table, QuotientRemainderTable)
        check_shape(weight, table)
        weight_fit = {"mult": _fit_product, "add": _fit_sum, "concat": _fit_halves}[table.method.operation]
        quotient, remainder = weight_fit(weight, table.num_buckets, table.remainder.device)
        table.remainder.copy_(remainder)
        if table.quotient is not None:
            table.quotient.copy_(quotient)
        table.fit_error = relative_error(weight, table)
        return table


def _zeros(weight: Tensor, buckets: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Sums by quotient and by remainder."""
    num_rows, dim = weight.shape
    zeros = torch.zeros(-(-num_rows // buckets), dim, dtype=torch.float64, device=device)
    return zeros, zeros.new_zeros(buckets, dim)


def _lengths(num_rows: int, buckets: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Number of rows with each quotient [Q, 1], and with each remainder [buckets, 1]."""
    full, rest = divmod(num_rows, buckets)
    of_quotient = torch.full((full + (rest > 0), 1), float(buckets), dtype=torch.float64, device=device)
    of_remainder = torch.full((buckets, 1), float(full), dtype=torch.float64, device=device)
    if rest:
        of_quotient[-1] = rest
        of_remainder[:rest] += 1
    return of_quotient, of_remainder


def _fit_halves(weight: Tensor, buckets: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Means of each half of the columns."""
    by_quotient, by_remainder = _zeros(weight, buckets, device)
    for q, r, values in grid_tiles(weight, buckets, device):
        by_quotient[q] += values.sum(1)
        by_remainder[r] += values.sum(0)
    of_quotient, of_remainder = _lengths(weight.shape[0], buckets, device)
    half = weight.shape[1] - weight.shape[1] // 2
    return (by_quotient / of_quotient)[:, half:], (by_remainder / of_remainder)[:, :half]


def _fit_sum(weight: Tensor, buckets: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Two-way means, a[q] + b[r], solved exactly although the last line of the grid may be incomplete.

    With mean(b) = 0, a of a complete line is its mean. The incomplete line has an unknown a of its own, so it cannot
    change the sum of b over its columns: a = mean(line) - mean of b over those columns, b from the complete lines.
    """
    num_rows = weight.shape[0]
    full, rest = divmod(num_rows, buckets)
    by_quotient, by_remainder = _zeros(weight, buckets, device)
    last = by_remainder.new_zeros(rest, weight.shape[1])
    for q, r, values in grid_tiles(weight, buckets, device):
        by_quotient[q] += values.sum(1)
        if q.start < full:
            by_remainder[r] += values.sum(0)
        else:
            last[r] = values[0]
    of_quotient, of_remainder = _lengths(num_rows, buckets, device)
    a = by_quotient / of_quotient
    if rest:
        from_full = by_remainder[:rest] / full - a[:full].mean(0)
        a[full] -= from_full.mean(0)
        by_remainder[:rest] += last - a[full]
    b = (by_remainder - a[:full].sum(0)) / of_remainder
    return a, b


def _fit_product(weight: Tensor, buckets: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """a[q] * b[r] of least square error in every column, both factors of the same mean square."""
    num_rows = weight.shape[0]
    full = num_rows // buckets
    a, b = _zeros(weight, buckets, device)
    signs = signs_of(hash_ids(torch.arange(full, device=device), 0), torch.float64)[:, None, None]
    total = 0.0
    for q, r, values in grid_tiles(weight, buckets, device):
        total += float(values.square().sum())
        if q.start < full:  # complete lines only: then a rank-one column gives its own direction, exactly
            b[r] += (values * signs[q]).sum(0)
    captured = 0.0
    for _ in range(FIT_ROUNDS):
        above, below = torch.zeros_like(a), torch.zeros_like(a)
        for q, r, values in grid_tiles(weight, buckets, device):
            above[q] += (values * b[r]).sum(1)
            below[q] += b[r].square().sum(0)
        a = _ratio(above, below)
        before, captured = captured, float((a * above).sum())
        above, below = torch.zeros_like(b), torch.zeros_like(b)
        for q, r, values in grid_tiles(weight, buckets, device):
            above[r] += (values * a[q][:, None]).sum(0)
            below[r] += a[q].square().sum(0)
        b = _ratio(above, below)
        if captured - before <= FIT_GAIN * total:
            break
    size_a, size_b = a.square().mean(0).sqrt(), b.square().mean(0).sqrt()
    swap = torch.where(size_a * size_b > 0, (size_b / size_a).sqrt(), 1.0)
    return a * swap, b / swap


def _ratio(above: Tensor, below: Tensor) -> Tensor:
    """above / below, and 0 where the other factor is 0."""
    return torch.where(below > 0, above / below, 0.0)
