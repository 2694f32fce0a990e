"""Curves over the number of rows kept: the points where they are evaluated, and intervals of sampled ones.

A curve is kept at every k up to 16 and then at three places an octave, so that one over ten million rows has about 75
points. Between them coverage is interpolated on a straight line, which lies below a concave curve: a profile never
overstates the coverage.
"""

from __future__ import annotations

from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

EXACT_UP_TO = 16
PER_OCTAVE = 3
CONFIDENCE = 0.95


def log_grid(largest: int) -> npt.NDArray[np.int64]:
    """1, 2, ..., 16, then three numbers an octave, the last one `largest`."""
    assert largest >= 1
    octaves = max(0.0, np.log2(largest / EXACT_UP_TO))
    steps = EXACT_UP_TO * 2.0 ** (np.arange(1, int(octaves * PER_OCTAVE) + 2) / PER_OCTAVE)
    every = np.concatenate([np.arange(1, EXACT_UP_TO + 1), np.round(steps).astype(np.int64), [largest]])
    return np.unique(every[every <= largest])


def cumulative_at(counts: Array, grid: Array, weights: Array | None = None) -> npt.NDArray[np.float64]:
    """Sum of the first k counts at every k of the grid.

    With `weights`, entry i stands for `weights[i]` ids of that count, and k counts ids.
    """
    if weights is None:
        running = np.cumsum(counts, dtype=np.float64)
        return running[np.minimum(grid, len(running)) - 1]
    ids = np.concatenate([[0.0], np.cumsum(weights)])
    lookups = np.concatenate([[0.0], np.cumsum(counts * weights)])
    return np.interp(grid, ids, lookups)


def rounded(values: Array) -> tuple[float, ...]:
    """Shares as they are written down: six digits behind the point."""
    return tuple(np.round(np.asarray(values, dtype=np.float64), 6).tolist())


class ClusterShares:
    """Shares estimated from whole blocks of rows drawn at random, with an interval for each.

    The estimate is the ratio p = sum(y) / sum(n) over the sampled blocks, y of whose n lookups count. Rows of a block
    are alike (a log is in time order), so the variance is taken over blocks, not over rows: with m blocks that are a
    share f of all,

        var(p) = (1 - f) * m / (m - 1) * sum((y - p n)^2) / sum(n)^2,

    and the interval is Wilson's score interval for p(1 - p) / var(p) effective observations, at the t quantile of
    m - 1 degrees of freedom. Wilson's stays inside [0, 1] and does not collapse where p is 0 or 1.
    """

    def __init__(self, width: int):
        self.blocks = 0
        self.n = 0.0
        self._nn = 0.0
        self.y = np.zeros(width)
        self._yy = np.zeros(width)
        self._yn = np.zeros(width)

    def add(self, y: Array, n: float) -> None:
        """One block: how many of its `n` observations count, at each of the `width` places."""
        self.blocks += 1
        self.n += n
        self._nn += n * n
        self.y += y
        self._yy += np.square(y, dtype=np.float64)
        self._yn += np.asarray(y, dtype=np.float64) * n

    def share(self) -> npt.NDArray[np.float64]:
        return self.y / max(self.n, 1.0)

    def interval(self, fraction: float) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Low and high ends of the 95% intervals; `fraction` is the share of all blocks that were read."""
        p, n, m = self.share(), max(self.n, 1.0), self.blocks
        if m < 2:
            return np.zeros_like(p), np.ones_like(p)
        squares = np.maximum(self._yy - 2 * p * self._yn + p * p * self._nn, 0.0)
        variance = m / (m - 1) * squares / n**2
        independent = p * (1 - p) / n
        # Never narrower than for independent lookups: with few blocks their spread may be small by chance.
        effect = np.divide(variance, independent, out=np.ones_like(p), where=independent > 0).clip(min=1.0)
        return wilson(p, n / effect / max(1.0 - fraction, 1e-9), t_quantile(0.5 + CONFIDENCE / 2, m - 1))


def wilson(p: Array, n: Array, z: float) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Wilson's score interval for a share `p` of `n` observations."""
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * np.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return np.clip(centre - half, 0.0, 1.0), np.clip(centre + half, 0.0, 1.0)


def t_quantile(probability: float, degrees: int) -> float:
    """Quantile of Student's t by its expansion around the normal one; within 0.5% of it from 4 degrees on."""
    z = NormalDist().inv_cdf(probability)
    v = float(max(degrees, 1))
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / v + second / v**2 + third / v**3
