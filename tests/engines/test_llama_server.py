"""The engine llamacpp on a GPU, with a program that speaks as llama-server does, in processes of its own."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from tests.programs.stand_in import write_llama_server

from aimgpu.domain import ProcessIdentity
from aimgpu.engines.health import ask
from aimgpu.engines.launchers.process import ProcessLauncher
from aimgpu.engines.llamacpp import arguments
from aimgpu.engines.llamacpp.engine import LlamaCppEngine, installed_llamacpp
from aimgpu.engines.llamacpp.log import read_failure, read_load_percent
from aimgpu.engines.llamacpp.program import Program, find_program, program_command
from aimgpu.engines.llamacpp.purpose import Purpose
from aimgpu.engines.protocols import Health, HealthState, LaunchRequest
from aimgpu.errors import EngineUnavailable

MakeRequest = Callable[..., LaunchRequest]
WaitUntil = Callable[..., None]
GPU = {"CUDA_VISIBLE_DEVICES": "GPU-1", "LD_PRELOAD": "", "AIMGPU_TENANT": "chat-0"}
FLAGS = {"--ctx-size": "8192", "--parallel": "4", "--batch-size": "512", "--ubatch-size": "512", "--flash-attn": "on"}


@pytest.fixture
def no_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AIMGPU_LLAMA_SERVER", raising=False)
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))


@pytest.fixture
def engine(tmp_path: Path) -> LlamaCppEngine:
    return LlamaCppEngine(cache_directory=tmp_path / "cache", has_gpu=True)


@dataclass
class Bench:
    """One instance of the engine in a process of its own."""

    engine: LlamaCppEngine
    launcher: ProcessLauncher
    request: LaunchRequest
    wait_until: WaitUntil

    def start(self, words: str = "") -> ProcessIdentity:
        """`words`: how the stand-in shall behave."""
        path = self.request.run_directory.parent / f"m{''.join('+' + word for word in words.split())}.gguf"
        self.request = replace(self.request, model_path=path)
        return self.launcher.start("chat-0", self.engine.command(self.request), self.request.run_directory)

    def health(self) -> Health:
        return self.engine.check_health(self.request.run_directory, "s3cret")

    def wait_for(self, state: HealthState) -> Health:
        self.wait_until(lambda: self.health().state is state, f"it is {state}")
        return self.health()

    def port(self) -> int:
        return int(str(self.health().endpoint).rpartition(":")[2])

    def reason(self) -> str | None:
        self.wait_until(lambda: self.launcher.find_started() == {}, "it gave up")
        return self.engine.failure_reason(self.launcher.last_lines(self.request.run_directory))


@pytest.fixture
def bench(
    engine: LlamaCppEngine, launcher: ProcessLauncher, make_request: MakeRequest, wait_until: WaitUntil, llama_server: Path
) -> Bench:
    assert llama_server.exists()
    return Bench(engine, launcher, make_request(flags=FLAGS, environment=GPU), wait_until)


@pytest.mark.usefixtures("llama_server")
def test_the_command_line_is_what_was_sized(engine: LlamaCppEngine, make_request: MakeRequest, tmp_path: Path) -> None:
    command = engine.command(make_request(model_path=tmp_path / "m.gguf", flags=FLAGS, environment=GPU))
    told = dict(zip(command.argv[1::1], command.argv[2::1], strict=False))
    assert command.argv[0] == str(tmp_path / "bin" / "llama-server")
    assert (told["--model"], told["--alias"], told["--host"]) == (str(tmp_path / "m.gguf"), "chat", "127.0.0.1")
    assert (told["--ctx-size"], told["--parallel"], told["--ubatch-size"]) == ("8192", "4", "512")
    assert (told["--n-gpu-layers"], told["--fit"], told["--cache-ram"]) == ("999", "off", "0")
    assert told["--dry-multiplier"] == "0.8"  # the packaged model's own, as with the wheel
    assert "s3cret" not in " ".join(command.argv)
    assert command.secrets == {"LLAMA_API_KEY": "s3cret"}
    assert {**command.environment, **GPU} == command.environment, "the Grant's environment and the library that holds it"


def test_a_build_that_does_not_tell_its_number_is_not_told_what_it_may_not_know(make_request: MakeRequest) -> None:
    request = make_request(model_path=Path("m.gguf"), environment=GPU)
    request.run_directory.mkdir(parents=True)
    assert "--fit" not in program_command(Program(path="/bin/llama-server", build=0), request).argv


@pytest.mark.usefixtures("llama_server")
def test_without_a_gpu_the_wheel_is_used(engine: LlamaCppEngine, make_request: MakeRequest) -> None:
    command = engine.command(make_request(model_path=Path("m.gguf")))
    assert command.argv[1:3] == ("-m", "aimgpu.engines.llamacpp.server")


def test_it_becomes_ready_with_a_first_token_answers_and_stops(bench: Bench) -> None:
    process = bench.start()
    endpoint = bench.wait_for(HealthState.READY).endpoint
    asked = (bench.request.run_directory / "asked").read_text().splitlines()
    assert len(asked) == 1, "asked once, not at every look"
    assert len(json.loads(asked[0])["prompt"].split()) > 16, "long enough for the libraries that come with a first batch"
    question = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}
    refused = ask(f"{endpoint}/v1/chat/completions", content=question)
    answer = ask(f"{endpoint}/v1/chat/completions", api_key="s3cret", content=question)
    assert (refused and refused.status, answer and answer.status) == (401, 200)
    assert bench.engine.remark(bench.request.run_directory) is None
    bench.launcher.stop(process, grace_seconds=10)
    assert bench.health().state is HealthState.STARTING


@pytest.mark.parametrize(("words", "percent"), [("slow", None), ("dots", 42)])
def test_while_it_loads_it_says_so(bench: Bench, words: str, percent: int | None) -> None:
    bench.start(words)
    assert bench.wait_for(HealthState.LOADING).percent == percent


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("oom", "not enough GPU memory: it wanted 5664.67 MiB more"),
        ("kv-oom", "not enough GPU memory: it wanted 68.01 MiB more"),
        ("other-gpu", "this llama-server was not built for this GPU"),
        ("unknown-arch", "this llama.cpp does not know the model's architecture 'nova'"),
        ("port-taken-once", "another program took its port first"),
    ],
)
def test_one_that_does_not_load_says_why(bench: Bench, words: str, reason: str) -> None:
    bench.start(words)
    assert bench.reason() == reason


def test_one_that_loads_and_cannot_compute_is_never_called_ready(bench: Bench) -> None:
    bench.start("no-blas")
    seen: set[HealthState] = set()

    def is_dead() -> bool:
        seen.add(bench.health().state)
        return bench.launcher.find_started() == {}

    bench.wait_until(is_dead, "its first batch ended it")
    assert HealthState.READY not in seen
    assert bench.reason() == "not enough GPU memory"


def test_one_that_dies_in_use_is_seen(bench: Bench) -> None:
    process = bench.start("crash-in-use")
    endpoint = bench.wait_for(HealthState.READY).endpoint
    assert ask(f"{endpoint}/v1/completions", api_key="s3cret", content={"prompt": "a"}) is None
    bench.wait_until(lambda: not bench.launcher.is_running(process), "it is gone")


@pytest.mark.parametrize(
    ("words", "state"),
    [("no-gpu", HealthState.BROKEN), ("embedder", HealthState.READY), ("mute", HealthState.STARTING)],
)
def test_its_health_is_what_it_can_do(bench: Bench, words: str, state: HealthState) -> None:
    """One that fell back to the CPU does not serve on the sly; an embedder needs no token; a mute one is not waited for."""
    bench.start(words)
    bench.wait_until(lambda: "load_model" in (bench.request.run_directory / "engine.log").read_text(), "it speaks")
    bench.wait_for(state)


def test_a_container_for_the_cpu_may_compute_there(bench: Bench, make_request: MakeRequest) -> None:
    """On a simulated GPU: it is told of GPU layers like any other, and warns."""
    bench.start("no-gpu")
    bench.wait_for(HealthState.BROKEN)
    simulated = replace(make_request(launcher="docker"), model_path=bench.request.model_path, port=bench.port())
    bench.engine.command(simulated)
    bench.wait_for(HealthState.READY)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("cpu-build", "runs on the CPU: {path} sees no GPU"),
        ("vulkan", "runs on the CPU: {path} was built for Vulkan, and only CUDA and ROCm can be held to a Grant"),
        ("old", "runs on the CPU: {path} is build 4000, and 6975 or later is needed"),
        ("", None),
        ("unnumbered", None),
    ],
)
def test_doctor_is_told_which_one_is_used(engine: LlamaCppEngine, llama_server: Path, words: str, reason: str | None) -> None:
    write_llama_server(llama_server.parent, words)
    found = engine.availability()
    assert (found.available, found.reason) == (True, reason and reason.format(path=llama_server))
    if reason is None:
        assert (found.where, found.version) == (str(llama_server), None if words else "b11549")
    else:
        assert found.where is None
        assert "AIMGPU_LLAMA_SERVER" in str(found.hint)


@pytest.mark.usefixtures("no_program")
def test_with_no_program_it_runs_on_the_cpu_and_says_so(
    engine: LlamaCppEngine, make_request: MakeRequest, tmp_path: Path
) -> None:
    assert engine.availability().reason == "runs on the CPU: no llama-server found"
    request = make_request(model_path=tmp_path / "m.gguf", environment=GPU)
    assert engine.command(request).argv[2] == "aimgpu.engines.llamacpp.server"
    assert engine.remark(request.run_directory) == "runs on the CPU: no llama-server found"
    simulated = LlamaCppEngine(cache_directory=tmp_path / "cache").availability()
    assert (simulated.available, simulated.reason) == (True, None)


def test_a_program_that_was_named_is_used_or_nothing_is(
    engine: LlamaCppEngine, make_request: MakeRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = write_llama_server(tmp_path / "elsewhere")
    monkeypatch.setenv("AIMGPU_LLAMA_SERVER", str(named))
    assert find_program() == Program(path=str(named), build=11549)
    monkeypatch.setenv("AIMGPU_LLAMA_SERVER", "/nowhere/llama-server")
    found = engine.availability()
    assert (found.available, found.reason) == (False, "AIMGPU_LLAMA_SERVER names /nowhere/llama-server, which is not a program")
    with pytest.raises(EngineUnavailable, match="which is not a program"):
        engine.command(make_request(model_path=tmp_path / "m.gguf", environment=GPU))


def test_sizing_goes_by_the_one_that_would_be_used(llama_server: Path) -> None:
    wheel = installed_llamacpp()
    assert wheel is not None
    assert installed_llamacpp(has_gpu=True) == "b11549"
    for words in ("old", "unnumbered"):
        write_llama_server(llama_server.parent, words)
        assert installed_llamacpp(has_gpu=True) == wheel


def test_real_lines_tell_why() -> None:
    for line, reason in {
        "error: invalid argument: --foo": "it does not take these arguments: invalid argument: --foo",
        "/bin/llama-server: error while loading shared libraries: libcublas.so.12: cannot open shared object file": (
            "it misses a library: libcublas.so.12"
        ),
        "ggml_backend_cuda_buffer_type_alloc_buffer: allocating 7605.33 MiB on device 0: cudaMalloc failed: out of memory": (
            "not enough GPU memory: it wanted 7605.33 MiB more"  # older builds tell no time
        ),
        "0.00.044.100 E CUDA error: an illegal memory access was encountered": (
            "the GPU failed: an illegal memory access was encountered"
        ),
    }.items():
        assert read_failure((line,)) == reason
    assert read_load_percent(("load_tensors: loading", "." * 17)) == 17


def test_a_model_that_ranks_is_started_as_one(
    engine: LlamaCppEngine, make_request: MakeRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = make_request(model_path=tmp_path / "m.gguf", flags=FLAGS, environment=GPU)
    for purpose in Purpose:
        monkeypatch.setattr(arguments, "find_purpose", lambda *_, purpose=purpose: purpose)
        found = arguments.server_arguments(request, tmp_path / "m.gguf", 1)
        assert ("--reranking" in found) is (purpose is Purpose.RANKING)
