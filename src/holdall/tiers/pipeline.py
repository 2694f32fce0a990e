"""Steps whose rows are fetched ahead: read a batch, find its rows, fetch them; compute; send them back.

Fetching runs up to K steps before the step that computes, and sending back runs after it, each on a thread of its own
and, on a GPU, on a stream of its own. Step t is fetched when step t - K is about to compute; those before are done.

`exact`: a row that one of the K steps before needs too is not fetched, since the host's copy may be old: it is copied
from that step's room when step t computes. For earlier steps it waits until they are home. So every step reads what
the one before it wrote, and the result equals K = 0 bit for bit. There are 2K + 1 rooms: those of the K steps ahead, of
the one that computes, and of the K before it, from which the steps ahead may still have to copy.

`stale`: rows are fetched as the host has them, which may miss the updates of up to K steps; what a step changes is
added to the host's rows, so no update is lost, but the result depends on timing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal

import torch
from torch import Tensor

from holdall.batch import Batch
from holdall.errors import ConfigError, HoldallError, TierError
from holdall.tiers.place import Tiers
from holdall.tiers.tiered_pack import Forward, WorkingSet

Consistency = Literal["exact", "stale"]


@dataclass
class Step:
    """A batch on its way through the stages."""

    number: int
    batch: Batch
    moved: Batch | None = None
    sets: list[WorkingSet] = field(default_factory=list)
    """One a pack."""
    fits: bool = True
    """Whether its rows fit their rooms; if not, they are fetched when nothing else moves."""
    in_room: Any = None
    """CUDA event after which its rows are in their room."""
    found: Future[None] | None = None
    fetched: Future[None] | None = None
    returned: Future[None] | None = None


class Pipeline:
    """The stages around a training step; see the module's text.

    `refresh_every`: after so many steps rows may change places (`Tiers.refresh`), so nothing is fetched across that.
    `stage(name)` is entered around the stages `find`, `fetch` and `send_back`, on the threads that run them.
    """

    def __init__(
        self,
        tiers: Tiers,
        depth: int = 0,
        consistency: Consistency = "exact",
        *,
        refresh_every: int | None = None,
        stage: Callable[[str], AbstractContextManager[Any]] = nullcontext,
    ):
        num_rooms = min((pack.num_rooms for pack in tiers.packs), default=rooms_for(depth))
        if depth < 0 or rooms_for(depth) > num_rooms:
            raise ConfigError(f"a pipeline over {num_rooms} rooms cannot fetch {depth} steps ahead")
        self.tiers, self.depth, self.consistency, self.refresh_every = tiers, depth, consistency, refresh_every
        self._stage = stage
        self.device = tiers.device
        self._fetcher = ThreadPoolExecutor(max_workers=1, thread_name_prefix="holdall-fetch")
        self._returner = ThreadPoolExecutor(max_workers=1, thread_name_prefix="holdall-return")
        on_gpu = self.device.type == "cuda"
        self._fetch_stream = torch.cuda.Stream(self.device) if on_gpu else None
        self._return_stream = torch.cuda.Stream(self.device) if on_gpu else None
        self._recent: deque[Step] = deque(maxlen=depth + 1)
        """The steps started last, the newest at the end."""
        self._current: Step | None = None
        self._last_return: Future[None] | None = None
        """Sends back the rows of the newest step that is done; those of the others went before."""
        self._broken = False
        """Whether rows could not be taken home, and that was said."""
        for pack in tiers.packs:
            pack.settle = self.settle

    def steps(
        self, batches: Iterator[Batch], check: Callable[[Batch], None], *, first: int = 0
    ) -> Generator[tuple[Batch, Batch], None, None]:
        """`(batch, the same on the device)`, with its rows at hand; call `finish_step` when each is computed.

        `check` sees every batch before anything is done with it; what it raises comes at that batch's turn. `first` is
        the number of the first step. Close the iterator if it is not exhausted.
        """
        waiting: deque[Step] = deque()
        number = first
        try:
            while True:
                room = self.depth + 1 - len(waiting)
                for batch in islice(batches, min(room, self._steps_to_refresh(number, len(waiting)))):
                    waiting.append(self._start(number, batch, check))
                    number += 1
                if not waiting:
                    return
                yield self._enter(waiting.popleft())
        finally:
            if not self._broken:
                self.settle()
            self._recent.clear()  # what was fetched for nothing is forgotten, the rest is home

    def _steps_to_refresh(self, number: int, num_waiting: int) -> int:
        """How many steps may start before rows change places; one that has to wait starts when none does."""
        if self.refresh_every is None or num_waiting == 0:
            return self.depth + 1 if self.refresh_every is None else self.refresh_every - number % self.refresh_every
        return -number % self.refresh_every

    def refresh(self) -> int:
        """Let rows change places between two steps, as announced by `refresh_every`; how many hotter ones came in."""
        self.settle()
        self._recent.clear()  # the places in their working sets hold other rows now
        return self.tiers.refresh()

    def close(self) -> None:
        """Wait until nothing moves, and end the threads."""
        self.settle()
        self._fetcher.shutdown()
        self._returner.shutdown()

    # --- before the step ---------------------------------------------------------------------------------------------

    def _start(self, number: int, batch: Batch, check: Callable[[Batch], None]) -> Step:
        step = Step(number, batch)
        before = list(self._recent)
        self._recent.append(step)
        step.found = self._fetcher.submit(self._find, step, before, check)
        step.fetched = self._fetcher.submit(self._fetch, step, before)
        return step

    def _find(self, step: Step, before: list[Step], check: Callable[[Batch], None]) -> None:
        """Find the rows of a step, and which of them the steps `before` it hold."""
        with self._stage("find"), _named(step, "finding"), _on(self._fetch_stream):
            check(step.batch)
            step.moved = step.batch
            if self._fetch_stream is not None:
                step.moved = step.batch.pinned().to(self.device, non_blocking=True)
            for number, pack in enumerate(self.tiers.packs):
                working = pack.needed(step.moved.ids, self.tiers.bags.features)
                working.room = step.number % rooms_for(self.depth)
                if self.consistency == "exact" and self.depth:
                    working.forwarded = forwards(
                        working, [other.sets[number] for other in before[: -self.depth - 1 : -1]]
                    )
                step.sets.append(working)
                step.fits = step.fits and working.rows.numel() <= pack.room_rows

    def _fetch(self, step: Step, before: list[Step]) -> None:
        assert step.found is not None
        step.found.result()
        if len(before) > self.depth and before[0].returned is not None:
            before[0].returned.result()  # and with it all steps before it are home
        with self._stage("fetch"), _named(step, "fetching"), _on(self._fetch_stream):
            if step.fits:
                self._bring(step)
            if self._fetch_stream is not None:
                step.in_room = self._fetch_stream.record_event()

    def _bring(self, step: Step) -> None:
        for pack, working in zip(self.tiers.packs, step.sets, strict=True):
            pack.bring(working, keep=self.consistency == "stale" and self.depth > 0)

    def _enter(self, step: Step) -> tuple[Batch, Batch]:
        """Hand a step over to computing. Where nothing runs ahead, its rows may still be on their way."""
        assert step.found is not None
        step.found.result()
        assert step.moved is not None
        if not step.fits:
            self._bring_when_still(step)
        for pack, working in zip(self.tiers.packs, step.sets, strict=True):
            pack.working = working
            pack.awaited = lambda: self._arrive(step)
            if self.depth > 0 or step.in_room is not None:
                pack.arrived()
        self._current = step
        return step.batch, step.moved

    def _arrive(self, step: Step) -> None:
        """Wait for the rows of a step and take over those that other rooms hold."""
        assert step.fetched is not None
        step.fetched.result()
        if step.in_room is not None:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(step.in_room)
            for tensor in _tensors(step):
                tensor.record_stream(stream)
        for pack, working in zip(self.tiers.packs, step.sets, strict=True):
            pack.take_forwarded(working)
            working.forwarded = []

    def _bring_when_still(self, step: Step) -> None:
        """Give a step the larger rooms it needs. All steps before it are home then, so it fetches all of its rows."""
        self.settle()
        for pack, working in zip(self.tiers.packs, step.sets, strict=True):
            pack.make_room(working.rows.numel())
            working.forwarded = []
        self._bring(step)

    # --- after the step ----------------------------------------------------------------------------------------------

    def finish_step(self) -> None:
        """After the update: send the rows of the step back. Where steps run ahead, what goes wrong is raised later, by
        `settle` or the step that needs the room, under the name of this one."""
        step, self._current = self._current, None
        assert step is not None, "no step is under way"
        for pack in self.tiers.packs:
            pack.arrived()
            pack.working = None
        computed = None
        if self._return_stream is not None:
            computed = torch.cuda.current_stream(self.device).record_event()
        step.returned = self._last_return = self._returner.submit(self._return, step, computed, self._last_return)
        if self.depth == 0:
            self._wait_for_returns()

    def _return(self, step: Step, computed: Any, before: Future[None] | None) -> None:
        if before is not None:
            before.result()  # after rows that were lost nothing is home, whatever else succeeds
        with self._stage("send_back"), _named(step, "sending back"), _on(self._return_stream):
            if self._return_stream is not None:
                self._return_stream.wait_event(computed)
            for pack, working in zip(self.tiers.packs, step.sets, strict=True):
                pack.take_home(working)

    def settle(self) -> None:
        """Wait until nothing moves: the rows of all steps that are done are home, those of the next are fetched."""
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


def rooms_for(depth: int) -> int:
    """Rooms that a pipeline needs to fetch `depth` steps ahead."""
    return 2 * depth + 1


def forwards(working: WorkingSet, newest_first: list[WorkingSet]) -> list[Forward]:
    """Which rows of a working set other ones hold, each from the newest that does."""
    places = torch.arange(working.rows.numel(), device=working.rows.device)
    found = []
    for other in newest_first:
        if other.rows.numel() == 0 or places.numel() == 0:
            continue
        rows = working.rows[places]
        there = torch.searchsorted(other.rows, rows).clamp_(max=other.rows.numel() - 1)
        same = other.rows[there] == rows
        if bool(same.any()):
            found.append(Forward(other, there[same], places[same]))
            places = places[~same]
    return found


@contextmanager
def _named(step: Step, stage: str) -> Iterator[None]:
    """Name the step and stage that went wrong."""
    try:
        yield
    except HoldallError:
        raise
    except Exception as error:
        raise TierError(f"{stage} the rows of step {step.number} failed: {error}") from error


def _on(stream: Any) -> Any:
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def _tensors(step: Step) -> Iterator[Tensor]:
    """Everything the fetching stream made and the computing one reads."""
    assert step.moved is not None
    yield from step.moved.tensors()
    for working in step.sets:
        yield working.rows
        if working.located is not None:
            yield working.located
        for forward in working.forwarded:
            yield from (forward.places, forward.source_places)
