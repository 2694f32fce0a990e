"""Spreading a byte budget over the tables of a model."""

from __future__ import annotations

from collections.abc import Mapping

from holdall.errors import ConfigError, suggest
from holdall.sizes import parse_budget, readable_bytes
from holdall.tables.dense import Dense
from holdall.tables.hashed import Hashed
from holdall.tables.method import Method

MIN_ROWS = 1_000
"""Tables with fewer rows stay dense: all of them together are a few percent of a model."""


def suggest_methods(
    cardinalities: Mapping[str, int],
    dim: int,
    budget: str | int | float,
    method: str | type[Method] = "auto",
    *,
    min_rows: int = MIN_ROWS,
) -> dict[str, Method]:
    """A method for every table such that all of them together take at most `budget`.

    `budget` is a size or a share of the dense bytes (see `parse_budget`). Tables of fewer than `min_rows` rows stay
    dense. The others share what is left in proportion to the square root of their bytes, but a table that would get as
    much as it takes stays dense too. `auto` is the default method, or a hashed table where even its smallest setting
    does not fit the share.
    """
    kind = find_method(method)
    dense = {name: 4 * num_rows * dim for name, num_rows in cardinalities.items()}
    total = sum(dense.values())
    available = parse_budget(budget, total)
    if available >= total:
        return {name: Dense() for name in cardinalities}
    large = [name for name, num_rows in cardinalities.items() if num_rows >= min_rows]
    left = available - sum(dense[name] for name in cardinalities if name not in large)
    shares = _shares({name: dense[name] for name in large}, left)
    least = sum(dense.values()) - sum(dense[name] for name in large) + len(large) * 4 * dim
    if not large or left < len(large) * 4 * dim:
        raise ConfigError(
            f"a budget of {readable_bytes(available)} is too small for these tables: the smallest that works is "
            f"{readable_bytes(least)} ({len(cardinalities) - len(large)} tables of fewer than {min_rows:,} rows stay "
            f"dense and take most of it if their number is large; lower min_rows to compress them too)"
        )
    chosen: dict[str, Method] = {}
    for name, num_rows in cardinalities.items():
        if name not in shares or shares[name] >= dense[name]:
            chosen[name] = Dense()
        else:
            chosen[name] = _fit_share(kind, num_rows, dim, shares[name], strict=method != "auto")
    return chosen


def find_method(method: str | type[Method]) -> type[Method]:
    """The method class of that name; `auto` is the default one."""
    from holdall.tables import DEFAULT, METHODS

    if isinstance(method, type):
        return method
    if method == "auto":
        return DEFAULT
    if method not in METHODS:
        raise ConfigError(f"unknown table method '{method}'{suggest(method, METHODS)}")
    return METHODS[method]


def _fit_share(kind: type[Method], num_rows: int, dim: int, num_bytes: int, *, strict: bool) -> Method:
    try:
        return kind.for_bytes(num_rows, dim, num_bytes)
    except ConfigError:
        if strict:
            raise
        return Hashed.for_bytes(num_rows, dim, num_bytes)


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
