"""Bundle: one folder with all that scoring a raw row needs, and the proof of the model's quality.

    bundle.json          what the bundle is, where it comes from, its proof, and the hash of every file
    schema.json          columns, transforms and ids of the data set
    model.safetensors    dense weights
    tables.safetensors   tables, memory-mapped when they are read
    calibration.safetensors   what a change of a row counts, by table, where rows are stored as codes
    ids/*.arrow          raw value behind every id
    ids/*.index          id of every raw value, by its hash
    items.arrow          attributes of items, where the data set has them

Nothing in it can execute code. The format is in docs/formats.md.
"""

from __future__ import annotations

import datetime
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar, Literal

import torch

from holdall import __version__
from holdall.common.checked_files import FileCheck, FileHash
from holdall.common.decode import AnyFloat, Count, PositiveInt
from holdall.common.environment import checkout
from holdall.common.errors import ConfigError, DataError, OwnModelError
from holdall.common.files import read_json, write_json
from holdall.common.output_folder import FolderKind, output_folder
from holdall.data.folder_files import check_other_file, has_other_file
from holdall.data.id_map import IDS_FOLDER, IdMap, id_map_path
from holdall.data.identity import data_fingerprint, ids_fingerprint, json_digest
from holdall.data.items import ITEMS_FILE
from holdall.data.schema import SCHEMA_FILE, Schema
from holdall.models import Model, ModelConfig
from holdall.serving.bundle_model import (
    build_model,
    model_from_json,
    model_json,
    packed_tensors,
    stored_tensors,
    table_names,
)
from holdall.serving.id_lookup import IdLookup, index_path, open_lookups, write_index
from holdall.serving.mapped_tensors import CURE, MappedTensors, write_tensors
from holdall.tables import Method, method_from_json

FORMAT = "holdall-bundle"
VERSION = 1
BUNDLE_FILE = "bundle.json"
MODEL_FILE = "model.safetensors"
TABLES_FILE = "tables.safetensors"
CALIBRATION_FILE = "calibration.safetensors"
BUNDLE = FolderKind("bundle", BUNDLE_FILE, FORMAT)


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Run and checkpoint that a bundle was made from, by content."""

    run: str | None
    """Fingerprint of the run; None for one of an earlier version, or for a model that is of no run."""
    checkpoint: str | None
    step: Count | None


@dataclass(frozen=True, kw_only=True)
class StoredTable:
    """One table of a bundle."""

    method: dict[str, Any]
    rows: PositiveInt
    dim: PositiveInt


@dataclass(frozen=True, kw_only=True)
class Metric:
    """Metric of record: the quality of the model in the bundle."""

    name: str
    split: str
    value: AnyFloat


@dataclass(frozen=True, kw_only=True)
class Quality:
    """Result of a release: size, metrics and the proof that they are those of the trained model."""

    ignores_unknown: ClassVar[bool] = True

    table_bytes: Count
    dense_bytes: Count
    """Bytes of the tables as float32 rows."""
    metrics: tuple[Metric, ...] = ()
    """The metric of record first."""
    proof: dict[str, Any] | None = None
    """Paired differences to the trained model with their bounds; None if the tables are as they were trained."""
    front: list[dict[str, Any]] = field(default_factory=list)
    """Every form that was looked at."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """Content of `bundle.json`."""

    ignores_unknown: ClassVar[bool] = True

    kind: Literal["bundle"]
    made: str
    holdall: str
    commit: str | None
    origin: Origin
    data_set: dict[str, str | None]
    """Fingerprints of the data set and of its ids."""
    model: dict[str, Any]
    """Family and settings."""
    vector_dtype: Literal["float32", "bfloat16", "float16"] | None
    tables: dict[str, StoredTable]
    quality: Quality
    files: dict[str, FileHash]
    """Every file of the bundle but this one, by its path in the folder."""

    @property
    def fingerprint(self) -> str:
        """SHA-256 that names all that scores depend on: the hashes of the files, and how the model reads them."""
        return json_digest(
            {
                "files": {name: file.sha256 for name, file in self.files.items()},
                "model": self.model,
                "tables": {name: asdict(table) for name, table in self.tables.items()},
                "vector_dtype": self.vector_dtype,
            }
        )


class Bundle:
    """Bundle that was opened: its files have the sizes and hashes of `bundle.json`."""

    def __init__(self, path: Path, record: Record, schema: Schema):
        self.path, self.record, self.schema = path, record, schema

    @property
    def fingerprint(self) -> str:
        """SHA-256 that names the content of the bundle."""
        return self.record.fingerprint

    @property
    def model_config(self) -> ModelConfig:
        """Settings of the model."""
        return model_from_json(self.record.model, str(self.path / BUNDLE_FILE))

    def id_lookups(self) -> dict[str, IdLookup]:
        """Id maps of the features that the model reads, by feature; nothing is read of them yet."""
        reads = [feature.name for feature in self.model_config.reads(self.schema).features]
        return open_lookups(self.path, self.schema, reads, listed=self.record.files)

    @property
    def methods(self) -> dict[str, Method]:
        """Storage method of every table."""
        found = {}
        for name, table in self.record.tables.items():
            try:
                found[name] = method_from_json(table.method)
            except ConfigError as error:
                raise DataError(f"{self.path / BUNDLE_FILE}: table '{name}': {error}; {CURE}") from None
        return found

    def model(self, device: torch.device | str = "cpu", *, mmap: bool = True) -> Model:
        """The model in evaluation mode, without gradients.

        On the CPU its tables are views of the file: opening reads none of their rows, and they take memory that the
        system may reclaim. With `mmap=False`, and on other devices, they are copied.
        """
        dtype = self.record.vector_dtype
        vector_dtype = None if dtype is None else getattr(torch, dtype)
        on_cpu, tables = torch.device(device).type == "cpu", self.tables(mmap=mmap)
        if on_cpu:
            tables.expect_lookups()
        model = build_model(self.model_config, self.schema, self.methods, vector_dtype, self.dense_tensors(), tables)
        return model if on_cpu else model.to(device)

    def dense_tensors(self) -> MappedTensors:
        """Tensors of the dense part, in memory."""
        return MappedTensors(self.path / MODEL_FILE, mmap=False)

    def tables(self, *, mmap: bool = True) -> MappedTensors:
        """Tensors of the tables."""
        return MappedTensors(self.path / TABLES_FILE, mmap=mmap)

    def calibration(self) -> dict[str, torch.Tensor]:
        """[dim, dim] by table: rows have the codes of the words that are nearest after this product. May be empty."""
        if CALIBRATION_FILE not in self.record.files:
            return {}
        found = MappedTensors(self.path / CALIBRATION_FILE, mmap=False)
        for name in found.names():
            if name not in self.record.tables or found[name].shape != (self.record.tables[name].dim,) * 2:
                raise DataError(f"{found.path} has a tensor '{name[:60]}' that is no calibration of a table: {CURE}")
        return {name: found[name] for name in found.names()}


def write_bundle(
    out: Path,
    model: Model,
    config: ModelConfig,
    schema: Schema,
    data: Path,
    origin: Origin,
    quality: Quality,
    *,
    calibration: Mapping[str, torch.Tensor] | None = None,
    overwrite: bool = False,
    inputs: Iterable[Path] = (),
) -> Record:
    """Write a model with the id maps of its data set folder as a bundle, whole or not at all.

    `calibration` are the transforms [dim, dim], by table, that rows were coded by (see `precision_levels`).
    """
    others = _other_files(data, schema, config)
    with output_folder(out, BUNDLE, overwrite=overwrite, inputs=[data, *inputs]) as folder:
        schema.save(folder)
        for path in others:
            target = folder / path.relative_to(data)
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, target)
        names = [SCHEMA_FILE, MODEL_FILE, TABLES_FILE, *(path.relative_to(data).as_posix() for path in others)]
        for path in sorted((folder / IDS_FOLDER).iterdir()):
            write_index(index_path(path), IdMap.load(path))
            names.append(index_path(path).relative_to(folder).as_posix())
        dense, tables = stored_tensors(model)
        write_tensors(folder / MODEL_FILE, dense)
        write_tensors(folder / TABLES_FILE, tables, packed_tensors(model))
        if calibration:
            write_tensors(folder / CALIBRATION_FILE, calibration)
            names.append(CALIBRATION_FILE)
        dtype = model.bags.vector_dtype
        record = Record(
            kind="bundle",
            made=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            holdall=__version__,
            commit=checkout()["commit"],
            origin=origin,
            data_set={"fingerprint": data_fingerprint(schema), "ids_fingerprint": ids_fingerprint(schema)},
            model=model_json(config),
            vector_dtype=None if dtype is None else str(dtype).removeprefix("torch."),  # type: ignore[arg-type]
            tables=_stored_tables(model),
            quality=quality,
            files={name: FileHash.of(folder / name) for name in names},
        )
        save_record(folder, record)
    return record


def save_record(folder: Path, record: Record) -> None:
    """Write `bundle.json`."""
    write_json(folder / BUNDLE_FILE, {"format": FORMAT, "version": VERSION, **asdict(record)}, hashed=True)


def _stored_tables(model: Model) -> dict[str, StoredTable]:
    tables = {name: model.bags.table(name) for name in table_names(model)}
    return {
        name: StoredTable(method=table.method.to_json(), rows=table.num_rows, dim=table.dim)
        for name, table in tables.items()
    }


def _other_files(data: Path, schema: Schema, config: ModelConfig) -> list[Path]:
    """Files of a data set folder that scoring raw rows needs, checked: id maps, one a table, and attributes of items.

    `load_id_maps` reads the map of the first feature of every table.
    """
    by_table: dict[str, str] = {}
    for feature in schema.features:
        by_table.setdefault(feature.table or feature.name, feature.name)
    read = {feature.table or feature.name for feature in config.reads(schema).features}
    found = [id_map_path(data, feature) for table, feature in by_table.items() if table in read]
    if has_other_file(data, data / ITEMS_FILE, schema):
        found.append(data / ITEMS_FILE)
    for path in found:
        check_other_file(data, path, schema)
        if not path.is_file():
            raise DataError(
                f"{path} is missing, and a bundle needs it to read raw rows: name the data set folder with its id maps "
                f"(--data)"
            )
    return found


def is_bundle(path: Path) -> bool:
    """Whether a folder says that it is a bundle."""
    return (path / BUNDLE_FILE).exists()


def open_bundle(path: str | Path, *, verify: bool = False) -> Bundle:
    """The bundle at `path`, after its files were compared with their hashes.

    A file that this machine has compared before is not read again, except with `verify`.
    """
    path = Path(path)
    if not path.is_dir():
        raise DataError(f"no bundle {path}: name a folder that `holdall release` made")
    file = path / BUNDLE_FILE
    record = read_json(file, Record, format=FORMAT, version=VERSION, cure=CURE)
    refuse_names(path, record.files)
    listed = {path / name: hashes for name, hashes in record.files.items()}
    FileCheck(listed, listed_in=BUNDLE_FILE, cure=CURE, remember=not verify).result()
    schema = Schema.load(path)
    own = {"fingerprint": data_fingerprint(schema), "ids_fingerprint": ids_fingerprint(schema)}
    if own != record.data_set:
        raise DataError(f"{path / SCHEMA_FILE} is of another data set than {BUNDLE_FILE} says: {CURE}")
    bundle = Bundle(path, record, schema)
    needed = [SCHEMA_FILE, MODEL_FILE, TABLES_FILE]
    with suppress(OwnModelError):  # then the bundle can be described and copied, and has no model that reads them
        needed += [p.relative_to(path).as_posix() for p in _other_files(path, schema, bundle.model_config)]
    for name in needed:
        if name not in record.files:
            raise DataError(f"{file} does not list {name}, so it cannot be checked: {CURE}")
    return bundle


def refuse_names(
    folder: Path, files: Mapping[str, FileHash], listed_in: str = BUNDLE_FILE, kind: str = "a bundle", cure: str = CURE
) -> None:
    """Raise unless every file that a folder's manifest lists is inside it, under a plain name, and no link."""
    for name in files:
        parts = PurePosixPath(name).parts
        plain = bool(parts) and "\\" not in name and name == "/".join(parts)
        if not plain or ".." in parts or parts[0] == "/" or name == listed_in:
            raise DataError(f"{folder / listed_in} names a file outside its folder ({name[:60]!r}): {cure}")
        for depth in range(1, len(parts) + 1):
            inner = folder.joinpath(*parts[:depth])
            if inner.is_symlink():
                raise DataError(f"{inner} is a link, which {kind} does not have: {cure}")
