"""A registry with one small image, for a real Docker to pull from; Docker needs no certificate for one on this machine."""

import gzip
import hashlib
import io
import json
import os
import sys
import tarfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
_FILLING_BYTES = 3_000_000  # so that a download has a half


@dataclass(slots=True)
class Registry:
    image: str = ""
    gate: threading.Event | None = None  # from its half the layer only trickles until it is set
    pulls: list[str] = field(default_factory=list)
    broken_off: list[str] = field(default_factory=list)
    blobs: dict[str, tuple[str, bytes]] = field(default_factory=dict)  # by digest: kind, content


@contextmanager
def serve_registry() -> Iterator[Registry]:
    state = Registry()
    _fill(state)

    class Handler(_Handler):
        registry = state

    class Server(ThreadingHTTPServer):
        def handle_error(self, request: Any, client_address: Any) -> None:
            """A caller that goes away is no news; anything else is."""
            if not isinstance(sys.exception(), ConnectionError):
                super().handle_error(request, client_address)

    with Server(("127.0.0.1", 0), Handler) as server:
        state.image = f"127.0.0.1:{server.server_address[1]}/test/engine:1"
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield state
        server.shutdown()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    registry: ClassVar[Registry]
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        name = self.path.rpartition("/")[2]
        if self.path == "/v2/":
            self._send("application/json", b"{}")
        elif "/manifests/" in self.path and (name == "1" or name in self.registry.blobs):
            digest = next(key for key, (kind, _) in self.registry.blobs.items() if kind == _MANIFEST)
            self._send(_MANIFEST, self.registry.blobs[digest][1], digest)
        elif "/blobs/" in self.path and name in self.registry.blobs:
            kind, content = self.registry.blobs[name]
            self._send_layer(content) if kind == "layer" else self._send(kind, content, name)
        else:
            self.send_response(404)
            self.send_header("Content-Length", "0")
            self.end_headers()

    def do_HEAD(self) -> None:
        self.do_GET()

    def _send_layer(self, content: bytes) -> None:
        self.registry.pulls.append(self.registry.image)
        self.send_response(200)
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        sent = len(content) // 2
        self.wfile.write(content[:sent])
        try:
            while self.registry.gate is not None and not self.registry.gate.wait(0.05):  # Docker notices nothing without a byte
                sent += self.connection.send(content[sent : sent + 64])
            self.wfile.write(content[sent:])
        except OSError:
            self.registry.broken_off.append(self.registry.image)
            self.close_connection = True

    def _send(self, kind: str, content: bytes, digest: str | None = None) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Docker-Distribution-Api-Version", "registry/2.0")
        if digest:
            self.send_header("Docker-Content-Digest", digest)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - http.server's name
        """Quiet."""


def _fill(registry: Registry) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        folder = tarfile.TarInfo("tmp")
        folder.type, folder.mode = tarfile.DIRTYPE, 0o1777
        archive.addfile(folder)
        file = tarfile.TarInfo("filling")
        file.size = _FILLING_BYTES
        archive.addfile(file, io.BytesIO(os.urandom(_FILLING_BYTES)))  # another layer each time: Docker keeps what it has
    plain = buffer.getvalue()
    layer = gzip.compress(plain, 1)
    config = json.dumps(
        {"architecture": "amd64", "os": "linux", "config": {}, "rootfs": {"type": "layers", "diff_ids": [_digest(plain)]}}
    ).encode()
    manifest = {
        "schemaVersion": 2,
        "mediaType": _MANIFEST,
        "config": _entry("application/vnd.docker.container.image.v1+json", config),
        "layers": [_entry("application/vnd.docker.image.rootfs.diff.tar.gzip", layer)],
    }
    registry.blobs[_digest(config)] = ("application/octet-stream", config)
    registry.blobs[_digest(layer)] = ("layer", layer)
    text = json.dumps(manifest).encode()
    registry.blobs[_digest(text)] = (_MANIFEST, text)


def _entry(kind: str, content: bytes) -> dict[str, object]:
    return {"mediaType": kind, "size": len(content), "digest": _digest(content)}


def _digest(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"
