"""Replicas that fail, models that wake, callers that stall, and promises that are broken."""

import asyncio
import contextlib
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.gateway import scripted_engine as scripts
from tests.gateway.calling import CHAT, call, chat, eventually, open_chat
from tests.gateway.conftest import Served
from tests.gateway.scripted_engine import Asked, Script, ScriptedEngine

from aimgpu.domain import Ask, Auto, Deployment, Priority, ServiceObjective, Sharing
from aimgpu.gateway.application import GatewaySettings
from aimgpu.gateway.routes import Arrival
from aimgpu.gateway.slots import HoldingLimits
from aimgpu.qos.queueing.policy import QueuePolicy

Serve = Callable[..., Served]


async def too_busy(engine: ScriptedEngine, asked: Asked) -> None:
    await scripts.answer_json(asked, {"error": {"message": "queue is full"}}, "503 Service Unavailable")


def test_another_replica_answers_when_one_takes_no_more(serve: Serve, engine: ScriptedEngine) -> None:
    with ScriptedEngine(script=too_busy) as busy:
        served = serve()
        served.routes.serve("chat", busy, engine)
        assert all(chat(served.port).status == 200 for _ in range(4))
        assert busy.asked
        assert eventually(lambda: served.gateway.slots.in_flight("chat-0") == served.gateway.slots.in_flight("chat-1") == 0)


def test_another_replica_answers_when_one_cannot_be_reached(serve: Serve, engine: ScriptedEngine) -> None:
    with ScriptedEngine() as gone:
        pass
    served = serve()
    served.routes.serve("chat", gone, engine)
    assert all(chat(served.port).status == 200 for _ in range(4))


def test_callers_of_an_engine_that_is_gone_are_held_until_another_has_its_place(serve: Serve, engine: ScriptedEngine) -> None:
    """An engine that was killed is listed until the daemon notices; nothing of a request has reached it."""
    with ScriptedEngine() as gone:
        pass
    served = serve()
    served.routes.serve("chat", gone)
    with ThreadPoolExecutor(3) as pool:
        held = [pool.submit(chat, served.port) for _ in range(3)]
        assert eventually(lambda: served.gateway.slots.queued("chat") == 3)
        served.routes.put("chat", "loading", arrival=Arrival(slots=1, seconds=None))
        served.routes.serve("chat", engine, instance="chat-new")
        assert [call.result().status for call in held] == [200] * 3


BREAKING = [scripts.die_at_once, scripts.die_mid_json, scripts.talk_garbage]


@pytest.mark.parametrize("script", BREAKING)
def test_a_request_that_may_have_killed_its_engine_is_not_passed_on(serve: Serve, script: Script) -> None:
    with contextlib.ExitStack() as stack:
        engines = [stack.enter_context(ScriptedEngine(script=script)) for _ in range(4)]
        served = serve()
        served.routes.serve("chat", *engines)
        assert chat(served.port).status == 502
        assert sum(len(engine.asked) for engine in engines) == 1


@pytest.mark.parametrize("script", BREAKING)
def test_a_request_that_engines_have_answered_before_is_passed_on(serve: Serve, engine: ScriptedEngine, script: Script) -> None:
    with ScriptedEngine() as other:
        served = serve()
        served.routes.serve("chat", other, engine)
        assert chat(served.port).status == 200
        other.script = script
        other.asked.clear()
        assert all(chat(served.port).status == 200 for _ in range(4))
        assert other.asked


def test_a_request_that_ended_two_engines_is_refused_for_a_while_and_others_are_not(
    serve: Serve, engine: ScriptedEngine
) -> None:
    engine.script = scripts.die_at_once
    served = serve()
    served.routes.serve("chat", engine)
    assert [chat(served.port).status for _ in range(2)] == [502, 502]
    got = chat(served.port)
    assert (got.status, got.error["code"]) == (422, "request_quarantined")
    assert len(engine.asked) == 2
    engine.script = scripts.polite
    assert chat(served.port, user="another").status == 200


async def die_when_released(this: ScriptedEngine, asked: Asked) -> None:
    while not this.released.is_set():  # noqa: ASYNC110 - set by another thread
        await asyncio.sleep(0.01)
    await scripts.die_at_once(this, asked)


def test_one_of_many_that_an_engine_died_with_is_hardly_suspected(serve: Serve, engine: ScriptedEngine) -> None:
    served = serve()
    served.routes.serve("chat", engine)
    for _ in range(3):
        engine.script = die_when_released
        engine.released.clear()
        with ThreadPoolExecutor(4) as pool:
            calls = [pool.submit(chat, served.port, user=name) for name in "abcd"]
            assert eventually(lambda: served.gateway.slots.in_flight("chat-0") == 4)
            engine.released.set()
            assert {call.result().status for call in calls} == {502}
        engine.script = scripts.polite
        assert chat(served.port, user="other").status == 200
    assert all(chat(served.port, user=name).status == 200 for name in "abcd")


def test_a_stream_that_began_is_never_begun_again(serve: Serve, engine: ScriptedEngine) -> None:
    with ScriptedEngine(script=scripts.die_mid_event) as broken:
        served = serve()
        served.routes.serve("chat", broken, engine)
        got = chat(served.port, stream=True)
        assert got.body.count(b"whole") == 1
        assert b"engine_disconnected" in got.body
        assert engine.asked == []


def test_a_request_that_makes_an_engine_answer_500_is_not_tried_elsewhere(serve: Serve, engine: ScriptedEngine) -> None:
    with ScriptedEngine(script=scripts.fail_inside) as failing:
        served = serve()
        served.routes.serve("chat", failing, engine)
        assert chat(served.port).status == 502
        assert engine.asked == []


def test_an_engine_that_keeps_failing_is_left_alone(serve: Serve, engine: ScriptedEngine) -> None:
    with ScriptedEngine(script=scripts.die_at_once) as broken:
        served = serve()
        served.routes.serve("chat", broken, engine)
        statuses = [chat(served.port, user=str(number)).status for number in range(40)]
        assert set(statuses) == {200, 502}
        assert statuses.count(502) == len(broken.asked) <= 8  # five in a row, then one at the end of each pause


def test_a_request_for_a_sleeping_model_is_held_until_it_wakes(serve: Serve, engine: ScriptedEngine) -> None:
    served = serve()
    served.routes.put("chat", "sleeping", arrival=Arrival(slots=4, seconds=0.25))
    with ThreadPoolExecutor(3) as pool:
        calls = [pool.submit(chat, served.port) for _ in range(3)]
        assert eventually(lambda: served.gateway.slots.queued("chat") == 3)
        assert [wanted.model for wanted in served.gateway.slots.wake_requests.read()] == ["chat"]
        served.routes.serve("chat", engine)
        for held in calls:
            got = held.result()
            assert got.status == 200
            assert got.headers["x-aimgpu-expected-wait-ms"] == "250"
            assert int(got.headers["x-aimgpu-waited-ms"]) >= 0  # there only for requests that were held; may be rounded to 0


def test_more_callers_than_slots_are_held_for_a_sleeping_model_of_which_the_last_requests_are_known(
    serve: Serve, engine: ScriptedEngine
) -> None:
    """Five requests, one slot: five answers. Its rate is 0 while it sleeps, which once was an endless expected wait."""
    served = serve()
    served.routes.serve("chat", engine, slots=1)
    assert chat(served.port).status == 200
    served.routes.put("chat", "sleeping", arrival=Arrival(slots=1, seconds=2.0))
    with ThreadPoolExecutor(5) as pool:
        calls = [pool.submit(chat, served.port) for _ in range(5)]
        assert eventually(lambda: served.gateway.slots.queued("chat") == 5)
        served.routes.serve("chat", engine, slots=1)
        got = [held.result() for held in calls]
    assert [answer.status for answer in got] == [200] * 5
    assert all(int(answer.headers["x-aimgpu-expected-wait-ms"]) >= 2000 for answer in got)


def test_callers_that_waited_before_their_model_went_away_are_held_until_it_is_back(
    serve: Serve, engine: ScriptedEngine
) -> None:
    waits = dict.fromkeys(Priority, 2.0)
    served = serve(
        settings=GatewaySettings(queue=QueuePolicy(longest_wait_seconds=waits, refuse_above=dict.fromkeys(Priority, 9.0)))
    )
    engine.script = scripts.silent_until_gone
    served.routes.serve("chat", engine, slots=1)
    with ThreadPoolExecutor(1) as pool, open_chat(served.port):
        assert engine.streaming.wait(30)
        waiting = pool.submit(chat, served.port)
        assert eventually(lambda: served.gateway.slots.queued("chat") == 1)
        served.routes.put("chat", "loading", arrival=Arrival(slots=1, seconds=None, since=0.0))
        time.sleep(2.5)  # longer than its class may wait for a model that is up
        with ScriptedEngine() as replacement:
            served.routes.serve("chat", replacement)
            assert waiting.result().status == 200


def test_a_model_that_will_not_be_up_in_time_is_refused_at_once_with_a_true_time_to_come_back(serve: Serve) -> None:
    served = serve()
    served.routes.put("chat", "sleeping", arrival=Arrival(slots=4, seconds=8.0))
    got = chat(served.port, {"x-aimgpu-deadline-ms": "1000"})
    assert (got.status, got.error["code"], got.headers["retry-after"]) == (503, "model_not_ready", "7")
    assert [one.model for one in served.gateway.slots.wake_requests.read()] == ["chat"], "who comes back finds it started"


def test_callers_get_the_reason_soon_where_a_model_cannot_be_woken(serve: Serve) -> None:
    served = serve(settings=GatewaySettings(holding=HoldingLimits(longest_blocked_seconds=0.5)))
    served.routes.put("chat", "sleeping", arrival=Arrival(slots=4, seconds=1.0))
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(chat, served.port)
        assert eventually(lambda: served.gateway.slots.queued("chat") == 1)
        now = time.monotonic()
        blocked = Arrival(slots=4, seconds=1.0, problem="no room on gpu0", problem_since=now, retry_at=now + 40.5)
        served.routes.put("chat", "sleeping", arrival=blocked)
        got = held.result()
    assert (got.status, got.error["code"]) == (503, "model_not_ready")
    assert "no room on gpu0" in got.error["message"]
    assert 20 <= int(got.headers["retry-after"]) <= 41


def test_a_wake_that_takes_too_long_or_failed_for_good_is_reported(serve: Serve) -> None:
    served = serve(settings=GatewaySettings(holding=HoldingLimits(longest_seconds=0.2)))
    served.routes.put("chat", "sleeping", reason="waits for room", arrival=Arrival(slots=4, seconds=None))
    late = chat(served.port)
    assert late.error["code"] == "model_not_ready"
    assert "waits for room" in late.error["message"]
    served.routes.put("chat", "failed", reason="no memory")
    assert chat(served.port).error["code"] == "model_not_ready"


def test_the_most_urgent_wake_comes_first(serve: Serve) -> None:
    served = serve()
    for name in ("batch", "chat"):
        served.routes.put(name, "sleeping", arrival=Arrival(slots=1, seconds=None))
    with ThreadPoolExecutor(2) as pool:
        low = pool.submit(chat, served.port, {"x-aimgpu-priority": "low"}, model="batch")
        assert eventually(lambda: served.gateway.slots.queued("batch") == 1)
        high = pool.submit(chat, served.port, {"x-aimgpu-priority": "high"}, model="chat")
        assert eventually(lambda: served.gateway.slots.queued("chat") == 1)
        assert [wanted.model for wanted in served.gateway.slots.wake_requests.read()] == ["chat", "batch"]
        served.routes.replace([])
        assert {low.result().status, high.result().status} == {503}
    assert eventually(lambda: not served.gateway.slots.wake_requests.read())


def test_a_caller_who_stops_reading_does_not_keep_the_slot(serve: Serve, engine: ScriptedEngine) -> None:
    async def pour(this: ScriptedEngine, asked: Asked) -> None:
        await scripts.begin_stream(asked)
        while True:
            await scripts.write_chunk(asked, scripts.event("x" * 100_000))

    engine.script = pour
    served = serve(settings=GatewaySettings(stall_seconds=0.3))
    served.routes.serve("chat", engine)
    with open_chat(served.port, stream=True):
        [record] = served.observer.wait_for(1)
        assert record.status == 499
        assert eventually(lambda: engine.active == 0)
    assert eventually(lambda: served.gateway.slots.in_flight("chat-0") == 0)


def test_broken_promises_show_and_press_on_low_work(serve: Serve, engine: ScriptedEngine) -> None:
    engine.script = scripts.die_at_once
    served = serve()
    objective = ServiceObjective(availability_ppm=990_000)
    served.routes.serve("chat", engine, priority=Priority.HIGH, objective=objective, device="gpu0")
    for number in range(12):
        assert chat(served.port, {"x-aimgpu-deadline-ms": "50"}, user=str(number)).status >= 500
    assert eventually(lambda: served.gateway.slots.dispatcher.low_shares.get("gpu0", 1.0) < 1)
    assert served.pressures[0][0] == "gpu0"
    assert "chat burns its error budget" in (served.pressures[0][1].reason or "")
    report = served.in_loop(served.gateway.slo_monitor.report)
    target = report["models"]["chat"]["targets"][0]
    assert (target["name"], target["attainment"]) == ("availability", 0.0)
    assert report["pressure"]["gpu0"]["low_share"] < 1
    json.dumps(report)


def test_ollamas_clients_are_understood(serve: Serve, engine: ScriptedEngine) -> None:
    served = serve()
    served.routes.serve("chat", engine, simulated=True)
    tags = call(served.port, "GET", "/api/tags")
    assert [model["name"] for model in tags.json["models"]] == ["chat:latest"]
    body = CHAT | {"model": "chat:latest", "options": {"num_predict": 7, "num_ctx": 4096}}
    whole = call(served.port, "POST", "/api/chat", body | {"stream": False})
    assert whole.json["message"] == {"role": "assistant", "content": "Hello!"}
    assert (whole.json["done"], whole.json["done_reason"], whole.json["model"]) == (True, "stop", "chat:latest")
    assert whole.json["total_duration"] >= whole.json["prompt_eval_duration"] > 0
    assert whole.headers["x-aimgpu-simulated"] == "true"
    assert engine.asked[0].fields["max_tokens"] == 7
    streamed = call(served.port, "POST", "/api/chat", body)
    assert streamed.headers["content-type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in streamed.body.splitlines()]
    assert "".join(line["message"]["content"] for line in lines) == "Hello!"
    assert [line["done"] for line in lines] == [False, False, False, True]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"no", 400),
        (CHAT | {"stream": 1}, 400),
        (CHAT | {"options": {"mirostat": 2}}, 400),
        (CHAT | {"options": 3}, 400),
        (CHAT | {"model": "other"}, 404),
    ],
)
def test_ollamas_errors_have_its_shape(serve: Serve, engine: ScriptedEngine, body: object, status: int) -> None:
    served = serve()
    served.routes.serve("chat", engine)
    got = call(served.port, "POST", "/api/chat", body)
    assert got.status == status
    assert isinstance(got.json["error"], str)


def test_an_engine_that_dies_tells_ollamas_clients_too(serve: Serve, engine: ScriptedEngine) -> None:
    engine.script = scripts.die_mid_event
    served = serve()
    served.routes.serve("chat", engine)
    lines = call(served.port, "POST", "/api/chat", CHAT).body.splitlines()
    assert "error" in json.loads(lines[-1])


MANY = 10_000


@pytest.mark.skipif(resource.getrlimit(resource.RLIMIT_NOFILE)[1] < MANY + 2000, reason="needs a socket for each request")
def test_ten_thousand_wait_and_every_one_is_answered_once(serve: Serve, engine: ScriptedEngine) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        engine.script = one_of_many
        policy = QueuePolicy(most_queued=dict.fromkeys(Priority, MANY), longest_wait_seconds=dict.fromkeys(Priority, 600.0))
        served = serve(settings=GatewaySettings(queue=policy))
        served.routes.serve("chat", engine, slots=32)
        command = [sys.executable, "-m", "tests.gateway.ask_many", str(served.port), str(MANY)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]) as asking:
            assert eventually(lambda: served.gateway.slots.queued("chat") == MANY - 32, seconds=300)
            engine.released.set()
            out, _ = asking.communicate(timeout=500)
        assert json.loads(out) == {"HTTP/1.1 200 OK": MANY}
        assert len(engine.asked) == MANY
        assert engine.most_active <= 32
        assert served.gateway.slots.queued("chat") == 0
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def one_of_many(engine: ScriptedEngine, asked: Asked) -> None:
    if not engine.released.is_set():
        await asyncio.to_thread(engine.released.wait)
    await scripts.polite(engine, asked)


def test_a_model_whose_promises_steer_the_gate_presses_on_nobody_beside(serve: Serve, engine: ScriptedEngine) -> None:
    """The gate takes from low work what the promise needs; a second loop would take it again."""
    engine.script = scripts.die_at_once
    served = serve()
    arbiter = served.gateway.slo_monitor._arbiter
    promise = ServiceObjective(tpot_p95_ms=1000)
    ask = Ask(name="chat", want=Auto(), priority=Priority.HIGH)
    chatting = Deployment(name="chat", model="m", ask=ask, sharing=Sharing.PROMISE, objective=promise)
    arbiter.follow({"chat": chatting}, {})
    arbiter.note_gated({"chat"})
    assert arbiter.steers("chat")
    objective = ServiceObjective(availability_ppm=990_000)
    served.routes.serve("chat", engine, priority=Priority.HIGH, objective=objective, device="gpu0")
    for number in range(12):
        assert chat(served.port, {"x-aimgpu-deadline-ms": "50"}, user=str(number)).status >= 500
    served.in_loop(served.gateway.slo_monitor._tick)
    assert served.pressures == []

    def tick_unsteered() -> list[str]:
        arbiter.note_gated(())
        served.gateway.slo_monitor._tick()
        return [device for device, _ in served.pressures]

    assert served.in_loop(tick_unsteered) == ["gpu0"]  # in one turn of the loop: its own timer ticks too
