"""The metrics: for this machine, and for keys as far as they reach."""

import http.client
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.daemon.running import TestDaemon, apply, stack, wait_for

from aimgpu.keyfile import KeyClass, KeyStore


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[TestDaemon]:
    made = TestDaemon(tmp_path / "home")
    yield made
    made.stop()


def get(daemon: TestDaemon, path: str, headers: dict[str, str] | None = None) -> tuple[int, str]:
    record = daemon.home.read_daemon()
    assert record is not None
    connection = http.client.HTTPConnection("127.0.0.1", record.port, timeout=60)
    try:
        connection.request("GET", path, headers=headers or {})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


FORWARDED = [
    {"x-forwarded-for": "203.0.113.7"},
    {"forwarded": "for=203.0.113.7"},
    {"x-real-ip": "203.0.113.7"},
    {"via": "1.1 a"},
]


@pytest.mark.parametrize("headers", FORWARDED, ids=lambda headers: next(iter(headers)))
def test_what_a_proxy_on_this_machine_forwards_is_not_local(daemon: TestDaemon, headers: dict[str, str]) -> None:
    daemon.start()
    assert get(daemon, "/metrics")[0] == 200
    assert get(daemon, "/metrics", headers)[0] == 401


def test_a_key_for_some_models_sees_the_metrics_of_those(daemon: TestDaemon) -> None:
    daemon.home.create()
    store = KeyStore(daemon.home.keys_file)
    narrow, wide = store.add("narrow", KeyClass(models=("chat",))), store.add("wide")
    client = daemon.start()
    apply(client, stack(chat={}, secret={}))
    everything = {"authorization": f"Bearer {wide}"}
    wait_for(lambda: 'model="secret"' in get(daemon, "/metrics", everything)[1], "both are there")
    status, text = get(daemon, "/metrics", {"authorization": f"Bearer {narrow}"})
    samples = [line for line in text.splitlines() if not line.startswith("#")]
    assert status == 200
    assert samples
    assert any('model="chat"' in line for line in samples)
    assert not [line for line in samples if 'model="secret"' in line or line.startswith("aim_gpu_")]
    assert 'model="secret"' in get(daemon, "/metrics", everything)[1]
    assert get(daemon, "/metrics")[0] == 401
    assert get(daemon, "/metrics", {"authorization": f"Bearer {daemon.home.read_token()}"})[0] == 200
    assert get(daemon, "/metrics", {"authorization": "Bearer nonsense"})[0] == 401
