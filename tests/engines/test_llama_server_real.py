"""The real llama-server, from Debian: without a GPU it is no engine for one, but it takes the command line and tells why."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.downloads import DownloadFailed
from tests.programs import real_llama_server

from aimgpu.engines.endpoint import ENDPOINT_NAME
from aimgpu.engines.health import ask, read_endpoint
from aimgpu.engines.launchers.process import ProcessLauncher
from aimgpu.engines.llamacpp.engine import LlamaCppEngine
from aimgpu.engines.llamacpp.program import Program, program_command
from aimgpu.engines.protocols import HealthState, LaunchRequest
from aimgpu.sizing.engines.llamacpp_growth import MOST_SLOTS

MakeRequest = Callable[..., LaunchRequest]
WaitUntil = Callable[..., None]
GPU = {"CUDA_VISIBLE_DEVICES": "GPU-1"}
FLAGS = {
    "--ctx-size": "1024",
    "--parallel": "2",
    "--ubatch-size": "256",
    "--batch-size": "256",
    "--flash-attn": "on",
    "--threads": "1",
}
SAID = (
    "n_ctx                 = 1024",
    "n_seq_max             = 2",
    "n_ubatch              = 256",
    "flash_attn            = enabled",
)


@pytest.fixture(scope="module")
def real_program(tmp_path_factory: pytest.TempPathFactory) -> Program:
    if reason := real_llama_server.why_not():
        pytest.skip(reason)
    try:
        path = real_llama_server.write_program(tmp_path_factory.mktemp("real"))
    except (DownloadFailed, subprocess.SubprocessError, OSError) as error:
        pytest.skip(f"Debian's llama-server cannot be had: {error}")
    return Program(path=str(path), build=11669)


@pytest.fixture
def engine(tmp_path: Path) -> LlamaCppEngine:
    return LlamaCppEngine(cache_directory=tmp_path / "cache", has_gpu=True)


@pytest.fixture
def start(launcher: ProcessLauncher, make_request: MakeRequest, real_program: Program) -> Callable[[Path], LaunchRequest]:
    def start_one(model: Path) -> LaunchRequest:
        request = make_request(model_path=model, flags=FLAGS, environment=GPU)
        request.run_directory.mkdir(parents=True, exist_ok=True)
        (request.run_directory / "on-gpu").touch()  # as the engine leaves it for one that was granted a GPU
        launcher.start("chat-0", program_command(real_program, request), request.run_directory)
        return request

    return start_one


def test_it_has_the_slots_and_the_context_that_a_large_grant_gives(
    launcher: ProcessLauncher,
    real_program: Program,
    filled_request: LaunchRequest,
    wait_until: WaitUntil,
) -> None:
    request = filled_request
    request.run_directory.mkdir(parents=True, exist_ok=True)
    process = launcher.start("chat-0", program_command(real_program, request), request.run_directory)
    endpoint = read_endpoint(request.run_directory / ENDPOINT_NAME)
    assert endpoint is not None
    wait_until(lambda: (answer := ask(f"{endpoint.url}/health")) is not None and answer.status == 200, "it is loaded")
    answer = ask(f"{endpoint.url}/props", api_key="s3cret")
    launcher.stop(process, grace_seconds=10)
    assert answer is not None
    content = answer.read_json()
    assert content is not None
    assert content["total_slots"] == request.footprint.concurrency == MOST_SLOTS
    assert content["default_generation_settings"]["n_ctx"] == request.footprint.context_tokens == 256  # type: ignore[index]


def test_it_sees_no_gpu_and_is_not_used(engine: LlamaCppEngine, real_program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIMGPU_LLAMA_SERVER", real_program.path)
    found = engine.availability()
    assert (found.available, found.reason) == (False, f"{real_program.path} sees no GPU")


def test_it_serves_what_was_sized_and_is_not_called_ready_on_the_cpu(
    engine: LlamaCppEngine,
    launcher: ProcessLauncher,
    start: Callable[[Path], LaunchRequest],
    small_model: Path,
    wait_until: WaitUntil,
) -> None:
    folder = start(small_model).run_directory
    wait_until(lambda: engine.check_health(folder, "s3cret").state is HealthState.BROKEN, "it is loaded")
    health = engine.check_health(folder, "s3cret")
    assert health.reason == "llama-server sees no GPU and would run on the CPU"
    question = {"prompt": "thunderstorm", "max_tokens": 2}
    refused = ask(f"{health.endpoint}/v1/completions", content=question, bound_seconds=60)
    answer = ask(f"{health.endpoint}/v1/completions", api_key="s3cret", content=question, bound_seconds=60)
    assert (refused and refused.status, answer and answer.status) == (401, 200)
    launcher.stop(launcher.find_started()["chat-0"], grace_seconds=10)
    log = (folder / "engine.log").read_text()
    assert [said for said in SAID if said not in log] == []
    assert "thunderstorm" not in log
    assert "s3cret" not in log


def test_one_that_cannot_load_says_why(
    engine: LlamaCppEngine,
    launcher: ProcessLauncher,
    start: Callable[[Path], LaunchRequest],
    tmp_path: Path,
    wait_until: WaitUntil,
) -> None:
    (tmp_path / "text.gguf").write_bytes(b"no gguf")
    for name, reason in {"none.gguf": "the model file cannot be opened", "text.gguf": "the model file is not GGUF"}.items():
        request = start(tmp_path / name)
        wait_until(lambda: launcher.find_started() == {}, "it gave up")
        assert str(engine.failure_reason(launcher.last_lines(request.run_directory))).startswith(reason)
