"""Real clients that stream from a sleeping model: the comments that they get meanwhile change nothing for them."""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.clients.conftest import node_folder, python_environment
from tests.gateway import scripted_engine as scripts
from tests.gateway.calling import eventually, open_chat
from tests.gateway.conftest import Served, engine, serve
from tests.gateway.scripted_engine import Asked, ScriptedEngine

from aimgpu.gateway.application import GatewaySettings
from aimgpu.gateway.routes import Arrival

__all__ = ["engine", "serve"]
HERE = Path(__file__).parent
CALLS = {"chat", "completion", "responses", "messages"}
Program = Callable[[], list[str]]


def python_program() -> list[str]:
    return [str(python_environment("clients")), str(HERE / "python" / "waking.py")]


def node_program() -> list[str]:
    return ["node", str(node_folder() / "waking.mjs")]


async def answer(this: ScriptedEngine, asked: Asked) -> None:
    if "/v1/completions" not in asked.line:
        await scripts.polite(this, asked)
        return
    await scripts.begin_stream(asked)
    chunk = {"id": "c", "object": "text_completion", "created": 1, "model": "m", "choices": [{"index": 0, "text": "Hello!"}]}
    await scripts.write_chunk(asked, b"data: " + json.dumps(chunk).encode() + b"\n\ndata: [DONE]\n\n")
    await scripts.end_stream(asked)


def stream_while_it_sleeps(served: Served, program: list[str], then: Callable[[], None]) -> dict[str, dict[str, str]]:
    """What each call of the program got; `then` happens when all of them have seen a comment."""
    served.routes.put("chat", "sleeping", arrival=Arrival(slots=8, seconds=30.0))
    environment = os.environ | {"AIMGPU_CLIENTS_URL": served.url, "NO_PROXY": "127.0.0.1"}
    with subprocess.Popen(program, env=environment, stdout=subprocess.PIPE, text=True) as running:
        assert eventually(lambda: served.gateway.slots.queued("chat") == len(CALLS), 120)
        with open_chat(served.port, stream=True) as last, last.makefile("rb") as lines:  # its comment comes after theirs
            while not lines.readline().startswith(b": waking chat, about 30 s"):
                pass
            then()
        printed, _ = running.communicate(timeout=120)
    return {line.pop("call"): line for line in map(json.loads, printed.splitlines())}


@pytest.mark.parametrize("program", [python_program, node_program])
def test_streams_that_begin_with_comments_are_read(
    serve: Callable[..., Served], engine: ScriptedEngine, program: Program
) -> None:
    served = serve(settings=GatewaySettings(wake_heartbeat_seconds=0.05))
    engine.script = answer
    got = stream_while_it_sleeps(served, program(), lambda: served.routes.serve("chat", engine, slots=8))
    assert got == {call: {"text": "Hello!"} for call in CALLS}


@pytest.mark.parametrize("program", [python_program, node_program])
def test_a_refusal_after_comments_is_an_error_of_the_client(serve: Callable[..., Served], program: Program) -> None:
    served = serve(settings=GatewaySettings(wake_heartbeat_seconds=0.05))
    got = stream_while_it_sleeps(served, program(), lambda: served.routes.replace([]))
    assert set(got) == CALLS
    assert all("'chat' was removed" in line["error"] for line in got.values()), got
