"""Run of the server: from the first socket to the last answer."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import uvicorn

from holdall.common.errors import ConfigError
from holdall.serving.scorer import Scorer
from holdall.serving.server.connection import Connection
from holdall.serving.server.front import Front
from holdall.serving.server.pages import Pages
from holdall.serving.server.request_log import RequestLog
from holdall.serving.server.served import Served
from holdall.serving.server.settings import ServerConfig
from holdall.serving.server.source import Source, SwapThread, source_of

log = logging.getLogger("holdall.server")
CHECK_SECONDS = 0.2
"""Seconds between two looks for connections that take too long."""
LAG_SECONDS = 0.02
"""Seconds between two looks at how late the event loop is."""
SWITCH_SECONDS = 0.0005
"""Longest time that the scoring thread keeps the event loop from running Python; Python's own 5 ms are felt in p99."""


class Server(uvicorn.Server):
    """HTTP server of one source of models.

    `run` returns after SIGTERM or Ctrl-C, or `stop`, when all requests that were taken have their answers.
    """

    def __init__(
        self,
        source: Source,
        config: ServerConfig | None = None,
        *,
        token: str | None = None,
        request_log: Path | None = None,
    ):
        self.settings = config or ServerConfig()
        self.request_log = None if request_log is None else RequestLog(request_log)
        self.front = Front(self.settings, token=token, request_log=self.request_log)
        self.front.pages = Pages(self.front).answer
        self.address = ""
        """URL of the server, once it listens."""
        self.failure: Exception | None = None
        self.ready = threading.Event()
        """Set when the first model is served, or has failed to load."""
        self._swaps = SwapThread(
            source,
            self._swap_soon,
            poll_seconds=self.settings.poll_seconds,
            on_refused=partial(self._count_swap, "refused"),
            on_first_failure=self._fail,
        )
        super().__init__(
            uvicorn.Config(
                _no_application,
                host=self.settings.host,
                port=self.settings.port,
                http=partial(Connection, self.front),  # type: ignore[arg-type]
                ws="none",
                interface="asgi3",
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_graceful_shutdown=int(self.settings.shutdown_timeout) or 1,
            )
        )

    def run(self, sockets: Any = None) -> None:
        """Serve until the end; raises what kept the first model from being loaded."""
        interval = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_SECONDS)
        try:
            super().run(sockets)
        finally:
            sys.setswitchinterval(interval)
            if self.request_log is not None:
                self.request_log.close()
        if self.failure is not None:
            raise self.failure

    def stop(self) -> None:
        """End gracefully, from any thread."""
        self.should_exit = True

    async def startup(self, sockets: Any = None) -> None:
        try:
            await super().startup(sockets)
        except SystemExit:
            raise ConfigError(
                f"the server cannot listen on {self.settings.host}, port {self.settings.port}: choose a free --port, "
                f"and a --host of this machine"
            ) from None
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        self.address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        loop = asyncio.get_running_loop()
        self.front.start(loop)
        self._timer = loop.call_later(CHECK_SECONDS, self._check_times)
        self._lag_timer = loop.call_later(LAG_SECONDS, self._check_lag, loop.time() + LAG_SECONDS)
        self._swaps.start()

    async def shutdown(self, sockets: Any = None) -> None:
        self._swaps.stop()
        await super().shutdown(sockets)
        self._timer.cancel()
        self._lag_timer.cancel()
        await asyncio.get_running_loop().run_in_executor(None, self.front.queue.stop)
        self.ready.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Ends by SIGTERM and Ctrl-C as uvicorn does, but without raising the signal again in the end."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        handlers = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _check_times(self) -> None:
        now = time.monotonic()
        for connection in list(self.server_state.connections):
            connection.check_time(now)  # type: ignore[union-attr]
        self._timer = asyncio.get_running_loop().call_later(CHECK_SECONDS, self._check_times)

    def _check_lag(self, expected: float) -> None:
        loop = asyncio.get_running_loop()
        self.front.lag = loop.time() - expected
        self._lag_timer = loop.call_later(LAG_SECONDS, self._check_lag, loop.time() + LAG_SECONDS)

    # --- models, called by the thread that loads them ------------------------------------------------------------

    def _swap_soon(self, scorer: Scorer) -> None:
        served = Served(scorer, self.settings)
        is_first = self.front.served is None
        if is_first:
            gc.collect()
            gc.freeze()  # what was loaded stays, and need not be looked through while requests are answered
        self.front.swap(served)
        self.ready.set()
        if is_first:
            log.info("serving %s, step %s, on %s", scorer.path, scorer.step, self.address)
        else:
            log.info("swapped to %s, step %s", scorer.path, scorer.step)
            self._count_swap("taken")

    def _count_swap(self, outcome: str) -> None:
        self.front.metrics.swaps[outcome] += 1

    def _fail(self, error: Exception) -> None:
        self.failure = error
        self.should_exit = True
        self.ready.set()


async def _no_application(scope: Any, receive: Any, send: Any) -> None:
    """In the place of uvicorn's application: `Connection` answers by itself."""


def serve(
    path: str | Path,
    config: ServerConfig | None = None,
    *,
    token: str | None = None,
    request_log: str | Path | None = None,
) -> None:
    """Serve a bundle, a run, or the current model of a published folder, until SIGTERM or Ctrl-C.

    Requests must have the bearer `token`, if there is one. Scored requests are appended to the file `request_log`.
    """
    config = config or ServerConfig(name=Path(path).resolve().name)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    logging.getLogger("uvicorn").setLevel(logging.ERROR)
    if not config.is_loopback:
        secret = "with a token" if token else "without a token (--token-file)"
        warnings.warn(
            f"--host {config.host} lets other machines connect, {secret} and without encryption: keep it behind a "
            f"proxy with TLS",
            stacklevel=2,
        )
    torch.set_num_threads(config.threads)
    log_path = None if request_log is None else Path(request_log)
    Server(source_of(Path(path)), config, token=token, request_log=log_path).run()
