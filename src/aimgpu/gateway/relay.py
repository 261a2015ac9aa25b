"""One request's way through: take a slot, ask the engine, pass the answer on, give the slot back."""

import asyncio
import re
from dataclasses import dataclass

import orjson

from aimgpu.errors import AimGpuError, EngineDisconnected, EngineFailed
from aimgpu.gateway.asgi import NO_STORE, Header, Message, Receive, Send, error_body, send_answer
from aimgpu.gateway.body import ClientGone
from aimgpu.gateway.directory import Backend, ServedModel
from aimgpu.gateway.slots import Lease, Slots
from aimgpu.gateway.upstream import Upstream, UpstreamAnswer, UpstreamRequest

_SERVER_ERROR = 500
_MAX_ANSWER_BYTES = 256 * 1024 * 1024
_EVENT_END = b"\n\n"
_TOKENS = re.compile(rb'"completion_tokens":\s*(\d+)')
_SIMULATED: Header = (b"x-aimgpu-simulated", b"true")
_PASSED_ON = frozenset({b"content-type", b"x-request-id"})


@dataclass(slots=True, kw_only=True)
class Passage:
    """What is known about a request on its way; becomes its record."""

    model: ServedModel
    path: str
    body: bytes
    streamed: bool
    caller: str
    arrived: float
    backend: Backend | None = None
    sent: float | None = None
    first_byte: float | None = None
    output_tokens: int | None = None
    status: int = 0
    started: bool = False  # the answer's head is out
    finished: bool = False  # all is handed to the server: a caller who leaves now got everything

    def headers(self) -> tuple[Header, ...]:
        found: list[Header] = []
        if self.model.simulated:
            found.append(_SIMULATED)
        if self.backend is not None:
            found.append((b"x-aimgpu-instance", self.backend.instance_id.encode()))
        return tuple(found)


class Relay:
    def __init__(self, slots: Slots, upstream: Upstream) -> None:
        self._slots = slots
        self._upstream = upstream

    async def pass_on(self, passage: Passage, receive: Receive, send: Send) -> None:
        """Answer the caller; raises AimGpuError while nothing was sent, ClientGone when nobody waits."""
        loop = asyncio.get_running_loop()
        work = asyncio.current_task(loop)
        assert work is not None  # noqa: S101  # a coroutine runs in a task
        watcher = loop.create_task(_cancel_when_gone(passage, receive, work))
        lease: Lease | None = None
        try:
            lease = await self._slots.take(passage.model)
            passage.backend = lease.backend
            passage.sent = loop.time()
            answer = await self._upstream.send(_upstream_request(passage, lease.backend))
            if passage.streamed and answer.status < 300:  # noqa: PLR2004  # an error is JSON, asked for as a stream or not
                await _stream(passage, answer, send)
            else:
                await _whole(passage, answer, send)
        except asyncio.CancelledError:
            if watcher.done():  # it was the watcher that cancelled
                work.uncancel()
                raise ClientGone from None
            raise
        finally:
            watcher.cancel()
            if lease is not None:
                lease.release()


def _upstream_request(passage: Passage, backend: Backend) -> UpstreamRequest:
    """Nothing of the caller's head goes further: no key, no cookie, no hop-by-hop header."""
    headers: tuple[Header, ...] = ((b"content-type", b"application/json"),)
    if backend.api_key:
        headers += ((b"authorization", b"Bearer " + backend.api_key.encode()),)
    return UpstreamRequest(url=backend.url, path=passage.path, headers=headers, body=passage.body)


async def _whole(passage: Passage, answer: UpstreamAnswer, send: Send) -> None:
    body = await answer.read(_MAX_ANSWER_BYTES)
    passage.first_byte = asyncio.get_running_loop().time()
    if answer.status >= _SERVER_ERROR:
        raise EngineFailed(f"The engine answered {answer.status}{_engine_message(body)}.")
    found = _TOKENS.search(body)
    passage.output_tokens = int(found[1]) if found else None
    passage.status = answer.status
    passage.started = passage.finished = True
    await send_answer(send, answer.status, [*_kept(answer), *passage.headers()], body)


async def _stream(passage: Passage, answer: UpstreamAnswer, send: Send) -> None:
    """Whole events only: what an engine wrote half of before it died never reaches the caller."""
    held = b""
    events = 0
    try:
        while chunk := await answer.next_chunk():
            if not passage.started:
                await _start(passage, answer, send)
            if held:
                chunk = held + chunk
                held = b""
            if not chunk.endswith(_EVENT_END):
                cut = chunk.rfind(_EVENT_END) + len(_EVENT_END)
                if cut < len(_EVENT_END):
                    held = chunk
                    continue
                chunk, held = chunk[:cut], chunk[cut:]
            events += chunk.count(b"data: ")
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        tail = held
    except AimGpuError as error:
        if not passage.started:
            raise
        passage.status = error.http_status
        tail = b"data: " + orjson.dumps(error_body(error)) + _EVENT_END
    finally:
        answer.cancel()
        passage.output_tokens = events
    if not passage.started:
        raise EngineDisconnected("the engine's answer was empty")
    passage.finished = True
    await send({"type": "http.response.body", "body": tail, "more_body": False})


async def _start(passage: Passage, answer: UpstreamAnswer, send: Send) -> None:
    passage.first_byte = asyncio.get_running_loop().time()
    passage.status = answer.status
    passage.started = True
    headers = [*_kept(answer), NO_STORE, *passage.headers()]
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})


def _kept(answer: UpstreamAnswer) -> list[Header]:
    return [header for header in answer.headers if header[0] in _PASSED_ON]


def _engine_message(body: bytes) -> str:
    """What the engine says is wrong, where it says it in OpenAI's shape."""
    try:
        message = orjson.loads(body)["error"]["message"]
    except (orjson.JSONDecodeError, KeyError, TypeError, IndexError):
        return ""
    return f": {message[:500]}" if isinstance(message, str) else ""


async def _cancel_when_gone(passage: Passage, receive: Receive, work: "asyncio.Task[object]") -> None:
    message: Message = {"type": ""}
    while message["type"] != "http.disconnect":
        message = await receive()
    if not passage.finished:
        work.cancel()
