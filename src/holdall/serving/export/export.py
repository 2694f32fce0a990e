"""Export of a bundle to a format that other programs run, checked against the bundle."""

from __future__ import annotations

import datetime
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

import torch
from torch import Tensor

from holdall import __version__
from holdall.common.checked_files import FileHash
from holdall.common.errors import ConfigError, did_you_mean
from holdall.common.output_folder import output_folder
from holdall.models import Model
from holdall.serving.bundle import MODEL_FILE, TABLES_FILE, Bundle, open_bundle
from holdall.serving.export import compiled_package, onnx_file, triton_repository
from holdall.serving.export.export_check import check_batches, check_export
from holdall.serving.export.export_folder import (
    EXPORT,
    ExportRecord,
    Target,
    describe_inputs,
    read_record,
    write_record,
)
from holdall.serving.export.exported_scorer import ExportedScorer
from holdall.serving.export.model_inputs import ModelInputs
from holdall.serving.export.onnx_session import OnnxScorer
from holdall.serving.export.traced_model import TracedModel

TARGETS: tuple[Target, ...] = get_args(Target)


@dataclass(frozen=True)
class ExportReport:
    """Export that was written, and what is known about it."""

    path: Path
    record: ExportRecord


def export(
    bundle: str | Path, out: str | Path, *, format: Target = "onnx", name: str = "holdall", overwrite: bool = False
) -> ExportReport:
    """Write the model of a bundle in a format that other programs run, with all that makes its inputs of raw rows.

    `onnx` is a file for onnxruntime and others, `triton` a model repository for Triton Inference Server with that file,
    under `name`. `pt2` is code that is compiled for this machine, which takes a C++ compiler, and that executes when it
    is loaded. The export must score made-up rows as the bundle does, to 1e-5, or nothing is kept.
    """
    if format not in TARGETS:
        raise ConfigError(f"--format {format} is unknown{did_you_mean(format, TARGETS)}")
    if format == "pt2":
        compiled_package.check_compiler()
    else:
        onnx_file.check_onnx_packages()
    triton_repository.check_name(name)
    opened = open_bundle(bundle)
    with output_folder(Path(out), EXPORT, overwrite=overwrite, inputs=[Path(bundle)]) as folder:
        for copied in opened.record.files.keys() - {MODEL_FILE, TABLES_FILE}:
            (folder / copied).parent.mkdir(exist_ok=True)
            shutil.copyfile(opened.path / copied, folder / copied)
        record = _write_model(folder, opened, format, name)
        record = replace(record, check=check_export(_open(folder, record), opened.model()).to_json())
        write_record(folder, record)
    return ExportReport(Path(out), record)


def _write_model(folder: Path, bundle: Bundle, target: Target, name: str) -> ExportRecord:
    """Write the model, and describe what is in the folder."""
    inputs = ModelInputs.of(bundle.model_config, bundle.schema)
    model = bundle.model()
    if target == "pt2":
        compiled_package.refuse_hashes(model.bags)
    examples = _examples(bundle, model, inputs)
    traced = TracedModel(model, inputs)
    place = triton_repository.model_folder(name) if target == "triton" else Path()
    (folder / place).mkdir(parents=True, exist_ok=True)
    weights: dict[str, str] = {}
    try:
        if target == "pt2":
            versions, weights = compiled_package.write_package(folder, traced, examples)
        else:
            versions = onnx_file.write_onnx(folder / place, traced, examples)
    except (RuntimeError, NotImplementedError) as error:  # of torch's exporter
        methods = ", ".join(sorted({method.name for method in bundle.methods.values()}))
        raise ConfigError(
            f"the model of {bundle.path}, with tables stored by {methods}, cannot be exported to {target} "
            f"({str(error).strip().partition(chr(10))[0]}): release it with tables in bands (`holdall release RUN "
            f"--budget 1/10`) or as they were trained (--as-trained), and export that bundle"
        ) from error
    if target == "triton":
        triton_repository.write_config(folder, name, inputs)
    origin = {"step": bundle.record.origin.step, "run": bundle.record.origin.run}
    files = sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".holdall-"))
    return ExportRecord(
        kind="export",
        target=target,
        made=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        holdall=__version__,
        versions=versions,
        bundle={"fingerprint": bundle.fingerprint, **origin, "data_set": bundle.record.data_set},
        model=bundle.record.model,
        model_file=(place / (compiled_package.PACKAGE_FILE if target == "pt2" else onnx_file.MODEL_FILE)).as_posix(),
        weights=weights,
        **describe_inputs(inputs, bundle.schema),
        check={},
        files={path.relative_to(folder).as_posix(): FileHash.of(path) for path in files},
    )


def _examples(bundle: Bundle, model: Model, inputs: ModelInputs) -> tuple[Tensor, ...]:
    """Inputs that the model is traced with."""
    arrays = inputs.arrays(next(check_batches(bundle.schema, model)))
    return tuple(torch.from_numpy(arrays[given.name]) for given in inputs)


def open_export(path: str | Path, *, num_threads: int | None = None, run_code: bool = False) -> ExportedScorer:
    """The scorer of the export at `path`, after its files were compared with their hashes.

    `num_threads` are those of onnxruntime, all cores when None. A package of compiled code (`pt2`) is loaded with
    `run_code` only: it can do whatever this process can. Hashes tell that it is whole, not that it can be trusted.
    """
    path = Path(path)
    record = read_record(path)
    if record.target == "pt2" and not run_code:
        raise ConfigError(
            f"{path} is compiled code, which executes when it is loaded: pass run_code=True (on the command line "
            f"--run-code) if you trust where it comes from, or export the bundle with --format onnx"
        )
    return _open(path, record, num_threads)


def _open(path: Path, record: ExportRecord, num_threads: int | None = None) -> ExportedScorer:
    if record.target == "pt2":
        return compiled_package.CompiledScorer(path, record)
    return OnnxScorer(path, record, num_threads=num_threads)
