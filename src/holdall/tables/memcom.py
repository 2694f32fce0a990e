"""MEmCom table: a row shared by several ids, times one number of each id's own.

Pansare et al., "Learning compressed embeddings for on-device inference", 2022.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holdall.tables.fitting import FIT_GAIN, FIT_ROUNDS, check_shape, grid_tiles, relative_error
from holdall.tables.hashing import hash_ids, signs_of
from holdall.tables.method import Method, TableOptions, dense_std, require
from holdall.tables.table import Table


@dataclass(frozen=True)
class MemCom(Method):
    """`row(id) = shared[id mod buckets] * scale[id]`, plus `shift[id]` on every column with `bias`.

    Stores `buckets * dim + num_rows` numbers (`+ 2 * num_rows` with `bias`). The remainder is used rather than a hash,
    as in the paper: where ids are in order of popularity the first `buckets` of them, the popular ones, never collide.
    More buckets than rows are stored as `num_rows`.
    """

    name: ClassVar[str] = "memcom"

    buckets: int
    """Number of shared rows."""
    bias: bool = False
    """Whether every id also has a number that is added to its row."""

    def __post_init__(self) -> None:
        require(
            isinstance(self.buckets, int) and self.buckets >= 1,
            self.name,
            f"buckets must be at least 1, not {self.buckets!r}",
        )
        require(isinstance(self.bias, bool), self.name, f"bias must be true or false, not {self.bias!r}")

    def num_parameters(self, num_rows: int, dim: int) -> int:
        return min(self.buckets, num_rows) * dim + num_rows * (2 if self.bias else 1)

    @classmethod
    def for_bytes(cls, num_rows: int, dim: int, num_bytes: int) -> MemCom:
        """As many shared rows as fit beside the scales, at most `num_rows`; without bias."""
        smallest = 4 * (num_rows + dim)
        require(
            num_bytes >= smallest,
            cls.name,
            f"a table of {num_rows} rows of dim {dim} takes at least {smallest} bytes (a number for every id), "
            f"not {num_bytes}; the other hash methods go lower",
        )
        return cls(buckets=min(num_rows, (num_bytes // 4 - num_rows) // dim))

    def _build(self, num_rows: int, dim: int, options: TableOptions) -> MemComTable:
        return MemComTable(self, num_rows, dim, options)


class MemComTable(Table):
    """`shared` [buckets, dim], `scale` [num_rows, 1] and, with bias, `shift` [num_rows, 1]: all gathered by row."""

    method: MemCom

    def __init__(self, method: MemCom, num_rows: int, dim: int, options: TableOptions):
        super().__init__(method, num_rows, dim, options)
        self.num_buckets = min(method.buckets, num_rows)
        self.init_std = dense_std(num_rows) if options.init_std is None else options.init_std

        def parameter(rows: int, columns: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(rows, columns, dtype=options.dtype, device=options.device))

        self.shared = parameter(self.num_buckets, dim)
        self.scale = parameter(num_rows, 1)
        self.shift = parameter(num_rows, 1) if method.bias else None
        if not self.shared.is_meta:
            self.initialize(options.generator)

    @torch.no_grad()
    def initialize(self, generator: torch.Generator | None = None) -> None:
        """Draw fresh shared rows; every scale is 1 and every shift 0, so rows start as those of a hashed table."""
        self.shared.normal_(0.0, self.init_std, generator=generator)
        self.scale.fill_(1.0)
        if self.shift is not None:
            self.shift.zero_()

    def buckets(self, ids: Tensor) -> Tensor:
        """The shared row of each id."""
        return ids % self.num_buckets

    def _rows(self, ids: Tensor) -> Tensor:
        rows = F.embedding(self.buckets(ids), self.shared, sparse=self.sparse) * F.embedding(
            ids, self.scale, sparse=self.sparse
        )
        return rows if self.shift is None else rows + F.embedding(ids, self.shift, sparse=self.sparse)

    def row_parameters(self) -> dict[str, nn.Parameter]:
        named = {"shared": self.shared, "scale": self.scale, "shift": self.shift}
        return {name: parameter for name, parameter in named.items() if parameter is not None}

    @classmethod
    @torch.no_grad()
    def from_dense(cls, weight: Tensor, table: Table) -> Table:
        """The least squares fit: in every bucket the strongest direction of its rows, and each row's part along it.

        With bias, each row's mean is its shift and the direction is that of what remains: the best plane through the
        constant direction. The direction comes from power iteration, one pass over `weight` each, `FIT_ROUNDS` at most
        and two when the rows of every bucket are multiples of one. Memory: a block, and `shared` in float64, thrice.
        """
        assert isinstance(table, MemComTable)
        check_shape(weight, table)
        _fit(weight, table)
        table.fit_error = relative_error(weight, table)
        return table


def _fit(weight: Tensor, table: MemComTable) -> None:
    buckets, device, bias = table.num_buckets, table.shared.device, table.method.bias
    direction = _directions(weight, buckets, bias, device)
    strength = torch.zeros(buckets, 3, dtype=torch.float64, device=device)  # per bucket: sum and squares of parts; rows
    for q, r, values in grid_tiles(weight, buckets, device):
        ids = slice(q.start * buckets + r.start, (q.stop - 1) * buckets + r.stop)
        if table.shift is not None:
            table.shift[ids] = values.mean(2).reshape(-1, 1).to(table.shift.dtype)
        part = (_centred(values, bias) * direction[r]).sum(2)
        strength[r] += torch.stack([part.sum(0), part.square().sum(0), torch.ones_like(part).sum(0)], dim=1)
    # Scales of mean square 1 and positive mean, as close to the initial ones as the fit allows.
    size = (strength[:, 1] / strength[:, 2]).sqrt()
    size = torch.where(strength[:, 0] < 0, -size, size)
    table.shared.copy_(direction * size[:, None])
    for q, r, values in grid_tiles(weight, buckets, device):
        ids = slice(q.start * buckets + r.start, (q.stop - 1) * buckets + r.stop)
        part = (_centred(values, bias) * direction[r]).sum(2)
        scale = torch.where(size[r] != 0, part / size[r], 1.0)
        table.scale[ids] = scale.reshape(-1, 1).to(table.scale.dtype)


def _directions(weight: Tensor, buckets: int, bias: bool, device: torch.device) -> Tensor:
    """Unit vectors [buckets, dim] of the strongest direction of the rows of each bucket (0 where those are all 0)."""
    num_rows, dim = weight.shape
    signs = signs_of(hash_ids(torch.arange(-(-num_rows // buckets), device=device), 0), torch.float64)[:, None, None]
    direction = torch.zeros(buckets, dim, dtype=torch.float64, device=device)
    total = 0.0
    for q, r, values in grid_tiles(weight, buckets, device):
        values = _centred(values, bias)
        total += float(values.square().sum())
        direction[r] += (values * signs[q]).sum(0)
    captured = 0.0
    for _ in range(FIT_ROUNDS):
        direction = F.normalize(direction, dim=1, eps=1e-300)
        following = torch.zeros_like(direction)
        before, captured = captured, 0.0
        for _, r, values in grid_tiles(weight, buckets, device):
            values = _centred(values, bias)
            part = (values * direction[r]).sum(2, keepdim=True)
            captured += float(part.square().sum())
            following[r] += (values * part).sum(0)
        direction = following
        if captured - before <= FIT_GAIN * total:
            break
    return F.normalize(direction, dim=1, eps=1e-300)


def _centred(values: Tensor, bias: bool) -> Tensor:
    return values - values.mean(-1, keepdim=True) if bias else values
