"""`aimgpu run` and `aimgpu pull` with a real daemon and a real model."""

import json

from tests.clients.conftest import Gateway


def test_run_answers_with_a_model_that_runs_already(gateway: Gateway) -> None:
    done = gateway.aimgpu("run", "chat", "Say hello.", "--max-tokens", "6", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["content"]


def test_run_holds_a_conversation_from_a_pipe(gateway: Gateway) -> None:
    done = gateway.aimgpu("run", "chat", "--max-tokens", "4", "--json", text="Hello.\nAnd you?\n")
    assert [json.loads(line)["role"] for line in done.stdout.splitlines()] == ["assistant", "assistant"]


def test_run_starts_what_is_missing_and_leaves_it_running(gateway: Gateway) -> None:
    try:
        done = gateway.aimgpu("run", "extra=smollm2", "Say hello.", "--max-tokens", "4")
        assert done.returncode == 0, done.stderr
        assert "aimgpu down" in done.stderr
        names = [one["name"] for one in json.loads(gateway.aimgpu("ps", "--json").stdout)["instances"]]
        assert "extra" in names
    finally:
        gateway.aimgpu("down", "extra")


def test_pull_finds_what_is_there(gateway: Gateway) -> None:
    [found] = json.loads(gateway.aimgpu("pull", "smollm2", "--json").stdout)
    assert found["format"] == "gguf"


def test_pull_says_why_not(gateway: Gateway) -> None:
    done = gateway.aimgpu("pull", "no-such-model")
    assert done.returncode != 0
    assert "no-such-model" in done.stderr
