import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from tests.web.scene import QUICK, PageDaemon, ask, show

from aimgpu.domain import Priority
from aimgpu.gateway.records import RequestRecord
from aimgpu.monitoring.traces import RequestTraces, make_traces

CALLER = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
RECORD: dict[str, Any] = {
    "model": "chat",
    "instance_id": "chat-0-abc",
    "caller": "alice",
    "priority": Priority.HIGH,
    "status": 200,
    "code": None,
    "streamed": True,
    "queued_seconds": 0.5,
    "first_byte_seconds": 0.75,
    "seconds": 2.0,
    "output_tokens": 40,
    "recalls": 1,
}


def traced(**changes: Any) -> dict[str, ReadableSpan]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    traces = RequestTraces(provider)
    traces.finished(RequestRecord(**(RECORD | changes)))
    traces.close()
    return {span.name: span for span in exporter.get_finished_spans()}


def seconds(span: ReadableSpan) -> float:
    assert span.start_time is not None
    assert span.end_time is not None
    return (span.end_time - span.start_time) / 1e9


def test_a_request_is_a_span_with_its_wait_and_its_engine_inside() -> None:
    spans = traced()
    root, waited, engine = spans["generate chat"], spans["queue"], spans["engine"]
    assert root.kind is SpanKind.SERVER
    assert root.parent is None
    assert (round(seconds(root), 6), round(seconds(waited), 6), round(seconds(engine), 6)) == (2.0, 0.5, 1.5)
    for child in (waited, engine):
        assert child.parent is not None
        assert root.context is not None
        assert child.parent.span_id == root.context.span_id
    assert root.attributes is not None
    assert root.attributes["gen_ai.request.model"] == "chat"
    assert root.attributes["gen_ai.usage.output_tokens"] == 40
    assert root.attributes["aimgpu.priority"] == "high"
    (first,) = engine.events
    assert engine.start_time is not None
    assert round((first.timestamp - engine.start_time) / 1e9, 6) == 0.25


def test_the_callers_trace_goes_on_and_a_header_that_is_none_is_ignored() -> None:
    root = traced(trace_parent=CALLER)["generate chat"]
    assert root.parent is not None
    assert f"{root.parent.span_id:016x}" == "b7ad6b7169203331"
    for nonsense in (b"", b"00-zz", b"\xff\xfe"):
        assert traced(trace_parent=nonsense)["generate chat"].parent is None


def test_the_end_of_the_process_does_not_wait_for_a_collector_that_is_down() -> None:
    sent, released = threading.Event(), threading.Event()

    class Stuck(TracerProvider):
        def shutdown(self) -> None:
            released.wait(60)
            sent.set()

    try:
        RequestTraces(Stuck(shutdown_on_exit=False), patience_seconds=0.01).close()
        assert not sent.is_set()
    finally:
        released.set()


def test_a_request_that_no_engine_saw_has_no_engine_and_a_failure_is_one() -> None:
    spans = traced(instance_id=None, status=503, code="load_shed", first_byte_seconds=None, queued_seconds=2.0)
    assert set(spans) == {"generate chat", "queue"}
    assert spans["generate chat"].status.status_code is StatusCode.ERROR
    assert traced(status=429, code="queue_full")["generate chat"].status.status_code is StatusCode.UNSET


def test_it_is_off_unless_an_endpoint_is_set() -> None:
    assert make_traces(None, {}) is None


@pytest.fixture
def collector() -> Iterator[tuple[str, list[str], threading.Event]]:
    """An OTLP endpoint; the names of the spans that it got."""
    names: list[str] = []
    got = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") is None:
                request = ExportTraceServiceRequest.FromString(body)
                found = [s.name for r in request.resource_spans for scope in r.scope_spans for s in scope.spans]
                names.extend(found)
                got.set()
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", names, got
    server.shutdown()
    server.server_close()


def test_the_daemon_sends_the_traces_of_its_requests(tmp_path: Path, collector: tuple[str, list[str], threading.Event]) -> None:
    endpoint, names, got = collector
    daemon = PageDaemon(tmp_path / "home", engines={"chat": QUICK}, grace_seconds=0.5)
    daemon.set(OTEL_EXPORTER_OTLP_ENDPOINT=endpoint, OTEL_BSP_SCHEDULE_DELAY="200")
    try:
        show(daemon.start(), {"chat": {"model": "HuggingFaceTB/SmolLM2-135M-Instruct", "engine": "llamacpp", "context": 2048}})
        assert ask(daemon.url, "chat") == 200
        assert got.wait(120)
    finally:
        daemon.stop()
    assert {"generate chat", "queue", "engine"} <= set(names)
