"""CSV and Parquet tables with the layout of a small TOML schema (`configs/table-example.toml` shows every key).

The schema names the label, the dense columns and the features; columns it does not name are not read. Unknown keys
are refused, with the nearest known one suggested.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from holdall.common.decode import parse_toml, shown
from holdall.common.errors import ConfigError, did_you_mean
from holdall.common.files import read_bounded
from holdall.data.formats.criteo import CRITEO
from holdall.data.layout import COMPARISONS, Layout, Positive, RawDense, RawFeature, RawPart, TextFormat
from holdall.data.raw_data import RawData
from holdall.data.read_lines import INDEX, LABEL, is_json, read_lines
from holdall.data.read_parquet import SUFFIXES, read_parquet
from holdall.data.read_text import read_text
from holdall.data.rows import Rows
from holdall.data.schema import FeatureKind
from holdall.data.sources import find_sources
from holdall.data.time_split import split_by_time, times_layout

if TYPE_CHECKING:
    from holdall.data.prepare import PrepareConfig

TRANSFORMS = ("log", "standard", "none")
TOP_KEYS = {
    "label": (str, dict),
    "weight": str,
    "time": str,
    "dense": list,
    "categorical": list,
    "bag": list,
    "sequence": list,
    "csv": dict,
}
LIBSVM = Layout(
    label=LABEL,
    positive=Positive(">", 0.0),
    features=(RawFeature(name=INDEX, column=INDEX, kind="bag"),),
    lines="libsvm",
)
LABEL_KEYS = {"column": str, "positive": str}
DENSE_KEYS = {"name": str, "column": str, "transform": str}
CATEGORICAL_KEYS = {
    "name": str,
    "column": str,
    "integer": bool,
    "table": str,
    "bucket": list,
    "buckets": int,
    "hash": int,
    "cross": list,
    "dim": int,
}
LIST_KEYS = {"name": str, "column": str, "table": str, "separator": str, "max_length": int, "hash": int, "dim": int}
CSV_KEYS = {
    "separator": str,
    "quote": str,
    "escape": str,
    "encoding": str,
    "header": bool,
    "columns": list,
    "missing": list,
    "multiline": bool,
}


def open_table(sources: Sequence[str | Path], out: Path, config: PrepareConfig) -> RawData:
    """CSV and Parquet files with the layout of the TOML schema, or Criteo's where there is none."""
    layout = CRITEO if config.schema is None else load_layout(config.schema)
    layout = replace(layout, max_value_bytes=config.max_value_bytes)
    return table_data(layout, find_sources(sources, out), read_table, config)


def open_libsvm(sources: Sequence[str | Path], out: Path, config: PrepareConfig) -> RawData:
    """Files of `label index:value ...`, with the layout of a TOML schema, or one bag of all indices."""
    layout = LIBSVM if config.schema is None else load_layout(config.schema)
    layout = replace(layout, lines="libsvm", max_value_bytes=config.max_value_bytes)
    return replace(table_data(layout, find_sources(sources, out), read_table, config), format="table")


def table_data(
    layout: Layout, files: list[Path], read: Callable[..., Generator[Rows]], config: PrepareConfig
) -> RawData:
    """Raw data of tables, read by `read(path, layout=...)`; their times are read for a split by time alone."""
    if config.split != "time":
        return RawData(layout=layout, files=files, read=partial(read, layout=replace(layout, time=None)))
    if layout.time is None:
        raise ConfigError(
            '--split time needs the time of each row: name its column in the schema, as time = "NAME" above the first '
            "[section], or split at random"
        )
    raw = RawData(layout=layout, files=files, read=partial(read, layout=layout))
    read_times = partial(read, layout=times_layout(layout))
    return split_by_time(raw, read_times, config.valid_fraction, config.test)


def read_table(path: Path, layout: Layout) -> Generator[Rows]:
    """The rows of a file, by its name: Parquet, JSON lines or other text."""
    if path.suffix in SUFFIXES and layout.lines is None:
        return read_parquet(path, layout)
    return read_lines(path, layout) if layout.lines is not None or is_json(path) else read_text(path, layout)


def load_layout(path: str | Path) -> Layout:
    """Read a TOML schema."""
    path = Path(path)
    try:
        data = read_bounded(path)
    except FileNotFoundError:
        raise ConfigError(f"there is no schema file {path}: see configs/table-example.toml for a sample") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): give another file") from error
    document = parse_toml(data, str(path))
    try:
        return parse_layout(document)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def parse_layout(document: dict[str, Any]) -> Layout:
    """The layout that a parsed TOML schema describes."""
    check_keys(document, TOP_KEYS, "the schema")
    if "label" not in document:
        raise ConfigError('the schema has no label: add label = "NAME" or [label] with column = "NAME"')
    label = document["label"]
    if isinstance(label, str):
        label = {"column": label}
    check_keys(label, LABEL_KEYS, "[label]")
    if "column" not in label:
        raise ConfigError("[label] names no column")
    features = [parse_feature(entry, "categorical") for entry in document.get("categorical", [])]
    features += [parse_feature(entry, "bag") for entry in document.get("bag", [])]
    features += [parse_feature(entry, "sequence") for entry in document.get("sequence", [])]
    dense = tuple(parse_dense(entry) for entry in document.get("dense", []))
    return Layout(
        label=label["column"],
        positive=parse_positive(label["positive"]) if "positive" in label else None,
        weight=document.get("weight"),
        time=document.get("time"),
        dense=dense,
        features=tuple(with_parts(feature, features, dense) for feature in features),
        text=parse_csv(document.get("csv", {})),
    )


def parse_positive(rule: str) -> Positive:
    """`>= 7`, `== fit` and the like: a comparison and a number, or a text, which may be in quotes."""
    match = re.fullmatch(r"\s*(>=|<=|==|!=|>|<)\s*(.+?)\s*", rule, re.DOTALL)
    if match is None:
        comparisons = " ".join(COMPARISONS)
        raise ConfigError(
            f"positive = {rule!r} is no rule: write one of {comparisons} and a number or text, as '>= 7' or '== yes'"
        )
    comparison, threshold = match[1], match[2]
    if re.fullmatch(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?", threshold):
        if math.isfinite(float(threshold)):
            return Positive(comparison, float(threshold))
        raise ConfigError(f"positive = {rule!r} compares with a number that is not finite: write another one")
    if len(threshold) > 2 and threshold[0] == threshold[-1] in "'\"":
        threshold = threshold[1:-1]
    return Positive(comparison, threshold)


def parse_dense(entry: Any) -> RawDense:
    entry = named_entry(entry, DENSE_KEYS, "dense")
    transform = entry.get("transform")
    if transform is not None and transform not in TRANSFORMS:
        raise ConfigError(
            f"unknown transform '{transform}' of dense column '{entry['name']}'{did_you_mean(transform, TRANSFORMS)}"
        )
    return RawDense(name=entry["name"], column=entry.get("column", entry["name"]), transform=transform)


def parse_feature(entry: Any, kind: FeatureKind) -> RawFeature:
    entry = named_entry(entry, CATEGORICAL_KEYS if kind == "categorical" else LIST_KEYS, kind)
    if entry.get("separator") == "":
        raise ConfigError(
            f"the separator of {kind} '{entry['name']}' is empty: leave it out where the column holds lists"
        )
    cross = entry.get("cross")
    if cross is not None and "column" in entry:
        raise ConfigError(f"categorical '{entry['name']}' is a cross, and has no column of its own: leave column out")
    return RawFeature(
        name=entry["name"],
        column="" if cross is not None else entry.get("column", entry["name"]),
        kind=kind,
        separator=entry.get("separator"),
        max_length=entry.get("max_length"),
        integer=entry.get("integer", False),
        table=entry.get("table"),
        bucket=parse_bounds(entry),
        buckets=entry.get("buckets"),
        hash=entry.get("hash"),
        dim=entry.get("dim"),
        cross=() if cross is None else parse_cross(entry["name"], cross),
    )


def parse_bounds(entry: dict[str, Any]) -> tuple[float, ...] | None:
    """The bounds of buckets."""
    if "bucket" not in entry:
        return None
    for bound in entry["bucket"]:
        if isinstance(bound, bool) or not isinstance(bound, int | float) or not math.isfinite(bound):
            raise ConfigError(f"bucket of '{entry['name']}' lists {shown(bound)}, which is no finite number")
    return tuple(map(float, entry["bucket"]))


def parse_cross(name: str, cross: list[Any]) -> tuple[RawPart, ...]:
    """The columns of a cross, as yet without their transforms."""
    if len(cross) < 2 or not all(isinstance(part, str) and part for part in cross) or len(set(cross)) < len(cross):
        raise ConfigError(f"cross of '{name}' must name two columns or more, each once, not {shown(cross)}")
    return tuple(RawPart(name=part, column=part) for part in cross)


def with_parts(feature: RawFeature, features: Sequence[RawFeature], dense: Sequence[RawDense]) -> RawFeature:
    """A cross with the columns and transforms of the features that it names; other names are raw columns."""
    known = {other.name: other for other in features}
    parts = []
    for part in feature.cross:
        if any(column.name == part.name for column in dense):
            raise ConfigError(
                f"cross '{feature.name}' names the dense column '{part.name}': add a categorical feature of that "
                f"column with bucket = [...], and cross that"
            )
        other = known.get(part.name)
        if other is None:
            parts.append(part)
            continue
        if other.kind != "categorical" or other.cross or other.buckets is not None:
            what = "a cross" if other.cross else f"a {other.kind}"
            cure = "name features of one value"
            if other.buckets is not None:
                what, cure = "of buckets that are known after the first pass", "give its bounds as bucket = [...]"
            raise ConfigError(f"cross '{feature.name}' names '{part.name}', which is {what}: {cure}")
        part = RawPart(name=other.name, column=other.column, integer=other.integer)
        parts.append(replace(part, bucket=other.bucket, hash=other.hash))
    return replace(feature, cross=tuple(parts))


def parse_csv(options: dict[str, Any]) -> TextFormat:
    check_keys(options, CSV_KEYS, "[csv]")
    for key in ("columns", "missing"):
        if not all(isinstance(value, str) for value in options.get(key, [])):
            raise ConfigError(f"{key} in [csv] must be a list of strings")
    columns = tuple(options.get("columns", ()))
    return TextFormat(
        separator=options.get("separator", ","),
        quote=options.get("quote", '"'),
        escape=options.get("escape", ""),
        encoding=options.get("encoding", "utf-8"),
        header=options.get("header", not columns),
        columns=columns,
        missing=tuple(options.get("missing", ())),
        multiline=options.get("multiline", False),
    )


def named_entry(entry: Any, keys: dict[str, Any], kind: Literal["dense"] | FeatureKind) -> dict[str, Any]:
    """An entry of a list of columns: a table with a name, or the name alone."""
    if isinstance(entry, str):
        entry = {"name": entry}
    if not isinstance(entry, dict):
        raise ConfigError(f"{kind} lists {shown(entry)}, which is neither a name nor a table with a name")
    check_keys(entry, keys, f"{kind} '{entry.get('name', '?')}'")
    if not entry.get("name"):
        raise ConfigError(f"an entry of {kind} has no name: add one")
    return entry


def check_keys(table: dict[str, Any], known: dict[str, Any], where: str) -> None:
    """Refuse unknown keys and values of another type."""
    for key, value in table.items():
        if key not in known:
            hint = did_you_mean(key, known)
            if where != "the schema" and key in TOP_KEYS:
                hint = ": TOML puts every key after a [section] line into that section, so move it above the first one"
            raise ConfigError(f"unknown key '{key}' in {where}{hint}")
        if not isinstance(value, known[key]) or (isinstance(value, bool) and known[key] is not bool):
            kinds = known[key] if isinstance(known[key], tuple) else (known[key],)
            names = " or ".join(
                {"str": "text", "dict": "a table", "int": "a whole number"}.get(k.__name__, k.__name__) for k in kinds
            )
            raise ConfigError(f"{key} in {where} must be {names}, not {shown(value)}")
