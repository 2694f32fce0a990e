"""Writer of deltas, and of the bundle that a base and its deltas lead to."""

from __future__ import annotations

import datetime
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from holdall import __version__
from holdall.common.checked_files import FileCheck, FileHash
from holdall.common.environment import checkout
from holdall.common.errors import ConfigError
from holdall.common.output_folder import output_folder
from holdall.data.identity import data_fingerprint, ids_fingerprint
from holdall.data.schema import SCHEMA_FILE, Schema
from holdall.models import Model, ModelConfig
from holdall.serving.bundle import (
    BUNDLE,
    BUNDLE_FILE,
    MODEL_FILE,
    TABLES_FILE,
    Bundle,
    Origin,
    Quality,
    Record,
    save_record,
)
from holdall.serving.bundle_model import stored_tensors
from holdall.serving.changed_rows import Rows, compare_tensors
from holdall.serving.delta import (
    DELTA,
    ROWS_FILE,
    TOMBSTONES_FILE,
    Delta,
    DeltaRecord,
    UpdatedBundle,
    apply_delta,
    withdrawn_by_deltas,
    write_changes,
    write_record,
    write_tombstones,
)
from holdall.serving.mapped_tensors import AnyTensor, MappedTensors, write_tensors
from holdall.serving.trained_run import ReleaseReport
from holdall.serving.withdraw import all_withdrawn, joined, overwrite_withdrawn, with_id_maps, write_id_maps


def write_delta(
    out: Path,
    model: Model,
    config: ModelConfig,
    base: Bundle,
    origin: Origin,
    quality: Callable[[Bundle], Quality],
    *,
    withdrawn: Mapping[str, Rows] | None = None,
    overwrite: bool = False,
    inputs: Iterable[Path] = (),
) -> ReleaseReport:
    """Write the changes from a bundle to a model in the same methods, whole or not at all.

    `withdrawn` are ids, by table, whose values score as unseen from now on. `quality` is called with the result before
    the delta gets its name; an error of it leaves nothing.
    """
    _refuse_other_model(model, config, base)
    new = {table: ids for table, ids in (withdrawn or {}).items() if len(ids)}
    dense, tables = stored_tensors(model)
    tensors: dict[str, AnyTensor] = {**tables}
    without_rows = overwrite_withdrawn(model, tensors, joined(all_withdrawn(base), new), base.schema)
    stored = base.tables()
    _refuse_other_tensors(tensors, stored, base)
    with output_folder(out, DELTA, overwrite=overwrite, inputs=[base.path, *inputs]) as folder:
        found = compare_tensors(stored, tensors)
        write_tensors(folder / MODEL_FILE, dense)
        write_changes(folder, found.changed, tensors)
        tables_file = replace(base.record.files[TABLES_FILE], sha256=found.sha256)
        own = {name: FileHash.of(folder / name) for name in (ROWS_FILE, MODEL_FILE)}
        files = {**base.record.files, TABLES_FILE: tables_file, MODEL_FILE: own[MODEL_FILE]}
        schema = base.schema
        if new:
            maps, schema = _without_values(base, new, folder)
            write_tombstones(folder, new)
            own |= {name: FileHash.of(folder / name) for name in (TOMBSTONES_FILE, SCHEMA_FILE)}
            files |= {**maps, SCHEMA_FILE: own[SCHEMA_FILE]}
        result = replace(
            base.record,
            made=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            holdall=__version__,
            commit=checkout()["commit"],
            origin=origin,
            data_set={"fingerprint": data_fingerprint(schema), "ids_fingerprint": ids_fingerprint(schema)},
            files=files,
        )
        step = base.record.origin.step
        record = DeltaRecord(kind="delta", base=base.fingerprint, base_step=step, result=result, files=own)
        proved = quality(UpdatedBundle(base, [Delta(folder, record)]))
        record = replace(record, result=replace(result, quality=proved))
        write_record(folder, record)
    return ReleaseReport(out, record.result, without_rows=tuple(without_rows))


def _without_values(base: Bundle, new: Mapping[str, Rows], folder: Path) -> tuple[dict[str, FileHash], Schema]:
    """Id maps of the result, by name, and its schema, which is written into the folder."""
    withdrawn = joined(withdrawn_by_deltas(base), new)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        maps = write_id_maps(base, Path(scratch), {table: withdrawn[table] for table in new})
    schema = with_id_maps(base.schema, maps)
    schema.save(folder)
    return maps, schema


def _refuse_other_model(model: Model, config: ModelConfig, base: Bundle) -> None:
    """Raise if a model is not of the settings that the base has."""
    dtype = model.bags.vector_dtype
    found = {"settings": config, "type of vectors": None if dtype is None else str(dtype).removeprefix("torch.")}
    expected = {"settings": base.model_config, "type of vectors": base.record.vector_dtype}
    for name, value in found.items():
        if value != expected[name]:
            raise ConfigError(
                f"the model has another {name} than {base.path}, so a delta cannot lead there: release a new bundle, "
                f"without --since"
            )


def _refuse_other_tensors(tensors: Mapping[str, AnyTensor], stored: MappedTensors, base: Bundle) -> None:
    """Raise unless tensors have the names, types and shapes of those in the base."""
    for name in {**tensors, **dict.fromkeys(stored.names())}:
        own = tensors.get(name)
        if own is None or name not in stored.names():
            where = "the model" if own is None else str(base.path)
            raise ConfigError(f"{where} has no tensor '{name}' of a table: release a new bundle, without --since")
        if tuple(own.shape) != tuple(stored[name].shape) or own.dtype != stored[name].dtype:
            raise ConfigError(
                f"tensor '{name}' is {own.dtype} {list(own.shape)}, and in {base.path} {stored[name].dtype} "
                f"{list(stored[name].shape)}: release a new bundle, without --since"
            )


def merge_deltas(
    base: Bundle, deltas: Sequence[Delta], out: str | Path, *, overwrite: bool = False, inputs: Iterable[Path] = ()
) -> Record:
    """Write the bundle that a base and its deltas lead to; every file is compared with the hash that the last names."""
    bundle = UpdatedBundle(base, deltas)
    chain = bundle.chain()
    used = [bundle.path, *(delta.path for delta in chain), *inputs]
    with output_folder(Path(out), BUNDLE, overwrite=overwrite, inputs=used) as folder:
        written = write_id_maps(bundle, folder, bundle.withdrawn)
        for name in bundle.record.files:
            if name not in written:
                (folder / name).parent.mkdir(exist_ok=True)
                shutil.copyfile(bundle.path / name, folder / name)
        for delta in chain:
            for name in (MODEL_FILE, SCHEMA_FILE):
                if name in delta.record.files:
                    shutil.copyfile(delta.path / name, folder / name)
        tables = MappedTensors(folder / TABLES_FILE, shared=True)
        for delta in chain:
            apply_delta(tables, delta)
        del tables
        listed = {folder / name: file for name, file in bundle.record.files.items()}
        cure = "make the deltas again with `holdall release --since`"
        FileCheck(listed, listed_in=f"the last delta, {BUNDLE_FILE}", cure=cure, remember=False).result()
        save_record(folder, bundle.record)
    return bundle.record
