"""Cut of two-fold: the best one where it is known by hand, and properties of any cut."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdall.common.errors import ConfigError
from holdall.planning.collective_cost import Links
from holdall.planning.lookup_counts import LookupCounts
from holdall.planning.machine.hardware import CollectiveRates, Cost, Line
from holdall.planning.messages import two_fold_messages
from holdall.planning.two_fold_cut import TOUCHED, Cut, choose_cut, cold_row_costs
from tests.planning.made_up_hardware import hardware, zipf_counts

ROW = 64
BATCH, WORLD = 256, 4


def links(reduce: float = 1e9, exchange: float = 1e9, latency: float = 0.0, world_size: int = WORLD) -> Links:
    """Bytes of a tensor a second, in each collective, and what the shortest all-reduce takes.

    At equal rates an all-reduced row takes (64 + 4) ns a step, an exchanged one (2 * 64 + 4) ns when it is touched: a
    row is to be hot when its probability of that is above 68 / 132. Gathering takes 4 * 68 / 2 ns: never less.
    """
    sizes = (1 << 8, 1 << 16, 1 << 24)
    return Links(
        CollectiveRates(
            "gloo",
            world_size,
            {str(size): latency + size / reduce for size in sizes},
            {str(size): 1e-5 + size / exchange for size in sizes},
        )
    )


def chosen(counts: dict[str, Any], given: Links | None, **options: Any) -> Cut:
    samples = options.pop("samples", 1_000_000)
    settings = {"row_bytes": ROW, "batch_size": BATCH, "world_size": WORLD, **options}
    lookups = {name: LookupCounts.from_counts(rows, samples) for name, rows in counts.items()}
    return choose_cut(lookups, links=given, **settings)


def seconds(counts: dict[str, Any], hot: dict[str, int], given: Links, samples: int = 1_000_000) -> float:
    """Of the messages that this cut would send."""
    lookups = {name: LookupCounts.from_counts(rows, samples) for name, rows in counts.items()}
    messages = two_fold_messages(lookups, hot, row_bytes=ROW, batch_size=BATCH, world_size=WORLD)
    return sum(given.seconds(message, WORLD) for message in messages)


def heads(hot: int, rows: int, samples: int = 1_000_000) -> Any:
    """The first `hot` rows share nearly all lookups; the others have one each."""
    counts = np.ones(rows, dtype=np.int64)
    counts[:hot] += (samples - rows) // hot
    return counts


def test_rows_are_hot_from_the_probability_on_where_both_ways_take_as_long() -> None:
    counts = {"a": zipf_counts(5000, 1_000_000), "b": zipf_counts(300, 1_000_000, 0.7)}
    for rate in (0.8e9, 1e9, 1.1e9):
        found = chosen(counts, links(reduce=rate)).hot_rows
        for name, rows in counts.items():
            touched = -np.expm1(BATCH * np.log1p(-rows / rows.sum()))
            assert found[name] == int((touched > 68 / 132 * 1e9 / rate).sum()) > 0


def test_planted_heads_are_found_over_all_tables() -> None:
    counts = {"a": heads(10, 5000), "b": heads(30, 20_000), "c": np.full(50_000, 20)}
    assert chosen(counts, links()).hot_rows == {"a": 10, "b": 30, "c": 0}
    # Where an all-reduce is slow, nothing is worth replicating.
    assert sum(chosen(counts, links(reduce=1e8)).hot_rows.values()) == 0


def test_no_other_number_of_rows_is_better() -> None:
    counts = {"a": zipf_counts(3000, 1_000_000), "b": zipf_counts(500, 1_000_000, 1.3)}
    found = chosen(counts, links(latency=2e-6))
    assert 0 < found.hot_rows["a"] < 3000
    assert found.seconds is not None
    best = sum(found.seconds.values())
    assert best == pytest.approx(seconds(counts, found.hot_rows, links(latency=2e-6)))
    for a in (0, 1, found.hot_rows["a"] // 2, found.hot_rows["a"] * 2, 3000):
        for b in (0, 1, found.hot_rows["b"] // 2, found.hot_rows["b"], 500):
            assert best <= seconds(counts, {"a": a, "b": b}, links(latency=2e-6)) * (1 + 1e-9)


def test_uniform_lookups_leave_everything_sharded() -> None:
    counts = {"a": np.full(100_000, 10), "b": np.full(50_000, 20)}
    found = chosen(counts, links())
    assert found.hot_rows == {"a": 0, "b": 0}
    assert "hot_gradients" not in found.sent
    assert chosen(counts, None).hot_rows == {"a": 0, "b": 0}


def test_tiny_tables_are_replicated_whole() -> None:
    counts = {"hours": np.full(24, 1_000_000 // 24), "users": np.full(100_000, 10), "sex": np.array([600_000, 400_000])}
    assert chosen(counts, links()).hot_rows == {"hours": 24, "users": 0, "sex": 2}
    assert chosen(counts, None).hot_rows == {"hours": 24, "users": 0, "sex": 2}


def test_a_row_is_judged_by_its_lookups_not_by_its_table() -> None:
    counts = {"often": zipf_counts(1000, 4_000_000), "seldom": zipf_counts(1000, 100_000)}
    found = chosen(counts, links(), budget=100 * ROW)
    assert sum(found.hot_rows.values()) == 100
    assert "used up" in found.reason
    last = {name: rows[found.hot_rows[name] - 1] for name, rows in counts.items() if found.hot_rows[name]}
    following = [rows[found.hot_rows[name]] for name, rows in counts.items()]
    assert min(last.values()) >= max(following)


def test_bags_count_all_their_lookups() -> None:
    one, four = {"a": zipf_counts(2000, 1_000_000)}, {"a": zipf_counts(2000, 4_000_000)}
    assert chosen(four, links()).hot_rows["a"] > chosen(one, links()).hot_rows["a"] > 0


def test_the_budget_counts_optimizer_state() -> None:
    counts = {"a": zipf_counts(3000, 1_000_000)}
    assert chosen(counts, links(), budget=30 * ROW).hot_rows["a"] == 30
    assert chosen(counts, links(), budget=30 * ROW, stored_bytes=2 * ROW).hot_rows["a"] == 15
    assert chosen(counts, links(), budget=0).hot_rows["a"] == 0
    free = chosen(counts, links()).hot_rows["a"]
    assert chosen(counts, links(), budget=1 << 30).hot_rows["a"] == free
    assert "used up" not in chosen(counts, links(), budget=1 << 30).reason


@settings(derandomize=True, deadline=None, max_examples=30)
@given(
    exponent=st.floats(0.6, 1.6),
    rows=st.integers(2, 4000),
    faster=st.floats(1.0, 20.0),
    work=st.floats(0.0, 1e-6),
)
def test_more_is_replicated_where_that_is_cheaper(exponent: float, rows: int, faster: float, work: float) -> None:
    counts = {"a": zipf_counts(rows, 1_000_000, exponent)}
    plain = chosen(counts, links(reduce=0.9e9))
    assert chosen(counts, links(reduce=0.9e9 * faster)).hot_rows["a"] >= plain.hot_rows["a"]
    assert chosen(counts, links(reduce=0.9e9), row_seconds=work).hot_rows["a"] >= plain.hot_rows["a"]
    assert plain.seconds is not None
    assert sum(plain.seconds.values()) <= seconds(counts, {"a": 0}, links(reduce=0.9e9)) * (1 + 1e-9)
    assert sum(plain.shares().values()) == pytest.approx(1.0)


def test_work_on_every_lookup_of_a_cold_row_counts() -> None:
    # 68 ns against 132 ns * p and 10 ns for each of 256 q lookups; by the exchange alone p decides.
    rows = zipf_counts(5000, 1_000_000)
    share = rows / rows.sum()
    touched = -np.expm1(BATCH * np.log1p(-share))
    found = chosen({"a": rows}, links(), lookup_seconds=1e-8).hot_rows["a"]
    assert found == int((132 * touched + 10 * BATCH * share > 68).sum()) > chosen({"a": rows}, links()).hot_rows["a"]


def test_the_work_on_cold_rows_is_that_of_the_machine() -> None:
    rates = hardware(find=Cost(0.0, 1e-9, 3e-8))
    assert cold_row_costs(rates, 64) == pytest.approx({"row_seconds": 2e-6, "lookup_seconds": 3e-8})
    copies = {"to_device_pinned": Line(0.0, 1e-9), "to_host_pinned": Line(0.0, 2e-9)}
    assert cold_row_costs(hardware(copy=copies), 64)["row_seconds"] == pytest.approx(2e-6 + 64 * 3e-9)
    counts = {"a": zipf_counts(5000, 1_000_000)}
    budget = 1000 * ROW
    assert chosen(counts, links(), budget=budget, **cold_row_costs(rates, ROW)).hot_rows["a"] == 1000
    assert chosen(counts, links(), budget=budget).hot_rows["a"] < 100


def test_a_slow_first_byte_is_not_worth_a_few_rows() -> None:
    counts = {"a": np.array([999_000, *[1] * 1000])}
    assert chosen(counts, links()).hot_rows["a"] == 1
    assert chosen(counts, links(latency=1e-2)).hot_rows["a"] == 0


def test_without_links_the_rule_is_how_often_rows_are_touched() -> None:
    counts = {"a": zipf_counts(5000, 1_000_000)}
    found = chosen(counts, None)
    known = LookupCounts.from_counts(counts["a"], 1_000_000)
    hot = found.hot_rows["a"]
    assert known.touched(BATCH, hot - 1) >= TOUCHED > known.touched(BATCH, hot)
    assert found.seconds is None
    assert "torchrun --nproc-per-node 4 -m holdall hardware" in found.reason
    assert found.shares()["hot_gradients"] > 0  # of bytes
    assert sum(found.shares().values()) == pytest.approx(1.0)


def test_a_tail_in_another_order_is_cut_at_its_start() -> None:
    counts = zipf_counts(1000, 1_000_000)
    shuffled = counts.copy()
    shuffled[20:] = np.random.default_rng(0).permutation(counts[20:])
    assert chosen({"a": shuffled}, links(), budget=500 * ROW).hot_rows["a"] <= 500
    assert chosen({"a": shuffled}, links(), budget=15 * ROW).hot_rows["a"] == 15


def test_a_cut_is_described_with_the_share_of_each_message() -> None:
    counts = {"a": heads(10, 5000), "b": np.full(50_000, 20)}
    text = chosen(counts, links()).describe()
    assert text.startswith("10 hot rows of 1 tables on every process; exchange: ")
    for words in ("cold rows ", "cold gradients ", "hot gradients ", "ms without hot rows"):
        assert words in text
    assert "; bytes sent: cold " in chosen(counts, None).describe()
    assert chosen(counts, links(), world_size=1).describe().startswith("0 hot rows of 0 tables")


def test_one_process_replicates_nothing_and_nonsense_is_refused() -> None:
    counts = {"a": zipf_counts(100, 1000)}
    alone = chosen(counts, links(), world_size=1)
    assert alone.hot_rows == {"a": 0}
    assert sum(alone.sent.values()) == 0
    assert chosen({"a": np.zeros(10, dtype=np.int64)}, links()).hot_rows == {"a": 0}
    with pytest.raises(ConfigError, match="batch_size must be at least 1"):
        chosen(counts, links(), batch_size=0)
    with pytest.raises(ConfigError, match="must be 0 or more"):
        chosen(counts, links(), budget=-1)


def test_tables_of_millions_of_rows_take_a_moment() -> None:
    counts = {f"C{number}": zipf_counts(2_000_000, 40_000_000) for number in range(2)}
    found = chosen(counts, links(), samples=40_000_000)
    assert found.hot_rows["C0"] == found.hot_rows["C1"] > 0
