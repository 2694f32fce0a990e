"""Delta: the changes from one bundle to the next, a small folder that names both by content.

    delta.json              base, result (the content of its bundle.json), and the hash of every file
    rows.safetensors        rows of stored tensors that changed; the whole tensor where more than half did
    model.safetensors       weights of the dense part
    tombstones.arrow        ids of withdrawn values, where there are new ones: they score as unseen
    schema.json             that of the result, where values were withdrawn

The base with its deltas in order is, bit for bit, the bundle that the last of them names. Nothing in it can execute
code. The format is in docs/formats.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from holdall.common.checked_files import FileCheck, FileHash
from holdall.common.decode import Count
from holdall.common.errors import DataError
from holdall.common.files import read_json, write_json
from holdall.common.output_folder import FolderKind
from holdall.data.identity import ids_fingerprint
from holdall.data.schema import SCHEMA_FILE, Schema
from holdall.serving.bundle import MODEL_FILE, TABLES_FILE, Bundle, Record, refuse_names
from holdall.serving.changed_rows import Rows, SelectedRows, replace_rows
from holdall.serving.id_lookup import IdLookup, open_lookups
from holdall.serving.mapped_tensors import AnyTensor, MappedTensors, write_tensors

FORMAT = "holdall-delta"
VERSION = 1
DELTA_FILE = "delta.json"
ROWS_FILE = "rows.safetensors"
TOMBSTONES_FILE = "tombstones.arrow"
DELTA = FolderKind("delta", DELTA_FILE, FORMAT)
CURE = "copy the delta again, or make it again with `holdall release --since`"
TOMBSTONES = pa.schema([("table", pa.string()), ("id", pa.int64())])
MAX_SHARE = 0.5
"""Share of changed rows above which a tensor is stored whole."""
_INDEX, _ROWS, _WHOLE = "index.", "rows.", "whole."  # prefixes of a tensor's name in ROWS_FILE


@dataclass(frozen=True, kw_only=True)
class DeltaRecord:
    """Content of `delta.json`."""

    ignores_unknown: ClassVar[bool] = True

    kind: Literal["delta"]
    base: str
    """Fingerprint of the bundle that it changes, with the deltas before this one."""
    base_step: Count | None
    result: Record
    """Content of `bundle.json` of the bundle that it leads to."""
    files: dict[str, FileHash]
    """Every file of the delta but this one."""


class Delta:
    """Delta that was opened: its files have the sizes and hashes of `delta.json`."""

    def __init__(self, path: Path, record: DeltaRecord):
        self.path, self.record = path, record

    @property
    def fingerprint(self) -> str:
        """SHA-256 that names the content of the bundle that it leads to."""
        return self.record.result.fingerprint

    @property
    def schema(self) -> Schema | None:
        """Schema of the result; None where it is that of the base."""
        return Schema.load(self.path) if SCHEMA_FILE in self.record.files else None

    def withdrawn(self, schema: Schema) -> dict[str, Rows]:
        """Ids that it withdraws, ascending, by table."""
        if TOMBSTONES_FILE not in self.record.files:
            return {}
        path = self.path / TOMBSTONES_FILE
        found = _read_tombstones(path)
        rows = {feature.table or feature.name: (feature.num_rows, feature.unseen) for feature in schema.features}
        withdrawn: dict[str, Rows] = {}
        for table in dict.fromkeys(found["table"].to_pylist()):
            ids = found.filter(pc.equal(found["table"], table))["id"].to_numpy()
            if table not in rows:
                raise DataError(f"{path} names a table '{str(table)[:60]}', which the bundle does not have: {CURE}")
            num_rows, unseen = rows[table]
            _refuse_rows(ids, num_rows, f"{path}: table '{table}'")
            if unseen in ids:
                raise DataError(f"{path}: table '{table}' withdraws its unseen row, {unseen}: {CURE}")
            withdrawn[table] = ids
        return withdrawn

    def num_changed(self) -> dict[str, int | None]:
        """Rows of each stored tensor that change; None where it is stored whole."""
        stored = MappedTensors(self.path / ROWS_FILE)
        names = [name for name in stored.names() if not name.startswith(_INDEX)]
        return {name.partition(".")[2]: len(stored[name]) if name.startswith(_ROWS) else None for name in names}

    def num_withdrawn(self) -> dict[str, int]:
        """Values that it withdraws, by table."""
        if TOMBSTONES_FILE not in self.record.files:
            return {}
        tables = _read_tombstones(self.path / TOMBSTONES_FILE)["table"].to_pylist()
        return {table: tables.count(table) for table in dict.fromkeys(tables)}

    def changes(self, tables: MappedTensors) -> list[tuple[Tensor, Rows | None, Tensor]]:
        """Tensors of `tables`, rows of each that change (None: all), and their values, if all of them fit."""
        stored = MappedTensors(self.path / ROWS_FILE)
        for name in stored.names():
            if name.startswith(_INDEX) and f"{_ROWS}{name.removeprefix(_INDEX)}" not in stored.names():
                raise DataError(f"{stored.path} has '{name}' without its rows: {CURE}")
        return [self._change(stored, name, tables) for name in stored.names() if not name.startswith(_INDEX)]

    def _change(self, stored: MappedTensors, name: str, tables: MappedTensors) -> tuple[Tensor, Rows | None, Tensor]:
        prefix = next((prefix for prefix in (_ROWS, _WHOLE) if name.startswith(prefix)), None)
        of = "" if prefix is None else name.removeprefix(prefix)
        if prefix is None or of not in tables.names():
            raise DataError(f"{stored.path} has a tensor '{name[:80]}', which is none of the base: {CURE}")
        if prefix == _ROWS and f"{_WHOLE}{of}" in stored.names():
            raise DataError(f"{stored.path} has the tensor '{of}' twice: {CURE}")
        target, values = tables[of], stored[name]
        index = None
        shape = list(target.shape)
        if prefix == _ROWS:
            index = self._index(stored, of, target)
            shape[0] = len(index)
        if values.dtype != target.dtype or list(values.shape) != shape:
            raise DataError(
                f"{stored.path}: '{name}' has {values.dtype} {list(values.shape)} in the place of {target.dtype} "
                f"{shape}: {CURE}"
            )
        return target, index, values

    def _index(self, stored: MappedTensors, name: str, target: Tensor) -> Rows:
        where = f"{stored.path}: tensor '{name}'"
        if f"{_INDEX}{name}" not in stored.names() or not target.dim():
            raise DataError(f"{where} has rows without their index: {CURE}")
        index = stored[f"{_INDEX}{name}"]
        if index.dtype not in (torch.int32, torch.int64) or index.dim() != 1:
            raise DataError(f"{where} has an index of {index.dtype} {list(index.shape)}: {CURE}")
        rows: Rows = index.numpy().astype(np.int64)
        _refuse_rows(rows, target.shape[0], where)
        return rows


def _refuse_rows(rows: Rows, num_rows: int, where: str) -> None:
    """Raise unless rows are ascending, each once, and in range."""
    if len(rows) and (rows[0] < 0 or rows[-1] >= num_rows):
        outside = rows[0] if rows[0] < 0 else rows[-1]
        raise DataError(f"{where} names row {outside}, and there are {num_rows:,}: {CURE}")
    if bool((rows[1:] <= rows[:-1]).any()):
        raise DataError(f"{where} has rows that are not in ascending order, or twice: {CURE}")


def _read_tombstones(path: Path) -> pa.Table:
    try:
        with pa.memory_map(str(path)) as file:
            found = pa.ipc.open_file(file).read_all()
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path} cannot be read ({error}): {CURE}") from error
    if not found.schema.equals(TOMBSTONES) or any(column.null_count for column in found.columns):
        raise DataError(f"{path} has other columns than table and id, or empty places in them: {CURE}")
    return found


def is_delta(path: Path) -> bool:
    """Whether a folder says that it is a delta."""
    return (path / DELTA_FILE).exists()


def open_delta(path: str | Path, *, verify: bool = False) -> Delta:
    """The delta at `path`, after its files were compared with their hashes.

    A file that this machine has compared before is not read again, except with `verify`.
    """
    path = Path(path)
    if not path.is_dir():
        raise DataError(f"no delta {path}: name a folder that `holdall release --since` made")
    record = read_json(path / DELTA_FILE, DeltaRecord, format=FORMAT, version=VERSION, cure=CURE)
    refuse_names(path, record.files, DELTA_FILE, "a delta", CURE)
    listed = {path / name: hashes for name, hashes in record.files.items()}
    FileCheck(listed, listed_in=DELTA_FILE, cure=CURE, remember=not verify).result()
    needed = [ROWS_FILE, MODEL_FILE, *([SCHEMA_FILE] if TOMBSTONES_FILE in record.files else [])]
    for name in needed:
        if name not in record.files:
            raise DataError(f"{path / DELTA_FILE} does not list {name}, so it cannot be checked: {CURE}")
    for name in (MODEL_FILE, SCHEMA_FILE):
        if name in record.files and record.files[name] != record.result.files.get(name):
            raise DataError(f"{path / DELTA_FILE} leads to a bundle with another {name} than its own: {CURE}")
    return Delta(path, record)


def write_changes(folder: Path, changed: Mapping[str, Rows], tensors: Mapping[str, AnyTensor]) -> None:
    """Write the rows that changed, of every tensor that has some."""
    found: dict[str, AnyTensor] = {}
    for name, rows in changed.items():
        tensor = tensors[name]
        if not len(rows):
            continue
        if not tensor.shape or len(rows) > MAX_SHARE * tensor.shape[0]:
            found[f"{_WHOLE}{name}"] = tensor
            continue
        narrow = np.int32 if tensor.shape[0] <= 2**31 else np.int64
        found[f"{_INDEX}{name}"] = torch.from_numpy(rows.astype(narrow))
        found[f"{_ROWS}{name}"] = SelectedRows(tensor, rows)
    write_tensors(folder / ROWS_FILE, found)


def write_tombstones(folder: Path, withdrawn: Mapping[str, npt.NDArray[np.int64]]) -> None:
    """Write the ids that are withdrawn, by table."""
    tables = np.repeat(np.array(list(withdrawn), dtype=object), [len(ids) for ids in withdrawn.values()])
    ids = np.concatenate(list(withdrawn.values()))
    with pa.OSFile(str(folder / TOMBSTONES_FILE), "wb") as file, pa.ipc.new_file(file, TOMBSTONES) as writer:
        writer.write_table(pa.table({"table": pa.array(tables, pa.string()), "id": ids}, schema=TOMBSTONES))


def write_record(folder: Path, record: DeltaRecord) -> None:
    write_json(folder / DELTA_FILE, {"format": FORMAT, "version": VERSION, **asdict(record)}, hashed=True)


class UpdatedBundle(Bundle):
    """Bundle with deltas applied in memory: the pages of its tables that they touch are private copies.

    `path` is that of the base, whose id maps it has; `withdrawn` are ids of these maps, by table, whose values score as
    unseen.
    """

    def __init__(self, base: Bundle, deltas: Sequence[Delta]):
        record, schema, withdrawn = base.record, base.schema, withdrawn_by_deltas(base)
        before = base.fingerprint
        for delta in deltas:
            if delta.record.base != before:
                raise DataError(
                    f"{delta.path} was made for another bundle ({_named(delta.record.base, delta.record.base_step)}) "
                    f"than {_named(before, record.origin.step)}: apply all deltas since {base.path} in their order, or "
                    f"make one with `holdall release --since` that bundle"
                )
            _refuse_other(delta, record)
            for table, ids in delta.withdrawn(schema).items():
                withdrawn[table] = np.union1d(withdrawn.get(table, ids), ids)
            record, before = delta.record.result, delta.fingerprint
            schema = delta.schema or schema
        super().__init__(base.path, record, schema)
        self.base, self.deltas, self.withdrawn = base, tuple(deltas), withdrawn
        tables = base.tables()
        for delta in deltas:  # what does not fit is refused now, and not when scores are wanted
            delta.changes(tables)

    def chain(self) -> list[Delta]:
        """All deltas since the bundle in the folder `path`."""
        before = self.base.chain() if isinstance(self.base, UpdatedBundle) else []
        return [*before, *self.deltas]

    def id_lookups(self) -> dict[str, IdLookup]:
        reads = [feature.name for feature in self.model_config.reads(self.schema).features]
        listed, schema = self.record.files, Schema.load(self.path)
        return open_lookups(self.path, schema, reads, listed=listed, withdrawn=self.withdrawn)

    def dense_tensors(self) -> MappedTensors:
        return (
            MappedTensors(self.deltas[-1].path / MODEL_FILE, mmap=False) if self.deltas else self.base.dense_tensors()
        )

    def tables(self, *, mmap: bool = True) -> MappedTensors:
        tables = self.base.tables(mmap=mmap)
        for delta in self.deltas:
            apply_delta(tables, delta)
        return tables


def withdrawn_by_deltas(bundle: Bundle) -> dict[str, Rows]:
    """Ids, by table, whose values score as unseen, while the id maps in the folder of the bundle have them."""
    return dict(bundle.withdrawn) if isinstance(bundle, UpdatedBundle) else {}


def apply_delta(tables: MappedTensors, delta: Delta) -> None:
    """Replace the rows of stored tensors that a delta changes."""
    for target, rows, values in delta.changes(tables):
        if rows is None:
            target.copy_(values)
        else:
            replace_rows(target, rows, values)


def apply_deltas(bundle: Bundle, deltas: Sequence[Delta]) -> Bundle:
    """The bundle that deltas lead to, in memory; a delta that was made for another one is refused."""
    return UpdatedBundle(bundle, deltas) if deltas else bundle


def _refuse_other(delta: Delta, before: Record) -> None:
    """Raise if the result of a delta is a bundle of another kind than its base."""
    result, schema = delta.record.result, delta.schema
    for name in ("model", "vector_dtype", "tables"):
        if getattr(result, name) != getattr(before, name):
            raise DataError(f"{delta.path / DELTA_FILE} leads to a bundle with other {name} than its base: {CURE}")
    ids = result.data_set["ids_fingerprint"] if schema is None else ids_fingerprint(schema)
    if ids != before.data_set["ids_fingerprint"]:
        raise DataError(f"{delta.path} has other ids than its base, so it is of another data set: {CURE}")
    if set(result.files) != set(before.files) or result.files[TABLES_FILE].bytes != before.files[TABLES_FILE].bytes:
        raise DataError(f"{delta.path / DELTA_FILE} leads to a bundle with other files than its base: {CURE}")


def _named(fingerprint: str, step: int | None) -> str:
    """A bundle in words."""
    return f"{fingerprint[:12]}, of {'an unknown step' if step is None else f'step {step:,}'}"
