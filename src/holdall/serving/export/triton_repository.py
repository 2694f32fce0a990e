"""Model repository of Triton Inference Server: an ONNX file under a version, and `config.pbtxt`."""

from __future__ import annotations

import json
import re
from pathlib import Path

from holdall.common.errors import ConfigError
from holdall.serving.export.model_inputs import Input, ModelInputs
from holdall.serving.export.onnx_file import MODEL_FILE, OUTPUTS

REPOSITORY = "models"
"""Folder of the export that is given to Triton."""
MAX_BATCH_ROWS = 4096
MAX_DELAY_US = 1000
"""Microseconds that a request waits, at most, for others to share its batch."""
_TYPES = {"float32": "TYPE_FP32", "int64": "TYPE_INT64"}


def check_name(name: str) -> None:
    """Raise unless a name can be that of a model and of its folder."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}", name):
        raise ConfigError(
            f"--name {name[:60]!r} cannot name a model of Triton: use letters, digits, '_', '-' and '.', and start "
            f"with a letter or digit"
        )


def model_folder(name: str) -> Path:
    """Folder of the one version of a model, within the export."""
    return Path(REPOSITORY, name, "1")


def write_config(folder: Path, name: str, inputs: ModelInputs) -> None:
    """Write `config.pbtxt` to the repository in an export folder."""
    (folder / REPOSITORY / name / "config.pbtxt").write_text(config_text(name, inputs), encoding="utf-8")


def config_text(name: str, inputs: ModelInputs) -> str:
    """Settings of the model: its inputs and outputs, and batches that Triton makes of several requests.

    Triton joins requests along the first dimension, which cannot be done with bags: their ids and offsets have sizes of
    their own. A model with bags takes whole batches, one a request.
    """
    joins = not inputs.bags
    outputs = [Input(output, "float32", ("rows",)) for output in OUTPUTS]
    blocks = [
        f'name: "{name}"',
        'backend: "onnxruntime"',
        f'default_model_filename: "{MODEL_FILE}"',
        f"max_batch_size: {MAX_BATCH_ROWS if joins else 0}",
        *(_tensor("input", one, joins) for one in inputs),
        *(_tensor("output", one, joins) for one in outputs),
        "instance_group [\n  {\n    count: 1\n    kind: KIND_CPU\n  }\n]",
    ]
    if joins:
        blocks.append(f"dynamic_batching {{\n  max_queue_delay_microseconds: {MAX_DELAY_US}\n}}")
    return "\n".join(blocks) + "\n"


def _tensor(kind: str, tensor: Input, joins: bool) -> str:
    """One input or output; where Triton joins requests, its shape is that of a row."""
    sizes = [size if isinstance(size, int) else -1 for size in tensor.shape]
    lines = [f"name: {_quoted(tensor.name)}", f"data_type: {_TYPES[tensor.dtype]}"]
    if not joins:
        lines.append(f"dims: [ {', '.join(map(str, sizes))} ]")
    elif len(sizes) > 1:
        lines.append(f"dims: [ {', '.join(map(str, sizes[1:]))} ]")
    else:  # [rows] to the model, [rows, 1] to clients: a row must have a shape
        lines += ["dims: [ 1 ]", "reshape: { shape: [ ] }"]
    inner = "\n".join(f"    {line}" for line in lines)
    return f"{kind} [\n  {{\n{inner}\n  }}\n]"


def _quoted(text: str) -> str:
    """A string of protobuf's text format."""
    return json.dumps(text, ensure_ascii=False)
