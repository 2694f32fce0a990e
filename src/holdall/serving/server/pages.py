"""Pages and descriptions of the server: FastAPI's part of it."""

from __future__ import annotations

import importlib.resources
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from fastapi import FastAPI, HTTPException
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.exceptions import HTTPException as StarletteError

from holdall import __version__
from holdall.serving.server import inference_protocol
from holdall.serving.server.connection import Answer, Request
from holdall.serving.server.openapi import describe, describe_schema
from holdall.serving.server.served import Served

if TYPE_CHECKING:
    from holdall.serving.server.front import Front

SECURITY = (
    (b"x-content-type-options", b"nosniff"),
    (b"content-security-policy", b"default-src 'self' 'unsafe-inline'; img-src data:; frame-ancestors 'none'"),
    (b"referrer-policy", b"no-referrer"),
)


class Pages:
    """Application of all routes that do not score."""

    def __init__(self, front: Front):
        self.front = front
        self.app = app = FastAPI(title="Holdall", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)
        app.add_exception_handler(StarletteError, _error)
        app.get("/")(self.try_page)
        app.get("/docs")(self.docs)
        app.get("/openapi.json")(self.openapi)
        app.get("/schema")(self.schema)
        app.get("/metrics")(self.metrics)
        app.get("/v2")(self.server_metadata)
        app.get("/v2/health/live")(self.live)
        app.get("/v2/health/ready")(self.ready)
        for path in ("/v2/models/{name}", "/v2/models/{name}/versions/{version}"):
            app.get(path)(self.model)
            app.get(f"{path}/ready")(self.model_ready)

    async def answer(self, request: Request) -> Answer:
        """The answer of the application to a request."""
        start: dict[str, Any] = {}
        body: list[bytes] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": bytes(request.body), "more_body": False}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                start.update(message)
            else:
                body.append(message.get("body", b""))

        path, _, query = request.url.partition(b"?")
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "GET" if request.method == "HEAD" else request.method,
            "scheme": "http",
            "path": unquote(path.decode("latin-1")),
            "raw_path": path,
            "query_string": query,
            "root_path": "",
            "headers": list(request.headers.items()),
        }
        await self.app(scope, receive, send)
        headers = dict(start["headers"])
        kind = headers.pop(b"content-type", b"application/json")
        headers.pop(b"content-length", None)
        return Answer(start["status"], b"".join(body), kind, (*headers.items(), *SECURITY))

    def _served(self) -> Served:
        if self.front.served is None:
            raise HTTPException(503, "the model is being loaded: try again later", {"retry-after": "1"})
        return self.front.served

    def _model(self, name: str, version: str | None) -> Served:
        served = self._served()
        if name != self.front.name or version not in (None, served.version):
            raise HTTPException(404, f"there is no such model or version: this is '{self.front.name}'")
        return served

    async def try_page(self) -> Response:
        return _page("try.html")

    async def docs(self) -> Response:
        return _page("docs.html")

    async def openapi(self) -> Response:
        return JSONResponse(
            describe(self._served(), self.front.name, self.front.config, has_token=self.front.has_token)
        )

    async def schema(self) -> Response:
        return JSONResponse(describe_schema(self._served(), self.front.name, self.front.config))

    async def metrics(self) -> Response:
        return PlainTextResponse(self.front.metrics.text(), media_type="text/plain; version=0.0.4")

    async def server_metadata(self) -> Response:
        return JSONResponse({"name": "holdall", "version": __version__, "extensions": ["binary_tensor_data"]})

    async def live(self) -> Response:
        return JSONResponse({"live": True})

    async def ready(self) -> Response:
        self._served()
        return JSONResponse({"ready": True})

    async def model(self, name: str, version: str | None = None) -> Response:
        served = self._model(name, version)
        scorer = served.scorer
        return JSONResponse(inference_protocol.metadata(name, served.version, scorer.schema, scorer.reads))

    async def model_ready(self, name: str, version: str | None = None) -> Response:
        self._model(name, version)
        return JSONResponse({"name": name, "ready": True})


def _error(request: Any, error: Exception) -> Response:
    assert isinstance(error, StarletteError)
    return JSONResponse({"error": error.detail}, error.status_code, dict(error.headers or {}))


def _page(name: str) -> Response:
    text = importlib.resources.files("holdall.serving.server").joinpath(name).read_text(encoding="utf-8")
    return HTMLResponse(text)
