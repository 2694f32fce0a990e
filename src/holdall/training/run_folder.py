"""Run folder: locked by rank 0 from before it is touched to the end of the run, and replaced without loss.

With `--overwrite` the old run is renamed to `<out>.replaced` once the inputs have been checked. If the start of the new
run fails, the old one gets its name back. It is removed when the new run has its first complete checkpoint; a new run
that ends before that leaves both, and the next start knows them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from holdall import checkpoint
from holdall.common.errors import CheckpointError, HoldallError
from holdall.common.folder_lock import RESTART_SECONDS, locked
from holdall.common.output_folder import (
    Output,
    is_blank,
    mark_of,
    refuse_broken_link,
    refuse_place,
    write_mark,
)
from holdall.distributed.processes import Processes, RankLog
from holdall.distributed.shared_folder import check_shared
from holdall.training.evaluate_run import CHECKPOINTS
from holdall.training.tracking import RUN, RUN_FILE

RANK_LOGS = "rank-*.log"


@contextmanager
def make_run_folder(
    out: Path,
    processes: Processes,
    *,
    resume: bool,
    overwrite: bool,
    inputs: Sequence[Path] = (),
    check_inputs: Callable[[], object] = lambda: None,
) -> Iterator[RankLog | None]:
    """Lock and make the run folder, on rank 0, and check on all ranks that they share it.

    A folder that is not free, or locked by another process, is refused and not touched. `check_inputs` is called before
    an old run is set aside; it raises if the new one cannot be trained. Each of several ranks logs to `rank-N.log`
    there, also the error that ends the block.
    """
    folder = RunFolder(out, overwrite=overwrite)
    timeout = RESTART_SECONDS if processes.world_size > 1 else 0.0
    with ExitStack() as stack:
        processes.on_rank_zero(lambda: stack.enter_context(folder.claimed(resume, inputs, check_inputs, timeout)))
        if processes.world_size == 1:
            yield None
            return
        check_shared(out, processes)
        log = RankLog(out, processes.rank)
        with log.errors():
            log.write(f"rank {processes.rank} of {processes.world_size}, process {os.getpid()}, on {processes.device}")
            yield log


class RunFolder(Output):
    """Output path of a run."""

    def __init__(self, out: Path, *, overwrite: bool = False):
        super().__init__(out, RUN, overwrite=overwrite)

    @contextmanager
    def claimed(
        self, resume: bool, inputs: Sequence[Path], check_inputs: Callable[[], object], timeout: float
    ) -> Iterator[None]:
        """Lock the folder and make it, or keep that of the run to resume; an error of the start undoes it."""
        refuse_broken_link(self.path)
        if not resume:
            refuse_place(self.path, inputs)
        with locked(self.path, timeout):
            self.recover()
            is_free = not self.target.exists() or self.is_unstarted()
            if not is_free and resume:
                self._refuse_other_folder()
            elif not is_free:
                self.refuse_existing()
                check_inputs()
            try:
                if not is_free and not resume:
                    self._replace()
                if not self.has_started():
                    self.target.mkdir(exist_ok=True)
                    write_mark(self.target, "started", of=self.target.name)
                yield
            except BaseException:
                self._undo_start()
                raise

    def has_started(self) -> bool:
        return os.path.lexists(self.target / RUN_FILE)

    def is_complete(self) -> bool:
        """Whether the run has a complete checkpoint."""
        return checkpoint.latest(self.target / CHECKPOINTS) is not None

    def is_unstarted(self) -> bool:
        """Whether the folder has only what a start that failed or was killed has left."""
        mark = mark_of(self.target, self.target.name)
        if mark == "removed":
            return True
        if mark is None:
            found = list(self.target.iterdir()) if self.target.is_dir() else []
            return bool(found) and all(path.match(RANK_LOGS) for path in found)
        return mark == "started" and not self.has_started() and not self.is_complete()

    def remove_unstarted(self) -> None:
        replaces = mark_of(self.replaced, self.target.name) == "replaced"
        if replaces or mark_of(self.target, self.target.name) is not None:
            self.remove(self.target, keep=None if replaces else RANK_LOGS)

    def remove_replaced(self) -> None:
        """Remove the run that this one replaces, if there is one and this one has a complete checkpoint."""
        if mark_of(self.replaced, self.target.name) is not None and self.is_complete():
            self.remove(self.replaced)

    def _refuse_other_folder(self) -> None:
        """Raise unless the folder is a run, or one that is yet to start."""
        if self.has_started() or (self.target.is_dir() and is_blank(self.target)):
            return
        if self.target.is_dir() and (self.target / CHECKPOINTS).exists():
            raise CheckpointError(
                f"{self.path} has checkpoints but no {RUN_FILE}, so it cannot be resumed: put its {RUN_FILE} back, or "
                f"choose another folder"
            )
        raise HoldallError(f"{self.path} is not a run folder (it has no {RUN_FILE}): choose another folder")

    def _replace(self) -> None:
        """Set the old run aside; one that has no checkpoint yet, and replaces an older one itself, is removed."""
        if self.replaced.exists():
            self.remove(self.target)
        else:
            self.set_aside()

    def _undo_start(self) -> None:
        """After an error: remove a run that did not start, and give the one it would replace its name back."""
        if not self.has_started():
            if self.target.exists():
                self.remove_unstarted()
            if mark_of(self.replaced, self.target.name) == "replaced" and not self.target.exists():
                self.restore()
        elif self.replaced.exists() and not self.is_complete():
            print(
                f"note: {self.path} has no checkpoint, so the run that it replaces is kept in {self.replaced}",
                file=sys.stderr,
            )
