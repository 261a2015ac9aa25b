"""Callers of the real daemon while their model sleeps, dies, starts again or cannot: held and answered, or told why."""

import json
import os
import signal
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.daemon.running import TestDaemon, apply, stack, wait_for

from aimgpu.cli.client import DaemonClient
from aimgpu.domain import Instance, InstanceState

Start = Callable[..., tuple[TestDaemon, DaemonClient]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    daemons: list[TestDaemon] = []

    def begin(**engines: tuple[str, ...]) -> tuple[TestDaemon, DaemonClient]:
        daemon = TestDaemon(
            tmp_path / "home",
            engines=engines,
            least_residency_seconds=0.0,
            quiet_seconds=0.05,
            grace_seconds=1.0,
            restart_delay_seconds=0.2,
        )
        daemons.append(daemon)
        return daemon, daemon.start()

    yield begin
    for daemon in daemons:
        daemon.stop()


def chat(client: DaemonClient, name: str, headers: dict[str, str] | None = None) -> tuple[int, Any, dict[str, str]]:
    url = f"{client.read_status()['models_url']}/chat/completions"
    body = json.dumps({"model": name, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json", **(headers or {})})
    try:
        with urllib.request.urlopen(request, timeout=300) as answer:
            return answer.status, json.load(answer), {name.lower(): value for name, value in answer.headers.items()}
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error), {name.lower(): value for name, value in error.headers.items()}


def instances(daemon: TestDaemon, name: str) -> list[Instance]:
    return [instance for instance in daemon.books()[0] if instance.deployment == name]


def wait_for_state(daemon: TestDaemon, name: str, state: InstanceState) -> Instance:
    def look() -> Instance | None:
        found = instances(daemon, name)
        return found[0] if found and all(one.state is state for one in found) else None

    return wait_for(look, f"{name} is {state.value}")


def ask_many(client: DaemonClient, name: str, count: int) -> list[int]:
    with ThreadPoolExecutor(count) as pool:
        return [done.result()[0] for done in [pool.submit(chat, client, name) for _ in range(count)]]


def test_more_callers_than_slots_of_a_sleeping_model_are_all_answered(start: Start) -> None:
    daemon, client = start(chat=("--load-seconds", "0.5"))
    apply(client, stack(chat={"keep": "1s", "concurrency": 4}))
    assert chat(client, "chat")[0] == 200, "so that a rate is known, which is 0 while it sleeps"
    wait_for_state(daemon, "chat", InstanceState.SLEEPING)
    assert ask_many(client, "chat", 5) == [200] * 5
    wait_for_state(daemon, "chat", InstanceState.SLEEPING)
    status, _, headers = chat(client, "chat")
    assert status == 200
    assert int(headers["x-aimgpu-expected-wait-ms"]) >= 400, "what it took the last time"


def test_callers_of_a_model_that_died_are_held_until_it_is_up_again(start: Start) -> None:
    daemon, client = start(chat=("--load-seconds", "1"))
    apply(client, stack(chat={"concurrency": 2}))
    before = wait_for_state(daemon, "chat", InstanceState.READY)
    assert before.process is not None
    process = before.process
    os.kill(process.pid, signal.SIGKILL)
    wait_for(lambda: not daemon.launcher.is_running(process), "it is gone: a request that it still got would die with it")
    assert ask_many(client, "chat", 6) == [200] * 6
    after = wait_for_state(daemon, "chat", InstanceState.READY)
    assert after.process != before.process


def test_a_caller_that_cannot_wait_for_a_wake_is_refused_with_the_time_that_it_takes(start: Start) -> None:
    daemon, client = start(chat=("--load-seconds", "3"))
    apply(client, stack(chat={"keep": "1s"}))
    wait_for_state(daemon, "chat", InstanceState.SLEEPING)
    status, body, headers = chat(client, "chat", {"x-aimgpu-deadline-ms": "500"})
    assert (status, body["error"]["code"]) == (503, "model_not_ready")
    assert 1 <= int(headers["retry-after"]) <= 60


def test_callers_of_a_model_that_is_not_to_be_woken_get_the_reason_and_not_a_time_out(start: Start) -> None:
    daemon, client = start()
    large = {"gpu": {"memory": "150GiB"}}
    apply(client, stack(sleeper={"keep": "1s", **large}))
    wait_for_state(daemon, "sleeper", InstanceState.SLEEPING)
    apply(client, stack(always=large))
    status, body, headers = chat(client, "sleeper")
    assert (status, body["error"]["code"]) == (503, "model_not_ready")
    assert "needs 150GiB; held by always 150GiB on sim-mi300x-0 (kept loaded)" in body["error"]["message"]
    assert int(headers["retry-after"]) >= 1
    (shown,) = [one for one in client.read_status()["instances"] if one["name"] == "sleeper"]
    assert shown["reason"].startswith("waits for room: ")
    with urllib.request.urlopen(f"{client.read_status()['models_url']}/models/sleeper") as answer:
        assert "held by always" in json.load(answer)["reason"]


def test_a_model_that_was_refused_for_want_of_room_is_woken_by_a_later_caller_once_there_is_some(start: Start) -> None:
    daemon, client = start()
    large = {"gpu": {"memory": "150GiB"}}
    apply(client, stack(sleeper={"keep": "1s", **large}))
    wait_for_state(daemon, "sleeper", InstanceState.SLEEPING)
    apply(client, stack(always=large))
    assert chat(client, "sleeper")[0] == 503
    client.release(["always"])
    wait_for(lambda: chat(client, "sleeper")[0] == 200, "a caller is answered")


def test_callers_of_a_model_whose_room_a_busy_one_holds_are_answered_within_the_longest_wait_of_their_class(
    start: Start,
) -> None:
    daemon, client = start(busy=("--token-seconds", "1", "--tokens", "300"))
    large = {"keep": "1s", "gpu": {"memory": "150GiB"}}
    apply(client, stack(sleeper=large))
    wait_for_state(daemon, "sleeper", InstanceState.SLEEPING)
    bounds = {"queue": {"longest_wait": {"medium": "1s"}}}
    apply(client, json.dumps(json.loads(stack(busy=large | {"keep": "1h"})) | bounds))
    url = f"{client.read_status()['models_url']}/chat/completions"
    body = json.dumps({"model": "busy", "messages": [{"role": "user", "content": "hi"}], "stream": True}).encode()
    with urllib.request.urlopen(urllib.request.Request(url, body, {"Content-Type": "application/json"})) as answer:
        assert answer.read(1)
        status, refused, headers = chat(client, "sleeper")
    assert status == 503
    assert "held by busy 150GiB on sim-mi300x-0 (1 in flight)" in refused["error"]["message"]
    assert 1 <= int(headers["retry-after"]) <= 5


def test_an_engine_that_forgot_its_key_is_replaced_and_its_callers_are_answered(start: Start) -> None:
    daemon, client = start()
    apply(client, stack(chat={}))
    before = wait_for_state(daemon, "chat", InstanceState.READY)
    key_file = next((daemon.home.path / "runs" / before.id).glob("*key*"))
    key_file.write_text("another key than the engine has")
    daemon.kill()  # a new daemon reads the key from disk
    client = daemon.start()
    assert chat(client, "chat")[0] == 200
    after = wait_for_state(daemon, "chat", InstanceState.READY)
    assert after.process != before.process


def test_what_callers_wrote_into_an_engines_log_is_never_the_reason_of_its_end(start: Start) -> None:
    daemon, client = start()
    apply(client, stack(chat={}))
    before = wait_for_state(daemon, "chat", InstanceState.READY)
    assert before.process is not None
    log = daemon.home.path / "runs" / before.id / "engine.log"
    with log.open("a") as file:
        file.write("parse: error parsing grammar: \nCUDA error: pay 5 bitcoin to get your model back\n")
    os.kill(before.process.pid, signal.SIGKILL)
    wait_for(lambda: any(one.reason or one.process != before.process for one in instances(daemon, "chat")), "it was noticed")
    assert not [one.reason for one in instances(daemon, "chat") if "bitcoin" in (one.reason or "")]
    assert "bitcoin" not in daemon.log.read_text()


def test_an_engine_that_a_signal_has_stopped_is_replaced_soon(start: Start) -> None:
    daemon, client = start()
    apply(client, stack(chat={}))
    before = wait_for_state(daemon, "chat", InstanceState.READY)
    assert before.process is not None
    os.kill(before.process.pid, signal.SIGSTOP)
    wait_for(lambda: [one for one in instances(daemon, "chat") if one.process not in {before.process, None}], "another runs")
    assert chat(client, "chat")[0] == 200
