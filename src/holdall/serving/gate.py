"""Gate of a release: the smallest form of a model that is proved to lose at most so much AUC.

Forms are tested in a fixed order, from the largest to the smallest, and the first one that fails ends the search. So
every form is compared once, on the same rows, and the chance that a released form loses more than the limit is 5%,
however many were tested (fixed-sequence testing). The form after the first failure is measured too, to show the front,
and is not released. Polishing decides by one half of the rows, and then forms are tested on the other half.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from holdall.common.errors import ConfigError, HoldallError
from holdall.data.schema import Schema
from holdall.evaluation.paired import rows_needed
from holdall.serving.forms import Form, Forms
from holdall.serving.polish import Polish, polish
from holdall.serving.proof import Comparison, halves

MAX_AUC_LOSS = 0.0005
"""Largest loss of AUC of a release that is given no other."""
LADDER = ("1/8", "1/20", "1/50", "1/100", "1/200", "1/300", "1/500", "1/1000")
"""Budgets that are tested without a given one, in order."""
MAX_FAILURES = 2


class GateError(HoldallError):
    """Model that no form was released of; `front` are the forms that were looked at."""

    def __init__(self, message: str, front: list[FrontRow]):
        super().__init__(message)
        self.front = front


@dataclass(frozen=True)
class FrontRow:
    """One form that was looked at: its size, and its comparison with the trained model."""

    budget: str
    num_bytes: int
    dense_bytes: int
    comparison: Comparison
    passes: bool | None
    """Whether the bound is within the limit; None where there is no limit."""
    polish: Polish | None = None

    @property
    def verdict(self) -> str:
        """The comparison in words."""
        within = {True: "within the limit", False: "above the limit", None: "no limit was given"}[self.passes]
        return f"with 95% confidence it {self.comparison.bound_text} AUC: {within}"

    def to_json(self) -> dict[str, Any]:
        return {
            "budget": self.budget,
            "table_bytes": self.num_bytes,
            "share": self.num_bytes / self.dense_bytes,
            "passes": self.passes,
            "polish": None if self.polish is None else self.polish.to_json(),
            **self.comparison.to_json(),
        }


@dataclass(frozen=True)
class Released:
    """Model that passed the gate, with its proof and the front that was looked at."""

    form: Form
    dense_bytes: int
    proof: Comparison
    limit: float | None
    """Loss of AUC that the proof was held against."""
    front: list[FrontRow]

    @property
    def sentence(self) -> str:
        """The result for people."""
        auc = self.proof.auc
        side = "below" if auc.loss > 0 else "above"
        return (
            f"1/{self.dense_bytes / self.form.num_bytes:.4g} of the table bytes; AUC {auc.candidate:.5f}, "
            f"{abs(auc.loss):.5f} {side} the trained model's; with 95% confidence it {self.proof.bound_text} (on "
            f"{auc.rows:,} validation rows)"
        )


def release_model(
    forms: Forms,
    *,
    budget: str | int | float | None = None,
    max_auc_loss: float | None = None,
    polish_epochs: int = 0,
    note: Callable[[FrontRow], None] = lambda _: None,
) -> Released:
    """The form of a budget, or without one the smallest whose loss of AUC has a bound within `max_auc_loss`.

    The loss is that on the validation split, compared with the trained model; its bound is the one-sided 95% one.
    Without a budget the limit is 0.0005 unless given; with one there is a limit only if it is given. A `GateError` says
    that no form is good enough. With `polish_epochs` every form is trained on for at most so many epochs at each of a
    few rates. `note` is called with every form that is looked at.
    """
    refuse_unproved(forms)
    if polish_epochs < 0:
        raise ConfigError(f"--polish must be 0 epochs or more, not {polish_epochs}")
    if max_auc_loss is not None and not max_auc_loss >= 0:
        raise ConfigError(f"--max-auc-loss must be 0 or more, not {max_auc_loss}")
    limit = MAX_AUC_LOSS if max_auc_loss is None and budget is None else max_auc_loss
    front: list[FrontRow] = []
    best: tuple[Form, FrontRow] | None = None
    for share in LADDER if budget is None else (budget,):
        try:
            form, row = _tested(forms, share, limit, polish_epochs)
        except ConfigError:  # tables cannot be smaller
            if front:
                break
            raise
        front.append(row)
        note(row)
        failures = sum(row.passes is False for row in front)
        if not failures:
            best = form, row
        elif failures == MAX_FAILURES:
            break
    if best is None:
        assert limit is not None
        raise GateError(_refusal(front, limit), front)
    form, row = best
    return Released(form, forms.precision.dense_bytes, row.comparison, limit, front)


def _tested(forms: Forms, budget: str | int | float, limit: float | None, polish_epochs: int) -> tuple[Form, FrontRow]:
    """The form of a budget, polished where that is asked for, and its comparison with the trained model."""
    form, polished, rows = forms.fit(budget), None, None
    if polish_epochs:
        choosing, rows = halves(len(forms.scores("valid").labels))
        model, polished = polish(forms, form.model, polish_epochs, choosing)
        form = replace(form, model=model)
    comparison = forms.compare(form.model, rows=rows)
    passes = None if limit is None else comparison.loss_bound <= limit
    return form, FrontRow(form.budget, form.num_bytes, forms.precision.dense_bytes, comparison, passes, polished)


def refuse_unproved(forms: Forms) -> None:
    """Raise if there are no validation rows to prove anything on."""
    schema = Schema.load(forms.data)
    if "valid" not in schema.splits or not schema.splits["valid"].rows:
        raise ConfigError(
            f"a smaller form is proved on the validation split, and {forms.data} has none: prepare with --valid 0.1, "
            f"or release the tables as they were trained (--as-trained)"
        )


def _refusal(front: list[FrontRow], limit: float) -> str:
    """Why nothing was released, and what would help."""
    best = min(front, key=lambda row: row.comparison.loss_bound)
    auc = best.comparison.auc
    found = (
        f"no form is proved to lose at most {limit:g} AUC: the best bound is {auc.loss_bound:.5f}, of {best.budget} of "
        f"the table bytes (loss {auc.loss:+.5f} on {auc.rows:,} validation rows)"
    )
    needed = rows_needed(limit, auc)
    if needed is not None and needed > auc.rows:
        return (
            f"{found}; the split is too small for this limit, which takes about {needed:,} rows: prepare with more "
            f"(--valid), or raise --max-auc-loss"
        )
    return f"{found}: give a larger --budget, raise --max-auc-loss, or release the tables --as-trained"
