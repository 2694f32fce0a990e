"""The methods that the behaviour suite runs over: small settings of each, by a readable name."""

from __future__ import annotations

from holdall.tables import Dense, Method

CASES: dict[str, Method] = {
    "dense": Dense(),
}

FITTABLE: dict[str, Method] = {
    "dense": Dense(),
}
"""Methods with a `from_dense` fit."""

SHAPES = [(37, 8), (101, 1), (64, 16), (1, 4), (53, 12)]
"""(num_rows, dim): prime, odd, tiny and dim 1."""
