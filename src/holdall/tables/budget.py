"""Division of a byte budget over the tables of a model."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from holdall.common.errors import ConfigError, did_you_mean
from holdall.common.sizes import parse_budget, readable_bytes
from holdall.tables.dense import Dense
from holdall.tables.hashed import Hashed
from holdall.tables.method import Method
from holdall.tables.popular_rows import keep_popular_rows
from holdall.tables.robe import Robe
from holdall.tables.table_size import TableSize
from holdall.tables.tensor_train import TensorTrain

MIN_ROWS = 1_000
"""Where a method is given without a budget, tables with fewer rows stay dense: a few percent of all bytes."""
ROBE_SHARE = 50
NAMED_TABLES = 4
"""Tables that the error of a budget names, largest first."""


def suggest(
    cardinalities: Mapping[str, int],
    dim: int | Mapping[str, int],
    budget: str | int | float,
    method: str | type[Method] = "auto",
    *,
    min_rows: int = 0,
    dtype: torch.dtype | Mapping[str, torch.dtype] = torch.float32,
    training: bool = False,
    counts: Mapping[str, Tensor] | None = None,
    row_state: int = 0,
) -> dict[str, Method]:
    """A method for every table such that all of them take at most `budget` in total.

    `dim` and `dtype` are those of all tables, or one by table name. `budget` is a size or a share of the dense bytes
    (see `parse_budget`). Tables share it in proportion to the square root of their bytes. A table whose share is at
    least its dense bytes stays dense; small tables do. Tables of fewer than `min_rows` rows stay dense whatever their
    share. A table whose share is below the smallest setting of the method gets that setting. A budget that cannot be
    kept is an error, which has the smallest one that can. `auto` is the choice of `auto_method`. With `training`,
    methods have the form that trains fresh rows (`Method.for_training`), and settings that do not train are left out.

    With `counts` [num_rows] of every table, the lookups of each row in training, `auto` cuts all tables into bands:
    rows of their own for the ids that are looked up most per byte, over all tables together, and one row for the rest
    of a table (`keep_popular_rows`). Kept rows are dense, or with `training` 8-bit codes below a fifteenth of the dense
    bytes, where the next ids have narrow rows. `row_state` is the bytes of optimizer state of a row: tables with their
    state then take at most the same share of dense tables with theirs.
    """
    dims = dim if isinstance(dim, Mapping) else dict.fromkeys(cardinalities, dim)
    dtypes = dtype if isinstance(dtype, Mapping) else dict.fromkeys(cardinalities, dtype)
    for what, found in (("dim", dims), ("dtype", dtypes)):
        if missing := [name for name in cardinalities if name not in found]:
            raise ConfigError(f"table '{missing[0]}' has no {what}: give one for every table, or one for all")
    sizes = {
        name: TableSize(num_rows, dims[name], dtypes[name], training=training, row_state=row_state)
        for name, num_rows in cardinalities.items()
    }
    return divide_budget(sizes, budget, method, min_rows=min_rows, counts=counts)


def divide_budget(
    sizes: Mapping[str, TableSize],
    budget: str | int | float,
    method: str | type[Method] = "auto",
    *,
    min_rows: int = 0,
    counts: Mapping[str, Tensor] | None = None,
) -> dict[str, Method]:
    """A method for every table such that all of them take at most `budget` in total: see `suggest`."""
    kind = find_method(method) if isinstance(method, str) and method != "auto" else method
    whole = sum(size.dense_bytes for size in sizes.values())
    available = parse_budget(budget, whole)
    if counts is not None:
        if kind != "auto":
            raise ConfigError(f"counts choose bands of rows by themselves: leave out counts or method {method}")
        return keep_popular_rows(sizes, available, counts, min_rows=min_rows)
    if available >= whole:
        return dict.fromkeys(sizes, Dense())
    fixed: dict[str, Method] = {name: Dense() for name, size in sizes.items() if size.num_rows < min_rows}
    while True:
        taken = sum(sizes[name].bytes_by(choice) for name, choice in fixed.items())
        if taken > available or (taken == available and len(fixed) < len(sizes)):
            raise ConfigError(_too_small(sizes, kind, available, min_rows))
        shares = _shares(
            {name: size.dense_bytes for name, size in sizes.items() if name not in fixed}, available - taken
        )
        chosen = dict(fixed)
        for name, share in shares.items():
            size = sizes[name]
            choice = Dense() if share >= size.dense_bytes else _largest(kind, size, share)
            if choice is None:
                fixed[name] = _smallest(kind, size)
            else:
                chosen[name] = choice
        if len(chosen) == len(sizes):
            return {name: chosen[name] for name in sizes}


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
    a few rows get a hashed table, less than one row None. Budgets that are divided by counts do not use it.
    """
    kinds = (Robe, TensorTrain, Hashed) if num_bytes * ROBE_SHARE >= 4 * num_rows * dim else (TensorTrain, Hashed)
    return next((found for kind in kinds if (found := _for_bytes(kind, num_rows, dim, num_bytes))), None)


def _largest(kind: type[Method] | str, size: TableSize, num_bytes: int) -> Method | None:
    """The method's largest setting that stores a table in `num_bytes`, None if there is none; `kind` may be `auto`.

    Methods size themselves for float32. For another type this is the setting of the most float32 bytes whose table
    of that type fits, found by bisection: index buffers take the same bytes in every type.
    """
    available = num_bytes - size.extra_bytes
    num_rows, dim, width = size.num_rows, size.dim, size.dtype.itemsize
    if width == torch.float32.itemsize:
        found = _for_bytes(kind, num_rows, dim, available, training=size.training)
        return found if found is not None and size.bytes_by(found) <= num_bytes else None
    best: Method | None = None
    low, high = 0, max(available, available * 4 // width) + 1  # fits at low; at high no setting does, or none is larger
    while high - low > 1:
        middle = (low + high) // 2
        found = _for_bytes(kind, num_rows, dim, middle, training=size.training)
        if found is not None and size.bytes_by(found) > num_bytes:
            high = middle
        else:
            low, best = middle, found or best
    return best


def _for_bytes(
    kind: type[Method] | str, num_rows: int, dim: int, num_bytes: int, *, training: bool = False
) -> Method | None:
    """The method's largest setting for a float32 table within a size, None if there is none; `kind` may be `auto`."""
    if isinstance(kind, str):
        return auto_method(num_rows, dim, num_bytes)
    try:
        found = kind.for_bytes(num_rows, dim, num_bytes)
    except ConfigError:
        return None
    if not training:
        return found
    found = found.for_training()
    return found if found.trains else None


def _smallest(kind: type[Method] | str, size: TableSize) -> Method:
    """The smallest setting of a method, found by bisection; dense where even that takes as much."""
    best: Method = Dense()
    low, high = 0, 4 * size.num_rows * size.dim  # fails at low; high is the size of a dense float32 table
    while high - low > 1:
        middle = (low + high) // 2
        found = _for_bytes(kind, size.num_rows, size.dim, middle, training=size.training)
        low, high, best = (middle, high, best) if found is None else (low, middle, found)
    return best if size.bytes_by(best) < size.dense_bytes else Dense()


def _too_small(sizes: Mapping[str, TableSize], kind: type[Method] | str, available: int, min_rows: int) -> str:
    """The error of a budget that cannot be kept: the smallest one that can, to the byte, and which tables need it."""
    choices = {name: Dense() if size.num_rows < min_rows else _smallest(kind, size) for name, size in sizes.items()}
    needs = {name: sizes[name].bytes_by(choice) for name, choice in choices.items()}
    least = sum(needs.values())
    largest = sorted(needs, key=lambda name: -needs[name])
    named = [
        f"{name} {readable_bytes(needs[name])}" + (" (dense)" if isinstance(choices[name], Dense) else "")
        for name in largest[:NAMED_TABLES]
    ]
    if others := largest[NAMED_TABLES:]:
        named.append(f"{len(others)} more {readable_bytes(sum(needs[name] for name in others))}")
    small = any(size.num_rows < min_rows for size in sizes.values())
    kept = f", with tables of fewer than {min_rows:,} rows kept dense" if small else ""
    method = kind if isinstance(kind, str) else kind.name
    can = "can train in" if any(size.training for size in sizes.values()) else "can keep"
    tables = "this table" if len(sizes) == 1 else f"these {len(sizes)} tables"
    return (
        f"a budget of {readable_bytes(available)} is too small for {tables}: the smallest that method {method} "
        f"{can} is {least}B{kept} ({', '.join(named)})"
    )


def _shares(dense: Mapping[str, int], available: int) -> dict[str, int]:
    """Bytes for each table: c * sqrt(its dense bytes), at most its dense bytes; c such that the budget is used up."""
    shares: dict[str, int] = {}
    open_tables = dict(dense)
    while open_tables:
        scale = (available - sum(shares.values())) / sum(size**0.5 for size in open_tables.values())
        full = {name: size for name, size in open_tables.items() if scale * size**0.5 >= size}
        if not full:
            left = available - sum(shares.values())
            for name, size in open_tables.items():  # rounding may take the sum a byte above the budget
                shares[name] = min(int(scale * size**0.5), left)
                left -= shares[name]
            break
        shares.update(full)
        open_tables = {name: size for name, size in open_tables.items() if name not in full}
    return shares
