"""Splits by time: the newest rows are held out. Rows of one time are in one split, whatever the order of the files.

The files are read twice: once for the times alone, to find where the splits begin, and once for the rows.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from holdall.common.errors import DataError
from holdall.data.layout import Layout
from holdall.data.raw_data import RawData, Read
from holdall.data.rows import Rows
from holdall.data.splits import TEST, TRAIN, VALID

MAX_TIMES = 1 << 20
"""Times that are counted one by one: 16 MB. Beyond it, neighbours are counted together, half as many ranges of about
equal numbers of rows."""

Times = npt.NDArray[np.float64]


class TimeCounts:
    """Rows by time, in bounded memory: the first times of ranges, and the rows of each range."""

    def __init__(self, max_times: int = MAX_TIMES) -> None:
        self.max_times = max_times
        self.times: Times = np.zeros(0)
        """[n] first time of each range, ascending."""
        self.counts = np.zeros(0, dtype=np.int64)
        self._pending: list[Times] = []

    def add(self, times: Times) -> None:
        """Count rows by their times [R]; many blocks are merged at once."""
        self._pending.append(times)
        if sum(map(len, self._pending)) >= self.max_times // 2:
            self.merge()

    def merge(self) -> None:
        """Count the rows that were added since the last time."""
        found, counts = np.unique(np.concatenate([np.zeros(0), *self._pending]), return_counts=True)
        self._pending.clear()
        self.times, place = np.unique(np.concatenate([self.times, found]), return_inverse=True)
        self.counts = np.bincount(place, np.concatenate([self.counts, counts]), len(self.times)).astype(np.int64)
        if len(self.times) > self.max_times:
            before = np.cumsum(self.counts) - self.counts
            part = before * (self.max_times // 2) // self.counts.sum()
            first = np.flatnonzero(np.diff(part, prepend=-1))
            self.times, self.counts = self.times[first], np.add.reduceat(self.counts, first)

    def cuts(self, valid: float, test: float, where: str) -> tuple[float, float]:
        """First times of the valid and of the test split, nearest to the wanted shares of the rows."""
        self.merge()
        starts = np.append(0, np.cumsum(self.counts)) / max(self.counts.sum(), 1)
        times = np.append(self.times, np.inf)
        first = [int(np.argmin(np.abs(starts - share))) for share in (1 - valid - test, 1 - test)]
        for split, share, size in (
            ("valid", valid, starts[first[1]] - starts[first[0]]),
            ("test", test, 1 - starts[first[1]]),
        ):
            if share and not size:
                last = self.counts[-1] / self.counts.sum() if len(self.counts) else 0.0
                raise DataError(
                    f"--split time leaves no rows for --{split} {share:g}: {last:.0%} of the rows in {where} have the "
                    f"latest time, and rows of one time stay together; choose another share, or --split random"
                )
        return float(times[first[0]]), float(times[first[1]])


def splits_of(times: Times, cuts: tuple[float, float]) -> npt.NDArray[np.uint8]:
    """[R] split of rows by their times."""
    return np.where(times >= cuts[1], TEST, np.where(times >= cuts[0], VALID, TRAIN)).astype(np.uint8)


def times_layout(layout: Layout) -> Layout:
    """Layout of the time alone."""
    return replace(layout, label=None, positive=None, weight=None, dense=(), features=())


def split_by_time(raw: RawData, read_times: Read, valid: float, test: float) -> RawData:
    """The raw data with splits by the column `time` of its rows; `read_times` gives rows with that column alone."""
    where = ", ".join(map(str, raw.files[:3])) + (" and others" if len(raw.files) > 3 else "")

    @cache  # found when the first file is read, not before it is known that there is something to do
    def cuts() -> tuple[float, float]:
        counts, of_dates, of_numbers = TimeCounts(), None, None
        for file in raw.files:
            for rows in read_times(file):
                counts.add(rows.frame["time"].to_numpy())
                of_dates = of_dates or (file if rows.frame["is_date"].any() else None)
                of_numbers = of_numbers or (None if rows.frame["is_date"].all() else file)
        if of_dates is not None and of_numbers is not None:
            raise DataError(
                f"column '{raw.layout.time}' has dates in {of_dates} and numbers in {of_numbers}, whose order is not "
                f"known: convert one of them"
            )
        return counts.cuts(valid, test, where)

    def read(path: Path) -> Generator[Rows]:
        for rows in raw.read(path):
            yield replace(rows, splits=splits_of(rows.frame["time"].to_numpy(), cuts()))

    return replace(raw, read=read)
