from collections.abc import Callable

import pytest

from aimgpu.engines.health import ask
from aimgpu.engines.launchers.process import ProcessLauncher
from aimgpu.engines.ollama.engine import OllamaEngine
from aimgpu.engines.ollama.log import read_failure
from aimgpu.engines.protocols import Health, HealthState, LaunchRequest, Sleeper
from aimgpu.errors import EngineUnavailable, InvalidInput

MakeRequest = Callable[..., LaunchRequest]
WaitUntil = Callable[..., None]


def start(launcher: ProcessLauncher, request: LaunchRequest) -> Callable[[], Health]:
    engine = OllamaEngine()
    launcher.start(request.instance.id, engine.command(request), request.run_directory)
    return lambda: engine.check_health(request.run_directory, request.api_key)


@pytest.mark.usefixtures("stand_ins")
def test_it_fetches_loads_sleeps_and_wakes(launcher: ProcessLauncher, make_request: MakeRequest, wait_until: WaitUntil) -> None:
    request = make_request(model="qwen3:4b")
    health = start(launcher, request)
    wait_until(lambda: health().state is HealthState.READY, "the model is loaded")
    engine = OllamaEngine()
    assert isinstance(engine, Sleeper)
    engine.sleep(request.run_directory, "")
    assert health().state is HealthState.SLEEPING
    engine.wake(request.run_directory, "")
    assert health().state is HealthState.READY


@pytest.mark.usefixtures("stand_ins")
def test_a_model_that_another_caller_loads_into_its_server_is_not_taken_for_its_own(
    launcher: ProcessLauncher, make_request: MakeRequest, wait_until: WaitUntil
) -> None:
    """Ollama has no keys, and one model at a time is loaded in each of our servers."""
    request = make_request(model="qwen3:4b")
    health = start(launcher, request)
    wait_until(lambda: health().state is HealthState.READY, "the model is loaded")
    url = health().endpoint
    for path in ("pull", "generate"):
        ask(f"{url}/api/{path}", content={"model": "gemma3:1b", "prompt": "a"}, bound_seconds=30)
    assert health().state is HealthState.SLEEPING
    OllamaEngine().wake(request.run_directory, "")
    assert health().state is HealthState.READY
    ask(f"{url}/api/generate", content={"model": "qwen3:4b", "prompt": "a"}, bound_seconds=30)
    assert health().state is HealthState.READY, "by the tag from which it was made"


@pytest.mark.usefixtures("stand_ins")
def test_a_download_tells_its_percent(launcher: ProcessLauncher, make_request: MakeRequest, wait_until: WaitUntil) -> None:
    health = start(launcher, make_request(model="qwen3:4b", environment={"FAKE_OLLAMA": "slow-pull"}))
    wait_until(lambda: health().percent == 42, "84 of 200 bytes are here")
    assert health().state is HealthState.LOADING


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("unknown", "pull model manifest: file does not exist"),
        ("oom", "llama runner process has terminated: cudaMalloc failed: out of memory"),
    ],
)
def test_a_model_that_does_not_load_is_broken_with_a_reason(
    launcher: ProcessLauncher, make_request: MakeRequest, wait_until: WaitUntil, word: str, reason: str
) -> None:
    health = start(launcher, make_request(model="qwen3:4b", environment={"FAKE_OLLAMA": word}))
    wait_until(lambda: health().state is HealthState.BROKEN, "the model did not load")
    assert health().reason == reason


@pytest.mark.usefixtures("stand_ins")
def test_a_server_that_dies_has_a_reason_and_leaves_no_child(
    launcher: ProcessLauncher, make_request: MakeRequest, wait_until: WaitUntil
) -> None:
    request = make_request(model="qwen3:4b", environment={"FAKE_OLLAMA": "port-taken"})
    start(launcher, request)
    wait_until(lambda: launcher.find_started() == {}, "both processes ended")
    assert OllamaEngine().failure_reason(launcher.last_lines(request.run_directory)) == "another program took its port first"


@pytest.mark.usefixtures("stand_ins")
def test_the_variables_follow_the_footprint(make_request: MakeRequest) -> None:
    command = OllamaEngine().command(make_request(model="qwen3:4b", flags={"OLLAMA_KV_CACHE_TYPE": "q8_0"}))
    told = command.environment
    assert (told["OLLAMA_CONTEXT_LENGTH"], told["OLLAMA_NUM_PARALLEL"], told["OLLAMA_KV_CACHE_TYPE"]) == ("512", "2", "q8_0")
    assert told["OLLAMA_HOST"].startswith("127.0.0.1:")
    assert told["HIP_VISIBLE_DEVICES"] == "0"


@pytest.mark.usefixtures("stand_ins")
def test_a_file_is_refused_and_the_version_is_read(make_request: MakeRequest) -> None:
    with pytest.raises(InvalidInput, match="takes a tag"):
        OllamaEngine().command(make_request(model="/models/x.gguf"))
    assert OllamaEngine().availability().version == "0.12.3"


def test_where_it_is_missing_it_says_so(make_request: MakeRequest) -> None:
    engine = OllamaEngine(program="no-such-ollama")
    assert not engine.availability().available
    with pytest.raises(EngineUnavailable):
        engine.command(make_request(model="qwen3:4b"))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("Error: llama runner process has terminated: CUDA error: out of memory", "not enough GPU memory"),  # ollama issue 9782
        (
            "Error: llama runner process has terminated: exit status 2",
            "the model runner died: exit status 2",
        ),  # ollama issue 8770
        ("Error: llama runner process has terminated: signal: killed", "the model runner died: signal: killed"),  # issue 8571
        (  # ollama issue 5958
            "Error: llama runner process has terminated: error loading model: unable to allocate backend buffer",
            "not enough memory",
        ),
        ('level=ERROR msg="llama runner process has terminated: exit status 2"', "the model runner died: exit status 2"),
        (
            "time=2024-05-27 level=ERROR timed out waiting for llama runner to start - progress 0.00",
            "the model did not load in time",
        ),
        ("Error: listen tcp 127.0.0.1:11434: bind: address already in use", "another program took its port first"),
        ("level=INFO msg=fine", None),
    ],
)
def test_real_lines_give_a_reason(line: str, reason: str | None) -> None:
    assert read_failure((line,)) == reason
