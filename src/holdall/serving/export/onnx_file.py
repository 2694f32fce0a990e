"""ONNX file of a model, made by torch's exporter."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from holdall.common.errors import MissingDependencyError
from holdall.serving.export.model_inputs import ModelInputs
from holdall.serving.export.traced_model import TracedModel

MODEL_FILE = "model.onnx"
OUTPUTS = ("score", "logit")
MAX_FILE_BYTES = 2**31 - 2**24
"""Bytes of weights that one file can have, by protobuf's limit of 2 GB; more are in a second file beside it."""
PURPOSE = "export to ONNX"


def check_onnx_packages() -> None:
    """Raise, naming what to install, unless ONNX files can be written and run."""
    import importlib.util

    for package in ("onnx", "onnxscript", "onnxruntime"):
        if importlib.util.find_spec(package) is None:
            raise MissingDependencyError(package, "onnx", PURPOSE)


def write_onnx(folder: Path, model: TracedModel, examples: tuple[Tensor, ...]) -> dict[str, str]:
    """Write the model to `folder`; returns the versions of the packages and of the operators."""
    import onnx
    import onnxscript

    with quiet(), torch.no_grad():
        program: Any = torch.onnx.export(
            model,
            examples,
            dynamo=True,
            verbose=False,
            dynamic_shapes=(dynamic_shapes(model.inputs),),
            input_names=model.names,
            output_names=list(OUTPUTS),
        )
        _strip_traces(program.model)
        num_bytes = sum(value.const_value.nbytes for value in program.model.graph.initializers.values())
        program.save(folder / MODEL_FILE, external_data=num_bytes > MAX_FILE_BYTES)
    return {
        "torch": torch.__version__,
        "onnx": onnx.__version__,
        "onnxscript": onnxscript.__version__,
        "opset": str(program.model.opset_imports[""]),
        "ir": str(program.model.ir_version),
    }


def dynamic_shapes(inputs: ModelInputs) -> tuple[dict[int, Any], ...]:
    """Sizes that differ from call to call, as `torch.export` takes them: rows, and ids of each bag."""
    rows = torch.export.Dim("rows", min=1)

    def size(name: str) -> Any:
        known = {"rows": rows, "rows + 1": rows + 1}
        return known[name] if name in known else torch.export.Dim(name, min=0)

    return tuple(
        {place: size(name) for place, name in enumerate(given.shape) if isinstance(name, str)} for given in inputs
    )


def _strip_traces(model: Any) -> None:
    """Drop the Python stack of every operation, which has paths of this machine and makes small models large."""
    model.metadata_props.clear()
    for graph in (model.graph, *(function.graph for function in model.functions.values())):
        graph.metadata_props.clear()
        for node in graph.all_nodes():
            node.metadata_props.clear()
            node.doc_string = None


@contextmanager
def quiet() -> Iterator[None]:
    """Context without the exporter's notes on packages that are absent and on operators of its own choice."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
