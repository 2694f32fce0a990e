"""The command `holdall inspect`: description of a data folder, run folder, bundle, delta, export, published folder or
checkpoint, as data or on the console."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from holdall import checkpoint
from holdall.commands.train_summary import show_tables
from holdall.common.console import make_console, styled, table
from holdall.common.errors import DataError
from holdall.common.sizes import readable_bytes
from holdall.data.identity import data_fingerprint, ids_fingerprint
from holdall.data.schema import SCHEMA_FILE, Schema
from holdall.models.model import table_rows
from holdall.serving.bundle import is_bundle, open_bundle
from holdall.serving.delta import is_delta, open_delta
from holdall.serving.export.export_folder import is_export
from holdall.serving.export.render import describe_export, show_export
from holdall.serving.published_folder import describe_published, is_published
from holdall.serving.render import describe, describe_delta, show_bundle, show_delta, show_published
from holdall.tables.describe import describe_method
from holdall.training.evaluate_run import BEST, CHECKPOINTS
from holdall.training.same_data import DATA_SET, TABLE_SIZES
from holdall.training.table_methods import stored_methods
from holdall.training.tracking import RUN_FILE, RunRecord, read_metrics, read_run


def inspect(path: str | Path) -> dict[str, Any]:
    """A JSON-able description of the artifact at `path`."""
    path = Path(path)
    if not path.exists():
        raise DataError(f"{path} does not exist: give a data folder, a run folder, a bundle or a checkpoint")
    if is_bundle(path):
        return describe(open_bundle(path))
    if is_delta(path):
        return describe_delta(open_delta(path))
    if is_published(path):
        return describe_published(path)
    if is_export(path):
        return describe_export(path)
    if (path / RUN_FILE).exists():
        return _run(path)
    if (path / CHECKPOINTS).exists():
        raise DataError(f"{path} has checkpoints but no {RUN_FILE}: put its {RUN_FILE} back")
    if (path / SCHEMA_FILE).exists():
        return _data(path)
    if (path / checkpoint.MANIFEST).exists():
        return _checkpoint(path)
    raise DataError(f"{path} is not a data folder, a run folder, a bundle or a checkpoint: it has none of their files")


def _data(path: Path) -> dict[str, Any]:
    schema = Schema.load(path)
    return {
        "kind": "data",
        "path": str(path),
        "splits": {
            name: {"rows": split.rows, "positives": split.positives, "files": len(split.files)}
            for name, split in schema.splits.items()
        },
        "label": schema.label,
        "weight": None if schema.weight is None else asdict(schema.weight),
        "dense": [column.name for column in schema.dense],
        "features": [
            {"name": f.name, "kind": f.kind, "rows": f.num_rows, "unseen": f.unseen, "ordered_from": f.ordered_from}
            for f in schema.features
        ],
        "bytes": sum(file.bytes for split in schema.splits.values() for file in split.files),
        "fingerprint": data_fingerprint(schema),
        "ids_fingerprint": ids_fingerprint(schema),
        "source": schema.source,
    }


def _run(path: Path) -> dict[str, Any]:
    document = read_run(path)
    rows = read_metrics(path)
    last = {split: row for row in rows for split in [row["split"]]}
    saved = checkpoint.newest(path / CHECKPOINTS)
    best = checkpoint.newest(path / BEST)
    return {
        "kind": "run",
        "path": str(path),
        "started": document["started"],
        "commit": document.get("commit"),
        "versions": document["versions"],
        "hardware": document["hardware"],
        "config": document["config"],
        "data_set": document.get(DATA_SET),
        "tables": _tables(path, document),
        "table_sizes": document.get(TABLE_SIZES),
        "last": last,
        "checkpoint": saved.name if saved else None,
        "best": best.name if best else None,
    }


def _tables(path: Path, document: RunRecord) -> dict[str, str]:
    """Words for the method of each table that `run.json` has."""
    methods = stored_methods(path, document) or {}
    num_rows = table_rows(Schema.load(path)) if methods else {}
    return {name: describe_method(method, num_rows[name]) for name, method in methods.items() if name in num_rows}


def _checkpoint(path: Path) -> dict[str, Any]:
    found = checkpoint.read(path)
    return {
        "kind": "checkpoint",
        "path": str(path),
        "step": found.step,
        "bytes": sum(shard.bytes for shard in found.shards.values()),
        "shards": len(found.shards),
        "tensors": {
            name: {"dtype": tensor.dtype, "shape": list(tensor.shape), "bytes": tensor.num_bytes}
            for name, tensor in found.tensors.items()
        },
        "state": found.state,
    }


def show(description: dict[str, Any], console: Console | None = None) -> None:
    """Print a description that `inspect` returned."""
    console = console or make_console()
    console.print(styled(description["kind"], "bold"), description["path"])
    shows = {
        "data": _show_data,
        "run": _show_run,
        "bundle": show_bundle,
        "delta": show_delta,
        "published": show_published,
        "export": show_export,
        "checkpoint": _show_checkpoint,
    }
    shows[description["kind"]](description, console)


def _show_data(found: dict[str, Any], console: Console) -> None:
    splits = table("split", "rows", "label rate", "files")
    for name, split in found["splits"].items():
        rate = f"{split['positives'] / split['rows']:.4f}" if split["rows"] else "-"
        splits.add_row(name, f"{split['rows']:,}", rate, str(split["files"]))
    console.print(splits)
    ordered = any(feature["ordered_from"] is not None for feature in found["features"])
    features = table("feature", "kind", "rows", "unseen", *(["ordered from"] if ordered else []))
    for feature in found["features"]:
        numbers = [feature["rows"], feature["unseen"], *([feature["ordered_from"]] if ordered else [])]
        features.add_row(feature["name"], feature["kind"], *("-" if n is None else f"{n:,}" for n in numbers))
    console.print(features)
    weight = f", weights '{found['weight']['name']}'" if found["weight"] else ""
    said = f"{len(found['dense'])} dense columns, label '{found['label']}'{weight}"
    console.print(f"{said}, {readable_bytes(found['bytes'])}")
    counts = {"rows refused": found["source"].get("bad_rows", 0), **found["source"].get("counts", {})}
    text = ", ".join(f"{name.replace('_', ' ')} {number:,}" for name, number in counts.items() if number)
    if text:
        console.print(f"counted while preparing: {text}")


def _show_run(found: dict[str, Any], console: Console) -> None:
    settings = {name: value for name, value in found["config"]["train"].items() if value is not None}
    console.print(", ".join(f"{name}={value}" for name, value in settings.items()), style="dim")
    if found["table_sizes"] is not None:
        show_tables(found["table_sizes"], console)
    elif found["tables"]:
        tables = table("table", "stored as")
        for name, words in found["tables"].items():
            tables.add_row(name, words)
        console.print(tables)
    metrics = table("split", "step", "metrics")
    for split, row in found["last"].items():
        values = [f"{k} {v:.5g}" for k, v in row.items() if isinstance(v, float)]
        metrics.add_row(split, f"{row['step']:,}", "  ".join(values))
    console.print(metrics)
    console.print(f"checkpoint: {found['checkpoint'] or 'none yet'}; best: {found['best'] or 'not kept'}")


def _show_checkpoint(found: dict[str, Any], console: Console) -> None:
    tensors = table("tensor", "type", "shape", "bytes")
    largest = sorted(found["tensors"].items(), key=lambda item: -item[1]["bytes"])
    for name, tensor in largest[:20]:
        shape = " x ".join(f"{size:,}" for size in tensor["shape"])
        tensors.add_row(name, tensor["dtype"], shape, readable_bytes(tensor["bytes"]))
    console.print(tensors)
    more = f" (the 20 largest of {len(largest)} tensors shown)" if len(largest) > 20 else ""
    console.print(f"step {found['step']:,}, {readable_bytes(found['bytes'])} in {found['shards']} shards{more}")
