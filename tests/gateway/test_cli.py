"""`aimgpu chat`, `slo` and `top` as processes, against a real gateway on a real socket."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.gateway import scripted_engine as scripts
from tests.gateway.calling import chat
from tests.gateway.conftest import Served
from tests.gateway.scripted_engine import ScriptedEngine

from aimgpu.domain import Priority, ServiceObjective
from aimgpu.errors import DaemonUnreachable, EngineDisconnected, NotAuthenticated, UnknownDeployment
from aimgpu.gateway.auth import Caller, KeyTable
from aimgpu.gateway.http.asgi import Receive, Scope, Send, send_json
from aimgpu.home import DaemonRecord, Home
from aimgpu.keyfile import hash_key
from aimgpu.procfs import read_boot_id, read_start_ticks

Serve = Callable[..., Served]
STATUS = {
    "simulated": True,
    "gpus": [
        {
            "id": "gpu0",
            "product": "MI300X",
            "name": "MI300X",
            "layout": "SPX/NPS1",
            "granted_bytes": 2 << 30,
            "measured_bytes": None,
            "free_bytes": 190 << 30,
        }
    ],
}


def run(home: Path, *arguments: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "aimgpu.cli.main", *arguments],
        input=text,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, "AIMGPU_HOME": str(home)},
    )


def announce(home: Path, served: Served) -> None:
    """What the daemon writes so that commands find it; the control API's two answers in front of the gateway."""
    gateway = served.gateway

    async def front(scope: Scope, receive: Receive, send: Send) -> None:
        if scope.get("path") == "/api/v1/status":
            await send_json(send, STATUS)
        elif scope.get("path") == "/api/v1/slo":
            await send_json(send, gateway.slo_monitor.report())
        else:
            await gateway(scope, receive, send)

    served.server.config.loaded_app = front
    pid = os.getpid()
    record = DaemonRecord(
        pid=pid,
        start_ticks=read_start_ticks(pid) or 0,
        boot_id=read_boot_id(),
        host="127.0.0.1",
        port=served.port,
        url=served.url,
    )
    Home(home).create()
    Home(home).write_daemon(record)
    Home(home).token_file.write_text("token")


def test_chat_streams_and_remembers_what_was_said(serve: Serve, engine: ScriptedEngine, tmp_path: Path) -> None:
    served = serve()
    served.routes.serve("chat", engine)
    announce(tmp_path, served)
    done = run(tmp_path, "chat", text="one\n\ntwo\n/clear\nthree\n")
    assert (done.returncode, done.stdout) == (0, "Hello!\nHello!\nHello!\n"), done.stderr
    said = [[m["content"] for m in asked.fields["messages"]] for asked in engine.asked]  # type: ignore[attr-defined]
    assert said == [["one"], ["one", "Hello!", "two"], ["three"]]


def test_chat_as_json_and_with_a_system_message(serve: Serve, engine: ScriptedEngine, tmp_path: Path) -> None:
    served = serve()
    served.routes.serve("other", engine)
    done = run(tmp_path, "chat", "other", "--url", served.url, "--system", "Be kind.", "--json", text="hi\n")
    assert json.loads(done.stdout) == {"model": "other", "role": "assistant", "content": "Hello!"}
    assert engine.asked[0].fields["messages"][0] == {"role": "system", "content": "Be kind."}  # type: ignore[index]


def test_chat_without_a_key_says_where_to_put_one(serve: Serve, tmp_path: Path) -> None:
    served = serve(keys=KeyTable({hash_key("k" * 40): Caller(name="ann")}))
    done = run(tmp_path, "chat", "chat", "--url", served.url, text="hi\n")
    assert done.returncode == NotAuthenticated.exit_status
    assert "AIMGPU_API_KEY" in done.stderr
    assert "aimgpu keys add" in done.stderr


def test_chat_fails_loudly(serve: Serve, engine: ScriptedEngine, tmp_path: Path) -> None:
    assert run(tmp_path, "chat", text="hi\n").returncode == DaemonUnreachable.exit_status
    gone = run(tmp_path, "chat", "m", "--url", "http://127.0.0.1:1", text="hi\n")
    assert gone.returncode == DaemonUnreachable.exit_status
    nothing_said = run(tmp_path, "chat", "m", "--url", "http://127.0.0.1:1", text="")
    assert nothing_said.returncode == DaemonUnreachable.exit_status
    assert "aimgpu up" in gone.stderr
    served = serve()
    served.routes.serve("chat", engine)
    wrong = run(tmp_path, "chat", "nope", "--url", served.url, text="hi\n")
    assert wrong.returncode == UnknownDeployment.exit_status
    assert "Deployed: chat" in wrong.stderr
    engine.script = scripts.die_mid_event
    assert run(tmp_path, "chat", "--url", served.url, text="hi\n").returncode == EngineDisconnected.exit_status


@pytest.fixture
def busy(serve: Serve, engine: ScriptedEngine, tmp_path: Path) -> Path:
    served = serve()
    promise = ServiceObjective(ttft_p95_ms=60_000, availability_ppm=999_000)
    served.routes.serve("chat", engine, priority=Priority.HIGH, objective=promise, device="gpu0", simulated=True)
    announce(tmp_path, served)
    for _ in range(12):
        assert chat(served.port, stream=True).status == 200
    assert chat(served.port, {"x-aimgpu-priority": "low"}).status == 200
    served.observer.wait_for(13)
    return tmp_path


def test_slo_shows_promises_and_what_was_kept(busy: Path) -> None:
    done = run(busy, "slo")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].split()[:3] == ["MODEL", "CLASS", "PROMISE"]
    assert "95% ttft <= 60s" in lines[1]
    assert "100.00%" in lines[1]
    assert "99.9% availability" in lines[2]
    assert any(line.split()[0] == "low" for line in lines)
    target = json.loads(run(busy, "slo", "chat", "--json").stdout)["models"]["chat"]["targets"][0]
    assert (target["attainment"], target["budget_left"]) == (1.0, 1.0)
    unknown = run(busy, "slo", "nobody", "--json")
    assert (unknown.returncode, unknown.stdout) == (UnknownDeployment.exit_status, "")
