"""Spans of requests, with the SDK's exporter to memory, and over OTLP to a collector on loopback."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased
from opentelemetry.trace import SpanKind, StatusCode
from running import GOLDEN, OWN_STAGES, ROOT, RunningService

from service.errors import DeadlineExceeded
from service.record import STAGES, RequestRecord, Stage
from service.telemetry import SpanExport
from service.traceparent import TraceParent, read_traceparent

SMALL = (GOLDEN / "images" / "rgb_64x48.png").read_bytes()
PARENT = TraceParent("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7", is_sampled=True)


@pytest.fixture
def memory() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def spans(memory: InMemorySpanExporter) -> SpanExport:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(memory))
    return SpanExport(provider)


def ended(spans: SpanExport, parent: TraceParent | None = PARENT) -> RequestRecord:
    """A request that took 0.9 s, 0.1 s a stage, and has just ended."""
    now = time.monotonic()
    record = RequestRecord("the-id", spans.begin(parent), started=now - 0.9, ended=now)
    record.method, record.route, record.status = "POST", "/v1/encode", 200
    for index, stage in enumerate(STAGES):
        record.stages[stage] = (record.started + index / 10, record.started + (index + 1) / 10)
    forward_start, forward_end = record.stages["forward"]
    record.rank_0_forward = (forward_start + 0.05, forward_end)
    spans.end(record)
    return record


def by_name(memory: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {span.name: span for span in memory.get_finished_spans()}


def test_each_stage_is_a_span_below_the_requests(spans: SpanExport, memory: InMemorySpanExporter) -> None:
    record = ended(spans)
    found = by_name(memory)
    root = found.pop("POST /v1/encode")
    assert root.kind is SpanKind.SERVER and root.context is not None and root.parent is not None
    assert (root.parent.trace_id, root.parent.span_id) == (int(PARENT.trace_id, 16), int(PARENT.span_id, 16))
    assert record.trace == TraceParent(PARENT.trace_id, f"{root.context.span_id:016x}", is_sampled=True)
    rank_0 = found.pop("rank 0 forward")
    assert rank_0.parent == found["forward"].context
    assert list(found) == list(STAGES)
    assert all(span.parent == root.context for span in found.values())


def test_spans_lie_where_the_stages_were(spans: SpanExport, memory: InMemorySpanExporter) -> None:
    ended(spans)
    found = by_name(memory)
    now = time.time_ns()
    for index, stage in enumerate(STAGES):
        start, end = found[stage].start_time, found[stage].end_time
        assert start is not None and end is not None
        assert end - start == pytest.approx(1e8, abs=1e7)
        assert now - start == pytest.approx(9e8 - index * 1e8, abs=2e8)


def test_a_span_says_what_the_request_was(spans: SpanExport, memory: InMemorySpanExporter) -> None:
    ended(spans)
    attributes = by_name(memory)["POST /v1/encode"].attributes
    assert attributes is not None
    assert attributes["http.route"] == "/v1/encode"
    assert attributes["http.response.status_code"] == 200
    assert attributes["tpvision.request_id"] == "the-id"
    assert "error.type" not in attributes


def test_a_failure_is_marked(spans: SpanExport, memory: InMemorySpanExporter) -> None:
    record = RequestRecord("the-id", spans.begin(None), method="POST", route="/v1/encode")
    record.note_error(DeadlineExceeded("too late"))
    record.ended = time.monotonic()
    spans.end(record)
    (span,) = memory.get_finished_spans()
    assert span.status.status_code is StatusCode.ERROR
    assert span.parent is None and span.attributes is not None
    assert span.attributes["error.type"] == "deadline_exceeded"


def test_what_the_caller_does_not_sample_is_not_kept(spans: SpanExport, memory: InMemorySpanExporter) -> None:
    record = ended(spans, TraceParent(PARENT.trace_id, PARENT.span_id, is_sampled=False))
    assert record.trace is not None and not record.trace.is_sampled
    assert record.trace.trace_id == PARENT.trace_id
    assert memory.get_finished_spans() == ()


def test_the_sampler_decides_without_a_caller(memory: InMemorySpanExporter) -> None:
    provider = TracerProvider(sampler=ParentBased(ALWAYS_OFF), shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(memory))
    record = ended(SpanExport(provider), None)
    assert record.trace is not None and not record.trace.is_sampled
    assert memory.get_finished_spans() == ()


class Collector(BaseHTTPRequestHandler):
    """Takes OTLP over HTTP."""

    taken: list[ExportTraceServiceRequest]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.taken.append(ExportTraceServiceRequest.FromString(body))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Quietly."""


@pytest.fixture
def collector() -> Iterator[ThreadingHTTPServer]:
    Collector.taken = []
    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def serve(endpoint: str, **environ: str) -> RunningService:
    environ |= {"TPVISION_SERVER__TRACES": "otlp", "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint}
    return RunningService(["--model", str(GOLDEN / "tiny-k3-f32")], environ).wait_ready()


def test_a_service_exports_its_requests(collector: ThreadingHTTPServer) -> None:
    service = serve(f"http://127.0.0.1:{collector.server_port}", OTEL_RESOURCE_ATTRIBUTES="service.name=eyes,zone=b")
    answer = service.client.post("/v1/encode?normalize=true", content=SMALL, headers={"traceparent": str(PARENT)})
    service.client.get("/readyz")
    ours = read_traceparent([answer.headers["traceparent"]])
    assert answer.status_code == 200 and ours is not None and ours.is_sampled
    assert service.stop() == 0
    resources = [taken for request in Collector.taken for taken in request.resource_spans]
    attributes = {item.key: item.value.string_value for item in resources[0].resource.attributes}
    assert (attributes["service.name"], attributes["zone"]) == ("eyes", "b")
    spans: list[Any] = [span for taken in resources for scope in taken.scope_spans for span in scope.spans]
    (root,) = [span for span in spans if span.name == "POST /v1/encode"]
    assert (root.parent_span_id.hex(), root.span_id.hex()) == (PARENT.span_id, ours.span_id)
    assert {span.trace_id.hex() for span in spans} == {PARENT.trace_id}  # no probe among them
    stages: list[Stage | str] = [*OWN_STAGES, "rank 0 forward"]
    assert sorted(span.name for span in spans if span is not root) == sorted(stages)
    for span in spans:
        slack_ns = 1_000_000
        assert root.start_time_unix_nano - slack_ns <= span.start_time_unix_nano <= span.end_time_unix_nano
        assert span.end_time_unix_nano <= root.end_time_unix_nano + slack_ns
    assert b"normalize" not in b"".join(request.SerializeToString() for request in Collector.taken)


def test_a_collector_that_is_not_there_costs_little() -> None:
    service = serve("http://127.0.0.1:9")  # discard: nobody listens
    assert [service.encode(SMALL).status_code for _ in range(20)] == [200] * 20
    started = time.monotonic()
    assert service.stop() == 0
    assert time.monotonic() - started < 12
    assert not any("Traceback" in line for line in service.log)


def test_nothing_of_it_is_imported_unless_asked_for() -> None:
    code = "import service.cli, sys; print([n for n in sys.modules if n.startswith('opentelemetry.sdk')])"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (run.stdout.strip(), run.stderr) == ("[]", "")


def test_without_the_extra_the_start_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['opentelemetry.sdk.trace'] = None; sys.argv = ['tpvision', 'serve', '--port', '0',"
        f"'--model', {str(GOLDEN / 'tiny-k3-f32')!r}]; from service.cli import main; main()"
    )
    environ = {"TPVISION_SERVER__TRACES": "otlp", "PATH": ""}
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environ, capture_output=True, text=True, timeout=60, check=False
    )
    assert run.returncode == 2
    assert run.stderr.splitlines()[-1].startswith("tpvision: server.traces needs the package opentelemetry")
    assert run.stderr.endswith("pip install 'tpvision[otel]'\n")
