"""Which sleeping model the real daemon wakes first, seen by the callers who wait for it."""

import json
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from tests.daemon.running import TestDaemon, apply, stack, wait_for

from aimgpu.cli.client import DaemonClient

LARGE = {"gpu": {"memory": "150GiB"}}  # two of them do not fit on one MI300X


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[TestDaemon]:
    daemon = TestDaemon(
        tmp_path / "home",
        engines={"low": ("--token-seconds", "1", "--tokens", "300")},
        least_residency_seconds=0.0,
        quiet_seconds=0.05,
        grace_seconds=1.0,
        drain_seconds=1.0,
        room_retry_seconds=0.5,
    )
    daemon.set(AIMGPU_TEST_PATIENCE="600")  # callers may wait for more than the usual 15 s until there is room
    daemon.start()
    yield daemon
    daemon.stop()


@pytest.fixture
def client(daemon: TestDaemon) -> DaemonClient:
    return daemon.wait_until_it_answers()


def chat_request(client: DaemonClient, name: str, *, stream: bool = False) -> urllib.request.Request:
    url = f"{client.read_status()['models_url']}/chat/completions"
    body = json.dumps({"model": name, "messages": [{"role": "user", "content": "hi"}], "stream": stream}).encode()
    return urllib.request.Request(url, body, {"Content-Type": "application/json"})


def chat(client: DaemonClient, name: str) -> int:
    with urllib.request.urlopen(chat_request(client, name), timeout=300) as answer:
        answer.read()
        return int(answer.status)


def states(daemon: TestDaemon) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for one in daemon.books()[0]:
        found.setdefault(one.deployment, []).append(one.state.value)
    return {name: sorted(each) for name, each in found.items()}


def deploy_asleep(daemon: TestDaemon, client: DaemonClient, name: str, **fields: object) -> None:
    apply(client, stack(**{name: {"keep": "1s", **fields}}))
    wait_for(lambda: states(daemon).get(name) == ["sleeping"], f"{name} sleeps")


def is_waited_for(daemon: TestDaemon, name: str) -> bool:
    record = daemon.home.read_daemon()
    assert record is not None
    with urllib.request.urlopen(record.url + "/metrics") as answer:
        lines = answer.read().decode().splitlines()
    depth = [line for line in lines if line.startswith("aim_scheduler_queue_depth") and f'model="{name}"' in line]
    return any(float(line.rpartition(" ")[2]) for line in depth)


def test_a_busy_model_of_low_priority_makes_way_for_a_caller_of_a_high_one(daemon: TestDaemon, client: DaemonClient) -> None:
    deploy_asleep(daemon, client, "high", priority="high", **LARGE)
    apply(client, stack(low={"keep": "1h", "priority": "low", **LARGE}))
    with urllib.request.urlopen(chat_request(client, "low", stream=True)) as busy:  # five minutes of an answer, if it may
        assert busy.read(1)
        assert chat(client, "high") == 200
        assert states(daemon)["low"] == ["sleeping"]


def test_of_callers_who_wait_for_one_gpu_the_high_one_is_served_first_and_the_others_after_it(
    daemon: TestDaemon, client: DaemonClient
) -> None:
    names = ("early", "late", "urgent")
    for name in names:
        deploy_asleep(daemon, client, name, priority="high" if name == "urgent" else "low", **LARGE)
    apply(client, stack(blocker={**LARGE, "priority": "high"}))
    served: list[str] = []
    lock = threading.Lock()

    def ask(name: str) -> None:
        assert chat(client, name) == 200
        with lock:
            served.append(name)

    with ThreadPoolExecutor(len(names)) as pool:
        asked = []
        for name in names:
            asked.append(pool.submit(ask, name))
            wait_for(partial(is_waited_for, daemon, name), f"a caller waits for {name}")
        client.release(["blocker"])
        for each in asked:
            each.result()
    assert served[0] == "urgent"
    assert sorted(served) == sorted(names)


def test_one_whose_gpu_is_empty_is_woken_while_others_wait_for_room(tmp_path: Path) -> None:
    daemon = TestDaemon(tmp_path / "home", least_residency_seconds=0.0, quiet_seconds=0.05, grace_seconds=1.0)
    client = daemon.start()
    try:
        deploy_asleep(daemon, client, "small", gpu={"memory": "20GiB"})
        deploy_asleep(daemon, client, "large", **LARGE)
        apply(client, stack(blocker={**LARGE, "priority": "high"}))
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(chat, client, "large")
            wait_for(lambda: is_waited_for(daemon, "large"), "a caller waits for the large one")
            assert chat(client, "small") == 200
            assert not waiting.done()
            client.release(["blocker"])
            assert waiting.result() == 200
    finally:
        daemon.stop()


def test_a_pair_of_which_one_is_asleep_is_whole_again_once_there_is_room(daemon: TestDaemon, client: DaemonClient) -> None:
    half = {"gpu": {"memory": "80GiB"}}
    apply(client, stack(pair={"keep": "10m", "replicas": 2, **half}))
    client._json("POST", "/models/pair/sleep", {})
    wait_for(lambda: states(daemon).get("pair") == ["sleeping", "sleeping"], "both sleep")
    apply(client, stack(other={**half, "priority": "high"}))
    assert chat(client, "pair") == 200
    assert states(daemon)["pair"] == ["ready", "sleeping"]
    client.release(["other"])
    stop = threading.Event()

    def go_on() -> None:
        while not stop.is_set():
            chat(client, "pair")

    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(go_on)
        try:
            wait_for(lambda: states(daemon).get("pair") == ["ready", "ready"], "both are ready")
        finally:
            stop.set()
        asking.result()
