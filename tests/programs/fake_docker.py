"""A stand-in for Docker's Engine API on a unix socket: its paths, states and errors; a container is a plain process.

What it answers was compared with Docker 20.10.24; the launcher's tests run against both.
"""

import json
import os
import re
import select
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit


@dataclass(slots=True)
class Container:
    id: str
    name: str
    body: dict[str, Any]
    process: "subprocess.Popen[bytes] | None" = None
    group: Path | None = None

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None


@dataclass(slots=True)
class FakeDocker:
    socket: Path
    images: set[str] = field(default_factory=lambda: {"engine:1"})
    registry: set[str] = field(default_factory=set)  # images that can be pulled
    refusals: dict[str, str] = field(default_factory=dict)  # image -> what its registry says instead
    gate: threading.Event | None = None  # pulls wait for it half-way
    pulls: list[str] = field(default_factory=list)  # every pull that was asked for
    broken_off: list[str] = field(default_factory=list)  # those whose caller went away
    info: dict[str, Any] = field(default_factory=dict)
    containers: dict[str, Container] = field(default_factory=dict)
    cgroup_root: Path | None = None  # where it makes groups, below those that it is told; None: it makes none

    def find(self, key: str) -> Container | None:
        return next((one for one in self.containers.values() if key in (one.id, one.name)), None)


@contextmanager
def serve_docker(path: Path) -> Iterator[FakeDocker]:
    docker = FakeDocker(socket=path)

    class Handler(_Handler):
        state = docker

    class Server(socketserver.ThreadingUnixStreamServer):
        daemon_threads = True

        def handle_error(self, request: Any, client_address: Any) -> None:
            """A caller that goes away is no news; anything else is."""
            if not isinstance(sys.exception(), ConnectionError):
                super().handle_error(request, client_address)

    with Server(str(path), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield docker
        server.shutdown()
        thread.join()
        for container in docker.containers.values():
            _end(container)


class _Handler(BaseHTTPRequestHandler):
    state: FakeDocker

    def address_string(self) -> str:
        return "unix"

    def do_GET(self) -> None:
        path, query = self._split()
        if path == "/info":
            self._send(200, {"ServerVersion": "20.10.24", **self.state.info})
        elif match := re.fullmatch(r"/images/(.+)/json", path):
            self._send(200, {"Id": "sha256:1"}) if match[1] in self.state.images else self._missing(
                f"No such image: {match[1]}"
            )
        elif path == "/containers/json":
            label = json.loads(query["filters"][0])["label"][0].split("=", 1)
            found = [one for one in self.state.containers.values() if one.body["Labels"].get(label[0]) == label[1]]
            self._send(200, [{"Id": one.id} for one in found])
        elif match := re.fullmatch(r"/containers/(.+)/json", path):
            self._inspect(match[1])
        else:
            self._missing("page not found")

    def do_POST(self) -> None:
        path, query = self._split()
        raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if path == "/images/create":
            self._pull(f"{query['fromImage'][0]}:{query['tag'][0]}")
        elif path == "/containers/create":
            self._create(query["name"][0], json.loads(raw))
        elif match := re.fullmatch(r"/containers/(.+)/start", path):
            self._start(match[1])
        elif match := re.fullmatch(r"/containers/(.+)/kill", path):
            self._kill(match[1], query["signal"][0])
        else:
            self._missing("page not found")

    def do_DELETE(self) -> None:
        path, _ = self._split()
        container = self.state.find(path.removeprefix("/containers/"))
        if container is None:
            self._missing("No such container")
            return
        _end(container)
        del self.state.containers[container.id]
        self._send(204, None)

    def _inspect(self, key: str) -> None:
        container = self.state.find(key)
        if container is None:
            self._missing(f"No such container: {key}")
            return
        pid = container.process.pid if container.process and container.running else 0
        status = container.process.poll() if container.process else 0
        state = {"Running": container.running, "Pid": pid, "ExitCode": status or 0, "OOMKilled": False}
        self._send(
            200, {"Id": container.id, "State": state, "Config": {key: container.body[key] for key in ("Labels", "Image")}}
        )

    def _create(self, name: str, body: dict[str, Any]) -> None:
        if body["Image"] not in self.state.images:
            self._missing(f"No such image: {body['Image']}")
        elif self.state.find(name):
            self._send(409, {"message": f'Conflict. The container name "/{name}" is already in use'})
        else:
            container = Container(id=os.urandom(32).hex(), name=name, body=body)
            self.state.containers[container.id] = container
            self._send(201, {"Id": container.id, "Warnings": []})

    def _start(self, key: str) -> None:
        container = self.state.find(key)
        if container is None:
            self._missing(f"No such container: {key}")
            return
        environment = dict(entry.split("=", 1) for entry in container.body["Env"])
        parent, group = container.body["HostConfig"].get("CgroupParent"), None
        if parent is not None and self.state.cgroup_root is not None:
            group = self.state.cgroup_root / parent.lstrip("/") / container.id
            group.mkdir()
        container.process = subprocess.Popen(
            [*([] if group is None else _joining(group)), *container.body["Entrypoint"], *container.body["Cmd"]],
            env={"PATH": os.environ["PATH"], **environment},
            cwd=container.body["WorkingDir"],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        container.group = group
        if group is not None:
            _wait_until_joined(group, container.process)
        self._send(204, None)

    def _kill(self, key: str, name: str) -> None:
        container = self.state.find(key)
        if container is None:
            self._missing(f"No such container: {key}")
        elif container.process is None or not container.running:
            self._send(409, {"message": f"Cannot kill container: {key}: Container {key} is not running"})
        else:
            with suppress(ProcessLookupError):  # it ended just now
                os.killpg(container.process.pid, signal.Signals[name])
            self._send(204, None)

    def _pull(self, image: str) -> None:
        self.state.pulls.append(image)
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self._event({"status": "Pulling from library", "id": image.split(":")[1]})
        if image not in self.state.registry:
            self._event({"error": self.state.refusals.get(image, f"manifest for {image} not found: manifest unknown")})
            return
        for layer in ("1a2b", "3c4d"):
            self._event({"status": "Pulling fs layer", "progressDetail": {}, "id": layer})
        self._event(_bar("Downloading", "1a2b", 40, 100))
        if self.state.gate is not None and not self._wait_for(self.state.gate, image):
            return
        self._event(_bar("Downloading", "3c4d", 100, 100))
        for layer in ("1a2b", "3c4d"):
            self._event({"status": "Download complete", "progressDetail": {}, "id": layer})
            self._event(_bar("Extracting", layer, 50, 100))
            self._event({"status": "Pull complete", "progressDetail": {}, "id": layer})
        self.state.images.add(image)

    def _wait_for(self, gate: threading.Event, image: str) -> bool:
        """False where the caller leaves meanwhile: Docker then stops the pull."""
        while not gate.wait(0.02):
            if select.select([self.connection], [], [], 0)[0] and not self.connection.recv(1, socket.MSG_PEEK):
                self.state.broken_off.append(image)
                return False
        return True

    def _event(self, content: dict[str, Any]) -> None:
        self.wfile.write(json.dumps(content).encode() + b"\r\n")
        self.wfile.flush()

    def _split(self) -> tuple[str, dict[str, list[str]]]:
        parts = urlsplit(self.path)
        return unquote(re.sub(r"^/v1\.\d+", "", parts.path)), parse_qs(parts.query)

    def _missing(self, message: str) -> None:
        self._send(404, {"message": message})

    def _send(self, status: int, content: object) -> None:
        payload = b"" if content is None else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        if status != 204:
            self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - http.server's name
        """Quiet."""


def _bar(status: str, layer: str, current: int, total: int) -> dict[str, Any]:
    return {
        "status": status,
        "id": layer,
        "progressDetail": {"current": current, "total": total},
        "progress": f"[==>  ] {current}B/{total}B",
    }


def _end(container: Container) -> None:
    if container.process and container.running:
        with suppress(ProcessLookupError):  # it ended just now
            os.killpg(container.process.pid, signal.SIGKILL)
    if container.process:
        container.process.wait()
    if container.group is not None:
        (container.group / "cgroup.procs").unlink(missing_ok=True)
        container.group.rmdir()


def _wait_until_joined(group: Path, process: "subprocess.Popen[bytes]") -> None:
    """Docker answers when the process is in its group."""
    file = group / "cgroup.procs"
    while process.poll() is None and not (file.exists() and str(process.pid) in file.read_text().split()):
        time.sleep(0.005)


def _joining(group: Path) -> list[str]:
    """The command before a command that is to be in the group from the start."""
    return ["/bin/sh", "-c", 'echo "$$" > "$0" && exec "$@"', str(group / "cgroup.procs")]
