"""Bundles, deltas and published folders on the console: results first, then where they come from."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Console

from holdall.common.console import table
from holdall.common.sizes import readable_bytes
from holdall.serving.bundle import Bundle
from holdall.serving.delta import Delta
from holdall.tables import Bands, Codes, Dense, Method, Quantized, Shared


def describe(bundle: Bundle) -> dict[str, Any]:
    """A JSON-able description of a bundle."""
    document = asdict(bundle.record)
    return {
        "kind": "bundle",
        "path": str(bundle.path),
        "bytes": sum(file["bytes"] for file in document["files"].values()),
        **{name: document[name] for name in ("quality", "made", "holdall", "commit", "origin", "data_set", "model")},
        "tables": {
            name: {**entry, "text": short_text(bundle.methods[name])} for name, entry in document["tables"].items()
        },
    }


def short_text(method: Method) -> str:
    """A method in a few words; bands with the row that each ends before."""
    if isinstance(method, Bands):
        return ", ".join(short_text(band) + ("" if end is None else f" to {end:,}") for end, band in method.bands)
    if isinstance(method, Quantized):
        return f"{method.bits} bits"
    if isinstance(method, Codes):
        return f"{method.parts} x {method.bits}-bit codes"
    if isinstance(method, Shared):
        return f"{method.rows} shared"
    if isinstance(method, Dense):
        return "dense" if method.dtype is None else method.dtype
    return str(method)


def show_bundle(found: dict[str, Any], console: Console) -> None:
    """Print the description of a bundle."""
    quality = found["quality"]
    ratio = quality["dense_bytes"] / max(1, quality["table_bytes"])
    console.print(
        f"{readable_bytes(found['bytes'])}, of which tables {readable_bytes(quality['table_bytes'])}: 1/{ratio:.4g} of "
        f"their {readable_bytes(quality['dense_bytes'])} as float32 rows"
    )
    if quality["metrics"]:
        text = ", ".join(f"{metric['name']} {metric['value']:.5f}" for metric in quality["metrics"])
        console.print(f"{quality['metrics'][0]['split']}: {text}")
    if quality["proof"] is not None:
        console.print(quality["proof"]["sentence"])
        if quality["front"]:
            show_front(quality["front"], console)
    tables = table("table", "rows", "stored as")
    tables.columns[-1].justify = "left"
    for name, entry in found["tables"].items():
        tables.add_row(name, f"{entry['rows']:,}", entry["text"])
    console.print(tables)
    origin = found["origin"]
    run = "unknown" if origin["run"] is None else origin["run"][:12]
    console.print(
        f"{found['model']['family']} of run {run}, {origin['checkpoint']}, data set "
        f"{(found['data_set']['fingerprint'] or 'unknown')[:12]}; made {found['made']} by Holdall {found['holdall']}"
    )


def show_front(front: list[dict[str, Any]], console: Console) -> None:
    """Print the forms that a release looked at."""
    rows = table("budget", "bytes", "AUC loss", "bound", "logloss", "bound", "calibration", "verdict")
    for column in rows.columns[:-1]:
        column.no_wrap = True
    for row in front:
        auc, logloss = row["auc"], row["logloss"]
        numbers = [f"{one[name]:+.5f}" for one in (auc, logloss) for name in ("loss", "loss_bound")]
        numbers.append(f"{row['calibration']['candidate']:.4f}" if "calibration" in row else "-")
        verdict = {True: "passes", False: "fails", None: "-"}[row["passes"]]
        if failed := row.get("failed"):
            verdict += f": {', '.join(failed)}"
        rows.add_row(row["budget"], readable_bytes(row["table_bytes"]), *numbers, verdict)
    console.print(rows)


def describe_delta(delta: Delta) -> dict[str, Any]:
    """A JSON-able description of a delta."""
    record = delta.record
    result = asdict(record.result)
    return {
        "kind": "delta",
        "path": str(delta.path),
        "bytes": sum(file.bytes for file in record.files.values()),
        "base": record.base,
        "base_step": record.base_step,
        "fingerprint": delta.fingerprint,
        **{name: result[name] for name in ("quality", "made", "holdall", "commit", "origin", "data_set")},
        "tensors": delta.num_changed(),
        "withdrawn": delta.num_withdrawn(),
    }


def show_delta(found: dict[str, Any], console: Console) -> None:
    """Print the description of a delta."""
    steps = [
        "an unknown step" if step is None else f"step {step:,}"
        for step in (found["base_step"], found["origin"]["step"])
    ]
    console.print(
        f"{readable_bytes(found['bytes'])}: from {found['base'][:12]} ({steps[0]}) to {found['fingerprint'][:12]} "
        f"({steps[1]})"
    )
    tensors = table("tensor", "changed rows")
    for name, count in found["tensors"].items():
        tensors.add_row(name, "all" if count is None else f"{count:,}")
    console.print(tensors)
    for name, count in found["withdrawn"].items():
        console.print(f"withdrawn from table '{name}': {count:,} values")
    quality = found["quality"]
    if quality["metrics"]:
        text = ", ".join(f"{metric['name']} {metric['value']:.5f}" for metric in quality["metrics"])
        console.print(f"{quality['metrics'][0]['split']}: {text}")
    if quality["proof"] is not None:
        console.print(quality["proof"]["sentence"])


def published_text(target: dict[str, Any]) -> str:
    """A target of a published folder in a few words."""
    step = "of an unknown step" if target["step"] is None else f"of step {target['step']:,}"
    count = len(target["deltas"])
    deltas = f" with {count} delta{'s' if count > 1 else ''}" if count else ""
    return f"{target['bundle']}{deltas}, {step}, published {target['published']}"


def show_published(found: dict[str, Any], console: Console) -> None:
    """Print the description of a published folder."""
    console.print(f"current: {published_text(found)}")
    for target in found["history"]:
        console.print(f"before: {published_text(target)}")
