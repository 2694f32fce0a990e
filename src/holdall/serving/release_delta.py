"""Release of a trained run as a delta: only what changed since a bundle that is in use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from holdall.common.errors import DataError
from holdall.common.output_folder import check_output
from holdall.data.identity import ids_fingerprint
from holdall.serving.base_form import in_base_form
from holdall.serving.bundle import BUNDLE, Bundle, Quality
from holdall.serving.delta import DELTA, apply_deltas, open_delta
from holdall.serving.forms import Form, Forms
from holdall.serving.gate import OPTIONS, GateError, Released, refuse_unproved
from holdall.serving.proof import Limits
from holdall.serving.published_folder import open_current
from holdall.serving.trained_run import (
    ReleaseReport,
    TrainedRun,
    dense_bytes,
    quality_as_trained,
    quality_released,
    table_bytes,
)
from holdall.serving.withdraw import find_withdrawal, read_values
from holdall.serving.write_delta import merge_deltas, write_delta
from holdall.training.same_data import refuse_other_data


def open_base(since: Sequence[Path]) -> Bundle:
    """A bundle, or the current one of a published folder, with the deltas that are named after it."""
    first, *deltas = since
    return apply_deltas(open_current(first), [open_delta(path) for path in deltas])


def merge(base: str | Path, deltas: Sequence[str | Path], out: str | Path, *, overwrite: bool = False) -> ReleaseReport:
    """Write a bundle, or the current one of a published folder, and the deltas after it as one bundle."""
    sources = [Path(base), *(Path(path) for path in deltas)]
    check_output(Path(out), BUNDLE, overwrite=overwrite, inputs=sources)
    return ReleaseReport(Path(out), merge_deltas(open_base(sources), [], out, overwrite=overwrite, inputs=sources))


def release_delta(
    run: Path,
    out: Path,
    since: Sequence[Path],
    *,
    forget: Path | None = None,
    max_auc_loss: float | None = None,
    max_logloss_increase: float | None = None,
    data: Path | None = None,
    device: str = "auto",
    overwrite: bool = False,
) -> ReleaseReport:
    """Write the changes from a bundle to the model of a run, in the methods of the bundle: see `release`."""
    check_output(out, DELTA, overwrite=overwrite, inputs=[run, *since])
    base = open_base(since)
    values = {} if forget is None else read_values(forget)
    withdrawal = find_withdrawal(base, values)
    trained = TrainedRun.load(run, data, device)
    _refuse_other_run(trained, base)
    written = write_delta(
        out,
        in_base_form(trained.model, base),
        trained.config.model.model_config(),
        base,
        trained.origin,
        lambda result: _quality(result, trained, base, Limits(max_auc_loss, max_logloss_increase)),
        withdrawn=withdrawal.ids,
        overwrite=overwrite,
        inputs=[trained.run, trained.data, *since],
    )
    return replace(written, num_unknown=withdrawal.num_unknown)


def _refuse_other_run(trained: TrainedRun, base: Bundle) -> None:
    """Raise if the run was trained on other ids than those of the base."""
    own, expected = ids_fingerprint(trained.schema), base.record.data_set["ids_fingerprint"]
    if own is not None and expected is not None and own != expected:
        raise DataError(
            f"{trained.run} was trained on other ids than those of {base.path}, so rows do not correspond: release a "
            f"bundle of its own (without --since)"
        )
    refuse_other_data(trained.schema, base.schema, trained.data)


def _quality(result: Bundle, trained: TrainedRun, base: Bundle, given: Limits) -> Quality:
    """Quality of what the delta leads to; raises a `GateError` where it is not proved to be as good as trained.

    Limits that are not given are those of the base. Tables that are as they were trained have nothing to prove.
    """
    if all(trained.model.bags.table(name).method == method for name, method in result.methods.items()):
        return quality_as_trained(trained.model, trained.data)
    forms = Forms(trained.model, trained.config, trained.data)
    refuse_unproved(forms)
    proof = base.record.quality.proof or {}
    limits = Limits(
        proof.get("max_auc_loss") if given.auc is None else given.auc,
        proof.get("max_logloss_increase") if given.logloss is None else given.logloss,
    )
    model = result.model(forms.device)
    found = forms.compare(model)
    if exceeded := limits.exceeded(found):
        named = " and ".join(OPTIONS[one.metric] for _, one in exceeded)
        raise GateError(
            f"the delta is not proved to be within {named}: with 95% confidence it {found.bound_text} (on "
            f"{found.auc.rows:,} validation rows): release a new bundle, without --since, or raise {named}",
            [],
        )
    form = Form("base", model, table_bytes(model))
    return quality_released(Released(form, dense_bytes(trained.model), found, limits, []))
