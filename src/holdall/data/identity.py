"""Identity of a data set by content: the list of its files, and fingerprints that other artifacts keep of it.

Two data sets have the same `ids_fingerprint` if a model of one can be used on the other: the same columns, with the
same raw value behind every id. They have the same `data_fingerprint` if their rows are the same, too.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from holdall.common.checked_files import FileHash
from holdall.common.files import PARTIAL
from holdall.common.output_folder import MARK
from holdall.data.bad_rows import BAD_ROWS_FILE
from holdall.data.id_map import IdMap, id_map_path
from holdall.data.schema import SCHEMA_FILE, Feature, Schema


def with_files(schema: Schema, folder: Path) -> Schema:
    """The schema with the hash of every file of its folder and the fingerprints of its id maps.

    Call it when all files but `schema.json` are written. It reads the id maps, one at a time.
    """
    rows = {file.name for split in schema.splits.values() for file in split.files}
    files = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name not in rows and name not in (SCHEMA_FILE, MARK) and path.suffix != PARTIAL:
            files[name] = FileHash.of(path)
    ids: dict[str, str] = {}
    for feature in schema.features:
        path = id_map_path(folder, feature.name)
        if (feature.table or feature.name) not in ids and path.exists():
            ids[feature.table or feature.name] = IdMap.load(path).fingerprint()
    return replace(schema, files=files, ids=ids)


def ids_fingerprint(schema: Schema) -> str | None:
    """SHA-256 of the columns of a data set and of the values behind its ids; None for one of an earlier version."""
    if schema.ids is None:
        return None
    dense = [[c.name, c.transform, c.mean, c.std, c.missing] for c in schema.dense]
    features = [
        [f.name, f.kind, f.num_rows, f.unseen, f.max_length, f.table or f.name, *transform_record(f)]
        for f in schema.features
    ]
    return json_digest({"dense": dense, "features": features, "ids": schema.ids})


def data_fingerprint(schema: Schema) -> str:
    """SHA-256 of the features of a data set and of its files; `bad_rows.tsv`, which names raw files, does not count."""
    splits = {name: [file.sha256 for file in split.files] for name, split in sorted(schema.splits.items())}
    features = [
        [f.name, f.kind, f.num_rows, f.unseen, f.table or f.name, *transform_record(f)] for f in schema.features
    ]
    document: dict[str, Any] = {"features": features, "files": splits}
    if schema.files is not None:
        document["others"] = {name: file.sha256 for name, file in schema.files.items() if name != BAD_ROWS_FILE}
    return json_digest(document)


def transform_record(feature: Feature) -> list[Any]:
    """Transform of a feature's raw values; nothing without one, so that fingerprints of earlier versions stay."""
    if feature.bucket is None and feature.hash is None and not feature.cross:
        return []
    return [feature.bucket, feature.hash, [asdict(part) for part in feature.cross]]


def json_digest(document: dict[str, Any]) -> str:
    """SHA-256 of a JSON document."""
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()
