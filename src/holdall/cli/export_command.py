"""Command `export`: a bundle in formats that other programs run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from holdall.cli.options import print_json, refuse_other_model, tyro


def export(
    bundle: tyro.conf.Positional[Path],
    out: Path,
    format: Literal["onnx", "pt2", "triton"],
    name: str = "holdall",
    model: str | None = None,
    overwrite: bool = False,
    json: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> None:
    """Write the model of a bundle in a format that other programs run, checked against the bundle.

    Args:
        bundle: Bundle.
        out: Folder to write.
        format: onnx for a file that onnxruntime and others run, triton for a model repository of Triton Inference
            Server, pt2 for code compiled for this machine (AOTInductor), which executes when it is loaded.
        name: Name of the model in the repository of triton.
        model: The model that it was trained with, where that is one of your own: package.module:Config.
        overwrite: Replace an older export.
        json: Print the description of the export as JSON on stdout.
    """
    from holdall.commands.inspect import inspect, show
    from holdall.serving.export.export import export as run_export

    refuse_other_model(bundle, model)
    run_export(bundle, out, format=format, name=name, overwrite=overwrite)
    if json:
        print_json(inspect(out))
    else:
        show(inspect(out))
