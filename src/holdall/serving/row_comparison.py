"""Comparison of replayed rows with those that `prepare` stored, and of their scores with those of training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from holdall.common.console import make_console
from holdall.common.summary import Summarised, Summary
from holdall.data.batch import Batch
from holdall.data.rows import shown
from holdall.models import Model
from holdall.models.model import batch_device
from holdall.serving.export.export_check import LIMIT
from holdall.serving.export.exported_scorer import ExportedScorer
from holdall.serving.replay import ReplayedRows
from holdall.serving.scorer import Scorer
from holdall.serving.vectors import feature_rows

Array = npt.NDArray[Any]
TOLERANCE = 1e-6
"""Largest difference of two scores that are the same: rounding of float32 in another order."""
MAX_LISTED = 20
"""Mismatches that a report lists; the others are counted."""


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


@dataclass(repr=False)
class VerifyReport(Summarised):
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

    def _summary(self) -> Summary:
        outcome = "passed" if self.passed else f"{self.num_mismatches:,} mismatches"
        title = f"VerifyReport: {outcome} in {self.rows:,} rows, largest difference {self.largest_difference:.3g}"
        return Summary(title, ("compared",), [(note,) for note in self.notes])

    @property
    def passed(self) -> bool:
        return self.num_mismatches == 0

    def add(self, rows: Sequence[int], mismatch_of: Callable[[int], Mismatch]) -> None:
        """Count a mismatch for each of these rows, and list the first of all."""
        self.num_mismatches += len(rows)
        self.mismatches += map(mismatch_of, rows[: max(0, MAX_LISTED - len(self.mismatches))])

    def to_json(self) -> dict[str, Any]:
        return {"passed": self.passed, **asdict(self)}


class RowComparison:
    """Comparison of replayed rows with stored ones, and of their scores."""

    def __init__(
        self,
        report: VerifyReport,
        scorer: Scorer,
        trained: Model,
        own_tables: bool,
        exported: ExportedScorer | None = None,
    ):
        self.report, self.scorer, self.trained, self.own_tables = report, scorer, trained, own_tables
        self.exported = exported
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
        if self.exported is not None:
            self._compare_export(self.exported, rows, found)
        self.report.rows += len(rows.found)

    def _compare_export(self, exported: ExportedScorer, rows: ReplayedRows, expected: Tensor) -> None:
        scores = torch.from_numpy(exported.scores(rows.found))
        differing = torch.nonzero(~((scores - expected).abs() <= LIMIT)).flatten().tolist()
        what = f"the score of the export {exported.path}"
        self.report.add(
            differing,
            lambda row: Mismatch(
                rows.name_of(row), what, f"{float(expected[row]):.7g} as of the bundle", f"{float(scores[row]):.7g}"
            ),
        )

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
                known = column in rows.raw.column_names  # a cross has no column of its own
                raw = f" of {shown(rows.raw[column][row].as_py())}" if column is not None and known else ""
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
