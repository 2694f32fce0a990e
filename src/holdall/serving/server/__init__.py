"""Server of a model over HTTP: a bounded queue, one scoring thread, JSON, Arrow and the Open Inference Protocol."""

from __future__ import annotations

from importlib import import_module

from holdall.common.errors import MissingDependencyError

for package in ("fastapi", "uvicorn", "httptools", "msgspec", "prometheus_client"):
    try:
        import_module(package)
    except ModuleNotFoundError:
        raise MissingDependencyError(package, "serve", "the server") from None
