"""One bounded question to an engine over loopback HTTP."""

import json
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import httptools

from aimgpu.engines.ownership import EngineOwner, check_peer, expected

_BOUND_SECONDS = 3.0
_HTTP_PORT = 80
_LARGEST_ANSWER_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An HTTP answer of an engine."""

    status: int
    body: bytes

    def read_json(self) -> Mapping[str, object] | None:
        """The body as a JSON object; None where it is anything else."""
        try:
            content = json.loads(self.body)
        except ValueError:
            return None
        return content if isinstance(content, dict) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointFile:
    """What an engine says of itself in its run directory; `url` None: it is there but does not listen yet."""

    url: str | None


def read_endpoint(path: Path) -> EndpointFile | None:
    """The endpoint file of a run; None where it is missing, damaged or names another scheme than http."""
    try:
        content = json.loads(path.read_bytes())
        url = content.get("url")
    except (OSError, ValueError, AttributeError):
        return None
    if url is None:
        return EndpointFile(url=None)
    parts = urlsplit(str(url))
    return EndpointFile(url=str(url)) if parts.scheme == "http" and parts.hostname and parts.port else None


def ask(  # noqa: PLR0913 - a question has so many sides
    url: str,
    *,
    api_key: str | None = None,
    content: Mapping[str, object] | None = None,
    bound_seconds: float = _BOUND_SECONDS,
    owner: EngineOwner | None = None,
    most_bytes: int = _LARGEST_ANSWER_BYTES,
) -> Answer | None:
    """GET, or POST where there is content. None: no HTTP answer within the bound.

    `owner`: whose the address must be, beside the one that is `expecting`. Raises StrangerListens before anything is sent.
    """
    parts = urlsplit(url)
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    body = None
    if content is not None:
        body = json.dumps(content)
        headers["Content-Type"] = "application/json"
    deadline = time.monotonic() + bound_seconds
    try:
        with socket.create_connection((parts.hostname or "", parts.port or _HTTP_PORT), bound_seconds) as connection:
            if owner := owner or expected():
                check_peer(owner, connection.getsockname()[:2], connection.getpeername()[:2])
            connection.sendall(_request(parts.netloc, target, headers, body))
            return _read_answer(connection, deadline, most_bytes)
    except (OSError, ValueError, httptools.HttpParserError):
        return None


def _request(host: str, target: str, headers: Mapping[str, str], body: str | None) -> bytes:
    content = b"" if body is None else body.encode()
    lines = [f"{'GET' if body is None else 'POST'} {target} HTTP/1.1", f"Host: {host}", "Connection: close", "Accept: */*"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    if body is not None:
        lines.append(f"Content-Length: {len(content)}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + content


class _Response:
    """Fed by the parser."""

    def __init__(self) -> None:
        self.body = b""
        self.complete = False
        self.has_head = False

    def on_headers_complete(self) -> None:
        self.has_head = True

    def on_body(self, piece: bytes) -> None:
        self.body += piece

    def on_message_complete(self) -> None:
        self.complete = True


def _read_answer(connection: socket.socket, deadline: float, most_bytes: int) -> Answer:
    """As far as it comes before the deadline: an engine that dribbles must not hold its asker.

    Parsed in C: many engines that load are asked often, by the process that serves requests.
    """
    response = _Response()
    parser = httptools.HttpResponseParser(response)
    while not response.complete and len(response.body) < most_bytes:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        connection.settimeout(left)
        piece = connection.recv(16 * 1024)
        if not piece:
            break  # the end of a body without a length
        parser.feed_data(piece)
    if not response.has_head:
        raise ConnectionError("closed before an answer came")
    return Answer(status=int(parser.get_status_code()), body=response.body)
