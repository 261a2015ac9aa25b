"""One request's way through: take a slot, ask the engine, pass the answer on, give the slot back."""

import asyncio
import functools
import re
from dataclasses import dataclass, field
from functools import lru_cache
from time import monotonic

import orjson

from aimgpu.domain import Priority
from aimgpu.errors import (
    AimGpuError,
    EngineDisconnected,
    EngineFailed,
    EngineTimedOut,
    EngineUnavailable,
    EngineUnreachable,
    LoadShed,
    ModelNotFound,
)
from aimgpu.gateway.answer_privacy import hide_cache_use, hide_in_events, may_reveal
from aimgpu.gateway.apart import LARGE_BYTES, apart
from aimgpu.gateway.body import MOST_ANSWER_VALUES, ClientGone, HeldBytes, encode_fields, has_more_values
from aimgpu.gateway.engine_errors import refuse_failure, to_openai
from aimgpu.gateway.engine_faults import StuckEngines, StuckLimits
from aimgpu.gateway.forms import name_model
from aimgpu.gateway.heartbeat import Heartbeat
from aimgpu.gateway.http.asgi import JSON, NO_STORE, Header, Message, Receive, Send, error_body, send_answer
from aimgpu.gateway.http.exchange import Exchange
from aimgpu.gateway.http.upstream import Upstream, UpstreamAnswer, UpstreamTarget
from aimgpu.gateway.killers import KillerRequests
from aimgpu.gateway.routes import Backend, ServedModel
from aimgpu.gateway.slots import Lease, Slots
from aimgpu.qos.queueing.dispatcher import RequestOutcome

MAX_ANSWER_BYTES = 16 * 1024 * 1024  # in one piece, unless the caller's key allows more
MAX_EVENT_BYTES = 4 * 1024 * 1024
_UNCOUNTED_BYTES = 256 * 1024
_EVENT_END = b"\n\n"
_TOKENS = re.compile(rb'"(?:completion|output)_tokens":\s{0,9}(\d{1,15})')
_NOT_TOKENS = 2  # events of a stream that carry none: the role before, [DONE] after
_FEW_TOKENS = 8  # a mean over fewer is noise
_SIMULATED: Header = (b"x-aimgpu-simulated", b"true")
_PASSED_ON = frozenset({b"content-type"})
_SWEEP_SECONDS = 0.02
_NOT_STREAMED = 300  # and above: an error is JSON, asked for as a stream or not
_KEY_REFUSED = frozenset({401, 403})  # of an engine: callers never see its key
_UNUSABLE = _KEY_REFUSED | {204, 205}  # after these a caller expects no body, and we may send one
_OK, _UNKNOWN = RequestOutcome.OK, RequestOutcome.UNKNOWN  # named once: looking up a member costs as much as a call


@dataclass(eq=False)
class ProxiedRequest:
    """What is known about a request on its way; becomes its record.

    Without slots, so that what has not happened yet is read from the class and costs nothing.
    """

    model: ServedModel
    path: str
    body: bytes
    fields: dict[str, object]
    caller: str
    arrived: float
    streamed: bool = field(init=False, default=False)
    priority: Priority = field(init=False, default=Priority.MEDIUM)
    deadline_seconds: float | None = field(init=False, default=None)
    content_type: bytes = field(init=False, default=JSON[1])
    exchange: Exchange | None = field(init=False, default=None)  # where the server offers it
    most_answer_bytes: int = field(init=False, default=MAX_ANSWER_BYTES)
    sends_directly: bool = field(init=False, default=False)  # what is sent goes to the exchange as it is, not translated
    heartbeat: Heartbeat | None = field(init=False, default=None)  # where it streams, and its model was not up
    backend: Backend | None = field(init=False, default=None)
    waited: bool = field(init=False, default=False)  # for a slot
    expected_wait_seconds: float | None = field(init=False, default=None)
    sent: float | None = field(init=False, default=None)
    first_byte: float | None = field(init=False, default=None)
    output_tokens: int | None = field(init=False, default=None)
    tokens_so_far: int = field(init=False, default=0)  # of a stream: its events
    last_event: float | None = field(init=False, default=None)  # when its last one went on to the caller
    cache_salt: str | None = field(init=False, default=None)  # of its caller, where prefix caches are kept apart
    hides_cache_use: bool = field(init=False, default=False)  # from the caller, what the engine had in its prefix cache
    asked: bool = field(init=False, default=False)  # an engine has got at least part of it
    recalls: int = field(init=False, default=0)  # times its slot was taken back for something more urgent
    trace_parent: bytes | None = field(init=False, default=None)
    status: int = field(init=False, default=0)
    started: bool = field(init=False, default=False)  # the answer's head is out
    finished: bool = field(init=False, default=False)  # all is handed to the server: a caller who leaves now got everything
    task: "asyncio.Task[object] | None" = field(init=False, default=None)
    receive: Receive | None = field(init=False, default=None)
    watcher: "asyncio.Task[None] | None" = field(init=False, default=None)
    writing_since: float | None = field(init=False, default=None)
    gone: bool = field(init=False, default=False)  # the caller left, or reads so slowly that it might as well have

    def leave(self) -> None:
        """The caller is gone: stop the work, unless all of it is done."""
        if not self.finished and self.task is not None:
            self.gone = True
            self.task.cancel()

    def recall(self) -> None:
        """Its slot was taken back: stop the work, it will start again."""
        if self.task is not None:
            self.task.cancel()

    def headers(self) -> list[Header]:
        """What our own headers say about how it was served."""
        found: list[Header] = []
        if self.model.simulated:
            found.append(_SIMULATED)
        if self.backend is not None:
            found.append((b"x-aimgpu-instance", self.backend.instance_id.encode()))
        if self.waited and self.sent is not None:
            if self.expected_wait_seconds is not None:
                found.append((b"x-aimgpu-expected-wait-ms", b"%d" % round(self.expected_wait_seconds * 1000)))
            found.append((b"x-aimgpu-waited-ms", b"%d" % round((self.sent - self.arrived) * 1000)))
        if self.recalls:
            found.append((b"x-aimgpu-recalls", b"%d" % self.recalls))
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyLimits:
    """`held`: bodies and answers that are under way, all together."""

    held: HeldBytes
    stall_seconds: float = 60.0
    stuck: StuckLimits | None = None


class Proxy:
    """Passes requests to engines and their answers back. Lives on the gateway's event loop."""

    def __init__(self, slots: Slots, upstream: Upstream, limits: ProxyLimits) -> None:
        self._slots = slots
        self._upstream = upstream
        self._held = limits.held
        self._stall_seconds = limits.stall_seconds
        self._unwatched: set[ProxiedRequest] = set()
        self._streams: set[ProxiedRequest] = set()
        self._sweeper: asyncio.TimerHandle | None = None
        self._killers = KillerRequests()
        self.stuck_engines = StuckEngines(upstream, slots.in_flight, slots.exclude, limits.stuck)

    async def pass_on(self, request: ProxiedRequest, receive: Receive, send: Send) -> None:
        """Answer the caller; raises AimGpuError while nothing was sent, ClientGone when the caller left."""
        if self._killers.suspicions:
            self._killers.check(request.model.name, request.body, request.arrived)
        if request.exchange is not None:
            request.task = request.exchange.task
            request.exchange.on_disconnect = request.leave
        else:
            request.task = asyncio.current_task()
            request.receive = receive
            self._unwatched.add(request)
            self._arm()
        try:
            await self._try_servers(request, send)
        except asyncio.CancelledError:
            if request.gone and request.task is not None:
                request.task.uncancel()
                if request.asked and not request.started and request.backend is not None:
                    self.stuck_engines.abandoned(request.backend, request.model.name)
                raise ClientGone from None
            raise
        finally:
            if request.exchange is None:
                self._unwatched.discard(request)
                if request.watcher is not None:
                    request.watcher.cancel()
            request.task = request.exchange = request.receive = None  # no circles for the collector

    async def _try_servers(self, request: ProxiedRequest, send: Send) -> None:
        """A second engine is asked where the first has got nothing of the request, or refused it, or the request is known.

        One that broke off may have died of it, and asking the next would end that too, unless engines have answered it before.
        """
        avoid: frozenset[str] = frozenset()
        lease: Lease | None = None
        while True:
            lease = await self._take(request, avoid, lease)
            outcome = _UNKNOWN
            try:
                outcome = await self._ask(request, lease, send)
            except asyncio.CancelledError:
                if request.gone or not lease.recalled or request.task is None:
                    raise
                request.task.uncancel()
                request.recalls += 1
            except EngineFailed as error:
                outcome = _outcome_of(error)
                avoid |= {lease.backend.instance_id}
                if isinstance(error, EngineDisconnected):
                    together = self._slots.in_flight(lease.backend.instance_id)
                    self._killers.note_death(request.model.name, request.body, lease.backend.instance_id, together, monotonic())
                others = any(backend.instance_id not in avoid for backend in request.model.backends)
                if not others and isinstance(error, EngineUnreachable) and self._slots.may_wait(request, monotonic()):
                    avoid = frozenset()  # it is being replaced, or comes back: wait for either
                elif request.started or not others or not self._may_ask_another(request, error):
                    raise
            else:
                if outcome is _OK and (self._killers.suspicions or len(request.model.backends) > 1):
                    self._killers.note_safe(request.model.name, request.body)
                return
            finally:
                lease.release(outcome)

    def _may_ask_another(self, request: ProxiedRequest, error: EngineFailed) -> bool:
        if isinstance(error, EngineUnreachable | EngineUnavailable):
            return True
        return isinstance(error, EngineDisconnected) and self._killers.is_safe(request.model.name, request.body)

    async def _take(self, request: ProxiedRequest, avoid: frozenset[str], before: Lease | None) -> Lease:
        if before is not None and before.recalled:
            lease = await self._slots.take_again(before)
        else:
            if before is not None:
                request.model = self._slots.find_current(request.model)
            taken = self._slots.take(request, request.arrived if before is None else monotonic(), avoid)
            if isinstance(taken, Lease):
                lease = taken
            else:
                lease = await (taken if request.heartbeat is None else request.heartbeat.during(taken))
        lease.on_recall = request.recall
        request.backend = lease.backend
        if lease.waited:
            request.waited = True
            request.expected_wait_seconds = lease.expected_wait_seconds
        request.sent = monotonic()
        return lease

    async def _ask(self, request: ProxiedRequest, lease: Lease, send: Send) -> RequestOutcome:
        if lease.recalled:  # in the moment between the grant and now
            raise asyncio.CancelledError
        backend, body, asked = lease.backend, request.body, request.fields.get("model")
        if lease.waited and request.model.names_more and self._slots.find(str(asked or "")) is None:
            raise ModelNotFound(f"There is no model '{asked}' here.", hint="GET /v1/models lists them.")
        if backend.takes_priority or request.cache_salt is not None or backend.fields or backend.name not in (None, asked):
            body = await apart(len(body), _body_for, request, backend)
        request.asked = True
        target = engine_target(backend.url, request.path, backend.api_key, request.content_type)
        events = _Events(request, lease, self._held) if request.streamed else None
        first = events.begin if events is not None and request.sends_directly else None
        answer = await self._upstream.send(target, body, first)
        if answer.status in _UNUSABLE:
            answer.cancel()
            if answer.status not in _KEY_REFUSED:
                raise EngineFailed(f"The engine answered {answer.status}.")
            self._slots.exclude(backend.instance_id, f"its engine refuses the key that it was started with ({answer.status})")
            raise EngineUnreachable("The engine refuses our key; it is being replaced.")
        if events is None or answer.status >= _NOT_STREAMED:
            whole = answer.take_whole()
            if whole is None:
                return await self._whole(request, lease, answer, send)
            return await _send_whole(request, lease, answer, whole, send)
        self._streams.add(request)
        self._arm()
        try:
            outcome = await _stream(request, events, answer, send)
        finally:
            self._streams.discard(request)
            if events.held:
                self._held.drop(len(events.held))
        return RequestOutcome.SLOW if outcome is _OK and _is_slow(request) else outcome

    async def _whole(self, request: ProxiedRequest, lease: Lease, answer: UpstreamAnswer, send: Send) -> RequestOutcome:
        """The answer counts as held until its caller has read it, or nearly."""
        body = await _read_whole(request, answer, self._held)
        held, exchange = len(body), request.exchange
        try:
            return await _send_whole(request, lease, answer, body, send)
        finally:
            if exchange is not None:
                exchange.when_read(functools.partial(self._held.drop, held))
            else:
                self._held.drop(held)

    def streams(self) -> tuple[ProxiedRequest, ...]:
        """Answers that stream now."""
        return tuple(self._streams)

    def _sweep(self) -> None:
        """Watch the callers that came since the last sweep; drop those that stopped reading.

        Most requests to a fast engine are over before a task that watches their caller would have begun to run.
        """
        self._sweeper = None
        now = monotonic()
        for request in self._unwatched:
            request.watcher = asyncio.get_running_loop().create_task(_watch(request))
        self._unwatched.clear()
        for request in tuple(self._streams):
            since = request.writing_since
            if since is not None and now - since > self._stall_seconds:
                request.leave()
        if self._streams:
            self._arm()

    def _arm(self) -> None:
        if self._sweeper is None:
            self._sweeper = asyncio.get_running_loop().call_later(_SWEEP_SECONDS, self._sweep)


@lru_cache(maxsize=1024)
def engine_target(url: str, path: str, api_key: str, content_type: bytes = JSON[1]) -> UpstreamTarget:
    """Nothing of the caller's head goes further: no key, no cookie, no hop-by-hop header."""
    headers: tuple[Header, ...] = ((JSON[0], content_type),)
    if api_key:
        headers += ((b"authorization", b"Bearer " + api_key.encode()),)
    return UpstreamTarget.make(url, path, headers)


def _body_for(request: ProxiedRequest, backend: Backend) -> bytes:
    """The body with the name that this engine knows, and what it is to know beside it."""
    asked = str(request.fields.get("model") or "")
    name = backend.name_for(asked)
    if request.content_type != JSON[1]:
        return request.body if name == asked else name_model(request.content_type, request.body, name)
    added = dict(backend.fields)
    if name != asked:
        added["model"] = name
    if backend.takes_priority:
        added["priority"] = Priority.HIGH.rank - request.priority.rank
    if request.cache_salt is not None and backend.cache_field == "cache_salt":
        added["cache_salt"] = request.cache_salt
    elif request.cache_salt is not None and backend.cache_field == "cache_prompt":
        added["cache_prompt"] = False  # this engine cannot keep callers apart, so nothing is taken from its cache
    return encode_fields(request.fields | added) if added else request.body


async def _read_whole(request: ProxiedRequest, answer: UpstreamAnswer, held: HeldBytes) -> bytes:
    """The caller drops what is returned from `held`."""
    parts: list[bytes] = []
    size = 0
    try:
        while chunk := await answer.next_chunk():
            held.add(len(chunk))
            size += len(chunk)
            if size > request.most_answer_bytes:
                text = f"The engine's answer is longer than {request.most_answer_bytes} bytes."
                raise EngineFailed(text, hint="Ask for less at once: fewer choices, inputs or probabilities.")  # noqa: TRY301
            parts.append(chunk)
    except BaseException:
        held.drop(size)
        raise
    finally:
        answer.cancel()
    return b"".join(parts)


async def _send_whole(request: ProxiedRequest, lease: Lease, answer: UpstreamAnswer, body: bytes, send: Send) -> RequestOutcome:
    reveals = request.hides_cache_use and may_reveal(body)
    is_parsed = len(body) > _UNCOUNTED_BYTES and (reveals or not request.sends_directly)
    if is_parsed and has_more_values(body, MOST_ANSWER_VALUES):
        raise EngineFailed(f"The engine's answer has more than {MOST_ANSWER_VALUES} values.", hint="Ask for less at once.")
    request.first_byte = now = monotonic()
    lease.answered(now)
    status = answer.status
    headers = _make_headers(request, answer)
    if status >= 300:  # noqa: PLR2004
        body = body[:0] if len(body) > LARGE_BYTES else body  # an error that long says nothing
        refuse_failure(status, body, f"'{request.model.name}'", request.path)
        headers = [JSON, *(header for header in headers if header[0] != JSON[0])]
        body = to_openai(status, body)
    elif reveals:
        body = await apart(len(body), hide_cache_use, body)
    request.output_tokens = _read_tokens(body)
    request.status = status
    request.started = request.finished = True
    exchange = request.exchange
    if exchange is None or not request.sends_directly or not exchange.send_whole(status, headers, body):
        await send_answer(send, status, headers, body)
    return _OK if status < 300 else _UNKNOWN  # noqa: PLR2004


async def _stream(request: ProxiedRequest, events: "_Events", answer: UpstreamAnswer, send: Send) -> RequestOutcome:
    """Whole events only: what an engine wrote half of before it died never reaches the caller."""
    consumer = events.pass_on if request.sends_directly else None
    tail = b""
    outcome = _OK
    try:
        while chunk := await answer.next_chunk(consumer):
            if not request.started:
                headers = events.start(answer)
                await send(
                    {"type": "http.response.start", "status": answer.status, "headers": headers, "aimgpu.body_follows": True}
                )
            whole = events.take(chunk)
            if answer.complete:
                tail = whole  # goes out together with the end
                break
            if whole:
                request.writing_since = request.last_event = monotonic()
                await send({"type": "http.response.body", "body": whole, "more_body": True})
                request.writing_since = None
            if events.too_long:
                raise _refuse_event(len(events.held))
        tail += events.held
    except AimGpuError as error:
        if not request.started:
            raise
        request.status = error.http_status
        outcome = _outcome_of(error)
        tail = b"data: " + orjson.dumps(error_body(error)) + _EVENT_END
    finally:
        answer.cancel()
        found = _read_tokens(events.last)
        request.output_tokens = max(request.tokens_so_far - _NOT_TOKENS, 0) if found is None else found
    if not request.started:
        raise EngineDisconnected("the engine's answer was empty")
    request.finished = True
    await send({"type": "http.response.body", "body": tail, "more_body": False})
    return outcome


class _Events:
    """What an engine streams, cut into whole events and counted."""

    __slots__ = ("_counted", "_exchange", "_lease", "_request", "held", "last")

    def __init__(self, request: ProxiedRequest, lease: Lease, counted: HeldBytes) -> None:
        self._request = request
        self._lease = lease
        self._exchange = request.exchange
        self._counted = counted
        self.held = bytearray()  # begun, and not whole yet; counted
        self.last = b""  # what was taken last

    def start(self, answer: UpstreamAnswer) -> list[Header]:
        """The answer begins: its headers."""
        request = self._request
        request.first_byte = now = monotonic()
        self._lease.answered(now)
        request.status = answer.status
        request.started = True
        return [*_make_headers(request, answer), NO_STORE]

    def begin(self, answer: UpstreamAnswer, chunk: bytes) -> bool:
        """Send the head and the first events on in the moment they come: the task that waits for them runs a turn later."""
        exchange = self._exchange
        if exchange is None or answer.status >= _NOT_STREAMED or self._lease.recalled or not exchange.may_start:
            return False
        exchange.start_parts(answer.status, self.start(answer))
        return self.pass_on(chunk)

    def take(self, chunk: bytes) -> bytes:
        """The events that are whole with this chunk, as their caller may see them; lines end by LF."""
        request = self._request
        last = chunk.replace(b"\r", b"")  # JSON has none
        if self.held or not last.endswith(_EVENT_END):
            last = self._cut(last)
        request.tokens_so_far += last.count(b"\n") // 2  # an event with a token is one line and an empty one
        if request.hides_cache_use and may_reveal(last):
            last = hide_in_events(last)
        self.last = last
        return last

    def _cut(self, chunk: bytes) -> bytes:
        """What was begun and is whole now. Only the new bytes are searched, however many of one event were held before."""
        before = len(self.held)
        end = chunk.rfind(_EVENT_END)
        cut = end + len(_EVENT_END) if end >= 0 else 0
        if not cut and self.held.endswith(b"\n") and chunk.startswith(b"\n"):
            cut = 1  # the end itself came in two parts
        if cut:
            whole = bytes(self.held) + chunk[:cut]
            self.held = bytearray(chunk[cut:])
        else:
            whole = b""
            self.held += chunk
        self._counted.held += len(self.held) - before
        return whole

    @property
    def too_long(self) -> bool:
        """More of one event is held than may be, here or everywhere together."""
        return len(self.held) > MAX_EVENT_BYTES or (bool(self.held) and self._counted.held > self._counted.limit)

    def pass_on(self, chunk: bytes) -> bool:
        """Send them on in the moment they come; False where the task has to wait for the caller, or to end the stream."""
        exchange = self._exchange
        if exchange is None or not exchange.takes_parts or (self.held and self.too_long):
            return False
        whole = self.take(chunk)
        if whole:
            self._request.last_event = monotonic()
            exchange.send_part(whole)
        return True


def _refuse_event(size: int) -> AimGpuError:
    if size > MAX_EVENT_BYTES:
        return EngineDisconnected(f"an event of the engine's stream is longer than {MAX_EVENT_BYTES} bytes")
    return LoadShed("Too many large answers are being sent at once.")


def _read_tokens(answer: bytes) -> int | None:
    """The usage that an engine reports at the end of its answer."""
    start = answer.rfind(b'"completion_tokens"')
    if start < 0:
        start = answer.rfind(b'"output_tokens"')
    found = _TOKENS.match(answer, start) if start >= 0 else None
    return int(found[1]) if found else None


def _is_slow(request: ProxiedRequest) -> bool:
    """Tokens came slower than promised: the engine has too many requests at once."""
    slow_ms = request.model.slow_token_ms[request.priority.rank]
    first, tokens = request.first_byte, request.output_tokens
    if slow_ms is None or first is None or tokens is None or tokens < _FEW_TOKENS:
        return False
    taken = monotonic() - first
    return taken * 1000 / (tokens - 1) > slow_ms


def _outcome_of(error: AimGpuError) -> RequestOutcome:
    """How the request counts for the engine: a 500 may be the request's fault, an answer that breaks off is the engine's."""
    if isinstance(error, EngineTimedOut | EngineUnavailable):
        return RequestOutcome.OVERLOADED
    if isinstance(error, EngineUnreachable):
        return RequestOutcome.UNREACHABLE
    return RequestOutcome.BROKEN if isinstance(error, EngineDisconnected) else RequestOutcome.UNKNOWN


def _make_headers(request: ProxiedRequest, answer: UpstreamAnswer) -> list[Header]:
    """What is passed on of the engine's head, and our own."""
    found = request.headers()
    for header in answer.headers:
        if header[0] in _PASSED_ON:
            found.append(header)  # a comprehension is a call more
    return found


async def _watch(request: ProxiedRequest) -> None:
    """Cancel the work when its caller leaves."""
    assert request.receive is not None  # noqa: S101  # set before anybody watches
    message: Message = {"type": ""}
    while message["type"] != "http.disconnect":
        message = await request.receive()
    request.leave()
