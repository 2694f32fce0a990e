"""Scores of raw files: rows are read and encoded in a thread ahead of the model, and written in their order.

    holdall.score("bundle", ["clicks-*.parquet"], "scores.parquet")

Memory holds a few blocks of rows, whatever the size of the files.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from holdall.common.console import make_console, table
from holdall.common.errors import ConfigError, DataError
from holdall.common.summary import Summarised, Summary
from holdall.common.worker_thread import prefetched
from holdall.data.bad_rows import BadRows
from holdall.data.formats.open_to_score import open_to_score
from holdall.data.formats.table import read_table
from holdall.data.passes import Progress
from holdall.data.prepare import progress_bar
from holdall.data.raw_data import RawData
from holdall.evaluation.metrics import BinaryMetrics
from holdall.serving.file_rows import EncodedRows, encoded_file, read_schema
from holdall.serving.score_output import LABEL, SCORE, ScoreWriter, bad_rows_path, output_file, refuse_output
from holdall.serving.scorer import Scorer, load

BATCH_ROWS = 4096
"""Rows that the model takes at once. A DLRM for Criteo took 14.8, 14.4, 15.5, 15.3 and 25 us of CPU time a row with
1, 2, 4, 8 and 64 thousand of them."""
BLOCKS_AHEAD = 2
"""Blocks of rows that are encoded ahead of the model."""


@dataclass(frozen=True, repr=False)
class ScoreReport(Summarised):
    """Outcome of scoring files."""

    rows: int
    """Rows written, refused ones among them."""
    refused: int
    """Rows that could not be read; their score is null."""
    seconds: float
    unseen: dict[str, float]
    """By feature, the share of its values that training did not have."""
    labelled: int
    """Rows with a label."""
    auc: float | None
    """Of the labelled rows; None where there are none, or none of one class."""
    logloss: float | None

    def _summary(self) -> Summary:
        title = f"ScoreReport: {self.rows:,} rows in {self.seconds:.1f} s, {self.refused:,} refused"
        if self.auc is not None and self.logloss is not None:
            title += f"; AUC {self.auc:.5f} and logloss {self.logloss:.5f} of {self.labelled:,} labelled rows"
        rows = sorted(self.unseen.items(), key=lambda item: -item[1])
        shares = [(name, f"{share:.2%}") for name, share in rows]
        return Summary(title, ("feature", "values that training did not have"), shares)

    @property
    def rows_per_second(self) -> float:
        """Rows read, scored and written, over the time of all of it."""
        return self.rows / max(self.seconds, 1e-9)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "rows_per_second": self.rows_per_second}


def score(
    bundle: str | Path | Scorer,
    sources: str | Path | Sequence[str | Path],
    out: str | Path,
    *,
    format: str | None = None,
    schema: str | Path | None = None,
    bad_rows: Literal["stop", "skip"] | None = None,
    keep: Sequence[str] = (),
    overwrite: bool = False,
    device: str = "auto",
    progress: Progress | None = None,
) -> ScoreReport:
    """Score the rows of files (names or patterns), and write a row for each of them, in order.

    `bundle` is a bundle, a published folder, a run or a `Scorer`. Files are read as those that the data set was
    prepared from, unless `format` or `schema`, a TOML file, says otherwise; labels may be missing. `out` is Parquet, or
    CSV by its suffix, and is written whole or not at all: columns of the raw files to `keep`, `label` (null where it is
    missing) and `score`. With `bad_rows="skip"` rows that cannot be read have a null score and are listed beside `out`.
    """
    out = Path(out)
    names = [sources] if isinstance(sources, str | Path) else list(sources)
    refuse_output(out, [*map(Path, names), *([] if schema is None else [Path(schema)])], overwrite)
    scorer = bundle if isinstance(bundle, Scorer) else load(bundle, device=device)
    toml = None if schema is None else Path(schema)
    raw = with_kept(open_to_score(names, out, read_schema(scorer), format=format, toml=toml), keep)
    counts = Counts(scorer)
    start = time.perf_counter()
    with progress_bar(progress) as report, output_file(out) as (partial_out, partial_list):
        done, total = dict.fromkeys(raw.files, 0), sum(file.stat().st_size for file in raw.files)
        with (
            BadRows(partial_list, bad_rows or raw.bad_rows) as refused,
            ScoreWriter(partial_out, out, keep) as writer,
            closing(prefetched(encoded_files(scorer, raw), BLOCKS_AHEAD, name="encode")) as blocks,
        ):
            for rows in blocks:
                refused.add(rows.source, rows.refused)
                logits = logits_of(scorer, rows)
                counts.add(rows, logits)
                writer.write(rows, torch.sigmoid(logits).numpy())
                done[rows.source] = rows.position
                report("score", sum(done.values()), total)
        found = counts.report(refused.count)
    return replace(found, seconds=time.perf_counter() - start)


def encoded_files(scorer: Scorer, raw: RawData) -> Iterator[EncodedRows]:
    for file in raw.files:
        yield from encoded_file(scorer, raw, file)


def logits_of(scorer: Scorer, rows: EncodedRows) -> Tensor:
    """[G] logits on the host of the good rows of a block, computed in batches that stay in the caches."""
    batch = rows.batch
    parts = [
        scorer.logits(batch.slice(start, min(start + BATCH_ROWS, len(batch)))).cpu()
        for start in range(0, len(batch), BATCH_ROWS)
    ]
    logits = torch.cat(parts) if parts else torch.zeros(0)
    finite = torch.isfinite(logits)
    if not finite.all():
        row = rows.first_row + int(rows.places[int(torch.argmin(finite.int()))]) + 1
        raise DataError(
            f"{rows.source}, row {row}: the model gives {float(logits[~finite][0])}, so it has diverged: release "
            f"another checkpoint"
        )
    return logits


class Counts:
    """Metrics and unseen values of the rows that were scored."""

    def __init__(self, scorer: Scorer):
        self.features = [(place, f) for place, f in enumerate(scorer.schema.features) if f.name in scorer.reads]
        self.num_rows = 0
        self.num_labelled = 0
        self.num_values = {feature.name: 0 for _, feature in self.features}
        self.num_unseen = dict(self.num_values)
        self.metrics = BinaryMetrics()

    def add(self, rows: EncodedRows, logits: Tensor) -> None:
        self.num_rows += rows.num_rows
        for place, feature in self.features:
            ids, _, _ = rows.batch.ids.bag(place)
            self.num_values[feature.name] += len(ids)
            self.num_unseen[feature.name] += int(torch.count_nonzero(ids == feature.unseen))
        given = torch.from_numpy(np.asarray(rows.label.is_valid()))
        if given.any():
            label = torch.from_numpy(rows.label.fill_null(0).to_numpy(zero_copy_only=False).astype(np.float32))
            self.num_labelled += int(given.sum())
            self.metrics.update(logits[given], label[given])

    def report(self, refused: int) -> ScoreReport:
        found = self.metrics.compute(allow_one_class=True) if self.num_labelled else {}
        return ScoreReport(
            rows=self.num_rows,
            refused=refused,
            seconds=0.0,
            unseen={name: self.num_unseen[name] / max(number, 1) for name, number in self.num_values.items()},
            labelled=self.num_labelled,
            auc=None if math.isnan(found.get("auc", math.nan)) else found["auc"],
            logloss=found.get("logloss"),
        )


def with_kept(raw: RawData, keep: Sequence[str]) -> RawData:
    """The raw data with further columns of its files passed on."""
    if not keep:
        return raw
    for name in keep:
        if name in (LABEL, SCORE) or list(keep).count(name) > 1:
            what = "is written anyway" if name in (LABEL, SCORE) else "is named twice"
            raise ConfigError(f"--keep {name}: the column {what}; leave it out")
    if raw.format != "table":
        raise ConfigError(f"--keep goes with tables: rows of {raw.format} are made from other columns; leave it out")
    layout = replace(raw.layout, keep=tuple(keep))
    return replace(raw, layout=layout, read=partial(read_table, layout=layout))


def show(report: ScoreReport, out: Path) -> None:
    """Print the outcome of `score`."""
    console = make_console(soft_wrap=True)
    refused = f", {report.refused:,} refused ({bad_rows_path(out)})" if report.refused else ""
    console.print(
        f"{report.rows:,} rows in {report.seconds:.1f} s ({report.rows_per_second:,.0f} rows/s){refused}: {out}"
    )
    if report.logloss is not None:
        auc = "" if report.auc is None else f"AUC {report.auc:.5f}, "
        console.print(f"{report.labelled:,} rows have a label: {auc}logloss {report.logloss:.5f}")
    unseen = {name: share for name, share in report.unseen.items() if share}
    if unseen:
        shares = table("feature", "unseen values")
        for name, share in sorted(unseen.items(), key=lambda item: -item[1]):
            shares.add_row(name, f"{share:.2%}")
        console.print(shares)
    else:
        console.print("training had every value of every feature")
