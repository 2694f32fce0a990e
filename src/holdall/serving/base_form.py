"""A trained model in the form of a bundle: its tables by the methods, cuts and codebooks that the bundle has.

Rows that training did not change get the bytes that they have in the bundle: rows of few bits are rounded by the same
rule, and codes are the nearest codewords of the same codebooks by the same calibration.
"""

from __future__ import annotations

import torch
from torch import Tensor

from holdall.common.errors import ConfigError
from holdall.data.id_map import load_counts
from holdall.data.schema import Schema
from holdall.embedding.bags import EmbeddingBags
from holdall.models import Model
from holdall.serving.bundle import Bundle
from holdall.serving.bundle_model import BAGS, table_names
from holdall.serving.forms import trained_rows
from holdall.tables import Table
from holdall.tables.bands import BandsTable
from holdall.tables.codes import CodesTable
from holdall.tables.expected_lookups import expected_lookups


@torch.no_grad()
def in_base_form(trained: Model, base: Bundle) -> Model:
    """The trained model with its tables in the methods of a bundle; itself, if they are."""
    methods = base.methods
    other = [name for name in table_names(trained) if trained.bags.table(name).method != methods[name]]
    if not other:
        return trained
    form = base.model(mmap=False)
    calibration = base.calibration()
    rows = trained_rows(trained, other)
    first = {feature.table or feature.name: feature.name for feature in reversed(base.schema.features)}
    tables: dict[str, Table] = {}
    for name in table_names(trained):
        if name not in rows:
            tables[name] = trained.bags.table(name)
            continue
        counts = torch.from_numpy(load_counts(base.path, first[name], Schema.load(base.path)))
        tables[name] = form.bags.table(name)
        try:
            _fit(tables[name], rows[name], expected_lookups(counts), calibration.get(name))
        except ConfigError as error:
            raise ConfigError(f"table '{name}' cannot be stored as in {base.path}: {error}") from None
    bags = EmbeddingBags(tables, trained.bags.features)
    model = base.model_config.with_tables(bags, base.schema, None, "cpu")
    bags.vector_dtype = trained.bags.vector_dtype
    dense = {name: tensor for name, tensor in trained.state_dict().items() if not name.startswith(BAGS)}
    model.load_state_dict(dense, strict=False)
    return model.requires_grad_(False).eval()


def _fit(table: Table, rows: Tensor, lookups: Tensor, transform: Tensor | None) -> None:
    """Fit a table of the bundle to trained rows [num_rows, dim]; its codebooks stay."""
    if isinstance(table, BandsTable):
        for band, part in zip(table.bands, table.parts, strict=True):
            place = slice(band.start, band.end)
            _fit(part, rows[place], lookups[place], transform)
    elif isinstance(table, CodesTable):
        table.encode_rows(rows, transform)
    else:
        table.fit_rows(rows, lookups)
