"""The OpenAPI document: what FastAPI reads off the handlers, and of bodies and errors what it cannot."""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from service import openapi_examples as examples
from service import schemas
from service.errors import BY_CODE
from service.unpack import EmbeddingsBody, EncodeBody, SGLangBody

Content = dict[str, Any]


def error_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The error answers of a route, from the one table in `service.errors`; all of them unless some are named."""
    responses: dict[int | str, dict[str, Any]] = {}
    for status in sorted({error.status for error in BY_CODE.values()}):
        if not statuses or status in statuses:
            codes = sorted(code for code, error in BY_CODE.items() if error.status == status)
            responses[status] = {
                "description": " or ".join(f"`{code}`" for code in codes),
                "content": {
                    "application/json": _json(
                        schemas.ErrorAnswer, {code: _reference("examples", code) for code in codes}
                    )
                },
            }
            if status in (429, 503):
                responses[status]["headers"] = {
                    "retry-after": {"schema": {"type": "integer"}, "description": "Seconds."}
                }
    return responses


# What any route may answer before the application sees the request: see service.protocol.
BEFORE_ROUTES = (400, 408, 431)

SGLANG_PATH = "/encode"  # SGLang's own


def _reference(kind: str, name: str) -> Content:
    return {"$ref": f"#/components/{kind}/{name}"}


def _json(model: type, of_it: Content) -> Content:
    return {"schema": _reference("schemas", model.__name__), "examples": of_it}


_BINARY: Content = {"schema": {"type": "string", "format": "binary"}}
_RAW: Content = {**_BINARY, "examples": examples.RAW_REQUESTS}
_HEADER_HELP = {
    "metadata": "With application/octet-stream: vLLM's description of the bytes.",
    "x-tpvision-images": "With application/octet-stream and application/x-npy: the `images` of the JSON answer.",
    "server-timing": "Milliseconds of each stage.",
    "etag": "Names these embeddings in this form.",
}


def _header(name: str) -> Content:
    return {"schema": {"type": "string"}, "description": _HEADER_HELP[name], "example": examples.HEADERS[name]}


ENCODE_OPENAPI: Content = {
    "parameters": [
        {
            "name": "If-None-Match",
            "in": "header",
            "required": False,
            "description": "ETags of earlier answers; where one of them is this answer's, 304. `*` has no effect.",
            "schema": {"type": "string"},
        }
    ],
    "requestBody": {
        "required": True,
        "content": {
            "image/*": _RAW,
            "application/octet-stream": _RAW,
            "application/json": _json(EncodeBody, examples.ENCODE_REQUESTS),
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "properties": {"file": {"type": "array", "items": {"type": "string", "format": "binary"}}},
                },
                "examples": examples.MULTIPART_REQUESTS,
            },
        },
    },
    "responses": {
        "200": {
            "description": "The embeddings, in the form that Accept picked. application/vnd.safetensors: tensors "
            "`embeddings` and `grid_thw`, and in the metadata `images` as JSON. application/octet-stream: the values "
            "alone, little-endian, image after image. application/x-npy: one image's array.",
            "headers": {name: _header(name) for name in _HEADER_HELP},
            "content": {
                form: _json(schemas.EncodeAnswer, examples.ENCODE_ANSWERS) if form.endswith("json") else _BINARY
                for form in schemas.FORMS
            },
        },
        "304": {
            "description": "What If-None-Match names is still right. Nothing was encoded.",
            "headers": {"etag": _header("etag")},
        },
    },
}

EMBEDDINGS_OPENAPI: Content = {
    "requestBody": {
        "required": True,
        "content": {"application/json": _json(EmbeddingsBody, examples.EMBEDDINGS_REQUESTS)},
    },
    "responses": {
        "200": {
            "description": "OpenAI's list of embeddings.",
            "content": {"application/json": _json(schemas.EmbeddingsAnswer, examples.EMBEDDINGS_ANSWERS)},
        }
    },
}

_HANDED_OFF: Content = {"200": {"content": {"application/json": {"example": examples.HANDOFF_ANSWER}}}}
CACHE_OPENAPI: Content = {"requestBody": ENCODE_OPENAPI["requestBody"], "responses": _HANDED_OFF}
SGLANG_OPENAPI: Content = {
    "requestBody": {
        "required": True,
        "content": {"application/json": _json(SGLangBody, examples.SGLANG_REQUESTS)},
    },
    "responses": _HANDED_OFF,
}

MODELS_RESPONSE: dict[int | str, Content] = {
    200: {"content": {"application/json": {"example": examples.MODELS_ANSWER}}}
}


def openapi_document(app: FastAPI, *, needs_keys: bool) -> dict[str, Any]:
    """The document of the application's routes. Its server is the folder that it is in, whatever a proxy calls that."""
    document = get_openapi(
        title=app.title,
        version=app.version,
        description=app.description,
        routes=app.routes,
        servers=[{"url": "."}],
    )
    _add_components(document)
    if needs_keys:
        _add_security(document)
    return document


def _add_components(document: dict[str, Any]) -> None:
    """What only `openapi_extra` and error answers refer to."""
    models = (
        EncodeBody,
        EmbeddingsBody,
        SGLangBody,
        schemas.EncodeAnswer,
        schemas.EmbeddingsAnswer,
        schemas.ErrorAnswer,
    )
    _, definitions = models_json_schema(
        [(model, "validation") for model in models], ref_template="#/components/schemas/{model}"
    )
    components = document.setdefault("components", {})
    components.setdefault("schemas", {}).update(definitions["$defs"])
    components["examples"] = {code: {"value": body} for code, body in examples.ERRORS.items()}


def _add_security(document: dict[str, Any]) -> None:
    """All but probes and documents needs a key."""
    document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    for path, methods in document["paths"].items():
        if path.startswith("/v1/") or path == SGLANG_PATH:
            for operation in methods.values():
                operation["security"] = [{"key": []}]
