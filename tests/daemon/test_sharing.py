"""The loop of `sharing:` beside a gateway and a launch gate that are recorded here."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import pytest

from aimgpu.daemon.sharing import SharingLoop
from aimgpu.domain import Ask, Auto, Deployment, Grant, Instance, InstanceState, Level, Priority, ServiceObjective, Sharing

PROMISE = ServiceObjective(tpot_p95_ms=4.0)


@dataclass
class Pace:
    samples: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    asked: Mapping[str, Priority] = field(default_factory=dict)

    def look(self, now: float) -> None:
        """What it has, it has."""

    def take(self, priorities: Mapping[str, Priority], now: float) -> dict[str, dict[str, list[float]]]:
        self.asked = priorities
        return self.samples


@dataclass
class Gate:
    shares: dict[str, float] = field(default_factory=dict)
    absent: bool = False
    lower_seconds: float | None = None  # device time of the neighbours so far

    def apply(self, instance_id: str, share: float) -> bool:
        if not self.absent:
            self.shares[instance_id] = share
        return not self.absent

    def read_lower(self, instance_id: str) -> float | None:
        return self.lower_seconds


def deployment(name: str, sharing: Sharing, objective: ServiceObjective | None = None) -> Deployment:
    ask = Ask(name=name, want=Auto(), priority=Priority.HIGH)
    return Deployment(name=name, model="m", ask=ask, sharing=sharing, objective=objective)


def instance(name: str) -> Instance:
    return Instance(
        id=f"{name}-0", deployment=name, replica=0, model="m", engine="vllm", launcher="process", state=InstanceState.READY
    )


def world(*wanted: Deployment) -> tuple[SharingLoop, Pace, Gate]:
    pace, gate = Pace(), Gate()
    loop = SharingLoop(
        deployments=lambda: wanted, instances=lambda: [instance(one.name) for one in wanted], pace=pace, steer=gate
    )
    loop.look()
    return loop, pace, gate


def turn(loop: SharingLoop, now: float) -> None:
    loop._exchange(loop.tick(now), now)


def test_each_model_gets_what_it_asked_for() -> None:
    loop, pace, gate = world(
        deployment("strict", Sharing.STRICT, PROMISE),
        deployment("fair", Sharing.FAIR),
        deployment("chat", Sharing.PROMISE, PROMISE),
    )
    pace.samples = {"chat": {"tpot": [0.002]}}
    for tick in range(60):
        turn(loop, tick / 4)
    assert pace.asked == {"chat": Priority.HIGH}
    assert gate.shares == {"fair-0": 1.0, "chat-0": 1.0}  # what is strict needs no word
    report = loop.report()
    assert report["strict"] == {"sharing": "strict", "share": 0.0}
    assert report["chat"]["promise"] == "tpot_p95"
    used = report["chat"]["promise_used"]
    assert isinstance(used, float)
    assert 0.4 < used < 0.6
    assert report["chat"]["cost"] == 0.0
    pace.samples = {"chat": {"tpot": [0.003]}}
    for tick in range(60, 100):
        turn(loop, tick / 4)
    assert loop.report()["chat"]["cost"] == pytest.approx(0.5, rel=0.01)


@pytest.mark.parametrize(("level", "reported"), [(Level.NONE, [False]), (Level.ADVISORY, [False]), (Level.RUNTIME, [])])
def test_where_nothing_can_hold_others_back_no_share_is_reported_as_in_force(level: Level, reported: list[bool]) -> None:
    chat = deployment("chat", Sharing.PROMISE, PROMISE)
    grant = Grant(
        id="grant",
        instance_id="chat-0",
        deployment="chat",
        node="here",
        device_id="gpu",
        partition_id="p",
        memory_bytes=1,
        compute_ppm=None,
        priority=Priority.HIGH,
        level=level,
    )
    copy = replace(instance("chat"), grants=(grant,))
    loop = SharingLoop(deployments=lambda: [chat], instances=lambda: [copy], pace=Pace(), steer=Gate(absent=True))
    loop.look()
    turn(loop, 1.0)
    assert [value for key, value in loop.report()["chat"].items() if key == "gate"] == reported


def test_a_change_of_the_promise_starts_from_strict_again() -> None:
    chat = deployment("chat", Sharing.PROMISE, PROMISE)
    wanted = [chat]
    pace, gate = Pace({"chat": {"tpot": [0.002]}}), Gate()
    loop = SharingLoop(deployments=lambda: wanted, instances=lambda: [instance("chat")], pace=pace, steer=gate)
    loop.look()
    for tick in range(60):
        turn(loop, tick / 4)
    wanted[:] = [replace(chat, objective=ServiceObjective(tpot_p95_ms=1.0))]
    loop.look()
    turn(loop, 100.0)
    assert gate.shares["chat-0"] == 0.0
    wanted[:] = [replace(chat, sharing=Sharing.STRICT)]
    loop.look()
    turn(loop, 101.0)
    assert gate.shares["chat-0"] == 0.0
    assert loop.report()["chat"] == {"sharing": "strict", "share": 0.0}


def test_what_neighbours_use_while_a_model_works_is_measured_and_nothing_else() -> None:
    loop, pace, gate = world(deployment("chat", Sharing.PROMISE, PROMISE), deployment("fair", Sharing.FAIR))
    gate.lower_seconds = 100.0
    pace.samples = {"chat": {"tpot": [0.0034]}}  # a promise that leaves little: the gate stays between shut and open
    for tick in range(80):
        turn(loop, tick / 4)
        gate.lower_seconds += 0.05  # a fifth of the time
    report = loop.report()["chat"]
    assert report["yielded"] == pytest.approx(0.2)
    assert report["yielded_seconds"] == pytest.approx(0.2 * report["watched_seconds"])  # type: ignore[operator]
    pace.samples = {"chat": {"tpot": []}}  # it is idle, and they use all of the GPU
    for tick in range(80, 120):
        turn(loop, tick / 4)
        gate.lower_seconds += 0.25
    assert loop.report()["chat"] == report
    gate.lower_seconds = None  # none is left
    pace.samples = {"chat": {"tpot": [0.0034]}}
    turn(loop, 30.0)
    assert loop.report()["chat"]["yielded_seconds"] == report["yielded_seconds"]
    assert "yielded" not in loop.report()["fair"]


def test_an_open_gate_measures_nothing_so_nothing_is_reported() -> None:
    loop, pace, gate = world(deployment("chat", Sharing.PROMISE, PROMISE))
    pace.samples = {"chat": {"tpot": [0.0001]}}
    gate.lower_seconds = 0.0
    for tick in range(200):
        turn(loop, tick / 4)
        if gate.shares.get("chat-0") == 1.0:
            break
    open_since = loop.report()["chat"]["yielded_seconds"]
    for tick in range(200, 220):
        gate.lower_seconds += 0.1
        turn(loop, tick / 4)
    assert gate.shares["chat-0"] == 1.0
    assert loop.report()["chat"]["yielded_seconds"] == open_since


def test_where_there_is_no_gate_it_is_tried_again() -> None:
    """An instance may be ready before its region is, and a region may be made again."""
    loop, _, gate = world(deployment("fair", Sharing.FAIR))
    gate.absent = True
    turn(loop, 0.0)
    gate.absent = False
    turn(loop, 0.25)
    assert gate.shares == {"fair-0": 1.0}


def test_a_model_is_steered_while_the_gate_can_keep_its_promises() -> None:
    """Only then may other means of keeping them rest."""
    loop, pace, gate = world(deployment("chat", Sharing.PROMISE, PROMISE), deployment("strict", Sharing.STRICT, PROMISE))
    gate.absent = True
    pace.samples = {"chat": {"tpot": [0.002]}}
    turn(loop, 0.0)
    assert not loop.arbiter.steers("chat"), "there is no gate"
    gate.absent = False
    turn(loop, 0.25)
    assert loop.arbiter.steers("chat")
    assert not loop.arbiter.steers("strict")
    pace.samples = {"chat": {"tpot": [0.02]}}
    for tick in range(2, 30):
        turn(loop, tick / 4)
    assert gate.shares["chat-0"] == 0
    assert not loop.arbiter.steers("chat"), "the gate is shut, and the promise breaks all the same"
    pace.samples = {"chat": {"tpot": [0.002]}}
    for tick in range(30, 60):
        turn(loop, tick / 4)
    assert loop.arbiter.steers("chat")
