"""Raw click logs -> a data set folder (docs/formats.md): ids in popularity order, splits, Arrow files.

    prepare(["day_*.gz"], "data/criteo", PrepareConfig(rare_below=2))

Two streaming passes: memory grows with the distinct values, not with the rows. The folder takes its name only when it
is complete; a killed run leaves `<out>.partial`, which the next run removes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from holdall.data.bad_rows import BAD_ROWS_FILE, BadRows
from holdall.data.criteo import CRITEO
from holdall.data.layout import Layout
from holdall.data.passes import FirstPass, Progress, SecondPass, SplitRule
from holdall.data.rows import import_polars
from holdall.data.sources import find_sources
from holdall.data.table import load_layout
from holdall.errors import ConfigError, DataError, HoldallError
from holdall.files import atomic_folder, refuse_existing
from holdall.schema import SCHEMA_FILE, Schema


@dataclass(frozen=True, kw_only=True)
class PrepareConfig:
    """How raw files become a data set."""

    format: Literal["criteo", "table"] = "criteo"
    """Layout of the raw files: criteo (label, 13 integers, 26 values a line), or table (CSV or Parquet, see schema)."""
    schema: Path | None = None
    """TOML file that says which columns are what, for --format table (sample: configs/table-example.toml)."""
    rare_below: int = 1
    """Values seen fewer times than this in training share the unseen row."""
    valid: float = 0.0
    """Fraction of the rows for the valid split, drawn by a hash of seed and row number."""
    test: float = 0.1
    """Fraction of the rows for the test split, drawn likewise; not used with --test-from-last-file."""
    test_from_last_file: bool = False
    """Take the last source file as the test split, as for files in time order."""
    seed: int = 0
    """Seed of the split."""
    dense: Literal["log", "standard", "none"] = "log"
    """What is stored for a number x: log(max(x, 0) + 1), (x - mean) / std of the training rows, or x; 0 if missing."""
    bad_rows: Literal["stop", "skip"] = "stop"
    """A row that cannot be read stops the run, or is left out and listed in bad_rows.tsv."""
    overwrite: bool = False
    """Replace the output folder when it holds a data set already."""
    rows_per_file: int = 2**18
    """Most rows in one file of a split; two files of this size are in memory at once for each core."""

    def __post_init__(self) -> None:
        if not (self.valid >= 0 and self.test >= 0 and self.valid + self.test < 1):
            raise ConfigError(
                f"valid ({self.valid}) and test ({self.test}) must not be negative and leave rows to train on"
            )
        for name in ("rare_below", "rows_per_file"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, but must be 1 or more")
        if self.format == "table" and self.schema is None:
            raise ConfigError("--format table needs --schema FILE.toml (sample: configs/table-example.toml)")
        if self.format == "criteo" and self.schema is not None:
            raise ConfigError("--schema goes with --format table: the Criteo layout is known")


DEFAULTS = PrepareConfig()


def prepare(
    sources: Sequence[str | Path],
    out: str | Path,
    config: PrepareConfig = DEFAULTS,
    progress: Progress | None = None,
) -> Schema:
    """Prepare the raw files `sources` (names or patterns) as the data set folder `out`.

    `progress` is called as (stage, done, total); without it a progress bar shows when stderr is a terminal.
    """
    import_polars()
    out = Path(out)
    layout = CRITEO if config.schema is None else load_layout(config.schema)
    files = find_sources(sources, out)
    if config.test_from_last_file and len(files) < 2:
        raise ConfigError("--test-from-last-file needs two source files or more: the last one is not trained on")
    check_output(out, config.overwrite)
    with progress_bar(progress) as report, atomic_folder(out) as folder:
        schema = build(folder, files, layout, config, report)
        if config.overwrite:  # only now, so that a failed run keeps what was there
            refuse_existing(out, overwrite=True)
    return schema


def build(folder: Path, files: list[Path], layout: Layout, config: PrepareConfig, report: Progress) -> Schema:
    """Fill `folder`; `schema.json` is written last."""
    test_file = files[-1] if config.test_from_last_file else None
    rule = SplitRule(valid=config.valid, test=config.test, seed=config.seed, test_file=test_file)
    spill = folder / "spill"
    first = FirstPass(layout, rule, spill, config.rows_per_file)
    with BadRows(folder / BAD_ROWS_FILE, config.bad_rows) as bad_rows:
        first.run(files, bad_rows, report)
    if not first.spills[0].files:
        raise DataError(
            f"no rows to train on: {first.num_rows:,} rows were read from {len(files)} files, {bad_rows.count:,} of "
            f"them were refused and the others went to other splits; check --format, --valid and --test"
        )
    second = SecondPass(first, folder, config.rare_below, config.dense)
    second.order(report)
    splits = second.write(report)
    spill.rmdir()
    schema = Schema(
        label=layout.label,
        dense=second.dense,
        features=second.features,
        splits=splits,
        source=describe(files, layout, config, first.num_rows, bad_rows.count),
    )
    schema.save(folder)
    return schema


def describe(files: list[Path], layout: Layout, config: PrepareConfig, rows: int, bad_rows: int) -> dict[str, Any]:
    """Where a data set came from, for people."""
    options = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(config).items()}
    return {
        "format": config.format,
        "files": [{"name": str(file), "bytes": file.stat().st_size} for file in files],
        "rows": rows,
        "bad_rows": bad_rows,
        "options": options,
        "columns": {raw.name: raw.column for raw in layout.dense} | {raw.name: raw.column for raw in layout.features},
        "positive": layout.positive and f"{layout.positive.comparison} {layout.positive.threshold:g}",
    }


def check_output(out: Path, overwrite: bool) -> None:
    """Refuse an output folder that exists, unless it holds a data set that may be replaced."""
    if not overwrite:
        refuse_existing(out)
    elif out.exists() and not (out / SCHEMA_FILE).is_file() and not (out.is_dir() and not any(out.iterdir())):
        raise HoldallError(
            f"{out} exists and is not a data set, so --overwrite leaves it alone: remove it or choose another"
        )


@contextmanager
def progress_bar(progress: Progress | None) -> Iterator[Progress]:
    """The caller's own callback, or a bar on stderr when that is a terminal, or nothing."""
    if progress is not None:
        yield progress
        return
    if not sys.stderr.isatty():
        yield lambda stage, done, total: None
        return
    from rich.console import Console
    from rich.progress import Progress as Bar

    with Bar(console=Console(stderr=True), transient=True) as bar:
        tasks: dict[str, Any] = {}

        def show(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage, total=total)
            bar.update(tasks[stage], completed=done)

        yield show
