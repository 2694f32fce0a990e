"""Expected messages of a training step between processes, by strategy, from the lookup counts of the tables.

Bytes and kinds are those that `distributed.collectives` counts, for one pack of dense float32 tables. b is the samples of a
process, W the number of processes, r the bytes of a row, U the expected distinct rows of b samples
(`LookupCounts.distinct`).

| strategy | messages of a step |
| --- | --- |
| two-fold | all-to-all of the cold ids (4 U), of the rows (r U) and of their gradients (r U); hot gradients by all-reduce (r + 4 bytes for each hot row) or by gathering those touched (r + 4 bytes for each), whichever sends less |
| row-wise | two-fold without hot rows |
| table-wise | all-to-all of ids (4 bytes a lookup; of bags, 4 more for each length), of pooled vectors and of their gradients (r b for each feature) |
| data-parallel | gradients of all rows, as those of hot rows in two-fold |

Every strategy also sends the dense gradients, and a few integers (`sizes`) with the lengths of messages.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import NormalDist
from typing import Any

import numpy as np

from holdall.distributed.gradient_buckets import BUCKET_BYTES
from holdall.planning.collective_cost import Message, wire_share
from holdall.planning.lookup_counts import LookupCounts

NUMBER_BYTES = 8
"""Bytes of a message length, which is an int64."""


def two_fold_messages(
    lookups: Mapping[str, LookupCounts],
    hot_rows: Mapping[str, int],
    *,
    row_bytes: int,
    batch_size: int,
    world_size: int,
) -> list[Message]:
    """Messages of a two-fold step, with the first `hot_rows[name]` rows of each table on every process."""
    mean = variance = cold = 0.0
    num_cold = 0
    for name, known in lookups.items():
        hot = hot_rows.get(name, 0)
        mean += known.distinct(batch_size, 0, hot)
        variance += known.variance(batch_size) - known.variance(batch_size, hot)
        cold += known.distinct(batch_size, hot)
        num_cold += known.num_rows - hot
    num_hot = sum(hot_rows.get(name, 0) for name in lookups)
    id_bytes = index_bytes(num_cold / world_size)
    messages = [
        _all_to_all("sizes", NUMBER_BYTES * world_size, world_size),
        _all_to_all("cold_ids", id_bytes * cold, world_size),
        _all_to_all("cold_rows", row_bytes * cold, world_size),
        _all_gather("sizes", 3 * NUMBER_BYTES, world_size),
    ]
    if mean > 0:
        messages.append(
            replicated_message(
                "hot_gradients", num_hot, expected_maximum(mean, variance, world_size), row_bytes, world_size
            )
        )
    return [*messages, _all_to_all("cold_gradients", row_bytes * cold, world_size)]


def table_wise_messages(
    lookups: Mapping[str, LookupCounts],
    owners: Mapping[str, int],
    num_features: Mapping[str, int],
    *,
    row_bytes: int,
    batch_size: int,
    world_size: int,
    bagged: bool = False,
) -> list[Message]:
    """Messages of a table-wise step; rank `owners[name]` owns table `name`, which `num_features[name]` features
    share."""
    ids, vectors = [0.0] * world_size, [0] * world_size  # of one process's samples, by owner
    for name, known in lookups.items():
        ids[owners[name]] += known.per_sample * batch_size
        vectors[owners[name]] += num_features[name] * batch_size
    id_bytes = index_bytes(max(known.num_rows for known in lookups.values()) - 1)
    messages = [_all_gather("sizes", 3 * NUMBER_BYTES, world_size)]

    def exchange(kind: str, by_process: list[Any], each: int) -> None:
        # A process sends what its samples need, an owner what all samples need of it; the longer tensor counts.
        total, most = sum(by_process) * each, max(by_process) * world_size * each
        messages.append(_all_to_all(kind, total, world_size, max(total, most)))

    if bagged:
        exchange("lengths", vectors, 4)
    exchange("ids", ids, id_bytes)
    exchange("pooled_vectors", vectors, row_bytes)
    exchange("gradients_of_vectors", vectors, row_bytes)
    return messages


def data_parallel_messages(
    lookups: Mapping[str, LookupCounts], *, row_bytes: int, batch_size: int, world_size: int
) -> list[Message]:
    """Messages of a data-parallel step without the dense part: gradients of the touched rows, or of all rows."""
    mean = sum(known.distinct(batch_size) for known in lookups.values())
    variance = sum(known.variance(batch_size) for known in lookups.values())
    num_rows = sum(known.num_rows for known in lookups.values())
    touched = expected_maximum(mean, variance, world_size)
    return [
        _all_gather("sizes", NUMBER_BYTES, world_size),
        replicated_message("row_gradients", num_rows, touched, row_bytes, world_size),
    ]


def dense_message(parameter_bytes: int, world_size: int) -> Message:
    """Message of the dense gradients, in the buckets of `GradientBuckets`."""
    calls = max(1, -(-parameter_bytes // BUCKET_BYTES))
    sent = parameter_bytes * wire_share("all_reduce", world_size)
    return Message("dense_gradients", "all_reduce", parameter_bytes, sent, calls)


def replicated_message(kind: str, num_rows: int, touched: float, row_bytes: int, world_size: int) -> Message:
    """Message of the gradients of replicated rows, as `sum_over_ranks` sends them: reduced or gathered, by bytes."""
    whole, part = replicated_bytes(num_rows, touched, row_bytes)
    reduced, gathered = whole * wire_share("all_reduce", world_size), part * wire_share("all_gather", world_size)
    if gathered <= reduced:
        return Message(kind, "all_gather", float(part), float(gathered))
    return Message(kind, "all_reduce", float(whole), float(reduced))


def replicated_bytes(num_rows: Any, touched: Any, row_bytes: int) -> tuple[Any, Any]:
    """Bytes of two tensors: gradients of all rows with a flag each, and of the touched rows with their row number."""
    return num_rows * (row_bytes + 4), touched * (row_bytes + np.where(np.asarray(num_rows) < 2**31, 4, 8))


def index_bytes(largest: float) -> int:
    """Bytes of a row number in a message."""
    return 4 if largest < 2**31 else 8


def expected_maximum(mean: Any, variance: Any, world_size: int) -> Any:
    """Expected maximum over W processes of a normal variable with this mean and variance (Blom's formula)."""
    if world_size == 1:
        return mean
    return mean + np.sqrt(variance) * NormalDist().inv_cdf((world_size - 0.375) / (world_size + 0.25))


def _all_to_all(kind: str, num_bytes: float, world_size: int, busiest: float | None = None) -> Message:
    sent = num_bytes * wire_share("all_to_all", world_size)
    return Message(kind, "all_to_all", num_bytes if busiest is None else busiest, sent)


def _all_gather(kind: str, num_bytes: float, world_size: int) -> Message:
    return Message(kind, "all_gather", num_bytes, num_bytes * wire_share("all_gather", world_size))


def sent_by_kind(messages: Iterable[Message]) -> dict[str, float]:
    """Average bytes that a process sends, by kind."""
    found: dict[str, float] = {}
    for message in messages:
        found[message.kind] = found.get(message.kind, 0.0) + message.sent
    return found
