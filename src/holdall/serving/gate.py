"""Gate of a release: the smallest form of a model that is proved to lose little AUC and to gain little logloss.

Forms are tested in a fixed order, from the largest to the smallest, and the first one that fails ends the search. So
every form is compared once, on the same rows, and the chance that a released form is beyond a limit is 5%, however many
were tested (fixed-sequence testing). A form passes if both its one-sided 95% bounds are within their limits. That takes
no correction: a form that is beyond one limit has to pass the test of this very limit, which it does with a chance of
5% at most (intersection-union test). The form after the first failure is measured too, to show the front, and is not
released. Polishing decides by one half of the rows, and then forms are tested on the other half.
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
from holdall.serving.proof import Comparison, Limits, halves

MAX_AUC_LOSS = 0.0005
"""Largest loss of AUC of a release that is given no other."""
MAX_LOGLOSS_SHARE = 0.001
"""Largest increase of logloss of a release that is given none, as a share of the trained model's.

Work on click prediction takes 0.001 of AUC or of logloss for a difference that counts, and a release may lose half of
that: 0.0005 of AUC, and 0.00045 of a logloss of 0.45, as models of Criteo have it. Where clicks are rare logloss is
small, and a share of it means the same."""
LADDER = ("1/8", "1/20", "1/50", "1/100", "1/200", "1/300", "1/500", "1/1000")
"""Budgets that are tested without a given one, in order."""
MAX_FAILURES = 2
OPTIONS = {"auc": "--max-auc-loss", "logloss": "--max-logloss-increase"}
BOUNDS = {"auc": "has an AUC loss bound of", "logloss": "has a logloss increase bound of"}


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
    limits: Limits
    polish: Polish | None = None

    @property
    def failed(self) -> tuple[str, ...]:
        """Metrics whose bound is above its limit."""
        return tuple(one.metric for _, one in self.limits.exceeded(self.comparison))

    @property
    def passes(self) -> bool | None:
        """Whether all bounds are within their limits; None where there is no limit."""
        return not self.failed if self.limits.any else None

    @property
    def verdict(self) -> str:
        """The comparison in words."""
        within = "within the limits" if self.limits.any else "no limit was given"
        if self.failed:
            within = f"above the limit of {' and of '.join(self.failed)}"
        return f"with 95% confidence it {self.comparison.bound_text}: {within}"

    def to_json(self) -> dict[str, Any]:
        return {
            "budget": self.budget,
            "table_bytes": self.num_bytes,
            "share": self.num_bytes / self.dense_bytes,
            "passes": self.passes,
            "failed": list(self.failed),
            "polish": None if self.polish is None else self.polish.to_json(),
            **self.comparison.to_json(),
        }


@dataclass(frozen=True)
class Released:
    """Model that passed the gate, with its proof and the front that was looked at."""

    form: Form
    dense_bytes: int
    proof: Comparison
    limits: Limits
    """Limits that the proof was held against."""
    front: list[FrontRow]

    @property
    def sentence(self) -> str:
        """The result for people."""
        auc, logloss, calibration = self.proof.auc, self.proof.logloss, self.proof.calibration
        sides = ["below" if one.difference < 0 else "above" for one in (auc, logloss)]
        return (
            f"1/{self.dense_bytes / self.form.num_bytes:.4g} of the table bytes; AUC {auc.candidate:.5f}, "
            f"{abs(auc.loss):.5f} {sides[0]} the trained model's; logloss {logloss.candidate:.5f}, "
            f"{abs(logloss.loss):.5f} {sides[1]}; with 95% confidence it {self.proof.bound_text} (each on {auc.rows:,} "
            f"validation rows); calibration {calibration.candidate:.4f}, trained {calibration.reference:.4f}"
        )


def release_model(
    forms: Forms,
    *,
    budget: str | int | float | None = None,
    max_auc_loss: float | None = None,
    max_logloss_increase: float | None = None,
    polish_epochs: int = 0,
    note: Callable[[FrontRow], None] = lambda _: None,
) -> Released:
    """The form of a budget, or without one the smallest that is proved to be within both limits.

    Losses are those on the validation split, compared with the trained model; their bounds are the one-sided 95% ones.
    Without a budget the limits are 0.0005 of AUC and a thousandth of the trained model's logloss unless given; with one
    there are limits only if they are given. A `GateError` says that no form is good enough. With `polish_epochs` every
    form is trained on for at most so many epochs at each of a few rates. `note` is called with every form that is
    looked at.
    """
    refuse_unproved(forms)
    if polish_epochs < 0:
        raise ConfigError(f"--polish must be 0 epochs or more, not {polish_epochs}")
    given = Limits(max_auc_loss, max_logloss_increase)
    for metric, limit in (("auc", given.auc), ("logloss", given.logloss)):
        if limit is not None and not limit >= 0:
            raise ConfigError(f"{OPTIONS[metric]} must be 0 or more, not {limit}")
    front: list[FrontRow] = []
    best: tuple[Form, FrontRow] | None = None
    for share in LADDER if budget is None else (budget,):
        try:
            form, row = _tested(forms, share, given, polish_epochs, defaults=budget is None)
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
        raise GateError(_refusal(front), front)
    form, row = best
    return Released(form, forms.precision.dense_bytes, row.comparison, row.limits, front)


def _tested(
    forms: Forms, budget: str | int | float, given: Limits, polish_epochs: int, *, defaults: bool
) -> tuple[Form, FrontRow]:
    """The form of a budget, polished where that is asked for, and its comparison with the trained model."""
    form, polished, rows = forms.fit(budget), None, None
    if polish_epochs:
        choosing, rows = halves(len(forms.scores("valid").labels))
        model, polished = polish(forms, form.model, polish_epochs, choosing)
        form = replace(form, model=model)
    comparison = forms.compare(form.model, rows=rows)
    limits = _with_defaults(given, comparison.logloss.reference) if defaults else given
    return form, FrontRow(form.budget, form.num_bytes, forms.precision.dense_bytes, comparison, limits, polished)


def _with_defaults(given: Limits, trained_logloss: float) -> Limits:
    return Limits(
        MAX_AUC_LOSS if given.auc is None else given.auc,
        MAX_LOGLOSS_SHARE * trained_logloss if given.logloss is None else given.logloss,
    )


def refuse_unproved(forms: Forms) -> None:
    """Raise if there are no validation rows to prove anything on."""
    schema = Schema.load(forms.data)
    if "valid" not in schema.splits or not schema.splits["valid"].rows:
        raise ConfigError(
            f"a smaller form is proved on the validation split, and {forms.data} has none: prepare with --valid 0.1, "
            f"or release the tables as they were trained (--as-trained)"
        )


def _refusal(front: list[FrontRow]) -> str:
    """Why nothing was released, and what would help: the limits that the best form failed."""
    best = min(front, key=lambda row: (len(row.failed), row.comparison.auc.loss_bound))
    exceeded = best.limits.exceeded(best.comparison)
    reasons = " and ".join(
        f"{BOUNDS[one.metric]} {one.loss_bound:.5f}, above {OPTIONS[one.metric]} {limit:.3g} (measured {one.loss:+.5f})"
        for limit, one in exceeded
    )
    rows = best.comparison.auc.rows
    found = f"no form is proved to be within the limits: the best, of {best.budget} of the table bytes, {reasons}"
    raised = " and ".join(OPTIONS[metric] for metric in best.failed)
    needed = [rows_needed(limit, one) for limit, one in exceeded]
    enough = max((count for count in needed if count is not None), default=0)
    if None not in needed and enough > rows:
        return (
            f"{found}; the {rows:,} validation rows are too few for this, which takes about {enough:,}: prepare with "
            f"more (--valid), or raise {raised}"
        )
    return (
        f"{found}, on {rows:,} validation rows: give a larger --budget, raise {raised}, or release the tables "
        f"--as-trained"
    )
