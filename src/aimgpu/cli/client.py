"""How commands talk to the daemon: JSON over HTTP on loopback, with the token of its home.

An apply answers with one JSON event a line, as it happens:
`plan` {steps: [{kind, deployment, text, ...}], refusals: [{ask, summary, reasons, would_fit}], unchanged: [names],
beside: [names]},
`progress` {what, done_bytes, total_bytes}, `state` {deployment, instance, state, percent, reason, last_lines},
`step` and `refused` {deployment, text}, `error` {code, message, hint}, `done`.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException, HTTPResponse
from json import JSONDecodeError, dumps, loads
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

from aimgpu.errors import AimGpuError, DaemonUnreachable, all_errors
from aimgpu.home import Home

_PREFIX = "/api/v1"
_CONNECT_SECONDS = 10.0


def start_line() -> str:
    """What starts a daemon from this folder."""
    return "aimgpu up" if Path("stack.yaml").is_file() or Path("stack.yml").is_file() else "aimgpu up --example"


class DaemonClient:
    """The daemon's API, one method per call."""

    def __init__(self, url: str, token: str | None) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 80
        self._token = token

    def read_status(self) -> dict[str, Any]:
        """What runs, on which GPUs."""
        return self._json("GET", "/status", timeout_seconds=_CONNECT_SECONDS)

    def read_scores(self) -> dict[str, Any]:
        """Promises kept and broken, queues, and pressure: what `aimgpu slo` and `aimgpu top` show."""
        return self._json("GET", "/slo", timeout_seconds=_CONNECT_SECONDS)

    def read_state(self) -> dict[str, Any]:
        """GPUs with their shares and models with their traffic: what the page and `aimgpu top` show."""
        return self._json("GET", "/state", timeout_seconds=_CONNECT_SECONDS)

    def read_snapshot(self) -> dict[str, Any]:
        """What placement decides on."""
        return self._json("GET", "/snapshot", timeout_seconds=_CONNECT_SECONDS)

    def make_link(self) -> str:
        """The address that opens the page in one browser, once."""
        return str(self._json("POST", "/links", {}, timeout_seconds=_CONNECT_SECONDS)["url"])

    def apply(
        self,
        stack: str,
        base_directory: str,
        *,
        dry_run: bool = False,
        make_room: bool = False,
        prune: bool = False,
        launcher: str | None = None,
    ) -> Iterator[dict[str, Any]]:
        """Events, one by one; ends with the stream. A stream that breaks off raises DaemonUnreachable.

        `launcher` is for every model, whatever the stack says.
        """
        body = {"stack": stack, "base_directory": base_directory}
        flags = {"dry_run": dry_run, "make_room": make_room, "prune": prune}
        query = {name: str(int(on)) for name, on in flags.items()} | ({"launcher": launcher} if launcher else {})
        return self._events(f"/apply?{urlencode(query)}", body)

    def exec(self, program: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Events as of `apply`; `granted` has the environment of the program."""
        return self._events("/exec", program)

    def plan_partition(self, device_id: str, layout: str) -> dict[str, Any]:
        """What a change of layout would stop and bring back."""
        return self._json("POST", "/partition?dry_run=1", {"device": device_id, "layout": layout})

    def partition(self, device_id: str, layout: str, *, reload_driver: bool) -> Iterator[dict[str, Any]]:
        """Events as of `apply`."""
        return self._events("/partition", {"device": device_id, "layout": layout, "reload_driver": reload_driver})

    def resize(self, name: str, memory_bytes: int, *, dry_run: bool) -> dict[str, Any]:
        """Give a running model another share."""
        return self._json("POST", f"/resize?dry_run={int(dry_run)}", {"model": name, "memory_bytes": memory_bytes})

    def release(self, names: list[str]) -> dict[str, Any]:
        """Stop these models."""
        return self._json("POST", "/release", {"names": names})

    def stop(self) -> dict[str, Any]:
        """Release everything; the daemon exits after it answered."""
        return self._json("POST", "/stop", {})

    def read_log(self, instance_id: str, *, follow: bool, lines: int) -> Iterator[str]:
        """The lines of a model's log, as they come with `follow`."""
        query = urlencode({"follow": int(follow), "lines": lines})
        with self._request("GET", f"/instances/{instance_id}/log?{query}") as response:
            for line in _lines(response):
                yield line.decode(errors="replace").rstrip("\n")

    def _events(self, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        finished = False
        with self._request("POST", path, body) as response:
            for line in _lines(response):
                if line.strip():
                    event = _parse(line)
                    finished = finished or event.get("event") in ("done", "error", "refused")
                    yield event
        if not finished:
            raise DaemonUnreachable("the daemon stopped answering", hint="Look at its log: `aimgpu doctor` says where it is.")

    def _json(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, *, timeout_seconds: float | None = None
    ) -> dict[str, Any]:
        with self._request(method, path, body, timeout_seconds=timeout_seconds) as response:
            text = response.read()
        return _parse(text) if text.strip() else {}

    @contextmanager
    def _request(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, *, timeout_seconds: float | None = None
    ) -> Iterator[HTTPResponse]:
        connection = HTTPConnection(self._host, self._port, timeout=_CONNECT_SECONDS)
        headers = {"Authorization": f"Bearer {self._token}"} if self._token else {}
        try:
            connection.connect()
            connection.sock.settimeout(timeout_seconds)
            payload = None if body is None else dumps(body)
            connection.request(method, _PREFIX + path, payload, headers | {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status >= 400:  # noqa: PLR2004 -- HTTP's own line
                raise _error_of(response)
            yield response
        except (OSError, HTTPException) as error:
            where = f"http://{self._host}:{self._port}"
            raise DaemonUnreachable(f"the daemon at {where} does not answer: {error}", hint=_start_hint()) from error
        finally:
            connection.close()


def connect(home: Home) -> DaemonClient:
    """The daemon of this home, or DaemonUnreachable."""
    record = home.read_daemon()
    if record is None:
        raise DaemonUnreachable(f"no daemon runs (looked in {home.path})", hint=_start_hint())
    return DaemonClient(record.url, home.read_token())


def _start_hint() -> str:
    return f"Start one with `{start_line()}`."


def error_from_json(body: Mapping[str, Any]) -> AimGpuError:
    """The error that the daemon meant, as its own class."""
    kinds = {kind.code: kind for kind in all_errors()}
    kind = kinds.get(str(body.get("code")), AimGpuError)
    return kind(str(body.get("message") or body.get("text") or "unknown error"), hint=body.get("hint"))


def _error_of(response: HTTPResponse) -> AimGpuError:
    text = response.read()
    try:
        body = loads(text)["error"]
        return error_from_json(body)
    except (JSONDecodeError, KeyError, TypeError, AttributeError):
        return AimGpuError(
            f"the daemon answered {response.status} {response.reason}", hint="Does another program listen on this port?"
        )


def _lines(response: HTTPResponse) -> Iterator[bytes]:
    while line := response.readline():
        yield line


def _parse(line: bytes) -> dict[str, Any]:
    try:
        value = loads(line)
    except JSONDecodeError as error:
        raise AimGpuError(f"the daemon answered something that is not JSON: {line[:80]!r}") from error
    if not isinstance(value, dict):
        raise AimGpuError(f"the daemon answered something that is not a JSON object: {line[:80]!r}")
    return value
