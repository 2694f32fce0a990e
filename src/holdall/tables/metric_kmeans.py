"""Codewords for the rows of several tables at once, where a change of a row counts differently in every table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from holdall.tables.fitting import add_rows
from holdall.tables.kmeans import nearest_centroids, spread_seeds

ITERATIONS = 15
SEED_ROWS = 1 << 14


@dataclass(frozen=True)
class RowsToCode:
    """Rows of one table that codewords are fitted to."""

    rows: Tensor
    """[n, dim]; may be a memory map."""
    weights: Tensor
    """[n]: what each row counts."""
    transform: Tensor
    """[dim, dim]: the nearest codeword is the one whose difference from a row is shortest after this product."""
    parts: int
    """Codewords that a row is the sum of."""


def metric_codewords(tables: Sequence[RowsToCode], num_words: int, max_rows: int) -> Tensor:
    """Codewords [parts, num_words, dim] of a residual code; tables with fewer parts use the first ones.

    At most `max_rows` rows count: those drawn, with a fixed seed, in proportion to their weights.
    """
    left, weights = _drawn(tables, max_rows)
    words = torch.zeros(max(table.parts for table in tables), num_words, tables[0].rows.shape[1])
    transforms = [table.transform for table in tables]
    for part in range(len(words)):
        coded = [index for index, table in enumerate(tables) if table.parts > part]
        its_transforms = [transforms[index] for index in coded]
        its_rows = [left[index] for index in coded]
        found = _kmeans(its_rows, [weights[index] for index in coded], its_transforms, num_words)
        words[part, : len(found)] = found
        for index in coded:
            nearest = nearest_centroids(left[index] @ transforms[index], words[part] @ transforms[index])[0]
            left[index] = left[index] - words[part][nearest]
    return words


def _drawn(tables: Sequence[RowsToCode], max_rows: int) -> tuple[list[Tensor], list[Tensor]]:
    """Rows of each table and what each counts: all of them, or `max_rows` drawn by weight, those of a draw alike."""
    if sum(len(table.weights) for table in tables) <= max_rows:
        return [table.rows.detach().float().cpu() for table in tables], [table.weights.float() for table in tables]
    generator = torch.Generator().manual_seed(0)
    mass = torch.stack([table.weights.double().sum() for table in tables])
    shares = mass / mass.sum().clamp(min=1e-300) * max_rows
    found: tuple[list[Tensor], list[Tensor]] = ([], [])
    for table, share in zip(tables, shares.tolist(), strict=True):
        weights = table.weights
        count = min(len(weights), max(1, round(share)))
        # The rows of the largest weight / draw: a sample without repetition (Efraimidis and Spirakis, 2006).
        draws = torch.rand(len(weights), dtype=torch.float64, generator=generator).log_().neg_()
        place = (draws / weights.double().clamp(min=1e-300)).topk(count, largest=False).indices.sort().values
        kept = weights[place].double()
        level = float(weights.sum()) / count  # a row that was sure to be drawn counts its weight, the others alike
        found[0].append(table.rows[place].detach().float().cpu())
        found[1].append(kept.clamp(min=level).float())
    return found


def _kmeans(
    tables: Sequence[Tensor], weights: Sequence[Tensor], transforms: Sequence[Tensor], num_words: int
) -> Tensor:
    """Weighted means [K, dim] of the rows nearest to each; K is less than `num_words` for few distinct rows."""
    rows, mass = torch.cat(list(tables)), torch.cat(list(weights)).double()
    step = -(-len(rows) // SEED_ROWS)
    words = spread_seeds(rows[::step], mass[::step].clamp(min=1e-300), num_words).float()
    moved = [table @ transform for table, transform in zip(tables, transforms, strict=True)]
    weighted = F.pad(rows * mass[:, None], (0, 1))
    weighted[:, -1] = mass
    for _ in range(ITERATIONS):
        pairs = zip(moved, transforms, strict=True)
        nearest = torch.cat([nearest_centroids(table, words @ transform)[0] for table, transform in pairs])
        sums = torch.zeros(len(words), words.shape[1] + 1, dtype=torch.float64)
        add_rows(sums, nearest, weighted)
        total = sums[:, -1:]
        words = torch.where(total > 0, sums[:, :-1] / total.clamp(min=1e-300), words).float()
    return words
