"""Cost model of tables: seconds of lookup and update by method, scaled from measured settings to others."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from holdall.common.errors import ConfigError
from holdall.planning.machine.hardware import Cost, TableCost
from holdall.tables import Dense, Frobenius, Method, TensorRing, TensorTrain, method_from_json

COMPRESSED_ROWS = 2_000_000
"""Rows of the compressed tables that `holdall hardware` measures."""


def table_costs(known: Sequence[TableCost], method: Method, dim: int, optimizer: str) -> tuple[Cost, Cost]:
    """Cost of the lookup, and of the backward with update, of a table of this method and dim."""
    kind = "tensor_train" if isinstance(method, TensorRing) else method.name
    candidates = [cost for cost in known if cost.method["method"] == kind]
    if isinstance(method, Dense):
        candidates = [cost for cost in candidates if cost.optimizer == optimizer]
    elif not candidates:  # not measured: the slowest methods without a chain of products
        candidates = [c for c in known if c.method["method"] in ("frobenius", "robe", "memcom", "mixed_dimension")]
    if not candidates:
        raise ConfigError(
            f"the hardware file has no rate for {method.name} tables with {optimizer}: measure again with "
            f"`holdall hardware`"
        )
    if isinstance(method, TensorTrain | TensorRing):  # its cost is counted in products, for any rank and dim
        nearest = _nearest(candidates, method, dim)
        return nearest.lookup, nearest.update
    settings = candidates[0].method
    factor = 1.0
    if isinstance(method, Frobenius):
        factor = _products(method, dim) / _products(method_from_json(settings), dim)
    candidates = [cost for cost in candidates if cost.method == settings]
    return (
        _at_dim(candidates, dim, lambda cost: cost.lookup).scaled(factor),
        _at_dim(candidates, dim, lambda cost: cost.update).scaled(factor),
    )


def _nearest(costs: Sequence[TableCost], method: TensorTrain | TensorRing | Frobenius, dim: int) -> TableCost:
    """The measured table with the nearest rank and dim."""

    def distance(cost: TableCost) -> float:
        return abs(math.log(cost.method["rank"] / method.rank)) + abs(math.log(cost.dim / dim))

    return min(costs, key=distance)


def parameter_ratio(known: Sequence[TableCost], method: Method, num_rows: int, dim: int) -> float:
    """Parameters of a table over those of the measured one, where a step reads all parameters; 1 elsewhere.

    On a CPU, a step reads all of them for tensor trains and rings, whose middle cores are multiplied whole, and for
    Frobenius tables, whose gradients are dense. The base cost of those, which lookups do not change, is scaled by this.
    """
    if not isinstance(method, TensorTrain | TensorRing | Frobenius):
        return 1.0
    kind = "tensor_train" if isinstance(method, TensorRing) else method.name
    measured = _nearest([cost for cost in known if cost.method["method"] == kind], method, dim)
    whole = method_from_json(measured.method).num_parameters(COMPRESSED_ROWS, measured.dim)
    return method.num_parameters(num_rows, dim) / whole


def _at_dim(costs: Sequence[TableCost], dim: int, which: Callable[[TableCost], Cost]) -> Cost:
    """Linear interpolation between measured dims; beyond the largest in proportion, below the smallest constant."""
    ordered = sorted(costs, key=lambda cost: cost.dim)
    if dim >= ordered[-1].dim:
        return which(ordered[-1]).scaled(dim / ordered[-1].dim)
    if dim <= ordered[0].dim:
        return which(ordered[0])
    above = next(place for place, cost in enumerate(ordered) if cost.dim >= dim)
    low, high = ordered[above - 1], ordered[above]
    return which(low).between(which(high), (dim - low.dim) / (high.dim - low.dim))


def _products(method: Method, dim: int) -> float:
    """Multiplications of a row, which scale the cost between settings of the Frobenius method."""
    return method.rank * (2 * method.terms + dim) if isinstance(method, Frobenius) else float(dim)


@dataclass(frozen=True)
class Chain:
    """Products of a tensor train's chain: of a prefix, which ids with the same leading digits share, and of a row."""

    block: int
    """Consecutive ids that share a prefix."""
    prefix: float
    row: float

    def products(self, prefixes: float, rows: float) -> float:
        return prefixes * self.prefix + rows * self.row


def chain_of(method: Method, num_rows: int, dim: int) -> Chain | None:
    """The chain of a tensor train or ring; None for other methods."""
    if not isinstance(method, TensorTrain | TensorRing):
        return None
    shapes = method.core_shapes(num_rows, dim)
    made, prefix = float(shapes[0][1] * shapes[0][2]), 0.0
    for _, rank, size, following in shapes[1:-1]:
        prefix += made * rank * size * following
        made *= size
    last = shapes[-1]
    return Chain(last[0], prefix, made * last[1] * last[2] * last[3])
