"""Comparison of a bundle with training: raw rows are replayed, and their ids, dense values and scores compared.

    holdall.verify("bundle", against="run")

Ids and dense values must be those of the data set folder to the bit, scores those of the run's model to 1e-6. The
tables of a released form are not the run's: its scores are compared with its own on the stored rows, and the difference
to the run, which the release has proved to be small, is reported beside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdall.common.decode import decode, parse_json
from holdall.common.errors import ConfigError, DataError
from holdall.common.progress import SampleProgress
from holdall.common.settings import refuse_other_types
from holdall.data.identity import ids_fingerprint
from holdall.serving.bundle import Bundle
from holdall.serving.export.export import open_export
from holdall.serving.export.exported_scorer import ExportedScorer
from holdall.serving.published_folder import open_current
from holdall.serving.replay import RawSource, ReplayedRows, check_columns, rebuilt, replayed
from holdall.serving.row_comparison import TOLERANCE, Mismatch, RowComparison, VerifyReport
from holdall.serving.scorer import Scorer, load_bundle
from holdall.serving.trained_run import TrainedRun

BATCH_ROWS = 4096
"""Rows that the models take at once."""


def verify(
    bundle: str | Path,
    against: str | Path | None = None,
    *,
    rows: int = 1_000_000,
    data: str | Path | None = None,
    log: str | Path | None = None,
    export: str | Path | None = None,
    run_code: bool = False,
    device: str = "auto",
    quiet: bool = True,
) -> VerifyReport:
    """Replay raw rows through a bundle, or what is current in a published folder, and compare with training.

    `against` is the run that it was released from; `data` another folder with the same ids than the one trained on.
    Raw rows are those of the files that were prepared, or, where these are gone, the values behind the stored ids.
    At most `rows` of them are compared. `export` is an export of the bundle, which scores the same rows; one of
    compiled code is loaded with `run_code` only, since loading executes it. `log` is a request log of the server: its
    requests are scored again.
    """
    if against is None and log is None:
        raise ConfigError("there is nothing to compare the bundle with: name the run (--against), or a log (--log)")
    if export is not None and against is None:
        raise ConfigError("--export is compared on the rows of a run: name it (--against)")
    refuse_other_types(int, rows=rows)
    if rows < 1:
        raise ConfigError(f"rows is {rows}, but must be 1 or more")
    opened = open_current(bundle, verify=True)
    scorer = load_bundle(opened, device=device)
    report = VerifyReport()
    if against is not None:
        exported = None if export is None else _open_export(Path(export), scorer, run_code)
        _compare_with_run(report, opened, scorer, exported, Path(against), data, rows, device, quiet)
    if log is not None:
        _replay_log(report, scorer, Path(log), quiet)
    return report


# --- rows of the run -------------------------------------------------------------------------------------------------


def _compare_with_run(
    report: VerifyReport,
    bundle: Bundle,
    scorer: Scorer,
    exported: ExportedScorer | None,
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
    comparison = RowComparison(report, scorer, trained.model.requires_grad_(False).eval(), own_tables, exported)
    with SampleProgress(total, label="verify", quiet=quiet) as progress:
        for block in blocks:
            for part in _parts(block, rows - report.rows):
                comparison.add(part)
                progress.update(len(part.found))
            if report.rows >= rows:
                break
    comparison.finish()


def _open_export(path: Path, scorer: Scorer, run_code: bool) -> ExportedScorer:
    exported = open_export(path, run_code=run_code)
    if exported.fingerprint != scorer.fingerprint:
        raise ConfigError(f"{path} is an export of another bundle than {scorer.path}: export this one, and verify that")
    return exported


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


# --- the log of a server ---------------------------------------------------------------------------------------------


def _replay_log(report: VerifyReport, scorer: Scorer, log: Path, quiet: bool) -> None:
    """Score logged requests again, many at once; those that another bundle answered are counted."""
    replayed = others = rows = 0
    waiting: dict[str, LoggedRequest] = {}
    with log.open("rb") as file:
        total = sum(1 for _ in file)
    with log.open("rb") as file, SampleProgress(total, label="verify requests", quiet=quiet) as progress:
        for number, line in enumerate(file, start=1):
            where = f"{log}, line {number}"
            entry = decode(
                parse_json(line, where),
                LoggedRequest,
                where,
                error=DataError,
                cure="is it a request log of the server?",
            )
            progress.update(1)
            if entry.fingerprint != scorer.fingerprint:
                others += 1
                continue
            if len(entry.rows) != len(entry.scores):
                raise DataError(f"{where} has {len(entry.rows)} rows and {len(entry.scores)} scores: it is damaged")
            replayed, rows = replayed + 1, rows + len(entry.rows)
            waiting[where] = entry
            if rows >= BATCH_ROWS:
                _score_again(report, scorer, waiting)
                waiting, rows = {}, 0
    if not replayed:
        raise DataError(f"{log} has no request that this bundle answered, and {others:,} of others: name another log")
    _score_again(report, scorer, waiting)
    report.notes.append(f"{replayed:,} requests of {log} were scored again, {others:,} of other bundles were left out")


def _score_again(report: VerifyReport, scorer: Scorer, requests: dict[str, LoggedRequest]) -> None:
    """Compare the scores of requests, by place; one that cannot be scored is a mismatch of its own."""
    try:
        found = scorer.score([row for request in requests.values() for row in request.rows]).tolist()
    except DataError as error:
        if len(requests) > 1:
            for where, request in requests.items():
                _score_again(report, scorer, {where: request})
            return
        refused = Mismatch(next(iter(requests)), "a row", "one that can be scored", f"refused ({error})")
        report.add([0], lambda _: refused)
        return
    start = 0
    for where, request in requests.items():
        pairs = list(zip(request.scores, found[start : start + len(request.rows)], strict=True))
        start += len(pairs)
        report.largest_difference = max([report.largest_difference, *(abs(a - b) for a, b in pairs)])
        report.add(
            [row for row, (logged, score) in enumerate(pairs) if not abs(logged - score) <= TOLERANCE],
            lambda row, pairs=pairs, where=where: Mismatch(  # type: ignore[misc]
                f"{where}, row {row}", "the score", *(f"{score:.7g}" for score in pairs[row])
            ),
        )
        report.rows += len(pairs)


@dataclass(frozen=True, kw_only=True)
class LoggedRequest:
    """Line of a request log."""

    fingerprint: str
    rows: list[dict[str, Any]]
    scores: list[float]
