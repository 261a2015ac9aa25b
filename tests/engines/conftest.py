"""What tests of engines and launchers need: requests, waiting for events, and the small model."""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.engines.docker_places import Place
from tests.programs import fake_docker, real_docker
from tests.programs.stand_in import write_llama_server

from aimgpu.control.sizing_inputs.model_files import find_model_facts
from aimgpu.domain import Exactness, Footprint, Instance, InstanceState, Term
from aimgpu.engines.launchers.process import ProcessLauncher
from aimgpu.engines.models.store import LocalModelStore
from aimgpu.engines.protocols import LaunchRequest, Mount
from aimgpu.errors import ModelUnavailable
from aimgpu.sizing import SizingRequest, estimate_footprint
from aimgpu.sizing.engines.table import ENGINE_SIZINGS
from aimgpu.sizing.surplus import spend_surplus
from aimgpu.units import GIB

WAIT_SECONDS = 180.0
MakeRequest = Callable[..., LaunchRequest]
WaitUntil = Callable[..., None]


@pytest.fixture
def make_request(tmp_path: Path) -> MakeRequest:
    def make(  # noqa: PLR0913 - a request has many parts
        *,
        name: str = "chat",
        model: str = "smollm2",
        model_path: Path | None = None,
        flags: dict[str, str] | None = None,
        environment: dict[str, str] | None = None,
        launcher: str = "process",
    ) -> LaunchRequest:
        instance = Instance(
            id=f"{name}-0",
            deployment=name,
            replica=0,
            model=model,
            engine="any",
            launcher=launcher,
            state=InstanceState.LOADING,
        )
        weights = Term(name="weights", memory_bytes=1, exactness=Exactness.EXACT, formula="given")
        footprint = Footprint(
            model=model,
            engine="any",
            precision="q4_1",
            context_tokens=512,
            concurrency=2,
            terms=(weights,),
            flags=flags or {},
        )
        return LaunchRequest(
            instance=instance,
            model_path=model_path,
            footprint=footprint,
            environment={"HIP_VISIBLE_DEVICES": "0", **(environment or {})},
            device_nodes=(),
            run_directory=tmp_path / "run" / instance.id,
            api_key="s3cret",
        )

    return make


@pytest.fixture
def filled_request(make_request: MakeRequest, small_model: Path) -> LaunchRequest:
    """The small model with a grant far above its need: as many slots as a grant ever gives, with a short context each."""
    asked = SizingRequest(model=find_model_facts(str(small_model), small_model), engine="llamacpp", context_tokens=256)
    need = estimate_footprint(ENGINE_SIZINGS["llamacpp"].own_concurrency(asked))
    return replace(make_request(model_path=small_model), footprint=spend_surplus(need, need.total_bytes + 8 * GIB))


@pytest.fixture
def wait_until() -> WaitUntil:
    """Until a fact about another process holds; such facts send no event, so they are asked for in short steps."""
    pause = threading.Event()

    def wait(condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + WAIT_SECONDS
        while not condition():
            if time.monotonic() > deadline:
                pytest.fail(f"waited {WAIT_SECONDS:.0f} s in vain: {what}")
            pause.wait(0.02)

    return wait


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[ProcessLauncher]:
    """Whatever a test leaves running is stopped, as a user's `down` would."""
    one = ProcessLauncher(tmp_path / "home")
    yield one
    for process in one.find_started().values():
        one.stop(process, grace_seconds=0)
    one.end_prepared()


@pytest.fixture(scope="session")
def small_model() -> Path:
    try:
        return LocalModelStore().fetch("smollm2", lambda *_: None).path
    except ModelUnavailable as error:
        pytest.skip(f"the small model cannot be had: {error}")


@pytest.fixture
def stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder first on PATH with programs `vllm` and `ollama` that speak as those do."""
    root = Path(__file__).resolve().parents[2]
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("vllm", "ollama"):
        script = folder / name
        script.write_text(
            f'#!/bin/sh\nPYTHONPATH={root}:$PYTHONPATH exec {sys.executable} -m tests.programs.fake_{name} "$@"\n'
        )
        script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


@pytest.fixture
def llama_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The stand-in first on PATH, as a user has it."""
    script = write_llama_server(tmp_path / "bin")
    monkeypatch.delenv("AIMGPU_LLAMA_SERVER", raising=False)
    monkeypatch.setenv("PATH", f"{script.parent}:{os.environ['PATH']}")
    return script


@pytest.fixture(scope="session")
def dockerd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    if reason := real_docker.why_not():
        pytest.skip(reason)
    with real_docker.run_dockerd(tmp_path_factory.mktemp("docker")) as socket:
        yield socket


@pytest.fixture(params=["stand-in", "real"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """Every test below holds for the stand-in and for Docker itself."""
    if request.param == "real":
        mounts = tuple(Mount(path=path) for path in real_docker.program_folders())
        socket = request.getfixturevalue("dockerd")
        with real_docker.network_of(socket):
            yield Place(socket=socket, image=real_docker.IMAGE, mounts=mounts)
        return
    with fake_docker.serve_docker(tmp_path / "d.sock") as docker:
        yield Place(socket=docker.socket, image="engine:1", mounts=())
