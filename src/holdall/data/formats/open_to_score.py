"""Raw files with rows to score, opened by the layout of the data set that a model was trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from holdall.common.errors import ConfigError, did_you_mean
from holdall.data.formats.avazu import open_avazu
from holdall.data.formats.bookcrossing import open_bookcrossing
from holdall.data.formats.criteo import CRITEO
from holdall.data.formats.registry import FORMATS
from holdall.data.formats.table import load_layout, read_table
from holdall.data.layout import MAX_VALUE_BYTES, Layout
from holdall.data.prepare_config import IMPLICIT, PrepareConfig
from holdall.data.raw_data import RawData
from holdall.data.rows import import_polars
from holdall.data.schema import Schema
from holdall.data.sources import find_sources
from holdall.data.stored_layout import plain_layout, stored_layout

JOINED = {"avazu": open_avazu, "bookcrossing": open_bookcrossing}
"""Formats whose rows are more than the columns of a table."""


def open_to_score(
    sources: Sequence[str | Path], out: Path, schema: Schema, *, format: str | None = None, toml: Path | None = None
) -> RawData:
    """Files (names or patterns) with rows that have the columns of `schema`; labels may be missing.

    They are read as the files that `prepare` read, which the schema describes, unless `format` or a TOML schema says
    otherwise. Implicit data has events of users, not rows: a table with the columns of the schema is expected.
    """
    import_polars()
    stored = stored_layout(schema)
    name = name_of_format(schema, stored, format, toml)
    max_value_bytes = stored[1].max_value_bytes if stored else MAX_VALUE_BYTES
    where = f"--format {name}" if toml is None else str(toml)
    if name in JOINED:
        rule = stored[1].positive if stored and name == "bookcrossing" == stored[0] else None
        positive = None if rule is None else f"{rule.comparison} {rule.threshold}"
        config = PrepareConfig(format=name, positive=positive, max_value_bytes=max_value_bytes)  # type: ignore[arg-type]
        raw = JOINED[name](sources, out, config, to_score=True)
        check_names(raw.layout, schema, where)
        return replace(raw, format=name)
    if toml is not None:
        layout = load_layout(toml)
    elif name == "criteo":
        layout = CRITEO
    elif stored is not None and name == "table" == stored[0]:
        layout = stored[1]
    else:
        layout = plain_layout(schema)
    check_names(layout, schema, where)
    layout = only(replace(layout, label_optional=True, weight=None, time=None, max_value_bytes=max_value_bytes), schema)
    return RawData(
        layout=layout, files=find_sources(sources, out), read=partial(read_table, layout=layout), format="table"
    )


def name_of_format(schema: Schema, stored: tuple[str, Layout] | None, format: str | None, toml: Path | None) -> str:
    """Format that was asked for, or else that of the data set; `table` for data without raw rows."""
    if format is None:
        known = "table" if toml is not None else stored[0] if stored else schema.source.get("format")
        return known if known in (*JOINED, "criteo") else "table"
    if format in IMPLICIT:
        raise ConfigError(
            f"--format {format} has events of users, and no rows to score: leave --format out and give a table, "
            f"Parquet or CSV, with the columns {shown_columns(schema)}"
        )
    if format not in FORMATS:
        raise ConfigError(f"unknown format '{format}'{did_you_mean(format, FORMATS)}")
    if format == "libsvm":
        if stored is None or stored[1].lines != "libsvm":
            raise ConfigError("--format libsvm goes with data that was prepared from such files: leave it out")
        return "table"
    if toml is not None and format != "table":
        raise ConfigError(f"--schema goes with --format table: the layout of {format} is known")
    return format


def check_names(layout: Layout, schema: Schema, where: str) -> None:
    """Raise unless the layout has every column of the schema, of the same kind."""
    dense = {column.name for column in layout.dense}
    kinds = {feature.name: feature.kind for feature in layout.features}
    for column in schema.dense:
        if column.name not in dense:
            raise ConfigError(
                f"{where} has no dense column '{column.name}'{did_you_mean(column.name, dense)}, which the model reads:"
                f" name it in the schema, or give the format that the data set was prepared from"
            )
    for feature in schema.features:
        found = kinds.get(feature.name)
        if found != feature.kind:
            what = "has no feature" if found is None else f"has a {found} where the model reads the {feature.kind}"
            raise ConfigError(
                f"{where} {what} '{feature.name}'{did_you_mean(feature.name, kinds) if found is None else ''}: correct "
                f"the schema, or give the format that the data set was prepared from"
            )


def only(layout: Layout, schema: Schema) -> Layout:
    """The layout without the columns that the schema does not have, so that files need not have them."""
    names = {column.name for column in schema.dense} | {feature.name for feature in schema.features}
    return replace(
        layout,
        dense=tuple(dense for dense in layout.dense if dense.name in names),
        features=tuple(feature for feature in layout.features if feature.name in names),
    )


def shown_columns(schema: Schema, most: int = 12) -> str:
    """Names of the columns that a row has, for an error."""
    names = [column.name for column in schema.dense] + [feature.name for feature in schema.features]
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
