"""Front of the server: what each request is answered with.

Requests for scores are handled here by plain functions, from the decoded body to the queue and back; all else goes to
the FastAPI application of `pages`.
"""

from __future__ import annotations

import hmac
import logging
import re
from asyncio import AbstractEventLoop, Task
from collections.abc import Callable
from functools import partial
from typing import Any
from urllib.parse import unquote

import msgspec
import numpy as np

from holdall.common.errors import DataError
from holdall.serving.server import arrow_rows, inference_protocol
from holdall.serving.server.batch_queue import BatchQueue, QueueFullError, Result, Work
from holdall.serving.server.connection import Answer, Request, refused
from holdall.serving.server.metrics import Metrics
from holdall.serving.server.request_log import RequestLog
from holdall.serving.server.row_types import BodyError, TooManyRowsError
from holdall.serving.server.served import Ranking, Served, score_works
from holdall.serving.server.settings import ServerConfig

log = logging.getLogger("holdall.server")
RETRY = (b"retry-after", b"1")
OPEN_PATHS = frozenset({"/", "/v2/health/live", "/v2/health/ready"})
"""Paths that need no token: the page to try a row, which has nothing of the model, and the health checks."""
ROUTES = {"/score": "score", "/rank": "rank"}
JSON = "application/json"
ARROW = arrow_rows.CONTENT_TYPE.decode()

Encode = Callable[[Any], Answer]
"""Answer to scores."""


class Front:
    """Handler of all connections: routes, limits, token, queue and the model that is being served."""

    def __init__(self, config: ServerConfig, *, token: str | None = None, request_log: RequestLog | None = None):
        self.config = config
        self.max_bytes, self.max_connections = config.max_bytes, config.max_connections
        self.read_timeout, self.idle_timeout = config.read_timeout, config.idle_timeout
        self.served: Served | None = None
        """None until a model has been loaded and warmed up."""
        self.metrics = Metrics(self)
        self.queue = BatchQueue(
            score_works,
            batch_rows=config.batch_rows,
            batch_values=config.max_values,
            queue_rows=config.queue_rows,
            max_wait=config.max_wait,
            observe=self.metrics.observe_batch,
        )
        self.pages: Callable[[Request], Any] | None = None
        """Coroutine function that gives the answers of all other routes."""
        self.lag = 0.0
        """Seconds that the event loop is late: requests have waited so long before they are seen."""
        self.request_log = request_log
        self.body_bytes = 0
        self.name = config.name or "model"
        self._token = None if token is None else f"bearer {token}".encode()
        self._infer = re.compile(r"/v2/models/([^/]+)(?:/versions/([^/]+))?/infer")
        self._loop: AbstractEventLoop | None = None
        self._tasks: set[Task[None]] = set()

    @property
    def has_token(self) -> bool:
        return self._token is not None

    def swap(self, served: Served) -> None:
        """Serve another model from the next request on; those that were taken are scored by the old one."""
        old, self.served = self.served, served
        if old is not None:
            self.metrics.unseen.update(old.scorer.num_unseen)

    def start(self, loop: AbstractEventLoop) -> None:
        """Start the scoring thread."""
        self._loop = loop
        self.queue.start(loop.call_soon_threadsafe)

    # --- what every request passes -------------------------------------------------------------------------------

    def reserve(self, num_bytes: int) -> bool:
        if num_bytes > 0 and self.body_bytes + num_bytes > self.config.memory_bytes:
            return False
        self.body_bytes += num_bytes
        return True

    def observe(self, request: Request, status: int) -> None:
        self.metrics.observe_request(request.route, status, request.started)

    def early(self, request: Request) -> Answer | None:
        """Refusals that need no body: a missing token, a model that is not ready, a full queue."""
        path = request.path
        request.route = ROUTES.get(path) or (
            "infer" if path.endswith("/infer") and self._infer.fullmatch(path) else "other"
        )
        if self._token is not None and path not in OPEN_PATHS:
            given = request.headers.get(b"authorization", b"")
            scheme, _, token = given.partition(b" ")
            if not hmac.compare_digest(scheme.lower() + b" " + token.strip(), self._token):
                return refused(
                    401,
                    "a bearer token is needed: send it in the header Authorization",
                    (b"www-authenticate", b"Bearer"),
                )
        if request.route == "other":
            return None
        if request.method != "POST":
            return refused(405, f"{path} takes POST: send rows", (b"allow", b"POST"))
        if self.served is None:
            return refused(503, "the model is being loaded: try again later", RETRY)
        if request.headers.get(b"content-encoding", b"identity") != b"identity":
            return refused(415, "compressed bodies are not read: send the body as it is")
        if self.lag > self.config.max_wait:
            return refused(429, f"requests wait for more than {self.config.max_wait:g} s: try again later", RETRY)
        try:
            self.queue.check()
        except QueueFullError as error:
            return refused(429, str(error), RETRY)
        return None

    def handle(self, request: Request) -> None:
        if request.route == "other":
            return self._page(request)
        served = self.served
        assert served is not None
        try:
            if request.route == "score":
                self._score(request, served)
            elif request.route == "rank":
                self._rank(request, served)
            else:
                self._model_infer(request, served)
        except Exception as error:
            self._answer(request, self._refusal(error))
        return None

    # --- scores --------------------------------------------------------------------------------------------------

    def _score(self, request: Request, served: Served) -> None:
        kind = _media_type(request)
        if kind == JSON:
            rows = served.reader.rows(request.body)
            self._put(request, served, rows, len(rows), _json_scores, served.reader.num_values(rows))
        elif kind == ARROW:
            sent = arrow_rows.ArrowBody.of(request.body)
            served.reader.check_number(sent.num_rows)
            self._put(request, served, sent, sent.num_rows, _arrow_scores, sent.most_values(served.reader))
        else:
            self._wrong_type(request, f"{JSON} or {ARROW}")

    def _rank(self, request: Request, served: Served) -> None:
        if _media_type(request) != JSON:
            return self._wrong_type(request, JSON)
        user, items = served.reader.ranking(request.body)
        number = len(next(iter(items.values()), ()))
        values = served.reader.num_ranked_values(user, items)
        return self._put(request, served, Ranking(user, items), number, _json_scores, values)

    def _model_infer(self, request: Request, served: Served) -> None:
        found = self._infer.fullmatch(request.path)
        assert found is not None
        if unquote(found[1]) != self.name or found[2] not in (None, served.version):
            return self._answer(request, refused(404, f"there is no such model or version: this is '{self.name}'"))
        inference = inference_protocol.read_request(request.body, request.headers, served.reader)
        encode = partial(inference.answer, self.name, served.version)
        values = served.reader.num_values(inference.rows)
        return self._put(request, served, inference.rows, len(inference.rows), encode, values)

    def _put(self, request: Request, served: Served, rows: Any, num_rows: int, encode: Encode, num_values: int) -> None:
        work = Work(rows, num_rows, partial(self._done, request, encode), served, num_values)
        self.queue.put(work)
        request.cancel = partial(setattr, work, "is_cancelled", True)

    def _done(self, request: Request, encode: Encode, work: Work, result: Result) -> None:
        if work.is_cancelled:
            return None
        if isinstance(result, Exception):
            return self._answer(request, self._refusal(result))
        answer = encode(result)
        answer.headers += ((b"holdall-bundle", work.served.fingerprint),)
        self.metrics.rows[request.route] += work.num_rows
        self._answer(request, answer)
        if self.request_log is not None:
            self.request_log.put(work.served, work.rows, result)
        return None

    # --- answers -------------------------------------------------------------------------------------------------

    def _answer(self, request: Request, answer: Answer) -> None:
        request.connection.answer(request, answer)

    def _wrong_type(self, request: Request, wanted: str) -> None:
        self._answer(request, refused(415, f"the content type must be {wanted}: set the header Content-Type"))

    def _refusal(self, error: Exception) -> Answer:
        """The answer to an error; one that is ours is logged and not shown."""
        if isinstance(error, QueueFullError):
            return refused(429, str(error), RETRY)
        if isinstance(error, TooManyRowsError):
            return refused(413, str(error))
        if isinstance(error, BodyError):
            return refused(400, str(error))
        if isinstance(error, DataError):
            return refused(422, str(error))
        log.error("a request failed", exc_info=error)
        return refused(500, "the server failed to score these rows: its log has the reason")

    def _page(self, request: Request) -> None:
        assert self._loop is not None
        task = self._loop.create_task(self._run_page(request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run_page(self, request: Request) -> None:
        assert self.pages is not None
        try:
            answer = await self.pages(request)
        except Exception as error:
            answer = self._refusal(error)
        self._answer(request, answer)


def _media_type(request: Request) -> str:
    return request.headers.get(b"content-type", b"").partition(b";")[0].strip().lower().decode("latin-1")


def _json_scores(scores: Any) -> Answer:
    return Answer(200, msgspec.json.encode({"scores": np.asarray(scores, dtype=np.float32).tolist()}))


def _arrow_scores(scores: Any) -> Answer:
    return Answer(200, arrow_rows.write_scores(scores), arrow_rows.CONTENT_TYPE)
