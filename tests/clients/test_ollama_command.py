"""Ollama's own command, as a client of ours."""

import json
import os
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from tests.clients.conftest import OLLAMA_VERSION, Gateway


@pytest.fixture
def ollama(gateway: Gateway, ollama_command: Path, tmp_path: Path) -> Any:
    def run(*arguments: str) -> str:
        environment = os.environ | {"OLLAMA_HOST": gateway.url, "HOME": str(tmp_path), "NO_PROXY": "127.0.0.1", "TERM": "dumb"}
        done = subprocess.run(
            [str(ollama_command), *arguments],
            capture_output=True,
            text=True,
            check=False,
            env=environment,
            stdin=subprocess.DEVNULL,
            timeout=600,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    return run


def test_it_is_the_real_command(ollama: Any) -> None:
    assert f"client version is {OLLAMA_VERSION}" in ollama("--version")


def test_list_shows_every_model_with_an_id_of_its_own(ollama: Any) -> None:
    rows = [line.split() for line in ollama("list").splitlines()[1:]]
    assert [row[0] for row in rows] == ["chat:latest", "other:latest"]
    assert len({row[1] for row in rows}) == 2


def test_show_has_the_architecture_and_the_context(ollama: Any) -> None:
    shown = ollama("show", "chat")
    assert "llama" in shown
    assert "135M" in shown
    assert "4096" in shown
    assert "completion" in shown


def test_run_answers_a_prompt(ollama: Any) -> None:
    assert ollama("run", "other", "Say hello in one sentence.").strip()


def test_stop_unloads_and_ps_shows_what_is_loaded(ollama: Any, gateway: Gateway) -> None:
    ollama("stop", "other")
    _wait_until_unloaded(gateway, "other:latest")
    assert [line.split()[0] for line in ollama("ps").splitlines()[1:]] == ["chat:latest"]
    load = urllib.request.Request(f"{gateway.url}/api/generate", json.dumps({"model": "other"}).encode())
    with urllib.request.urlopen(load, timeout=300) as answer:
        assert json.load(answer)["done_reason"] == "load"
    assert "other:latest" in ollama("ps")


def _wait_until_unloaded(gateway: Gateway, name: str) -> None:
    """`stop` returns at once; a model that is busy stays until it is asked again."""
    for _ in range(600):
        with urllib.request.urlopen(f"{gateway.url}/api/ps", timeout=60) as answer:
            if name not in [model["name"] for model in json.load(answer)["models"]]:
                return
        time.sleep(0.1)
    raise AssertionError(f"{name} is still loaded")
