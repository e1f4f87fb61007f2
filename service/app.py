"""The FastAPI application: routes, probes, error answers and request ids around one engine.

The engine's life is `service.server`'s: the application only uses it, so tests may build one around any engine.
"""

import logging
import re
import time
import uuid
from typing import Any

import orjson
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.openapi.utils import get_openapi
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service import errors
from service.engine import Engine
from service.fetch import Fetcher
from service.keys import KeyRing
from service.openapi import BEFORE_ROUTES, add_schemas, add_security, error_responses
from service.protocol import PROBES
from service.routes import GoneError, router
from tp.settings import Settings

log = logging.getLogger("tpvision.http")

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_CODE_HEADER = "x-error-code"  # the body's `code`, where a log or a proxy sees it
_CLIENT_GONE = 499  # nginx's number; nobody is there to read it


def create_probe_app(engine: Engine) -> FastAPI:
    """Nothing but the probes, for a port of their own."""
    app = FastAPI(title="tpvision probes", openapi_url=None, redirect_slashes=False)
    _add_probes(app, engine)
    _add_error_handlers(app)
    app.add_middleware(RequestScope)
    return app


def create_app(settings: Settings, engine: Engine) -> FastAPI:
    """The application. Raises KeysError when the key file is set and cannot be used."""
    app = FastAPI(
        title="tpvision",
        description="Images to the merged vision tokens of Moonshot's MoonViT encoders.",
        version="0.1.0",
        docs_url="/docs",
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.engine = engine
    app.state.keys = None if settings.server.api_keys_file is None else KeyRing.read(settings.server.api_keys_file)
    app.state.fetcher = Fetcher(settings.urls) if settings.urls.fetch == "on" else None
    app.state.started_at = time.time()
    app.include_router(router)
    _add_probes(app, engine)
    _add_error_handlers(app)
    if settings.server.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.server.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["*"],
        )
    app.add_middleware(RequestScope)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    return app


class RequestScope:
    """Outermost of all: names the request, logs it, and answers whatever nobody else caught."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(scope)
        scope.setdefault("state", {})["request_id"] = request_id
        started = time.monotonic()
        status = 0
        code = ""

        async def send_named(message: Message) -> None:
            nonlocal status, code
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = request_id
                code = headers.get(_CODE_HEADER, "")
            await send(message)

        try:
            await self._app(scope, receive, send_named)
        except Exception:  # the process must survive any fault of ours; the client gets an answer, the log the reason
            log.exception("request %s: internal error", request_id)
            if status == 0:
                error = errors.InternalError("an internal error; the log has it under this answer's x-request-id")
                await _error_response(error)(scope, receive, send_named)
        finally:
            if scope["path"] not in PROBES or status >= 400:
                elapsed_ms = (time.monotonic() - started) * 1000
                outcome = f"{status} {code}".strip()
                log.info("%s %s %s %.1f ms id=%s", scope["method"], _route_of(scope), outcome, elapsed_ms, request_id)


def _add_probes(app: FastAPI, engine: Engine) -> None:
    @app.head("/livez", include_in_schema=False)
    @app.get("/livez", responses=error_responses(*BEFORE_ROUTES))
    async def livez() -> dict[str, str]:
        """Alive: the process and its event loop answer."""
        return {"status": "alive"}

    @app.head("/readyz", include_in_schema=False)
    @app.get("/readyz", responses=error_responses(*BEFORE_ROUTES, 503))
    async def readyz() -> dict[str, str]:
        """Ready: at least one group is loaded and warm, and the service is not draining."""
        engine.check_serving()
        return {"status": engine.state}

    @app.head("/health", include_in_schema=False)
    @app.get("/health", responses=error_responses(*BEFORE_ROUTES, 503))
    async def health() -> dict[str, str]:
        """The same as /readyz, where load balancers look for it."""
        return await readyz()


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(errors.ServiceError)
    async def service_error(request: Request, error: errors.ServiceError) -> Response:
        return _error_response(error)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        name = str(first["loc"][-1])[:64]
        reason = "unknown option" if first["type"] == "extra_forbidden" else first["msg"]
        return _error_response(errors.InvalidRequest(f"{reason}: {name}", param=name))

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        return _error_response(_from_starlette(error), headers=dict(error.headers or {}))

    @app.exception_handler(ClientDisconnect)
    @app.exception_handler(GoneError)
    async def gone(request: Request, error: Exception) -> Response:
        return Response(status_code=_CLIENT_GONE)


def _from_starlette(error: HTTPException) -> errors.ServiceError:
    match error.status_code:
        case 404:
            return errors.NotFound("there is nothing at this path; the routes are at /docs")
        case 405:
            return errors.MethodNotAllowed("this path does not take this method")
        case _:
            return errors.InvalidRequest("the request is malformed")


def _error_response(error: errors.ServiceError, headers: dict[str, str] | None = None) -> Response:
    headers = {_CODE_HEADER: error.code, **(headers or {})}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, round(error.retry_after_s)))
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return Response(orjson.dumps(error.as_dict()), error.status, headers, "application/json")


def _request_id(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value.decode("latin-1")):
            return str(value.decode("latin-1"))
    return uuid.uuid4().hex


def _route_of(scope: Scope) -> str:
    """The route's own path, never the client's text."""
    route = scope.get("route")
    return str(getattr(route, "path", "(no route)"))


def _openapi(app: FastAPI) -> dict[str, Any]:
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        app.openapi_schema = add_schemas(document)
        if app.state.keys is not None:
            add_security(app.openapi_schema)
    return app.openapi_schema
