"""Scorer of an ONNX export, run by onnxruntime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from holdall.common.errors import DataError, MissingDependencyError
from holdall.serving.export.export_folder import CURE, ExportRecord
from holdall.serving.export.exported_scorer import ExportedScorer
from holdall.serving.export.model_inputs import Arrays
from holdall.serving.export.onnx_file import OUTPUTS


class OnnxScorer(ExportedScorer):
    """`logits(batch)` of an ONNX file; `num_threads` are those of one operation, all cores when None."""

    def __init__(self, path: Path, record: ExportRecord, *, num_threads: int | None = None):
        super().__init__(path, record)
        self._session = open_session(path / record.model_file, num_threads)

    def _run(self, arrays: Arrays) -> Arrays:
        return dict(zip(OUTPUTS, self._session.run(list(OUTPUTS), arrays), strict=True))


def open_session(file: Path, num_threads: int | None = None) -> Any:
    """onnxruntime's session for a file, on the CPU."""
    try:
        import onnxruntime
    except ImportError:
        raise MissingDependencyError("onnxruntime", "onnx", "scoring with an ONNX export") from None
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors
    if num_threads is not None:
        options.intra_op_num_threads = num_threads
    try:
        return onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's errors have no base class
        reason = str(error).partition("\n")[0]
        raise DataError(f"onnxruntime cannot run {file} ({reason}): {CURE}") from error
