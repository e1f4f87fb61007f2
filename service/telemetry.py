"""OpenTelemetry: a span for each request, and below it one for each stage, down to rank 0's forward.

Needs the extra `otel`; `service.server` imports this only where `server.traces` asks for it. Where spans go, how many
are kept and what the service is called there is told by OpenTelemetry's own variables: OTEL_EXPORTER_OTLP_ENDPOINT and
_HEADERS, OTEL_TRACES_SAMPLER, OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES.

Stages are noted in the record as they happen, and become spans when the request ends.
"""

import threading
import time

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import (
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)

from service.record import Interval, RequestRecord
from service.traceparent import TraceParent
from service.version import installed_version

_FLUSH_S = 5.0  # at the end, for what is not exported yet


class SpanExport:
    """Spans of requests, through a provider of our own."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("tpvision", installed_version())
        self._started: dict[str, Span] = {}  # by span id

    @classmethod
    def to_otlp(cls) -> "SpanExport":
        """Batches over OTLP/HTTP, from a thread of its own; spans are dropped where nobody takes them in time."""
        resource = Resource.create({"service.name": "tpvision", "service.version": installed_version()})
        provider = TracerProvider(resource=resource.merge(OTELResourceDetector().detect()), shutdown_on_exit=False)
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        return cls(provider)

    def begin(self, parent: TraceParent | None) -> TraceParent:
        """Start a request's span; the sampler decides whether it is kept."""
        span = self._tracer.start_span("request", context=_context(parent), kind=SpanKind.SERVER)
        context = span.get_span_context()
        trace = TraceParent(
            f"{context.trace_id:032x}", f"{context.span_id:016x}", is_sampled=context.trace_flags.sampled
        )
        self._started[trace.span_id] = span
        return trace

    def end(self, record: RequestRecord) -> None:
        """End it, and make those of its stages."""
        assert record.trace is not None
        span = self._started.pop(record.trace.span_id)
        span.update_name(f"{record.method} {record.route}")
        span.set_attributes(_attributes(record))
        if record.status >= 500:
            span.set_status(Status(StatusCode.ERROR))
        for name, interval in record.stages.items():
            below = self._add(span, name, interval)
            if name == "forward" and record.rank_0_forward is not None:
                self._add(below, "rank 0 forward", record.rank_0_forward)
        span.end(_unix_ns(record.ended))

    def stop(self) -> None:
        """Export what is left, for a few seconds at most."""
        flushing = threading.Thread(target=self._provider.shutdown, daemon=True)
        flushing.start()
        flushing.join(_FLUSH_S)

    def _add(self, parent: Span, name: str, interval: Interval) -> Span:
        start, end = interval
        span = self._tracer.start_span(name, context=set_span_in_context(parent), start_time=_unix_ns(start))
        span.end(_unix_ns(end))
        return span


def _context(parent: TraceParent | None) -> Context:
    """Never the context of the task: a request belongs to whom its header says."""
    if parent is None:
        return Context()
    flags = TraceFlags(TraceFlags.SAMPLED if parent.is_sampled else TraceFlags.DEFAULT)
    remote = SpanContext(int(parent.trace_id, 16), int(parent.span_id, 16), is_remote=True, trace_flags=flags)
    return set_span_in_context(NonRecordingSpan(remote), Context())


def _attributes(record: RequestRecord) -> dict[str, str | int]:
    """OpenTelemetry's names where it has any."""
    attributes: dict[str, str | int] = {
        "http.request.method": record.method,
        "http.route": record.route,
        "http.response.status_code": record.status,
        "http.request.body.size": record.bytes_in,
        "http.response.body.size": record.bytes_out,
        "error.type": record.code,
        "tpvision.request_id": record.request_id,
        "tpvision.num_images": len(record.plans or record.sizes),
        "tpvision.patches": sum(plan.patches for plan in record.plans),
        "tpvision.outcome": record.outcome or "",
        "tpvision.mode": record.mode or "",
    }
    return {name: value for name, value in attributes.items() if value != ""}


def _unix_ns(moment: float) -> int:
    """A moment of time.monotonic on the clock that spans use."""
    return time.time_ns() - int((time.monotonic() - moment) * 1e9)
