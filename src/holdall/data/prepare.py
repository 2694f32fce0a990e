"""Preparation of raw click logs as a data set folder (docs/formats.md): ids in popularity order, splits, Arrow files.

    prepare(["day_*.gz"], "data/criteo", PrepareConfig(rare_below=2))

Two streaming passes: memory grows with the distinct values, not with the rows. The folder takes its name only when it
is complete; a killed run leaves `<out>.partial`, which the next run removes (`common/output_folder.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from holdall.common.errors import ConfigError, DataError
from holdall.common.output_folder import output_folder
from holdall.common.progress import shows_bar
from holdall.data.bad_rows import BAD_ROWS_FILE, BadRows
from holdall.data.formats.frame import Entries, is_frame, open_frame
from holdall.data.formats.registry import FORMATS
from holdall.data.id_map import reserve_id_maps
from holdall.data.identity import with_files
from holdall.data.layout import Layout, RawFeature
from holdall.data.passes import FirstPass, Progress, SecondPass, SplitRule
from holdall.data.prepare_config import PrepareConfig as PrepareConfig
from holdall.data.raw_data import RawData
from holdall.data.rows import import_polars
from holdall.data.schema import DATA_SET, Schema, Split
from holdall.data.stored_layout import layout_json

DEFAULTS = PrepareConfig()


def prepare(
    sources: str | Path | Sequence[str | Path] | Any,
    out: str | Path,
    config: PrepareConfig = DEFAULTS,
    progress: Progress | None = None,
    *,
    label: str | Mapping[str, Any] | None = None,
    weight: str | None = None,
    time: str | None = None,
    categorical: Entries | None = None,
    dense: Entries | None = None,
    bag: Entries | None = None,
    sequence: Entries | None = None,
) -> Schema:
    """Prepare the raw files `sources` (names or patterns), or a pandas, polars or Arrow frame, as the folder `out`.

    A frame needs the name of its label, or `{"column": "stars", "positive": ">= 4"}`, and those of its columns, by
    name or with further keys as in a TOML schema. Columns of lists are bags. `weight` names the column with the weights
    of rows, `time` the one by which `PrepareConfig(split="time")` holds out the newest. Without lists of columns these
    are guessed as `holdall schema infer` does. `progress` is called as (stage, done, total); without it a progress bar
    shows when stderr is a terminal.
    """
    import_polars()
    if isinstance(sources, str | Path):
        sources = [sources]
    columns = {"categorical": categorical, "dense": dense, "bag": bag, "sequence": sequence}
    single = {"weight": weight, "time": time}
    if is_frame(sources):
        return prepare_raw(open_frame(sources, config, label, columns, single), out, config, progress)
    given = {"label": label, **single, **columns}
    named = next((name for name, value in given.items() if value is not None), None)
    if named is not None:
        raise ConfigError(f"{named} goes with a frame: name the columns of files in a TOML schema")
    opened = FORMATS[config.format](sources, Path(out), config)
    raw = replace(opened, format=opened.format or config.format)
    return prepare_raw(raw, out, config, progress)


def prepare_raw(
    raw: RawData, out: str | Path, config: PrepareConfig = DEFAULTS, progress: Progress | None = None
) -> Schema:
    """Prepare raw files that a reader of your own opened as a `RawData`; `config.format` does not matter."""
    out = Path(out)
    if raw.layout.label is None or raw.layout.label_optional:
        raise ConfigError("the layout has no label, or an optional one: rows to train on need one; name its column")
    refuse_label_as_input(raw.layout)
    if config.test_from_last_file and len(raw.files) < 2:
        raise ConfigError("--test-from-last-file needs two source files or more: the last one is not trained on")
    inputs = [*(raw.files if raw.num_bytes is None else []), *([] if config.schema is None else [config.schema])]
    with (
        progress_bar(progress) as report,
        output_folder(out, DATA_SET, overwrite=config.overwrite, inputs=inputs) as folder,
    ):
        return build(folder, raw, config, report)


def refuse_label_as_input(layout: Layout) -> None:
    """Raise if the raw column of the label is also that of a dense column, a feature or the weights."""
    if layout.weight is not None and layout.weight == layout.label:
        raise ConfigError(f"column '{layout.label}' is the label and also the weight: name another weight, or none")
    for kind, columns in (("dense column", layout.dense), ("feature", layout.features)):
        for column in columns:
            parts = column.cross if isinstance(column, RawFeature) else ()
            if layout.label in (column.column, *(part.column for part in parts)):
                raise ConfigError(
                    f"column '{layout.label}' is the label and also {kind} '{column.name}': a model would read its "
                    f"answer there; remove it from the {kind}s of the schema, or name another label"
                )


def build(folder: Path, raw: RawData, config: PrepareConfig, report: Progress) -> Schema:
    """Fill `folder`; `schema.json` is written last."""
    files, layout = raw.files, raw.layout
    test_file = files[-1] if config.test_from_last_file else None
    rule = SplitRule(valid=config.valid_fraction, test=config.test, seed=config.seed, test_file=test_file)
    reserve_id_maps(folder, [feature.name for feature in layout.features], layout.tables)
    spill = folder / "spill"
    first = FirstPass(layout, rule, spill, config.rows_per_file, raw.read)
    with BadRows(folder / BAD_ROWS_FILE, config.bad_rows or raw.bad_rows) as bad_rows:
        first.run(files, bad_rows, report, raw.size_of)
    if not first.spills[0].files:
        raise DataError(
            f"no rows to train on: {first.num_rows:,} rows were read from {len(files)} files, {bad_rows.count:,} of "
            f"them were refused and the others went to other splits; check --format, --valid and --test"
        )
    second = SecondPass(first, folder, config.rare_below, config.dense)
    second.order(report)
    splits = second.write(report)
    check_rule(layout, splits)
    if second.num_clipped:
        raw.counts["dense_values_clipped"] = second.num_clipped
    spill.rmdir()
    assert layout.label is not None
    schema = Schema(
        label=layout.label,
        dense=second.dense,
        features=second.features,
        weight=second.weight,
        splits=splits,
        source=describe(raw, config, first.num_rows, bad_rows.count),
        layout=layout_json(raw),
    )
    raw.finish(folder, schema)
    schema = with_files(schema, folder)
    schema.save(folder)
    return schema


def check_rule(layout: Layout, splits: dict[str, Split]) -> None:
    """Refuse a label rule that names a text which no row has: all labels would be the same."""
    rule = layout.positive
    if rule is None or not rule.compares_text:
        return
    rows, positives = sum(split.rows for split in splits.values()), sum(split.positives for split in splits.values())
    if positives == (0 if rule.comparison == "==" else rows):
        raise DataError(
            f"none of {rows:,} rows has {rule.threshold!r} in the label column '{layout.label}': correct positive in "
            f"[label] of the schema (case and spaces count)"
        )


def describe(raw: RawData, config: PrepareConfig, rows: int, bad_rows: int) -> dict[str, Any]:
    """Origin of a data set, for people; nothing depends on it."""
    layout = raw.layout
    options = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(config).items()}
    options["valid"] = config.valid_fraction
    options["format"] = raw.format or config.format
    return {
        "format": options["format"],
        "files": [{"name": str(file), "bytes": raw.size_of(file)} for file in raw.files],
        "rows": rows,
        "bad_rows": bad_rows,
        "counts": dict(raw.counts),
        "options": options,
        "columns": {d.name: d.column for d in layout.dense}
        | {f.name: f.column or [part.column for part in f.cross] for f in layout.features},
        "positive": layout.positive and str(layout.positive),
    }


@contextmanager
def progress_bar(progress: Progress | None) -> Iterator[Progress]:
    """The caller's own callback, or a bar on stderr where that can be drawn, or nothing."""
    if progress is not None:
        yield progress
        return
    from rich.console import Console
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    if not shows_bar(console):
        yield lambda stage, done, total: None
        return
    with Bar(console=console, transient=True) as bar:
        tasks: dict[str, Any] = {}

        def show(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage, total=total)
            bar.update(tasks[stage], completed=done)

        yield show
