"""What a gateway's event loop spends on one request, as a multiple of `json.loads` of the same bytes in the same process."""

import asyncio
import json
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from aimgpu.gateway.application import Gateway, GatewayDependencies, GatewaySettings
from aimgpu.gateway.http.upstream import Consumer, FirstConsumer, UpstreamTarget
from aimgpu.gateway.routes import Backend, ModelCard, RouteTable, ServedModel

FORM = b"multipart/form-data; boundary=B"
STREAM = b"text/event-stream"
ANSWER = b'{"choices":[{"index":0,"message":{"role":"assistant","content":"hi"},"finish_reason":"stop"}],"usage":{}}'


@dataclass
class GivenAnswer:
    """An engine's answer that has come whole."""

    parts: deque[bytes]
    content_type: bytes = b"application/json"
    status: int = 200
    complete: bool = False
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.headers = [(b"content-type", self.content_type)]

    async def next_chunk(self, consumer: Consumer | None = None) -> bytes:
        return self.parts.popleft() if self.parts else b""

    def take_whole(self) -> bytes | None:
        return None

    async def read(self, limit_bytes: int) -> bytes:
        return b"".join(self.parts)[:limit_bytes]

    def cancel(self) -> None:
        self.parts.clear()


class GivenUpstream:
    """Answers each request with the same bytes."""

    def __init__(self, parts: Sequence[bytes], content_type: bytes) -> None:
        self.parts, self.content_type = parts, content_type
        self.asked: list[bytes] = []

    async def send(self, target: UpstreamTarget, body: bytes, first: FirstConsumer | None = None) -> GivenAnswer:
        self.asked.append(body)
        return GivenAnswer(deque(self.parts), self.content_type)

    def last_heard(self, url: str) -> float:
        return 0.0

    async def close(self) -> None:
        return


@dataclass(frozen=True, kw_only=True)
class Served:
    """A request, and what the engine answers to it."""

    path: str
    body: bytes
    content_type: bytes = b"application/json"
    engine: str = "llamacpp"
    answer: Sequence[bytes] = (ANSWER,)
    answer_type: bytes = b"application/json"

    @property
    def text(self) -> bytes:
        """What the gateway has to read."""
        return self.body if len(self.body) > sum(map(len, self.answer)) else b"".join(self.answer)


@dataclass
class Spent:
    seconds: float
    status: int
    asked: int  # how often an engine was asked
    sent: list[bytes]  # what the caller got, part by part


def serve_once(served: Served) -> Spent:
    """The CPU time of the thread that serves this one request, its answer included."""
    upstream = GivenUpstream(served.answer, served.answer_type)
    backend = Backend(instance_id="chat-0", url="http://127.0.0.1:1", api_key="", slots=4, cache_field="cache_prompt", name="m")
    model = ServedModel(
        name="chat",
        model="m",
        state="ready",
        reason=None,
        simulated=False,
        backends=(backend,),
        created=1,
        card=ModelCard(engine=served.engine),
    )
    statuses: list[int] = []
    sent: list[bytes] = []

    async def main() -> float:
        gateway = Gateway(RouteTable([model]), GatewaySettings(), GatewayDependencies(upstream=upstream))
        messages = [{"type": "http.request", "body": served.body, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if messages:
                return messages.pop()
            await asyncio.Event().wait()
            raise AssertionError

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])
            else:
                sent.append(message.get("body", b""))

        length = b"%d" % len(served.body)
        head = [(b"content-type", served.content_type), (b"content-length", length), (b"host", b"localhost")]
        scope = {"type": "http", "method": "POST", "path": served.path, "headers": head, "query_string": b"", "client": None}
        begun = time.thread_time()
        await gateway(scope, receive, send)
        spent = time.thread_time() - begun
        await gateway.close()
        return spent

    seconds = asyncio.run(main())
    return Spent(seconds, statuses[0] if statuses else 0, len(upstream.asked), sent)


def parse_seconds(text: bytes) -> float:
    """Of `json.loads`, event by event of a stream; bytes that are no JSON are read as one text of the same length."""
    events = [event[6:] for event in text.split(b"\n\n") if event.startswith(b"data: ") and event != b"data: [DONE]"]
    begun = time.thread_time()
    try:
        for one in events or (text,):
            json.loads(one)
    except (ValueError, RecursionError):
        whole = json.dumps(text.decode("latin-1")).encode()
        begun = time.thread_time()
        json.loads(whole)
    return time.thread_time() - begun


def ratio(served: Served, enough: float = 0.0, tries: int = 1) -> float:
    """The least of a few, until one is small enough: others on this machine only ever add to it."""
    found = float("inf")
    for _ in range(tries):
        found = min(found, serve_once(served).seconds / max(parse_seconds(served.text), 1e-9))
        if found <= enough:
            break
    return found
