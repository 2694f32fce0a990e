"""Descriptions of the server for people and programs: the schema of rows with an example, and OpenAPI."""

from __future__ import annotations

from typing import Any

from holdall import __version__
from holdall.data.rows import FLOAT32_MAX
from holdall.data.schema import Feature
from holdall.serving.server.arrow_rows import CONTENT_TYPE
from holdall.serving.server.inference_protocol import TYPES
from holdall.serving.server.served import Served
from holdall.serving.server.settings import ServerConfig

ARROW = CONTENT_TYPE.decode()
WHOLE = {
    "minimum": -(2**63),
    "maximum": 2**64 - 1,
    "description": "A whole number is written without a point: the answer to 1.0 is 422.",
}
"""Range of whole numbers in a feature."""
RANKING_RULE = (
    "Each column of a row is given either by the user or by every item, never by both, and the items give at least "
    "one. Otherwise the answer is 422."
)
INPUTS_RULE = "Each column of a row is one input, and all inputs have equally many rows. Otherwise the answer is 422."
SHAPE_RULE = (
    "`data` has as many values as the product of `shape`, all of `datatype`. `shape` is [rows], or [rows, values] for "
    "a bag. Otherwise the answer is 422."
)


def describe_schema(served: Served, name: str, config: ServerConfig) -> dict[str, Any]:
    """Content of `/schema`: columns of a row, limits, and a request to start from."""
    scorer = served.scorer
    features = scorer.inputs
    return {
        "name": name,
        "step": scorer.step,
        "fingerprint": scorer.fingerprint,
        "label": scorer.schema.label,
        "dense": [{"name": column.name, "transform": column.transform} for column in scorer.schema.dense],
        "features": [{"name": f.name, "kind": f.kind, "max_length": f.max_length} for f in features],
        "limits": {"rows": config.max_rows, "values": config.max_values, "bytes": config.max_bytes},
        "example": {"rows": [served.example]},
    }


def values_of_number() -> dict[str, Any]:
    """JSON schema of a number."""
    return {"type": ["number", "null"], "minimum": -FLOAT32_MAX, "maximum": FLOAT32_MAX}


def describe(served: Served, name: str, config: ServerConfig, *, has_token: bool) -> dict[str, Any]:
    """OpenAPI description of every route, with an example that can be sent as it is."""
    scorer = served.scorer
    names = list(served.reader.names)
    values = {column.name: values_of_number() for column in scorer.schema.dense}
    number = values_of_number()
    values |= {f.name: _feature(f) if f.bucket is None else number for f in scorer.inputs}
    row = {"type": "object", "properties": values, "required": names, "example": served.example}
    half = len(names) // 2
    user = {key: served.example[key] for key in names[:half]}
    item = {key: served.example[key] for key in names[half:]}
    rows = {"type": "array", "minItems": 1, "maxItems": config.max_rows}
    schemas: dict[str, Any] = {
        "Row": row,
        "Rows": _object({"rows": {**rows, "items": _ref("Row")}}, "rows"),
        "Values": {"type": "object", "properties": values},
        "Ranking": _object({"user": _ref("Values"), "items": {**rows, "items": _ref("Values")}}, "user", "items")
        | {"description": RANKING_RULE},
        "Scores": _object(
            {"scores": {"type": "array", "items": {"type": "number", "minimum": 0, "maximum": 1}}}, "scores"
        ),
        "Error": _object({"error": {"type": "string"}}, "error"),
        **_inference(names),
    }
    scores = {200: ("Scores, in the order of the rows.", {"application/json": _ref("Scores")})}
    arrow = {
        ARROW: {"type": "string", "format": "binary", "description": "Arrow IPC stream with a column for each name"}
    }
    score_bodies = {"application/json": _ref("Rows"), **arrow}
    ranking = {"user": user, "items": [item, item]}
    model = "/v2/models/{name}"
    parameter = {"name": "name", "in": "path", "required": True, "schema": {"type": "string", "enum": [name]}}
    paths: dict[str, Any] = {
        "/score": {"post": _post("Score rows", score_bodies, {"rows": [served.example]}, scores)},
        "/rank": {"post": _post("Score items for one user", {"application/json": _ref("Ranking")}, ranking, scores)},
        f"{model}/infer": {
            "parameters": [parameter],
            "post": _post(
                "Score tensors (Open Inference Protocol)",
                {"application/json": _ref("Inference")},
                inference_example(served),
            ),
        },
        "/schema": {"get": _get("Columns of a row, limits, and an example")},
        "/metrics": {"get": _get("Metrics of Prometheus", "text/plain")},
        "/v2": {"get": _get("Name and version of the server")},
        "/v2/health/live": {"get": _get("Whether the server runs")},
        "/v2/health/ready": {"get": _get("Whether requests are scored")},
        model: {"parameters": [parameter], "get": _get("Inputs and output of the model")},
        f"{model}/ready": {"parameters": [parameter], "get": _get("Whether requests are scored")},
    }
    found: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": f"Holdall: {name}", "version": __version__, "description": "Scores of raw rows."},
        "paths": paths,
        "components": {"schemas": schemas},
    }
    if has_token:
        found["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        found["security"] = [{"token": []}]
    return found


def inference_example(served: Served) -> dict[str, Any]:
    """A request of the Open Inference Protocol with the example row."""
    dense, inputs = set(served.reader.dense), []
    for name, value in served.example.items():
        data = value if isinstance(value, list) else [value]
        shape = [1, len(data)] if isinstance(value, list) else [1]
        inputs.append({"name": name, "datatype": "FP32" if name in dense else "BYTES", "shape": shape, "data": data})
    return {"inputs": inputs}


def _inference(names: list[str]) -> dict[str, Any]:
    """Schemas of a request of the Open Inference Protocol, which may have more fields than these."""
    inputs = {"type": "array", "items": _ref("Input"), "minItems": len(names), "description": INPUTS_RULE}
    values = {
        "name": {"enum": names},
        "datatype": {"enum": ["BYTES", *TYPES]},
        "shape": {"type": "array", "items": {"type": "integer", "minimum": 1}, "minItems": 1, "maxItems": 2},
        "data": {"type": "array", "minItems": 1},
    }
    return {
        "Inference": _object({"inputs": inputs, "id": {"type": ["string", "null"]}}, "inputs", is_closed=False),
        "Input": _object(values, *values, is_closed=False) | {"description": SHAPE_RULE},
    }


def _feature(feature: Feature) -> dict[str, Any]:
    if feature.one_hot:
        return {"type": ["string", "integer", "boolean", "null"], **WHOLE}
    return {"type": ["array", "null"], "items": {"type": ["string", "integer"], **WHOLE}}


def _ref(name: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{name}"}


def _object(properties: dict[str, Any], *required: str, is_closed: bool = True) -> dict[str, Any]:
    made = {"type": "object", "properties": properties, "required": list(required)}
    return made | {"additionalProperties": False} if is_closed else made


def _post(summary: str, bodies: dict[str, Any], example: Any, answers: dict[int, Any] | None = None) -> dict[str, Any]:
    content: dict[str, Any] = {kind: {"schema": schema} for kind, schema in bodies.items()}
    content["application/json"]["example"] = example
    responses = {"200": {"description": "Scores.", "content": {"application/json": {"schema": {"type": "object"}}}}}
    for status, (description, kinds) in (answers or {}).items():
        responses[str(status)] = {
            "description": description,
            "content": {kind: {"schema": s} for kind, s in kinds.items()},
        }
        if ARROW in bodies:
            responses[str(status)]["content"][ARROW] = {"schema": {"type": "string", "format": "binary"}}  # type: ignore[index]
    return {"summary": summary, "requestBody": {"required": True, "content": content}, "responses": responses | _ERRORS}


def _get(summary: str, kind: str = "application/json") -> dict[str, Any]:
    return {"summary": summary, "responses": {"200": {"description": summary, "content": {kind: {}}}} | _GET_ERRORS}


def _errors(**sentences: str) -> dict[str, Any]:
    content = {"application/json": {"schema": _ref("Error")}}
    return {
        status.removeprefix("s"): {"description": sentence, "content": content}
        for status, sentence in sentences.items()
    }


_GET_ERRORS = _errors(
    s401="The token is missing or wrong.", s404="There is no such model or version.", s503="The model is being loaded."
)
_ERRORS = _GET_ERRORS | _errors(
    s400="The body is not of the format that its content type says.",
    s408="The request took too long to arrive.",
    s413="The request has too many rows, values or bytes.",
    s415="The content type is not read here.",
    s422="A row cannot be scored: the error names row and feature.",
    s429="Too many rows wait: try again after the seconds of the header Retry-After.",
)
