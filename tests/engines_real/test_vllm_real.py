"""The adapter of vLLM against the newest real vLLM, on the CPU."""

import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from benchmarks.engines_h200.daemon import BenchmarkDaemon
from tests.engines_real.conftest import Call, wait_until
from tests.engines_real.vllm_program import install_vllm

from aimgpu.engines.vllm.engine import VllmEngine

install = install_vllm
CHAT = {"shape": "tiny", "context": 1024, "concurrency": 4, "slo": {"tpot_p95": "10s"}}


@pytest.fixture(scope="module")
def started(daemon: BenchmarkDaemon) -> dict[str, Any]:
    """The model `chat`, ready, and what was seen while it started."""
    return daemon.apply({"chat": CHAT})


def instance(daemon: BenchmarkDaemon, name: str = "chat") -> dict[str, Any]:
    return next((one for one in daemon.client().read_status()["instances"] if one["name"] == name), {})


def test_it_starts_and_says_what_it_is_doing(started: dict[str, Any]) -> None:
    assert started["error"] is None
    assert started["instances"]["chat"]["state"] == "ready"
    stages = [entry.split(" ", 1)[1] for entry in started["stages"]["chat"]]
    order = ["importing", "loading weights", "allocating the KV cache", "compiling", "capturing graphs", "first token"]
    assert stages, "no stage was seen"
    assert stages == sorted(stages, key=order.index)


@pytest.mark.usefixtures("started")
def test_answers_come_whole_and_as_a_stream(call: Call) -> None:
    body = {"model": "chat", "prompt": "Hello", "max_tokens": 8, "ignore_eos": True}
    status, answer = call("/v1/completions", body)
    assert status == 200
    assert answer["usage"]["completion_tokens"] == 8
    status, lines = call("/v1/completions", {**body, "stream": True}, stream=True)
    assert status == 200
    assert lines[-1] == "data: [DONE]"
    assert len(lines) > 2, "several tokens may share an event, but not all of them"
    status, answer = call(
        "/v1/chat/completions", {"model": "chat", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    )
    assert status == 200
    assert answer["choices"][0]["message"]["role"] == "assistant"


@pytest.mark.usefixtures("started")
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 16}),
    ],
)
def test_other_dialects_reach_it(call: Call, path: str, body: dict[str, Any]) -> None:
    status, answer = call(path, {"model": "chat", **body})
    assert status == 200, answer


@pytest.mark.usefixtures("started")
def test_it_orders_requests_by_priority(call: Call) -> None:
    """It takes a priority in the body only because it was started with --scheduling-policy priority."""
    status, _ = call("/v1/completions", {"model": "chat", "prompt": "a", "max_tokens": 2, "priority": 1})
    assert status == 200


@pytest.mark.usefixtures("started")
def test_its_log_is_quiet_while_it_is_only_asked_for_its_health(daemon: BenchmarkDaemon) -> None:
    log = daemon.home.path / "runs" / instance(daemon)["id"] / "engine.log"
    time.sleep(12)  # it is asked every five seconds
    text = log.read_text()
    assert "404" not in text
    assert '"GET /health' not in text


def test_it_is_stopped_when_idle_and_started_by_a_request_where_it_has_no_sleep_mode(
    daemon: BenchmarkDaemon, call: Call
) -> None:
    """vLLM for the CPU refuses to start with --enable-sleep-mode: it gets no such flag, and `up` reports what happens instead.

    Its concurrency is left out, so that the KV cache holds one context only: that must be enough with blocks of 128 tokens.
    """
    entry = {"model": daemon.model("tiny"), "engine": "vllm", "context": 1024, "keep": "5s", "args": {"load-format": "dummy"}}
    stack = json.dumps({"models": {"idle": entry}})
    events = list(daemon.client().apply(stack, str(daemon.folder), dry_run=False, make_room=False, prune=False, launcher=None))
    texts = [str(event.get("text")) for event in events]
    assert "idle: vLLM has no sleep mode on the CPU: when it is idle it is stopped, and a request starts it again" in texts
    assert any(event.get("state") == "ready" for event in events), events
    wait_until(lambda: instance(daemon, "idle").get("state") == "sleeping", "it stayed loaded")
    assert instance(daemon, "idle")["grants"] == []
    status, _ = call("/v1/completions", {"model": "idle", "prompt": "a", "max_tokens": 2})
    assert status == 200
    daemon.client().release(["idle"])


def test_it_lists_its_flags_and_a_wrong_one_is_refused_before_anything_starts(daemon: BenchmarkDaemon) -> None:
    known = VllmEngine().known_flags()
    assert known is not None
    assert {"max-model-len", "kv-cache-memory-bytes", "enable-sleep-mode", "scheduling-policy", "load-format"} <= known
    before = daemon.client().read_status()["instances"]
    refused = daemon.apply({"bad": {**CHAT, "args": {"enable-prefix-cachign": True}}}, prune=False)
    assert "does not take the flag --enable-prefix-cachign" in str(refused["error"])
    assert len(daemon.client().read_status()["instances"]) == len(before)


def test_a_folder_without_its_tokenizer_fails_with_the_root_cause_and_keeps_the_log(daemon: BenchmarkDaemon) -> None:
    whole = Path(daemon.model("tiny"))
    broken = whole.parent / "broken"
    shutil.copytree(whole, broken, ignore=shutil.ignore_patterns("tokenizer*"))
    entry = {"model": str(broken), "engine": "vllm", "context": 512, "args": {"load-format": "dummy"}}
    stack = json.dumps({"models": {"broken": entry}})
    events = list(daemon.client().apply(stack, str(daemon.folder), dry_run=False, make_room=False, prune=False, launcher=None))
    failed = [event for event in events if event.get("state") == "failed"]
    assert failed, events
    reason = str(failed[-1]["reason"])
    assert "okenizer" in reason
    assert "Engine core initialization failed" not in reason
    assert "okenizer" in daemon.home.failed_log("broken").read_text()
    daemon.client().release(["broken"])
    assert daemon.home.failed_log("broken").exists()


@pytest.mark.usefixtures("started")
def test_one_that_is_killed_is_started_again(daemon: BenchmarkDaemon, call: Call) -> None:
    before = instance(daemon)
    marked = [
        process
        for process in psutil.process_iter(["pid", "environ"])
        if (process.info["environ"] or {}).get("AIMGPU_INSTANCE") == before["id"]
    ]
    assert marked
    for process in marked:
        os.kill(process.pid, signal.SIGKILL)
    wait_until(lambda: instance(daemon).get("id") != before["id"], "the death was not noticed")
    wait_until(lambda: instance(daemon).get("state") == "ready", "it did not come back")
    status, _ = call("/v1/completions", {"model": "chat", "prompt": "a", "max_tokens": 2})
    assert status == 200
