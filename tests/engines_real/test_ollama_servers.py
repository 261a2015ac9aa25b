"""What one real Ollama server does with several models, which is why each of our instances has a server of its own."""

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.engines_real.conftest import wait_until
from tests.engines_real.ollama_program import build_ollama

from aimgpu.engines.endpoint import choose_port
from aimgpu.engines.health import ask
from aimgpu.engines.models.store import LocalModelStore
from aimgpu.engines.ollama.engine import OllamaEngine
from aimgpu.engines.protocols import HealthState
from aimgpu.files import cache_directory

NAMES = ("one", "two", "three")
_NAME_VALUE = len(b"general.name") + 4 + 8  # of a GGUF file: after the key, the kind and the length of its value


class Server:
    """`ollama serve` with a store of its own."""

    def __init__(self, url: str, process: "subprocess.Popen[bytes]", environment: dict[str, str]) -> None:
        self.url, self.process, self.environment = url, process, environment

    def generate(self, model: str, **more: Any) -> None:
        content = {"model": model, "prompt": "a", "stream": False, "options": {"num_predict": 1}, **more}
        answer = ask(f"{self.url}/api/generate", content=content, bound_seconds=600)
        assert answer is not None
        assert answer.status == 200, answer

    def loaded(self) -> set[str]:
        answer = ask(f"{self.url}/api/ps", bound_seconds=60)
        assert answer is not None
        models: Any = (answer.read_json() or {})["models"]
        return {one["name"].removesuffix(":latest") for one in models}

    def runners(self) -> int:
        children = psutil.Process(self.process.pid).children(recursive=True)
        return sum("runner" in child.cmdline() for child in children)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three models, each with a file of its own: Ollama loads names of one file once."""
    folder = tmp_path_factory.mktemp("ollama")
    content = bytearray(
        LocalModelStore(cache_directory()).fetch("HuggingFaceTB/SmolLM2-135M-Instruct", lambda *_: None).path.read_bytes()
    )
    with serving(folder, 1) as server:
        for letter, name in zip(b"ABC", NAMES, strict=True):
            content[content.index(b"general.name") + _NAME_VALUE] = letter
            (folder / "model.gguf").write_bytes(content)
            (folder / "Modelfile").write_text("FROM ./model.gguf\n")
            argv = ["ollama", "create", name, "-f", str(folder / "Modelfile")]
            subprocess.run(argv, env=server.environment, check=True, capture_output=True)
    return folder


@contextmanager
def serving(folder: Path, most: int) -> Iterator[Server]:
    port = choose_port()
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([str(build_ollama()), os.environ["PATH"]]),
        "OLLAMA_HOST": f"127.0.0.1:{port}",
        "OLLAMA_MODELS": str(folder / "store"),
        "OLLAMA_MAX_LOADED_MODELS": str(most),
        "OLLAMA_CONTEXT_LENGTH": "512",
    }
    process = subprocess.Popen(
        ["ollama", "serve"], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=folder
    )
    server = Server(f"http://127.0.0.1:{port}", process, environment)
    try:
        wait_until(lambda: ask(f"{server.url}/api/version") is not None, "ollama does not listen")
        yield server
    finally:
        process.terminate()
        process.wait(30)


def test_with_room_for_one_the_next_model_unloads_it(store: Path) -> None:
    with serving(store, 1) as server:
        for name in NAMES:
            server.generate(name, keep_alive=-1)
            assert server.loaded() == {name}
        wait_until(lambda: server.runners() == 1, "the runners of the others are still there")


def test_with_room_for_two_the_one_that_is_kept_for_the_shortest_time_goes(store: Path) -> None:
    """Not the one that was used longest ago: `two` is newer than `one`."""
    with serving(store, 2) as server:
        server.generate("one", keep_alive="2h")
        server.generate("two", keep_alive="1h")
        assert server.loaded() == {"one", "two"}
        assert server.runners() == 2, "each loaded model is a process of its own, by which its memory is counted"
        server.generate("three", keep_alive="3h")
        assert server.loaded() == {"one", "three"}


def test_an_instance_whose_server_has_another_model_loaded_is_not_ready(store: Path, tmp_path: Path) -> None:
    with serving(store, 1) as server:
        (tmp_path / "endpoint.json").write_text(json.dumps({"url": server.url}))
        (tmp_path / "ollama.json").write_text(json.dumps({"alias": "one", "model": "one"}))
        (tmp_path / "model.json").write_text(json.dumps({"state": "loaded"}))
        engine = OllamaEngine()
        for model, state in (("one", HealthState.READY), ("two", HealthState.SLEEPING)):
            server.generate(model, keep_alive=-1)
            assert engine.check_health(tmp_path, "").state is state
        engine.wake(tmp_path, "")
        assert engine.check_health(tmp_path, "").state is HealthState.READY
