"""Package of compiled code, by AOTInductor: fast where it was made, and executed by whoever loads it.

    model.pt2              code for this kind of processor and this version of torch, without weights
    weights.safetensors    weights, each once; mapped when the package is loaded

Everything else that Holdall reads is data. This is not, so nothing loads it unless it is told to.
"""

from __future__ import annotations

import os
import platform
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from holdall.common.errors import ConfigError, DataError
from holdall.embedding.bags import EmbeddingBags
from holdall.serving.export.export_folder import CURE, ExportRecord
from holdall.serving.export.exported_scorer import ExportedScorer
from holdall.serving.export.model_inputs import Arrays
from holdall.serving.export.onnx_file import OUTPUTS, dynamic_shapes, quiet
from holdall.serving.export.traced_model import TracedModel
from holdall.serving.mapped_tensors import MappedTensors, write_tensors
from holdall.tables import Table

if TYPE_CHECKING:
    from torch.export import ExportedProgram

PACKAGE_FILE = "model.pt2"
WEIGHTS_FILE = "weights.safetensors"
_EXTENSIONS = ("DEFAULT", "AVX2", "AVX512")
"""Instruction sets of x86 processors, each with all of those before it."""


def check_compiler() -> None:
    """Raise, naming what to install, unless there is a C++ compiler."""
    name = os.environ.get("CXX", "g++")
    if shutil.which(name) is None:
        raise ConfigError(
            f"--format pt2 compiles C++, and there is no {name}: install a compiler (the package g++ of Debian and "
            f"Ubuntu, gcc-c++ of Fedora), or name one in the environment variable CXX"
        )


def refuse_hashes(bags: EmbeddingBags) -> None:
    """Raise, naming the table, if a method hashes ids: its products wrap around, which is undefined in compiled C++.

    A package of four such tables scored otherwise than the bundle by up to 0.1.
    """
    for name in dict.fromkeys(bags.features.values()):
        for part in bags.table(name).modules():
            if isinstance(part, Table) and part._hash_seed() is not None:
                raise ConfigError(
                    f"table '{name}' is stored by {part.method.name}, which hashes ids by 64-bit products that wrap "
                    f"around, and --format pt2 cannot hold that: use --format onnx, or release the run with tables in "
                    f"bands (`holdall release RUN --budget 1/10`)"
                )


def write_package(
    folder: Path, model: TracedModel, examples: tuple[Tensor, ...]
) -> tuple[dict[str, str], dict[str, str]]:
    """Compile the model and write code and weights to `folder`.

    Returns what the code was made with and for, and, by the name that the code has for it, the name of each weight in
    the file: weights that tables share are stored once.
    """
    import torch._inductor
    from torch._inductor import config

    with quiet(), torch.no_grad(), config.patch(compile_threads=1):
        shapes = (dynamic_shapes(model.inputs),)
        program = torch.export.export(model, examples, dynamic_shapes=shapes, strict=False)
        _name_constants(program)
        torch._inductor.aoti_compile_and_package(
            program,
            package_path=str(folder / PACKAGE_FILE),
            inductor_configs={"aot_inductor.package_constants_in_so": False},
        )
        names = sorted(torch._inductor.aoti_load_package(str(folder / PACKAGE_FILE)).get_constant_fqns())
    found: dict[str, Any] = {**program.constants, **program.state_dict}
    stored: dict[tuple[int, torch.Size, torch.dtype], str] = {}
    weights = {}
    for name in names:
        tensor = found[name]
        weights[name] = stored.setdefault((tensor.data_ptr(), tensor.shape, tensor.dtype), name)
    write_tensors(folder / WEIGHTS_FILE, {name: found[name].detach() for name in stored.values()})
    return {"torch": torch.__version__, **_processor()}, weights


def _name_constants(program: ExportedProgram) -> None:
    """Make buffers of the tensors that are neither parameters nor buffers: compiled code keeps the names of those only.

    Such a tensor is kept by a model, or in a cache that was filled before the export.
    """
    from torch.export.graph_signature import InputKind

    for spec in program.graph_signature.input_specs:
        if spec.kind is InputKind.CONSTANT_TENSOR:
            spec.kind, spec.persistent = InputKind.BUFFER, False


def _processor() -> dict[str, str]:
    """Kind of this machine's processor."""
    return {"machine": platform.machine(), "instructions": torch.backends.cpu.get_cpu_capability()}


class CompiledScorer(ExportedScorer):
    """`logits(batch)` of a package. Making one executes the code of the package."""

    def __init__(self, path: Path, record: ExportRecord):
        super().__init__(path, record)
        _refuse_other_machines(path, record.versions)
        if not {record.model_file, WEIGHTS_FILE} <= record.files.keys():
            raise DataError(f"{path} lacks {WEIGHTS_FILE} or the model: {CURE}")
        import torch._inductor

        self._tensors = MappedTensors(path / WEIGHTS_FILE)
        with quiet():
            self._model: Any = torch._inductor.aoti_load_package(str(path / record.model_file))
        missing = [name for name in record.weights.values() if name not in self._tensors.names()]
        if missing or set(record.weights) != set(self._model.get_constant_fqns()):
            raise DataError(f"{path / WEIGHTS_FILE} has other weights than the model needs: {CURE}")
        weights = {name: self._tensors[stored] for name, stored in record.weights.items()}
        self._model.load_constants(weights, check_full_update=True, user_managed=True)

    def _run(self, arrays: Arrays) -> Arrays:
        with torch.no_grad():
            found = self._model(*(torch.from_numpy(arrays[given.name]) for given in self.inputs))
        return {name: tensor.numpy() for name, tensor in zip(OUTPUTS, found, strict=True)}


def _refuse_other_machines(path: Path, made: dict[str, str]) -> None:
    """Raise unless the code was compiled for this version of torch and this kind of processor."""
    here = {"torch": torch.__version__, **_processor()}
    for name, found in here.items():
        expected = made.get(name, "unknown")
        runs = found == expected
        if name == "instructions" and {found, expected} <= set(_EXTENSIONS):
            runs = _EXTENSIONS.index(expected) <= _EXTENSIONS.index(found)
        if not runs:
            raise DataError(
                f"{path} was compiled for {name} {expected}, and this is {found}: export the bundle again here, or "
                f"with --format onnx, which runs anywhere"
            )
