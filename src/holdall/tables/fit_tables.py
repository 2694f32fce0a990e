"""Fit of the tables of a model together: codebooks that several tables share are fitted to the rows of all of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from holdall.common.errors import ConfigError
from holdall.tables.bands import fit_common_codebooks
from holdall.tables.codes import share_codebooks
from holdall.tables.method import Method, check_finite
from holdall.tables.table import Table


def fit_tables(
    weights: Mapping[str, Tensor],
    methods: Mapping[str, Method],
    counts: Mapping[str, Tensor] | None = None,
    options: Mapping[str, Mapping[str, Any]] | None = None,
) -> dict[str, Table]:
    """Tables by name, of `methods`, fitted to `weights` [num_rows, dim] with `counts` [num_rows]: see `Method.fit`.

    `options` are the `TableOptions` of each. Tables whose `Codes` name one codebook share it.
    """
    counts, options = counts or {}, options or {}
    tables: dict[str, Table] = {}
    for name, method in methods.items():
        weight = weights[name]
        try:
            check_finite(weight)
            chosen = {"dtype": weight.dtype, "device": weight.device, **options.get(name, {})}
            tables[name] = method.build(*weight.shape, **chosen)
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from error
    share_codebooks(tables.values())
    fit_common_codebooks([(table, weights[name], counts.get(name)) for name, table in tables.items()])
    for name, table in tables.items():
        try:
            table.fit_rows(weights[name], counts.get(name))
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from error
    return tables
