"""Calls an ASGI application in this process, as a browser on the same machine would."""

import asyncio
import json
from collections.abc import Callable, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from tests.http_answer import HttpAnswer

PAGE = (b"x-aimgpu-page", b"1")
HOST = (b"host", b"127.0.0.1:8081")

Application = Callable[..., Any]
Header = tuple[bytes, bytes]


@dataclass(frozen=True, slots=True)
class Answer(HttpAnswer):
    @property
    def error(self) -> str:
        """The message with its hint."""
        found = self.json["error"]
        return f"{found['message']} {found.get('hint') or ''}"


@dataclass(slots=True)
class Browser:
    """Where requests come from, and what they carry."""

    application: Application
    headers: Sequence[Header] = (HOST, PAGE)
    address: str = "127.0.0.1"

    def with_token(self, token: str) -> "Browser":
        return Browser(self.application, (*self.headers, (b"authorization", f"Bearer {token}".encode())), self.address)

    def with_link(self, path: str) -> "Browser":
        """With the cookie that the link sets."""
        with ThreadPoolExecutor(1) as thread:  # beside a test's browser, whose loop runs in this one
            opened = thread.submit(asyncio.run, self.get(path)).result()
        cookie = opened.headers["set-cookie"].partition(";")[0]
        return Browser(self.application, (*self.headers, (b"cookie", cookie.encode())), self.address)

    async def get(self, path: str) -> Answer:
        return await self.send("GET", path)

    async def post(self, path: str, body: object = None) -> Answer:
        return await self.send("POST", path, body)

    async def send(self, method: str, path: str, body: object = None, *, leave_after: int | None = None) -> Answer:
        """`body`: JSON, or bytes as they are. `leave_after`: the browser disconnects after so many pieces of the answer."""
        given = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        started: dict[str, Any] = {}
        pieces: list[bytes] = []
        over = asyncio.Event()
        asked = iter([{"type": "http.request", "body": given, "more_body": False}])

        async def receive() -> MutableMapping[str, Any]:
            found = next(asked, None)
            if found is None:
                await over.wait()
                return {"type": "http.disconnect"}
            return found

        async def send(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                started.update(message)
                return
            pieces.append(bytes(message.get("body", b"")))
            if leave_after is not None and len(pieces) >= leave_after:
                over.set()
                await asyncio.sleep(0)

        await self.application(self._scope(method, path), receive, send)
        headers = {name.decode(): value.decode() for name, value in started["headers"]}
        return Answer(started["status"], headers, b"".join(pieces))

    def _scope(self, method: str, path: str) -> dict[str, Any]:
        plain, _, query = path.partition("?")
        return {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "scheme": "http",
            "method": method,
            "path": unquote(plain),
            "raw_path": plain.encode(),
            "root_path": "",
            "query_string": query.encode(),
            "headers": list(self.headers),
            "client": (self.address, 50000),
            "server": ("127.0.0.1", 8081),
        }
