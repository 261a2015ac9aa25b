"""A hub on loopback: its API, files behind a redirect to another host, tokens, and broken connections."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit


@dataclass
class HubServer:
    files: dict[str, bytes]
    listed: dict[str, bytes] | None = None  # what the listing claims, where that differs
    token: str | None = None  # that it asks for
    cut_after: int | None = None  # bytes of the first download
    hub_tokens: list[str] = field(default_factory=list)
    store_tokens: list[str] = field(default_factory=list)
    ranges: list[str] = field(default_factory=list)
    url: str = ""
    store_url: str = ""

    def listing(self) -> dict[str, Any]:
        return {"sha": "abc", "siblings": [_sibling(name, body) for name, body in (self.listed or self.files).items()]}


def _sibling(name: str, body: bytes) -> dict[str, Any]:
    found: dict[str, Any] = {"rfilename": name, "size": len(body)}
    if name.endswith((".gguf", ".safetensors")):
        return found | {"lfs": {"sha256": hashlib.sha256(body).hexdigest(), "size": len(body)}}
    return found | {"blobId": hashlib.sha1(b"blob %d\0" % len(body) + body, usedforsecurity=False).hexdigest()}


@contextmanager
def serve_hub(hub: HubServer) -> Iterator[HubServer]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            """Quiet."""

    class Hub(Handler):
        def do_GET(self) -> None:
            given = self.headers.get("Authorization", "")
            hub.hub_tokens.append(given)
            if hub.token is not None and given != f"Bearer {hub.token}":
                self.send_error(401)
            elif self.path.startswith("/api/models/org/name/"):
                body = json.dumps(hub.listing()).encode()
                self.send_response(200)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)
            elif "/resolve/abc/" in self.path:
                self.send_response(302)
                self.send_header("location", f"{hub.store_url}/{self.path.split('/resolve/abc/')[1]}")
                self.end_headers()
            else:
                self.send_error(404)

    class Store(Handler):
        def do_GET(self) -> None:
            hub.store_tokens.append(self.headers.get("Authorization", ""))
            asked = self.headers.get("Range", "")
            hub.ranges.append(asked)
            body = hub.files[unquote(urlsplit(self.path).path[1:])]
            start = int(asked.removeprefix("bytes=").removesuffix("-")) if asked else 0
            if start >= len(body) > 0:
                self.send_error(416)
                return
            self.send_response(206 if asked else 200)
            self.send_header("content-length", str(len(body) - start))
            self.end_headers()
            rest = body[start:]
            if hub.cut_after is not None:
                rest, hub.cut_after = rest[: hub.cut_after], None
            self.wfile.write(rest)

    servers = [ThreadingHTTPServer(("127.0.0.1", 0), handler) for handler in (Hub, Store)]
    threads = [threading.Thread(target=server.serve_forever, daemon=True) for server in servers]
    hub.url, hub.store_url = (f"http://127.0.0.1:{server.server_address[1]}" for server in servers)
    for thread in threads:
        thread.start()
    try:
        yield hub
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()
        for thread in threads:
            thread.join()
