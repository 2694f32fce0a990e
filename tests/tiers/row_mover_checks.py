"""Behaviour of every row mover: of host copies in `tests/tiers`, of kernels in `tests/kernels`."""

from __future__ import annotations

import torch
from torch import Tensor

from holdall.data.batch import Ids
from holdall.kernels.host_rows import NO_ROW
from holdall.tiers.placement import place
from holdall.tiers.tiered_pack import TieredPack
from holdall.tiers.working_set import WorkingSet
from tests.tiers.small import HOT, ROWS, build

FEATURES = {name: name for name in ROWS}


def pack_of(fetch_by: str, buffer_rows: int = 100) -> TieredPack:
    (pack,) = place(build(), HOT, "cpu", num_buffers=3, fetch_by=fetch_by).packs
    pack.reserve(buffer_rows)
    return pack


def found(pack: TieredPack, rows_of_c: list[int], buffer: int = 0, *newest_first: WorkingSet) -> WorkingSet:
    """Working set of a batch whose lookups in tables `a` and `b` are hot."""
    values = torch.zeros(len(ROWS), len(rows_of_c), dtype=torch.int32)
    values[2] = torch.tensor(rows_of_c)
    ids = Ids(values, None, len(ROWS))
    for again in (False, True):  # the mover learns the number of lookups from the first
        working = pack.find(ids, FEATURES, buffer=buffer, again=again)
        pack.mover.find_owners(working, newest_first)
        if pack.mover.required_rows(working) == 0:
            break
    return working


def rows_of(pack: TieredPack, working: WorkingSet) -> tuple[list[int], Tensor]:
    """Rows of table `c` in a working set, and their weights in its staging buffer."""
    there = working.rows != NO_ROW
    return (working.rows[there] - pack.starts["c"]).tolist(), pack.buffer_views(working)[0][there]


def check_fetch_and_write_back(fetch_by: str) -> None:
    """Rows move both ways, and traffic is counted."""
    pack = pack_of(fetch_by)
    expected = pack.host.storage.clone()
    working = found(pack, [150, 3, 30, 150], 1)
    pack.mover.fetch(working)
    rows, weights = rows_of(pack, working)
    assert rows == [30, 150]
    assert torch.equal(weights, expected[working.rows[:2]])
    pack.buffer_views(working)[0][:2] += 1
    expected[working.rows[:2]] += 1
    pack.mover.write_back(working)
    assert torch.equal(pack.host.storage, expected)
    traffic, row_bytes = pack.traffic, 8 * 4
    assert (traffic.fetched, traffic.written_back, traffic.fetched_rows) == (2 * row_bytes, 2 * row_bytes, 2)
    assert (traffic.lookups, traffic.hot_lookups) == (12, 9)


def check_forward(fetch_by: str) -> None:
    """Rows come from the newest buffer that owns them, and from the host where none does."""
    pack = pack_of(fetch_by)
    host = pack.view(pack.host.storage, "c")
    older = found(pack, [30, 40, 50], 0)
    newer = found(pack, [40, 60], 1, older)
    working = found(pack, [40, 50, 70], 2, newer, older)
    for number, other in enumerate((older, newer)):
        pack.buffer_views(other)[0].fill_(float(number))
    pack.mover.fetch(working)
    pack.mover.forward(working)
    rows, weights = rows_of(pack, working)
    assert rows == [40, 50, 70]
    assert torch.equal(weights, torch.stack([torch.ones(8), torch.zeros(8), host[70]]))


def check_required_rows(fetch_by: str) -> None:
    """A set that does not fit names the rows it needs."""
    pack = pack_of(fetch_by, buffer_rows=1)
    buffer_rows = pack.staging.buffer_rows
    working = found(pack, list(range(100, 100 + buffer_rows)))
    assert pack.mover.required_rows(working) == 0
    working = found(pack, list(range(100, 101 + buffer_rows)))
    pack.mover.fetch(working)  # moves nothing that a step could use
    assert pack.mover.required_rows(working) == buffer_rows + 1
    pack.reserve(buffer_rows + 1)
    working = found(pack, list(range(100, 101 + buffer_rows)))
    assert pack.mover.required_rows(working) == 0
