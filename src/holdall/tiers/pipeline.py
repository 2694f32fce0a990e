"""Steps whose rows are fetched ahead: read a batch, find its rows, fetch them; compute; send them back.

Fetching runs up to K steps before the step that computes, and sending back runs after it, each on a thread of its own
and, on a GPU, on a stream of its own; where kernels move the rows, on streams alone. Step t is fetched when step t - K
is about to compute; those before are done.

A row that one of the K steps before needs too is not fetched, since the host's copy may be old: it is copied from that
step's room when step t computes. For earlier steps it waits until they are home. So every step reads what the one
before it wrote, and the result equals K = 0 bit for bit. There are 2K + 1 rooms: those of the K steps ahead, of the one
that computes, and of the K before it, from which the steps ahead may still have to copy.
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
from holdall.common.worker_thread import (
    MAX_INTRAOP_THREADS,
    PREFETCH_BATCHES,
    InlineExecutor,
    WorkerThread,
    prefetch_map,
)
from holdall.data.batch import Batch
from holdall.runtime.device_times import DeviceTimes
from holdall.runtime.packed_batch import PackedBatch, checked_and_pinned
from holdall.tiers.placement import Tiers
from holdall.tiers.staging import buffers_for
from holdall.tiers.working_set import WorkingSet

GPU_PREFETCH = 2
"""Steps that rows are fetched ahead on a GPU where nobody says otherwise: it changes no bit of the result."""


@dataclass
class PipelineStep:
    """A batch on its way through the stages."""

    number: int
    batch: Batch
    before: list[PipelineStep]
    """Those that the pipeline held when it started, the oldest first."""
    ready: Future[PackedBatch] | None = None
    """The batch, checked and where a GPU can copy it from, until it has."""
    moved: Batch | None = None
    sets: list[WorkingSet] = field(default_factory=list)
    """One a pack."""
    in_room: Any = None
    """CUDA event after which its rows are in their room."""
    home: Any = None
    """CUDA event after which they are on the host again."""
    found: Future[None] | None = None
    fetched: Future[None] | None = None
    returned: Future[None] | None = None


class Pipeline:
    """The stages around a training step; see the module's text.

    `refresh_every`: after so many steps rows may change places (`Tiers.refresh`), so nothing is fetched across that.
    `stage(name)` is entered around the stages `find`, `fetch` and `write_back`, on the threads that run them. With
    `graphs`, what a GPU's host launches where kernels move rows is replayed from CUDA graphs.
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
        num_buffers = min((pack.num_buffers for pack in tiers.packs), default=buffers_for(depth))
        if depth < 0 or buffers_for(depth) > num_buffers:
            raise ConfigError(f"a pipeline over {num_buffers} rooms cannot fetch {depth} steps ahead")
        self.tiers, self.depth, self.refresh_every = tiers, depth, refresh_every
        self._stage = stage
        self.device = tiers.device
        on_gpu = self.device.type == "cuda"
        few = MAX_INTRAOP_THREADS if on_gpu else None
        self._reader = WorkerThread("read", few) if on_gpu else None
        """Draws batches, checks them and makes them ready to be copied, on a GPU."""
        # Where kernels move the rows, all stages are launches: threads would only wait for the interpreter's lock. On a
        # CPU they would take its cores: with nothing to do ahead, a step of a small DLRM took 20 ms instead of 14.
        launches_only = on_gpu and all(pack.moves is not None for pack in tiers.packs)
        threads = depth > 0 if not on_gpu else not launches_only
        self._fetcher: Executor = WorkerThread("fetch", few) if threads else InlineExecutor()
        self._returner: Executor = WorkerThread("return", few) if threads else InlineExecutor()
        # What moves rows is small and the steps ahead wait for it: it goes before what computes.
        self._fetch_stream = torch.cuda.Stream(self.device, priority=-1) if on_gpu else None
        self._return_stream = torch.cuda.Stream(self.device, priority=-1) if on_gpu else None
        self.times: DeviceTimes | None = None
        """Where the device's times of the stages are kept, by those who ask for them."""
        self._done: deque[PipelineStep] = deque(maxlen=depth + 2)
        """Steps whose memory streams may still read: the next but K waits for them before it takes any."""
        self._recent: deque[PipelineStep] = deque(maxlen=depth + 1)
        """The steps started last, the newest at the end."""
        self._current: PipelineStep | None = None
        self._last_return: Future[None] | None = None
        """Sends back the rows of the newest step that is done; those of the others went before."""
        self._broken = False
        """Whether rows could not be taken home, and that was said."""
        self._memory: dict[int, torch.Tensor] = {}
        """Where a GPU has the batch of a room."""
        for pack in tiers.packs:
            pack.synchronize = self.synchronize
            if pack.moves is not None:
                pack.moves.beside_steps = depth > 0
                pack.moves.launches.off = not (graphs and on_gpu)

    def steps(
        self, batches: Iterator[Batch], check: Callable[[Batch], None], *, first: int = 0
    ) -> Generator[tuple[Batch, Batch], None, None]:
        """`(batch, the same on the device)`, with its rows at hand; call `finish_step` when each is computed.

        `check` sees every batch before anything is done with it; what it raises comes at that batch's turn. `first` is
        the number of the first step. Close the iterator if it is not exhausted.
        """
        waiting: deque[PipelineStep] = deque()
        number = first
        read = self._read_ahead(batches, check)
        try:
            while True:
                room = self.depth + 1 - len(waiting)
                for batch, ready in islice(read, min(room, self._steps_to_refresh(number, len(waiting)))):
                    waiting.append(self._start(number, batch, ready, check))
                    number += 1
                if not waiting:
                    return
                yield self._enter(waiting.popleft(), waiting, check)
        finally:
            read.close()
            if not self._broken:
                self.synchronize()
            self._recent.clear()  # what was fetched for nothing is forgotten, the rest is home

    def _steps_to_refresh(self, number: int, num_waiting: int) -> int:
        """How many steps may start before rows change places; one that has to wait starts when none does."""
        if self.refresh_every is None or num_waiting == 0:
            return self.depth + 1 if self.refresh_every is None else self.refresh_every - number % self.refresh_every
        return -number % self.refresh_every

    def refresh(self) -> int:
        """Let rows change places between two steps, as announced by `refresh_every`; how many hotter ones came in."""
        self.synchronize()
        self._recent.clear()  # the places in their working sets hold other rows now
        return self.tiers.refresh()

    def close(self) -> None:
        """End the threads after the work they were given; its errors are those that `synchronize` raises."""
        if self._reader is not None:
            self._reader.shutdown()
        self._fetcher.shutdown()
        self._returner.shutdown()

    # --- before the step ---------------------------------------------------------------------------------------------

    def _read_ahead(
        self, batches: Iterator[Batch], check: Callable[[Batch], None]
    ) -> Generator[tuple[Batch, Future[PackedBatch] | None], None, None]:
        """Batches and, on a GPU, the same checked and where it can copy them from, some before their step starts."""
        if self._reader is None:
            yield from ((batch, None) for batch in batches)
            return
        count = PREFETCH_BATCHES if self.depth else 0
        yield from prefetch_map(batches, checked_and_pinned(check), self._reader, count)

    def _start(
        self, number: int, batch: Batch, ready: Future[PackedBatch] | None, check: Callable[[Batch], None]
    ) -> PipelineStep:
        step = PipelineStep(number, batch, list(self._recent), ready)
        self._recent.append(step)
        self._submit(step, check)
        return step

    def _submit(self, step: PipelineStep, check: Callable[[Batch], None]) -> None:
        step.found = self._fetcher.submit(self._find, step, check)
        step.fetched = self._fetcher.submit(self._fetch, step)

    def _find(self, step: PipelineStep, check: Callable[[Batch], None]) -> None:
        """Find the rows of a step, and which of them the steps before it hold."""
        if step.ready is not None:
            with _named(step, "reading"):
                step.ready.result()
        with self._stage("find"), _named(step, "finding"), self._timed("find", self._fetch_stream):
            again = step.moved is not None
            room = step.number % buffers_for(self.depth)
            if step.ready is not None:
                step.moved = self._copied(step.ready.result(), room)
                step.ready = None
            elif not again:
                check(step.batch)
                step.moved = step.batch
            assert step.moved is not None
            near = step.before[: -self.depth - 1 : -1] if self.depth else []
            for number, pack in enumerate(self.tiers.packs):
                working = pack.needed(step.moved.ids, self.tiers.bags.features, room=room, again=again)
                pack.forward(working, [other.sets[number] for other in near])
                step.sets.append(working)

    def _copied(self, batch: PackedBatch, room: int) -> PackedBatch:
        """A batch on the device, where the last one of its room was, with which all are done."""
        size = batch.memory.numel()
        if room not in self._memory or self._memory[room].numel() < size:
            self._memory[room] = torch.empty(size, dtype=torch.uint8, device=self.device)
        return batch.to_memory(self._memory[room], non_blocking=True)

    def _fetch(self, step: PipelineStep) -> None:
        assert step.found is not None
        step.found.result()
        oldest = step.before[0] if len(step.before) > self.depth else None
        if oldest is not None and oldest.returned is not None:
            oldest.returned.result()  # and with it all steps before it are home
            if oldest.home is not None:
                assert self._fetch_stream is not None
                self._fetch_stream.wait_event(oldest.home)
        with self._stage("fetch"), _named(step, "fetching"), self._timed("fetch", self._fetch_stream):
            for pack, working in zip(self.tiers.packs, step.sets, strict=True):
                pack.bring(working)
            if self._fetch_stream is not None:
                step.in_room = self._fetch_stream.record_event()

    def _enter(
        self, step: PipelineStep, waiting: Iterable[PipelineStep], check: Callable[[Batch], None]
    ) -> tuple[Batch, Batch]:
        """Hand a step over to computing, with its rows."""
        assert step.found is not None
        step.found.result()
        self._make_room([step, *waiting], check)
        assert step.moved is not None
        step.before = []  # which have others before them, and so on
        for pack, working in zip(self.tiers.packs, step.sets, strict=True):
            pack.working = working
        self._arrive(step)
        self._current = step
        return step.batch, step.moved

    def _make_room(self, steps: list[PipelineStep], check: Callable[[Batch], None]) -> None:
        """See that the first of these steps, which are yet to be computed, has room for its rows.

        If not, all of them start over in larger rooms: who has a row changed with what was left out.
        """
        (first, *_) = steps
        while any(pack.num_missing(working) for pack, working in zip(self.tiers.packs, first.sets, strict=True)):
            self.synchronize()
            found = [step for step in steps if step.found is not None and step.found.exception() is None]
            for number, pack in enumerate(self.tiers.packs):
                pack.reserve(max(pack.num_missing(step.sets[number]) for step in found))
            for step in found:
                step.sets.clear()
                self._submit(step, check)
            assert first.found is not None
            first.found.result()

    def _arrive(self, step: PipelineStep) -> None:
        """Wait for the rows of a step and take over those that other rooms hold."""
        assert step.fetched is not None
        step.fetched.result()
        if step.in_room is not None:
            torch.cuda.current_stream(self.device).wait_event(step.in_room)
        for pack, working in zip(self.tiers.packs, step.sets, strict=True):
            pack.take_forwarded(working)
            pack.enter(working)
        if self.times is not None and step.in_room is not None:
            self.times.begin("compute", step.number)

    # --- after the step ----------------------------------------------------------------------------------------------

    def finish_step(self) -> None:
        """After the update: send the rows of the step back. Where steps run ahead, what goes wrong is raised later, by
        `synchronize` or the step that needs the room, under the name of this one."""
        step, self._current = self._current, None
        assert step is not None, "no step is under way"
        for pack in self.tiers.packs:
            pack.working = None
        if self.times is not None and step.in_room is not None:
            self.times.end("compute", step.number)
        computed = None
        if self._return_stream is not None:
            computed = torch.cuda.current_stream(self.device).record_event()
        step.returned = self._last_return = self._returner.submit(self._return, step, computed, self._last_return)
        self._done.append(step)
        if self.depth == 0:
            self._wait_for_returns()

    def _return(self, step: PipelineStep, computed: Any, before: Future[None] | None) -> None:
        if before is not None:
            before.result()  # after rows that were lost nothing is home, whatever else succeeds
        with self._stage("write_back"), _named(step, "sending back"):
            if self._return_stream is not None:
                self._return_stream.wait_event(computed)
            with self._timed("write_back", self._return_stream):
                for pack, working in zip(self.tiers.packs, step.sets, strict=True):
                    pack.write_back(working)
            if self._return_stream is not None:
                step.home = self._return_stream.record_event()

    def synchronize(self) -> None:
        """Wait until nothing moves: the rows of all steps that are done are home, those of the next are fetched."""
        if self._reader is not None:
            self._reader.settle()
        for step in self._recent:
            if step.fetched is not None:
                step.fetched.exception()  # what went wrong is that step's to raise
        self._wait_for_returns()
        if self._fetch_stream is not None:
            self._fetch_stream.synchronize()

    def _wait_for_returns(self) -> None:
        if self._last_return is not None:
            self._broken = self._last_return.exception() is not None
            self._last_return.result()
            if self._return_stream is not None:
                self._return_stream.synchronize()

    def _timed(self, stage: str, stream: Any) -> AbstractContextManager[Any]:
        """On the stream of a stage, and measured where `times` are kept."""
        if stream is None:
            return nullcontext()
        return torch.cuda.stream(stream) if self.times is None else self.times.stage(stage, stream)


@contextmanager
def _named(step: PipelineStep, stage: str) -> Iterator[None]:
    """Name the step and stage that went wrong."""
    try:
        yield
    except HoldallError:
        raise
    except Exception as error:
        raise TierError(f"{stage} the rows of step {step.number} failed: {error}") from error
