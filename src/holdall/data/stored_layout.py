"""Layout of raw files as `schema.json` stores it, for reading further files of the same kind.

It does not count for fingerprints: ids and rows are the same whatever the raw files looked like.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from holdall.common.decode import decode
from holdall.common.errors import DataError
from holdall.data.layout import Layout, RawDense, RawFeature, RawPart, TextFormat
from holdall.data.raw_data import RawData
from holdall.data.schema import CURE, SCHEMA_FILE, Schema

OWN_READER = "own"
"""Format of a data set that was prepared by a reader that is not of Holdall."""


def layout_json(raw: RawData) -> dict[str, Any]:
    """Format and layout of raw files, as JSON has them."""
    document = {"format": raw.format or OWN_READER, **asdict(raw.layout)}
    del document["label_optional"], document["keep"]
    return json.loads(json.dumps(document))  # lists in the place of tuples, as they are read back


def stored_layout(schema: Schema) -> tuple[str, Layout] | None:
    """Format and layout of the files that a data set was made from; None if its schema does not have them."""
    if schema.layout is None:
        return None
    document = dict(schema.layout)
    name = document.pop("format", None)
    if not isinstance(name, str):
        raise DataError(f"{SCHEMA_FILE}: 'layout.format' is not text: {CURE}")
    return name, decode(document, Layout, SCHEMA_FILE, inside="layout", error=DataError, cure=CURE)


def plain_layout(schema: Schema) -> Layout:
    """Layout of a table whose columns have the names of the schema: Parquet, or CSV with a header."""
    return Layout(
        label=schema.label,
        dense=tuple(RawDense(name=column.name, column=column.name) for column in schema.dense),
        features=tuple(
            RawFeature(
                name=f.name,
                column="" if f.cross else f.name,
                kind=f.kind,
                max_length=f.max_length,
                table=f.table,
                bucket=f.bucket,
                hash=f.hash,
                cross=tuple(RawPart(name=p.name, column=p.name, bucket=p.bucket, hash=p.hash) for p in f.cross),
            )
            for f in schema.features
        ),
        text=TextFormat(header=True, quote='"'),
    )
