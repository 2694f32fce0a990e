"""Release of a trained run: its model in a small form that is proved to be as good, written as a bundle."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from holdall.common.errors import ConfigError
from holdall.common.output_folder import check_output
from holdall.common.settings import refuse_other_types
from holdall.common.sizes import check_budget
from holdall.models import Model
from holdall.serving.bundle import BUNDLE, Quality, write_bundle
from holdall.serving.forms import Forms
from holdall.serving.gate import FrontRow, release_model
from holdall.serving.release_delta import release_delta
from holdall.serving.trained_run import ReleaseReport, TrainedRun, quality_as_trained, quality_released
from holdall.tables.codes import CodesTable


def release(
    run: str | Path,
    out: str | Path,
    *,
    budget: str | int | float | None = None,
    max_auc_loss: float | None = None,
    max_logloss_increase: float | None = None,
    polish: int = 0,
    as_trained: bool = False,
    data: str | Path | None = None,
    device: str = "auto",
    overwrite: bool = False,
    since: str | Path | Sequence[str | Path] | None = None,
    forget: str | Path | None = None,
    note: Callable[[FrontRow], None] = lambda _: None,
) -> ReleaseReport:
    """Write the model of a run as a bundle, in a smaller form that is proved on the validation split.

    With `budget` (`1/100` of the bytes of its tables, `16MB`) the tables take at most that. Without, the form is the
    smallest whose AUC is at most `max_auc_loss` (0.0005 if None) below that of the trained model, and whose logloss is
    at most `max_logloss_increase` (a thousandth of the trained model's if None) above, with 95% confidence; if there is
    none, a `GateError` says so and nothing is written. With a budget and limits, its form must stay within these.
    `polish` trains forms on for at most so many epochs, where that is better. `as_trained` keeps the tables
    as they are. `note` is called with every form that is looked at.

    The run's best checkpoint is read. `data` is its data set folder, or another one with the same ids, for id maps,
    training and validation rows.

    With `since`, a bundle, or a published folder, or one of these and the deltas after it, only what changed since is
    written: a delta. Its tables have the methods of the base. Where these are not those of the run, the proof is held
    against `max_auc_loss`, or the limit of the base. `forget` is then a CSV file with the columns `feature` and
    `value`: these values are withdrawn, and score as unseen from then on.
    """
    refuse_other_types(float, max_auc_loss=max_auc_loss, max_logloss_increase=max_logloss_increase)
    refuse_other_types(int, polish=polish)
    check_budget(budget)
    run, out = Path(run), Path(out)
    folder = None if data is None else Path(data)
    limits = {"max_auc_loss": max_auc_loss, "max_logloss_increase": max_logloss_increase}
    sizes: dict[str, object] = {"--budget": budget, "--polish": polish or None}
    if since is not None:
        _refuse_options(
            "--since keeps the methods of the tables in the base", {**sizes, "--as-trained": as_trained or None}
        )
        bases = [Path(path) for path in ([since] if isinstance(since, str | Path) else since)]
        values = None if forget is None else Path(forget)
        return release_delta(run, out, bases, forget=values, **limits, data=folder, device=device, overwrite=overwrite)
    if forget is not None:
        raise ConfigError("--forget withdraws values from a bundle that is in use: name it with --since")
    if as_trained:
        flags = {f"--{name.replace('_', '-')}": limit for name, limit in limits.items()}
        _refuse_options("--as-trained keeps the tables as they are", sizes | flags)
    check_output(out, BUNDLE, overwrite=overwrite, inputs=[run])
    trained = TrainedRun.load(run, folder, device)
    if as_trained:
        content = _Content(trained.model, quality_as_trained(trained.model, trained.data), {})
    else:
        content = _smaller(trained, budget=budget, **limits, polish_epochs=polish, note=note)
    return _write(out, trained, content, overwrite=overwrite)


def _refuse_options(reason: str, options: Mapping[str, object]) -> None:
    """Raise if one of these options was given."""
    for name, value in options.items():
        if value is not None:
            raise ConfigError(f"{reason}: leave {name} out")


@dataclass(frozen=True)
class _Content:
    """Model that a bundle is written of."""

    model: Model
    quality: Quality
    calibration: dict[str, Tensor]
    """[dim, dim] by table, where rows are stored as codes."""


def _smaller(trained: TrainedRun, **options: Any) -> _Content:
    """The model of a run in a smaller form; options are those of `release_model`."""
    forms = Forms(trained.model, trained.config, trained.data)
    released = release_model(forms, **options)
    model = released.form.model
    has_codes = any(isinstance(part, CodesTable) for part in model.modules())
    transforms = {name: table.transform for name, table in forms.precision.tables.items()} if has_codes else {}
    return _Content(model, quality_released(released), transforms)


def _write(out: Path, trained: TrainedRun, content: _Content, *, overwrite: bool) -> ReleaseReport:
    record = write_bundle(
        out,
        content.model,
        trained.config.model.model_config(),
        trained.schema,
        trained.data,
        trained.origin,
        content.quality,
        calibration=content.calibration,
        overwrite=overwrite,
        inputs=[trained.run],
    )
    return ReleaseReport(out, record)
