"""Rows copied by kernels, in Triton's interpreter: `TRITON_INTERPRET=1 pytest tests/kernels`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from types import FunctionType

import pytest
import torch
from torch import Tensor

from holdall.common.errors import ConfigError
from holdall.kernels.dispatch import HAS_TRITON, INTERPRETED

if not HAS_TRITON:
    pytest.skip("Triton is not installed", allow_module_level=True)
if not INTERPRETED:
    pytest.skip("Triton's interpreter is off: set TRITON_INTERPRET=1", allow_module_level=True)

from holdall.kernels.host_rows_triton import LaunchShape
from holdall.optim.config import OptimizerConfig
from holdall.optim.optimizers import Optimizers
from holdall.planning.memory_cost import STAGED_ROW_BYTES
from holdall.runtime.launch_graphs import LaunchGraphs
from holdall.tiers.kernel_mover import KernelMover, SetTensors
from holdall.tiers.pipeline import Pipeline
from holdall.tiers.placement import place
from holdall.tiers.staging import buffers_for
from holdall.tiers.working_set import KernelSet
from tests.kernels import host_rows_checks as checks
from tests.tiers import row_mover_checks
from tests.tiers.small import HOT, ROWS, batches, build, plain, same, state, step


@pytest.fixture
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(("batch", "transposed"), [(1, False), (50, True), (700, False)])
def test_finds_distinct_host_rows(batch: int, transposed: bool) -> None:
    checks.check_find(batch, batch, "cpu", transposed=transposed)


def test_more_rows_than_fit_the_buffer() -> None:
    checks.check_too_many("cpu")


@pytest.mark.parametrize("shape", checks.SHAPES, ids=["idle", "beside"])
@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("dim", [7, 64, 1])
def test_rows_there_and_back(dim: int, lazy: bool, shape: LaunchShape) -> None:
    checks.check_copy_rows(dim, torch.float32, "cpu", lazy=lazy, shape=shape)


def test_narrow_rows_there_and_back() -> None:
    """Not of bfloat16, to which the interpreter truncates numbers where a GPU and torch round them."""
    checks.check_copy_rows(6, torch.float16, "cpu", lazy=True)


def test_rows_of_other_buffers_are_found() -> None:
    checks.check_find_in_buffers("cpu")


def test_rows_of_other_buffers_are_copied() -> None:
    checks.check_copy_between_buffers("cpu")


@pytest.mark.usefixtures("_deterministic")
@pytest.mark.parametrize("bags", [False, True])
@pytest.mark.parametrize(("depth", "optimizer"), [(0, "adam"), (1, "sgd"), (2, "rowwise_adagrad"), (4, "adagrad")])
def test_steps_equal_those_of_one_storage(depth: int, optimizer: str, bags: bool) -> None:
    model = build("bag" if bags else "categorical")
    tiers = place(model, HOT, "cpu", num_buffers=buffers_for(depth), fetch_by="kernel")
    pipeline = Pipeline(tiers, depth)
    optimizers = Optimizers(model, OptimizerConfig(name=optimizer, lr=0.1))  # type: ignore[arg-type]
    for _, moved in pipeline.steps(batches(9, bags=bags), lambda batch: None):
        step(model, optimizers, moved)
        pipeline.finish_step()
    tiers.flush()
    assert same(state(model, optimizers), plain(optimizer, 9, bags=bags))


@pytest.mark.usefixtures("_deterministic")
def test_larger_batches_grow_the_staging_buffers() -> None:
    """Steps whose rows do not fit start over, with those behind them."""
    model = build()
    tiers = place(model, dict.fromkeys(ROWS, 1), "cpu", num_buffers=buffers_for(2), fetch_by="kernel")
    pipeline = Pipeline(tiers, 2)
    optimizers = Optimizers(model, OptimizerConfig(name="rowwise_adagrad", lr=0.1))
    other = build()
    theirs = Optimizers(other, OptimizerConfig(name="rowwise_adagrad", lr=0.1))
    sizes = [4, 4, 64, 2, 2, 200, 1, 90]
    for _, moved in pipeline.steps((batch for size in sizes for batch in batches(1, size)), lambda batch: None):
        step(model, optimizers, moved)
        pipeline.finish_step()
    for size in sizes:
        step(other, theirs, next(batches(1, size)))
    tiers.flush()
    assert same(state(model, optimizers), state(other, theirs))


@pytest.mark.usefixtures("_deterministic")
def test_exchanged_hot_rows_and_calls_between_steps() -> None:
    model = build()
    tiers = place(model, HOT, "cpu", num_buffers=buffers_for(1), refreshes=True, fetch_by="kernel")
    pipeline = Pipeline(tiers, 1, refresh_every=4)
    optimizers = Optimizers(model, OptimizerConfig(name="sgd", lr=0.1))
    (probe,) = batches(1, 16)
    for number, (_, moved) in enumerate(pipeline.steps(batches(10, shift=0.4), lambda batch: None), start=1):
        step(model, optimizers, moved)
        pipeline.finish_step()
        if number == 5:
            with torch.no_grad():
                model(probe)
        if number % 4 == 0:
            assert pipeline.refresh() > 0
    tiers.flush()
    with tiers.in_order_of_ids():
        assert same(state(model, optimizers), plain("sgd", 10, shift=0.4))


@pytest.mark.usefixtures("_deterministic")
@pytest.mark.parametrize("depth", [0, 2])
def test_keys_of_launches_tell_all_they_depend_on(monkeypatch: pytest.MonkeyPatch, depth: int) -> None:
    """Launches with the same key have the same numbers and tensors at the same addresses, whatever was freed since."""
    known: dict[Hashable, Hashable] = {}
    times: Counter[Hashable] = Counter()

    def run(_: LaunchGraphs, key: Hashable, launch: Callable[[], None]) -> None:
        assert known.setdefault(key, depends_on(launch)) == depends_on(launch)
        times[key] += 1
        launch()

    monkeypatch.setattr(LaunchGraphs, "run", run)
    model = build()
    tiers = place(model, HOT, "cpu", num_buffers=buffers_for(depth), fetch_by="kernel")
    pipeline = Pipeline(tiers, depth)
    optimizers = Optimizers(model, OptimizerConfig(name="rowwise_adagrad", lr=0.1))
    epoch = [batch for size in [16, 16, 16, 16, 7] * 4 for batch in batches(1, size)]
    for _ in range(3):
        for _, moved in pipeline.steps(iter(epoch), lambda batch: None):
            step(model, optimizers, moved)
            pipeline.finish_step()
    kinds = Counter(key[0] if isinstance(key[0], str) else key[0][0] for key, count in times.items() if count > 1)
    assert set(kinds) == ({"find", "copy"} if depth == 0 else {"find", "owners", "copy", "forward"})


def test_forecasts_count_the_tensors_of_every_working_set() -> None:
    model = build()
    (pack,) = place(model, HOT, "cpu", num_buffers=buffers_for(2), fetch_by="kernel").packs
    pack.reserve(40)
    (batch,) = batches(1, 64)
    for buffer in range(buffers_for(2)):
        pack.find(batch.ids, model.bags.features, buffer=buffer)
    assert isinstance(pack.mover, KernelMover)
    assert len(pack.mover._tensors) == buffers_for(2)
    for tensors in pack.mover._tensors.values():
        assert tensors.rows.nbytes + tensors.source.nbytes == STAGED_ROW_BYTES * pack.staging.buffer_rows
        assert tensors.located.nbytes == 4 * batch.ids.values.numel()


def depends_on(value: object) -> Hashable:
    """Numbers and tensor addresses in a closure, a working set or a collection."""
    if isinstance(value, Tensor):
        return value.data_ptr(), value.shape, value.stride()
    if isinstance(value, FunctionType):
        return tuple(depends_on(cell.cell_contents) for cell in value.__closure__ or ())
    if isinstance(value, KernelSet):
        return depends_on([value.rows, value.counts, value.source, value.buffer])
    if isinstance(value, SetTensors):
        return depends_on([value.rows, value.counts, value.source])
    if isinstance(value, list | tuple):
        return tuple(map(depends_on, value))
    return value if isinstance(value, int | str) else type(value)


def test_rows_are_fetched_and_written_back() -> None:
    row_mover_checks.check_fetch_and_write_back("kernel")


def test_rows_are_forwarded_from_the_newest_owner() -> None:
    row_mover_checks.check_forward("kernel")


def test_a_set_that_does_not_fit_names_the_rows_it_needs() -> None:
    row_mover_checks.check_required_rows("kernel")


def test_staging_buffers_without_rows() -> None:
    (pack,) = place(build(), HOT, "cpu", fetch_by="kernel").packs
    working = pack.find(next(batches(1)).ids, {name: name for name in ROWS})
    pack.mover.find_owners(working, [])
    pack.mover.fetch(working)
    assert pack.staging.buffer_rows == 0
    assert pack.mover.required_rows(working) > 0


def test_traffic_is_counted_as_it_is_for_copies() -> None:
    found = []
    for fetch_by in ("kernel", "copy"):
        model = build()
        tiers = place(model, HOT, "cpu", fetch_by=fetch_by)
        optimizers = Optimizers(model, OptimizerConfig(name="rowwise_adagrad"))
        for batch in batches(3):
            tiers.fetch(batch.ids)
            step(model, optimizers, batch)
            tiers.write_back()
        found.append(tiers.traffic)
    assert found[0] == found[1]
    assert found[0].fetched_rows > 0


def test_an_unknown_mover_is_refused() -> None:
    with pytest.raises(ConfigError, match="auto, kernel or copy, not 'kernels'"):
        place(build(), HOT, "cpu", fetch_by="kernels")
