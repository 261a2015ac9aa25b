import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from aimgpu.engines.health import ask
from aimgpu.engines.launchers.process import ProcessLauncher
from aimgpu.engines.llamacpp import wheel
from aimgpu.engines.llamacpp.engine import LlamaCppEngine
from aimgpu.engines.protocols import HealthState, LaunchRequest
from aimgpu.errors import InvalidInput
from aimgpu.sizing.engines.llamacpp_growth import MOST_SLOTS

MakeRequest = Callable[..., LaunchRequest]
WaitUntil = Callable[..., None]


@pytest.fixture
def engine(tmp_path: Path) -> LlamaCppEngine:
    return LlamaCppEngine(cache_directory=tmp_path / "cache")


def test_a_slim_image_without_openmp_is_told_which_package_it_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = "failed: ImportError: libgomp.so.1: cannot open shared object file: No such file or directory"
    monkeypatch.setattr(wheel, "_run_probe", lambda _: said)
    found = wheel.find_wheel(tmp_path, None)
    assert not found.available
    assert "apt-get install libgomp1" in (found.hint or "")
    monkeypatch.setattr(wheel, "_run_probe", lambda _: "died of SIGILL")
    assert "AVX2" in (wheel.find_wheel(tmp_path, None).hint or "")


def test_the_real_engine_loads_answers_and_stops(
    engine: LlamaCppEngine, launcher: ProcessLauncher, make_request: MakeRequest, small_model: Path, wait_until: WaitUntil
) -> None:
    request = make_request(model_path=small_model)
    process = launcher.start("chat-0", engine.command(request), request.run_directory)
    wait_until(lambda: engine.check_health(request.run_directory, "s3cret").state is HealthState.READY, "the model is loaded")
    endpoint = engine.check_health(request.run_directory, "s3cret").endpoint
    assert endpoint is not None
    question = {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 4}
    refused = ask(f"{endpoint}/v1/chat/completions", content=question, bound_seconds=60)
    assert refused is not None
    assert refused.status == 401
    answer = ask(f"{endpoint}/v1/chat/completions", api_key="s3cret", content=question, bound_seconds=60)
    assert answer is not None
    content = answer.read_json()
    assert content is not None
    assert content["model"] == "chat"
    assert content["choices"][0]["message"]["content"]  # type: ignore[index]
    said = launcher.last_lines(request.run_directory)
    assert str(small_model) in said[0]
    assert said[-1].endswith(f"ready at {endpoint}")
    launcher.stop(process, grace_seconds=10)
    assert not launcher.is_running(process)
    assert engine.check_health(request.run_directory, "s3cret").state is HealthState.STARTING
    assert "xllamacpp" not in sys.modules


def test_the_real_engine_has_the_slots_and_the_context_that_a_large_grant_gives(
    engine: LlamaCppEngine,
    launcher: ProcessLauncher,
    filled_request: LaunchRequest,
    wait_until: WaitUntil,
) -> None:
    request = filled_request
    process = launcher.start("chat-0", engine.command(request), request.run_directory)
    wait_until(lambda: engine.check_health(request.run_directory, "s3cret").state is HealthState.READY, "the model is loaded")
    endpoint = engine.check_health(request.run_directory, "s3cret").endpoint
    answer = ask(f"{endpoint}/props", api_key="s3cret")
    launcher.stop(process, grace_seconds=10)
    assert answer is not None
    content = answer.read_json()
    assert content is not None
    assert content["total_slots"] == request.footprint.concurrency == MOST_SLOTS
    assert content["default_generation_settings"]["n_ctx"] == request.footprint.context_tokens == 256  # type: ignore[index]


def test_a_model_that_cannot_be_loaded_says_why(
    engine: LlamaCppEngine, launcher: ProcessLauncher, make_request: MakeRequest, tmp_path: Path, wait_until: WaitUntil
) -> None:
    (tmp_path / "text.gguf").write_bytes(b"no gguf")
    for name, reason in {"none.gguf": "the model file cannot be opened", "text.gguf": "the model file is not GGUF"}.items():
        request = make_request(model_path=tmp_path / name)
        launcher.start("chat-0", engine.command(request), request.run_directory)
        wait_until(lambda: launcher.find_started() == {}, "the engine gave up")
        assert str(engine.failure_reason(launcher.last_lines(request.run_directory))).startswith(reason)


def test_the_probe_answers_in_a_child_and_is_remembered(tmp_path: Path, small_model: Path) -> None:
    found = LlamaCppEngine(cache_directory=tmp_path, probe_model=small_model).availability()
    assert (found.available, found.reason) == (True, None)
    remembered = list((tmp_path / "probes").iterdir())
    assert [path.read_text() for path in remembered] == ["answered\n"]
    assert "xllamacpp" not in sys.modules


def test_a_probe_that_dies_of_a_signal_makes_the_engine_unavailable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dying = tmp_path / "python"
    dying.write_text("#!/bin/sh\nkill -ILL $$\n")
    dying.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(dying))
    found = LlamaCppEngine(cache_directory=tmp_path).availability()
    assert not found.available
    assert "SIGILL" in str(found.reason)
    assert found.hint


def test_the_settings_follow_the_footprint(engine: LlamaCppEngine, make_request: MakeRequest, tmp_path: Path) -> None:
    request = make_request(model_path=tmp_path / "m.gguf")
    command = engine.command(request)
    settings = json.loads(Path(command.argv[-1]).read_text())
    assert (settings["slots"], settings["context_tokens"], settings["threads"]) == (2, 1024, 1)
    assert "s3cret" not in " ".join(command.argv) + json.dumps(settings) + json.dumps(dict(command.environment))
    flagged = engine.command(make_request(model_path=tmp_path / "m.gguf", flags={"--ctx-size": "4096", "parallel": "4"}))
    settings = json.loads(Path(flagged.argv[-1]).read_text())
    assert (settings["slots"], settings["context_tokens"]) == (4, 4096)


def test_a_model_without_a_file_and_a_flag_without_sense_are_refused(engine: LlamaCppEngine, make_request: MakeRequest) -> None:
    with pytest.raises(InvalidInput, match="GGUF"):
        engine.command(make_request())
    with pytest.raises(InvalidInput, match="parallel"):
        engine.command(make_request(model_path=Path("m.gguf"), flags={"--parallel": "many"}))


def test_a_small_model_that_loops_is_kept_from_it_and_others_are_left_alone(
    engine: LlamaCppEngine, make_request: MakeRequest, tmp_path: Path
) -> None:
    for name, model, sampling in (("small", "smollm2", {"dry_multiplier": 0.8}), ("own", "/models/mine.gguf", {})):
        request = make_request(name=name, model=model, model_path=tmp_path / "m.gguf")
        settings = Path(engine.command(request).argv[-1])
        assert json.loads(settings.read_bytes())["sampling"] == sampling
