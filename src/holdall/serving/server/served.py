"""Model that is being served: a scorer with the decoders of its rows, and the scoring of a batch of requests."""

from __future__ import annotations

import datetime
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from holdall.common.errors import DataError
from holdall.common.files import read_json
from holdall.serving.bundle import BUNDLE_FILE, FORMAT, VERSION, Record, is_bundle
from holdall.serving.mapped_tensors import CURE
from holdall.serving.scorer import Scorer
from holdall.serving.server.arrow_rows import ArrowBody, ArrowReader
from holdall.serving.server.batch_queue import Result, Work
from holdall.serving.server.example import example_row
from holdall.serving.server.row_types import ArrowColumns, RowReader
from holdall.serving.server.settings import ServerConfig


@dataclass(frozen=True, slots=True)
class Ranking:
    """Request of `/rank`: values of one user, and columns of items."""

    user: dict[str, Any]
    items: dict[str, list[Any]]


class Served:
    """Scorer and decoders of its rows. Requests keep the one that decoded them, so a swap mixes nothing."""

    def __init__(self, scorer: Scorer, config: ServerConfig):
        self.scorer = scorer
        self.reader = RowReader(scorer.schema, scorer.reads, config.max_rows, config.max_values)
        self.arrow = ArrowReader(self.reader)
        self.fingerprint = scorer.fingerprint[:16].encode()
        self.version = str(scorer.step or 0)
        self.loaded = time.time()
        self.example = example_row(scorer)
        self.made = _made(scorer.path) or self.loaded

    def score(self, works: Sequence[Work]) -> list[Result]:
        """One result a request: its scores, or the error that only this request has."""
        results: dict[int, Result] = {}
        rows = [work for work in works if not isinstance(work.rows, Ranking)]
        if rows:
            self._together(rows, results, self._score_rows)
        for work in works:
            if isinstance(work.rows, Ranking):
                self._together([work], results, self._rank)
        return [results[id(work)] for work in works]

    def _together(self, works: list[Work], results: dict[int, Result], score: Any) -> None:
        """Score requests in one call; if a row of one is refused, each by itself, so that the others get theirs."""
        try:
            scores = score(works)
        except DataError as error:
            if len(works) == 1:
                results[id(works[0])] = error
                return
            for work in works:
                self._together([work], results, score)
            return
        start = 0
        for work in works:
            results[id(work)] = scores[start : start + work.num_rows]
            start += work.num_rows

    def _score_rows(self, works: list[Work]) -> Any:
        for work in works:
            if isinstance(work.rows, ArrowBody):
                work.rows = self.arrow.columns(work.rows)
        parts = [work.rows for work in works]
        if all(isinstance(part, ArrowColumns) for part in parts):
            batch = self.scorer.encode_arrays(self.reader.arrays(parts))
            if batch is not None:
                return self.scorer.score(batch)
        return self.scorer.score(self.reader.columns(parts))

    def _rank(self, works: list[Work]) -> Any:
        ranking: Ranking = works[0].rows
        return np.asarray(self.scorer.rank(ranking.user, ranking.items))


def score_works(works: Sequence[Work]) -> list[Result]:
    """One result a request, each scored by the model that decoded it."""
    first = works[0].served
    if all(work.served is first for work in works):
        return first.score(works)
    results: dict[int, Result] = {}
    for served in {id(work.served): work.served for work in works}.values():
        own = [work for work in works if work.served is served]
        results |= zip(map(id, own), served.score(own), strict=True)
    return [results[id(work)] for work in works]


def _made(path: Path) -> float | None:
    """When a bundle was released, in seconds since 1970; None for a run."""
    if not is_bundle(path):
        return None
    record = read_json(path / BUNDLE_FILE, Record, format=FORMAT, version=VERSION, cure=CURE)
    return datetime.datetime.fromisoformat(record.made).timestamp()
