"""Prefetch pipeline of training steps: find the rows of a step, fetch them, compute, write them back.

    batch t + K:  find -> fetch ->
    batch t:                       forward -> compute ->
    batch t - 1:                                         write back

Fetching runs up to K steps ahead of the step that computes, and writing back runs behind it, each on a thread of its
own and, on a GPU, on a stream of its own; where kernels move the rows, on streams alone. Step t is fetched when step
t - K is about to compute; the steps before that are done.

The result equals K = 0 bit for bit, since every step reads what the one before it wrote. A row that one of the K steps
before step t needs too is not fetched, since the host's copy may be old: that step's staging buffer owns it, and it is
forwarded from there when step t computes. Rows of earlier steps are fetched after those are written back. There are
2K + 1 staging buffers: those of the K steps ahead, of the one that computes, and of the K before it, from which rows
may still be forwarded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Executor, Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch

from holdall.common.errors import ConfigError, HoldallError, TierError
from holdall.common.worker_thread import MAX_INTRAOP_THREADS, InlineExecutor, WorkerThread
from holdall.data.batch import Batch
from holdall.runtime.device_times import DeviceTimes
from holdall.runtime.packed_batch import PackedBatch
from holdall.tiers.device_batches import DeviceBatches
from holdall.tiers.placement import Tiers
from holdall.tiers.staging import buffers_for
from holdall.tiers.working_set import WorkingSet

GPU_PREFETCH = 2
"""Default of the steps that rows are fetched ahead on a GPU; it changes no bit of the result."""


@dataclass
class PipelineStep:
    """A batch in the pipeline, and the state of its stages."""

    number: int
    batch: Batch
    earlier: list[PipelineStep]
    """The steps in the pipeline when this one started, the oldest first."""
    pinned: Future[PackedBatch] | None = None
    """The batch, checked and pinned, until it is copied to a GPU."""
    on_device: Batch | None = None
    sets: list[WorkingSet] = field(default_factory=list)
    """One per pack."""
    found: Future[None] | None = None
    fetched: Future[None] | None = None
    fetch_event: Any = None
    """CUDA event after which its rows are in their staging buffer."""
    written_back: Future[None] | None = None
    write_back_event: Any = None
    """CUDA event after which its rows are on the host."""


class Pipeline:
    """The stages of training steps over tiered packs; see the module's text.

    `refresh_every`: after so many steps hot rows may be exchanged (`Tiers.refresh`), so nothing is fetched across that.
    `stage(name)` is entered around the stages `find`, `fetch` and `write_back`, on the threads that run them. With
    `graphs`, the launches that move rows on a GPU are replayed from CUDA graphs.
    """

    def __init__(
        self,
        tiers: Tiers,
        depth: int = 0,
        *,
        refresh_every: int | None = None,
        graphs: bool = True,
        stage: Callable[[str], AbstractContextManager[Any]] = nullcontext,
    ):
        num_buffers = min((pack.staging.num_buffers for pack in tiers.packs), default=buffers_for(depth))
        if depth < 0 or buffers_for(depth) > num_buffers:
            raise ConfigError(f"a pipeline over {num_buffers} staging buffers cannot fetch {depth} steps ahead")
        self.tiers, self.depth, self.refresh_every = tiers, depth, refresh_every
        self._stage = stage
        self.device = tiers.device
        on_gpu = self.device.type == "cuda"
        self._batches = DeviceBatches(self.device, ahead=depth > 0)
        # Where all stages are launches, threads would only wait for the interpreter's lock. On a CPU they would take
        # its cores: with nothing to do ahead, a step of a small DLRM took 20 ms instead of 14.
        launches_only = on_gpu and all(pack.mover.fixed_addresses for pack in tiers.packs)
        threads = depth > 0 if not on_gpu else not launches_only
        max_threads = MAX_INTRAOP_THREADS if on_gpu else None
        self._fetcher: Executor = WorkerThread("fetch", max_threads) if threads else InlineExecutor()
        self._writer: Executor = WorkerThread("write-back", max_threads) if threads else InlineExecutor()
        # Moving rows is little work that later steps wait for: its streams have priority over computing.
        self._fetch_stream = torch.cuda.Stream(self.device, priority=-1) if on_gpu else None
        self._write_stream = torch.cuda.Stream(self.device, priority=-1) if on_gpu else None
        self.times: DeviceTimes | None = None
        """Set by callers that measure the stages' times on the device."""
        self._recent: deque[PipelineStep] = deque(maxlen=depth + 1)
        """The steps started last, the newest at the end."""
        self._current: PipelineStep | None = None
        self._done: deque[PipelineStep] = deque(maxlen=depth + 2)
        """Steps whose tensors a stream may still read: kept until a later step has waited for their write-back."""
        self._last_write_back: Future[None] | None = None
        """That of the newest step that is done; those of earlier steps ran before."""
        self._write_back_failed = False
        """Whether that was raised."""
        for pack in tiers.packs:
            pack.synchronize = self.synchronize
            pack.mover.configure(beside_steps=depth > 0, graphs=graphs and on_gpu)

    def steps(
        self, batches: Iterator[Batch], check: Callable[[Batch], None], *, first: int = 0
    ) -> Generator[tuple[Batch, Batch], None, None]:
        """`(batch, the same on the device)`, with its rows on the device; call `finish_step` when each is computed.

        `check` gets every batch before anything else does; its errors are raised at that batch's turn. `first` is the
        number of the first step. Close the iterator if it is not exhausted.
        """
        waiting: deque[PipelineStep] = deque()
        number = first
        read = self._batches.read(batches, check)
        try:
            while True:
                num_free = self.depth + 1 - len(waiting)
                for batch, pinned in islice(read, min(num_free, self._steps_to_refresh(number, len(waiting)))):
                    waiting.append(self._start(PipelineStep(number, batch, list(self._recent), pinned), check))
                    number += 1
                if not waiting:
                    return
                yield self._begin_compute(waiting.popleft(), waiting, check)
        finally:
            read.close()
            if not self._write_back_failed:
                self.synchronize()
            self._recent.clear()  # rows fetched for steps that will not compute are dropped, the others written back

    def _steps_to_refresh(self, number: int, num_waiting: int) -> int:
        """How many steps may start before hot rows are exchanged; the step after that starts when none waits."""
        if self.refresh_every is None or num_waiting == 0:
            return self.depth + 1 if self.refresh_every is None else self.refresh_every - number % self.refresh_every
        return -number % self.refresh_every

    # --- find --------------------------------------------------------------------------------------------------------

    def _start(self, step: PipelineStep, check: Callable[[Batch], None]) -> PipelineStep:
        self._recent.append(step)
        self._submit(step, check)
        return step

    def _submit(self, step: PipelineStep, check: Callable[[Batch], None]) -> None:
        step.found = self._fetcher.submit(self._find, step, check)
        step.fetched = self._fetcher.submit(self._fetch, step)

    def _find(self, step: PipelineStep, check: Callable[[Batch], None]) -> None:
        """Find the rows of a step, and which of them the staging buffers of earlier steps own."""
        if step.pinned is not None:
            with _named(step, "reading"):
                step.pinned.result()
        with self._stage("find"), _named(step, "finding"), self._timed("find", self._fetch_stream):
            again = step.on_device is not None
            buffer = step.number % buffers_for(self.depth)
            if step.pinned is not None:
                step.on_device = self._batches.copy(step.pinned.result(), buffer)
                step.pinned = None
            elif not again:
                check(step.batch)
                step.on_device = step.batch
            assert step.on_device is not None
            newest_first = step.earlier[: -self.depth - 1 : -1] if self.depth else []
            for number, pack in enumerate(self.tiers.packs):
                working = pack.find(step.on_device.ids, self.tiers.bags.features, buffer=buffer, again=again)
                pack.mover.find_owners(working, [other.sets[number] for other in newest_first])
                step.sets.append(working)

    # --- fetch -------------------------------------------------------------------------------------------------------

    def _fetch(self, step: PipelineStep) -> None:
        """Fetch the rows that no earlier step owns, after the steps that could own them are written back."""
        assert step.found is not None
        step.found.result()
        oldest = step.earlier[0] if len(step.earlier) > self.depth else None
        if oldest is not None and oldest.written_back is not None:
            oldest.written_back.result()  # and with it all steps before it
            if oldest.write_back_event is not None:
                assert self._fetch_stream is not None
                self._fetch_stream.wait_event(oldest.write_back_event)
        with self._stage("fetch"), _named(step, "fetching"), self._timed("fetch", self._fetch_stream):
            for pack, working in zip(self.tiers.packs, step.sets, strict=True):
                pack.mover.fetch(working)
            if self._fetch_stream is not None:
                step.fetch_event = self._fetch_stream.record_event()

    # --- compute -----------------------------------------------------------------------------------------------------

    def _begin_compute(
        self, step: PipelineStep, waiting: Iterable[PipelineStep], check: Callable[[Batch], None]
    ) -> tuple[Batch, Batch]:
        """Wait for the rows of a step, and forward those that earlier steps own; the caller computes it then."""
        assert step.found is not None
        step.found.result()
        self._grow_buffers([step, *waiting], check)
        assert step.on_device is not None
        step.earlier = []  # which refer to steps before them, and so on
        assert step.fetched is not None
        step.fetched.result()
        if step.fetch_event is not None:
            torch.cuda.current_stream(self.device).wait_event(step.fetch_event)
        for pack, working in zip(self.tiers.packs, step.sets, strict=True):
            pack.mover.forward(working)
            pack.begin_step(working)
        if self.times is not None and step.fetch_event is not None:
            self.times.begin("compute", step.number)
        self._current = step
        return step.batch, step.on_device

    def _grow_buffers(self, steps: list[PipelineStep], check: Callable[[Batch], None]) -> None:
        """Make the rows of the first of these steps, none of which has computed, fit its staging buffers.

        If they do not, all of these steps start over with larger buffers, since the owners of rows changed with the
        rows that were left out.
        """
        (first, *_) = steps
        while any(pack.mover.required_rows(rows) for pack, rows in zip(self.tiers.packs, first.sets, strict=True)):
            self.synchronize()
            found = [step for step in steps if step.found is not None and step.found.exception() is None]
            for number, pack in enumerate(self.tiers.packs):
                pack.reserve(max(pack.mover.required_rows(step.sets[number]) for step in found))
            for step in found:
                step.sets.clear()
                self._submit(step, check)
            assert first.found is not None
            first.found.result()

    # --- write back --------------------------------------------------------------------------------------------------

    def finish_step(self) -> None:
        """Write the rows of the current step back, after its update.

        Where steps run ahead, an error names this step and is raised later: by `synchronize`, or by the step that
        needs the staging buffer.
        """
        step, self._current = self._current, None
        assert step is not None, "no step is under way"
        for pack in self.tiers.packs:
            pack.end_step()
        if self.times is not None and step.fetch_event is not None:
            self.times.end("compute", step.number)
        computed = None
        if self._write_stream is not None:
            computed = torch.cuda.current_stream(self.device).record_event()
        previous = self._last_write_back
        step.written_back = self._last_write_back = self._writer.submit(self._write_back, step, computed, previous)
        self._done.append(step)
        if self.depth == 0:
            self._wait_for_write_backs()

    def _write_back(self, step: PipelineStep, computed: Any, previous: Future[None] | None) -> None:
        if previous is not None:
            previous.result()  # once rows are lost, no later step counts as written back
        with self._stage("write_back"), _named(step, "writing back"):
            if self._write_stream is not None:
                self._write_stream.wait_event(computed)
            with self._timed("write_back", self._write_stream):
                for pack, working in zip(self.tiers.packs, step.sets, strict=True):
                    pack.mover.write_back(working)
            if self._write_stream is not None:
                step.write_back_event = self._write_stream.record_event()

    # --- between steps -----------------------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Wait until nothing moves: all steps that are done are written back, those that wait are fetched."""
        self._batches.synchronize()
        for step in self._recent:
            if step.fetched is not None:
                step.fetched.exception()  # raised at that step's turn
        self._wait_for_write_backs()
        if self._fetch_stream is not None:
            self._fetch_stream.synchronize()

    def _wait_for_write_backs(self) -> None:
        if self._last_write_back is not None:
            self._write_back_failed = self._last_write_back.exception() is not None
            self._last_write_back.result()
            if self._write_stream is not None:
                self._write_stream.synchronize()

    def refresh(self) -> int:
        """Exchange hot rows between two steps, at the step that `refresh_every` announced; how many became hot."""
        self.synchronize()
        self._recent.clear()  # the rows of their working sets are other ones now
        return self.tiers.refresh()

    def close(self) -> None:
        """End the threads after their tasks; errors of those were for `synchronize` to raise."""
        self._batches.close()
        self._fetcher.shutdown()
        self._writer.shutdown()

    def _timed(self, stage: str, stream: Any) -> AbstractContextManager[Any]:
        """The stream of a stage as the current one, measured if `times` are."""
        if stream is None:
            return nullcontext()
        return torch.cuda.stream(stream) if self.times is None else self.times.stage(stage, stream)


@contextmanager
def _named(step: PipelineStep, stage: str) -> Iterator[None]:
    """Name the step and stage of an error."""
    try:
        yield
    except HoldallError:
        raise
    except Exception as error:
        raise TierError(f"{stage} the rows of step {step.number} failed: {error}") from error
