"""The few calls of Docker's engine API that a launcher needs, over its unix socket."""

import contextlib
import http.client
import json
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from aimgpu.errors import EngineFailed, EngineUnavailable, NotAllowed

DEFAULT_SOCKET = Path("/var/run/docker.sock")
_VERSION = "/v1.41"  # Docker 20.10, and what later ones still speak
_TIMEOUT_SECONDS = 60.0
_PULL_TIMEOUT_SECONDS = 600.0  # between two words of progress
_NOT_FOUND = 404
_NOT_MODIFIED = 304
_FAILURES = 400


class DockerApi:
    """The few calls of the Docker engine API that a launcher needs."""

    def __init__(self, path: Path = DEFAULT_SOCKET) -> None:
        self.path = path

    def read_info(self) -> Mapping[str, Any]:
        """What `docker info` prints."""
        return dict(self._ask("GET", "/info") or {})

    def has_image(self, image: str) -> bool:
        """Whether the image is on this machine."""
        return self._ask("GET", f"/images/{quote(image, safe='')}/json", missing_is_none=True) is not None

    def begin_pull(self, image: str) -> "Pull":
        """Start a pull; the response streams its progress."""
        return Pull(self._connect(_PULL_TIMEOUT_SECONDS), image)

    def create(self, name: str, body: Mapping[str, Any]) -> str:
        """Create a container under a name; returns its id."""
        answer = self._ask("POST", f"/containers/create?{urlencode({'name': name})}", body)
        return str((answer or {})["Id"])

    def start(self, container: str) -> None:
        """Start a created container."""
        self._ask("POST", f"/containers/{quote(container)}/start")

    def inspect(self, container: str) -> Mapping[str, Any] | None:
        """None: there is no such container."""
        answer = self._ask("GET", f"/containers/{quote(container)}/json", missing_is_none=True)
        return answer if isinstance(answer, dict) else None

    def list_ids(self, label: str) -> tuple[str, ...]:
        """Of every container with this label ("name=value"), whatever its state."""
        filters = json.dumps({"label": [label]})
        answer = self._ask("GET", f"/containers/json?{urlencode({'all': 'true', 'filters': filters})}")
        return tuple(str(one["Id"]) for one in answer or ())

    def kill(self, container: str, signal_name: str) -> None:
        """A container that has ended already is not an error."""
        self._ask(
            "POST", f"/containers/{quote(container)}/kill?signal={signal_name}", missing_is_none=True, conflict_is_none=True
        )

    def remove(self, container: str) -> None:
        """With its processes, if some are left; one that is gone is not an error."""
        path = f"/containers/{quote(container)}?force=true&v=true"
        self._ask("DELETE", path, missing_is_none=True, conflict_is_none=True)

    def _ask(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        missing_is_none: bool = False,
        conflict_is_none: bool = False,
    ) -> Any:  # noqa: ANN401 - JSON
        connection = self._connect(_TIMEOUT_SECONDS)
        try:
            with send(connection, method, path, body) as response:
                content = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise EngineFailed(f"Docker did not answer at {self.path}: {error}", hint="See: systemctl status docker") from error
        finally:
            connection.close()
        if (response.status == _NOT_FOUND and missing_is_none) or (
            response.status == http.client.CONFLICT and conflict_is_none
        ):
            return None
        if response.status >= _FAILURES:
            what = f"{method} {path.split('?', maxsplit=1)[0]}"
            raise EngineFailed(f"Docker refused {what}: {_message(content)}", hint="See: docker info")
        return json.loads(content) if content and response.status != _NOT_MODIFIED else {}

    def _connect(self, timeout_seconds: float) -> http.client.HTTPConnection:
        connection = _UnixConnection(self.path, timeout_seconds)
        try:
            connection.connect()
        except PermissionError as error:
            raise NotAllowed(
                f"you may not use Docker: {self.path} is closed to you",
                hint="Add yourself to the group `docker`, then log in again.",
            ) from error
        except OSError as error:
            raise EngineUnavailable(
                f"Docker is not running: no answer at {self.path}",
                hint="Start it (systemctl start docker), or use --launcher process.",
                page_hint="Start it (systemctl start docker), or set `launcher: process` in the model's stack entry.",
            ) from error
        return connection


class Pull:
    """One pull under way, which another thread may cancel."""

    def __init__(self, connection: http.client.HTTPConnection, image: str) -> None:
        self._connection = connection
        self._socket = connection.sock  # the connection forgets it once an answer comes that it must end with
        self._image = image

    def events(self) -> Iterator[dict[str, Any]]:
        """As Docker sends them; one with "error" is the last. Raises EngineFailed where Docker itself refuses or is gone."""
        repository, tag = split_image(self._image)
        path = f"/images/create?{urlencode({'fromImage': repository, 'tag': tag})}"
        try:
            with send(self._connection, "POST", path, None) as response:
                if response.status >= _FAILURES:
                    raise EngineFailed(_message(response.read()))
                for line in response:
                    yield dict(json.loads(line))
        except (OSError, ValueError, AttributeError, http.client.HTTPException) as error:
            raise EngineFailed(str(error) or "the pull was cut short") from error
        finally:
            self._connection.close()

    def cancel(self) -> None:
        """The reader sees an end; a pull that has ended is not an error."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)


def send(
    connection: http.client.HTTPConnection, method: str, path: str, body: Mapping[str, Any] | None
) -> http.client.HTTPResponse:
    """One request over the Unix socket."""
    headers = {"Content-Type": "application/json"} if body is not None else {}
    connection.request(method, _VERSION + path, body=None if body is None else json.dumps(body), headers=headers)
    return connection.getresponse()


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path, timeout_seconds: float) -> None:
        super().__init__("docker", timeout=timeout_seconds)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        try:
            self.sock.connect(str(self._path))
        except OSError:
            self.sock.close()
            raise


def split_image(image: str) -> tuple[str, str]:
    """Repository and tag; a port in the registry's name is not a tag."""
    repository, colon, tag = image.rpartition(":")
    return (repository, tag) if colon and "/" not in tag else (image, "latest")


def _message(content: bytes) -> str:
    try:
        return str(json.loads(content)["message"])
    except (ValueError, KeyError, TypeError):
        return content.decode("utf-8", "replace")[:300] or "no reason given"
