"""The command `holdall doctor`: checks of a data set and a plan, before training. It reads every row once and writes
nothing.

It looks for labels that are all the same or whose rate differs between splits, dense values that are not finite or very
large, ids outside their tables, constant features, columns that give the label away, rows that are sorted, and too
little memory or disk for a plan, and predicts the time of an epoch.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from rich.console import Console

from holdall.common.console import make_console, styled, table
from holdall.common.errors import HoldallError
from holdall.common.files import quoted
from holdall.common.memory import available_memory
from holdall.common.sizes import readable_bytes
from holdall.common.summary import Summarised, Summary
from holdall.data.dataset import DataSet
from holdall.data.folder_files import check_other_file
from holdall.data.schema import Schema
from holdall.evaluation.row_checks import SORTED, predictors, resemblances, sample_rows
from holdall.planning.memory_check import check_free_memory
from holdall.planning.plan import Plan

Level = Literal["problem", "note", "fine"]

BLOCK_ROWS = 1 << 17
EXTREME = 1e4
"""Dense values beyond it make the first steps unstable; logarithms of counts stay below 50."""
GIVES_LABEL = 0.99
"""AUC of a column alone from which on a note is made."""
MANY_UNSEEN = 0.2
"""Share of a split's lookups of the unseen row from which on a note is made."""


@dataclass(frozen=True)
class Finding:
    """Result of one check: its level, what was found, and the fix."""

    level: Level
    what: str
    cure: str = ""


@dataclass(repr=False)
class Examination(Summarised):
    """Findings of all checks."""

    findings: list[Finding] = field(default_factory=list)

    def _summary(self) -> Summary:
        title = f"Examination: {len(self.findings)} findings, {self.problems} problems"
        return Summary(
            title, ("level", "finding"), [(one.level, one.what) for one in self.findings], text_columns=2, width=100
        )

    def add(self, level: Level, what: str, cure: str = "") -> None:
        self.findings.append(Finding(level, what, cure))

    @property
    def problems(self) -> int:
        return sum(finding.level == "problem" for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        return {"problems": self.problems, "findings": [asdict(finding) for finding in self.findings]}


class _SplitFacts:
    """Counts and ranges from one pass over a split."""

    def __init__(self, data: DataSet):
        schema = data.schema
        self.schema = schema
        self.rows = len(data)
        self.positives = 0
        self.not_finite = np.zeros(schema.num_dense, dtype=np.int64)
        self.lowest = np.full(schema.num_dense, math.inf)
        self.highest = np.full(schema.num_dense, -math.inf)
        self.ids: dict[str, tuple[int, int, int, int]] = {}
        """By feature: lookups, lowest id, highest id, lookups of the unseen row."""
        for start in range(0, len(data), BLOCK_ROWS):
            self._add(data.columns(start, min(start + BLOCK_ROWS, len(data))))

    def _add(self, columns: Any) -> None:
        self.positives += int(columns.label.sum())
        finite = np.isfinite(columns.dense)
        self.not_finite += (~finite).sum(axis=0)
        dense = np.where(finite, columns.dense, np.nan)
        if len(dense):
            with np.errstate(all="ignore"):
                self.lowest = np.fmin(self.lowest, np.nanmin(dense, axis=0, initial=math.inf))
                self.highest = np.fmax(self.highest, np.nanmax(dense, axis=0, initial=-math.inf))
        one_hot, bags = iter(columns.ids.T), iter(columns.bags)
        for feature in self.schema.features:
            self._add_ids(feature.name, feature.unseen, next(one_hot) if feature.one_hot else next(bags).flat)

    def _add_ids(self, name: str, unseen: int, ids: npt.NDArray[Any]) -> None:
        if len(ids):
            lookups, lowest, highest, unseen_before = self.ids.get(name, (0, 1 << 62, -(1 << 62), 0))
            self.ids[name] = (
                lookups + len(ids),
                min(lowest, int(ids.min())),
                max(highest, int(ids.max())),
                unseen_before + int((ids == unseen).sum()),
            )


def doctor(data: str | Path, plan: str | Path | None = None, *, verify: bool = False) -> Examination:
    """Check a data set folder, and a plan for it. `verify` also hashes files that this machine has hashed before."""
    found = Examination()
    folder = Path(data)
    schema = Schema.load(folder)
    facts = {}
    for split in schema.splits:
        try:
            facts[split] = _SplitFacts(DataSet(folder, split, verify=verify))
        except HoldallError as error:
            found.add("problem", str(error))
    _other_files(found, schema, folder, verify)
    _labels(found, facts)
    _dense_columns(found, schema, facts)
    _ids(found, schema, facts)
    if "train" in facts and facts["train"].rows:
        _rows(found, DataSet(folder, "train", check=False))
    if plan is not None:
        _plan(found, schema, Path(plan), folder)
    return found


def _other_files(found: Examination, schema: Schema, folder: Path, verify: bool) -> None:
    if schema.files is None:
        what = f"{folder} was written by an earlier version: its id maps, items and ranking cases have no hashes"
        found.add("note", what, "prepare it again, so that damage to them is found")
        return
    for name in schema.files:
        try:
            check_other_file(folder, folder / name, schema, remember=not verify)
        except HoldallError as error:
            found.add("problem", str(error))


def _labels(found: Examination, facts: dict[str, _SplitFacts]) -> None:
    rates = {}
    for split, fact in facts.items():
        if fact.rows == 0:
            found.add(
                "note", f"split '{split}' has no rows", "prepare with a larger --valid or --test to measure on it"
            )
            continue
        rates[split] = fact.positives / fact.rows
        if fact.positives in (0, fact.rows) and split == "train":
            cure = "check the label column and what counts as a click; if all are clicks, training draws negatives"
            found.add("note", f"all {fact.rows:,} labels of split 'train' are {int(fact.positives > 0)}", cure)
    if "train" not in rates:
        return
    for split, rate in rates.items():
        fact = facts[split]
        spread = math.sqrt(max(rates["train"] * (1 - rates["train"]), 1e-12) / fact.rows)
        if split != "train" and abs(rate - rates["train"]) > 6 * spread and abs(rate - rates["train"]) > 0.01:
            found.add(
                "note",
                f"{rate:.1%} of split '{split}' are positive and {rates['train']:.1%} of 'train': unlikely by chance",
                "expect this when splits follow time; otherwise split at random",
            )
    shown = ", ".join(f"{split} {rate:.1%} of {facts[split].rows:,}" for split, rate in rates.items())
    found.add("fine", f"positive labels: {shown}")


def _dense_columns(found: Examination, schema: Schema, facts: dict[str, _SplitFacts]) -> None:
    for number, column in enumerate(schema.dense):
        for split, fact in facts.items():
            if fact.not_finite[number]:
                cure = "prepare again from a source without NaN and infinity"
                count = f"{fact.not_finite[number]:,} values in '{split}'"
                found.add("problem", f"dense column '{column.name}' has {count} that are not finite", cure)
        train = facts.get("train")
        if train is None or not train.rows:
            continue
        low, high = train.lowest[number], train.highest[number]
        if low == high:
            what = f"dense column '{column.name}' is {low:g} everywhere, which tells nothing"
            found.add("note", what, _leave_out(schema, "dense"))
        elif max(abs(low), abs(high)) > EXTREME:
            what = f"dense column '{column.name}' reaches from {low:g} to {high:g}"
            found.add("note", what, "prepare with --dense log or --dense standard")
    if schema.dense and facts:
        found.add("fine", f"{schema.num_dense} dense columns checked")


def _ids(found: Examination, schema: Schema, facts: dict[str, _SplitFacts]) -> None:
    for feature in schema.features:
        for split, fact in facts.items():
            if feature.name not in fact.ids:
                if fact.rows:
                    what = f"feature '{feature.name}' has no ids in split '{split}'"
                    found.add("problem", what, _leave_out(schema, feature.kind))
                continue
            _, lowest, highest, _ = fact.ids[feature.name]
            if lowest < 0 or highest >= feature.num_rows:
                what = f"feature '{feature.name}' has ids from {lowest} to {highest} in '{split}'"
                cure = "the files are damaged: copy the folder again, or prepare again"
                found.add("problem", f"{what}, and its table {feature.num_rows} rows", cure)
        _unseen(found, schema, facts, feature.name)
        if feature.num_rows <= 2:
            what = f"feature '{feature.name}' has one value, which tells next to nothing"
            found.add("note", what, _leave_out(schema, feature.kind))
    found.add("fine", f"{len(schema.features)} features with {sum(schema.cardinalities.values()):,} rows checked")


def _unseen(found: Examination, schema: Schema, facts: dict[str, _SplitFacts], feature: str) -> None:
    """A note if many ids of other splits have the unseen row, which only ids folded by --rare-below train."""
    ids = {split: fact.ids[feature] for split, fact in facts.items() if feature in fact.ids}
    shares = {split: unseen / lookups for split, (lookups, _, _, unseen) in ids.items() if split != "train"}
    shown = " and ".join(f"{share:.0%} in '{split}'" for split, share in shares.items() if share > MANY_UNSEEN)
    if not shown:
        return
    folded = schema.source.get("options", {}).get("rare_below", 1)
    what = f"ids of '{feature}' that share its unseen row: {shown}"
    if "train" not in ids or not ids["train"][3]:
        what += "; no training row has it, so it stays as it was initialised"
        found.add("note", what, "prepare with --rare-below 2, which trains it on the ids seen once, and compare")
    elif folded > 2:
        found.add("note", what, f"prepare with a --rare-below of less than {folded}, to keep more ids apart")
    else:
        found.add("fine", f"{what}; it is trained on rare ids")


def _leave_out(schema: Schema, key: str) -> str:
    """Cure for a column that should not be there."""
    if schema.source.get("format") == "table":
        return f"remove it from `{key}` in the file of --schema, and prepare again"
    return "prepare with --format table and a --schema without it"


def _rows(found: Examination, data: DataSet) -> None:
    """Notes on columns that give the label away, and on sorted rows; from a sample of the training rows."""
    schema, sample = data.schema, sample_rows(data)
    keys = {feature.name: feature.kind for feature in schema.features}
    for kind, name, auc in predictors(sample, schema):
        if auc > GIVES_LABEL:
            what = f"{kind} '{name}' predicts the label alone (AUC {auc:.4f}): is it known before the label is?"
            found.add("note", what, f"if not, {_leave_out(schema, keys.get(name, 'dense'))}")
    alike = sorted(resemblances(sample, schema), key=lambda column: -column.excess)
    shown = [
        f"'{column.column}' is equal in {column.neighbours:.0%} of neighbours ({column.chance:.0%} by chance)"
        for column in alike
        if column.excess > SORTED
    ]
    if shown:
        cure = "train with --shuffle auto (the default), chunks or rows, not with blocks or none"
        found.add("note", f"rows are sorted: {', '.join(shown[:3])}", cure)
    else:
        found.add("fine", "neighbouring rows do not resemble each other")


def _plan(found: Examination, schema: Schema, path: Path, folder: Path) -> None:
    try:
        plan = Plan.load(path)
        plan.check(schema)
    except HoldallError as error:
        found.add("problem", str(error))
        return
    if plan.forecast is None:
        found.add(
            "note",
            f"{path} was edited by hand and has no forecast",
            f"holdall plan {quoted(folder)} --edited {quoted(path)}",
        )
        return
    try:
        check_free_memory(plan, folder)
    except HoldallError as error:
        found.add("problem", str(error))
    free = available_memory(folder, plan.device)
    for tier in ("device", "host", "disk"):
        needed = plan.forecast.total(tier)
        if needed:
            found.add("fine", f"{tier}: {readable_bytes(needed)} of {readable_bytes(free[tier])} free")
    steps = -(-schema.splits["train"].rows // plan.batch_size)
    seconds = steps * plan.forecast.step_seconds
    binds = plan.forecast.binds
    found.add("fine", f"an epoch of {steps:,} steps should take {_readable_time(seconds)}; limited by: {binds}")


def _readable_time(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} minutes" if seconds < 6000 else f"{seconds / 3600:.1f} hours"


def show(found: Examination, console: Console | None = None) -> None:
    """Print the findings, problems first."""
    console = console or make_console()
    shown = table("", "found", "what to do")
    for column in shown.columns[1:]:
        column.justify = "left"
        column.overflow = "fold"
    for level, color in {"problem": "red", "note": "yellow", "fine": "green"}.items():
        for finding in found.findings:
            if finding.level == level:
                shown.add_row(styled(level, color), finding.what, finding.cure)
    console.print(shown)
