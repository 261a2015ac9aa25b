"""What answers at an engine's address gets nothing before it was found to be that engine."""

import contextlib
import http.server
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from aimgpu import procfs
from aimgpu.domain import ProcessIdentity
from aimgpu.engines import ownership
from aimgpu.engines.health import ask
from aimgpu.engines.launchers.registry import identify
from aimgpu.engines.ownership import EngineOwner, check_peer, expecting
from aimgpu.errors import StrangerListens

LISTEN = """
import os, socket, sys, time
listener = socket.create_server(("127.0.0.1", 0))
if sys.argv[1] == "child" and os.fork():
    listener.close()
    time.sleep(600)
print(listener.getsockname()[1], flush=True)
if sys.argv[1] == "accept":
    held = listener.accept()[0]
    print("accepted", flush=True)
time.sleep(600)
"""


@contextlib.contextmanager
def engine(how: str = "listen") -> Iterator[tuple[EngineOwner, int, "subprocess.Popen[str]"]]:
    """A process in a session of its own that listens, and its port."""
    command = [sys.executable, "-c", LISTEN, how]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            assert process.stdout is not None
            port = int(process.stdout.readline())
            yield EngineOwner(instance_id="chat-0", process=identity(process.pid)), port, process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)


def identity(pid: int) -> ProcessIdentity:
    found = procfs.read_process(pid)
    assert found is not None
    return identify(found)


def check(owner: EngineOwner, port: int, accepted: "subprocess.Popen[str] | None" = None) -> None:
    with socket.create_connection(("127.0.0.1", port)) as connection:
        if accepted is not None:
            assert accepted.stdout is not None
            assert accepted.stdout.readline() == "accepted\n"
        check_peer(owner, connection.getsockname()[:2], connection.getpeername()[:2])


def test_an_engine_is_known_by_its_listener_before_it_accepts() -> None:
    with engine() as (owner, port, _):
        check(owner, port)


def test_an_engine_is_known_by_the_socket_that_it_accepted() -> None:
    with engine("accept") as (owner, port, process):
        check(owner, port, process)


def test_a_child_of_the_engine_may_listen_for_it() -> None:
    with engine("child") as (owner, port, _):
        check(owner, port)


@pytest.mark.parametrize("how", ["listen", "accept"])
def test_a_neighbour_at_the_port_is_refused_by_name(how: str) -> None:
    with engine() as (owner, _, _), engine(how) as (_, port, process), pytest.raises(StrangerListens) as refused:
        check(owner, port, process if how == "accept" else None)
    assert f"(user {os.geteuid()}) listens at port {port} in place of chat-0" in str(refused.value)


def test_an_engine_that_ended_owns_nothing_even_where_its_pid_is_used_again() -> None:
    with engine() as (owner, port, process):
        later = EngineOwner(
            instance_id="chat-0",
            process=ProcessIdentity(pid=process.pid, start_ticks=owner.process.start_ticks + 1, boot_id=owner.process.boot_id),
        )
        with pytest.raises(StrangerListens):
            check(later, port)


def test_a_containers_port_is_held_by_docker_or_this_user(tmp_path: Path) -> None:
    head = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"

    def table(uid: int) -> Path:
        row = f"   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000 {uid:>5}        0 77 1\n"
        (tmp_path / "tcp").write_text(head + row)
        return tmp_path

    owner = EngineOwner(instance_id="chat-0", process=identity(os.getpid()), in_container=True)
    for uid in (0, os.geteuid()):
        check_peer(owner, ("127.0.0.1", 5), ("127.0.0.1", 8080), table(uid))
    with pytest.raises(StrangerListens, match="user 54321"):
        check_peer(owner, ("127.0.0.1", 5), ("127.0.0.1", 8080), table(54321))
    with pytest.raises(StrangerListens, match="user unknown"):
        check_peer(owner, ("127.0.0.1", 5), ("127.0.0.1", 8081), table(0))


def test_no_byte_is_sent_to_a_neighbour_at_the_port() -> None:
    heard = []

    class Thief(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            heard.append(self.headers)
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Thief)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_address[1]}/health"
    try:
        with engine() as (owner, _, _), pytest.raises(StrangerListens), expecting(owner):
            ask(url, api_key="secret")
        with engine() as (owner, _, _), pytest.raises(StrangerListens):
            ask(url, api_key="secret", owner=owner)
        assert heard == []
        assert ask(url) is not None, "and it does answer"
    finally:
        server.shutdown()
        server.server_close()


def test_an_engine_that_ends_while_it_is_looked_at_is_not_taken_for_a_neighbour(monkeypatch: pytest.MonkeyPatch) -> None:
    with engine() as (owner, port, process), socket.create_connection(("127.0.0.1", port)) as connection:

        def ends_now(_owner: EngineOwner, _user: int, _inode: int) -> bool:
            process.kill()
            process.wait()
            return False

        monkeypatch.setattr(ownership, "_belongs", ends_now)
        with pytest.raises(ConnectionResetError):
            check_peer(owner, connection.getsockname()[:2], connection.getpeername()[:2])
