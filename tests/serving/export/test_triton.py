"""Model repositories for Triton: `config.pbtxt` is valid and names the tensors of the ONNX file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdall.common.errors import ConfigError
from holdall.data.schema import DenseColumn, Feature
from holdall.serving.export.export import export, open_export
from holdall.serving.export.model_inputs import ModelInputs
from holdall.serving.export.onnx_session import open_session
from holdall.serving.export.triton_repository import config_text
from tests.serving.export.conftest import Case


def parsed(text: str) -> Any:
    """Triton's own message of a `config.pbtxt`."""
    messages = pytest.importorskip("tritonclient.grpc.model_config_pb2")
    from google.protobuf import text_format

    return text_format.Parse(text, messages.ModelConfig())


@pytest.mark.slow
def test_a_repository(exported: Callable[[str], Case]) -> None:
    case = exported("ncf")
    model = case.path / "models" / "holdall"
    assert sorted(path.relative_to(model).as_posix() for path in model.rglob("*")) == [
        "1",
        "1/model.onnx",
        "config.pbtxt",
    ]
    assert [path.name for path in (case.path / "models").iterdir()] == ["holdall"]
    config = parsed((model / "config.pbtxt").read_text())
    session = open_session(model / "1" / "model.onnx")
    assert (config.name, config.backend, config.max_batch_size) == ("holdall", "onnxruntime", 4096)
    assert [(one.name, list(one.dims)) for one in config.input] == [("ids", [2])]
    assert [one.name for one in config.input] == [one.name for one in session.get_inputs()]
    assert [one.name for one in config.output] == [one.name for one in session.get_outputs()]
    for output in config.output:  # rows of one number for Triton, and none for the model
        assert (list(output.dims), list(output.reshape.shape), output.HasField("reshape")) == ([1], [], True)
    assert config.HasField("dynamic_batching")
    assert config.dynamic_batching.max_queue_delay_microseconds == 1000
    assert config.instance_group[0].count == 1
    assert open_export(case.path).record.model_file == "models/holdall/1/model.onnx"


def test_bags_come_as_whole_batches() -> None:
    features = (
        Feature(name="user", num_rows=5, unseen=4),
        Feature(name='a "bag"\n', num_rows=5, unseen=4, kind="bag"),
    )
    text = config_text("m", ModelInputs((DenseColumn(name="x"),) * 3, features, (0, 1)))
    config = parsed(text)
    assert config.max_batch_size == 0
    assert not config.HasField("dynamic_batching")
    assert [(one.name, list(one.dims)) for one in config.input] == [
        ("dense", [-1, 3]),
        ("ids", [-1, 1]),
        ('a "bag"\n.values', [-1]),
        ('a "bag"\n.offsets', [-1]),
    ]
    assert [list(one.dims) for one in config.output] == [[-1], [-1]]


@pytest.mark.parametrize("name", ["", "..", "a/b", "-x", "a b"])
def test_names_that_cannot_be_folders_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot name a model of Triton"):
        export(tmp_path / "bundle", tmp_path / "out", format="triton", name=name)
