"""Co-occurrence counts: the right pairs, within the stated error and the stated memory."""

from __future__ import annotations

import sys
import tracemalloc
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.session_log import SessionLog, write_sessions
from holdall.data.dataset import DataSet
from holdall.popularity import cooccurrence
from holdall.popularity.communities import find_communities
from holdall.popularity.cooccurrence import EdgeCounter, Edges, count_pairs, draw_partners
from holdall.popularity.order_config import BYTES_PER_EDGE


def counted(edges: Edges) -> dict[tuple[int, int], int]:
    return dict(zip(zip(edges.left.tolist(), edges.right.tolist(), strict=True), edges.weight.tolist(), strict=True))


@settings(derandomize=True, deadline=None, max_examples=50)
@given(
    st.lists(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=40), max_size=8), st.integers(1, 40)
)
def test_counts_are_exact_among_the_ids_that_fit(parts: list[list[tuple[int, int]]], max_edges: int) -> None:
    """All pairs of ids below `stop` and no others; everything where it fits."""
    counter = EdgeCounter(13, max_edges)
    exact: Counter[tuple[int, int]] = Counter()
    for part in parts:
        pairs = np.array(part, dtype=np.int64).reshape(-1, 2)
        counter.add(pairs[:, 0], pairs[:, 1])
        exact.update((min(a, b), max(a, b)) for a, b in part if a != b)
    edges = counter.edges()
    assert len(edges) <= max_edges
    assert edges.num_pairs == exact.total()
    assert counted(edges) == {edge: count for edge, count in exact.items() if edge[1] < edges.stop}
    if len(exact) <= max_edges:
        assert edges.stop == 13
    else:  # not one id fewer than need be
        assert sum(edge[1] <= edges.stop for edge in exact) > max_edges


def test_memory_does_not_grow_with_the_pairs() -> None:
    """3,000,000 pairs, most of them different, through 50,000 counters."""
    rng = np.random.default_rng(0)
    max_edges = 50_000
    tracemalloc.start()
    counter = EdgeCounter(10**6, max_edges)
    for _ in range(300):
        counter.add(*rng.integers(10**6, size=(2, 10_000)))
    edges = counter.edges()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert edges.num_pairs > 2_990_000
    assert peak < EdgeCounter.BYTES_PER_EDGE * max_edges + 40 * 10_000  # what came in, and its keys


@pytest.mark.skipif(sys.platform != "linux", reason="reads the resident memory from /proc")
def test_finding_communities_takes_the_memory_that_is_stated() -> None:
    pytest.importorskip("igraph", reason="needs holdall[order]")
    rng = np.random.default_rng(0)
    group = rng.integers(100, size=400_000) * 200
    counter = EdgeCounter(20_000, 400_000)
    counter.add(group + rng.integers(200, size=len(group)), group + rng.integers(200, size=len(group)))
    edges = counter.edges()
    small = Edges(edges.left[:100], edges.right[:100], edges.weight[:100])
    find_communities(small)  # whatever importing takes
    Path("/proc/self/clear_refs").write_text("5")  # the most starts from what there is now
    before = most_resident()
    found = find_communities(edges, size=20)
    assert found.num_groups == 100
    assert most_resident() - before < BYTES_PER_EDGE * len(edges)


def most_resident() -> int:
    """The most memory this process had, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("pairs") / "log"
    write_sessions(SessionLog(rows=700, num_ids=40, communities=4, tags=5, test=0.0), out, rows_per_file=111)
    return out


@pytest.mark.parametrize("block_rows", [7, 64, 10_000])
@pytest.mark.parametrize("window", [2, 9, 30])
def test_samples_less_than_a_window_apart_are_together(
    folder: Path, monkeypatch: pytest.MonkeyPatch, block_rows: int, window: int
) -> None:
    """All pairs, when as many partners may be had; wherever blocks and files end."""
    monkeypatch.setattr(cooccurrence, "BLOCK_ROWS", block_rows)
    data = DataSet(folder)
    edges = count_pairs(data, "page", 5, window=window, partners=window, max_edges=10_000, seed=0)
    ids = data.columns(0, 700).ids[:, 0].tolist()
    exact: Counter[tuple[int, int]] = Counter()
    for row, id in enumerate(ids):
        for other in ids[row + 1 : row + window]:
            if id != other and min(id, other) >= 5:
                exact[min(id, other), max(id, other)] += 1
    assert counted(edges) == exact


def test_ids_of_one_bag_are_together_and_of_two_are_not(folder: Path) -> None:
    data = DataSet(folder)
    edges = count_pairs(data, "tags", 3, window=512, partners=5, max_edges=10_000, seed=0)
    exact: Counter[tuple[int, int]] = Counter()
    for bag in data.columns(0, 700).bags[0].values.reshape(-1, 5).tolist():
        for place, id in enumerate(bag):
            exact.update((min(id, b), max(id, b)) for b in bag[place + 1 :] if id != b and min(id, b) >= 3)
    assert counted(edges) == exact


def test_partners_are_drawn_from_near_and_far() -> None:
    last = np.minimum(np.arange(5000) + 256, 5000)
    distances = np.concatenate([partner - j for j, partner in draw_partners(last, 8, np.random.default_rng(0))])
    assert distances.min() == 1
    assert distances.max() == 255
    octaves = np.bincount(np.log2(distances[: len(distances) // 2 * 2]).astype(int))
    assert len(octaves) == 8  # 1, 2-3, 4-7, ..., 128-255: each as often as the others
    assert octaves.min() > 0.9 * octaves.max()


def test_no_pairs_give_no_communities() -> None:
    pytest.importorskip("igraph", reason="needs holdall[order]")
    none = np.zeros(0, dtype=np.int64)
    found = find_communities(Edges(none, none, none))
    assert found.levels == ()
    assert found.num_groups == 0


def test_more_partners_than_there_are_give_every_pair() -> None:
    last = np.array([4, 4, 4, 4, 5])
    for partners in (3, 2**63 - 1):
        drawn = draw_partners(last, partners, np.random.default_rng(0))
        pairs = {(int(a), int(b)) for j, other in drawn for a, b in zip(j, other, strict=True)}
        assert pairs == {(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)}
