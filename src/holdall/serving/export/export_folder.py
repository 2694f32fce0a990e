"""Folder of an export: the model, all that turns raw rows into its inputs, and their hashes.

    export.json          inputs, transforms, id maps, bundle, versions, result of the check, hash of every file
    schema.json          columns, transforms and ids of the data set
    ids/*.arrow          raw value behind every id
    items.arrow          attributes of items, where the data set has them
    model.onnx           the model; in a folder `models` for Triton, and model.pt2 with weights.safetensors for pt2

The format is in docs/formats.md.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from holdall.common.checked_files import FileCheck, FileHash
from holdall.common.errors import DataError
from holdall.common.files import read_json, write_json
from holdall.common.output_folder import FolderKind
from holdall.data.id_map import id_map_path
from holdall.data.schema import Schema
from holdall.data.transforms import has_transform
from holdall.serving.bundle import refuse_names
from holdall.serving.export.model_inputs import DENSE, IDS, ModelInputs

FORMAT = "holdall-export"
VERSION = 1
EXPORT_FILE = "export.json"
EXPORT = FolderKind("model export", EXPORT_FILE, FORMAT)
CURE = "copy the export again, or make it again with `holdall export`"

Target = Literal["onnx", "pt2", "triton"]


@dataclass(frozen=True, kw_only=True)
class ExportRecord:
    """Content of `export.json`."""

    ignores_unknown: ClassVar[bool] = True

    kind: Literal["export"]
    target: Target
    """Format that the model was exported to."""
    made: str
    holdall: str
    versions: dict[str, str]
    """Of the packages that made it, and of ONNX's operators."""
    bundle: dict[str, Any]
    """Fingerprint of the bundle, training step, fingerprints of its data set."""
    model: dict[str, Any]
    """Family and settings."""
    model_file: str
    inputs: list[dict[str, Any]]
    outputs: list[dict[str, Any]]
    dense: list[dict[str, Any]]
    """Columns of the input `dense`, in order, and their transforms."""
    features: list[dict[str, Any]]
    """Input and column, rows, unseen row and id map of each feature."""
    weights: dict[str, str] = field(default_factory=dict)
    """Of compiled code: the name of each of its weights in `weights.safetensors`."""
    check: dict[str, Any]
    """Largest differences to the scores of the bundle, and the rows that they were measured on."""
    files: dict[str, FileHash]
    """Every file of the export but this one, by its path in the folder."""


def describe_inputs(inputs: ModelInputs, schema: Schema) -> dict[str, Any]:
    """The fields of `export.json` that say what a program has to give the model."""
    first: dict[str, str] = {}
    for feature in schema.features:
        first.setdefault(feature.table or feature.name, feature.name)
    features: list[dict[str, Any]] = []
    for feature in inputs.features:
        place = {"input": IDS, "column": inputs.single.index(feature)} if feature.one_hot else {"input": feature.name}
        path = id_map_path(Path(), first[feature.table or feature.name]).as_posix()
        limits = {"rows": feature.num_rows, "unseen": feature.unseen, "max_length": feature.max_length}
        record = {"name": feature.name, "kind": feature.kind, **place, **limits, "ids": path}
        if has_transform(feature):
            record["transform"] = {name: asdict(feature)[name] for name in ("bucket", "hash", "cross")}
        features.append(record)
    return {
        "inputs": [{"name": one.name, "dtype": one.dtype, "shape": list(one.shape)} for one in inputs],
        "outputs": [{"name": name, "dtype": "float32", "shape": ["rows"]} for name in ("score", "logit")],
        "dense": [{"input": DENSE, "column": i, **asdict(column)} for i, column in enumerate(inputs.dense)],
        "features": features,
    }


def write_record(folder: Path, record: ExportRecord) -> None:
    """Write `export.json`, which ends an export."""
    write_json(folder / EXPORT_FILE, {"format": FORMAT, "version": VERSION, **asdict(record)}, hashed=True)


def is_export(path: Path) -> bool:
    """Whether a folder says that it is an export."""
    return (path / EXPORT_FILE).exists()


def read_record(path: Path, *, verify: bool = False) -> ExportRecord:
    """The description of the export at `path`, after its files were compared with their hashes."""
    if not path.is_dir():
        raise DataError(f"no export {path}: name a folder that `holdall export` made")
    record = read_json(path / EXPORT_FILE, ExportRecord, format=FORMAT, version=VERSION, cure=CURE)
    refuse_names(path, record.files, EXPORT_FILE, "an export", CURE)
    listed = {path / name: hashes for name, hashes in record.files.items()}
    FileCheck(listed, listed_in=EXPORT_FILE, cure=CURE, remember=not verify).result()
    if record.model_file not in record.files:
        raise DataError(f"{path / EXPORT_FILE} does not list {record.model_file[:60]}, so it cannot be checked: {CURE}")
    if type(record.bundle.get("fingerprint")) is not str or type(record.bundle.get("step")) not in (int, type(None)):
        raise DataError(f"{path / EXPORT_FILE} does not say which bundle and step were exported: {CURE}")
    return record
