"""The beginning and the end of every request: its id and trace, then its counters, spans and log line.

`service.app` calls it around the application, and `service.protocol` for what is refused before.
"""

import logging
import re
import time
import uuid
from typing import Protocol

import structlog
from starlette.types import Scope

from service.errors import ServiceError
from service.metrics import Metrics
from service.protocol import PROBES
from service.record import RequestRecord
from service.traceparent import TraceParent, child_of, read_traceparent

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")

log: structlog.stdlib.BoundLogger = structlog.wrap_logger(
    logging.getLogger("tpvision.http"),
    processors=[structlog.stdlib.filter_by_level, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
    wrapper_class=structlog.stdlib.BoundLogger,
)


class Spans(Protocol):
    """Where spans are exported; see `service.telemetry`."""

    def begin(self, parent: TraceParent | None) -> TraceParent:
        """Start a request's span."""

    def end(self, record: RequestRecord) -> None:
        """End the span `record.trace`, with one for each stage below it."""

    def stop(self) -> None:
        """Export what is left, within a few seconds."""


class Reporter:
    """Tells of requests. One per process; `spans` is None where traces are not exported."""

    def __init__(self, metrics: Metrics, spans: Spans | None) -> None:
        self._metrics = metrics
        self._spans = spans

    def begin(self, scope: Scope) -> RequestRecord:
        """The record of a request, with the id and the trace that the client asked for, or new ones."""
        sent: dict[bytes, list[str]] = {b"x-request-id": [], b"traceparent": []}
        for name, value in scope["headers"]:
            if name in sent:
                sent[name].append(value.decode("latin-1").strip(" \t"))
        valid = (value for value in sent[b"x-request-id"] if _REQUEST_ID.fullmatch(value))
        parent = read_traceparent(sent[b"traceparent"])
        record = self._begin(next(valid, None) or uuid.uuid4().hex, parent, is_probe=scope["path"] in PROBES)
        record.method = scope["method"]
        record.started = scope["state"].get("started", record.started)
        return record

    def end(self, record: RequestRecord) -> None:
        """It was answered, or its client is gone."""
        if record.is_probe:
            return
        record.ended = time.monotonic()
        self._metrics.note_request(record)
        if self._spans is not None:
            self._spans.end(record)
        (log.info if record.status < 500 else log.warning)("request", **record.fields())

    def refuse(self, error: ServiceError) -> str:
        """Tell of what is refused before it is a request; the id that its answer gets."""
        record = self._begin(uuid.uuid4().hex, None, is_probe=False)
        record.note_error(error)
        self.end(record)
        return record.request_id

    def _begin(self, request_id: str, parent: TraceParent | None, *, is_probe: bool) -> RequestRecord:
        trace = child_of(parent) if self._spans is None or is_probe else self._spans.begin(parent)
        return RequestRecord(request_id, trace, is_probe)
