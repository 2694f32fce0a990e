"""Table-wise parallelism equals one process on the concatenated batch; tables are assigned evenly."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from holdall.common.errors import ConfigError, IdError
from holdall.data.batch import Ids
from holdall.distributed.collectives import Collectives
from holdall.distributed.processes import default_processes
from holdall.distributed.table_wise import TableWiseBags, assign_tables
from holdall.embedding.bags import EmbeddingBags
from holdall.optim.config import OptimizerConfig
from holdall.optim.optimizer_kinds import NAMES
from holdall.optim.optimizers import Optimizers
from holdall.tables import QuotientRemainder
from tests.distributed import shares
from tests.distributed.shares import ROWS
from tests.distributed.spawn import spawn

pytestmark = pytest.mark.slow

WORLD_SIZES = (1, 2, 3, 4)
STEPS = 3


@dataclasses.dataclass(frozen=True)
class Case:
    optimizer: str = "adam"
    kind: str = "one-hot"
    mode: str = "sum"
    sizes: tuple[int, ...] = (9, 5, 12, 7)
    lazy: bool = True


CASES = {
    **{f"{name} {kind}": Case(optimizer=name, kind=kind) for name in NAMES for kind in ("one-hot", "bags")},
    "means": Case(kind="bags", mode="mean"),
    "weighted bags": Case(kind="weighted"),
    "one sample or none": Case(sizes=(1, 0, 4, 0)),
    "bags, first share empty": Case(kind="bags", sizes=(0, 6, 2, 3)),
    "weighted, last shares empty": Case(kind="weighted", sizes=(5, 6, 0, 0)),
    "rows that were there": Case(lazy=False),
}


def spread(case: Case, collectives: Collectives) -> TableWiseBags:
    bags = shares.build(case.mode, "meta" if case.lazy else "cpu")
    sizes = {name: rows * shares.DIM * 8 for name, rows in ROWS.items()}
    loads = {name: list(shares.FEATURES.values()).count(name) for name in ROWS}
    return TableWiseBags(bags, assign_tables(sizes, loads, collectives.world_size), collectives)


def batch(case: Case, world_size: int, step: int) -> list[Ids]:
    return shares.draw(case.kind, case.sizes[:world_size], step)


def compare(rank: int) -> dict[str, dict[str, Any]]:
    """Every case in one process group: differences of this process's tables from those of one process."""
    found = {}
    for name, case in CASES.items():
        collectives = Collectives(default_processes())
        bags = spread(case, collectives)
        optimizers = Optimizers(bags, OptimizerConfig(name=case.optimizer, lr=shares.LR))  # type: ignore[arg-type]
        batches = [batch(case, collectives.world_size, step) for step in range(STEPS)]
        for step in range(STEPS):
            bags.prepare(batches[step][rank])
            if batches[step][rank].batch_size:
                shares.loss(bags(batches[step][rank])).backward()
            bags.exchange_gradients()
            optimizers.step()
        wanted = shares.one_process(case.mode, case.optimizer, [shares.concatenate(parts) for parts in batches])
        mine: dict[str, dict[str, Tensor]] = {
            name: {"weight": table.weight.detach(), **pack.slot_views(name)}
            for pack in bags.packs
            for name, table in pack.tables.items()
        }
        difference = shares.difference(mine, {table: wanted[table] for table in mine})
        found[name] = {"difference": difference, "tables": sorted(mine), "sent": collectives.bytes_by_kind()}
    return found


@functools.cache
def compared(world_size: int) -> list[dict[str, dict[str, Any]]]:
    return spawn(compare, world_size)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_equals_one_process(world_size: int, name: str) -> None:
    found = [by_name[name] for by_name in compared(world_size)]
    assert max(one["difference"] for one in found) < 1e-12
    assert sorted(table for one in found for table in one["tables"]) == sorted(ROWS), "each table has one owner"


def test_counts_bytes() -> None:
    sizes = Case().sizes[:2]
    for rank, by_name in enumerate(compared(2)):
        found = by_name["sgd one-hot"]
        num_mine = sum(name in found["tables"] for name in shares.FEATURES.values())
        num_theirs = len(shares.FEATURES) - num_mine
        assert found["sent"]["pooled_vectors"] == STEPS * sizes[1 - rank] * num_mine * shares.DIM * 8
        assert found["sent"]["gradients_of_vectors"] == STEPS * sizes[rank] * num_theirs * shares.DIM * 8
        assert found["sent"]["ids"] == STEPS * sizes[rank] * num_theirs * 4
        assert "lengths" in by_name["sgd bags"]["sent"]


def compressed(rank: int) -> bool:
    """A compressed table learns at its owner too, and an evaluation leaves everything as it is."""

    def build() -> EmbeddingBags:
        torch.manual_seed(0)
        method = {"c": QuotientRemainder(8)}
        return EmbeddingBags.build(ROWS, shares.DIM, method, features=shares.FEATURES, dtype=torch.float64)

    collectives, plain = Collectives(default_processes()), build()
    bags = TableWiseBags(build(), {"a": 0, "b": 0, "c": 1}, collectives)
    optimizers = [Optimizers(one, OptimizerConfig(name="adagrad", lr=shares.LR)) for one in (bags, plain)]
    for step in range(2):
        parts = shares.draw("one-hot", (6, 8), step)
        bags.prepare(parts[rank])
        shares.loss(bags(parts[rank])).backward()
        bags.exchange_gradients()
        shares.loss(plain(shares.concatenate(parts))).backward()
        for one in optimizers:
            one.step()
    parts = shares.draw("one-hot", (6, 8), 9)
    found = bags.prepare(parts[rank], training=False)
    assert not found.requires_grad
    with torch.no_grad():
        wanted = plain(shares.concatenate(parts))[slice(0, 6) if rank == 0 else slice(6, 14)]
        assert torch.equal(bags(parts[rank], [2, 0]), found[:, [2, 0]])
    own = dict(bags.named_parameters())
    assert own.keys() < dict(plain.named_parameters()).keys(), "parameters have the names of one process"
    return bool(torch.allclose(found, wanted, rtol=0, atol=1e-12))


def test_compressed_tables_and_evaluation() -> None:
    assert spawn(compressed, 2) == [True, True]


def test_deals_tables_evenly() -> None:
    sizes = {"a": 100, "b": 60, "c": 40, "d": 30, "e": 30}
    level = dict.fromkeys(sizes, 0.0)
    owners = assign_tables(sizes, level, 2)
    held = [sum(size for name, size in sizes.items() if owners[name] == rank) for rank in range(2)]
    assert held == [130, 130]
    # equal bytes, and all the load on two tables: they must not be together
    owners = assign_tables(dict.fromkeys("wxyz", 10), {"w": 5.0, "x": 5.0, "y": 0.1, "z": 0.1}, 2)
    assert owners["w"] != owners["x"]
    assert sorted(owners.values()) == [0, 0, 1, 1]
    assert list(owners) == list("wxyz")
    assert assign_tables({"only": 3}, {"only": 1.0}, 3) == {"only": 0}


def test_refuses_what_cannot_work() -> None:
    with pytest.raises(ConfigError, match="table 'c' needs an owner from 0 to 0"):
        TableWiseBags(shares.build("sum"), {"a": 0, "b": 0, "c": 1}, Collectives(default_processes()))
    bags = spread(Case(), Collectives(default_processes()))
    ids = shares.draw("one-hot", [4], 0)[0]
    with pytest.raises(ConfigError, match="call prepare"):
        bags(ids)
    with pytest.raises(ConfigError, match="use two-fold"):
        bags.rows(ids, 0)
    ids.values[1, 2] = 3
    with pytest.raises(IdError, match="feature 'g' has id 3"):
        bags.prepare(ids)
