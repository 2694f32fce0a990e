"""Logs of a run: `run.json`, `metrics.jsonl` and TensorBoard events.

A run folder also has `checkpoints/` (see `holdall.checkpoint`) and, after a non-finite loss, `bad_batch.safetensors`.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import sys
import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, NotRequired, TypedDict

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from holdall.common.decode import Count, decode, parse_json
from holdall.common.environment import environment
from holdall.common.errors import DataError, HoldallError
from holdall.common.files import PARTIAL, read_json, write_json
from holdall.common.output_folder import FolderKind
from holdall.data.batch import Batch, Ids

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

FORMAT = "holdall-run"
VERSION = 1
RUN_FILE = "run.json"
RUN = FolderKind("run", RUN_FILE, FORMAT)
METRICS_FILE = "metrics.jsonl"
TENSORBOARD_FOLDER = "tensorboard"
BAD_BATCH_FILE = "bad_batch.safetensors"


class RunLog:
    """The log of one run; `create` starts a new one, `resume` continues an earlier one.

    Every row has a step and a split. Write all rows of a step before its checkpoint is saved: a run resumed from the
    checkpoint of step s keeps the rows up to s and writes later ones again, so its curve has no gaps and no duplicates.
    """

    def __init__(self, folder: Path, *, tensorboard: bool = True, purge_step: int | None = None):
        self.folder = Path(folder)
        self._file: IO[str] = (self.folder / METRICS_FILE).open("a", encoding="utf-8")
        self._board = _open_tensorboard(self.folder / TENSORBOARD_FOLDER, purge_step) if tensorboard else None

    @classmethod
    def create(
        cls,
        folder: Path,
        config: Mapping[str, Any],
        *,
        found: Mapping[str, Any] | None = None,
        tensorboard: bool = True,
    ) -> RunLog:
        """Write `run.json` with the configuration, the fields `found` and the environment; start a log."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        document = {
            "format": FORMAT,
            "version": VERSION,
            "started": _now(),
            "config": dict(config),
            **(found or {}),
            **environment(),
            "resumed": [],
        }
        write_json(folder / RUN_FILE, document, hashed=True)
        (folder / METRICS_FILE).write_text("", encoding="utf-8")
        return cls(folder, tensorboard=tensorboard)

    @classmethod
    def resume(cls, folder: Path, step: int, *, tensorboard: bool = True) -> RunLog:
        """Continue after `step`: later rows are dropped, and `run.json` gets an entry about the resume."""
        folder = Path(folder)
        run = read_run(folder)
        kept = [row for row in read_metrics(folder) if row["step"] <= step] if (folder / METRICS_FILE).exists() else []
        resumed = [*run.get("resumed", []), {"step": step, "started": _now(), **environment()}]
        write_json(folder / RUN_FILE, {**run, "resumed": resumed}, hashed=True)
        _write_rows(folder / METRICS_FILE, kept)
        return cls(folder, tensorboard=tensorboard, purge_step=step + 1)

    def write(self, step: int, split: str = "train", **values: Any) -> None:
        """Append a row and flush it. Numbers that are not finite become null, since JSON has none."""
        row = {"step": step, "split": split, **{name: _json_number(value) for name, value in values.items()}}
        try:
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()
            for name, value in values.items():
                if self._board is not None and isinstance(value, int | float):
                    self._board.add_scalar(f"{split}/{name}", value, step)
        except OSError as error:
            raise HoldallError(
                f"the log of the run in {self.folder} cannot be written at step {step} ({error.strerror}): free disk "
                f"space, and continue with --resume"
            ) from error

    def close(self) -> None:
        """Close the files. Errors are ignored: all rows are flushed already, and they must not hide another error."""
        for file in (self._file, self._board):
            with suppress(OSError):
                if file is not None:
                    file.close()

    def __enter__(self) -> RunLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class RunSettings(TypedDict):
    """Settings of a run."""

    data: str
    train: dict[str, Any]


class RunRecord(TypedDict):
    """Fields of `run.json` that are read again."""

    started: str
    config: RunSettings
    versions: dict[str, Any]
    hardware: dict[str, Any]
    commit: NotRequired[str | None]
    data_set: NotRequired[dict[str, Any]]
    plan: NotRequired[str | None]
    tables: NotRequired[dict[str, dict[str, Any]]]
    """Method of each table, where a run of this version has other than dense float32 tables and no plan."""
    table_sizes: NotRequired[dict[str, dict[str, Any]]]
    """Rows, method and bytes of each table; absent in runs of earlier versions."""
    resumed: NotRequired[list[dict[str, Any]]]


class MetricsRow(TypedDict):
    """Fields that every row of `metrics.jsonl` has."""

    step: Count
    split: str


def read_run(folder: Path) -> RunRecord:
    """The content of `run.json`."""
    return read_json(Path(folder) / RUN_FILE, RunRecord, format=FORMAT, version=VERSION, cure="restore it from a copy")


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The rows of `metrics.jsonl`, in order; a last line that is incomplete, after a kill, is left out."""
    file = Path(folder) / METRICS_FILE
    try:
        lines = file.read_bytes().split(b"\n")
    except FileNotFoundError:
        raise DataError(f"{file} does not exist: is {folder} a run folder?") from None
    except OSError as error:
        raise DataError(f"{file} cannot be read ({error.strerror}): delete it, the run does not need it") from error
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines[:-1], start=1):  # text after the last newline is an incomplete row
        where, cure = f"{file}, line {number}", "delete that line"
        row = parse_json(line, where, cure=cure)
        rows.append({**decode(row, MetricsRow, where, error=DataError, cure=cure)})
    return rows


def _write_rows(file: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    partial = file.with_name(file.name + PARTIAL)
    partial.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    os.replace(partial, file)


def _open_tensorboard(folder: Path, purge_step: int | None) -> SummaryWriter | None:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        print("note: no TensorBoard files, tensorboard is not installed: pip install 'holdall[cli]'", file=sys.stderr)
        return None
    if threading.excepthook is threading.__excepthook__:
        threading.excepthook = _quiet_in_tensorboard
    return SummaryWriter(str(folder), purge_step=purge_step)


def _quiet_in_tensorboard(args: threading.ExceptHookArgs) -> None:
    """Hook that does not print errors of the thread that writes TensorBoard's files: the next row raises them."""
    if type(args.thread).__module__.partition(".")[0] != "tensorboard":
        threading.__excepthook__(args)


def _json_number(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def save_batch(path: Path, batch: Batch) -> None:
    """Write one batch as a safetensors file, atomically, to inspect it or to run it again."""
    tensors = {"dense": batch.dense, "label": batch.label, "ids.values": batch.ids.values}
    if batch.ids.offsets is not None:
        tensors["ids.offsets"] = batch.ids.offsets
    if batch.ids.weights is not None:
        tensors["ids.weights"] = batch.ids.weights
    if batch.weight is not None:
        tensors["weight"] = batch.weight
    partial = path.with_name(path.name + PARTIAL)
    # clone: the columns of a batch may be views into one buffer, which safetensors refuses when they overlap
    copies = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}
    save_file(copies, partial, metadata={"format": "holdall-batch", "num_features": str(batch.ids.num_features)})
    os.replace(partial, path)


def load_batch(path: Path) -> Batch:
    """Read a batch that `save_batch` wrote."""
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
            num_features = int(file.metadata()["num_features"])
        ids = Ids(tensors["ids.values"], tensors.get("ids.offsets"), num_features, tensors.get("ids.weights"))
        return Batch(dense=tensors["dense"], ids=ids, label=tensors["label"], weight=tensors.get("weight"))
    except FileNotFoundError:
        raise DataError(f"{path} does not exist: give the path of a saved batch") from None
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path} is not a batch saved by Holdall ({type(error).__name__}: {error})") from error
