"""Expected counts of ids in popularity order, from counts that do not fall everywhere."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def falling_estimate(counts: Array) -> npt.NDArray[np.float64]:
    """Expected counts of ids in popularity order, estimated from a sample of the lookups.

    Expected counts fall with the id, but a sample's jump up and down, and are 0 for most of the tail. The estimate is
    the slope of the least concave curve above the sample's coverage (the constrained maximum likelihood estimate, but
    that steps are at 16 places an octave), so it falls and has the same sum.
    """
    octaves = np.log2(max(len(counts), 2))
    places = np.unique(np.round(2.0 ** np.linspace(0, octaves, int(octaves * 16) + 2)).astype(np.int64))
    places = np.unique(np.minimum(np.concatenate([[0], places, [len(counts)]]), len(counts)))
    running = np.concatenate([[0.0], np.cumsum(counts, dtype=np.float64)])[places]
    hull: list[int] = []
    for i in range(len(places)):
        while len(hull) > 1 and _slope(places, running, hull[-2], hull[-1]) <= _slope(places, running, hull[-1], i):
            hull.pop()
        hull.append(i)
    corners = places[hull]
    return np.repeat(np.diff(running[hull]) / np.diff(corners), np.diff(corners))


def _slope(x: Array, y: Array, first: int, second: int) -> float:
    return float((y[second] - y[first]) / (x[second] - x[first]))
