"""Comparison of a bundle with training: raw rows are replayed, and their ids, dense values and scores compared.

    holdall.verify("bundle", against="run")

Ids and dense values must be those of the data set folder to the bit, scores those of the run's model to 1e-6. The
tables of a released form are not the run's: its scores are compared with its own on the stored rows, and the difference
to the run, which the release has proved to be small, is reported beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from holdall.common.console import make_console
from holdall.common.decode import decode, parse_json
from holdall.common.errors import ConfigError, DataError
from holdall.common.progress import SampleProgress
from holdall.data.batch import Batch
from holdall.data.identity import ids_fingerprint
from holdall.data.rows import shown
from holdall.models import Model
from holdall.models.model import batch_device
from holdall.serving.bundle import Bundle, open_bundle
from holdall.serving.replay import RawSource, ReplayedRows, check_columns, rebuilt, replayed
from holdall.serving.scorer import Scorer, load
from holdall.serving.trained_run import TrainedRun
from holdall.serving.vectors import feature_rows

Array = npt.NDArray[Any]
TOLERANCE = 1e-6
"""Largest difference of two scores that are the same: rounding of float32 in another order."""
MAX_LISTED = 20
"""Mismatches that a report lists; the others are counted."""
BATCH_ROWS = 4096


@dataclass(frozen=True)
class Mismatch:
    """One value of a row that is not what it should be."""

    row: str
    """Place of the row."""
    what: str
    """The feature, dense column or score."""
    expected: str
    found: str

    def __str__(self) -> str:
        return f"{self.row}: {self.what} is {self.found} instead of {self.expected}"


@dataclass
class VerifyReport:
    """Outcome of `verify`."""

    rows: int = 0
    """Rows that were compared."""
    num_mismatches: int = 0
    mismatches: list[Mismatch] = field(default_factory=list)
    """The first of them."""
    notes: list[str] = field(default_factory=list)
    """What was compared with what."""
    largest_difference: float = 0.0
    """Of two scores that must be the same."""
    difference_to_run: dict[str, float] | None = None
    """Of a released form: largest and mean difference of its scores to the run's."""

    @property
    def passed(self) -> bool:
        return self.num_mismatches == 0

    def add(self, rows: Sequence[int], mismatch_of: Callable[[int], Mismatch]) -> None:
        """Count a mismatch for each of these rows, and list the first of all."""
        self.num_mismatches += len(rows)
        self.mismatches += map(mismatch_of, rows[: max(0, MAX_LISTED - len(self.mismatches))])

    def to_json(self) -> dict[str, Any]:
        return {"passed": self.passed, **asdict(self)}


def verify(
    bundle: str | Path,
    against: str | Path | None = None,
    *,
    rows: int = 1_000_000,
    data: str | Path | None = None,
    log: str | Path | None = None,
    device: str = "auto",
    quiet: bool = True,
) -> VerifyReport:
    """Replay raw rows through a bundle and compare with what training had.

    `against` is the run that it was released from; `data` another folder with the same ids than the one trained on.
    Raw rows are those of the files that were prepared, or, where these are gone, the values behind the stored ids.
    At most `rows` of them are compared. `log` is a request log of the server: its requests are scored again.
    """
    if against is None and log is None:
        raise ConfigError("there is nothing to compare the bundle with: name the run (--against), or a log (--log)")
    if rows < 1:
        raise ConfigError(f"rows is {rows}, but must be 1 or more")
    opened = open_bundle(bundle, verify=True)
    scorer = load(bundle, device=device)
    report = VerifyReport()
    if against is not None:
        _compare_with_run(report, opened, scorer, Path(against), data, rows, device, quiet)
    if log is not None:
        _replay_log(report, scorer, Path(log))
    return report


# --- rows of the run -------------------------------------------------------------------------------------------------


def _compare_with_run(
    report: VerifyReport,
    bundle: Bundle,
    scorer: Scorer,
    run: Path,
    data: str | Path | None,
    rows: int,
    device: str,
    quiet: bool,
) -> None:
    trained = TrainedRun.load(run, None if data is None else Path(data), device)
    origin = bundle.record.origin
    if origin.run is not None and origin != trained.origin:
        raise ConfigError(
            f"{bundle.path} has checkpoint {origin.checkpoint} of run {origin.run[:12]}, and {run} is at "
            f"{trained.origin.checkpoint} of run {str(trained.origin.run)[:12]}: name the run that the bundle was "
            f"released from, or release it again"
        )
    check_columns(bundle.schema, trained.schema, bundle.path)
    expected, found = ids_fingerprint(trained.schema), ids_fingerprint(bundle.schema)
    if expected != found:
        what = "the fingerprint of columns and ids"
        report.add([0], lambda _: Mismatch(str(bundle.path), what, str(expected)[:12], str(found)[:12]))
    source = RawSource.find(trained.schema)
    if isinstance(source, str):
        report.notes.append(f"raw values are those behind the stored ids, dense values as stored, since {source}")
        blocks = rebuilt(scorer, trained.data, trained.schema)
    else:
        report.notes.append(f"raw rows are those of {', '.join(map(str, source.raw.files[:3]))}")
        blocks = replayed(scorer, source, trained.data, trained.schema)
    own_tables = bundle.record.quality.proof is not None
    what = "the bundle's own model on the stored rows" if own_tables else "the run's model on the stored rows"
    report.notes.append(f"scores are compared with {what}")
    total = min(rows, sum(split.rows for split in trained.schema.splits.values()))
    comparison = RowComparison(report, scorer, trained.model.requires_grad_(False).eval(), own_tables)
    with SampleProgress(total, label="verify", quiet=quiet) as progress:
        for block in blocks:
            for part in _parts(block, rows - report.rows):
                comparison.add(part)
                progress.update(len(part.found))
            if report.rows >= rows:
                break
    comparison.finish()


def _parts(block: ReplayedRows, most: int) -> Iterator[ReplayedRows]:
    """Parts of a block that the model takes at once, `most` rows in all."""
    for start in range(0, min(len(block.found), most), BATCH_ROWS):
        stop = min(start + BATCH_ROWS, len(block.found), most)
        yield ReplayedRows(
            found=block.found.slice(start, stop),
            expected=block.expected.slice(start, stop),
            raw=block.raw.slice(start, stop - start),
            name_of=lambda row, start=start: block.name_of(start + row),  # type: ignore[misc]
        )


class RowComparison:
    """Comparison of replayed rows with stored ones, and of their scores."""

    def __init__(self, report: VerifyReport, scorer: Scorer, trained: Model, own_tables: bool):
        self.report, self.scorer, self.trained, self.own_tables = report, scorer, trained, own_tables
        self._sum = self._largest = 0.0

    def add(self, rows: ReplayedRows) -> None:
        """Compare values, then scores of the rows whose values are the same."""
        wrong = self._compare_values(rows)
        found = torch.sigmoid(self.scorer.logits(rows.found)).cpu()
        of_run = self._score(self.trained, rows.expected)
        expected = self._score(self.scorer.model, rows.expected) if self.own_tables else of_run
        if self.own_tables:
            differences = (expected - of_run).abs().double()
            self._sum += float(differences.sum())
            self._largest = max(self._largest, float(differences.max()))
        difference = (found - expected).abs()
        difference[torch.from_numpy(wrong)] = 0.0
        self.report.largest_difference = max(self.report.largest_difference, float(difference.max()))
        differing = torch.nonzero(~(difference <= TOLERANCE)).flatten().tolist()
        self.report.add(
            differing,
            lambda row: Mismatch(
                rows.name_of(row),
                f"the score{self._cause(rows, row)}",
                f"{float(expected[row]):.7g}",
                f"{float(found[row]):.7g}",
            ),
        )
        self.report.rows += len(rows.found)

    def finish(self) -> None:
        if self.own_tables and self.report.rows:
            self.report.difference_to_run = {"largest": self._largest, "mean": self._sum / self.report.rows}

    def _score(self, model: Model, batch: Batch) -> Tensor:
        with torch.no_grad():
            return torch.sigmoid(model(batch.to(batch_device(model))).float()).cpu()

    def _compare_values(self, rows: ReplayedRows) -> npt.NDArray[np.bool_]:
        """[R] whether a value of the row differs."""
        wrong = np.zeros(len(rows.found), dtype=bool)

        def compare(what: str, column: str | None, differing: Array, text_of: Callable[[Batch, int], str]) -> None:
            wrong[differing] = True

            def mismatch_of(row: int) -> Mismatch:
                raw = "" if column is None else f" of {shown(rows.raw[column][row].as_py())}"
                return Mismatch(rows.name_of(row), what + raw, text_of(rows.expected, row), text_of(rows.found, row))

            self.report.add(differing.tolist(), mismatch_of)

        found, expected = rows.found, rows.expected
        compare("the label", None, np.flatnonzero(found.label != expected.label), lambda b, row: f"{b.label[row]:g}")
        for place, column in enumerate(self.scorer.schema.dense):
            differing = np.flatnonzero(found.dense[:, place] != expected.dense[:, place])
            compare(
                f"dense column '{column.name}'",
                column.name,
                differing,
                lambda b, row, place=place: f"{b.dense[row, place]:.9g}",  # type: ignore[misc]
            )
        for place, feature in enumerate(self.scorer.schema.features):
            if feature.name in self.scorer.reads:
                compare(
                    f"feature '{feature.name}'",
                    feature.name,
                    differing_bags(found, expected, place),
                    lambda b, row, place=place: ids_text(ids_of_row(b, place, row)),  # type: ignore[misc]
                )
        return wrong

    def _cause(self, rows: ReplayedRows, row: int) -> str:
        """Features whose vectors differ between bundle and run, or the dense part."""
        if self.own_tables:
            return ""
        schema = self.scorer.schema
        names = []
        for place, feature in enumerate(schema.features):
            if feature.name in self.scorer.reads:
                ids = np.asarray(ids_of_row(rows.expected, place, row))
                of_bundle, of_run = (feature_rows(m, feature.name, ids) for m in (self.scorer.model, self.trained))
                if not np.array_equal(of_bundle, of_run):
                    names.append(f"'{feature.name}'")
        if names:
            return f" (the vectors of {', '.join(names[:3])} differ from the run's)"
        return " (all vectors are the run's, so the dense part differs)"


def ids_of_row(batch: Batch, feature: int, row: int) -> list[int]:
    """Ids of one feature of one row."""
    values, offsets, _ = batch.ids.bag(feature)
    bounds = (row, row + 1) if offsets is None else (int(offsets[row]), int(offsets[row + 1]))
    return values[slice(*bounds)].tolist()


def ids_text(ids: Sequence[int]) -> str:
    return f"id {ids[0]}" if len(ids) == 1 else f"ids {ids}"


def differing_bags(found: Batch, expected: Batch, feature: int) -> Array:
    """Rows whose ids of a feature differ, in number, value or order."""
    (ours, our_offsets, _), (theirs, their_offsets, _) = found.ids.bag(feature), expected.ids.bag(feature)
    if our_offsets is None or their_offsets is None:
        assert our_offsets is their_offsets
        return np.flatnonzero(ours.numpy() != theirs.numpy())
    lengths, expected_lengths = our_offsets.diff().numpy(), their_offsets.diff().numpy()
    if (lengths != expected_lengths).any():
        rows = range(len(found))
        differ = (ids_of_row(found, feature, row) != ids_of_row(expected, feature, row) for row in rows)
        return np.flatnonzero(np.fromiter(differ, dtype=bool, count=len(found)))
    row_of = np.repeat(np.arange(len(lengths)), lengths)
    return np.unique(row_of[ours.numpy() != theirs.numpy()])


# --- the log of a server ---------------------------------------------------------------------------------------------


def _replay_log(report: VerifyReport, scorer: Scorer, log: Path) -> None:
    """Score logged requests again; those that another bundle answered are counted."""
    replayed = others = 0
    with log.open("rb") as file:
        for number, line in enumerate(file, start=1):
            where = f"{log}, line {number}"
            entry = decode(
                parse_json(line, where),
                LoggedRequest,
                where,
                error=DataError,
                cure="is it a request log of the server?",
            )
            if entry.fingerprint != scorer.fingerprint:
                others += 1
                continue
            if len(entry.rows) != len(entry.scores):
                raise DataError(f"{where} has {len(entry.rows)} rows and {len(entry.scores)} scores: it is damaged")
            replayed += 1
            try:
                found = scorer.score(entry.rows).tolist()
            except DataError as error:
                refused = Mismatch(where, "a row", "one that can be scored", f"refused ({error})")
                report.add([0], lambda _, refused=refused: refused)  # type: ignore[misc]
                continue
            pairs = list(zip(entry.scores, found, strict=True))
            report.largest_difference = max([report.largest_difference, *(abs(a - b) for a, b in pairs)])
            report.add(
                [row for row, (logged, score) in enumerate(pairs) if not abs(logged - score) <= TOLERANCE],
                lambda row, pairs=pairs, where=where: Mismatch(  # type: ignore[misc]
                    f"{where}, row {row}", "the score", *(f"{score:.7g}" for score in pairs[row])
                ),
            )
            report.rows += len(entry.rows)
    if not replayed:
        raise DataError(f"{log} has no request that this bundle answered, and {others:,} of others: name another log")
    report.notes.append(f"{replayed:,} requests of {log} were scored again, {others:,} of other bundles were left out")


@dataclass(frozen=True, kw_only=True)
class LoggedRequest:
    """Line of a request log."""

    fingerprint: str
    rows: list[dict[str, Any]]
    scores: list[float]


def show(report: VerifyReport) -> None:
    """Print the outcome."""
    console = make_console(soft_wrap=True)
    for note in report.notes:
        console.print(note)
    if report.difference_to_run is not None:
        mean, largest = report.difference_to_run["mean"], report.difference_to_run["largest"]
        console.print(
            f"scores of the released form differ from the run's by {mean:.2g} on average, {largest:.2g} at most"
        )
    for mismatch in report.mismatches:
        console.print(str(mismatch))
    more = report.num_mismatches - len(report.mismatches)
    if more > 0:
        console.print(f"and {more:,} more")
    rows = f"{report.rows:,} rows, largest difference of a score {report.largest_difference:.2g}"
    console.print(f"{report.num_mismatches:,} mismatches in {rows}")
