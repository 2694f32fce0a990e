"""Prefetch pipeline: bit-equal to fetching nothing ahead, at any depth and timing, and after failures."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from holdall.common.errors import ConfigError, TierError
from holdall.data.batch import Batch
from holdall.kernels.host_rows import BUFFER_SHIFT, find_in_buffers
from holdall.optim.config import OptimizerConfig
from holdall.optim.optimizer_kinds import NAMES
from holdall.optim.optimizers import Optimizers
from holdall.tiers.pipeline import Pipeline
from holdall.tiers.placement import Tiers, place
from holdall.tiers.staging import buffers_for
from tests.tiers.small import HOT, ROWS, batches, build, plain, same, state, step


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


class Run:
    """A placed model and its pipeline; `disturb` delays every stage at random."""

    def __init__(
        self, depth: int, optimizer: str = "sgd", *, hot: dict[str, int] = HOT, bags: bool = False, **options: Any
    ):
        refresh = options.get("refresh_every")
        self.model = build("bag" if bags else "categorical")
        self.tiers = place(self.model, hot, "cpu", num_buffers=buffers_for(depth), refreshes=refresh is not None)
        self.pipeline = Pipeline(self.tiers, depth, **options)
        self.optimizers = Optimizers(self.model, OptimizerConfig(name=optimizer, lr=0.1))  # type: ignore[arg-type]
        self.num_done = 0

    def disturb(self, seed: int) -> None:
        dice = random.Random(seed)
        for pack in self.tiers.packs:
            for owner, name in ((pack, "find"), (pack.mover, "fetch"), (pack.mover, "write_back")):
                setattr(owner, name, delayed(getattr(owner, name), dice))

    def train(self, source: Iterator[Batch], check: Callable[[Batch], None] = lambda batch: None) -> None:
        for batch, moved in self.pipeline.steps(source, check, first=self.num_done):
            step(self.model, self.optimizers, moved)
            assert batch is moved
            self.pipeline.finish_step()
            self.num_done += 1
            if self.pipeline.refresh_every is not None and self.num_done % self.pipeline.refresh_every == 0:
                self.pipeline.refresh()

    def state(self) -> dict[str, Tensor]:
        self.tiers.flush()
        with self.tiers.in_order_of_ids():
            return state(self.model, self.optimizers)


def delayed(function: Callable[..., Any], dice: random.Random) -> Callable[..., Any]:
    def slower(*arguments: Any, **options: Any) -> Any:
        time.sleep(dice.choice([0, 0, 0.002]))
        return function(*arguments, **options)

    return slower


@pytest.mark.parametrize("optimizer", NAMES)
@pytest.mark.parametrize("depth", [0, 1, 2, 3, 5, 8])
@pytest.mark.parametrize("bags", [False, True])
def test_fetching_ahead_changes_no_bit(depth: int, optimizer: str, bags: bool) -> None:
    run = Run(depth, optimizer, bags=bags)
    run.disturb(depth)
    run.train(batches(15, bags=bags))
    assert same(run.state(), plain(optimizer, 15, bags=bags))


@pytest.mark.slow
@given(st.integers(0, 8), st.integers(1, 14), st.integers(0, 1000), st.sampled_from([1, 2, 5, 30]))
@settings(derandomize=True, deadline=None, max_examples=25)
def test_any_depth_length_and_timing(depth: int, num: int, seed: int, size: int) -> None:
    torch.use_deterministic_algorithms(True)
    run = Run(depth, "adagrad", hot={"a": seed % 51, "b": seed % 8, "c": seed % 13})
    run.disturb(seed)
    run.train(batches(num, size))
    assert same(run.state(), plain("adagrad", num, size=size))


@pytest.mark.parametrize("depth", [0, 1, 4])
def test_hot_rows_exchanged_between_steps(depth: int) -> None:
    run = Run(depth, "adam", refresh_every=4)
    run.disturb(7)
    run.train(batches(18, shift=0.4))
    renumbering = run.tiers.packs[0].renumbering
    assert renumbering is not None
    assert int((renumbering.place != torch.arange(sum(ROWS.values()))).sum()) > 10
    assert same(run.state(), plain("adam", 18, shift=0.4))


def test_batches_that_need_ever_larger_staging_buffers() -> None:
    run = Run(3, "rowwise_adagrad", hot=dict.fromkeys(ROWS, 1))
    sizes = [4, 4, 64, 2, 2, 2, 200, 1, 90, 300]
    run.train(batch for size in sizes for batch in batches(1, size))
    model = build()
    optimizers = Optimizers(model, OptimizerConfig(name="rowwise_adagrad", lr=0.1))
    for size in sizes:
        step(model, optimizers, next(batches(1, size)))
    assert same(run.state(), state(model, optimizers))


def test_a_model_may_be_called_between_steps() -> None:
    """An evaluation sees every update, though steps have been fetched beyond it."""
    run = Run(3)
    seen = []
    (probe,) = batches(1, 64)
    for _, moved in run.pipeline.steps(batches(6), lambda batch: None):
        step(run.model, run.optimizers, moved)
        run.pipeline.finish_step()
        with torch.no_grad():
            seen.append(run.model(probe))
    model = build()
    optimizers = Optimizers(model, OptimizerConfig(name="sgd", lr=0.1))
    for batch, found in zip(batches(6), seen, strict=True):
        step(model, optimizers, batch)
        with torch.no_grad():
            assert torch.equal(model(probe), found)


def test_stopping_early_drops_rows_fetched_for_later_steps() -> None:
    run = Run(4)
    for stop in (3, 2, 5):
        source = batches(10)
        steps = run.pipeline.steps(source, lambda batch: None)
        for number, (_, moved) in enumerate(steps, start=1):
            step(run.model, run.optimizers, moved)
            run.pipeline.finish_step()
            if number == stop:
                break
        steps.close()
    model = build()
    optimizers = Optimizers(model, OptimizerConfig(name="sgd", lr=0.1))
    for stop in (3, 2, 5):
        for batch in batches(stop):
            step(model, optimizers, batch)
    assert same(run.state(), state(model, optimizers))


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize(
    ("stage", "verb"), [("find", "finding"), ("fetch", "fetching"), ("write_back", "writing back")]
)
def test_a_failure_names_its_step_and_loses_nothing(depth: int, stage: str, verb: str) -> None:
    run = Run(depth)
    (pack,) = run.tiers.packs
    owner = pack if stage == "find" else pack.mover
    real, calls = getattr(owner, stage), iter(range(100))

    def fails(*arguments: Any, **options: Any) -> Any:
        if next(calls) == 5:
            raise OSError("the disk is gone")
        return real(*arguments, **options)

    pack.reserve(200)
    setattr(owner, stage, fails)
    with pytest.raises(TierError, match=rf"{verb} the rows of step 5 failed: the disk is gone"):
        run.train(batches(12))
    if stage == "write_back":
        with pytest.raises(TierError, match="step 5"):  # and nothing is saved as if it were whole
            run.state()
    else:
        assert run.num_done == 5
        assert same(run.state(), plain("sgd", 5))


@pytest.mark.parametrize("depth", [0, 2])
def test_a_batch_that_is_refused_stops_the_run_at_its_turn(depth: int) -> None:
    run = Run(depth)
    numbers = iter(range(100))

    def check(batch: Batch) -> None:
        if next(numbers) == 4:
            raise ConfigError("not this one")

    with pytest.raises(ConfigError, match="not this one"):
        run.train(batches(9), check)
    assert run.num_done == 4
    assert same(run.state(), plain("sgd", 4))


def test_closing_ends_the_threads() -> None:
    before = threading.active_count()
    for _ in range(3):
        run = Run(2)
        run.train(batches(5))
        run.pipeline.close()
        run.pipeline.synchronize()  # allowed after closing
    assert threading.active_count() <= before


def test_the_newest_buffer_owns_a_row() -> None:
    source = find_in_buffers(torch.tensor([0, 4, 6, 9]), [(2, torch.tensor([1, 4, 6])), (5, torch.tensor([4, 9]))])
    assert [(int(s) >> BUFFER_SHIFT, int(s) % (1 << BUFFER_SHIFT)) if s >= 0 else None for s in source] == [
        None,
        (5, 0),
        (2, 2),
        (5, 1),
    ]


def test_a_depth_without_staging_buffers_is_refused() -> None:
    tiers: Tiers = place(build(), HOT, "cpu", num_buffers=2)
    with pytest.raises(ConfigError, match="2 staging buffers cannot fetch 1 steps ahead"):
        Pipeline(tiers, 1)
