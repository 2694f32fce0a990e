"""Account of one raw row: what each of its values became on the way to the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from rich.console import Console

from holdall.common.console import table
from holdall.data.schema import Feature
from holdall.data.transforms import has_transform, value_text
from holdall.models import Model
from holdall.serving.row_encoder import RowEncoder
from holdall.tables import Table
from holdall.tables.bands import BandsTable
from holdall.tables.describe import describe_method


@dataclass(frozen=True)
class ExplainedNumber:
    """Value of one dense column."""

    name: str
    raw: float | None
    """None where it is missing."""
    transform: str
    value: float
    """Number that the model reads."""


@dataclass(frozen=True)
class ExplainedValue:
    """One value of a categorical feature, bag or sequence."""

    name: str
    raw: str
    """Its text; empty where it is missing."""
    id: int
    count: int
    """Occurrences in the training split; of all rare values together for the unseen row."""
    is_unseen: bool
    """Whether training did not have the value, or too rarely, so that it has the unseen row."""
    mapped: str
    """Text in the id map: the raw one, or its bucket, hash or cross."""
    stored: str
    """Storage of its row: the method of the table, or the band that it is in."""


@dataclass(frozen=True)
class ExplainedRow:
    """Every value of a row; printed, it is a table."""

    dense: tuple[ExplainedNumber, ...]
    values: tuple[ExplainedValue, ...]

    def __str__(self) -> str:
        shown = table("column", "raw", "became", "count", "stored")
        for number in self.dense:
            raw = "missing" if number.raw is None else f"{number.raw:g}"
            shown.add_row(number.name, raw, f"{number.value:.6g}", "", f"transform {number.transform}")
        for value in self.values:
            mapped = "" if value.mapped == value.raw else f"{value.mapped or 'missing'}: "
            became = f"{mapped}id {value.id:,}{' (unseen)' if value.is_unseen else ''}"
            shown.add_row(value.name, value.raw or "missing", became, f"{value.count:,}", value.stored)
        console = Console(width=200, markup=False, emoji=False, color_system=None)
        with console.capture() as capture:
            console.print(shown)
        return capture.get().rstrip("\n")


def explain_row(row: Mapping[str, Any], encoder: RowEncoder, model: Model) -> ExplainedRow:
    """The account of a row; the encoder's counts of unseen values stay as they are."""
    form, unseen = encoder.form, dict(encoder.num_unseen)
    columns = form.table([row])
    try:
        batch = encoder.columns.encode(columns)
    finally:
        encoder.num_unseen.update(unseen)
    dense = tuple(
        ExplainedNumber(column.name, columns[column.name][0].as_py(), column.transform, float(batch.dense[0, index]))
        for index, column in enumerate(form.schema.dense)
    )
    found = []
    for position, feature in enumerate(form.schema.features):
        if feature.name not in form.reads:
            continue
        ids = batch.ids.bag(position)[0].tolist()
        texts = raw_texts(columns, feature)
        texts = texts[len(texts) - len(ids) :] if feature.kind == "sequence" else texts[: len(ids)]
        lookup = encoder.lookups[feature.name]
        stored_in = model.bags.table(feature.table or feature.name)
        for text, number in zip(texts, ids, strict=True):
            found.append(
                ExplainedValue(
                    feature.name,
                    text,
                    number,
                    lookup.count(number),
                    is_unseen=number == lookup.unseen,
                    mapped=mapped_text(columns, feature, text),
                    stored=stored_as(stored_in, number),
                )
            )
    return ExplainedRow(dense, tuple(found))


def raw_texts(columns: pa.Table, feature: Feature) -> list[str]:
    """Raw values of a feature in the one row of a table."""
    if feature.cross:
        return [", ".join(f"{part.name} {shown_value(columns, part.name) or 'missing'}" for part in feature.cross)]
    return [shown_value(columns, feature.name)] if feature.one_hot else columns[feature.name][0].as_py()


def shown_value(columns: pa.Table, name: str) -> str:
    value = columns[name][0].as_py()
    return "" if value is None else f"{value:g}" if isinstance(value, float) else value


def mapped_text(columns: pa.Table, feature: Feature, raw: str) -> str:
    """Text of a value in the id map."""
    if not has_transform(feature):
        return raw
    return value_text(feature, lambda name: columns[name][0].as_py() if feature.one_hot else raw, lambda v: v or "")


def stored_as(stored_in: Table, number: int) -> str:
    """Storage of one row of a table."""
    if not isinstance(stored_in, BandsTable):
        return describe_method(stored_in.method, stored_in.num_rows)
    band = next(band for band in stored_in.bands if number < band.end)
    return f"{describe_method(band.method, band.end - band.start)}, ids {band.start:,} to {band.end - 1:,}"
