"""One bounded question to an engine over loopback HTTP."""

import http.client
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

_BOUND_SECONDS = 3.0
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


def ask(
    url: str, *, api_key: str | None = None, content: Mapping[str, object] | None = None, bound_seconds: float = _BOUND_SECONDS
) -> Answer | None:
    """GET, or POST where there is content. None: no HTTP answer within the bound."""
    parts = urlsplit(url)
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    body = None
    if content is not None:
        body = json.dumps(content)
        headers["Content-Type"] = "application/json"
    deadline = time.monotonic() + bound_seconds
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=bound_seconds)
    try:
        connection.request("GET" if body is None else "POST", target, body=body, headers=headers)
        with connection.getresponse() as response:
            return Answer(status=response.status, body=_read_until(response, connection, deadline))
    except (OSError, http.client.HTTPException, ValueError):
        return None
    finally:
        connection.close()


def _read_until(response: http.client.HTTPResponse, connection: http.client.HTTPConnection, deadline: float) -> bytes:
    """The body as far as it comes before the deadline: an engine that dribbles must not hold its asker."""
    body = b""
    while len(body) < _LARGEST_ANSWER_BYTES:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        if connection.sock is not None:
            connection.sock.settimeout(left)
        piece = response.read1(16 * 1024)
        if not piece:
            break
        body += piece
    return body
