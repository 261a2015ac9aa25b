import contextlib
import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.gateway import scripted_engine as scripts
from tests.gateway.calling import call, chat, eventually, open_chat
from tests.gateway.conftest import Served
from tests.gateway.scripted_engine import Asked, Script, ScriptedEngine

from aimgpu.domain import Priority
from aimgpu.gateway.application import GatewaySettings
from aimgpu.gateway.slo_monitor import to_sample
from aimgpu.qos.queueing.policy import QueuePolicy

Serve = Callable[..., Served]


@pytest.mark.parametrize("script", [scripts.stream_until_gone, scripts.silent_until_gone])
@pytest.mark.parametrize("stream", [True, False])
def test_a_caller_who_leaves_frees_the_engine_at_once(
    serve: Serve, engine: ScriptedEngine, script: Script, *, stream: bool
) -> None:
    engine.script = script
    served = serve()
    served.routes.serve("chat", engine)
    caller = open_chat(served.port, stream=stream)
    assert engine.streaming.wait(30)
    caller.close()
    assert engine.saw_leave.wait(30)
    [record] = served.observer.wait_for(1)
    assert (record.status, record.code) == (499, "client_gone")
    assert eventually(lambda: served.gateway.slots.in_flight("chat-0") == 0)


def test_an_engine_that_dies_mid_stream_ends_in_an_error_event(serve: Serve, engine: ScriptedEngine) -> None:
    engine.script = scripts.die_mid_event
    served = serve()
    served.routes.serve("chat", engine)
    got = chat(served.port, stream=True)
    first, second, rest = got.body.split(b"\n\n")
    assert b"whole" in first
    assert rest == b""
    error = json.loads(second.removeprefix(b"data: "))["error"]
    assert error["code"] == "engine_disconnected"
    assert served.observer.wait_for(1)[0].status == 502


@pytest.mark.parametrize("script", [scripts.die_mid_json, scripts.die_at_once, scripts.talk_garbage])
def test_an_engine_that_breaks_off_is_a_bad_gateway(serve: Serve, engine: ScriptedEngine, script: Script) -> None:
    engine.script = script
    served = serve()
    served.routes.serve("chat", engine)
    got = chat(served.port)
    assert got.status == 502
    assert got.error["type"] == "server_error"
    assert eventually(lambda: served.gateway.slots.in_flight("chat-0") == 0)


@pytest.mark.parametrize(
    ("status", "said", "told"),
    [
        ("501 Not Implemented", "no embeddings here, start me otherwise", "'chat' does not offer /v1/embeddings"),
        ("500 Internal Server Error", "image input is not supported", "'chat' does not offer this: image input is not"),
    ],
)
def test_what_an_engine_does_not_offer_is_the_callers_mistake(
    serve: Serve, engine: ScriptedEngine, status: str, said: str, told: str
) -> None:
    async def refuse(_engine: ScriptedEngine, asked: Asked) -> None:
        await scripts.answer_json(asked, {"error": {"message": said}}, status)

    engine.script = refuse
    served = serve()
    served.routes.serve("chat", engine)
    got = call(served.port, "POST", "/v1/embeddings", {"model": "chat", "input": "x"})
    assert (got.status, got.error["code"], got.error["param"]) == (400, "invalid_request", "model")
    assert told in got.error["message"]
    assert to_sample(served.observer.wait_for(1)[0]) is None, "it breaks no promise"
    assert eventually(lambda: served.gateway.slots.in_flight("chat-0") == 0)


def test_an_event_without_end_is_not_kept_for_ever(
    serve: Serve, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aimgpu.gateway.proxy.MAX_EVENT_BYTES", 100_000)

    async def never_end(engine: ScriptedEngine, asked: Asked) -> None:
        await scripts.begin_stream(asked)
        await scripts.write_chunk(asked, scripts.event("whole"))
        with contextlib.suppress(ConnectionError):
            while True:
                await scripts.write_chunk(asked, b"data: " + b"x" * 10_000)
        engine.saw_leave.set()

    engine.script = never_end
    served = serve()
    served.routes.serve("chat", engine)
    got = chat(served.port, stream=True)
    assert got.body.startswith(scripts.event("whole"))
    assert json.loads(got.body.split(b"data: ")[-1])["error"]["code"] == "engine_disconnected"
    assert engine.saw_leave.wait(60)
    assert eventually(lambda: served.gateway.slots.in_flight("chat-0") == 0)


def test_an_engine_that_is_not_there_is_waited_for_as_long_as_its_caller_waits(serve: Serve) -> None:
    with ScriptedEngine() as gone:
        pass
    served = serve()
    served.routes.serve("chat", gone)
    got = chat(served.port, {"x-aimgpu-deadline-ms": "300"})
    assert (got.status, got.error["code"]) == (504, "deadline_passed")


def test_no_more_requests_at_the_engine_than_slots(serve: Serve, engine: ScriptedEngine) -> None:
    engine.script = scripts.wait_for_release
    served = serve()
    served.routes.serve("chat", engine, slots=2)
    with ThreadPoolExecutor(12) as pool:
        calls = [pool.submit(chat, served.port) for _ in range(12)]
        assert eventually(lambda: served.gateway.slots.queued("chat") == 10)
        engine.released.set()
        assert [call.result().status for call in calls] == [200] * 12
    assert engine.most_active == 2
    assert served.gateway.slots.queued("chat") == 0
    assert eventually(lambda: served.gateway.slots.in_flight("chat-0") == 0)


def test_a_full_queue_says_so(serve: Serve, engine: ScriptedEngine) -> None:
    engine.script = scripts.wait_for_release
    served = serve(settings=GatewaySettings(queue=QueuePolicy(most_queued=dict.fromkeys(Priority, 1))))
    served.routes.serve("chat", engine, slots=1)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(chat, served.port)
        assert eventually(lambda: engine.active == 1)
        second = pool.submit(chat, served.port)
        assert eventually(lambda: served.gateway.slots.queued("chat") == 1)
        got = chat(served.port)
        assert got.status == 429
        assert got.error["type"] == "rate_limit_error"
        assert int(got.headers["retry-after"]) > 0
        engine.released.set()
        assert first.result().status == second.result().status == 200


def test_a_caller_who_leaves_the_queue_is_forgotten(serve: Serve, engine: ScriptedEngine) -> None:
    engine.script = scripts.wait_for_release
    served = serve()
    served.routes.serve("chat", engine, slots=1)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(chat, served.port)
        assert eventually(lambda: engine.active == 1)
        waiting = open_chat(served.port)
        assert eventually(lambda: served.gateway.slots.queued("chat") == 1)
        waiting.close()
        assert eventually(lambda: served.gateway.slots.queued("chat") == 0)
        engine.released.set()
        assert first.result().status == 200
    assert len(engine.asked) == 1


def test_those_who_wait_hear_when_the_model_goes_away(serve: Serve, engine: ScriptedEngine) -> None:
    engine.script = scripts.wait_for_release
    served = serve()
    served.routes.serve("chat", engine, slots=1)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(chat, served.port)
        assert eventually(lambda: engine.active == 1)
        second = pool.submit(chat, served.port)
        assert eventually(lambda: served.gateway.slots.queued("chat") == 1)
        served.routes.put("chat", "failed", reason="the process died")
        assert second.result().status == 503
        engine.released.set()
        assert first.result().status == 200


def test_replicas_share_the_load(serve: Serve, engine: ScriptedEngine) -> None:
    engine.script = scripts.wait_for_release
    with ScriptedEngine(script=scripts.wait_for_release) as other:
        served = serve()
        served.routes.serve("chat", engine, other, slots=3)
        with ThreadPoolExecutor(6) as pool:
            calls = [pool.submit(chat, served.port) for _ in range(6)]
            assert eventually(lambda: engine.active + other.active == 6)
            assert engine.active == other.active == 3
            engine.released.set()
            other.released.set()
            assert all(call.result().status == 200 for call in calls)


def test_a_stale_connection_is_replaced_without_a_word(serve: Serve, engine: ScriptedEngine) -> None:
    """The engine closes a kept connection just as the next request is written: nothing was read, so asking again is safe."""

    async def close_after_answer(this: ScriptedEngine, asked: scripts.Asked) -> None:
        if len(this.asked) == 2:
            asked.writer.transport.abort()
            return
        await scripts.polite(this, asked)

    engine.script = close_after_answer
    served = serve()
    served.routes.serve("chat", engine)
    assert [chat(served.port).status for _ in range(2)] == [200, 200]
    assert len(engine.asked) == 3


def test_a_long_stream_to_a_slow_reader_arrives_whole(serve: Serve, engine: ScriptedEngine) -> None:
    big = scripts.event("x" * 50_000)
    sent_all = threading.Event()

    async def pour(this: ScriptedEngine, asked: scripts.Asked) -> None:
        await scripts.begin_stream(asked)
        for _ in range(1000):
            await scripts.write_chunk(asked, big)
        await scripts.end_stream(asked)
        sent_all.set()

    engine.script = pour
    served = serve()
    served.routes.serve("chat", engine)
    with open_chat(served.port, stream=True) as caller:
        assert eventually(lambda: engine.active == 1)
        assert not sent_all.wait(0.3)  # held back by the reader, not gathered in memory
        received = 0
        while received < 1000 * len(big):
            received += len(caller.recv(1 << 20))
    assert sent_all.wait(30)


def test_no_prompt_is_ever_logged(
    serve: Serve, engine: ScriptedEngine, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    served = serve()
    served.routes.serve("chat", engine)
    with caplog.at_level("DEBUG"):
        for script in (scripts.polite, scripts.die_at_once, scripts.die_mid_json, scripts.talk_garbage, scripts.fail_inside):
            engine.script = script
            chat(served.port)
            chat(served.port, stream=True)
        chat(served.port, model="nope")
        chat(served.port, temperature="a secret prompt")
    written = caplog.text + "".join(capfd.readouterr())
    assert "secret" not in written
    assert all("secret" not in repr(record) for record in served.observer.records)


async def takes_no_more(engine: ScriptedEngine, asked: Asked) -> None:
    await scripts.answer_json(asked, {"error": {"message": "no slot"}}, "503 Service Unavailable")


def test_an_engine_that_takes_no_more_is_told_with_a_time_to_come_back(serve: Serve, engine: ScriptedEngine) -> None:
    engine.script = takes_no_more
    served = serve()
    served.routes.serve("chat", engine)
    got = chat(served.port)
    assert (got.status, got.error["code"]) == (503, "engine_unavailable")
    assert int(got.headers["retry-after"]) > 0


def test_what_an_engine_adds_after_its_answer_reaches_no_caller(serve: Serve, engine: ScriptedEngine) -> None:
    async def answer_twice(this: ScriptedEngine, asked: Asked) -> None:
        chunks = b"%x\r\n%b\r\n" % (len(stream), stream)
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        asked.writer.write(head + chunks + b"0\r\n\r\n" + head + chunks.replace(b"Hello", b"Other") + b"0\r\n\r\n")
        await asked.writer.drain()

    stream = scripts.event("Hello")
    engine.script = answer_twice
    served = serve()
    served.routes.serve("chat", engine)
    for _ in range(3):
        assert chat(served.port, stream=True).body == stream
