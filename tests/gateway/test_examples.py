"""The examples as people would run them."""

import os
import subprocess
import sys
from collections.abc import Callable
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

from tests.gateway.calling import CHAT, call
from tests.gateway.conftest import Served
from tests.gateway.scripted_engine import ScriptedEngine

Serve = Callable[..., Served]
EXAMPLES = Path(__file__).parents[2] / "examples"


def run_client(url: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(EXAMPLES / "chat_client.py"), *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={**os.environ, "AIMGPU_URL": url},
    )


def test_the_client_streams_an_answer(serve: Serve, engine: ScriptedEngine) -> None:
    served = serve()
    served.routes.serve("chat", engine, simulated=True)
    done = run_client(f"{served.url}/v1", "chat", "hi", "--priority", "low")
    assert (done.returncode, done.stdout) == (0, "Hello!\n")
    assert "simulated" in done.stderr
    assert served.observer.wait_for(1)[0].priority == "low"


def test_the_client_says_what_went_wrong(serve: Serve) -> None:
    served = serve()
    served.routes.put("late", "loading")
    wrong = run_client(f"{served.url}/v1", "nope", "hi")
    assert wrong.returncode != 0
    assert "404" in wrong.stderr
    assert "Ask again in 5 s" in run_client(f"{served.url}/v1", "late", "hi").stderr
    assert "does not answer" in run_client("http://127.0.0.1:1/v1", "chat", "hi").stderr


def test_the_web_chat_serves_its_page_and_passes_questions_on(serve: Serve, engine: ScriptedEngine) -> None:
    served = serve()
    served.routes.serve("chat", engine)
    command = [sys.executable, str(EXAMPLES / "web_chat" / "server.py"), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "AIMGPU_URL": served.url}) as server:
        try:
            assert server.stdout is not None
            port = urlsplit(server.stdout.readline().strip()).port
            assert port is not None
            page = HTTPConnection("127.0.0.1", port, timeout=60)
            page.request("GET", "/")
            assert b"<title>Chat</title>" in page.getresponse().read()
            page.close()
            streamed = call(port, "POST", "/v1/chat/completions", CHAT | {"stream": True})
            assert streamed.body.endswith(b"data: [DONE]\n\n")
            assert call(port, "GET", "/v1/models").json["data"][0]["id"] == "chat"
            assert call(port, "GET", "/api/v1/status").status == 404
        finally:
            server.terminate()
