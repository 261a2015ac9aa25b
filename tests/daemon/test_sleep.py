"""vLLM's own sleep under the real daemon: a stand-in that speaks its sleep endpoints, its failures, and kill -9."""

import contextlib
import http.client
import json
import random
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.daemon.running import ROOT, TestDaemon, apply, stack, wait_for, wait_until_settled

from aimgpu.cli.client import DaemonClient
from aimgpu.domain import Instance, InstanceState
from aimgpu.engines.health import ask
from aimgpu.errors import AimGpuError
from aimgpu.units import GIB

WHOLE, REST = 11 * GIB, GIB
Start = Callable[..., tuple[TestDaemon, DaemonClient]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    program = tmp_path / "vllm"
    program.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT}:$PYTHONPATH exec {sys.executable} -m tests.programs.fake_vllm "$@"\n')
    program.chmod(0o755)
    daemons: list[TestDaemon] = []

    def begin(**timing: float) -> tuple[TestDaemon, DaemonClient]:
        quick = {"least_residency_seconds": 0.0, "quiet_seconds": 0.05, "grace_seconds": 1.0, "ask_seconds": 0.2, **timing}
        daemon = TestDaemon(tmp_path / "home", engines=None, vllm=program, **quick)
        daemons.append(daemon)
        return daemon, daemon.start()

    yield begin
    for daemon in daemons:
        daemon.stop()


def vllm(words: str = "", keep: str = "1s", **fields: object) -> dict[str, object]:
    return {"model": f"org/m{words}", "engine": "vllm", "keep": keep, **fields}


def only(daemon: TestDaemon) -> Instance:
    (instance,) = daemon.books()[0]
    return instance


def wait_until_asleep(daemon: TestDaemon) -> Instance:
    """And everything that goes with it is in the books."""

    def look() -> Instance | None:
        instance = only(daemon)
        settled = not instance.sleeps_in_place or instance.grants[0].memory_bytes == REST
        return instance if instance.state is InstanceState.SLEEPING and settled else None

    return wait_for(look, "the idle model sleeps")


def all_asleep(daemon: TestDaemon) -> tuple[Instance, ...] | None:
    instances = daemon.books()[0]  # once: what is to fall asleep may be stopped in the meantime
    asleep = all(instance.state is InstanceState.SLEEPING for instance in instances)
    return instances if asleep and gave_back(instances) else None


def sleepers_gave_back(daemon: TestDaemon) -> bool:
    return gave_back(daemon.books()[0])


def gave_back(instances: tuple[Instance, ...]) -> bool:
    """Until an engine is known to sleep, the books hold everything."""
    return all(instance.grants[0].memory_bytes == REST for instance in instances if instance.sleeps_in_place)


def chat(client: DaemonClient, name: str = "chat") -> tuple[Any, Any]:
    url = f"{client.read_status()['models_url']}/chat/completions"
    body = json.dumps({"model": name, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as answer:
        return json.load(answer), answer.headers


def says_it_sleeps(daemon: TestDaemon, instance: Instance) -> bool:
    run = daemon.home.path / "runs" / instance.id
    endpoint = json.loads((run / "endpoint.json").read_bytes())["url"]
    answer = ask(f"{endpoint}/is_sleeping", api_key=(run / "api-key").read_text().strip(), bound_seconds=10.0)
    assert answer is not None
    return bool((answer.read_json() or {})["is_sleeping"])


def check_books(daemon: TestDaemon, whole: int = WHOLE) -> None:
    """Every process is charged, for what it says of itself: everything while it is awake, its rest while it sleeps."""
    instances, grants = daemon.books()
    running = daemon.launcher.find_started()
    assert {grant.instance_id for grant in grants} == set(running)
    for instance in instances:
        if instance.id in running:
            asleep = says_it_sleeps(daemon, instance)
            assert instance.process == running[instance.id]
            assert instance.sleeps_in_place == asleep
            assert [grant.memory_bytes for grant in instance.grants] == [REST if asleep else whole]


def test_an_idle_model_sleeps_in_place_and_a_request_wakes_the_same_process(start: Start) -> None:
    daemon, client = start()
    apply(client, stack(chat=vllm(keep="3s")))
    before = only(daemon)
    assert [grant.memory_bytes for grant in before.grants] == [WHOLE]
    asleep = wait_until_asleep(daemon)
    assert asleep.process == before.process
    assert says_it_sleeps(daemon, asleep)
    check_books(daemon)
    assert client.read_status()["instances"][0]["memory_bytes"] == REST, "the rest can be given to others"
    content, first = chat(client)
    assert content["choices"]
    assert only(daemon).process == before.process
    wait_until_asleep(daemon)
    _, second = chat(client)
    assert first["X-Aimgpu-Expected-Wait-Ms"] is None, "never seen waking: no estimate"
    assert 0 < int(second["X-Aimgpu-Expected-Wait-Ms"]) < 60_000
    turns = (daemon.home.path / "runs" / asleep.id / "sleeps").read_text().split("\n")
    assert [turn.split(" ")[0] for turn in turns[:4]] == ["/sleep?level=1", "/wake_up", "/sleep?level=1", "/wake_up"]


def test_a_hundred_requests_at_once_wake_a_sleeping_model_once_and_are_all_answered(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIMGPU_WAKE_HEARTBEAT", "50ms")
    daemon, client = start()
    apply(client, stack(chat=vllm("+slow-turns", keep="1h", concurrency=8)))
    before = only(daemon)
    url = f"{client.read_status()['models_url']}/chat/completions"
    callers = threading.Barrier(100)

    def ask_with_the_others(number: int) -> bytes:
        body = {"model": "chat", "messages": [{"role": "user", "content": f"hi {number}"}], "stream": number % 2 == 0}
        request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
        callers.wait(300)
        with urllib.request.urlopen(request, timeout=300) as answer:
            return bytes(answer.read())

    turns = daemon.home.path / "runs" / before.id / "sleeps"
    for burst in (1, 2):  # what the first wake took is known in the second
        client._json("POST", "/models/chat/sleep", {})
        wait_until_asleep(daemon)
        with ThreadPoolExecutor(callers.parties) as pool:
            answers = list(pool.map(ask_with_the_others, range(callers.parties)))
        assert all(answer.endswith(b"data: [DONE]\n\n") for answer in answers[::2])
        assert all(json.loads(answer)["choices"] for answer in answers[1::2])
        assert any(answer.startswith(b": waking chat") for answer in answers[::2])
        assert turns.read_text().count("/wake_up") == burst
    assert only(daemon).process == before.process


def test_a_port_that_somebody_else_took_is_chosen_anew(start: Start) -> None:
    daemon, client = start()
    apply(client, stack(chat=vllm("+port-taken-once", keep="10m"), unlucky=vllm("+port-taken", keep="10m")))
    states = {instance.deployment: instance for instance in daemon.books()[0]}
    assert states["chat"].state is InstanceState.READY
    assert states["unlucky"].state is InstanceState.FAILED
    assert "another program took its port first" in (states["unlucky"].reason or "")


def test_models_that_do_not_fit_together_take_turns_without_one_being_stopped(start: Start) -> None:
    daemon, client = start()
    large = vllm(keep="10m", gpu={"memory": "150GiB"})
    apply(client, stack(chat=large, code=large))
    pids: dict[str, Any] = {}
    for name in ("chat", "code", "chat", "code"):
        assert chat(client, name)[0]["choices"]
        check_books(daemon, 150 * GIB)
        states = {instance.deployment: instance for instance in daemon.books()[0]}
        assert states[name].state is InstanceState.READY
        for one, instance in states.items():
            assert pids.setdefault(one, instance.process) == instance.process or pids[one] is None
            pids[one] = instance.process
    assert None not in pids.values()


def test_one_that_does_not_sleep_or_wake_is_stopped_or_started_again_and_requests_are_answered(start: Start) -> None:
    """Whatever fails, a held request is answered, and the books hold what runs."""
    unwilling = ("sleep-fails", "sleep-hangs", "wake-fails", "wake-hangs", "dies-at-wake")
    daemon, client = start(wake_timeout_seconds=10.0)
    apply(client, stack(**{word: vllm(f"+{word}") for word in unwilling}))
    asleep = wait_for(lambda: all_asleep(daemon), "all of them sleep, in one way or the other")
    stopped = {instance.deployment for instance in asleep if instance.process is None}
    assert stopped == {"sleep-fails", "sleep-hangs"}, "these sleep by being stopped"
    for instance in asleep:
        assert chat(client, instance.deployment)[0]["choices"], "held and answered, no 5xx"
        now = next(one for one in daemon.books()[0] if one.deployment == instance.deployment)
        assert now.process is None or now.process != instance.process  # None: idle again, and stopped
    wait_for(lambda: all_asleep(daemon), "they sleep again")
    check_books(daemon)


def test_one_that_dies_asleep_holds_nothing_any_more_and_still_wakes(start: Start) -> None:
    daemon, client = start()
    apply(client, stack(chat=vllm()))
    asleep = wait_until_asleep(daemon)
    assert asleep.process is not None
    daemon.launcher.stop(asleep.process, grace_seconds=0)
    wait_for(lambda: only(daemon).process is None, "the daemon noticed")
    gone = only(daemon)
    assert (gone.state, gone.grants) == (InstanceState.SLEEPING, ())
    assert "while it slept" in (gone.reason or "")
    assert chat(client)[0]["choices"]


def test_one_that_somebody_else_wakes_sleeps_again(start: Start) -> None:
    daemon, client = start()
    apply(client, stack(chat=vllm()))
    asleep = wait_until_asleep(daemon)
    url = json.loads((daemon.home.path / "runs" / asleep.id / "endpoint.json").read_bytes())["url"]
    assert ask(f"{url}/wake_up", content={}) is not None
    wait_for(lambda: says_it_sleeps(daemon, asleep), "it sleeps again")
    wait_until_asleep(daemon)  # the ledger follows the engine
    check_books(daemon)


def test_a_sleeper_stays_asleep_over_kill_9_of_the_daemon_and_wakes_after_it(start: Start) -> None:
    daemon, client = start()
    apply(client, stack(chat=vllm()))
    asleep = wait_until_asleep(daemon)
    daemon.kill()
    client = daemon.start()
    wait_until_settled(client)
    assert only(daemon) == asleep
    check_books(daemon)
    assert chat(client)[0]["choices"]
    assert only(daemon).process == asleep.process


@pytest.mark.rest
def test_after_each_kill_in_the_middle_of_turns_the_books_agree_with_the_engines(start: Start) -> None:
    chance = random.Random(7)
    daemon, client = start()
    large = vllm("+slow-turns", keep="10m", gpu={"memory": "150GiB"})
    models = stack(chat=large, code=large)
    apply(client, models)
    for number in range(6):
        asking = threading.Thread(target=ask_and_forget, args=(client, ("chat", "code")[number % 2]))
        asking.start()
        asking.join(chance.uniform(0.0, 1.5))
        daemon.kill()
        asking.join()
        client = daemon.start()
        wait_until_settled(client)
        wait_for(lambda: sleepers_gave_back(daemon), "what was falling asleep sleeps")
        check_books(daemon, 150 * GIB)
    assert {chat(client, name)[0]["object"] for name in ("chat", "code")} == {"chat.completion"}


def ask_and_forget(client: DaemonClient, name: str) -> None:
    with contextlib.suppress(OSError, http.client.HTTPException, AimGpuError):  # the daemon dies under us
        chat(client, name)
