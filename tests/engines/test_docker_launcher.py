import contextlib
import json
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.engines.docker_places import Place
from tests.programs import fake_docker, real_docker

from aimgpu.engines.endpoint import choose_port
from aimgpu.engines.health import ask, read_endpoint
from aimgpu.engines.launchers.container import container_body, uses_cdi
from aimgpu.engines.launchers.docker import DockerLauncher
from aimgpu.engines.launchers.docker_api import split_image
from aimgpu.engines.llamacpp.engine import LlamaCppEngine
from aimgpu.engines.ollama.engine import OllamaEngine
from aimgpu.engines.protocols import Command, LaunchRequest, Mount
from aimgpu.engines.vllm.engine import VllmEngine
from aimgpu.errors import Conflict, EngineFailed, EngineUnavailable, InvalidInput

MakeRequest = Callable[..., LaunchRequest]
WaitUntil = Callable[..., None]


@pytest.fixture
def containers(place: Place, tmp_path: Path) -> Iterator[DockerLauncher]:
    launcher = DockerLauncher(tmp_path / "home", place.socket)
    yield launcher
    for process in launcher.find_started().values():
        launcher.stop(process, grace_seconds=0)


def listens(run: Path) -> bool:
    endpoint = read_endpoint(run / "endpoint.json")
    return endpoint is not None and ask(f"{endpoint.url}/health") is not None


def test_a_container_answers_is_found_again_and_stops(
    place: Place, containers: DockerLauncher, tmp_path: Path, wait_until: WaitUntil
) -> None:
    run = tmp_path / "run"
    process = containers.start("chat-0", place.command(run, "--say", "hello"), run)
    wait_until(lambda: listens(run), "the engine listens")
    endpoint = read_endpoint(run / "endpoint.json")
    assert endpoint is not None
    answer = ask(f"{endpoint.url}/v1/models", api_key="s3cret", bound_seconds=30)
    assert answer is not None
    assert answer.status == 200
    assert containers.is_running(process)
    assert containers.last_lines(run) == ("hello",)
    later = DockerLauncher(tmp_path / "home", place.socket)
    assert later.find_started() == {"chat-0": process}
    assert DockerLauncher(tmp_path / "other", place.socket).find_started() == {}
    later.stop(process, grace_seconds=20)
    assert not containers.is_running(process)
    assert containers.find_started() == {}
    containers.stop(process, grace_seconds=0)  # twice is no error


INTRUDER = """
import json, os, pathlib, socket, sys, time
run, port = pathlib.Path(sys.argv[1]), int(sys.argv[2])

def tried(act):
    try:
        return str(act())
    except OSError as error:
        return type(error).__name__

found = {
    "seen": sorted(path.name for path in run.iterdir()),
    "key": tried((run / "api-key").read_text),
    "endpoint": tried(lambda: (run / "endpoint.json").write_text("{}")),
    "replaced": tried(lambda: os.replace(run / "own/x", run / "engine.log")),
    "host": tried(lambda: socket.create_connection(("127.0.0.1", port), 5).close()),
    "raw": tried(lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)),
    "chown": tried(lambda: os.chown(run / "own/x", 1, 1)),
    "mount": tried(lambda: os.mkdir("/sys/kernel/security/aimgpu")),
    "caps": [line.split()[1] for line in open("/proc/self/status") if line.startswith("Cap")],
    "addresses": sorted(os.listdir("/sys/class/net")),
    "shm": os.listdir("/dev/shm"),
}
(run / "own/found.part").write_text(json.dumps(found))
os.replace(run / "own/found.part", run / "own/found.json")
time.sleep(60)
"""


def test_a_container_has_no_more_than_it_was_given(dockerd: Path, tmp_path: Path, wait_until: WaitUntil) -> None:
    run = tmp_path / "run"
    (run / "own").mkdir(parents=True)
    (run / "own/x").touch()
    (run / "api-key").write_text("s3cret")
    (run / "endpoint.json").write_text('{"url": "http://127.0.0.1:1"}')
    mounts = tuple(Mount(path=path) for path in real_docker.program_folders())
    launcher = DockerLauncher(tmp_path / "home", dockerd)
    with real_docker.network_of(dockerd), socket.create_server(("127.0.0.1", 0)) as listener:
        words = ("-c", INTRUDER, str(run), str(listener.getsockname()[1]))
        command = Command(argv=(sys.executable, *words), image=real_docker.IMAGE, mounts=mounts, port=choose_port())
        process = launcher.start("chat-0", command, run)
        wait_until(lambda: (run / "own/found.json").exists() or not launcher.is_running(process), "it has tried")
        launcher.stop(process, grace_seconds=0)
    assert (run / "own/found.json").exists(), launcher.last_lines(run)
    found = json.loads((run / "own/found.json").read_text())
    assert found["seen"] == ["engine.log", "own"]
    assert (found["key"], found["endpoint"]) == ("FileNotFoundError", "2")  # a file of its own, in its own image
    assert (run / "endpoint.json").read_text() == '{"url": "http://127.0.0.1:1"}'
    assert found["replaced"] == "OSError"
    assert found["host"] == "ConnectionRefusedError"
    assert (found["raw"], found["chown"]) == ("PermissionError", "PermissionError")
    assert set(found["caps"]) == {"0000000000000000"}
    assert found["addresses"] == ["eth0", "lo"]
    assert found["shm"] == []


def test_one_port_is_published_on_loopback_and_no_capability_is_left() -> None:
    body = body_of(Command(argv=("vllm",), image="i", port=8000))
    assert body["NetworkMode"] == "bridge"
    assert body["ExposedPorts"] == {"8000/tcp": {}}
    assert body["PortBindings"] == {"8000/tcp": [{"HostIp": "127.0.0.1", "HostPort": "8000"}]}
    assert body["CapDrop"] == ["ALL"]
    assert body_of(Command(argv=("x",), image="i"))["NetworkMode"] == "none"
    written = [mount["Target"] for mount in body["Mounts"] if not mount["ReadOnly"]]  # type: ignore[attr-defined]
    assert written == ["/run/chat-0/own", "/run/chat-0/engine.log"]


def test_one_that_ignores_sigterm_is_killed(
    place: Place, containers: DockerLauncher, tmp_path: Path, wait_until: WaitUntil
) -> None:
    run = tmp_path / "run"
    process = containers.start("chat-0", place.command(run, "--ignore-sigterm", "--children", "2"), run)
    wait_until(lambda: listens(run), "the engine listens")
    containers.stop(process, grace_seconds=0.2)
    assert not containers.is_running(process)
    assert containers.find_started() == {}


def test_one_that_dies_leaves_its_words_and_may_start_again(
    place: Place, containers: DockerLauncher, tmp_path: Path, wait_until: WaitUntil
) -> None:
    run = tmp_path / "run"
    for word in ("first", "second"):
        with contextlib.suppress(EngineFailed):  # it may end before we look at it
            containers.start("chat-0", place.command(run, "--say", word, "--die-at-start", "3"), run)
        wait_until(lambda: containers.find_started() == {}, "the engine ended")
        assert containers.last_lines(run) == (word,)


def test_how_a_container_ended_is_told(place: Place, containers: DockerLauncher, tmp_path: Path, wait_until: WaitUntil) -> None:
    run = tmp_path / "run"
    process = containers.start("chat-0", place.command(run, "--crash-after", "1"), run)
    wait_until(lambda: listens(run), "the engine listens")
    assert containers.how_it_ended(process) is None
    endpoint = read_endpoint(run / "endpoint.json")
    assert endpoint is not None
    ask(f"{endpoint.url}/v1/completions", api_key="s3cret", content={"prompt": "a"}, bound_seconds=30)
    wait_until(lambda: not containers.is_running(process), "the engine crashed")
    wait_until(lambda: containers.how_it_ended(process) is not None, "Docker knows it too")
    assert containers.how_it_ended(process) == "its container ended with status 86"


def test_an_instance_runs_once(place: Place, containers: DockerLauncher, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = containers.start("chat-0", place.command(run), run)
    with pytest.raises(Conflict, match=str(process.pid)):
        containers.start("chat-0", place.command(run), run)


def test_a_container_that_was_created_and_never_started_is_removed(tmp_path: Path) -> None:
    """A daemon was killed between the two calls."""
    with fake_docker.serve_docker(tmp_path / "d.sock") as docker:
        launcher, run = DockerLauncher(tmp_path / "home", docker.socket), tmp_path / "run"
        command = Place(socket=docker.socket, image="engine:1", mounts=()).command(run)
        body = container_body("chat-0", command, run, str(tmp_path / "home"), with_cdi=False)
        launcher._api.create("left-behind", body)
        assert launcher.find_started() == {}
        assert docker.containers == {}


def test_without_docker_it_says_so(tmp_path: Path) -> None:
    launcher = DockerLauncher(tmp_path / "home", tmp_path / "nobody.sock")
    with pytest.raises(EngineUnavailable, match="Docker is not running"):
        launcher.check()
    with pytest.raises(EngineUnavailable, match="Docker is not running"):
        launcher.start("chat-0", Command(argv=("x",), image="x"), tmp_path / "run")
    with pytest.raises(InvalidInput, match="has no image"):
        launcher.fetch(Command(argv=("x",)), tmp_path / "run", lambda _: None, lambda: None)


def test_without_docker_nothing_is_found_but_what_still_lives(place: Place, tmp_path: Path, wait_until: WaitUntil) -> None:
    launcher, run = DockerLauncher(tmp_path / "home", place.socket), tmp_path / "run"
    process = launcher.start("chat-0", place.command(run), run)
    blind = DockerLauncher(tmp_path / "home", tmp_path / "nobody.sock")
    assert blind.find_started() == {"chat-0": process}
    launcher.stop(process, grace_seconds=20)
    assert blind.find_started() == {}
    blind.stop(process, grace_seconds=0)  # a process that is no container: nothing to do


def body_of(command: Command, *, with_cdi: bool = False) -> dict[str, object]:
    body = container_body("chat-0", command, Path("/run/chat-0"), "/home/me", with_cdi=with_cdi)
    return {**body, **body["HostConfig"]}


def test_an_amd_container_sees_its_own_partition_only(tmp_path: Path) -> None:
    command = Command(
        argv=("vllm",),
        image="i",
        device_nodes=("/dev/kfd", "/dev/dri/renderD131"),
        environment={"ROCR_VISIBLE_DEVICES": "3", "AIM_PARTITION_ID": "p"},
    )
    body = body_of(command)
    assert body["Devices"] == [
        {"PathOnHost": node, "PathInContainer": node, "CgroupPermissions": "rw"} for node in ("/dev/kfd", "/dev/dri/renderD131")
    ]
    assert "ROCR_VISIBLE_DEVICES=0" in body["Env"]  # type: ignore[operator]
    assert body["SecurityOpt"] == ["no-new-privileges", "seccomp=unconfined"]
    assert body["IpcMode"] == "private"
    chosen_by_uuid = Command(
        argv=("x",), image="i", device_nodes=("/dev/kfd",), environment={"ROCR_VISIBLE_DEVICES": "GPU-11ff74a1"}
    )
    assert "ROCR_VISIBLE_DEVICES=GPU-11ff74a1" in body_of(chosen_by_uuid)["Env"]  # type: ignore[operator]


def test_an_nvidia_container_gets_its_gpu_by_uuid(tmp_path: Path) -> None:
    command = Command(
        argv=("vllm",), image="i", device_nodes=("/dev/nvidia0",), environment={"CUDA_VISIBLE_DEVICES": "MIG-1", "A": "b"}
    )
    plain = {"Driver": "nvidia", "DeviceIDs": ["MIG-1"], "Capabilities": [["gpu"]]}
    assert body_of(command)["DeviceRequests"] == [plain]
    assert body_of(command, with_cdi=True)["DeviceRequests"] == [{"Driver": "cdi", "DeviceIDs": ["nvidia.com/gpu=MIG-1"]}]
    assert "Devices" not in body_of(command)
    assert not uses_cdi({"CDISpecDirs": None})


def test_a_container_has_shared_memory_of_its_own_unless_mps_needs_the_hosts() -> None:
    alone = body_of(Command(argv=("vllm",), image="i", environment={"CUDA_VISIBLE_DEVICES": "GPU-1"}))
    assert (alone["IpcMode"], alone["ShmSize"]) == ("private", 8 << 30)
    with_mps = {"CUDA_VISIBLE_DEVICES": "GPU-1", "CUDA_MPS_PIPE_DIRECTORY": "/run/mps"}
    assert body_of(Command(argv=("vllm",), image="i", environment=with_mps))["IpcMode"] == "host"


def test_what_isolation_needs_is_mounted(tmp_path: Path) -> None:
    library = tmp_path / "libcap.so"
    library.touch()
    environment = {"LD_PRELOAD": str(library), "AIMGPU_REGION": f"{tmp_path}/gpu0:{tmp_path}/gpu1"}
    mounts = body_of(Command(argv=("x",), image="i", environment=environment))["Mounts"]
    assert mounts[2:] == [  # type: ignore[index]
        {"Type": "bind", "Source": str(library), "Target": str(library), "ReadOnly": True},
        {"Type": "bind", "Source": str(tmp_path), "Target": str(tmp_path), "ReadOnly": False},
    ]


def test_each_engine_has_an_image_for_each_vendor(make_request: MakeRequest, tmp_path: Path) -> None:
    model = tmp_path / "m.gguf"
    for environment, word in (({"ROCR_VISIBLE_DEVICES": "0"}, "rocm"), ({"CUDA_VISIBLE_DEVICES": "GPU-1"}, "")):
        for engine in (LlamaCppEngine(cache_directory=tmp_path), VllmEngine(), OllamaEngine()):
            path = model if engine.name == "llamacpp" else None
            command = engine.command(make_request(model_path=path, environment=environment, launcher="docker"))
            assert word in str(command.image)
            assert not any(str(sys.executable) in word for word in command.argv)
            listening = f"{' '.join(command.argv)} {command.environment.get('OLLAMA_HOST')}"
            assert "0.0.0.0" in listening
            assert str(command.port) in listening
    server = LlamaCppEngine(cache_directory=tmp_path).command(make_request(model_path=model, launcher="docker"))
    assert server.argv[0] == "/app/llama-server"
    assert "--log-verbosity 4" in " ".join(server.argv)  # else it does not tell its buffers
    assert server.mounts == (Mount(path=str(model)),)
    assert "s3cret" not in " ".join(server.argv)


@pytest.mark.parametrize(
    ("image", "parts"),
    [
        ("vllm/vllm-openai:v0.32.0", ("vllm/vllm-openai", "v0.32.0")),
        ("registry:5000/team/engine", ("registry:5000/team/engine", "latest")),
        ("ollama/ollama", ("ollama/ollama", "latest")),
    ],
)
def test_images_are_split_as_docker_does(image: str, parts: tuple[str, str]) -> None:
    assert split_image(image) == parts
