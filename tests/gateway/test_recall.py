"""Low work makes way for a high request that would be late, over real sockets."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from tests.gateway import scripted_engine as scripts
from tests.gateway.calling import chat, eventually, open_chat
from tests.gateway.conftest import Served
from tests.gateway.scripted_engine import Asked, ScriptedEngine

from aimgpu.domain import Priority, ServiceObjective
from aimgpu.gateway.application import GatewaySettings
from aimgpu.qos.queueing.policy import QueuePolicy

Serve = Callable[..., Served]
PROMISE = ServiceObjective(ttft_p95_ms=400)
LOW, HIGH = {"x-aimgpu-priority": "low"}, {"x-aimgpu-priority": "high"}


async def first_hangs(engine: ScriptedEngine, asked: Asked) -> None:
    """The first request is worked on until its caller leaves; the others are answered."""
    await (scripts.silent_until_gone if len(engine.asked) == 1 else scripts.polite)(engine, asked)


async def first_streams(engine: ScriptedEngine, asked: Asked) -> None:
    await (scripts.stream_until_gone if len(engine.asked) == 1 else scripts.polite)(engine, asked)


def test_low_work_nobody_has_seen_of_is_stopped_and_done_again(serve: Serve, engine: ScriptedEngine) -> None:
    engine.script = first_hangs
    served = serve()
    served.routes.serve("chat", engine, slots=1, device="gpu0", objective=PROMISE)
    with ThreadPoolExecutor(1) as pool:
        batch = pool.submit(chat, served.port, LOW, user="batch")
        assert engine.streaming.wait(30)
        assert chat(served.port, HIGH, user="urgent").status == 200
        assert engine.saw_leave.wait(30)  # the engine was told at once
        got = batch.result()
    assert got.status == 200
    assert got.headers["x-aimgpu-recalls"] == "1"
    assert [asked.fields["user"] for asked in engine.asked] == ["batch", "urgent", "batch"]
    records = {record.priority.value: record for record in served.observer.wait_for(2)}
    assert (records["low"].recalls, records["low"].status, records["high"].recalls) == (1, 200, 0)
    assert eventually(lambda: served.gateway.slots.in_flight("chat-0") == 0)
    report = served.in_loop(served.gateway.slo_monitor.report)
    assert report["models"]["chat"]["recalls"] == 1


def test_a_stream_that_has_begun_is_left_alone(serve: Serve, engine: ScriptedEngine) -> None:
    engine.script = first_streams
    served = serve()
    served.routes.serve("chat", engine, slots=1, device="gpu0", objective=PROMISE, priority=Priority.LOW)
    with open_chat(served.port, stream=True) as batch, ThreadPoolExecutor(1) as pool:
        assert b"first" in _read_until(batch.recv, b"first")
        urgent = pool.submit(chat, served.port, HIGH | {"x-aimgpu-deadline-ms": "1000"})
        assert urgent.result().status == 504
        assert not engine.saw_leave.is_set()


def test_a_caller_who_leaves_while_its_work_is_recalled_leaves_nothing_behind(serve: Serve, engine: ScriptedEngine) -> None:
    engine.script = first_hangs
    served = serve()
    served.routes.serve("chat", engine, slots=1, device="gpu0", objective=PROMISE, priority=Priority.LOW)
    batch = open_chat(served.port)
    assert engine.streaming.wait(30)
    engine.script = scripts.wait_for_release
    with ThreadPoolExecutor(1) as pool:
        urgent = pool.submit(chat, served.port, HIGH)
        assert engine.saw_leave.wait(30)
        assert eventually(lambda: served.gateway.slots.queued("chat") == 1)  # the batch work, back in its line
        batch.close()
        assert eventually(lambda: served.gateway.slots.queued("chat") == 0)
        engine.released.set()
        assert urgent.result().status == 200
    assert [record.status for record in served.observer.wait_for(2)] == [499, 200]
    assert eventually(lambda: served.gateway.slots.in_flight("chat-0") == 0)


def test_low_work_of_another_model_makes_way_where_the_gpu_takes_no_more(serve: Serve, engine: ScriptedEngine) -> None:
    engine.script = first_hangs
    served = serve(settings=GatewaySettings(queue=QueuePolicy(every_device_limit=1)))
    served.routes.serve("chat", engine, slots=4, device="gpu0", objective=PROMISE)
    served.routes.serve("batch", engine, slots=4, device="gpu0")
    served.routes.serve("far", engine, slots=4, device="gpu1")
    with ThreadPoolExecutor(1) as pool:
        batch = pool.submit(chat, served.port, LOW, model="batch", user="batch")
        assert engine.streaming.wait(30)
        assert chat(served.port, LOW, model="far", user="far").status == 200  # its GPU is free
        assert chat(served.port, HIGH, user="urgent").status == 200
        assert engine.saw_leave.wait(30)
        got = batch.result()
    assert (got.status, got.headers["x-aimgpu-recalls"]) == (200, "1")
    assert [asked.fields["user"] for asked in engine.asked] == ["batch", "far", "urgent", "batch"]
    served.observer.wait_for(3)
    assert eventually(lambda: served.in_loop(lambda: served.gateway.slots.dispatcher.on_device("gpu0")) == 0)


def _read_until(receive: Callable[[int], bytes], mark: bytes) -> bytes:
    found = b""
    while mark not in found and (part := receive(65536)):
        found += part
    return found
