"""Callbacks of a run: told what happens in it, and able to stop it."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from holdall.common.errors import ConfigError, HoldallError


class StopTraining(Exception):  # noqa: N818 (a request, not an error)
    """Raised in a callback to end the training: the run saves a checkpoint and returns its result.

    The text is the reason, `stopped_by` in the result. A run that was stopped can be resumed.
    """


class CallbackError(HoldallError, RuntimeError):
    """Error of a callback. The run has been saved."""


class Callback:
    """Base of callbacks: a class derived from it has the methods that it needs, and its instances go to `train`.

    Several processes: only those of rank 0 are called, and a stop ends all processes after the same step. Rows of the
    log are told when they are written, so while large data files are being checked, some steps late.
    """

    def on_start(self, run: Path, settings: dict[str, Any], step: int) -> None:
        """Before the first step: the run folder, all settings by name with `data`, and the step a resumed run is at."""

    def on_log(self, step: int, values: dict[str, Any]) -> None:
        """After a row of training in `metrics.jsonl`, every `log_every` steps: `loss`, `lr`, `samples_per_second`."""

    def on_evaluation(self, step: int, metrics: dict[str, Any]) -> None:
        """After an evaluation on the validation split: `auc`, `logloss` and others; one that does not exist is NaN."""

    def on_checkpoint(self, step: int, path: Path) -> None:
        """When the checkpoint of a step is complete; it may be removed when `keep` newer ones are."""

    def on_end(self, result: dict[str, Any]) -> None:
        """After the last step, or a stop: the result of `train`."""

    def on_error(self, error: BaseException) -> None:
        """In the place of `on_end`, when an error ends the run, Ctrl-C included. Errors here are printed."""


class Callbacks:
    """The callbacks of a run on this rank. Their errors and stops are kept until the step is complete."""

    def __init__(self, given: Sequence[Callback]):
        for callback in given:
            if not isinstance(callback, Callback):
                raise ConfigError(
                    f"callbacks takes instances of classes derived from holdall.Callback, not {callback!r}"
                )
        self._given = tuple(given)
        self._saved: list[tuple[int, Path]] = []
        """Checkpoints that may be incomplete yet."""
        self._failure: CallbackError | None = None
        self.stop_reason: str | None = None
        """Why the run is to end; None while it goes on."""

    def call(self, event: str, *details: Any, step: int) -> None:
        """Tell all callbacks of an event."""
        for callback in self._given:
            name = type(callback).__name__
            try:
                getattr(callback, event)(*details)
            except StopTraining as stop:
                self.stop_reason = self.stop_reason or str(stop) or f"{name}.{event}"
            except Exception as error:
                self.stop_reason = f"callback {name} failed in {event} at step {step} ({type(error).__name__}: {error})"
                self._failure = CallbackError(
                    f"{self.stop_reason}; the run is saved: mend or leave out the callback, and continue with --resume"
                )
                self._failure.__cause__ = error

    def saved(self, step: int, path: Path) -> None:
        """Tell of a checkpoint as soon as it is complete, at a call of `tell_saved`."""
        if self._given:
            self._saved.append((step, path))

    def tell_saved(self) -> None:
        waiting, self._saved = self._saved, []
        for step, path in waiting:
            if path.exists():
                self.call("on_checkpoint", step, path, step=step)
            else:
                self._saved.append((step, path))

    def end(self, result: Mapping[str, Any]) -> None:
        """Tell of the end of a run."""
        self.call("on_end", dict(result), step=result["steps"])

    def raise_failure(self) -> None:
        """Raise the error of a callback, if there was one."""
        if self._failure is not None:
            raise self._failure

    def fail(self, error: BaseException) -> None:
        """Tell of the error that ends a run."""
        for callback in self._given:
            try:
                callback.on_error(error)
            except Exception as second:
                name = type(callback).__name__
                print(f"note: callback {name} failed in on_error ({type(second).__name__}: {second})", file=sys.stderr)
