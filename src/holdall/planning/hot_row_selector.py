"""How many rows of every table are hot: those that save most time, as many as the device has room for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from holdall.planning.forecast import compressed_bytes, crowding_of, find_bytes, staging_bytes, staging_rows
from holdall.planning.lookup_counts import choose_hot
from holdall.planning.plan import PlannedStrategy, TablePlan, Tail
from holdall.planning.step_cost import Problem, compressed_row_seconds
from holdall.planning.strategy_kinds import STRATEGY_KINDS
from holdall.tables import Dense, HotCold, Method

SMALL = 1000
"""Tables that take less than this part of the room for hot rows are hot as a whole, up to a tenth of it."""
TURNS = 6
"""The room for far rows depends on the hot ones and the reverse: how often one is worked out from the other."""


class HotRowSelector:
    """Chooses hot rows for a problem within `limits`, bytes by tier; `one_memory` if host and device share theirs."""

    def __init__(self, problem: Problem, limits: Mapping[str, int], prefetch: int, *, one_memory: bool):
        self.problem, self.limits, self.prefetch, self.one_memory = problem, limits, prefetch, one_memory
        self.row = problem.row_bytes + problem.state_bytes

    def choose(
        self,
        tails: Mapping[str, Tail],
        compressed: Mapping[str, Method],
        strategy: PlannedStrategy,
        *,
        cached: bool = False,
        exact_parts: bool = True,
    ) -> dict[str, int]:
        """Hot rows by table, by seconds saved, within what the device has left after all that must be there.

        `tails` says where the others of dense tables live; `cached`, that memory keeps what is on disk. A hot row of a
        table on the host or on disk saves its way; one of a compressed table (`exact_parts`) saves being computed.
        """
        tiers = {"disk": "cached" if cached else "disk"}
        worth = {name: self.problem.row_seconds(tiers.get(tail, "host")) for name, tail in tails.items()}
        if exact_parts:
            worth |= {name: compressed_row_seconds(self.problem, name, compressed[name]) for name in compressed}
        hot = self._settled(tails, compressed, worth, 1.0)
        if not STRATEGY_KINDS[strategy].packs_hot_batches or self.problem.hot_inputs is None:
            return hot
        whole = {name: self.problem.tables[name] for name in compressed}
        return self._settled(tails, compressed, worth, crowding_of(self.problem.hot_inputs({**whole, **hot})))

    def beside_whole(self, compressed: Mapping[str, Method]) -> dict[str, int]:
        """Exact rows of compressed tables, when all rows of the others are on the device."""
        others = sum(rows for name, rows in self.problem.tables.items() if name not in compressed)
        worth = {name: compressed_row_seconds(self.problem, name, compressed[name]) for name in compressed}
        return self._hottest(worth, max(0, self.room({}, {}, compressed, 1.0) - others * self.row))

    def _settled(
        self,
        tails: Mapping[str, Tail],
        compressed: Mapping[str, Method],
        worth: Mapping[str, float],
        crowding: float,
    ) -> dict[str, int]:
        """The most hot rows that leave room for the far ones, when those come `crowding` times as close.

        The more are hot, the less room the others need. So from none on there is room for ever more; but where none at
        all leaves no room for the far rows, many may, and are sought from the other end.
        """

        def room(hot: Mapping[str, int]) -> int:
            return self.room(hot, tails, compressed, crowding)

        hot = dict.fromkeys(worth, 0)
        best: dict[str, int] | None = None
        for _ in range(TURNS):
            hot = self._hottest(worth, room(hot))
            if sum(hot.values()) * self.row <= room(hot):
                best = max(best or hot, hot, key=lambda rows: sum(rows.values()))
        if best is not None:
            return best
        budget = room({name: self.problem.tables[name] for name in worth})  # nothing far, so no room for it
        for turn in range(3 * TURNS):
            if budget <= 0:
                break
            found = self._hottest(worth, budget)
            left = room(found)
            if sum(found.values()) * self.row <= left:
                return found
            budget = left if turn < TURNS else min(left, budget * 19 // 20)
        return hot

    def _hottest(self, worth: Mapping[str, float], room: int) -> dict[str, int]:
        """Small tables whole, then rows by seconds saved, then the rest of what can be made whole."""
        tables, small, left = self.problem.tables, {}, room
        for name in sorted(worth, key=lambda name: tables[name]):
            needed = tables[name] * self.row
            if needed * SMALL > room or left - needed < room * 9 // 10:
                break
            small[name] = tables[name]
            left -= needed
        known = {name: self.problem.lookups[name] for name in worth if name not in small}
        chosen = choose_hot(known, worth, self.row, left, self.problem.batch_size) if known else {}
        return self._completed({name: small.get(name, chosen.get(name, 0)) for name in worth}, room)

    def _completed(self, hot: Mapping[str, int], room: int) -> dict[str, int]:
        """With the rows that nobody looked up, of small tables first: a table that is whole needs no second place."""
        left, found = room - sum(hot.values()) * self.row, dict(hot)
        for name in sorted(found, key=lambda name: self.problem.tables[name] - found[name]):
            missing = self.problem.tables[name] - found[name]
            if missing * self.row > left:
                break
            left -= missing * self.row
            found[name] += missing
        return found

    def room(
        self, hot: Mapping[str, int], tails: Mapping[str, Tail], compressed: Mapping[str, Method], crowding: float
    ) -> int:
        """Bytes of the device for hot rows, when these are hot."""
        tables = [
            TablePlan(name=name, num_rows=self.problem.tables[name], method=Dense(), hot_rows=hot[name], tail=tail)
            for name, tail in tails.items()
            if hot[name] < self.problem.tables[name]
        ]
        staging = staging_rows(self.problem, tables, crowding)
        placed = [compressed_table(name, self.problem.tables[name], method) for name, method in compressed.items()]
        limit = self.limits["device"]
        if self.one_memory:  # what the host needs comes out of the same
            rows = sum(table.num_rows for table in tables if table.tail == "host")
            marks = sum(table.num_rows for table in tables)
            limit = min(limit, self.limits["host"] - marks - (rows + sum(staging.values())) * self.row)
        return limit - device_bytes(self.problem, self.prefetch, placed, staging)


def compressed_table(name: str, rows: int, method: Method, hot_rows: int = 0) -> TablePlan:
    """A compressed table, its first rows exact."""
    stored = HotCold(hot_rows=hot_rows, cold=method) if hot_rows else method
    return TablePlan(name=name, num_rows=rows, method=stored, hot_rows=hot_rows, tail="compressed")


def device_bytes(problem: Problem, prefetch: int, compressed: Sequence[TablePlan], staging: Mapping[str, int]) -> int:
    """What the device holds beside dense rows: as `forecast.memory` counts it."""
    total = staging_bytes(problem, staging, prefetch) + problem.work.parameter_bytes + problem.work.state_bytes
    total += problem.work.step_bytes(problem.batch_size) + find_bytes(problem, staging, prefetch)
    return total + sum(
        compressed_bytes(table.method, table.num_rows, problem.dim, problem.optimizer).total for table in compressed
    )
