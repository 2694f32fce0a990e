"""Choice of `auto` for trained tables: candidates are fitted within the budget, and the one that loses least is taken.

What is compared is the squared change of a lookup, summed over all tables, each row as often as it is expected to be
looked up, or once where that is not known.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from holdall.common.errors import ConfigError
from holdall.embedding.model_tables import ModelTable
from holdall.embedding.precision_of_tables import fit_by_counts
from holdall.tables import Clustered, Dense, Method, MixedDimension, Table
from holdall.tables.expected_lookups import expected_lookups
from holdall.tables.fit_tables import fit_tables
from holdall.tables.fitting import squared_error
from holdall.tables.popular_rows import check_counts_by_table

BANDS = "bands"
KINDS: tuple[type[Method], ...] = (Clustered, MixedDimension)
"""Methods of whole tables that are tried beside bands."""
MAX_FLOP = 4e11
"""Work of k-means beyond which clusters are not tried: a few seconds on a core or two."""


@dataclass(frozen=True)
class BestFit:
    """Fitted tables by name, without those that stay dense, and what each candidate lost."""

    tables: dict[str, Table]
    errors: dict[str, float]
    """Relative error of a lookup, over all tables, by candidate; infinite for one that does not keep the budget."""
    left_out: tuple[str, ...] = ()
    """Candidates that were not tried, as they would take too long."""

    def __str__(self) -> str:
        """The line of a report."""
        ranked = sorted((error, name) for name, error in self.errors.items())
        others = [f"{name} {error:.4f}" if error < math.inf else f"{name} too large" for error, name in ranked[1:]]
        others += [f"{name} not tried: too many rows" for name in self.left_out]
        compared = f" ({', '.join(others)})" if others else ""
        return f"auto took {ranked[0][1]}: relative error of a lookup {ranked[0][0]:.4f}{compared}"


def fit_best(
    tables: Sequence[ModelTable],
    kept_bytes: int,
    budget: str | int | float,
    counts: Mapping[str, Tensor] | None,
    options: Mapping[str, Mapping[str, Any]],
    divided: Callable[[type[Method]], dict[str, Method]],
) -> BestFit | None:
    """The candidate of least error for `tables`, which are those that may be compressed; None if all may stay dense.

    `kept_bytes` and `options` are those of `fit_by_counts`; `divided` divides the budget over tables of one method.
    """
    used = check_counts_by_table(
        {table.name: torch.ones(table.num_rows) for table in tables} if counts is None else counts,
        {table.name: table.num_rows for table in tables},
    )
    bands = fit_by_counts(tables, kept_bytes, budget, used, options)
    if not bands:
        return None
    weights = {table.name: table.weight.detach() for table in tables}
    lookups = {name: expected_lookups(its) for name, its in used.items()} if counts is not None else used
    best, errors, left_out = bands, {BANDS: relative_lookup_error(weights, bands, lookups)}, []
    for kind in KINDS:
        try:
            methods = {name: method for name, method in divided(kind).items() if method != Dense()}
        except ConfigError:  # its smallest setting is beyond the budget
            errors[kind.name] = math.inf
            continue
        if sum(_fit_flop(method, *weights[name].shape) for name, method in methods.items()) > MAX_FLOP:
            left_out.append(kind.name)
            continue
        made = fit_tables({name: weights[name] for name in methods}, methods, counts, options)
        errors[kind.name] = relative_lookup_error(weights, made, lookups)
        if errors[kind.name] < min(error for name, error in errors.items() if name != kind.name):
            best = made
    return BestFit(best, errors, tuple(left_out))


def _fit_flop(method: Method, num_rows: int, dim: int) -> float:
    """Operations of a fit, where they can be many."""
    return 2.0 * num_rows * method.clusters * dim * method.iterations if isinstance(method, Clustered) else 0.0


def relative_lookup_error(
    weights: Mapping[str, Tensor], tables: Mapping[str, Table], lookups: Mapping[str, Tensor]
) -> float:
    """Root of the mean squared change of a lookup over that of a looked-up row; tables that are missing stay exact."""
    sums = list(_squared_errors(weights, tables, lookups))
    missed, total = sum(missed for missed, _ in sums), sum(total for _, total in sums)
    if math.isnan(missed):
        return math.inf
    return math.sqrt(missed / total) if total else 0.0 if missed == 0.0 else math.inf


def _squared_errors(
    weights: Mapping[str, Tensor], tables: Mapping[str, Table], lookups: Mapping[str, Tensor]
) -> Iterator[tuple[float, float]]:
    for name, weight in weights.items():
        yield squared_error(weight, tables.get(name), lookups[name])
