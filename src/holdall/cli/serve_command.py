"""Command that serves a model over HTTP."""

from __future__ import annotations

from pathlib import Path

from holdall.cli.options import refuse_other_model, tyro


def serve(
    bundle: tyro.conf.Positional[Path],
    host: str = "127.0.0.1",
    port: int = 8000,
    name: str | None = None,
    max_rows: int = 4096,
    max_values: int = 131_072,
    max_bytes: str = "16MB",
    batch_rows: int = 1024,
    queue_rows: int = 16384,
    max_wait: float = 0.05,
    read_timeout: float = 10.0,
    idle_timeout: float = 75.0,
    shutdown_timeout: float = 30.0,
    max_connections: int = 1000,
    poll_seconds: float = 1.0,
    threads: int = 1,
    model: str | None = None,
    token_file: Path | None = None,
    request_log: Path | None = None,
) -> None:
    """Serve the model of a bundle over HTTP: JSON, Arrow and the Open Inference Protocol.

    Args:
        bundle: Bundle, run folder, or published folder.
        host: Address to listen on; only this machine can connect to the one when absent.
        port: Port to listen on; 0 for any that is free.
        name: Name of the model in the Open Inference Protocol; that of the folder when absent.
        max_rows: Most rows of one request.
        max_values: Most values in the bags and sequences of one request, and of those that are scored at once.
        max_bytes: Most bytes of the body of one request, such as 16MB.
        batch_rows: Most rows that are scored at once, unless one request has more.
        queue_rows: Most rows that wait; a request beyond them is answered with 429.
        max_wait: Seconds; while the oldest request in the queue has waited for longer, new ones are answered with 429.
        read_timeout: Seconds that a request may take to arrive, and an answer to be read.
        idle_timeout: Seconds that a connection may stay open without a request.
        shutdown_timeout: Seconds that requests may take to finish after SIGTERM or Ctrl-C.
        max_connections: Most open connections; one beyond them is answered with 503.
        poll_seconds: Seconds between two looks for a newer bundle in a published folder.
        threads: Threads that compute one batch.
        model: The model that it was trained with, where that is one of your own: package.module:Config.
        token_file: File with a bearer token that requests must have; the variable HOLDALL_TOKEN when absent, and no
            token when that is absent as well.
        request_log: File to append every scored request to, for `holdall verify`; none when absent.
    """
    from holdall.common.sizes import parse_bytes
    from holdall.serving.server.run import serve as run_server
    from holdall.serving.server.settings import ServerConfig, read_token

    refuse_other_model(bundle, model)
    config = ServerConfig(
        host=host,
        port=port,
        name=bundle.resolve().name if name is None else name,
        max_rows=max_rows,
        max_values=max_values,
        max_bytes=parse_bytes(max_bytes),
        batch_rows=batch_rows,
        queue_rows=queue_rows,
        max_wait=max_wait,
        read_timeout=read_timeout,
        idle_timeout=idle_timeout,
        shutdown_timeout=shutdown_timeout,
        max_connections=max_connections,
        poll_seconds=poll_seconds,
        threads=threads,
    )
    run_server(bundle, config, token=read_token(token_file), request_log=request_log)
