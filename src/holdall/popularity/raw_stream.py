"""Raw files as a stream of hashed ids, whole or sampled, for `stream_counts.py`.

The rows counted are those that `prepare` would train on with the same options. A sample of plain text files reads only
parts of them: stretches of bytes at random offsets, cut at line ends. Compressed files, Parquet and data sets of
several joined files are read from end to end, and rows are sampled as they come.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from holdall.common.errors import ConfigError, DataError
from holdall.data.blocks import COMPRESSIONS
from holdall.data.columns import Ragged, offsets_of
from holdall.data.passes import SplitRule
from holdall.data.raw_data import RawData
from holdall.data.raw_transforms import with_texts
from holdall.data.read_parquet import SUFFIXES
from holdall.data.rows import Rows, import_polars
from holdall.data.splits import TRAIN, hash_numbers
from holdall.popularity.curves import CONFIDENCE
from holdall.popularity.profile import Profile, Sample, Source, raw_fingerprint
from holdall.popularity.stream_counts import StreamCount

Array = npt.NDArray[Any]
Progress = Callable[[str, int, int], None]

SLICE_ROWS = 256
"""Consecutive rows that are sampled as one slice, of files that are read from end to end."""
HELD_OUT = 5  # every fifth slice or stretch of a sample is not counted, but tests what the others found
STRETCH_BYTES = 1 << 17
STRETCHES = 100  # at least, where the file is long enough: a fifth of them make the intervals
SHORTEST_STRETCH = 1 << 12


@dataclass(frozen=True)
class RawFile:
    """A file to read: the one named, or the sampled lines of it."""

    path: Path
    named: Path
    stretches: Array | None = None
    """Row of the sampled lines at which each stretch of the file ends; None when the whole file is read."""


@dataclass
class RawStream:
    """Single pass over raw files that counts."""

    raw: RawData
    rule: SplitRule
    skip_bad_rows: bool
    sample: float | None
    windows: int
    seed: int
    counters: int
    in_parts: bool
    """Whether each line of the files is a row by itself, so that a sample need not read all of them."""

    def __post_init__(self) -> None:
        quantiles = [feature.name for feature in self.raw.layout.features if feature.buckets is not None]
        if quantiles:
            raise ConfigError(
                f"the buckets of '{quantiles[0]}' are found by prepare: profile the prepared folder, or give bounds as "
                f"bucket = [...] in the schema"
            )
        self.counting = StreamCount(self.raw.layout.features, self.counters, self.sample is not None, self.seed)
        self.rows_read = 0
        self.units = 0
        """Slices and stretches that were sampled."""
        self._row = 0  # rows of all files so far, refused ones counted, as `prepare` numbers them
        self._window = 0

    def run(self, files: list[RawFile], progress: Progress) -> None:
        total = sum(file.path.stat().st_size for file in files) or 1
        done = 0
        for file in files:
            first_row, first_unit, position = self._row, self.units, 0
            with closing(self.raw.read(file.path)) as blocks:
                for rows in blocks:
                    self._refuse(file, rows)
                    splits = rows.splits
                    if splits is None:
                        splits = self.rule.draw(file.named, rows.numbers + first_row)
                    places = np.linspace(done + position, done + rows.position, rows.frame.height, endpoint=False)
                    windows = np.minimum(places * self.windows / total, self.windows - 1).astype(np.int64)
                    position = rows.position
                    self._row += rows.num_rows
                    units = self._units(file, rows.numbers, first_row, first_unit)
                    chosen = (splits == TRAIN) & (units >= 0)
                    self.rows_read += int((splits == TRAIN).sum())
                    self._take(self._frame(rows).filter(chosen), windows[chosen], units[chosen])
                    progress("read", done + position, total)
            done += file.path.stat().st_size
        self.counting.end_window()

    def _frame(self, rows: Rows) -> Any:
        """Columns of the features of rows, in their order, with the texts of id maps."""
        layout = self.raw.layout
        if not layout.has_transforms:
            return rows.frame
        return with_texts(rows.frame, layout).select(f"feature{index}" for index in range(len(layout.features)))

    def _units(self, file: RawFile, numbers: Array, first_row: int, first_unit: int) -> Array:
        """[R] which stretch or slice a row belongs to, counted over all files; -1 when it is not sampled."""
        if file.stretches is not None:
            units = np.searchsorted(file.stretches, numbers, side="right") + first_unit
            self.units = first_unit + len(file.stretches)
            return units
        slices = (numbers + first_row) // SLICE_ROWS
        if self.sample is None:
            return slices
        sampled = hash_numbers(slices, self.seed) / 2.0**64 < self.sample
        self.units += len(np.unique(slices[sampled]))
        return np.where(sampled, slices, -1)

    def _take(self, frame: Any, windows: Array, units: Array) -> None:
        """Count the rows of a block, window by window."""
        held = units % HELD_OUT == 0
        for window in np.unique(windows):
            if window != self._window:
                self.counting.end_window()
                self._window = int(window)
            now = windows == window
            if self.sample is None:
                features = hashes_of(frame.filter(now))
                self.counting.count(features, int(now.sum()))
                self.counting.reservoir.add(features, units[now])
            else:
                self.counting.reservoir.add(hashes_of(frame.filter(now & held)), units[now & held])
                self.counting.count(hashes_of(frame.filter(now & ~held)), int((now & ~held).sum()))

    def _refuse(self, file: RawFile, rows: Rows) -> None:
        if rows.refused and not self.skip_bad_rows:
            bad = rows.refused[0]
            where = f"line {bad.line} of its sampled lines" if file.stretches is not None else f"line {bad.line}"
            raise DataError(
                f"{file.named}, {where}: {bad.reason} (correct it, or leave such rows out with --bad-rows skip)"
            )


def hashes_of(frame: Any) -> list[Ragged]:
    """The values of every feature as 64-bit hashes; two of 10^8 values have the same one with a chance of 0.0003."""
    pl = import_polars()
    features = []
    one_each = np.arange(frame.height + 1)
    for name in frame.columns:
        if not name.startswith("feature"):
            continue
        column = frame[name]
        if column.dtype == pl.List(pl.String):
            values = column.filter(column.list.len() > 0).explode()
            features.append(Ragged(values.hash(0).to_numpy(), offsets_of(column.list.len().to_numpy())))
        else:
            features.append(Ragged(column.hash(0).to_numpy(), one_each))
    return features


def profile_raw(stream: RawStream, ordered: bool, progress: Progress) -> Profile:
    """Read the stream and make its profile."""
    raw, sample = stream.raw, stream.sample
    for path in raw.files:
        if not path.stat().st_size:
            raise DataError(f"{path} is empty: leave it out, or put the rows it should hold into it")
    with files_to_read(stream) as files:
        stream.run(files, progress)
    counting = stream.counting
    if not counting.rows_counted or (sample is not None and not len(counting.reservoir)):
        raise DataError(
            f"no rows to profile: {stream.rows_read:,} training rows were read from {len(raw.files)} files, and "
            f"{counting.rows_counted:,} counted; check --format, --valid and --test, or read a larger --sample"
        )
    drawn = None
    if sample is not None:
        drawn = Sample(share=sample, seed=stream.seed, blocks=stream.units, confidence=CONFIDENCE)
    names = [(path.name, path.stat().st_size) for path in raw.files]
    return Profile(
        source=Source(
            kind="raw",
            name=raw.files[0].name,
            fingerprint=raw_fingerprint(names),
            split="train",
            rows=stream.rows_read,
        ),
        method="stream",
        rows_read=counting.rows_counted,
        sample=drawn,
        order="time" if ordered else "none",
        windows=stream.windows,
        features=counting.feature_profiles(ordered, stream.windows),
        hot=counting.hot(),
    )


@contextmanager
def files_to_read(stream: RawStream) -> Iterator[list[RawFile]]:
    """The named files; of text files that can be read in parts, a temporary file with the sampled lines."""
    text = stream.raw.layout.text
    in_parts = stream.in_parts and text is not None and not text.multiline
    with tempfile.TemporaryDirectory(prefix="holdall-profile-") as folder:
        files = []
        for number, path in enumerate(stream.raw.files):
            whole = path.suffix in COMPRESSIONS or path.suffix in SUFFIXES
            if stream.sample is None or not in_parts or whole:
                files.append(RawFile(path, path))
                continue
            part = Path(folder) / f"{number}{path.suffix}"
            assert text is not None
            ends = copy_sample(path, part, stream.sample, header=text.header, seed=stream.seed + number)
            files.append(RawFile(part, path, ends))
        yield files


def copy_sample(path: Path, part: Path, share: float, header: bool, seed: int) -> Array:
    """Copy the lines that start in stretches of the file drawn at random; every line starts in one stretch.

    Returns how many lines have been copied at the end of each stretch, the header not counted.
    """
    size = path.stat().st_size
    length = int(np.clip(size * share / STRETCHES, SHORTEST_STRETCH, STRETCH_BYTES))
    num_stretches = -(-size // length)
    wanted = int(np.clip(round(num_stretches * share), 1, num_stretches))
    chosen = np.sort(np.random.default_rng(seed).choice(num_stretches, wanted, replace=False))
    lines = []
    with path.open("rb") as source, part.open("wb") as target:
        first_line = source.readline() if header else b""
        target.write(first_line)
        for stretch in chosen.tolist():
            start, end = max(stretch * length, len(first_line)), (stretch + 1) * length
            source.seek(max(start - 1, 0))
            if start > len(first_line):
                source.readline()  # the rest of the line before, or the newline that ends it
            elif start:
                source.seek(start)
            data = b""
            if source.tell() < end:
                data = source.read(end - source.tell() - 1) + source.readline()  # to the end of the last line
                data += b"" if data.endswith(b"\n") or not data else b"\n"
            target.write(data)
            lines.append(data.count(b"\n"))
    return np.cumsum(lines)
