"""K-means over the rows of a table, a block at a time: deterministic on a CPU, in bounded memory."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from holdall.kernels.row_gradient import RowGradient, sum_by_row
from holdall.tables.fitting import row_blocks

SCORE_NUMBERS = 1 << 22
"""Distances in one block, 16 MB in float32."""

MAX_REVIVED = 1024
"""Empty clusters that one pass of k-means gives a new row to."""


def kmeans(
    weight: Tensor,
    clusters: int,
    iterations: int,
    weights: Tensor | None,
    assignment: Tensor,
    seeds: Tensor | None = None,
) -> Tensor:
    """Centroids [K, dim] in float64 of the rows of `weight` [n, dim], K at most `clusters`; sets `assignment` [n].

    Row i counts `weights[i]` times (once when None). `seeds` [K, dim] in float64 are the first centroids; when None the
    first distinct rows, so that rows with no more distinct ones than clusters are fitted exactly; K is their number.
    Empty clusters move to the rows with the largest weighted distance. The device is that of `assignment`, an integer
    type that can number the clusters. One block of rows and one of distances are in memory beside the clusters. A pass
    costs `2 * n * K * dim` flops.
    """
    centroids = _first_distinct_rows(weight, clusters, assignment.device) if seeds is None else seeds
    for iteration in range(iterations):
        changed, sums, worst = _assign(weight, centroids, weights, assignment)
        if iteration > 0 and not changed:  # the centroids are the means of these very clusters
            return centroids
        centroids = _means(sums, centroids, worst)
    _assign(weight, centroids, weights, assignment)
    return centroids


def nearest_centroids(rows: Tensor, centroids: Tensor) -> tuple[Tensor, Tensor]:
    """Index [n] of the centroid nearest to each row [n, dim], the first of equals, and the squared distance [n]."""
    halves = centroids.square().sum(dim=1) / 2
    found = []
    for part in rows.split(max(1, SCORE_NUMBERS // centroids.shape[0])):
        least, nearest = torch.addmm(halves, part, centroids.T, alpha=-1).min(dim=1)
        found.append((nearest, (2 * least + part.square().sum(dim=1)).clamp_(min=0)))
    return torch.cat([nearest for nearest, _ in found]), torch.cat([distances for _, distances in found])


def spread_seeds(rows: Tensor, weights: Tensor, count: int) -> Tensor:
    """Seeds [K, dim] in float64 that are far apart: k-means++ of Arthur and Vassilvitskii, 2007; the draws are fixed.

    Each is a row drawn in proportion to its weight times its squared distance from the nearest seed before. There are
    fewer than `count` only if there are fewer distinct rows. Costs `2 * n * K * dim` flops.
    """
    rows, generator = rows.double(), torch.Generator(rows.device).manual_seed(0)
    squares = rows.square().sum(dim=1)
    tiny = 1e-12 * squares  # the rounding of a distance, which is computed as a difference

    def distances_from(place: Tensor) -> Tensor:
        found = torch.addmv(squares + squares[place], rows, rows[place][0], alpha=-2)
        return torch.where(found > tiny, found, 0)

    places = [torch.multinomial(weights, 1, generator=generator)]
    distances = distances_from(places[0])
    while len(places) < count:
        costs = weights * distances
        if not bool(costs.any()):
            break
        places.append(torch.multinomial(costs, 1, generator=generator))
        distances = torch.minimum(distances, distances_from(places[-1]))
    return rows[torch.cat(places)]


def _assign(
    weight: Tensor, centroids: Tensor, weights: Tensor | None, assignment: Tensor
) -> tuple[bool, Tensor, Tensor]:
    """Give every row its nearest centroid, in one pass over `weight`.

    Returns whether any assignment changed, sums [K, dim + 1] of the weighted rows and weights of each cluster, and the
    distinct rows with the largest weighted distance, worst first.
    """
    dim = centroids.shape[1]
    dtype = torch.promote_types(weight.dtype, torch.float32)
    sums = centroids.new_zeros(centroids.shape[0], dim + 1)
    worst, costs = centroids.new_empty(0, dim), centroids.new_empty(0)
    changed = False
    for ids, rows in row_blocks(weight, assignment.device):
        nearest, distances = nearest_centroids(rows.to(dtype), centroids.to(dtype))
        changed = changed or bool((assignment[ids] != nearest).any())
        assignment[ids] = nearest.to(assignment.dtype)
        weighing = rows.new_ones(len(ids)) if weights is None else weights[ids]
        present, added = sum_by_row(RowGradient(nearest, F.pad(rows, (0, 1), value=1.0), weights=weighing))
        sums[present] += added
        pool = torch.cat((costs, distances.double() * weighing))
        costs, order = pool.topk(min(MAX_REVIVED, len(pool)))
        worst = torch.cat((worst, rows))[order]
    worst = worst[costs > 0]
    return changed, sums, worst[_first_occurrences(worst)]


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
