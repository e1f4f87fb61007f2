"""What the OpenAPI document says of bodies and errors that FastAPI cannot read off the handlers."""

from typing import Any

from pydantic.json_schema import models_json_schema

from service import schemas
from service.errors import BY_CODE
from service.unpack import EXAMPLE_IMAGE, EmbeddingsBody, EncodeBody


def error_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The error answers of a route, from the one table in `service.errors`; all of them unless some are named."""
    responses: dict[int | str, dict[str, Any]] = {}
    for status in sorted({error.status for error in BY_CODE.values()}):
        if not statuses or status in statuses:
            codes = sorted(code for code, error in BY_CODE.items() if error.status == status)
            responses[status] = {
                "model": schemas.ErrorAnswer,
                "description": " or ".join(f"`{code}`" for code in codes),
            }
    return responses


# What any route may answer before the application sees the request: see service.protocol.
BEFORE_ROUTES = (400, 408, 431)

_BINARY = {"schema": {"type": "string", "format": "binary"}}


def _reference(model: type) -> dict[str, Any]:
    return {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}}


ENCODE_OPENAPI: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "image/*": _BINARY,
            "application/octet-stream": _BINARY,
            "application/json": {**_reference(EncodeBody), "example": {"images": [EXAMPLE_IMAGE]}},
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "properties": {"file": {"type": "array", "items": {"type": "string", "format": "binary"}}},
                }
            },
        },
    },
    "responses": {
        "200": {
            "description": "The embeddings, in the form that Accept picked.",
            "content": {
                form: (_reference(schemas.EncodeAnswer) if form.endswith("json") else _BINARY) for form in schemas.FORMS
            },
        }
    },
}

EMBEDDINGS_OPENAPI: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {"application/json": {**_reference(EmbeddingsBody), "example": {"input": EXAMPLE_IMAGE}}},
    },
    "responses": {
        "200": {
            "description": "OpenAI's list of embeddings.",
            "content": {"application/json": _reference(schemas.EmbeddingsAnswer)},
        }
    },
}


def add_schemas(document: dict[str, Any]) -> dict[str, Any]:
    """The document with the models that only `openapi_extra` refers to."""
    models = (EncodeBody, EmbeddingsBody, schemas.EncodeAnswer, schemas.EmbeddingsAnswer)
    _, definitions = models_json_schema(
        [(model, "validation") for model in models], ref_template="#/components/schemas/{model}"
    )
    document.setdefault("components", {}).setdefault("schemas", {}).update(definitions["$defs"])
    return document


def add_security(document: dict[str, Any]) -> dict[str, Any]:
    """The document of a service with keys: everything below /v1 needs one."""
    document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    for path, methods in document["paths"].items():
        if path.startswith("/v1/"):
            for operation in methods.values():
                operation["security"] = [{"key": []}]
    return document
