"""Bounded Zipf numbers, fast for any size: P(rank r) proportional to (r + 1)^-s for r in 0..n-1."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

# Ranks drawn from an exact table. Behind it, the integral of x^-s over a unit interval stands for its midpoint's value:
# a relative error of s(s + 1) / (24 r^2), under 1e-7 here for s <= 1.2.
HEAD = 1024


class Zipf:
    """Bounded Zipf distribution, which turns uniform numbers into ranks by its inverse: a table for the head, a formula
    for the rest.

    Any `num_values` costs the same (8 KB, about 30 ns a number); s = 0 is the uniform distribution.
    """

    def __init__(self, num_values: int, exponent: float):
        assert num_values >= 1
        assert exponent >= 0
        self.num_values = num_values
        self.exponent = exponent
        head = min(num_values, HEAD)
        weights = np.arange(1, head + 1, dtype=np.float64) ** -exponent
        self._low, self._high = head + 0.5, num_values + 0.5  # what is left, as an interval of the real line
        total = weights.sum() + (self._integral() if num_values > head else 0.0)
        self._cdf = np.cumsum(weights) / total
        if num_values == head:
            self._cdf[-1] = 1.0  # not an ulp less, or a number could fall behind the last rank

    def ranks(self, uniform: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
        """One rank for each number of [0, 1)."""
        ranks = np.searchsorted(self._cdf, uniform, side="right")
        tail = np.flatnonzero(ranks == len(self._cdf))
        if len(tail):
            below = self._cdf[-1]
            values = self._inverse((uniform[tail] - below) / (1.0 - below))
            ranks[tail] = np.clip(np.floor(values + 0.5).astype(np.int64) - 1, len(self._cdf), self.num_values - 1)
        return ranks

    def probability(self, rank: int) -> float:
        """Probability of one rank."""
        below = self._cdf[-1]
        if rank < len(self._cdf):
            return float(self._cdf[rank] - (self._cdf[rank - 1] if rank else 0.0))
        return float((1.0 - below) * (rank + 1.0) ** -self.exponent / self._integral())

    def _integral(self) -> float:
        """Integral of x^-s over the tail's interval."""
        power = 1.0 - self.exponent
        if abs(power) < 1e-9:
            return float(np.log(self._high / self._low))
        return float((self._high**power - self._low**power) / power)

    def _inverse(self, share: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Point at which the integral from the tail's start reaches this share of the whole."""
        power = 1.0 - self.exponent
        if abs(power) < 1e-9:
            return self._low * (self._high / self._low) ** share
        low, high = self._low**power, self._high**power
        return (low + share * (high - low)) ** (1.0 / power)
