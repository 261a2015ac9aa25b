"""Callers of different classes, deadlines, and what they are told."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.gateway import scripted_engine as scripts
from tests.gateway.calling import chat, eventually
from tests.gateway.conftest import Served
from tests.gateway.scripted_engine import Asked, ScriptedEngine

from aimgpu.domain import Priority
from aimgpu.gateway.application import GatewaySettings
from aimgpu.gateway.auth import Caller, KeyTable
from aimgpu.keyfile import generate_key, hash_key
from aimgpu.qos.queueing.policy import QueuePolicy

Serve = Callable[..., Served]


def bearer(key: str, **headers: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"} | {name.replace("_", "-"): value for name, value in headers.items()}


async def one_by_one(engine: ScriptedEngine, asked: Asked) -> None:
    """The first waits for the test; the others answer at once."""
    await (scripts.wait_for_release if len(engine.asked) == 1 else scripts.polite)(engine, asked)


def test_high_goes_before_low_whoever_came_first(serve: Serve, engine: ScriptedEngine) -> None:
    engine.script = one_by_one
    served = serve()
    served.routes.serve("chat", engine, slots=1)
    with ThreadPoolExecutor(6) as pool:
        calls = [pool.submit(chat, served.port, user="first")]
        assert eventually(lambda: engine.active == 1)
        for index, priority in enumerate(["low", "medium", "high", "low", "high"]):
            calls.append(pool.submit(chat, served.port, {"x-aimgpu-priority": priority}, user=f"{priority}{index}"))
            assert eventually(lambda want=index + 1: served.gateway.slots.queued("chat") == want)  # type: ignore[misc]
        engine.released.set()
        assert all(call.result().status == 200 for call in calls)
    assert [asked.fields["user"] for asked in engine.asked] == ["first", "high2", "high4", "medium1", "low0", "low3"]


def test_a_header_may_lower_the_keys_class_but_not_lift_it(serve: Serve, engine: ScriptedEngine) -> None:
    key = generate_key()
    served = serve(keys=KeyTable({hash_key(key): Caller(name="ann", priority=Priority.MEDIUM)}))
    served.routes.serve("chat", engine)
    for headers in ({}, {"x_aimgpu_priority": "high"}, {"x_aimgpu_priority": "low"}):
        assert chat(served.port, bearer(key, **headers)).status == 200
    assert [record.priority for record in served.observer.wait_for(3)] == [Priority.MEDIUM, Priority.MEDIUM, Priority.LOW]
    assert chat(served.port, bearer(key, x_aimgpu_priority="urgent")).status == 400


def test_a_key_has_its_rate(serve: Serve, engine: ScriptedEngine) -> None:
    key = generate_key()
    served = serve(keys=KeyTable({hash_key(key): Caller(name="ann", requests_per_second=0.01)}))
    served.routes.serve("chat", engine)
    assert chat(served.port, bearer(key)).status == 200
    got = chat(served.port, bearer(key))
    assert got.status == 429
    assert got.error["code"] == "rate_exceeded"
    assert 90 <= int(got.headers["retry-after"]) <= 101


def test_a_key_has_its_number_at_once(serve: Serve, engine: ScriptedEngine) -> None:
    key = generate_key()
    engine.script = scripts.wait_for_release
    served = serve(keys=KeyTable({hash_key(key): Caller(name="ann", concurrency=1)}))
    served.routes.serve("chat", engine)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(chat, served.port, bearer(key))
        assert eventually(lambda: engine.active == 1)
        assert chat(served.port, bearer(key)).status == 429
        engine.released.set()
        assert first.result().status == 200
    assert chat(served.port, bearer(key)).status == 200


def test_a_request_past_its_deadline_leaves_the_queue(serve: Serve, engine: ScriptedEngine) -> None:
    engine.script = scripts.wait_for_release
    served = serve()
    served.routes.serve("chat", engine, slots=1)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(chat, served.port)
        assert eventually(lambda: engine.active == 1)
        got = chat(served.port, {"x-aimgpu-deadline-ms": "150"})
        assert got.status == 504
        assert got.error["code"] == "deadline_passed"
        assert served.gateway.slots.queued("chat") == 0
        engine.released.set()
        assert first.result().status == 200
    assert len(engine.asked) == 1
    assert chat(served.port, {"x-aimgpu-deadline-ms": "soon"}).status == 400


def test_whoever_waits_the_longest_that_a_class_may_is_told(serve: Serve, engine: ScriptedEngine) -> None:
    engine.script = scripts.wait_for_release
    served = serve(settings=GatewaySettings(queue=QueuePolicy(longest_wait_seconds=dict.fromkeys(Priority, 0.2))))
    served.routes.serve("chat", engine, slots=1)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(chat, served.port)
        assert eventually(lambda: engine.active == 1)
        got = chat(served.port)
        assert got.status == 503
        assert got.error["code"] == "load_shed"
        assert "retry-after" in got.headers
        engine.released.set()
        assert first.result().status == 200


def test_who_waited_is_told_how_long(serve: Serve, engine: ScriptedEngine) -> None:
    engine.script = one_by_one
    served = serve()
    served.routes.serve("chat", engine, slots=1)
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(chat, served.port)
        assert eventually(lambda: engine.active == 1)
        second = pool.submit(chat, served.port)
        assert eventually(lambda: served.gateway.slots.queued("chat") == 1)
        engine.released.set()
        assert "x-aimgpu-waited-ms" not in first.result().headers
        assert int(second.result().headers["x-aimgpu-waited-ms"]) >= 0
        assert "x-aimgpu-expected-wait-ms" not in second.result().headers  # nothing had ended yet: nobody could know
        assert eventually(lambda: engine.active == 0)
        engine.released.clear()
        engine.asked.clear()
        first = pool.submit(chat, served.port)
        assert eventually(lambda: engine.active == 1)
        second = pool.submit(chat, served.port)
        assert eventually(lambda: served.gateway.slots.queued("chat") == 1)
        engine.released.set()
        assert int(second.result().headers["x-aimgpu-expected-wait-ms"]) >= 0  # known now; may be rounded to 0


def test_priority_reaches_an_engine_that_takes_it(serve: Serve, engine: ScriptedEngine) -> None:
    served = serve()
    served.routes.serve("chat", engine, takes_priority=True)
    for priority in ("high", "low"):
        chat(served.port, {"x-aimgpu-priority": priority})
    assert [asked.fields["priority"] for asked in engine.asked] == [0, 2]


@pytest.mark.parametrize("priority", list(Priority))
def test_without_a_key_the_models_priority_counts(serve: Serve, engine: ScriptedEngine, priority: Priority) -> None:
    served = serve()
    served.routes.serve("chat", engine, priority=priority)
    chat(served.port)
    assert served.observer.wait_for(1)[0].priority is priority
