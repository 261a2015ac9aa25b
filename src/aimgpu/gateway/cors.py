"""Cross-origin requests: refused by browsers unless an origin is on the allow-list, which is empty by default."""

from collections.abc import Collection

from aimgpu.errors import InvalidInput
from aimgpu.gateway.http.asgi import Head, Header, Message, Scope, Send

_ALLOWED: tuple[Header, ...] = (
    (b"access-control-allow-methods", b"GET, POST, DELETE, OPTIONS"),
    (b"access-control-allow-headers", b"*, authorization"),
    (b"access-control-expose-headers", b"*"),
    (b"access-control-max-age", b"600"),
)


def parse_origins(text: str) -> frozenset[bytes]:
    """Origins separated by commas, such as "https://chat.example.org, http://localhost:3000". Raises InvalidInput."""
    origins = [origin.strip().rstrip("/") for origin in text.split(",") if origin.strip()]
    for origin in origins:
        scheme, _, rest = origin.partition("://")
        if scheme not in {"http", "https"} or not rest or any(letter in rest for letter in "/ *"):
            raise InvalidInput(f"{origin!r} is not an origin", hint="Write scheme://host or scheme://host:port.")
    return frozenset(origin.lower().encode() for origin in origins)


class CorsSend:
    """An ASGI `send` that adds the headers by which a browser lets a page of this origin read the answer."""

    def __init__(self, send: Send, origin: bytes) -> None:
        self._send = send
        self._origin = origin

    async def __call__(self, message: Message) -> None:
        """ASGI."""
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], *_headers_for(self._origin)]}
        await self._send(message)


def allow_origin(send: Send, head: Head, origins: Collection[bytes]) -> Send:
    """`send` for a request with this head: as it is, unless the origin is allowed."""
    origin = head.get(b"origin")
    return CorsSend(send, origin) if origin is not None and origin.lower() in origins else send


async def answer_preflight(scope: Scope, send: Send, origins: Collection[bytes]) -> bool:
    """True: this was a browser's question before a request of an allowed origin, and is answered."""
    if scope["method"] != "OPTIONS":
        return False
    head = dict(scope["headers"])
    origin = head.get(b"origin")
    if origin is None or b"access-control-request-method" not in head or origin.lower() not in origins:
        return False
    # Without a content-length, which an answer of this status must not have (RFC 9110, 8.6).
    await send({"type": "http.response.start", "status": 204, "headers": [*_headers_for(origin), *_ALLOWED]})
    await send({"type": "http.response.body", "body": b""})
    return True


def _headers_for(origin: bytes) -> tuple[Header, ...]:
    return (b"access-control-allow-origin", origin), (b"vary", b"origin")
