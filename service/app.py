"""The FastAPI application: routes, probes, metrics and error answers around one engine.

The engine's life is `service.server`'s: the application only uses it, so tests may build one around any engine.
"""

import logging
import time
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, PlainTextResponse
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service import errors
from service.docs_page import add_docs_page
from service.engine import Engine
from service.fetch import Fetcher
from service.handoff.routes import include_handoffs, prepare_handoffs
from service.keys import KeyRing
from service.openapi import BEFORE_ROUTES, error_responses, openapi_document
from service.playground import add_playground
from service.record import CLIENT_GONE, UNKNOWN_ROUTE, RequestRecord
from service.reporter import Reporter
from service.routes import GoneError, engine_of, router
from service.version import installed_version
from tp.settings import HandoffSettings, Settings

log = logging.getLogger("tpvision.http")

_CODE_HEADER = "x-error-code"  # the body's `code`, where a proxy sees it
_NO_TELEMETRY: Any = {
    "tracing": False,
    "metrics": False,
    "logs": False,
}  # FastAPI's own, whose spans hold query strings


def create_probe_app(engine: Engine, reporter: Reporter) -> FastAPI:
    """Nothing but the probes and metrics, for a port of their own."""
    app = FastAPI(telemetry=_NO_TELEMETRY, title="tpvision probes", openapi_url=None, redirect_slashes=False)
    app.state.engine = engine
    _add_probes(app)
    _add_error_handlers(app)
    app.add_middleware(RequestScope, reporter=reporter)
    return app


def create_app(settings: Settings, engine: Engine, reporter: Reporter) -> FastAPI:
    """The application. Raises KeysError or HandoffError when the key file or a hand-off is set and cannot be used."""
    app = create_routes(settings.handoff)
    app.state.engine = engine
    set_keys(app, read_keys(settings))
    app.state.fetcher = Fetcher(settings.urls) if settings.urls.fetch == "on" else None
    app.state.started_at = time.time()
    if settings.server.playground == "on":
        add_playground(app)
    prepare_handoffs(app, settings.handoff)
    _add_error_handlers(app)
    if settings.server.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.server.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["*"],
        )
    app.add_middleware(RequestScope, reporter=reporter)
    return app


def create_routes(handoff: HandoffSettings) -> FastAPI:
    """Every route, with nothing behind it yet: enough for the OpenAPI document."""
    app = FastAPI(
        telemetry=_NO_TELEMETRY,
        title="tpvision",
        description="Images to the merged vision tokens of Moonshot's MoonViT encoders.",
        version=installed_version(),
        openapi_url=None,
        redirect_slashes=False,
    )
    app.include_router(router)
    include_handoffs(app, handoff)
    _add_probes(app)
    add_docs_page(app)

    @app.get("/openapi.json", include_in_schema=False)
    async def openapi() -> Response:
        return JSONResponse(app.openapi_schema)

    return app


def read_keys(settings: Settings) -> KeyRing | None:
    """The keys that /v1/* needs; None where it needs none. Raises KeysError."""
    return None if settings.server.api_keys_file is None else KeyRing.read(settings.server.api_keys_file)


def set_keys(app: FastAPI, keys: KeyRing | None) -> None:
    """Let these be the keys in force."""
    app.state.keys = keys
    app.openapi_schema = openapi_document(app, needs_keys=keys is not None)


class RequestScope:
    """Outermost of all: begins and ends the request's record, and answers whatever nobody else caught."""

    def __init__(self, app: ASGIApp, reporter: Reporter) -> None:
        self._app = app
        self._reporter = reporter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if "refused" in scope["state"]:
            return
        record = scope["state"]["record"] = self._reporter.begin(scope)
        has_unsent_body = (b"expect", b"100-continue") in [(name, value.lower()) for name, value in scope["headers"]]

        async def receive_counted() -> Message:
            nonlocal has_unsent_body
            has_unsent_body = False  # reading is what asks for it
            message = await receive()
            record.bytes_in += len(message.get("body", b""))
            return message

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = record.status or message["status"]
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = record.request_id
                headers["traceparent"] = str(record.trace)
                if has_unsent_body:  # nobody knows whether the client now sends it or another request
                    headers["connection"] = "close"
            record.bytes_out += len(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, receive_counted, send_named)
        except Exception:  # the process must survive any fault of ours; the client gets an answer, the log the reason
            log.exception("request %s: internal error", record.request_id)
            if not record.status:
                error = errors.InternalError("an internal error; the log has it under this answer's x-request-id")
                await _answer_error(record, error)(scope, receive_counted, send_named)
        finally:
            record.note_gone()
            record.route = _route_of(scope)
            self._reporter.end(record)


def _route_of(scope: Scope) -> str:
    """The path of the route that answered."""
    return str(getattr(scope.get("route"), "path", UNKNOWN_ROUTE))


def _add_probes(app: FastAPI) -> None:
    @app.head("/livez", include_in_schema=False)
    @app.get("/livez", responses=error_responses(*BEFORE_ROUTES))
    async def livez() -> dict[str, str]:
        """Alive: the process and its event loop answer."""
        return {"status": "alive"}

    @app.head("/readyz", include_in_schema=False)
    @app.get("/readyz", responses=error_responses(*BEFORE_ROUTES, 503))
    async def readyz(request: Request) -> dict[str, str]:
        """Ready: at least one group is loaded and warm, and the service is not draining."""
        engine = engine_of(request)
        engine.check_serving()
        return {"status": engine.state}

    @app.head("/health", include_in_schema=False)
    @app.get("/health", responses=error_responses(*BEFORE_ROUTES, 503))
    async def health(request: Request) -> dict[str, str]:
        """The same as /readyz, where load balancers look for it."""
        return await readyz(request)

    @app.get("/metrics", responses=error_responses(*BEFORE_ROUTES), response_class=PlainTextResponse)
    async def metrics(request: Request) -> Response:
        """For Prometheus, in its text format or OpenMetrics, as Accept asks."""
        content, content_type = engine_of(request).metrics.expose(request.headers.get("accept", ""))
        return Response(content, media_type=content_type)


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(errors.ServiceError)
    async def service_error(request: Request, error: errors.ServiceError) -> Response:
        return _answer_error(request.state.record, error)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        _, *path = first["loc"]  # ("query", "id", 0)
        name = "".join(f"[{part}]" if isinstance(part, int) else part for part in path)[:64]
        reason = "unknown option" if first["type"] == "extra_forbidden" else first["msg"]
        return _answer_error(request.state.record, errors.InvalidRequest(f"{reason}: {name}", param=name))

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        return _answer_error(request.state.record, _from_starlette(error), dict(error.headers or {}))

    @app.exception_handler(ClientDisconnect)
    @app.exception_handler(GoneError)
    async def gone(request: Request, error: Exception) -> Response:
        request.state.record.note_gone()
        return Response(status_code=CLIENT_GONE)


def _from_starlette(error: HTTPException) -> errors.ServiceError:
    match error.status_code:
        case 404:
            return errors.NotFound("there is nothing at this path; the routes are at /docs")
        case 405:
            return errors.MethodNotAllowed("this path does not take this method")
        case _:
            return errors.InvalidRequest("the request is malformed")


def _answer_error(record: RequestRecord, error: errors.ServiceError, headers: dict[str, str] | None = None) -> Response:
    record.note_error(error)
    headers = {_CODE_HEADER: error.code, **(headers or {})}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, round(error.retry_after_s)))
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return Response(error.as_json(), error.status, headers, "application/json")
