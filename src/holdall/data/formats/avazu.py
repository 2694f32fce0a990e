"""Reader of the Avazu click log: CSV with a header, in which `hour` is YYMMDDHH and other columns are categorical.

One number and 23 features: the file's 21 categorical columns, and hour of day (0..23) and weekday (0 is Monday), which
published models derive from `hour`. The number is `hour_index`, hours since the log began (2014-10-21 00:00): DLRM
configurations for Avazu have one dense column, and this is the one quantity in the file. `click` is the label, and `id`
is not read.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import replace
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from holdall.common.errors import DataError
from holdall.data.layout import Layout, RawDense, RawFeature, TextFormat
from holdall.data.raw_data import RawData
from holdall.data.read_text import read_text
from holdall.data.rows import Refused, Rows, import_polars, shown
from holdall.data.sources import find_sources
from holdall.data.time_split import TimeCounts, splits_of

if TYPE_CHECKING:
    from holdall.data.prepare import PrepareConfig

LABEL, HOUR = "click", "hour"
PLACES = ("site_id", "site_domain", "site_category", "app_id", "app_domain", "app_category")
DEVICE = ("device_id", "device_ip", "device_model", "device_type", "device_conn_type")
CATEGORICAL = ("C1", "banner_pos", *PLACES, *DEVICE, *(f"C{number}" for number in range(14, 22)))
FIRST_HOUR = datetime(2014, 10, 21)

TEXT = TextFormat(separator=",", header=True)
RAW = Layout(
    label=LABEL, features=tuple(RawFeature(name=name, column=name) for name in (HOUR, *CATEGORICAL)), text=TEXT
)
AVAZU = Layout(
    label=LABEL,
    dense=(RawDense(name="hour_index", column=HOUR),),
    features=(
        RawFeature(name="hour_of_day", column=HOUR),
        RawFeature(name="weekday", column=HOUR),
        *(RawFeature(name=name, column=name) for name in CATEGORICAL),
    ),
    text=TEXT,
)


def open_avazu(sources: Sequence[str | Path], out: Path, config: PrepareConfig, *, to_score: bool = False) -> RawData:
    """One file or several; with `--split time` all are read once more, to find the hours at which the splits begin.

    Rows to score need no label.
    """
    files = find_sources(sources, out)
    layout = replace(RAW, max_value_bytes=config.max_value_bytes, label_optional=to_score)

    @cache  # found when the first file is read, not before it is known that there is something to do
    def cuts() -> tuple[float, float] | None:
        return find_cuts(files, layout, config.valid_fraction, config.test) if config.split == "time" else None

    made = replace(AVAZU, max_value_bytes=config.max_value_bytes, label_optional=to_score)
    return RawData(layout=made, files=files, read=lambda path: read_avazu(path, layout, cuts()))


def read_avazu(path: Path, layout: Layout = RAW, cuts: tuple[float, float] | None = None) -> Generator[Rows]:
    for rows in read_text(path, layout):
        yield derive(rows, cuts)


def derive(rows: Rows, cuts: tuple[float, float] | None) -> Rows:
    """Replace `hour` (the first feature of RAW) by what is made of it; rows with no such hour are refused."""
    pl = import_polars()
    time = hours(rows.frame)
    bad = time.is_null().arg_true().to_list()
    frame = rows.frame.select(
        "label",
        (time - FIRST_HOUR).dt.total_hours().cast(pl.Float64).alias("dense0"),
        time.dt.hour().cast(pl.String).alias("feature0"),
        (time.dt.weekday() - 1).cast(pl.String).alias("feature1"),
        *(pl.col(f"feature{index}").alias(f"feature{index + 1}") for index in range(1, len(RAW.features))),
    )
    refused = sorted([*rows.refused, *(refuse(rows, row) for row in bad)], key=lambda row: row.line)
    keep = np.delete(np.arange(len(frame)), bad)
    made = replace(rows, frame=frame[keep], numbers=rows.numbers[keep], refused=refused)
    return made if cuts is None else replace(made, splits=splits_of(frame["dense0"].to_numpy()[keep], cuts))


def hours(frame: Any) -> Any:
    """The `hour` of each row as a point in time; null where it is none."""
    pl = import_polars()
    text = pl.col("feature0")
    minutes = pl.lit("20") + text + "00"  # polars reads no hour without its minutes
    time = minutes.str.to_datetime("%Y%m%d%H%M", strict=False)
    return frame.select(pl.when(text.str.len_bytes() == 8).then(time)).to_series()


def refuse(rows: Rows, row: int) -> Refused:
    values = rows.frame.row(row)
    reason = f"column '{HOUR}' holds {shown(values[1])} instead of an hour as YYMMDDHH, such as 14102100"
    return Refused(int(rows.numbers[row]) + 2, reason, ",".join(map(str, values)))


def find_cuts(files: Sequence[Path], layout: Layout, valid: float, test: float) -> tuple[float, float]:
    """First hour of the valid and of the test split: whole hours, nearest to the wanted fractions."""
    counts = TimeCounts()
    for file in files:
        for rows in read_avazu(file, layout):
            counts.add(rows.frame["dense0"].to_numpy())
    counts.merge()
    if not len(counts.times):
        raise DataError(f"no row with a readable '{HOUR}' in {', '.join(map(str, files))}: is this the Avazu log?")
    return counts.cuts(valid, test, "the Avazu log")
