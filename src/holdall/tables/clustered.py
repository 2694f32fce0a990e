"""Clustered table: every id has one of a few shared rows, found by k-means over a trained table.

Wu, Xu, Zhang, Chen and Wang, "SAEC: Similarity-Aware Embedding Compression in Recommendation Systems",
arXiv:1903.00103 (2019): the most frequent rows seed the clusters, and the shared rows continue to train.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holdall.common.errors import ConfigError
from holdall.kernels.row_gradient import RowGradient, sum_by_row
from holdall.tables.fitting import check_shape, relative_error, row_blocks
from holdall.tables.method import Method, TableOptions, dense_std, require
from holdall.tables.table import Table

SCORE_NUMBERS = 1 << 22
"""Distances in one block, 16 MB in float32."""

MAX_REVIVED = 1024
"""Empty clusters that one pass of k-means gives a new row to."""


def index_dtype(clusters: int) -> torch.dtype:
    """The smallest type that numbers `clusters` clusters."""
    return torch.uint8 if clusters <= 2**8 else torch.int16 if clusters <= 2**15 else torch.int32


@dataclass(frozen=True)
class Clustered(Method):
    """`row_i = centroids[assignment[i]]`; a fit sets the assignment, the centroids train.

    A row takes 1, 2 or 4 bytes, by the number of clusters, beside `clusters * dim` numbers. In a fresh table, not yet
    fitted, id i has cluster i modulo `clusters`, so the most popular ids have different clusters. With as many clusters
    as rows every row is its own.
    """

    name: ClassVar[str] = "clustered"

    clusters: int
    iterations: int = 10
    """Passes of k-means in a fit, at most; each costs `2 * num_rows * clusters * dim` flops."""

    def __post_init__(self) -> None:
        for what in ("clusters", "iterations"):
            value = getattr(self, what)
            require(isinstance(value, int) and 1 <= value < 2**31, self.name, f"{what} must be at least 1, not {value}")

    def num_parameters(self, num_rows: int, dim: int) -> int:
        return min(self.clusters, num_rows) * dim

    def num_bytes(self, num_rows: int, dim: int, dtype: torch.dtype = torch.float32) -> int:
        index = index_dtype(min(self.clusters, num_rows)).itemsize
        return num_rows * index + self.num_parameters(num_rows, dim) * dtype.itemsize

    def _build(self, num_rows: int, dim: int, options: TableOptions) -> ClusteredTable:
        return ClusteredTable(self, num_rows, dim, options)

    @classmethod
    def for_bytes(cls, num_rows: int, dim: int, num_bytes: int) -> Clustered:
        best = 0
        for dtype, most in ((torch.uint8, 2**8), (torch.int16, 2**15), (torch.int32, 2**31 - 1)):
            fitting = (num_bytes - num_rows * dtype.itemsize) // (4 * dim)
            best = max(best, min(fitting, most, num_rows))
        smallest = num_rows + 4 * dim
        require(best >= 1, cls.name, f"{num_rows} rows of dim {dim} take at least {smallest} bytes, not {num_bytes}")
        return cls(clusters=best)


class ClusteredTable(Table):
    """`assignment` [num_rows], a buffer of small integers, and `centroids` [clusters, dim], gathered by row."""

    def __init__(self, method: Clustered, num_rows: int, dim: int, options: TableOptions):
        super().__init__(method, num_rows, dim, options)
        self.method: Clustered = method
        clusters, device = min(method.clusters, num_rows), options.device
        std = dense_std(num_rows) if options.init_std is None else options.init_std
        centroids = torch.empty(clusters, dim, dtype=options.dtype, device=device)
        self.centroids = nn.Parameter(centroids.normal_(0.0, std, generator=options.generator))
        turn = torch.arange(clusters, device=device).to(index_dtype(clusters))
        assignment = torch.empty(num_rows, dtype=turn.dtype, device=device)
        whole = num_rows // clusters * clusters
        assignment[:whole].view(-1, clusters).copy_(turn)  # modulo, without a temporary of 8 bytes per row
        assignment[whole:] = turn[: num_rows - whole]
        self.register_buffer("assignment", assignment)
        self.assignment: Tensor

    def _rows(self, ids: Tensor) -> Tensor:
        return F.embedding(self.assignment.index_select(0, ids).long(), self.centroids, sparse=self.sparse)

    def row_parameters(self) -> dict[str, nn.Parameter]:
        return {"centroids": self.centroids}

    @classmethod
    def from_dense(cls, weight: Tensor, table: Table) -> Table:
        assert isinstance(table, ClusteredTable)
        table.fit_rows(weight)
        return table

    @torch.no_grad()
    def fit_rows(self, weight: Tensor, counts: Tensor | None = None) -> None:
        """K-means of the rows of `weight` [num_rows, dim], each counting `counts` [num_rows] times (once when None).

        The first distinct rows, the most popular ones, are the seeds, so a table with no more distinct rows than
        clusters is fitted exactly. Empty clusters move to the rows with the largest distance. Deterministic on a
        CPU; one block of rows and one of distances are in memory beside the clusters. `fit_error` does not weigh rows.
        """
        check_shape(weight, self)
        weights = self._checked_counts(counts)
        centroids = _first_distinct_rows(weight, self.centroids.shape[0], self.device)
        for iteration in range(self.method.iterations):
            changed, sums, worst = self._assign(weight, centroids, weights)
            if iteration > 0 and not changed:  # the centroids are the means of these very clusters
                break
            centroids = _means(sums, centroids, worst)
        else:
            self._assign(weight, centroids, weights)
        self.centroids.zero_()  # with fewer distinct rows than clusters the last ones stay unused
        self.centroids[: centroids.shape[0]] = centroids.to(self.centroids.dtype)
        self.fit_error = relative_error(weight, self)

    def _assign(self, weight: Tensor, centroids: Tensor, weights: Tensor | None) -> tuple[bool, Tensor, Tensor]:
        """Give every row its nearest centroid, in one pass over `weight`.

        Returns whether any assignment changed, sums [K, dim + 1] of the weighted rows and weights of each cluster, and
        the distinct rows with the largest weighted distance, worst first.
        """
        dtype = torch.promote_types(weight.dtype, torch.float32)
        sums = centroids.new_zeros(centroids.shape[0], self.dim + 1)
        worst, costs = centroids.new_empty(0, self.dim), centroids.new_empty(0)
        changed = False
        for ids, rows in row_blocks(weight, self.device):
            nearest, distances = _nearest(rows.to(dtype), centroids.to(dtype))
            changed = changed or bool((self.assignment[ids] != nearest).any())
            self.assignment[ids] = nearest.to(self.assignment.dtype)
            weighing = rows.new_ones(len(ids)) if weights is None else weights[ids]
            present, added = sum_by_row(RowGradient(nearest, F.pad(rows, (0, 1), value=1.0), weights=weighing))
            sums[present] += added
            pool = torch.cat((costs, distances.double() * weighing))
            costs, order = pool.topk(min(MAX_REVIVED, len(pool)))
            worst = torch.cat((worst, rows))[order]
        worst = worst[costs > 0]
        return changed, sums, worst[_first_occurrences(worst)]

    def _checked_counts(self, counts: Tensor | None) -> Tensor | None:
        if counts is None:
            return None
        if counts.shape != (self.num_rows,) or bool((counts < 0).any()):
            raise ConfigError(
                f"counts must be {self.num_rows} numbers of at least 0, one per row, not a tensor of shape "
                f"{tuple(counts.shape)} with least value {counts.min().item() if counts.numel() else None}"
            )
        return counts.to(self.device, torch.float64)


def _nearest(rows: Tensor, centroids: Tensor) -> tuple[Tensor, Tensor]:
    """Index [n] of the centroid nearest to each row [n, dim], the first of equals, and the squared distance [n]."""
    halves = centroids.square().sum(dim=1) / 2
    found = []
    for part in rows.split(max(1, SCORE_NUMBERS // centroids.shape[0])):
        least, nearest = torch.addmm(halves, part, centroids.T, alpha=-1).min(dim=1)
        found.append((nearest, (2 * least + part.square().sum(dim=1)).clamp_(min=0)))
    return torch.cat([nearest for nearest, _ in found]), torch.cat([distances for _, distances in found])


def _means(sums: Tensor, centroids: Tensor, worst: Tensor) -> Tensor:
    """New centroids: the mean of each cluster; empty ones move to the `worst` rows while there are any, else stay."""
    mass = sums[:, -1:]
    means = torch.where(mass > 0, sums[:, :-1] / mass, centroids)
    empty = (mass[:, 0] == 0).nonzero()[: worst.shape[0], 0]
    means[empty] = worst[: empty.shape[0]]
    return means


def _first_distinct_rows(weight: Tensor, count: int, device: torch.device) -> Tensor:
    """The first `count` distinct rows (all of them, if there are fewer), in order and in float64."""
    found = torch.empty(0, weight.shape[1], dtype=torch.float64, device=device)
    for _, block in row_blocks(weight, device):
        for rows in block.split(max(count, 4096)):  # mostly the first `count` rows are distinct: done
            pool = torch.cat((found, rows))
            found = pool[_first_occurrences(pool)][:count]
            if found.shape[0] == count:
                return found
    return found


def _first_occurrences(rows: Tensor) -> Tensor:
    """Positions, ascending, of the rows that no earlier row equals."""
    if rows.shape[0] == 0:
        return torch.empty(0, dtype=torch.int64, device=rows.device)
    distinct, inverse = torch.unique(rows, dim=0, return_inverse=True)
    positions = torch.arange(rows.shape[0], device=rows.device)
    first = positions.new_full((distinct.shape[0],), rows.shape[0])
    return first.scatter_reduce_(0, inverse, positions, reduce="amin").sort().values
