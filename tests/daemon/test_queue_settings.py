"""`queue:` of a stack file in a real daemon: applied while requests run, kept in the books, told, and put back."""

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.daemon.running import TestDaemon, apply, stack, wait_for, wait_until_settled

from aimgpu.domain import QueueSettings
from aimgpu.ledger import Ledger

DEFAULTS = {"high": 30.0, "medium": 60.0, "low": 120.0}


@pytest.fixture
def seen(tmp_path: Path) -> Path:
    """Streams are slow until it is there: they outlast what a test looks at meanwhile."""
    return tmp_path / "seen"


@pytest.fixture
def daemon(tmp_path: Path, seen: Path) -> Iterator[TestDaemon]:
    slow = ("--token-seconds", "0.4", "--tokens", "1000", "--slow-until", str(seen))
    daemon = TestDaemon(tmp_path / "home", engines={"chat": slow})
    yield daemon
    daemon.stop()


def with_queue(queue: object, **models: dict[str, Any]) -> str:
    return json.dumps(json.loads(stack(**models)) | {"queue": queue})


def ask(url: str, *, stream: bool = False) -> urllib.request.Request:
    body = {"model": "chat", "messages": [{"role": "user", "content": "hi"}], "stream": stream, "max_tokens": 1000}
    return urllib.request.Request(f"{url}/chat/completions", json.dumps(body).encode())


def test_bounds_are_changed_while_a_stream_runs_and_kept_by_the_next_daemon(daemon: TestDaemon, seen: Path) -> None:
    client = daemon.start()
    chat = {"concurrency": 4}
    apply(client, stack(chat=chat))
    assert client.read_scores()["queue"]["longest_wait_seconds"] == DEFAULTS
    (before,) = client.read_status()["instances"]
    url = client.read_status()["models_url"]
    with urllib.request.urlopen(ask(url, stream=True)) as running:
        first = running.readline()
        bounds = {"per_gpu": 1, "longest_wait": {"medium": "300ms"}, "most_queued": 5}
        events = apply(client, with_queue(bounds, chat=chat))
        assert any("bounds of the queue" in event["text"] for event in events if event["event"] == "step")
        status = client.read_status()
        assert [one["id"] for one in status["instances"]] == [before["id"]]
        told = {
            "per_gpu": 1,
            "longest_wait_seconds": {"high": 30.0, "medium": 0.3, "low": 120.0},
            "most_queued": {"high": 5, "medium": 5, "low": 5},
        }
        assert status["queue"] == told
        assert client.read_scores()["queue"] == told | {"running": {before["device"]: 1}}
        with pytest.raises(urllib.error.HTTPError) as refused:  # the GPU takes one, and the stream has it
            urllib.request.urlopen(ask(url))
        with refused.value as answer:
            assert (answer.code, answer.headers["retry-after"]) == (503, "5")
            assert "the longest that this class may" in json.load(answer)["error"]["message"]
        assert not any(event["event"] == "step" for event in apply(client, with_queue(bounds, chat=chat)))  # nothing new
        seen.touch()
        rest = running.read()
    assert rest.rstrip().endswith(b"data: [DONE]")
    assert (first + rest).count(b"data: {") >= 1000
    daemon.kill()
    client = daemon.start()
    wait_until_settled(client)
    assert client.read_status()["queue"] == told


def test_a_raised_limit_starts_those_who_wait(daemon: TestDaemon, seen: Path) -> None:
    client = daemon.start()
    chat = {"concurrency": 4}
    apply(client, with_queue({"per_gpu": 1}, chat=chat))
    url = client.read_status()["models_url"]
    answers: list[bytes] = []

    def call() -> None:
        with urllib.request.urlopen(ask(url, stream=True)) as answer:
            answers.append(answer.read())

    callers = [threading.Thread(target=call) for _ in range(3)]
    for caller in callers:
        caller.start()
    wait_for(lambda: client.read_scores()["models"]["chat"]["waiting"]["medium"] == 2, "two wait")
    apply(client, with_queue("default", chat=chat))
    wait_for(lambda: client.read_scores()["models"]["chat"]["in_flight"] == 3, "all run")
    seen.touch()
    for caller in callers:
        caller.join()
    assert all(answer.rstrip().endswith(b"data: [DONE]") for answer in answers)
    assert len(answers) == 3


def test_what_is_refused_or_only_tried_changes_no_bound_and_down_puts_the_defaults_back(daemon: TestDaemon) -> None:
    client = daemon.start()
    apply(client, with_queue({"per_gpu": 7}, chat={}))
    apply(client, with_queue({"per_gpu": 8}, chat={}), dry_run=True)
    apply(client, with_queue({"per_gpu": 9}, huge={"gpu": {"memory": "9TiB"}}))
    assert client.read_status()["queue"]["per_gpu"] == 7
    apply(client, stack(chat={}))  # says nothing about the queue
    assert client.read_status()["queue"]["per_gpu"] == 7
    list(client.apply(stack(chat={}), "/", prune=True))  # exactly this stack
    wait_for(lambda: client.read_status()["queue"]["per_gpu"] is None, "the defaults are back")
    apply(client, with_queue({"per_gpu": 7}, chat={}))
    daemon.stop()
    ledger = Ledger.open(daemon.home.path / "ledger.sqlite3")
    assert ledger.queue() == QueueSettings()
    ledger.close()
