"""JL-sketch table: a few numbers per row, mapped to the full dim by the transpose of a fixed random transform."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holdall.tables.fitting import check_shape, relative_error, row_blocks
from holdall.tables.hashing import check_seed, hash_ids, signs_of
from holdall.tables.method import Method, TableOptions, dense_std, require
from holdall.tables.table import Table


@dataclass(frozen=True)
class Sketch(Method):
    """`row(id) = stored[id] @ transform`, where `transform` is fixed, random, and has orthonormal rows.

    The vector is cut into `chunks`, each with its own part of the stored numbers and its own transform, so `transform`
    is block diagonal: a Johnson-Lindenstrauss sketch of every chunk, mapped back by the transpose. With orthonormal
    rows, SGD on the stored numbers is SGD on dense rows within the subspace, at the same learning rate.

    Stores `num_rows * dim` trained numbers and `dim` times the table's dim fixed ones; a lookup costs
    `2 * dim * table.dim` flops. `dim` is at most the table's and `chunks` at most `dim`; larger ones are cut to that.
    """

    name: ClassVar[str] = "sketch"

    dim: int
    """Numbers stored for each row, over all chunks."""
    chunks: int = 1
    """Pieces of the vector that are sketched separately; sizes differ by one where they do not divide evenly."""
    seed: int = 0
    """Number of the random transform."""

    def __post_init__(self) -> None:
        require(isinstance(self.dim, int) and self.dim >= 1, self.name, f"dim must be at least 1, not {self.dim!r}")
        valid = isinstance(self.chunks, int) and 1 <= self.chunks <= self.dim
        require(valid, self.name, f"chunks must be from 1 to dim ({self.dim}), not {self.chunks!r}")
        check_seed(self.seed, self.name)

    def num_parameters(self, num_rows: int, dim: int) -> int:
        return num_rows * min(self.dim, dim)

    def num_bytes(self, num_rows: int, dim: int, dtype: torch.dtype = torch.float32) -> int:
        return (num_rows + dim) * min(self.dim, dim) * dtype.itemsize

    @classmethod
    def for_bytes(cls, num_rows: int, dim: int, num_bytes: int) -> Sketch:
        """As many stored numbers per row as fit beside the transform, at most `dim`, in one chunk."""
        smallest = 4 * (num_rows + dim)
        require(
            num_bytes >= smallest,
            cls.name,
            f"a table of {num_rows} rows of dim {dim} takes at least {smallest} bytes (a number for every id), "
            f"not {num_bytes}; the hash methods go lower",
        )
        return cls(dim=min(dim, num_bytes // smallest))

    def _build(self, num_rows: int, dim: int, options: TableOptions) -> SketchTable:
        return SketchTable(self, num_rows, dim, options)


class SketchTable(Table):
    """`stored` [num_rows, k], gathered by row, and the buffer `transform` [k, dim]."""

    method: Sketch
    transform: Tensor

    def __init__(self, method: Sketch, num_rows: int, dim: int, options: TableOptions):
        super().__init__(method, num_rows, dim, options)
        self.init_std = dense_std(num_rows) if options.init_std is None else options.init_std
        stored = min(method.dim, dim)
        self.stored = nn.Parameter(torch.empty(num_rows, stored, dtype=options.dtype, device=options.device))
        self.register_buffer("transform", torch.empty(stored, dim, dtype=options.dtype, device=options.device))
        if not self.stored.is_meta:
            self.initialize(options.generator)

    @torch.no_grad()
    def initialize(self, generator: torch.Generator | None = None) -> None:
        """Make the transform of the seed and draw fresh stored numbers.

        The columns of a chunk's transform all have the norm sqrt(k / n), for k stored numbers and n of the vector, so
        Gaussian numbers of deviation `std * sqrt(n / k)` give rows that are exactly Gaussian of deviation `std`.
        """
        num_stored, dim = self.transform.shape
        self.transform.zero_()
        self.stored.normal_(0.0, self.init_std, generator=generator)
        row = column = 0
        chunks = min(self.method.chunks, num_stored)
        for k, n in zip(_parts(num_stored, chunks), _parts(dim, chunks), strict=True):
            block = random_transform(k, n, self.method.seed + row)
            self.transform[row : row + k, column : column + n] = block.to(self.transform)
            self.stored[:, row : row + k] *= math.sqrt(n / k)
            row, column = row + k, column + n

    def _rows(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.stored, sparse=self.sparse) @ self.transform

    def row_parameters(self) -> dict[str, nn.Parameter]:
        return {"stored": self.stored}

    @classmethod
    @torch.no_grad()
    def from_dense(cls, weight: Tensor, table: Table) -> Table:
        """The projection on the rows of the transform: the least squares fit. Two passes, a block at a time."""
        assert isinstance(table, SketchTable)
        check_shape(weight, table)
        back = table.transform.double().T
        for ids, rows in row_blocks(weight, table.stored.device):
            table.stored[ids] = (rows @ back).to(table.stored.dtype)
        table.fit_error = relative_error(weight, table)
        return table


def random_transform(k: int, n: int, seed: int) -> Tensor:
    """A random [k, n] matrix in float64 with orthonormal rows and columns that all have the norm sqrt(k / n), k <= n.

    Rows of a discrete Hartley transform, `cas(2 pi f t / n) / sqrt(n)` with `cas = cos + sin`, its columns t with
    random signs and in random order. The squares of frequencies f and n - f add up to the same in every column, so
    frequencies are drawn in such pairs, and those that are their own partner (0, and n / 2 for even n) alone.
    """
    assert 1 <= k <= n
    bits = hash_ids(torch.arange(3 * n), seed)
    pairs = 1 + bits[2 * n : 2 * n + (n - 1) // 2].argsort()
    alone = [0] if n % 2 else [0, n // 2]
    num_alone = k % 2 if k <= 2 * len(pairs) + k % 2 else k - 2 * len(pairs)
    drawn = pairs[: (k - num_alone) // 2]
    frequencies = torch.cat([torch.tensor(alone[:num_alone], dtype=torch.int64), drawn, n - drawn])
    places = bits[n : 2 * n].argsort()
    angles = (frequencies[:, None] * places % n).double() * (2 * math.pi / n)
    return (angles.cos() + angles.sin()) * signs_of(bits[:n], torch.float64) / math.sqrt(n)


def _parts(total: int, pieces: int) -> list[int]:
    """`total` cut into `pieces` whole numbers that differ by at most one, the larger first."""
    return [total // pieces + (piece < total % pieces) for piece in range(pieces)]
