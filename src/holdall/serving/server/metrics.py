"""Metrics of the server in the text format of Prometheus, with times in seconds.

They are counted by plain numbers on the event loop, and put into Prometheus' form when they are asked for.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from holdall.serving.server.batch_queue import BatchTimes

if TYPE_CHECKING:
    from holdall.serving.server.front import Front

SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
ROWS = (1, 4, 16, 64, 256, 1024, 4096, 16384)
OUTCOMES = {
    200: "ok",
    400: "bad_request",
    401: "unauthorized",
    404: "not_found",
    405: "bad_request",
    408: "slow",
    413: "too_large",
    415: "bad_request",
    422: "bad_rows",
    429: "queue_full",
    431: "too_large",
    503: "not_ready",
}
"""By status; others are `error` from 500 on, and `bad_request` below."""


class Histogram:
    """Counts of values by bucket."""

    def __init__(self, bounds: tuple[float, ...]):
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def buckets(self) -> Iterator[tuple[str, float]]:
        """Cumulative counts by upper bound."""
        count = 0
        for bound, number in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            count += number
            yield bound, count


class Metrics(Collector):
    """Counts of one server."""

    def __init__(self, front: Front):
        self.front = front
        self.requests: Counter[tuple[str, str]] = Counter()
        self.rows: Counter[str] = Counter()
        self.swaps: Counter[str] = Counter()
        self.unseen: Counter[str] = Counter()
        """Of models that were served before."""
        self.request_seconds = Histogram(SECONDS)
        self.queue_seconds = Histogram(SECONDS)
        self.compute_seconds = Histogram(SECONDS)
        self.batch_rows = Histogram(ROWS)
        self.registry = CollectorRegistry()
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    def observe_request(self, route: str, status: int, started: float) -> None:
        """Count a request that was answered."""
        outcome = OUTCOMES.get(status) or ("error" if status >= 500 else "bad_request" if status >= 400 else "ok")
        self.requests[route, outcome] += 1
        if route != "other":
            self.request_seconds.observe(time.monotonic() - started)

    def observe_batch(self, times: BatchTimes) -> None:
        """Count a batch that was scored."""
        self.compute_seconds.observe(times.compute)
        self.batch_rows.observe(times.num_rows)
        for waited in times.waited:
            self.queue_seconds.observe(waited)

    def text(self) -> bytes:
        """All metrics, as Prometheus reads them."""
        return generate_latest(self.registry)

    def collect(self) -> Iterable[Metric]:
        yield self._counter("requests", "Requests by route and outcome.", ("route", "outcome"), self.requests)
        rows = {(route,): number for route, number in self.rows.items()}
        yield self._counter("rows", "Rows that were scored, by route.", ("route",), rows)
        yield self._histogram(
            "request_seconds", "Seconds from the first byte of a request to its answer.", self.request_seconds
        )
        yield self._histogram("queue_seconds", "Seconds that requests waited to be scored.", self.queue_seconds)
        yield self._histogram("compute_seconds", "Seconds that batches took to encode and score.", self.compute_seconds)
        yield self._histogram("batch_rows", "Rows of the batches.", self.batch_rows)
        swaps = {(outcome,): self.swaps[outcome] for outcome in ("taken", "refused")}
        unseen = Counter(self.unseen)
        served = self.front.served  # after the swaps: one that is counted has put its model here
        if served is not None:
            unseen.update(served.scorer.num_unseen)
        by_feature = {(name,): number for name, number in unseen.items()}
        yield self._counter("unseen_ids", "Values that training did not have, by feature.", ("feature",), by_feature)
        yield self._counter("swaps", "Newer models, taken or refused.", ("outcome",), swaps)
        if self.front.request_log is not None:
            dropped = {(): self.front.request_log.num_dropped}
            yield self._counter("request_log_dropped", "Requests that were not logged.", (), dropped)
        yield GaugeMetricFamily("holdall_ready", "1 when requests are scored.", float(served is not None))
        yield GaugeMetricFamily("holdall_queue_rows", "Rows that wait or are being scored.", self.front.queue.num_rows)
        yield GaugeMetricFamily("holdall_body_bytes", "Bytes of bodies in memory.", self.front.body_bytes)
        if served is not None:
            yield GaugeMetricFamily("holdall_bundle_step", "Training step of the model.", served.scorer.step or 0)
            age = time.time() - served.made
            yield GaugeMetricFamily("holdall_bundle_age_seconds", "Seconds since the model was released.", age)
            yield GaugeMetricFamily(
                "holdall_bundle_loaded_seconds", "Seconds since it was loaded.", time.time() - served.loaded
            )

    def _counter(self, name: str, text: str, labels: tuple[str, ...], values: Any) -> CounterMetricFamily:
        family = CounterMetricFamily(f"holdall_{name}", text, labels=labels)
        for key, value in sorted(values.items()):
            family.add_metric(key, value)
        return family

    def _histogram(self, name: str, text: str, histogram: Histogram) -> HistogramMetricFamily:
        family = HistogramMetricFamily(f"holdall_{name}", text)
        family.add_metric([], list(histogram.buckets()), histogram.total)
        return family
