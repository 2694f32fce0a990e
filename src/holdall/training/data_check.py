"""Check of the files that a run reads against their hashes, while the first steps are trained."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from holdall.checkpoint.all_ranks import on_all_ranks
from holdall.common.checked_files import FileCheck
from holdall.common.errors import DataError, IdError, NonFiniteLossError
from holdall.data.dataset import DataSet
from holdall.data.folder_files import check_split_files
from holdall.distributed.processes import Processes

BYTES_AT_START = 1 << 29
"""Bytes that are read before training starts, and so before the run folder has anything in it: up to 0.3 s on a core.
A larger data set is read in the background."""


class DataCheck:
    """Check of the training and validation files of `data`, by one process of each host.

    No row of the log is written and no checkpoint saved before `passed` is true. Constructing it is a collective call.
    """

    def __init__(self, data: DataSet, processes: Processes):
        self._processes = processes
        self._passed = False
        self._check: FileCheck | None = None
        on_all_ranks(processes, lambda: self._start(data))

    def _start(self, data: DataSet) -> None:
        if self._processes.world_size > 1 and int(os.environ.get("LOCAL_RANK", "0")) != 0:
            return
        splits = [split for name, split in data.schema.splits.items() if name in ("train", "valid")]
        self._check = check_split_files(data.folder, [file for split in splits for file in split.files])
        if self._check.num_bytes <= BYTES_AT_START:
            self._check.result()

    def passed(self, *, wait: bool = False) -> bool:
        """Whether all hosts have found their files unchanged; raises if one has not. A collective call until it is."""
        if not self._passed:
            own = on_all_ranks(self._processes, lambda: self._own_passed(wait))
            self._passed = all(self._processes.gather(own))
        return self._passed

    def _own_passed(self, wait: bool) -> bool:
        if self._check is None:
            return True
        if not wait and not self._check.done:
            return False
        self._check.result()
        return True

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Raise an error that wrong data can cause as the damage of a file, if there is one; end the check."""
        try:
            yield
        except (NonFiniteLossError, IdError) as error:
            try:
                self._own_passed(wait=True)
            except DataError as damage:
                raise damage from error
            raise
        finally:
            if self._check is not None:
                self._check.cancel()
