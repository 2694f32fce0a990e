"""Choice of the hot rows that `two-fold` replicates on every process, by the seconds of its exchange.

    cut = choose_cut(lookups, row_bytes=64, batch_size=2048, world_size=4, links=hardware.collectives, budget=10**8,
                     stored_bytes=68, **cold_row_costs(hardware, stored_bytes=68))
    cut.hot_rows          # by table
    cut.shares()          # of the exchange's seconds, by kind of message

A cold row sends its id, its values and its gradient in all-to-alls in each step in which a process touches it: with
probability p = 1 - (1 - q)^n, for n lookups per step. A hot row sends its gradient in every all-reduce, touched or not;
or, where gathering the touched rows sends fewer bytes, W - 1 times its gradient with probability p. Either way a row
with a larger p gains more from being hot, whichever table it is in. So the rows of all tables are sorted by p, and only
the number of hot rows is searched: the seconds of every cut along that order are predicted, and the first minimum is
chosen.

Bytes alone hardly differ: a row that every process touches in every step sends 2 (W - 1) / W (r + 4) bytes when hot and
(W - 1) / W (2 r + 4) when cold. The rates decide: the seconds of all-reduce and all-to-all at these sizes, the latency
of the shortest all-reduce, and the work on cold rows beside the exchange: finding the rows that a batch needs
(`lookup_seconds` for each lookup of a cold row; popular rows have many) and reading and writing them at their owner
(`row_seconds` for each distinct row).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from holdall.common.errors import ConfigError
from holdall.planning.collective_cost import Links, Message, wire_share
from holdall.planning.lookup_counts import LookupCounts
from holdall.planning.machine.hardware import CollectiveRates, Hardware, Line, interpolate
from holdall.planning.messages import expected_maximum, index_bytes, replicated_bytes, sent_by_kind, two_fold_messages

Array = npt.NDArray[Any]

TOUCHED = 0.95
"""Without measured links, rows that a process touches in this share of its steps are hot: then they send at most about
a twentieth more bytes than as cold rows, and no lookup waits for them."""


@dataclass(frozen=True)
class Cut:
    """Hot rows of each table, and the expected messages and seconds of the exchange of a step."""

    hot_rows: dict[str, int]
    messages: tuple[Message, ...]
    seconds: dict[str, float] | None
    """Seconds of a step's exchange by kind of message; None where links were not measured."""
    reason: str
    """Reason for this cut, for messages."""

    @property
    def sent(self) -> dict[str, float]:
        """Bytes that a process sends in a step, by kind."""
        return sent_by_kind(self.messages)

    def shares(self) -> dict[str, float]:
        """Share of each kind in the seconds; in the bytes where links were not measured."""
        parts = self.sent if self.seconds is None else self.seconds
        total = sum(parts.values())
        return {kind: part / total if total else 0.0 for kind, part in parts.items()}

    def describe(self) -> str:
        """One line with the number of hot rows, the parts of the exchange, and the reason."""
        parts = sorted(self.shares().items(), key=lambda part: -part[1])
        kinds = ", ".join(f"{kind.replace('_', ' ')} {share:.0%}" for kind, share in parts if share >= 0.005)
        of = "bytes sent" if self.seconds is None else "exchange"
        hot, tables = sum(self.hot_rows.values()), sum(rows > 0 for rows in self.hot_rows.values())
        return f"{hot:,} hot rows of {tables} tables on every process; {of}: {kinds or 'nothing'}; {self.reason}"


def cold_row_costs(hardware: Hardware, stored_bytes: int) -> dict[str, float]:
    """`row_seconds` and `lookup_seconds` of `choose_cut`, for rows of `stored_bytes` with their optimizer state."""
    seconds = 0.0
    for lines, copy in ((hardware.gather, "to_device_pinned"), (hardware.scatter, "to_host_pinned")):
        points = sorted((int(size), line.each) for size, line in lines["host"].items())
        seconds += interpolate([size for size, _ in points], [each for _, each in points], stored_bytes)
        seconds += stored_bytes * hardware.copy.get(copy, Line()).each  # nothing is copied where the device is the CPU
    return {"row_seconds": seconds, "lookup_seconds": hardware.find.per_row}


def choose_cut(
    lookups: Mapping[str, LookupCounts],
    *,
    row_bytes: int,
    batch_size: int,
    world_size: int,
    links: Links | CollectiveRates | None = None,
    budget: int | None = None,
    stored_bytes: int | None = None,
    row_seconds: float = 0.0,
    lookup_seconds: float = 0.0,
) -> Cut:
    """The cut with the shortest predicted exchange, work on cold rows included.

    `row_bytes` are the bytes of a row in a message, `batch_size` the samples of one process. All hot rows take at most
    `budget` bytes at `stored_bytes` each (a row with its optimizer state; `row_bytes` when None). `links` are measured
    rates, such as `hardware.collectives`; without them, rows are hot that a process touches in `TOUCHED` of its steps.
    `cold_row_costs` gives the seconds of the work on cold rows. Rates may differ between hosts: processes use the cut
    of one of them.
    """
    for name, value in {"row_bytes": row_bytes, "batch_size": batch_size, "world_size": world_size}.items():
        if value < 1:
            raise ConfigError(f"{name} must be at least 1 to choose hot rows, not {value}")
    if budget is not None and budget < 0:
        raise ConfigError(f"the budget for hot rows must be 0 or more, not {budget}")
    links = Links(links) if isinstance(links, CollectiveRates) else links
    most = None if budget is None else budget // (stored_bytes or row_bytes)
    order = _Order.of(lookups, batch_size, most)
    total = sum(known.distinct(batch_size) for known in lookups.values())
    num_rows = sum(known.num_rows for known in lookups.values())
    if world_size == 1:
        place, reason = 0, "one process: nothing is exchanged, so nothing is replicated"
    elif links is None:
        place = int(np.searchsorted(-order.touched, -TOUCHED, side="right"))
        reason = (
            f"links were not measured: rows are hot that a process touches in {TOUCHED:.0%} of its steps (measure with "
            f"`torchrun --nproc-per-node {world_size} -m holdall hardware`)"
        )
    else:
        cold = np.maximum(total - order.mean, 0.0)
        seconds = _seconds(order, cold, num_rows, row_bytes, world_size, links)
        all_lookups = batch_size * sum(known.per_sample for known in lookups.values())
        seconds += row_seconds * cold + lookup_seconds * np.maximum(all_lookups - order.lookups, 0.0)
        place = int(np.argmin(seconds))
        reason = (
            f"exchange and work on cold rows are predicted to be shortest: {seconds[place] * 1e3:.3g} ms a step, "
            f"{seconds[0] * 1e3:.3g} ms without hot rows"
        )
    if most is not None and len(order.rows) > 1 and place == len(order.rows) - 1 and order.cut_short:
        reason += "; the bytes for hot rows are used up"
    hot_rows = order.hot_rows(place)
    messages = two_fold_messages(lookups, hot_rows, row_bytes=row_bytes, batch_size=batch_size, world_size=world_size)
    seconds_by_kind = None if links is None else links.by_kind(messages, world_size)
    return Cut(hot_rows, tuple(messages), seconds_by_kind, reason)


def _seconds(order: _Order, cold: Array, num_rows: int, row_bytes: int, world_size: int, links: Links) -> Array:
    """[K] seconds of `two_fold_messages` at every cut, without those of sizes, which are the same at all cuts."""
    id_bytes = index_bytes(num_rows / world_size)
    found = links.all_to_all(id_bytes * cold, world_size) + 2 * links.all_to_all(row_bytes * cold, world_size)
    touched = expected_maximum(order.mean, order.variance, world_size)
    whole, part = replicated_bytes(order.rows, touched, row_bytes)
    gathers = part * wire_share("all_gather", world_size) <= whole * wire_share("all_reduce", world_size)
    hot = np.where(gathers, links.all_gather(part, world_size), links.all_reduce(whole, world_size))
    return found + np.where(order.mean > 0, hot, 0.0)


@dataclass(frozen=True)
class _Order:
    """Groups of rows of all tables, sorted by the probability of being touched; at cut k the first k groups are hot."""

    names: list[str]
    table: Array
    """[K] table of each group."""
    size: Array
    """[K] rows of each group."""
    touched: Array
    """[K] probability that a process touches a row of the group, made non-increasing where ids are not sorted by it."""
    rows: Array
    """[K + 1] hot rows at each cut; the arrays below have the same shape."""
    mean: Array
    """Hot rows that a process touches, on average."""
    variance: Array
    lookups: Array
    """Lookups of hot rows, of one process."""
    cut_short: bool
    """Whether the budget excludes rows that are looked up."""

    @classmethod
    def of(cls, lookups: Mapping[str, LookupCounts], batch_size: int, most: int | None) -> _Order:
        names = list(lookups)
        touched = [lookups[name].touched_by_group(batch_size) for name in names]
        worth = np.concatenate([np.minimum.accumulate(values) for values in touched])  # only a prefix can be hot
        chance = np.concatenate(touched)
        size = np.concatenate([lookups[name].rows for name in names]).astype(np.int64)
        table = np.repeat(np.arange(len(names)), [len(values) for values in touched])
        order = np.argsort(-worth, kind="stable")
        order = order[worth[order] > 0]
        often = np.concatenate([lookups[name].counts / lookups[name].num_samples for name in names]) * batch_size
        size, table, chance, worth, often = (each[order] for each in (size, table, chance, worth, often))
        cut_short = most is not None and int(size.sum()) > most
        if cut_short:
            assert most is not None
            size = np.diff(np.minimum(np.concatenate([[0], np.cumsum(size)]), most))
            keep = size > 0
            size, table, chance, worth, often = (each[keep] for each in (size, table, chance, worth, often))

        def before(values: Array) -> Array:
            return np.concatenate([[0], np.cumsum(values)])

        return cls(
            names=names,
            table=table,
            size=size,
            touched=worth,
            rows=before(size),
            mean=before(size * chance),
            variance=before(size * chance * (1 - chance)),
            lookups=before(size * often),
            cut_short=cut_short,
        )

    def hot_rows(self, place: int) -> dict[str, int]:
        chosen = np.bincount(self.table[:place], weights=self.size[:place], minlength=len(self.names))
        return {name: int(count) for name, count in zip(self.names, chosen, strict=True)}
