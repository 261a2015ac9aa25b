"""Promises by percentile, by class and of a rate, kept and broken over real sockets."""

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.gateway import scripted_engine as scripts
from tests.gateway.calling import chat, eventually
from tests.gateway.conftest import Served
from tests.gateway.scripted_engine import ScriptedEngine
from tests.gateway.test_cli import announce, run

from aimgpu.domain import Priority, ServiceObjective
from aimgpu.gateway.slots import looser_promises, promised_seconds

Serve = Callable[..., Served]
LOW, HIGH = {"x-aimgpu-priority": "low"}, {"x-aimgpu-priority": "high"}


def promised(served: Served, priority: Priority, deadline: float | None = None) -> float | None:
    model = served.routes.find("chat")
    assert model is not None
    return promised_seconds(model, priority, deadline)


def test_a_high_request_is_promised_the_tightest_that_its_class_was(serve: Serve, engine: ScriptedEngine) -> None:
    served = serve()
    served.routes.serve("chat", engine, objective=ServiceObjective(ttft_p50_ms=200, ttft_p99_ms=2000))
    assert promised(served, Priority.HIGH) == 0.2
    assert promised(served, Priority.HIGH, deadline=0.1) == 0.1
    assert promised(served, Priority.LOW) is None
    own = ServiceObjective(ttft_p95_ms=200, high=ServiceObjective(ttft_p99_ms=1000))
    served.routes.serve("chat", engine, objective=own)
    assert promised(served, Priority.HIGH) == 1.0
    served.routes.serve("chat", engine, objective=ServiceObjective(ttft_p95_ms=200, high=ServiceObjective(tpot_p95_ms=50)))
    assert promised(served, Priority.HIGH) is None
    assert promised(served, Priority.HIGH, deadline=3.0) == 3.0


def test_what_else_it_was_promised_is_worth_keeping_when_the_tightest_is_lost(serve: Serve, engine: ScriptedEngine) -> None:
    served = serve()
    several = ServiceObjective(ttft_p50_ms=200, ttft_p95_ms=1000, ttft_p99_ms=2000)
    served.routes.serve("chat", engine, objective=several)
    model = served.routes.find("chat")
    assert model is not None
    assert looser_promises(model, None) == (1.0, 2.0)
    assert looser_promises(model, 1.5) == (1.0, 1.5)


def test_each_class_is_judged_by_its_own_promise(serve: Serve, engine: ScriptedEngine, tmp_path: Path) -> None:
    served = serve()
    objective = ServiceObjective(ttft_p50_ms=60_000, ttft_p99_ms=90_000, low=ServiceObjective(latency_p99_ms=60_000))
    served.routes.serve("chat", engine, objective=objective, device="gpu0")
    for _ in range(12):
        assert chat(served.port, HIGH, stream=True).status == 200
    engine.script = scripts.fail_inside
    for _ in range(12):
        assert chat(served.port, LOW, stream=True).status >= 500
    served.observer.wait_for(24)
    announce(tmp_path, served)
    shown = run(tmp_path, "slo").stdout.splitlines()
    assert [line.split()[:6] for line in shown[1:4]] == [
        ["chat", "others", "50%", "ttft", "<=", "60s"],
        ["others", "99%", "ttft", "<=", "90s", "100.00%"],
        ["low", "99%", "latency", "<=", "60s", "0.00%"],
    ]
    assert shown[-1].startswith("Waits at most: high 30s, medium 1m, low 2m; waiting at most, for each model: high 2048")
    found = json.loads(run(tmp_path, "slo", "--json").stdout)["models"]["chat"]
    assert [(target["name"], target["attainment"]) for target in found["targets"]] == [("ttft_p50", 1.0), ("ttft_p99", 1.0)]
    assert [(target["name"], target["attainment"]) for target in found["classes"]["low"]["targets"]] == [("latency_p99", 0.0)]
    assert (found["classes"]["low"]["own"], found["classes"]["high"]["own"]) == (True, False)
    assert {"p50_seconds", "p90_seconds", "p95_seconds", "p99_seconds"} == set(found["windows"][0]["percentiles"]["ttft"])
    assert served.pressures == []  # low work that is late presses on nobody


def test_a_promised_rate_is_judged_while_somebody_asks(serve: Serve, engine: ScriptedEngine) -> None:
    engine.script = scripts.wait_for_release
    served = serve()
    served.routes.serve("chat", engine, objective=ServiceObjective(tokens_per_second=1_000_000))
    meter = served.in_loop(lambda: served.gateway.slo_monitor._find("chat").meter(Priority.MEDIUM))
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(chat, served.port), pool.submit(chat, served.port, stream=True)]
        assert eventually(lambda: engine.active == 2)
        assert len(meter._open) == 2
        engine.released.set()
        assert [call.result().status for call in calls] == [200, 200]
    served.observer.wait_for(2)
    assert eventually(lambda: not meter._open and not served.gateway.slo_monitor._flows)
    counted = served.in_loop(lambda: sum(piece.tokens for piece in meter._pieces.values()))
    assert counted > 0


def test_what_fails_counts_against_a_promised_rate(serve: Serve, engine: ScriptedEngine) -> None:
    engine.script = scripts.die_mid_event
    served = serve()
    served.routes.serve("chat", engine, objective=ServiceObjective(tokens_per_second=1))
    chat(served.port)
    served.observer.wait_for(1)
    meter = served.in_loop(lambda: served.gateway.slo_monitor._find("chat").meter(Priority.MEDIUM))
    assert eventually(lambda: not meter._open)
    later = served.in_loop(lambda: asyncio.get_running_loop().time()) + 10
    served.in_loop(lambda: meter.settle(later))
    assert meter.tracker.total(0, later).judged == {"throughput": 1}
    assert meter.tracker.total(0, later).met == {}
