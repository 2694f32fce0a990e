"""Hot batches (FAE, arXiv:2103.00686): inputs whose lookups are all hot go into batches of their own.

A hot batch touches the hot rows only, which are on the device: nothing moves between host and device for it. Hot and
cold batches alternate in phases, and how long a phase is follows the loss: training on one kind for long can hurt.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from holdall.batch import Batch
from holdall.data.dataset import DataSet
from holdall.data.loader import Position, prefetched
from holdall.errors import CheckpointError, ConfigError

Kind = Literal["cold", "hot"]

FIRST_RATE = 1 / 64
"""Finer than the paper's 1/2: switching moves nothing here. Validation logloss, Criteo sample, 3 seeds, the rate held:
0.4794 with 1/64, 0.4799 with 1/32 and 0.4804 without hot batches; test AUC 0.7626, 0.7624 and 0.7632."""
LOWEST_RATE = 1 / 128
CYCLES = 8
"""How often an epoch asks for the loss, whatever the rate: an evaluation costs more than a switch."""
FALLS_TO_DOUBLE = 4
"""Evaluations with a falling loss after which phases get twice as long, as in the paper."""


@dataclass
class Interleaving:
    """How large a share of its batches each kind gets in turn: the paper's R(100 * rate).

    A loss that rises halves the rate, so that the kinds mix more finely; `FALLS_TO_DOUBLE` falling ones in a row
    double it, which switches less often.
    """

    rate: float = FIRST_RATE
    falls: int = 0
    last_loss: float | None = None
    coarsest: float = FIRST_RATE
    """The paper lets phases grow to whole epochs, to switch less; here switching costs nothing."""

    def after(self, loss: float) -> None:
        """Take note of the loss after a cold and a hot phase."""
        if self.last_loss is not None and loss > self.last_loss:
            self.rate, self.falls = max(self.rate / 2, LOWEST_RATE), 0
        elif self.last_loss is not None:
            self.falls += 1
            if self.falls == FALLS_TO_DOUBLE:
                self.rate, self.falls = min(self.rate * 2, self.coarsest), 0
        self.last_loss = loss

    def phase(self, num_batches: int) -> int:
        """Batches a phase of a kind that has `num_batches` an epoch."""
        return max(1, round(self.rate * num_batches))


@dataclass(frozen=True)
class Segment:
    """Batches of one kind, one after the other."""

    kind: Literal["cold", "hot", "mixed"]
    batches: Iterator[Batch]
    num_batches: int
    ends_cycle: bool
    """Whether each kind has had its turn: the moment to say how the loss is (`Interleaving.after`)."""


@dataclass
class _Epoch:
    """The phases of the epoch under way: kinds and numbers of batches, in order."""

    number: int = 0
    phases: list[tuple[Kind, int]] = field(default_factory=list)

    def given(self, kind: Kind) -> int:
        return sum(size for of, size in self.phases if of == kind)


class HotBatches:
    """The batches of a split, hot and cold apart; every sample comes exactly once an epoch.

    The samples of each kind, in file order and taken as a ring from a starting point that the epoch draws, are cut
    into blocks of `batch_size` that come in an order the epoch draws: what `Loader` does with `blocks`, for two lists.
    Batches are copied, since the samples of a kind do not lie side by side.
    """

    def __init__(
        self, data: DataSet, is_hot: npt.NDArray[np.bool_], batch_size: int, *, seed: int = 0, prefetch: int = 2
    ):
        if len(is_hot) != len(data):
            raise ConfigError(f"{len(is_hot)} inputs were told hot from cold, but the split has {len(data)}")
        if batch_size < 1:
            raise ConfigError(f"the batch size is {batch_size}: it must be at least 1")
        self.data, self.batch_size, self.seed, self.prefetch = data, batch_size, seed, prefetch
        self.samples: dict[Kind, npt.NDArray[np.int64]] = {
            "cold": np.flatnonzero(~is_hot),
            "hot": np.flatnonzero(is_hot),
        }
        self.interleaving = Interleaving()
        self._epoch = _Epoch()

    def num_batches_of(self, kind: Kind) -> int:
        return -(-len(self.samples[kind]) // self.batch_size)

    @property
    def num_batches(self) -> int:
        """Batches an epoch."""
        return self.num_batches_of("cold") + self.num_batches_of("hot")

    @property
    def hot_share(self) -> float:
        """Share of the inputs that are hot."""
        return len(self.samples["hot"]) / max(1, len(self.data))

    def segments(self, epoch: int, start_batch: int = 0) -> Iterator[Segment]:
        """The phases of an epoch from batch `start_batch` on. Each is decided on when it is asked for."""
        if epoch != self._epoch.number or start_batch == 0:
            self._epoch = _Epoch(epoch)
        first = 0
        for place, (_, size) in enumerate(list(self._epoch.phases)):  # resuming: what was decided stays
            if start_batch < first + size:
                yield self._segment(place, max(0, start_batch - first))
            first += size
        while (kind := self._next_kind()) is not None:
            left = self.num_batches_of(kind) - self._epoch.given(kind)
            self._epoch.phases.append((kind, min(self.interleaving.phase(self.num_batches_of(kind)), left)))
            yield self._segment(len(self._epoch.phases) - 1, 0)

    def _next_kind(self) -> Kind | None:
        """The kind whose turn it is, cold ones first; None at the end of the epoch."""
        last = self._epoch.phases[-1][0] if self._epoch.phases else "hot"
        turns: tuple[Kind, Kind] = ("cold", "hot") if last == "hot" else ("hot", "cold")
        for kind in turns:
            if self._epoch.given(kind) < self.num_batches_of(kind):
                return kind
        return None

    def _segment(self, place: int, skipped: int) -> Segment:
        """A phase of this epoch without its first batches."""
        kind, size = self._epoch.phases[place]
        before = sum(length for of, length in self._epoch.phases[:place] if of == kind)
        epoch, start, stop = self._epoch.number, before + skipped, before + size
        batches = prefetched(lambda: self._batches(kind, epoch, start, stop), self.prefetch)
        return Segment(kind, batches, stop - start, ends_cycle=self._ends_cycle(place))

    def _ends_cycle(self, place: int) -> bool:
        """Whether the loss is asked for after a phase: after the first one in each eighth of the epoch that leaves both
        kinds with their turn taken, or one kind alone."""
        given = last = 0
        so_far: dict[str, int] = {"cold": 0, "hot": 0}
        for kind, size in self._epoch.phases[: place + 1]:
            given, so_far[kind] = given + size, so_far[kind] + size
            other: Kind = "hot" if kind == "cold" else "cold"
            both_had_theirs = kind == "hot" or so_far[other] >= self.num_batches_of(other)
            asked = both_had_theirs and given * CYCLES // self.num_batches > last
            last = given * CYCLES // self.num_batches if asked else last
        return asked

    def _batches(self, kind: Kind, epoch: int, start: int, stop: int) -> Iterator[Batch]:
        samples = self.samples[kind]
        rng = np.random.default_rng([self.seed, epoch, kind == "hot"])
        samples = np.roll(samples, -int(rng.integers(len(samples))))
        blocks = np.arange(self.num_batches_of(kind))
        rng.shuffle(blocks[: len(samples) // self.batch_size])  # the short block, if there is one, stays last
        for block in blocks[start:stop].tolist():
            yield self.data.take(samples[block * self.batch_size : (block + 1) * self.batch_size])

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def state(self, epoch: int, num_given: int) -> dict[str, Any]:
        """What a checkpoint keeps (as JSON) to go on after `num_given` batches of an epoch."""
        phases = self._epoch.phases if epoch == self._epoch.number else []
        return {
            "epoch": epoch,
            "batch": num_given,
            "phases": [list(phase) for phase in phases],
            "rate": self.interleaving.rate,
            "falls": self.interleaving.falls,
            "last_loss": self.interleaving.last_loss,
            **self._order(),
        }

    def load_state(self, state: dict[str, Any]) -> Position:
        """Where to go on: `segments(position.epoch, position.batch)`."""
        for name, value in self._order().items():
            if state.get(name) != value:
                raise CheckpointError(
                    f"the checkpoint was made with {name} {state.get(name)!r} and this run has {value!r}, so it cannot "
                    f"go on at the same sample: use the same settings and data, or start a new run"
                )
        self._epoch = _Epoch(state["epoch"], [(kind, size) for kind, size in state["phases"]])
        self.interleaving = Interleaving(state["rate"], state["falls"], state["last_loss"])
        return Position(epoch=state["epoch"], batch=state["batch"], sample=state["batch"] * self.batch_size)

    def _order(self) -> dict[str, Any]:
        return {
            "rows": len(self.data),
            "hot_inputs": len(self.samples["hot"]),
            "batch_size": self.batch_size,
            "seed": self.seed,
        }
