"""Profiling of a prepared data set or of raw files (`holdall profile`), written as `popularity.json`.

profile("data", "popularity.json")                                       # exact
profile("data", "popularity.json", ProfileConfig(sample=0.05))           # a twentieth of the blocks, with intervals
profile(["day_*.tsv"], "popularity.json", ProfileConfig(format="criteo"))  # raw files, in bounded memory
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from holdall.common.errors import ConfigError, DataError
from holdall.common.folder_lock import locked
from holdall.common.output_folder import refuse_other_file, refuse_place
from holdall.data.dataset import DataSet
from holdall.data.formats.registry import FORMATS
from holdall.data.layout import MAX_VALUE_BYTES
from holdall.data.passes import Progress, SplitRule
from holdall.data.prepare import PrepareConfig, progress_bar
from holdall.data.rows import import_polars
from holdall.data.schema import SCHEMA_FILE
from holdall.popularity.prepared_counts import UNORDERED_FORMATS, is_ordered, profile_prepared
from holdall.popularity.profile import FORMAT, Profile, is_counts_file
from holdall.popularity.raw_stream import RawStream, profile_raw
from holdall.popularity.stream_counts import COUNTERS


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """Settings of a profile: the rows to count, and the share of them to read."""

    sample: float | None = None
    """Share of the rows to read, in blocks drawn at random, such as 0.05; curves then come with 95% intervals."""
    windows: int = 8
    """Windows of the log whose hot sets are compared for drift."""
    order: Literal["auto", "time", "none"] = "auto"
    """Whether rows are in the order of time: auto: known for the public data sets, assumed for other files."""
    split: Literal["train", "valid", "test"] = "train"
    """Split of a prepared set to profile."""
    seed: int = 0
    """Seed of the sample, and for raw files of the split."""
    format: Literal["criteo", "table", "avazu", "taobao", "yelp", "movielens", "bookcrossing"] | None = None
    """Raw files: their layout, as for prepare; criteo by default."""
    schema: Path | None = None
    """Raw files: TOML file that describes the columns, for --format table."""
    valid: float | None = None
    """Raw files: fraction of the rows that prepare would put into the valid split, and that is not counted."""
    test: float = 0.1
    """Raw files: likewise for the test split."""
    test_from_last_file: bool = False
    """Raw files: leave the last file out, which is the test split."""
    max_length: int = 20
    """Raw files, taobao and yelp: longest history of a user in a row."""
    positive: str | None = None
    """Raw files, bookcrossing: ratings that count as label 1."""
    max_value_bytes: int = MAX_VALUE_BYTES
    """Raw files: bytes of the longest categorical value, as in `prepare`."""
    bad_rows: Literal["stop", "skip"] | None = None
    """Raw files: stop at a row that cannot be read, or skip it."""
    counters: int = COUNTERS
    """Raw files: ids of a feature counted one by one; counts are wrong by at most lookups / (counters + 1)."""

    def __post_init__(self) -> None:
        if self.sample is not None and not 0 < self.sample <= 1:
            raise ConfigError(f"sample is {self.sample}, but must be above 0 and at most 1, such as 0.05")
        for name in ("windows", "counters"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, but must be 1 or more")

    def prepare_config(self) -> PrepareConfig:
        """Options for reading raw files."""
        return PrepareConfig(
            format=self.format or "criteo", schema=self.schema, valid=self.valid, test=self.test, seed=self.seed,
            test_from_last_file=self.test_from_last_file, max_length=self.max_length, positive=self.positive,
            bad_rows=self.bad_rows, max_value_bytes=self.max_value_bytes,
        )  # fmt: skip


DEFAULTS = ProfileConfig()


def profile(
    sources: str | Path | Sequence[str | Path],
    out: str | Path | None = None,
    config: ProfileConfig = DEFAULTS,
    progress: Progress | None = None,
) -> Profile:
    """Profile a data set folder or raw files (names or patterns); write it to `out` when that is given.

    Beside `out`, a prepared set's counts of every row are written as `<name>.safetensors`.
    """
    names = [sources] if isinstance(sources, str | Path) else list(sources)
    if not names:
        raise ConfigError("nothing to profile was named: give a data set folder or raw files")
    if out is not None:
        _refuse_output(Path(out), names)
    folders = [Path(name) for name in names if (Path(name) / SCHEMA_FILE).is_file()]
    if folders and len(names) > 1:
        raise ConfigError(f"{folders[0]} is a prepared data set: profile it alone, not with {len(names) - 1} others")
    with progress_bar(progress) as report, nullcontext() if out is None else locked(Path(out)):
        if folders:
            return _prepared(folders[0], out, config, report)
        return _raw(names, out, config, report)


def _refuse_output(out: Path, names: Sequence[str | Path]) -> None:
    """Raise if the profile, or the counts beside it, would replace an input or a file that is not one of a profile."""
    if out.is_dir() or out.suffix == ".safetensors":
        what = "is a folder" if out.is_dir() else "is where the counts go"
        raise ConfigError(f"{out} {what}: name the file to write, such as popularity.json")
    refuse_place(out, map(Path, names))
    refuse_other_file(out, FORMAT)
    counts = out.with_suffix(".safetensors")
    if counts.exists() and not out.exists() and not is_counts_file(counts):
        raise ConfigError(f"{counts} exists and is not of a profile, whose counts go there: name another --out")


def _prepared(folder: Path, out: str | Path | None, config: ProfileConfig, report: Progress) -> Profile:
    if config.format is not None or config.schema is not None:
        raise ConfigError(f"{folder} is a prepared data set: --format and --schema go with raw files")
    data = DataSet(folder, config.split)
    ordered = is_ordered(data.schema.source) if config.order == "auto" else config.order == "time"
    sample = None if config.sample == 1 else config.sample
    made, counts = profile_prepared(data, sample, config.windows, config.seed, ordered, report)
    return made if out is None else made.save(out, counts)


def _raw(names: Sequence[str | Path], out: str | Path | None, config: ProfileConfig, report: Progress) -> Profile:
    if config.split != "train":
        raise ConfigError(f"--split {config.split} goes with a prepared data set: of raw files training rows count")
    for name in names:
        if Path(name).is_dir() and config.format is None:
            raise DataError(
                f"{name} is a folder without a {SCHEMA_FILE}: give one that `holdall prepare` made, or files"
            )
    import_polars()
    settings = config.prepare_config()
    raw = FORMATS[settings.format](names, Path(out or "popularity.json"), settings)
    last = raw.files[-1] if config.test_from_last_file else None
    if last is not None and len(raw.files) < 2:
        raise ConfigError("--test-from-last-file needs two source files or more: the last one is not counted")
    stream = RawStream(
        raw=raw,
        rule=SplitRule(valid=settings.valid_fraction, test=config.test, seed=config.seed, test_file=last),
        skip_bad_rows=(config.bad_rows or raw.bad_rows) == "skip",
        sample=None if config.sample == 1 else config.sample,
        windows=config.windows,
        seed=config.seed,
        counters=config.counters,
        in_parts=settings.format in ("criteo", "table", "avazu"),
    )
    ordered = settings.format not in UNORDERED_FORMATS if config.order == "auto" else config.order == "time"
    made = profile_raw(stream, ordered, report)
    return made if out is None else made.save(out)
