"""`engine: command` and its presets: the command lines, the key, the memory, what is missing, and the names of models."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from aimgpu.domain import Ask, Deployment, EngineOverrides, Grant, Level, Memory, Priority, ServerProgram
from aimgpu.engines.command.engine import KEY_VARIABLE, CommandEngine
from aimgpu.engines.command.presets import PRESETS
from aimgpu.engines.launchers.container import container_body
from aimgpu.engines.protocols import Command, HealthState, LaunchRequest
from aimgpu.errors import EngineUnavailable
from aimgpu.units import GIB

MakeRequest = Callable[..., LaunchRequest]
KEY = "s3cret"


def grant(memory_bytes: int) -> Grant:
    return Grant(
        id="g",
        instance_id="chat-0",
        deployment="chat",
        node="n",
        device_id="d",
        partition_id="d/whole-0",
        memory_bytes=memory_bytes,
        compute_ppm=None,
        priority=Priority.MEDIUM,
        level=Level.NONE,
    )


def preset_request(make_request: MakeRequest, name: str) -> LaunchRequest:
    server = ServerProgram(argv=PRESETS[name].argv)
    return replace(make_request(model="org/m"), overrides=EngineOverrides(server=server), port=4321)


def build(make_request: MakeRequest, name: str) -> Command:
    return CommandEngine().command(preset_request(make_request, name))


@pytest.mark.parametrize("name", PRESETS)
def test_every_placeholder_of_a_preset_is_filled(make_request: MakeRequest, name: str) -> None:
    argv = build(make_request, name).argv
    assert {"org/m", "127.0.0.1", "4321"} <= set(argv)
    assert not [word for word in argv if "{" in word]


def test_in_a_container_it_listens_where_its_port_is_published(make_request: MakeRequest, tmp_path: Path) -> None:
    server = ServerProgram(argv=PRESETS["tei"].argv, directory=str(tmp_path))
    request = replace(make_request(model="org/m", launcher="docker"), overrides=EngineOverrides(server=server, image="a/b"))
    command = CommandEngine().command(replace(request, port=4321))
    body = container_body("chat-0", command, request.run_directory, "home", with_cdi=False)
    assert body["Cmd"] == ["text-embeddings-router", "--model-id", "org/m", "--hostname", "0.0.0.0", "--port", "4321"]
    assert body["HostConfig"]["PortBindings"] == {"4321/tcp": [{"HostIp": "127.0.0.1", "HostPort": "4321"}]}


@pytest.mark.parametrize("name", PRESETS)
def test_the_key_is_in_the_variable_that_the_server_reads_or_in_its_command(make_request: MakeRequest, name: str) -> None:
    command = build(make_request, name)
    variable = PRESETS[name].key_variable
    assert command.secrets[KEY_VARIABLE] == KEY
    assert variable is None or command.secrets[variable] == KEY
    assert (KEY in command.argv) == (name in ("lmdeploy", "sglang"))


@pytest.mark.parametrize(
    ("granted", "partition", "environment", "part"),
    [
        (40 * GIB, 80 * GIB, {}, "0.425"),  # of half a GPU that it sees whole
        (80 * GIB, 80 * GIB, {}, "0.850"),
        (40 * GIB, 80 * GIB, {"AIMGPU_REGION": "/r"}, "0.850"),  # the interposer shows it its grant
        (40 * GIB, None, {}, "0.850"),
        (1, 80 * GIB, {}, "0.001"),
    ],
)
def test_sglang_gets_its_part_of_the_memory_that_it_sees(
    make_request: MakeRequest, granted: int, partition: int | None, environment: Mapping[str, str], part: str
) -> None:
    request = preset_request(make_request, "sglang")
    instance = replace(request.instance, grants=(grant(granted),))
    request = replace(request, instance=instance, partition_memory_bytes=partition, environment=environment)
    argv = CommandEngine().command(request).argv
    assert argv[argv.index("--mem-fraction-static") + 1] == part


@pytest.mark.parametrize("name", PRESETS)
def test_a_missing_program_is_refused_with_its_install_line(name: str, tmp_path: Path) -> None:
    server = ServerProgram(argv=PRESETS[name].argv, directory=str(tmp_path))
    overrides = EngineOverrides(server=server, environment=(("PATH", str(tmp_path)),))
    ask = Ask(name="a", deployment="a", want=Memory(memory_bytes=GIB))
    deployment = Deployment(name="a", model="org/m", engine="command", ask=ask, overrides=overrides)
    with pytest.raises(EngineUnavailable) as refused:
        CommandEngine().check(deployment, installed=True)
    assert repr(PRESETS[name].argv[0]) in refused.value.message
    assert PRESETS[name].install in str(refused.value.hint)
    program = tmp_path / PRESETS[name].argv[0]
    program.touch(mode=0o755)
    CommandEngine().check(deployment, installed=True)


class SlowToList(BaseHTTPRequestHandler):
    """Ready at once, and closes the first connection that asks for its models."""

    asked = 0

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            type(self).asked += 1
            if self.asked == 1:
                return
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"data": [{"id": "first"}, {"id": "second"}]}')

    def log_message(self, *_: object) -> None:
        """Quiet."""


def test_it_is_ready_only_when_it_answered_how_it_calls_its_models(make_request: MakeRequest) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), SlowToList) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            request = replace(preset_request(make_request, "tei"), port=server.server_port)
            CommandEngine().command(request)
            healths = [CommandEngine().check_health(request.run_directory, KEY) for _ in range(2)]
        finally:
            server.shutdown()
            thread.join()
    assert [health.state for health in healths] == [HealthState.LOADING, HealthState.READY]
    assert healths[0].reason == "no answer at /v1/models"
    assert CommandEngine().served_models(request.run_directory) == ("first", "second")
