"""Comments in a stream of events while its model wakes, so that nothing in between takes the connection for dead.

Clients skip them. The first one comes after a whole pause, so a short wake changes nothing. It commits the answer to
status 200: from then on, a refusal is an event of the stream.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from aimgpu.errors import InvalidInput, InvalidQuantity
from aimgpu.gateway.http.asgi import NO_STORE, Header, Message, Send
from aimgpu.units import parse_duration_ms

EVENT_PATHS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"})
_EVENTS = b"text/event-stream"
_NAMED = "/v1/messages"  # clients of this path know an error by the name of its event
T = TypeVar("T")


def parse_wake_heartbeat(text: str) -> float:
    """The interval in seconds. Raises InvalidInput."""
    try:
        return 0.0 if text == "0" else parse_duration_ms(text) / 1000
    except InvalidQuantity as error:
        raise InvalidInput(f"AIMGPU_WAKE_HEARTBEAT: {error.message}", hint=error.hint) from None


class Heartbeat:
    """An ASGI `send` for a stream of server-sent events.

    `headers` go out with the first comment. `describe` returns the text of the next one.
    """

    def __init__(
        self, send: Send, path: str, headers: tuple[Header, ...], every_seconds: float, describe: Callable[[], str]
    ) -> None:
        self.begun = False  # the head is out
        self._send = send
        self._error = b"event: error\ndata: " if path == _NAMED else b"data: "
        self._headers = [(b"content-type", _EVENTS), NO_STORE, *headers]
        self._every_seconds = every_seconds
        self._describe = describe
        self._whole: bytes | None = None  # of an answer that is not a stream, so far

    async def during(self, waiting: Awaitable[T]) -> T:
        """What `waiting` returns."""
        beating = asyncio.create_task(self._beat())
        try:
            return await waiting
        finally:
            beating.cancel()  # not awaited: what was granted would be lost if the caller left meanwhile

    async def __call__(self, message: Message) -> None:
        if not self.begun:
            await self._send(message)
        elif message["type"] == "http.response.start":
            self._whole = None if dict(message["headers"]).get(b"content-type", b"").startswith(_EVENTS) else b""
        elif self._whole is None:
            await self._send(message)
        else:
            self._whole += message.get("body", b"")
            if not message.get("more_body", False):
                event = self._error + self._whole.replace(b"\n", b" ") + b"\n\n"
                await self._send({"type": "http.response.body", "body": event})

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._every_seconds)
            if not self.begun:
                self.begun = True
                await self._send({"type": "http.response.start", "status": 200, "headers": self._headers})
            comment = f": {self._describe()}\n\n".encode()
            await self._send({"type": "http.response.body", "body": comment, "more_body": True})
