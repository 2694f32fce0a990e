"""ROBE table: rows are blocks of one shared array, at hashed positions; several tables may use the same array.

Desai, Chou and Shrivastava, "Random offset block embedding (ROBE) for compressed embedding tables in deep learning
recommendation systems", 2022.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holdall.common.errors import ConfigError
from holdall.tables.fitting import add_rows, check_shape, relative_error, row_blocks
from holdall.tables.hashing import buckets_of, check_seed, hash_ids, signs_of
from holdall.tables.method import Method, TableOptions, dense_std, require
from holdall.tables.table import Table


@dataclass(frozen=True)
class Robe(Method):
    """`row(id)[j * block : (j + 1) * block] = sign(id, j) * array[position(id, j)]`; one hash gives position and sign.

    Stores `size` numbers, whatever the number of rows. Positions are multiples of `block` (the paper's are arbitrary):
    the array is then a matrix [size / block, block] that is gathered, differentiated and updated by row. Every number
    is shared by as many others as with arbitrary positions, but two blocks are the same or disjoint, so a row should
    have at least four. In training a planted factorisation of dim 16 at 1/4 and 1/20 of the dense size (5 seeds),
    blocks of 4 lost nothing to arbitrary positions of 8 (log loss lower by 0.0003 +- 0.0004); blocks of 8 lost 0.0013,
    and whole rows, which is hashing, 0.01.

    A dim that is no multiple of `block` uses the first numbers of its last block; a dim below `block` makes blocks of
    `dim` numbers.
    """

    name: ClassVar[str] = "robe"

    size: int
    """Numbers in the array, a multiple of `block`."""
    block: int = 4
    """Neighbouring numbers of a row with one position: a quarter of dim is a good choice.

    Larger is faster (a hash and a gather for every block of a row), smaller makes rows more different.
    """
    seed: int = 0
    """Number of the hash function; tables that share an array have different ones."""
    signs: bool = True
    """Whether blocks have random signs, so that shared numbers cancel on average."""

    def __post_init__(self) -> None:
        whole = isinstance(self.block, int) and self.block >= 1
        require(whole, self.name, f"block must be at least 1, not {self.block!r}")
        whole = isinstance(self.size, int) and self.size >= self.block and self.size % self.block == 0
        require(whole, self.name, f"size must be a positive multiple of block {self.block}, not {self.size!r}")
        require(isinstance(self.signs, bool), self.name, f"signs must be true or false, not {self.signs!r}")
        check_seed(self.seed, self.name)

    def shape(self, dim: int) -> tuple[int, int]:
        """Blocks of the array of a table of that dim, and numbers in each."""
        block = min(self.block, dim)
        return self.size // block, block

    def num_parameters(self, num_rows: int, dim: int) -> int:
        places, block = self.shape(dim)
        return places * block

    @classmethod
    def for_bytes(cls, num_rows: int, dim: int, num_bytes: int) -> Robe:
        """As large an array as fits, at most the dense table's, in four blocks per row, or more of at most 16 numbers.

        Block sizes are chosen so that the last block of a row is as full as possible.
        """
        block = -(-dim // max(min(4, dim), -(-dim // 16)))
        require(
            num_bytes >= 4 * block, cls.name, f"a table of dim {dim} takes at least {4 * block} bytes, not {num_bytes}"
        )
        blocks_of_dense = num_rows * -(-dim // block)
        return cls(size=min(num_bytes // (4 * block), blocks_of_dense) * block, block=block)

    def _build(self, num_rows: int, dim: int, options: TableOptions) -> RobeTable:
        return RobeTable(self, num_rows, dim, options)


class RobeTable(Table):
    """`array` [size / block, block], gathered by row."""

    method: Robe

    def __init__(self, method: Robe, num_rows: int, dim: int, options: TableOptions):
        super().__init__(method, num_rows, dim, options)
        self.init_std = dense_std(num_rows) if options.init_std is None else options.init_std
        shape = method.shape(dim)
        self.blocks_per_row = -(-dim // shape[1])
        self.array = nn.Parameter(torch.empty(shape, dtype=options.dtype, device=options.device))
        if not self.array.is_meta:
            self.initialize(options.generator)

    @torch.no_grad()
    def initialize(self, generator: torch.Generator | None = None) -> None:
        """Draw a fresh array."""
        self.array.normal_(0.0, self.init_std, generator=generator)

    def places(self, ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """Position in the array, and sign if any, of every block of the rows of `ids`: [U, blocks_per_row]."""
        blocks = ids[:, None] * self.blocks_per_row + torch.arange(self.blocks_per_row, device=ids.device)
        hashes = hash_ids(blocks, self.method.seed)
        signs = signs_of(hashes, self.array.dtype) if self.method.signs else None
        return buckets_of(hashes, self.array.shape[0]), signs

    def _hash_seed(self) -> int:
        return self.method.seed

    def _rows(self, ids: Tensor) -> Tensor:
        places, signs = self.places(ids)
        blocks = F.embedding(places, self.array, sparse=self.sparse)
        if signs is not None:
            blocks = blocks * signs[:, :, None]
        return blocks.flatten(1)[:, : self.dim]

    def row_parameters(self) -> dict[str, nn.Parameter]:
        return {"array": self.array}

    @classmethod
    @torch.no_grad()
    def from_dense(cls, weight: Tensor, table: Table) -> Table:
        """Every number of the array becomes the mean of those that share it: the least squares fit.

        Two passes over `weight`, a block at a time, and the array twice in float64. The array of several tables has one
        fit for all of them: `fit_shared`.
        """
        assert isinstance(table, RobeTable)
        fit_shared([weight], [table])
        return table


def share_array(tables: Sequence[RobeTable]) -> None:
    """Make `tables` use one array: that of the first of them, its initial scale included.

    The array is then one parameter under several names: `nn.ModuleList(tables).parameters()` has it once, and each
    table's `num_bytes()` counts all of it. Equal ids of different tables must have different positions, so a table
    with the seed of an earlier one gets the next free seed, also in its `method`. A second call changes nothing.
    """
    if not tables:
        return
    first = tables[0].array
    for position, table in enumerate(tables):
        same = (table.array.shape, table.array.dtype, table.array.device) == (first.shape, first.dtype, first.device)
        if not same:
            raise ConfigError(
                f"robe: table {position} has an array of {tuple(table.array.shape)} {table.array.dtype} on "
                f"{table.array.device}, the first one of {tuple(first.shape)} {first.dtype} on {first.device}: give "
                "them the same size, and a block that is at most the smallest dim"
            )
    taken: set[int] = set()
    for table in tables:
        seed = table.method.seed
        while seed in taken:
            seed += 1
        taken.add(seed)
        table.method = replace(table.method, seed=seed)
        table.array = first


@torch.no_grad()
def fit_shared(weights: Sequence[Tensor], tables: Sequence[RobeTable]) -> None:
    """Fit the one array of `tables` to all `weights` at once, and set every table's `fit_error`."""
    array = tables[0].array
    if len(weights) != len(tables) or any(table.array is not array for table in tables):
        raise ConfigError(
            "robe: fit_shared takes one weight a table, and tables that share one array: share_array first"
        )
    sums = torch.zeros(array.shape, dtype=torch.float64, device=array.device)
    counts = torch.zeros_like(sums)
    for weight, table in zip(weights, tables, strict=True):
        check_shape(weight, table)
        padding = (0, table.blocks_per_row * array.shape[1] - table.dim)
        used = F.pad(sums.new_ones(1, table.dim), padding)
        for ids, rows in row_blocks(weight, array.device):
            places, signs = table.places(ids)
            blocks = F.pad(rows, padding).reshape(*places.shape, -1)
            if signs is not None:
                blocks = blocks * signs[:, :, None]
            add_rows(sums, places.reshape(-1), blocks.flatten(0, 1))
            add_rows(counts, places.reshape(-1), used.expand(ids.shape[0], -1).reshape(-1, array.shape[1]))
    array.copy_(sums / counts.clamp_min(1))
    for weight, table in zip(weights, tables, strict=True):
        table.fit_error = relative_error(weight, table)
