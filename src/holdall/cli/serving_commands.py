"""Commands on trained models in use: release, score, verify and publish."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

from holdall.cli.options import print_json, refuse_other_model, tyro
from holdall.common.errors import ConfigError


def release(
    run: tyro.conf.Positional[Path],
    out: Path,
    budget: str | None = None,
    max_auc_loss: float | None = None,
    max_logloss_increase: float | None = None,
    polish: int = 0,
    as_trained: bool = False,
    data: Path | None = None,
    model: str | None = None,
    device: str = "auto",
    since: tuple[Path, ...] | None = None,
    forget: Path | None = None,
    merge: tuple[Path, ...] | None = None,
    overwrite: bool = False,
    json: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> None:
    """Write the model of a run as a bundle, in a small form that is proved to be as good, or as a delta.

    Args:
        run: Run folder; with --merge a bundle or a published folder.
        out: Folder to write.
        budget: Size of all tables, such as 16MB, or a share of their bytes as float32 rows, such as 1/100. When absent,
            the smallest form within --max-auc-loss and --max-logloss-increase.
        max_auc_loss: Largest loss of AUC on the validation split, with 95% confidence: 0.0005 when absent, and no limit
            with --budget.
        max_logloss_increase: Largest increase of logloss on the validation split, with 95% confidence: a thousandth of
            the trained model's logloss when absent, and no limit with --budget.
        polish: Epochs, at most, that forms are trained on at each of a few rates; kept where validation says so.
        as_trained: Keep the tables as they were trained.
        data: Data set folder with the same ids; the one trained on when absent.
        model: The model that it was trained with, where that is one of your own: package.module:Config.
        device: cpu, cuda, or auto for a GPU if there is one.
        since: Bundle that is in use, or a published folder, and the deltas after it: write only what changed since.
        forget: With --since, a CSV file with the columns feature and value: these values score as unseen from now on.
        merge: Deltas to write with the bundle RUN as one bundle; none for the current one of a published folder.
        overwrite: Replace an older bundle or delta.
        json: Print the description of what was written as JSON on stdout.
    """
    if merge is not None:
        _merge(run, merge, out, overwrite, {"--since": since, "--forget": forget, "--budget": budget, "--data": data})
    else:
        _release(
            run,
            out,
            json=json,
            budget=budget,
            max_auc_loss=max_auc_loss,
            max_logloss_increase=max_logloss_increase,
            polish=polish,
            as_trained=as_trained,
            data=data,
            device=device,
            overwrite=overwrite,
            since=since,
            forget=forget,
        )
    _print_released(out, json)


def _release(run: Path, out: Path, *, json: bool, forget: Path | None, **options: Any) -> None:
    """Release a run, saying on stderr what is tested; the forms of a release that is refused are printed as a table."""
    from holdall.common.console import make_console
    from holdall.serving.gate import GateError
    from holdall.serving.release import release as run_release
    from holdall.serving.render import show_front

    def note(row: Any) -> None:
        print(f"tested {row.budget}: {row.verdict}", file=sys.stderr)

    try:
        report = run_release(run, out, forget=forget, note=note, **options)
    except GateError as refused:
        if not json:
            show_front([row.to_json() for row in refused.front], make_console())
        raise
    if report.num_unknown:
        print(f"{report.num_unknown:,} values of {forget} are in no id map: nothing to withdraw", file=sys.stderr)
    for name in report.without_rows:
        print(f"table '{name}' has no rows of single values: nothing to overwrite", file=sys.stderr)


def _print_released(out: Path, json: bool) -> None:
    from holdall.commands.inspect import inspect, show

    found = inspect(out)
    if json:
        print_json(found)
    else:
        show(found)


def _merge(base: Path, deltas: tuple[Path, ...], out: Path, overwrite: bool, others: dict[str, Any]) -> None:
    from holdall.serving.release_delta import merge

    for name, value in others.items():
        if value is not None:
            raise ConfigError(f"--merge writes a bundle and its deltas as they are: leave {name} out")
    merge(base, deltas, out, overwrite=overwrite)


def score(
    bundle: tyro.conf.Positional[Path],
    sources: tyro.conf.Positional[tuple[str, ...]],
    out: Path,
    format: str | None = None,
    schema: Path | None = None,
    bad_rows: Literal["stop", "skip"] | None = None,
    keep: tuple[str, ...] = (),
    model: str | None = None,
    device: str = "auto",
    overwrite: bool = False,
    json: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> None:
    """Score raw rows, in their order; labels may be missing.

    Args:
        bundle: Bundle, published folder, or run folder.
        sources: Files or globs to read, in order, like those that were prepared; or any Parquet with their columns.
        out: File to write: Parquet, or CSV by its suffix.
        format: Layout of the files, if another than that of the data set: a format of prepare.
        schema: TOML file that describes the columns, for --format table.
        bad_rows: A row that cannot be read: stop, or skip, give it no score and list it beside the output.
        keep: Columns of the files to write beside the scores.
        model: The model that it was trained with, where that is one of your own: package.module:Config.
        device: cpu, cuda, or auto for a GPU if there is one.
        overwrite: Replace an older output.
        json: Print the report as JSON on stdout.
    """
    from holdall.serving.score_files import score as run_score
    from holdall.serving.score_files import show

    refuse_other_model(bundle, model)
    report = run_score(
        bundle,
        sources,
        out,
        format=format,
        schema=schema,
        bad_rows=bad_rows,
        keep=keep,
        device=device,
        overwrite=overwrite,
    )
    if json:
        print_json(report.to_json())
    else:
        show(report, out)


def verify(
    bundle: tyro.conf.Positional[Path],
    against: Path | None = None,
    rows: int = 1_000_000,
    data: Path | None = None,
    log: Path | None = None,
    export: Path | None = None,
    run_code: bool = False,
    model: str | None = None,
    device: str = "auto",
    json: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> None:
    """Replay raw rows through a bundle, and compare every value and score with training.

    Args:
        bundle: Bundle to verify, or published folder, of which the current one is.
        against: Run folder that it was released from.
        rows: Rows to compare, at most.
        data: Data set folder with the same ids; the one trained on when absent.
        log: Request log of the server, whose requests are scored again.
        export: Export of the bundle, which scores the same rows.
        run_code: Load an export of compiled code (pt2), which executes it: only what you trust.
        model: The model that it was trained with, where that is one of your own: package.module:Config.
        device: cpu, cuda, or auto for a GPU if there is one.
        json: Print the report as JSON on stdout.
    """
    from holdall.serving.row_comparison import show
    from holdall.serving.verify import verify as run_verify

    refuse_other_model(bundle, model)
    report = run_verify(
        bundle,
        against,
        rows=rows,
        data=data,
        log=log,
        export=export,
        run_code=run_code,
        device=device,
        quiet=False,
    )
    if json:
        print_json(report.to_json())
    else:
        show(report)
    if not report.passed:
        raise SystemExit(1)


def publish(
    path: tyro.conf.Positional[Path | None] = None,
    *,
    to: Path,
    back: bool = False,
    allow_older: bool = False,
    allow_other_ids: bool = False,
    json: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> None:
    """Make a bundle, or a delta, the one that servers of a folder score with, without a restart.

    Args:
        path: Bundle, or a delta to the current one.
        to: Published folder; made if it is new.
        back: Go back to the bundle before the current one.
        allow_older: Accept a bundle of an earlier step than the current one.
        allow_other_ids: Accept a bundle with other ids than the current one, of a data set that follows the old one.
        json: Print the description of the published folder as JSON on stdout.
    """
    from holdall.serving.publish import publish as run_publish
    from holdall.serving.published_folder import describe_published
    from holdall.serving.render import published_text

    done = run_publish(path, to, back=back, allow_older=allow_older, allow_other_ids=allow_other_ids)
    if json:
        print_json(describe_published(to))
    else:
        print(f"{to}: {'now' if done.changed else 'still'} {published_text(describe_published(to))}")
