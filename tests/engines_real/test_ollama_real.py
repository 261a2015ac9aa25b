"""The adapter of Ollama against the real server, built from Go modules, on the CPU."""

import os
import subprocess
from typing import Any

import pytest
from benchmarks.engines_h200.daemon import BenchmarkDaemon
from tests.engines_real.conftest import Call, wait_until
from tests.engines_real.ollama_program import build_ollama

from aimgpu.engines.endpoint import choose_port
from aimgpu.engines.health import ask
from aimgpu.engines.models.packaged import find_packaged

install = build_ollama


@pytest.fixture(scope="module")
def tag(daemon: BenchmarkDaemon) -> str:
    """A model of the local store, made from a GGUF file as users make one."""
    from aimgpu.engines.models.store import LocalModelStore  # noqa: PLC0415 - only where the model is needed
    from aimgpu.files import cache_directory  # noqa: PLC0415

    name = "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert find_packaged(name) is not None
    path = LocalModelStore(cache_directory()).fetch(name, lambda *_: None).path
    modelfile = daemon.folder / "Modelfile"
    modelfile.write_text(f"FROM {path}\n")
    port = choose_port()
    environment = {**os.environ, "OLLAMA_HOST": f"127.0.0.1:{port}"}
    server = subprocess.Popen(["ollama", "serve"], env=environment, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: ask(f"http://127.0.0.1:{port}/api/version") is not None, "ollama does not listen")
        subprocess.run(["ollama", "create", "small", "-f", str(modelfile)], env=environment, check=True, capture_output=True)
        subprocess.run(["ollama", "cp", "small", "other"], env=environment, check=True, capture_output=True)
    finally:
        server.terminate()
        server.wait(30)
    return "small"


def apply(daemon: BenchmarkDaemon, **models: str) -> list[dict[str, Any]]:
    entries = ", ".join(
        f'"{name}": {{"model": "{model}", "engine": "ollama", "context": 512, "keep": "1h"}}' for name, model in models.items()
    )
    stack = f'{{"models": {{{entries}}}}}'
    return list(daemon.client().apply(stack, str(daemon.folder), dry_run=False, make_room=False, prune=True, launcher=None))


def question(model: str) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": "a"}], "max_tokens": 2}


def state(daemon: BenchmarkDaemon, name: str) -> str | None:
    return next((one["state"] for one in daemon.client().read_status()["instances"] if one["name"] == name), None)


def test_a_tag_of_the_store_is_sized_started_and_answers(daemon: BenchmarkDaemon, tag: str, call: Call) -> None:
    events = apply(daemon, small=tag)
    assert state(daemon, "small") == "ready", events
    body = {"model": "small", "messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 8}
    status, answer = call("/v1/chat/completions", body)
    assert status == 200
    assert answer["choices"][0]["message"]["content"]
    status, lines = call("/v1/chat/completions", {**body, "stream": True}, stream=True)
    assert status == 200
    assert lines[-1] == "data: [DONE]"


def test_two_models_have_a_server_each_with_one_model_loaded(daemon: BenchmarkDaemon, tag: str, call: Call) -> None:
    """OLLAMA_MAX_LOADED_MODELS is 1 in each: a grant is one model's."""
    apply(daemon, small=tag, second="other")
    assert (state(daemon, "small"), state(daemon, "second")) == ("ready", "ready")
    for name in ("small", "second"):
        status, _ = call("/v1/chat/completions", question(name))
        assert status == 200
    runs = daemon.home.path / "runs"
    ids = [one["id"] for one in daemon.client().read_status()["instances"]]
    for instance_id in ids:
        log = (runs / instance_id / "engine.log").read_text()
        assert "OLLAMA_MAX_LOADED_MODELS:1" in log


def test_it_unloads_its_model_and_loads_it_again(daemon: BenchmarkDaemon, tag: str, call: Call) -> None:
    apply(daemon, small=tag)
    from aimgpu.engines.ollama.engine import OllamaEngine  # noqa: PLC0415
    from aimgpu.engines.protocols import HealthState  # noqa: PLC0415

    engine, (one,) = OllamaEngine(), daemon.client().read_status()["instances"]
    folder = daemon.home.path / "runs" / one["id"]
    engine.sleep(folder, "")
    assert engine.check_health(folder, "").state is HealthState.SLEEPING
    engine.wake(folder, "")
    assert engine.check_health(folder, "").state is HealthState.READY
    status, _ = call("/v1/chat/completions", question("small"))
    assert status == 200
