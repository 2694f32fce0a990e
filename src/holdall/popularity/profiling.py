"""Profiling of a prepared data set or of raw files (`holdall profile`), written as `popularity.json`.

profile("data", "popularity.json")                                       # exact
profile("data", "popularity.json", ProfileConfig(sample=0.05))           # a twentieth of the blocks, with intervals
profile(["day_*.tsv"], "popularity.json", ProfileConfig(format="criteo"))  # raw files, in bounded memory
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from holdall.common.errors import ConfigError, DataError
from holdall.common.folder_lock import locked
from holdall.common.output_folder import refuse_other_file, refuse_place
from holdall.data.dataset import DataSet
from holdall.data.formats.registry import FORMATS
from holdall.data.passes import Progress, SplitRule
from holdall.data.prepare import progress_bar
from holdall.data.read_lines import is_json
from holdall.data.rows import import_polars
from holdall.data.schema import SCHEMA_FILE
from holdall.popularity.prepared_counts import UNORDERED_FORMATS, is_ordered, profile_prepared
from holdall.popularity.profile import FORMAT, Profile, is_counts_file
from holdall.popularity.profile_config import ProfileConfig as ProfileConfig
from holdall.popularity.raw_stream import RawStream, profile_raw

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
        in_parts=settings.format in ("criteo", "table", "avazu") and not any(map(is_json, raw.files)),
    )
    ordered = settings.format not in UNORDERED_FORMATS if config.order == "auto" else config.order == "time"
    made = profile_raw(stream, ordered, report)
    return made if out is None else made.save(out)
