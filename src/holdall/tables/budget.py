"""Spreading a byte budget over the tables of a model."""

from __future__ import annotations

from collections.abc import Mapping

from holdall.errors import ConfigError, did_you_mean
from holdall.sizes import parse_budget, readable_bytes
from holdall.tables.dense import Dense
from holdall.tables.hashed import Hashed
from holdall.tables.method import Method

MIN_ROWS = 1_000
"""Where a method is given without a budget, tables with fewer rows stay dense: together they are a few percent."""


def suggest(
    cardinalities: Mapping[str, int],
    dim: int,
    budget: str | int | float,
    method: str | type[Method] = "auto",
    *,
    min_rows: int = 0,
) -> dict[str, Method]:
    """A method for every table such that all of them together take at most `budget`.

    `budget` is a size or a share of the dense bytes (see `parse_budget`). Tables share it in proportion to the square
    root of their bytes, and one that would get as much as it takes stays dense: so small tables do. Tables of fewer
    than `min_rows` rows stay dense whatever their share. A table whose share is below the smallest setting of
    the method gets that setting, or a hashed one where the method is `auto`.
    """
    kind = find_method(method)
    dense = {name: 4 * num_rows * dim for name, num_rows in cardinalities.items()}
    available = parse_budget(budget, sum(dense.values()))
    if available >= sum(dense.values()):
        return dict.fromkeys(cardinalities, Dense())
    fixed: dict[str, Method] = {name: Dense() for name, rows in cardinalities.items() if rows < min_rows}
    while True:
        taken = sum(choice.num_bytes(cardinalities[name], dim) for name, choice in fixed.items())
        if taken > available or (taken == available and len(fixed) < len(cardinalities)):
            raise ConfigError(_too_small(cardinalities, dim, kind, available, min_rows, auto=method == "auto"))
        shares = _shares({name: size for name, size in dense.items() if name not in fixed}, available - taken)
        chosen = dict(fixed)
        for name, share in shares.items():
            rows = cardinalities[name]
            choice = Dense() if share >= dense[name] else _for_bytes(kind, rows, dim, share)
            if choice is None and method == "auto":
                choice = _for_bytes(Hashed, rows, dim, share)
            if choice is None:
                fixed[name] = _smallest(kind if method != "auto" else Hashed, rows, dim)
            else:
                chosen[name] = choice
        if len(chosen) == len(cardinalities):
            return {name: chosen[name] for name in cardinalities}


def find_method(method: str | type[Method]) -> type[Method]:
    """The method class of that name; `auto` is the default one."""
    from holdall.tables import DEFAULT, METHODS

    if isinstance(method, type):
        return method
    if method == "auto":
        return DEFAULT
    if method not in METHODS:
        raise ConfigError(f"unknown table method '{method}'{did_you_mean(method, METHODS)}")
    return METHODS[method]


def _for_bytes(kind: type[Method], num_rows: int, dim: int, num_bytes: int) -> Method | None:
    try:
        return kind.for_bytes(num_rows, dim, num_bytes)
    except ConfigError:
        return None


def _smallest(kind: type[Method], num_rows: int, dim: int) -> Method:
    """The smallest setting of a method, found by bisection; dense where even that takes as much."""
    best: Method = Dense()
    low, high = 0, 4 * num_rows * dim  # fails at low; high is what dense takes
    while high - low > 1:
        middle = (low + high) // 2
        found = _for_bytes(kind, num_rows, dim, middle)
        low, high, best = (middle, high, best) if found is None else (low, middle, found)
    return best


def _too_small(
    cardinalities: Mapping[str, int], dim: int, kind: type[Method], available: int, min_rows: int, *, auto: bool
) -> str:
    least = 0
    for num_rows in cardinalities.values():
        choice = Dense() if num_rows < min_rows else _smallest(Hashed if auto else kind, num_rows, dim)
        least += choice.num_bytes(num_rows, dim)
    kept = f", with tables of fewer than {min_rows:,} rows kept dense" if min_rows else ""
    name = "hashed" if auto else kind.name
    return (
        f"a budget of {readable_bytes(available)} is too small for these {len(cardinalities)} tables: the smallest "
        f"that {name} reaches is {readable_bytes(least)}{kept}"
    )


def _shares(dense: Mapping[str, int], available: int) -> dict[str, int]:
    """Bytes for each table: c * sqrt(its dense bytes), at most its dense bytes, with c such that all is used."""
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
