"""The command `holdall inspect`: description of a data folder, run folder, bundle, delta, export, published folder or
checkpoint, as data or on the console."""

from __future__ import annotations

import json
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
from holdall.data.transforms import described
from holdall.models.model import table_rows
from holdall.serving.bundle import is_bundle, open_bundle
from holdall.serving.delta import is_delta, open_delta
from holdall.serving.export.export_folder import is_export
from holdall.serving.export.render import describe_export, show_export
from holdall.serving.published_folder import describe_published, is_published
from holdall.serving.render import describe, describe_delta, show_bundle, show_delta, show_published
from holdall.tables.describe import describe_method
from holdall.training.config import TrainConfig
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
            {
                "name": f.name,
                "kind": f.kind,
                "made_by": described(f),
                "rows": f.num_rows,
                "unseen": f.unseen,
                "ordered_from": f.ordered_from,
            }
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
        "kept": _kept(rows, best),
        "checkpoint": saved.name if saved else None,
        "best": best.name if best else None,
    }


def _kept(rows: list[dict[str, Any]], best: Path | None) -> dict[str, Any] | None:
    """Validation metrics of the kept model; None where none was measured or kept."""
    if best is None:
        return None
    step = int(best.name.rpartition("-")[2])
    return next((row for row in reversed(rows) if row["split"] == "valid" and row["step"] == step), None)


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


def show(description: dict[str, Any], console: Console | None = None, *, all: bool = False) -> None:
    """Print a description that `inspect` returned; with `all` also settings of a run that are at their defaults."""
    console = console or make_console()
    console.print(styled(description["kind"], "bold"), description["path"])
    if description["kind"] == "run":
        _show_run(description, console, all=all)
        return
    shows = {
        "data": _show_data,
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
    made = any(feature["made_by"] for feature in found["features"])
    first = ("feature", "kind", *(["made by"] if made else []))
    features = table(*first, "rows", "row of unseen values", *(["ordered from"] if ordered else []))
    for feature in found["features"]:
        numbers = [feature["rows"], feature["unseen"], *([feature["ordered_from"]] if ordered else [])]
        words = [feature["name"], feature["kind"], *([feature["made_by"]] if made else [])]
        features.add_row(*words, *("-" if n is None else f"{n:,}" for n in numbers))
    console.print(features)
    weight = f", weights '{found['weight']['name']}'" if found["weight"] else ""
    said = f"{len(found['dense'])} dense columns, label '{found['label']}'{weight}"
    console.print(f"{said}, {readable_bytes(found['bytes'])}")
    counts = {"rows refused": found["source"].get("bad_rows", 0), **found["source"].get("counts", {})}
    text = ", ".join(f"{name.replace('_', ' ')} {number:,}" for name, number in counts.items() if number)
    if text:
        console.print(f"counted while preparing: {text}")


def _show_run(found: dict[str, Any], console: Console, *, all: bool) -> None:
    """Print results, then tables, then settings."""
    _show_results(found, console)
    if found["table_sizes"] is not None:
        show_tables(found["table_sizes"], console)
    elif found["tables"]:
        tables = table("table", "stored as")
        for name, words in found["tables"].items():
            tables.add_row(name, words)
        console.print(tables)
    _show_settings(found["config"]["train"], console, all=all)


def _show_results(found: dict[str, Any], console: Console) -> None:
    """Print the validation metrics of the kept model and of the last one, and how far training went."""
    last, kept = found["last"].get("valid"), found["kept"]
    columns = {"kept": kept, "last": last} if kept is not None and kept != last else {"valid": last}
    measured = {name: row for name, row in columns.items() if row is not None}
    if measured:
        shown = table("metric", *(f"{name}, step {row['step']:,}" for name, row in measured.items()))
        names = [name for name, value in next(iter(measured.values())).items() if isinstance(value, float)]
        for name in names:
            shown.add_row(name, *(f"{row[name]:.6g}" if name in row else "" for row in measured.values()))
        console.print(shown)
    for split, row in found["last"].items():
        if split != "valid":
            values = (f"{name} {value:.5g}" for name, value in row.items() if isinstance(value, float))
            console.print(f"{split}, step {row['step']:,}: {', '.join(values)}")
    best = "" if found["best"] is None else f"; kept as the best: {found['best']}"
    console.print(f"checkpoint: {found['checkpoint'] or 'none yet'}{best}")


def _show_settings(settings: dict[str, Any], console: Console, *, all: bool) -> None:
    defaults = json.loads(json.dumps(TrainConfig().to_json()))
    absent = object()
    changed = {name: value for name, value in settings.items() if value != defaults.get(name, absent)}
    shown = settings if all else changed
    text = ", ".join(f"{name}={value}" for name, value in shown.items()) or "all at their defaults"
    more = "" if all or len(changed) == len(settings) else f" ({len(settings) - len(changed)} at their defaults: --all)"
    console.print(f"settings: {text}{more}", style="dim")


def _show_checkpoint(found: dict[str, Any], console: Console) -> None:
    tensors = table("tensor", "type", "shape", "bytes")
    largest = sorted(found["tensors"].items(), key=lambda item: -item[1]["bytes"])
    for name, tensor in largest[:20]:
        shape = " x ".join(f"{size:,}" for size in tensor["shape"])
        tensors.add_row(name, tensor["dtype"], shape, readable_bytes(tensor["bytes"]))
    console.print(tensors)
    more = f" (the 20 largest of {len(largest)} tensors shown)" if len(largest) > 20 else ""
    console.print(f"step {found['step']:,}, {readable_bytes(found['bytes'])} in {found['shards']} shards{more}")
