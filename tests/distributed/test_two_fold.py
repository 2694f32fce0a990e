"""Two-fold parallelism equals one process on the concatenated batch, for every optimizer and sharding of rows."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from typing import Any

import pytest
import torch

from holdall.common.errors import ConfigError
from holdall.data.batch import Batch, Ids
from holdall.distributed.collectives import Collectives
from holdall.distributed.processes import default_processes
from holdall.distributed.shards import Shards
from holdall.distributed.two_fold import TwoFold, two_fold
from holdall.optim.config import OptimizerConfig
from holdall.optim.optimizer_kinds import NAMES
from holdall.optim.optimizers import Optimizers
from tests.distributed import shares
from tests.distributed.shares import ROWS
from tests.distributed.spawn import spawn

pytestmark = pytest.mark.slow

HOT = {"a": 7, "b": 1, "c": 11}
NOTHING = dict.fromkeys(ROWS, 0)
WORLD_SIZES = (1, 2, 3, 4)
STEPS = 3


@dataclasses.dataclass(frozen=True)
class Case:
    """Tables, batches and processes of one comparison."""

    optimizer: str = "adam"
    kind: str = "one-hot"
    mode: str = "sum"
    hot: str = "some"
    sizes: tuple[int, ...] = (9, 5, 12, 7)
    """Samples of each process; the first ones are used."""
    low: float = 0.0
    high: float = 1.0
    way: str = "auto"
    lazy: bool = True


CASES = {
    **{f"{name} {kind}": Case(optimizer=name, kind=kind) for name in NAMES for kind in ("one-hot", "bags")},
    "means": Case(kind="bags", mode="mean"),
    "weighted bags": Case(kind="weighted"),
    "one sample or none": Case(sizes=(1, 0, 4, 0)),
    "bags, first share empty": Case(kind="bags", sizes=(0, 6, 2, 3)),
    "all shares empty": Case(sizes=(0, 0, 0, 0)),
    "whole tables hot": Case(hot="all"),
    "nothing hot": Case(hot="none"),
    "only hot rows looked up": Case(high=0.05),
    "only cold rows looked up": Case(low=0.5),
    "all-reduce of all hot rows": Case(way="all-reduce"),
    "gather of touched hot rows": Case(way="gather", kind="bags"),
    "rows that were there": Case(lazy=False),
}


def train(case: Case, collectives: Collectives, steps: int = STEPS) -> tuple[TwoFold, Optimizers]:
    bags = shares.build(case.mode, "meta" if case.lazy else "cpu")
    hot = {"some": HOT, "none": NOTHING, "all": ROWS}[case.hot]
    shared = two_fold(bags, hot, collectives)
    for pack in shared.packs:
        pack.hot_reduction = case.way  # type: ignore[assignment]
    optimizers = Optimizers(bags, OptimizerConfig(name=case.optimizer, lr=shares.LR))  # type: ignore[arg-type]
    for step in range(steps):
        ids = batch(case, collectives.world_size, step)[collectives.rank]
        shared.prepare(ids)
        if ids.batch_size:
            shares.loss(bags(ids)).backward()
        shared.exchange_gradients()
        optimizers.step()
    return shared, optimizers


def batch(case: Case, world_size: int, step: int) -> list[Any]:
    return shares.draw(case.kind, case.sizes[:world_size], step, case.low, case.high)


def compare(rank: int) -> dict[str, dict[str, Any]]:
    """Every case in one process group: the largest difference from one process, and whether hot rows are equal."""
    found = {}
    for name, case in CASES.items():
        collectives = Collectives(default_processes())
        shared, _ = train(case, collectives)
        sent = collectives.bytes_by_kind()
        hot = torch.cat([t[: p.num_hot].reshape(-1) for p in shared.packs for t in (p.storage, *p.slots.values())])
        alike = all(torch.equal(other, hot) for other in collectives.all_gather(hot))
        state = shared.full_state()
        if rank == 0:
            batches = [shares.concatenate(batch(case, collectives.world_size, step)) for step in range(STEPS)]
            wanted = shares.one_process(case.mode, case.optimizer, batches)
            found[name] = {"difference": shares.difference(state, wanted), "alike": alike, "sent": sent}
    return found


@functools.cache
def compared(world_size: int) -> dict[str, dict[str, Any]]:
    return spawn(compare, world_size)[0]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_equals_one_process(world_size: int, name: str) -> None:
    found = compared(world_size)[name]
    assert found["difference"] < 1e-12
    assert found["alike"], "hot rows differ between processes"


def test_sends_what_a_case_needs() -> None:
    sent = {name: found["sent"] for name, found in compared(4).items()}
    assert "cold_rows" not in _positive(sent["only hot rows looked up"])
    assert "cold_gradients" not in _positive(sent["whole tables hot"])
    assert _positive(sent["nothing hot"]).keys() == {"sizes", "cold_ids", "cold_rows", "cold_gradients"}
    # 19 hot rows, with a column that says who was touched: 2 * 3/4 of the tensor, three times
    assert sent["all-reduce of all hot rows"]["hot_gradients"] == STEPS * 3 * 19 * (shares.DIM + 1) * 8 // 2
    gathered = sent["gather of touched hot rows"]["hot_gradients"]
    assert gathered % (3 * (4 + shares.DIM * 8)) == 0, "a number and a gradient for each touched row"
    assert not any(value for found in compared(1).values() for value in found["sent"].values())


def _positive(sent: dict[str, int]) -> dict[str, int]:
    return {kind: value for kind, value in sent.items() if value}


def exact_bytes(rank: int) -> dict[str, int]:
    """Process 0 looks up cold rows of table `a` whose owners are known; the other has the same batch."""
    collectives = Collectives(default_processes())
    bags = shares.build("sum", "meta")
    shared = two_fold(bags, HOT, collectives)
    Optimizers(bags, OptimizerConfig(name="sgd"))
    # of `a`, cold rows 0, 1 and 2 (twice): owners 0, 1, 0; of `b` and `c` hot rows alone
    ids = Ids(torch.tensor([[7, 8, 9], [0, 0, 0], [0, 1, 2], [9, 9, 9]]), None, 4)
    shared.prepare(ids)
    shares.loss(bags(ids)).backward()
    shared.exchange_gradients()
    return collectives.bytes_by_kind()


def test_counts_bytes_of_distinct_rows() -> None:
    first, second = spawn(exact_bytes, 2)
    row = shares.DIM * 8
    # process 0 asks for one row and answers with two; process 1 the other way around
    assert (first["cold_ids"], first["cold_rows"], first["cold_gradients"]) == (4, 2 * row, row)
    assert (second["cold_ids"], second["cold_rows"], second["cold_gradients"]) == (8, row, 2 * row)


def partial(rank: int) -> float:
    """Rows that are fetched and not looked up have no gradient: Adam must leave their moments alone."""
    collectives = Collectives(default_processes())
    bags = shares.build("sum", "meta")
    shared = two_fold(bags, HOT, collectives)
    optimizers = Optimizers(bags, OptimizerConfig(name="adam", lr=shares.LR))
    plain = shares.build("sum")
    expected = Optimizers(plain, OptimizerConfig(name="adam", lr=shares.LR))
    for step in range(3):
        draws = shares.draw("one-hot", (6, 8), step)
        positions = [0, 2] if step == 1 else [0, 1, 2, 3]
        shared.prepare(draws[rank])
        shares.loss(bags(draws[rank], positions)).backward()
        shared.exchange_gradients()
        optimizers.step()
        shares.loss(plain(shares.concatenate(draws), positions)).backward()
        expected.step()
    state = shared.full_state(to=1)
    if rank == 0:
        assert state == {name: {} for name in ROWS}
        return 0.0
    (pack,) = plain.packs
    wanted = {n: {"weight": t.weight.detach(), **pack.slot_views(n)} for n, t in pack.tables.items()}
    return shares.difference(state, wanted)


def test_rows_without_a_gradient_are_left_alone() -> None:
    assert max(spawn(partial, 2)) < 1e-12


def looks_up(rank: int) -> dict[str, Any]:
    """Evaluation, saving and loading at another sharding of rows."""
    collectives = Collectives(default_processes())
    case = Case(optimizer="adagrad")
    shared, _ = train(case, collectives)
    ids = batch(case, collectives.world_size, 99)[rank]
    with torch.no_grad():
        shared.prepare(ids, training=False)
        vectors = shared.bags(ids)
        shared.finish()
        again, _ = train(dataclasses.replace(case, hot="none"), collectives, steps=0)
        (pack,), (old,) = again.packs, shared.packs
        touched = 0
        for name in ROWS:
            for saved, loaded in (
                (old.weight(name), pack.weight(name)),
                (old.slot_views(name)["sum"], pack.slot_views(name)["sum"]),
            ):
                rows = saved.touched()
                saved_ids, values = (torch.cat(collectives.all_gather(part)) for part in (rows, saved.read(rows)))
                loaded.write(saved_ids, values)  # all that was saved, as a checkpoint gives it
                touched += int((rows >= HOT[name]).sum()) if saved.kind == "weight" else 0
        before, after = shared.full_state(), again.full_state()
        again.prepare(ids, training=False)
        same = torch.equal(again.bags(ids), vectors)
    return {"touched": touched, "same": same, "moved": shares.difference(after, before) if rank == 0 else 0.0}


def begins_anew(rank: int) -> float:
    """A reset sets hot and cold rows and their state to initial values."""
    collectives = Collectives(default_processes())
    shared, _ = train(Case(optimizer="adam"), collectives)
    fresh, _ = train(Case(optimizer="adam"), collectives, steps=0)
    shared.finish()
    spread = [t for p in shared.packs for n in p.tables for t in (p.weight(n), *p.slot_views(n).values())]
    learned = sum(t.touched().numel() for t in spread)
    for tensor in spread:
        tensor.reset()
    for tensor in spread:
        tensor.clear_touched()
    assert sum(t.touched().numel() for t in spread) < learned
    found, wanted = shared.full_state(), fresh.full_state()
    return shares.difference(found, wanted) if rank == 0 else 0.0


def test_begins_anew() -> None:
    assert spawn(begins_anew, 2)[0] == 0.0


def ahead(rank: int) -> list[bool]:
    """Rows prefetched during the step before, with an evaluation in between."""
    found = []
    for case in (CASES["adam one-hot"], CASES["bags, first share empty"], CASES["nothing hot"]):
        states = []
        for own in (False, True):
            collectives = Collectives(default_processes())
            bags = shares.build(case.mode, "meta")
            shared = two_fold(bags, {"some": HOT, "none": NOTHING}[case.hot], collectives)
            optimizers = Optimizers(bags, OptimizerConfig(name=case.optimizer, lr=shares.LR))  # type: ignore[arg-type]
            batches = [_as_batch(batch(case, collectives.world_size, step)[rank]) for step in range(8)]
            group = Collectives(default_processes(), own_group=True) if own else None
            for step, (now, _) in enumerate(shared.steps(((one, one) for one in batches), group)):
                if len(now):
                    shares.loss(bags(now.ids)).backward()
                shared.exchange_gradients()
                optimizers.step()
                if step == 4:
                    shared.prepare(batches[0].ids, training=False)
            states.append(shared.full_state())
            if own and case.hot == "none":
                assert group is not None
                assert collectives.bytes_by_kind()["cold_rows"] > 0, "some rows were updated by the step before"
                assert group.bytes_by_kind()["cold_rows"] > 0
        first, second = states
        found.append(all(torch.equal(second[n][kind], t) for n, kinds in first.items() for kind, t in kinds.items()))
    return found


def _as_batch(ids: Ids) -> Batch:
    return Batch(torch.zeros(ids.batch_size, 0), ids, torch.zeros(ids.batch_size))


@pytest.mark.parametrize("world_size", [2, 3])
def test_fetching_ahead_changes_no_bit(world_size: int) -> None:
    assert all(all(one) for one in spawn(ahead, world_size))


def test_looks_up_saves_and_loads() -> None:
    found = spawn(looks_up, 3)
    assert all(one["same"] and one["moved"] == 0.0 for one in found)
    case = Case(optimizer="adagrad")
    drawn = Counter[tuple[str, int]]()
    for step in range(STEPS):
        for position, name in enumerate(shares.FEATURES.values()):
            values = shares.concatenate(batch(case, 3, step)).values[position]
            drawn.update((name, int(i)) for i in values if i >= HOT[name])
    assert sum(one["touched"] for one in found) == len(drawn)


@pytest.mark.parametrize("world_size", [1, 3, 4, 100])
def test_every_cold_row_has_one_owner(world_size: int) -> None:
    shards = Shards(ROWS, HOT, world_size)
    for name in ROWS:
        ids = torch.cat([shards.owned_ids(rank, name) for rank in range(world_size)])
        assert sorted(ids.tolist()) == list(range(HOT[name], ROWS[name]))
        for rank in range(world_size):
            kept, place = shards.owned_ids(rank, name), shards.local_slice(rank, name)
            keys = shards.keys(kept - HOT[name], torch.full_like(kept, shards.number[name]))
            assert (keys - rank * shards.stride).tolist() == list(range(place.start, place.stop))
    loads = shards.counts.sum(1)
    assert int(loads.max() - loads.min()) <= len(ROWS)


def test_hottest_rows_have_different_owners() -> None:
    names = [f"t{number}" for number in range(8)]
    shards = Shards(dict.fromkeys(names, 10), dict.fromkeys(names, 0), 4)
    owners = Counter(int(shards.keys(torch.tensor(0), torch.tensor(t))) // shards.stride for t in range(8))
    assert owners == {0: 2, 1: 2, 2: 2, 3: 2}


def test_refuses_what_cannot_work() -> None:
    with pytest.raises(ConfigError, match="cannot have 41 hot rows"):
        two_fold(shares.build("sum", "meta"), {**HOT, "a": 41}, Collectives(default_processes()))
    bags = shares.build("sum", "meta")
    two_fold(bags, HOT, Collectives(default_processes()))
    with torch.no_grad(), pytest.raises(ConfigError, match="call prepare"):
        bags(shares.draw("one-hot", [4], 0, low=0.5)[0])
    bags = shares.build("sum")
    Optimizers(bags, OptimizerConfig())
    with pytest.raises(ConfigError, match="optimizer already"):
        two_fold(bags, HOT, Collectives(default_processes()))
