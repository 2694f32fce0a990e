"""Choice of a plan's hot rows by the seconds they save, as many as fit the device.

Without a plan, `--hot-bytes` chooses by lookups (`popularity.choose_hot_rows`). For `two-fold` the boundary also
depends on the exchange (`planning.two_fold_cut`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from holdall.planning.lookup_counts import LookupCounts
from holdall.planning.memory_cost import compressed_bytes, find_bytes, staging_bytes, staging_rows
from holdall.planning.plan import PlannedStrategy, TablePlan, Tail
from holdall.planning.step_cost import Problem, compressed_row_seconds, concentration_of
from holdall.planning.strategy_kinds import STRATEGY_KINDS
from holdall.tables import Dense, HotCold, Method

SMALL = 1000
"""Tables smaller than 1/1000 of the bytes for hot rows are hot whole, up to a tenth of those bytes in all."""
ITERATIONS = 6
"""Iterations of the fixed point between the hot rows and the staging buffer, whose size depends on them."""


class HotRowSelector:
    """Selector of hot rows within `limits`, bytes by tier; `one_memory` if host and device share one memory."""

    def __init__(self, problem: Problem, limits: Mapping[str, int], prefetch: int, *, one_memory: bool):
        self.problem, self.limits, self.prefetch, self.one_memory = problem, limits, prefetch, one_memory
        self.row = problem.stored_row_bytes

    def choose(
        self,
        tails: Mapping[str, Tail],
        compressed: Mapping[str, Method],
        strategy: PlannedStrategy,
        *,
        cached: bool = False,
        exact_parts: bool = True,
    ) -> dict[str, int]:
        """Hot rows by table, by seconds saved, within the bytes that the device has left for them.

        `tails` are the places of the other rows of dense tables; with `cached`, those on disk are in the page cache. A
        hot row of a table on the host or on disk saves its transfer; one of a compressed table (`exact_parts`) saves
        its computation.
        """
        tiers = {"disk": "cached" if cached else "disk"}
        worth = {name: self.problem.row_seconds(tiers.get(tail, "host")) for name, tail in tails.items()}
        if exact_parts:
            worth |= {name: compressed_row_seconds(self.problem, name, compressed[name]) for name in compressed}
        hot = self._fixed_point(tails, compressed, worth, 1.0)
        if not STRATEGY_KINDS[strategy].packs_hot_batches or self.problem.hot_inputs is None:
            return hot
        whole = {name: self.problem.tables[name] for name in compressed}
        return self._fixed_point(tails, compressed, worth, concentration_of(self.problem.hot_inputs({**whole, **hot})))

    def choose_exact_rows(self, compressed: Mapping[str, Method]) -> dict[str, int]:
        """Exact rows of compressed tables, when all rows of the others are on the device."""
        others = sum(rows for name, rows in self.problem.tables.items() if name not in compressed)
        worth = {name: compressed_row_seconds(self.problem, name, compressed[name]) for name in compressed}
        return self._hottest(worth, max(0, self.available_bytes({}, {}, compressed, 1.0) - others * self.row))

    def _fixed_point(
        self,
        tails: Mapping[str, Tail],
        compressed: Mapping[str, Method],
        worth: Mapping[str, float],
        concentration: float,
    ) -> dict[str, int]:
        """The most hot rows that leave enough bytes for the staging buffer (`concentration`: see `table_load`).

        The more rows are hot, the smaller the staging buffer. So the iteration starts from none, and each turn can add
        hot rows. Where the staging buffer does not fit without hot rows, it may fit with many: then the iteration
        starts from all rows.
        """

        def available(hot: Mapping[str, int]) -> int:
            return self.available_bytes(hot, tails, compressed, concentration)

        hot = dict.fromkeys(worth, 0)
        best: dict[str, int] | None = None
        for _ in range(ITERATIONS):
            hot = self._hottest(worth, available(hot))
            if sum(hot.values()) * self.row <= available(hot):
                best = max(best or hot, hot, key=lambda rows: sum(rows.values()))
        if best is not None:
            return best
        budget = available({name: self.problem.tables[name] for name in worth})  # without a staging buffer
        for turn in range(3 * ITERATIONS):
            if budget <= 0:
                break
            found = self._hottest(worth, budget)
            left = available(found)
            if sum(found.values()) * self.row <= left:
                return found
            budget = left if turn < ITERATIONS else min(left, budget * 19 // 20)
        return hot

    def _hottest(self, worth: Mapping[str, float], budget: int) -> dict[str, int]:
        """Hot rows within a budget: small tables whole, then rows by seconds saved, then the rest of nearly whole
        tables."""
        tables, small, left = self.problem.tables, {}, budget
        for name in sorted(worth, key=lambda name: tables[name]):
            needed = tables[name] * self.row
            if needed * SMALL > budget or left - needed < budget * 9 // 10:
                break
            small[name] = tables[name]
            left -= needed
        known = {name: self.problem.lookups[name] for name in worth if name not in small}
        chosen = choose_hot(known, worth, self.row, left, self.problem.batch_size) if known else {}
        return self._completed({name: small.get(name, chosen.get(name, 0)) for name in worth}, budget)

    def _completed(self, hot: Mapping[str, int], budget: int) -> dict[str, int]:
        """Hot rows with the missing rows of tables that fit whole, smallest first: those need no second storage."""
        left, found = budget - sum(hot.values()) * self.row, dict(hot)
        for name in sorted(found, key=lambda name: self.problem.tables[name] - found[name]):
            missing = self.problem.tables[name] - found[name]
            if missing * self.row > left:
                break
            left -= missing * self.row
            found[name] += missing
        return found

    def available_bytes(
        self, hot: Mapping[str, int], tails: Mapping[str, Tail], compressed: Mapping[str, Method], concentration: float
    ) -> int:
        """Device bytes for hot rows, beside the staging buffer that the hot rows `hot` need."""
        tables = [
            TablePlan(name=name, num_rows=self.problem.tables[name], method=Dense(), hot_rows=hot[name], tail=tail)
            for name, tail in tails.items()
            if hot[name] < self.problem.tables[name]
        ]
        staging = staging_rows(self.problem, tables, concentration)
        placed = [compressed_table(name, self.problem.tables[name], method) for name, method in compressed.items()]
        limit = self.limits["device"]
        if self.one_memory:  # host bytes come from the same memory
            rows = sum(table.num_rows for table in tables if table.tail == "host")
            flags = sum(table.num_rows for table in tables)
            limit = min(limit, self.limits["host"] - flags - (rows + sum(staging.values())) * self.row)
        return limit - device_bytes(self.problem, self.prefetch, placed, staging)


def compressed_table(name: str, rows: int, method: Method, hot_rows: int = 0) -> TablePlan:
    """A compressed table whose first `hot_rows` rows are exact."""
    stored = HotCold(hot_rows=hot_rows, cold=method) if hot_rows else method
    return TablePlan(name=name, num_rows=rows, method=stored, hot_rows=hot_rows, tail="compressed")


def device_bytes(problem: Problem, prefetch: int, compressed: Sequence[TablePlan], staging: Mapping[str, int]) -> int:
    """Device bytes beside dense rows, as `memory_cost.memory_bytes` counts them."""
    total = staging_bytes(problem, staging, prefetch) + problem.work.parameter_bytes + problem.work.state_bytes
    total += problem.work.step_bytes(problem.batch_size) + find_bytes(problem, staging, prefetch)
    return total + sum(
        compressed_bytes(table.method, table.num_rows, problem.dim, problem.optimizer).total for table in compressed
    )


def choose_hot(
    lookups: Mapping[str, LookupCounts], worth: Mapping[str, float], row_bytes: int, budget: int, batch_size: int
) -> dict[str, int]:
    """Hot rows of each table, within `budget` bytes for all, that save the most time.

    A hot row saves `worth[table]` seconds in each batch that looks it up, so rows are chosen in the order of that
    probability times worth. All rows have `row_bytes`, so this is the order of seconds per byte. Tables of worth 0 get
    none.
    """
    names = list(lookups)
    # Only a prefix can be hot: a row after one that is looked up less is worth no more than that one.
    touched = [np.minimum.accumulate(lookups[name].touched_by_group(batch_size)) for name in names]
    saved = [values * worth.get(name, 0.0) for name, values in zip(names, touched, strict=True)]
    table = np.concatenate([np.full(len(values), number) for number, values in enumerate(saved)])
    rows = np.concatenate([lookups[name].rows for name in names])
    gain = np.concatenate(saved)
    order = np.argsort(-gain, kind="stable")
    order = order[gain[order] > 0]
    most = max(0, budget) // row_bytes
    taken = np.cumsum(rows[order])
    inside = rows[order].copy()
    full = int(np.searchsorted(taken, most, side="right"))  # groups that fit whole
    if full < len(order):
        inside[full] = most - (int(taken[full - 1]) if full else 0)
        inside[full + 1 :] = 0
    chosen = np.bincount(table[order], weights=inside, minlength=len(names))
    return {name: int(count) for name, count in zip(names, chosen, strict=True)}
