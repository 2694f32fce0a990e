"""Fit of codebooks: residual k-means over a weighted sample of rows, and the codes of any rows."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from holdall.tables.kmeans import kmeans, nearest_centroids, spread_seeds

SAMPLE_ROWS = 1 << 15
"""Rows that a codebook is fitted to, at most: 128 for each of 256 codewords."""

SEED_ROWS = 1 << 13
"""Rows of the sample that the first codewords are drawn from, at most."""

FIT_ITERATIONS = 12
"""Passes of k-means over the sample for each part, at most."""


class Sample:
    """Weighted sample of rows that come block by block: priority sampling of Duffield, Lund and Thorup, 2007.

    A row of weight w gets priority w / u, u drawn from (0, 1]; the largest priorities stay. With t the largest
    priority that was dropped, a row that stays counts max(w, t), so that weighted sums over the sample are those over
    all rows in the mean. Rows of weight 0 count only while there is room for all. The draws have a fixed seed.
    """

    def __init__(self, dim: int, num_rows: int = SAMPLE_ROWS):
        self.num_rows = num_rows
        self._rows = torch.empty(0, dim)
        self._weights, self._priorities = torch.empty(2, 0, dtype=torch.float64)
        self._parts = torch.empty(0, dtype=torch.int64)
        self._dropped = 0.0
        self._generator = torch.Generator().manual_seed(0)

    def add(self, rows: Tensor, weights: Tensor | None = None, parts: int = 1) -> None:
        """Add rows [n, dim] of weights [n] (1 when None) that will have codes in the first `parts` parts.

        `rows` may be a whole table, over a memory map too: only those that stay are read.
        """
        draws = 1.0 - torch.rand(len(rows), dtype=torch.float64, generator=self._generator)
        mass = torch.ones_like(draws) if weights is None else weights.detach().to("cpu", torch.float64)
        priorities = torch.cat((self._priorities, mass / draws))
        chosen = torch.arange(len(priorities))
        if len(chosen) > self.num_rows:
            largest, order = priorities.topk(self.num_rows + 1)
            self._dropped = max(self._dropped, float(largest[-1]))
            chosen = order[:-1].sort().values
        old, new = chosen[chosen < len(self._rows)], chosen[chosen >= len(self._rows)] - len(self._rows)
        read = rows.detach()[new.to(rows.device)].to("cpu", torch.float32)
        self._parts = torch.cat((self._parts[old], torch.full((len(new),), parts)))
        self._weights = torch.cat((self._weights[old], mass[new]))
        self._rows, self._priorities = torch.cat((self._rows[old], read)), priorities[chosen]

    def rows(self, part: int) -> tuple[Tensor, Tensor]:
        """Sampled rows [n, dim] that have a code in `part`, heaviest first, and how much each counts [n].

        Rows that all have weight 0 count alike.
        """
        chosen = (self._parts > part).nonzero()[:, 0]
        weights = self._weights[chosen].clamp(min=self._dropped)
        if not bool(weights.any()):
            weights = torch.ones_like(weights)
        weights, order = weights.sort(descending=True, stable=True)
        return self._rows[chosen[order]], weights


def fit_words(sample: Sample, parts: int, num_words: int) -> Tensor:
    """Codewords [parts, num_words, dim] of a sample of rows: k-means of the rows, then of what is left of them.

    With fewer distinct rows than codewords the last codewords are zeros.
    """
    words = torch.zeros(parts, num_words, sample._rows.shape[1])
    for part in range(parts):
        rows, weights = sample.rows(part)
        if len(rows) == 0:
            break
        if part > 0:
            codes = encode(rows, words[:part])
            rows = rows - decode(codes, words[:part])
        assignment = torch.zeros(len(rows), dtype=torch.int64)
        step = -(-len(rows) // SEED_ROWS)
        seeds = spread_seeds(rows[::step], weights[::step], num_words)
        found = kmeans(rows, num_words, FIT_ITERATIONS, weights, assignment, seeds)
        words[part, : len(found)] = found.float()
    return words


def fit_codebook(blocks: Iterable[tuple[Tensor, Tensor | None]], parts: int, bits: int) -> Tensor:
    """Codewords [parts, 2^bits, dim] fitted to blocks of (rows [n, dim], weights [n] or None) of any tables."""
    sample: Sample | None = None
    for rows, weights in blocks:
        sample = sample or Sample(rows.shape[1])
        sample.add(rows, weights, parts)
    assert sample is not None, "a codebook needs rows"
    return fit_words(sample, parts, 2**bits)


def encode(rows: Tensor, words: Tensor) -> Tensor:
    """Codes [n, parts] uint8 of rows [n, dim] in codewords [parts, num_words, dim]: greedily, part after part.

    Costs `2 * n * parts * num_words * dim` flops, one matrix product per part.
    """
    return encode_with_error(rows, words)[0]


def encode_with_error(rows: Tensor, words: Tensor) -> tuple[Tensor, Tensor]:
    """`encode`, and the squared distance [n] of each row from the sum of its codewords."""
    words = words.to(rows.device, torch.promote_types(rows.dtype, torch.float32))
    left = rows.to(words.dtype)
    codes = torch.empty(len(rows), len(words), dtype=torch.uint8, device=rows.device)
    for part, centroids in enumerate(words):
        nearest = nearest_centroids(left, centroids)[0]
        codes[:, part] = nearest.to(torch.uint8)
        left = left - centroids[nearest]
    return codes, left.square().sum(dim=1)


def decode(codes: Tensor, words: Tensor) -> Tensor:
    """Rows [n, dim] of codes [n, parts] in codewords [parts, num_words, dim]."""
    return sum((centroids[codes[:, part].long()] for part, centroids in enumerate(words)), torch.zeros(()))
