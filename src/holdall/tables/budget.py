"""Division of a byte budget over the tables of a model."""

from __future__ import annotations

from collections.abc import Mapping

from holdall.common.errors import ConfigError, did_you_mean
from holdall.common.sizes import parse_budget, readable_bytes
from holdall.tables.dense import Dense
from holdall.tables.hashed import Hashed
from holdall.tables.method import Method
from holdall.tables.robe import Robe
from holdall.tables.tensor_train import TensorTrain

MIN_ROWS = 1_000
"""Where a method is given without a budget, tables with fewer rows stay dense: a few percent of all bytes."""
ROBE_SHARE = 50


def suggest(
    cardinalities: Mapping[str, int],
    dim: int,
    budget: str | int | float,
    method: str | type[Method] = "auto",
    *,
    min_rows: int = 0,
) -> dict[str, Method]:
    """A method for every table such that all of them take at most `budget` in total.

    `budget` is a size or a share of the dense bytes (see `parse_budget`). Tables share it in proportion to the square
    root of their bytes. A table whose share is at least its dense bytes stays dense; small tables do. Tables of fewer
    than `min_rows` rows stay dense whatever their share. A table whose share is below the smallest setting of the
    method gets that setting. `auto` is the choice of `auto_method`.
    """
    kind = find_method(method) if isinstance(method, str) and method != "auto" else method
    dense = {name: 4 * num_rows * dim for name, num_rows in cardinalities.items()}
    available = parse_budget(budget, sum(dense.values()))
    if available >= sum(dense.values()):
        return dict.fromkeys(cardinalities, Dense())
    fixed: dict[str, Method] = {name: Dense() for name, rows in cardinalities.items() if rows < min_rows}
    while True:
        taken = sum(choice.num_bytes(cardinalities[name], dim) for name, choice in fixed.items())
        if taken > available or (taken == available and len(fixed) < len(cardinalities)):
            raise ConfigError(_too_small(cardinalities, dim, kind, available, min_rows))
        shares = _shares({name: size for name, size in dense.items() if name not in fixed}, available - taken)
        chosen = dict(fixed)
        for name, share in shares.items():
            rows = cardinalities[name]
            choice = Dense() if share >= dense[name] else _for_bytes(kind, rows, dim, share)
            if choice is None:
                fixed[name] = _smallest(kind, rows, dim)
            else:
                chosen[name] = choice
        if len(chosen) == len(cardinalities):
            return {name: chosen[name] for name in cardinalities}


def find_method(method: str) -> type[Method]:
    """The method of that name."""
    from holdall.tables import METHODS

    if method not in METHODS:
        raise ConfigError(f"unknown table method '{method}'{did_you_mean(method, ['auto', *METHODS])}")
    return METHODS[method]


def auto_method(num_rows: int, dim: int, num_bytes: int) -> Method | None:
    """The method of `auto`: ROBE down to a fiftieth of the dense bytes, a tensor train below.

    Of the methods that are small from the start, ROBE had the best AUC on the Criteo sample at every size and on
    planted clicks at three of four; on Book-Crossing, of few features and many ids, it was far worse below a
    fiftieth, where the tensor train was at most 0.006 of AUC from the best of them on all three
    (benchmarks/results/methods.json). The rule comes from these test scores: no other data has confirmed it. Shares of
    a few rows get a hashed table, less than one row None.
    """
    kinds = (Robe, TensorTrain, Hashed) if num_bytes * ROBE_SHARE >= 4 * num_rows * dim else (TensorTrain, Hashed)
    return next((found for kind in kinds if (found := _for_bytes(kind, num_rows, dim, num_bytes))), None)


def _for_bytes(kind: type[Method] | str, num_rows: int, dim: int, num_bytes: int) -> Method | None:
    """The method's largest setting within a size, None if there is none; `kind` may be `auto`."""
    if isinstance(kind, str):
        return auto_method(num_rows, dim, num_bytes)
    try:
        return kind.for_bytes(num_rows, dim, num_bytes)
    except ConfigError:
        return None


def _smallest(kind: type[Method] | str, num_rows: int, dim: int) -> Method:
    """The smallest setting of a method, found by bisection; dense where even that takes as much."""
    best: Method = Dense()
    low, high = 0, 4 * num_rows * dim  # fails at low; high is the dense size
    while high - low > 1:
        middle = (low + high) // 2
        found = _for_bytes(kind, num_rows, dim, middle)
        low, high, best = (middle, high, best) if found is None else (low, middle, found)
    return best


def _too_small(
    cardinalities: Mapping[str, int], dim: int, kind: type[Method] | str, available: int, min_rows: int
) -> str:
    least = 0
    for num_rows in cardinalities.values():
        choice = Dense() if num_rows < min_rows else _smallest(kind, num_rows, dim)
        least += choice.num_bytes(num_rows, dim)
    kept = f", with tables of fewer than {min_rows:,} rows kept dense" if min_rows else ""
    name = kind if isinstance(kind, str) else kind.name
    return (
        f"a budget of {readable_bytes(available)} is too small for these {len(cardinalities)} tables: the smallest "
        f"that method {name} reaches is {readable_bytes(least)}{kept}"
    )


def _shares(dense: Mapping[str, int], available: int) -> dict[str, int]:
    """Bytes for each table: c * sqrt(its dense bytes), at most its dense bytes; c such that the budget is used up."""
    shares: dict[str, int] = {}
    open_tables = dict(dense)
    while open_tables:
        scale = (available - sum(shares.values())) / sum(size**0.5 for size in open_tables.values())
        full = {name: size for name, size in open_tables.items() if scale * size**0.5 >= size}
        if not full:
            shares.update({name: int(scale * size**0.5) for name, size in open_tables.items()})
            break
        shares.update(full)
        open_tables = {name: size for name, size in open_tables.items() if name not in full}
    return shares
