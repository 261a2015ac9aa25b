"""OpenTelemetry traces of requests: gateway, queue and engine, made from the record of a request once it is over.

Off unless OTEL_EXPORTER_OTLP_ENDPOINT (or ..._TRACES_ENDPOINT) is set, and needs `pip install aimgpu[traces]`. Spans
are made in a thread of their own: the event loop only hands the record over. No prompt and no answer is ever in a span.
"""

import atexit
import logging
import os
import queue
import threading
import time
from collections.abc import Mapping
from typing import Any, Protocol

from aimgpu.errors import InvalidInput
from aimgpu.qos.slo.activity import FinishedRequest

log = logging.getLogger(__name__)

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_MOST_WAITING = 10_000
_SERVER_ERROR = 500
_NANO = 1_000_000_000


class TracedRequest(FinishedRequest, Protocol):
    """With the trace that its caller sent, where it sent one."""

    trace_parent: bytes | None


class RequestObserver(Protocol):
    def finished(self, record: Any) -> None: ...  # noqa: ANN401 -- each knows its own part of the record


class RequestTraces:
    """An Observer of the gateway that passes every record on to another.

    Spans that cannot be sent in time are dropped and counted. At the end of the process the rest is sent, for at most
    `patience_seconds`; otherwise a collector that is down would hold the daemon for half a minute.
    """

    def __init__(
        self,
        provider: Any,  # noqa: ANN401 -- the SDK is optional
        also: RequestObserver | None = None,
        *,
        patience_seconds: float = 3.0,
    ) -> None:
        self._provider = provider
        self._patience_seconds = patience_seconds
        self._also = also
        self._tracer = provider.get_tracer("aimgpu.gateway")
        self._waiting: queue.SimpleQueue[tuple[int, TracedRequest] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="traces", daemon=True)
        self._thread.start()
        self.dropped = 0
        atexit.register(self.close)

    def finished(self, record: Any) -> None:  # noqa: ANN401 -- a TracedRequest that its other observer knows better
        """Called on the event loop."""
        if self._also is not None:
            self._also.finished(record)
        if self._waiting.qsize() < _MOST_WAITING:
            self._waiting.put((time.time_ns(), record))
        else:
            self.dropped += 1

    def close(self) -> None:
        """Send the remaining spans; safe to call twice."""
        if self._thread.is_alive():
            self._waiting.put(None)
            self._thread.join()
            end = threading.Thread(target=self._provider.shutdown, name="traces-end", daemon=True)
            end.start()
            end.join(self._patience_seconds)

    def _work(self) -> None:
        while (item := self._waiting.get()) is not None:
            try:
                self._trace(*item)
            except Exception:  # a span that cannot be made must not end the thread
                log.exception("trace.failed")

    def _trace(self, ended: int, record: TracedRequest) -> None:
        from opentelemetry import trace  # noqa: PLC0415 -- optional
        from opentelemetry.trace import SpanKind, Status, StatusCode  # noqa: PLC0415

        arrived = ended - round(record.seconds * _NANO)
        sent = arrived + round(record.queued_seconds * _NANO)
        root = self._tracer.start_span(
            f"generate {record.model}",
            context=_parent(record.trace_parent),
            kind=SpanKind.SERVER,
            start_time=arrived,
            attributes=_attributes(record),
        )
        inside = trace.set_span_in_context(root)
        waited = self._tracer.start_span("queue", context=inside, start_time=arrived)
        waited.set_attribute("aimgpu.recalls", record.recalls)
        waited.end(end_time=min(sent, ended))
        if record.instance_id is not None:
            engine = self._tracer.start_span("engine", context=inside, kind=SpanKind.CLIENT, start_time=sent)
            engine.set_attribute("aimgpu.instance", record.instance_id)
            if record.first_byte_seconds is not None:
                engine.add_event("first_token", timestamp=arrived + round(record.first_byte_seconds * _NANO))
            engine.end(end_time=ended)
        if record.status >= _SERVER_ERROR:
            root.set_status(Status(StatusCode.ERROR, record.code or str(record.status)))
        root.end(end_time=ended)


def _attributes(record: TracedRequest) -> dict[str, str | int | float]:
    """As OpenTelemetry's GenAI conventions name them; what is only ours begins with `aimgpu.`."""
    found: dict[str, str | int | float | None] = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "aimgpu",
        "gen_ai.request.model": record.model,
        "gen_ai.usage.output_tokens": record.output_tokens,
        "gen_ai.server.time_to_first_token": record.first_byte_seconds if record.streamed else None,
        "http.response.status_code": record.status,
        "error.type": record.code,
        "aimgpu.caller": record.caller,
        "aimgpu.priority": str(record.priority),
    }
    return {name: value for name, value in found.items() if value is not None}


def _parent(header: bytes | None) -> Any:  # noqa: ANN401 -- a context of the optional SDK
    """Where the caller sent its own trace, the request becomes a part of it; a header that is none is ignored."""
    if header is None:
        return None
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator  # noqa: PLC0415

    return TraceContextTextMapPropagator().extract({"traceparent": header.decode("latin-1")})


def make_traces(also: RequestObserver | None, environment: Mapping[str, str] | None = None) -> RequestTraces | None:
    """`also` hears of every request too. None where no endpoint is set.

    Raises InvalidInput where one is set and OpenTelemetry is not installed.
    """
    settings = os.environ if environment is None else environment
    if not any(settings.get(name) for name in ENDPOINTS):
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # noqa: PLC0415
        from opentelemetry.sdk.resources import Resource  # noqa: PLC0415
        from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
        from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415
    except ImportError as error:
        raise InvalidInput(
            f"{' or '.join(ENDPOINTS)} is set, and OpenTelemetry is not installed",
            hint="Install it with `pip install aimgpu[traces]`, or unset the variable.",
        ) from error
    provider = TracerProvider(resource=Resource.create({"service.name": "aimgpu"}), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return RequestTraces(provider, also)
