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

from holdall.tables.fitting import check_counts, check_shape, relative_error
from holdall.tables.kmeans import kmeans
from holdall.tables.method import Method, TableOptions, dense_std, require
from holdall.tables.table import Table


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
        table.fit_rows(weight)
        return table

    @torch.no_grad()
    def fit_rows(self, weight: Tensor, counts: Tensor | None = None) -> None:
        """K-means of the rows of `weight` [num_rows, dim], each counting `counts` [num_rows] times (once when None).

        The first rows, the most popular ones, are the seeds: see `kmeans`. `fit_error` does not weigh rows.
        """
        check_shape(weight, self)
        weights = check_counts(counts, self)
        centroids = kmeans(weight, self.centroids.shape[0], self.method.iterations, weights, self.assignment)
        self.centroids.zero_()  # with fewer distinct rows than clusters the last ones stay unused
        self.centroids[: centroids.shape[0]] = centroids.to(self.centroids.dtype)
        self.fit_error = relative_error(weight, self)
