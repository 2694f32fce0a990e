"""Tables of a model fitted by popularity: bits and codes fall with the counts of rows, over all tables together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from holdall.common.errors import ConfigError, did_you_mean
from holdall.common.sizes import parse_budget, readable_bytes
from holdall.embedding.model_tables import ModelTable
from holdall.tables import Table
from holdall.tables.fitting import relative_error
from holdall.tables.popular_rows import check_counts_by_table
from holdall.tables.precision import PrecisionFit


def counts_by_table(tables: Sequence[ModelTable], counts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`counts`, in which a table may have any of its names, by the first name of each."""
    names = {name: table.name for table in tables for name in table.names}
    if unknown := [name for name in counts if name not in names]:
        raise ConfigError(f"counts has '{unknown[0]}', which is no table of the model{did_you_mean(unknown[0], names)}")
    return {names[name]: found for name, found in counts.items()}


def fit_by_counts(
    tables: Sequence[ModelTable],
    kept_bytes: int,
    budget: str | int | float,
    counts: Mapping[str, Tensor],
    options: Mapping[str, Mapping[str, Any]],
) -> dict[str, Table]:
    """Tables in bands, fitted to the rows of `tables` by `PrecisionFit`, by name; none if all may stay dense.

    `kept_bytes` are those that the budget counts beside the bands: of tables that stay dense, and of padding rows.
    """
    for table in tables:
        if table.weight.is_meta:
            raise ConfigError(
                f"{table.name}: is on the meta device and has no rows to fit: load them first, or use fit=False"
            )
    whole = sum(table.weight.nbytes for table in tables)
    available = parse_budget(budget, whole + kept_bytes)
    if available >= whole + kept_bytes:
        return {}
    weights = {table.name: table.weight.detach().cpu() for table in tables}
    fit = PrecisionFit(weights, check_counts_by_table(counts, {table.name: table.num_rows for table in tables}))
    smallest = fit.smallest().num_bytes + kept_bytes
    if available < smallest:
        raise ConfigError(
            f"a budget of {readable_bytes(available)} is too small for these tables: the smallest that method auto "
            f"can keep is {smallest}B, one row for all ids of every table and what stays dense; nothing was changed"
        )
    on_cpu = {name: {**its, "device": torch.device("cpu")} for name, its in options.items()}
    made = fit.fit(fit.choose(available - kept_bytes), on_cpu)
    for table in tables:
        fitted = made[table.name]
        fitted.fit_error = relative_error(weights[table.name], fitted)
        fitted.to(table.weight.device)
    return dict(made)
