"""Description of an export, as data and on the console."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from holdall.common.console import table
from holdall.common.sizes import readable_bytes
from holdall.serving.export.export_folder import read_record


def describe_export(path: Path) -> dict[str, Any]:
    """JSON-able description of the export at `path`."""
    record = read_record(path)
    num_bytes = sum(file.bytes for file in record.files.values())
    return {"path": str(path), "bytes": num_bytes, **asdict(record)}


def show_export(found: dict[str, Any], console: Console) -> None:
    """Print the description of an export."""
    check, versions = found["check"], found["versions"]
    model = readable_bytes(found["files"][found["model_file"]]["bytes"])
    console.print(f"{found['target']}: {found['model_file']} of {model}, {readable_bytes(found['bytes'])} in all")
    console.print(
        f"{check['rows']} made-up rows: scores differ from those of the bundle by at most {check['score']:.1e} (limit "
        f"{check['limit']:.0e})"
    )
    tensors = table("", "tensor", "type", "shape")
    for kind in ("inputs", "outputs"):
        for tensor in found[kind]:
            tensors.add_row(kind[:-1], tensor["name"], tensor["dtype"], str(tensor["shape"]).replace("'", ""))
    console.print(tensors)
    console.print(
        f"{found['model']['family']} of bundle {found['bundle']['fingerprint'][:12]}, made {found['made']} by "
        f"{', '.join(f'{name} {version}' for name, version in versions.items())}"
    )
