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

COMMIT = "abc" + 37 * "0"


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
        return {
            "id": "org/name",
            "sha": COMMIT,
            "siblings": [_sibling(name, body) for name, body in (self.listed or self.files).items()],
        }


def _sibling(name: str, body: bytes) -> dict[str, Any]:
    found: dict[str, Any] = {"rfilename": name, "size": len(body)}
    if name.endswith((".gguf", ".safetensors")):
        return found | {"blobId": "0", "lfs": {"sha256": _etag(name, body), "size": len(body), "pointerSize": 130}}
    return found | {"blobId": _etag(name, body)}


def _etag(name: str, body: bytes) -> str:
    if name.endswith((".gguf", ".safetensors")):
        return hashlib.sha256(body).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(body) + body, usedforsecurity=False).hexdigest()


@contextmanager
def serve_hub(hub: HubServer) -> Iterator[HubServer]:  # noqa: C901 - two servers in one place
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
            elif "/resolve/main/" in self.path:
                self.send_response(302)
                self.send_header("location", f"{hub.store_url}/{self.path.split('/resolve/main/')[1]}")
                self.send_header("content-length", "0")
                self.end_headers()
            else:
                self.send_error(404)

        def do_HEAD(self) -> None:
            """What the hub's library asks before it downloads: the file's hash, size and revision."""
            given = self.headers.get("Authorization", "")
            hub.hub_tokens.append(given)
            name = unquote(self.path.split("/resolve/main/")[-1])
            body = (hub.listed or hub.files).get(name)
            if hub.token is not None and given != f"Bearer {hub.token}":
                self.send_error(401)
            elif body is None:
                self.send_error(404)
            else:
                self.send_response(302)
                self.send_header("location", f"{hub.store_url}/{name}")
                self.send_header("x-repo-commit", COMMIT)
                self.send_header("x-linked-etag", f'"{_etag(name, body)}"')
                self.send_header("x-linked-size", str(len(body)))
                self.send_header("content-length", "0")
                self.end_headers()

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
    threads = [threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True) for server in servers]
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
