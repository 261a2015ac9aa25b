"""Promises and pressure: one model is kept by the gate or by holding low work back, never by both."""

from aimgpu.domain import Ask, Auto, Deployment, Priority, ServiceObjective, Sharing
from aimgpu.qos.slo.arbiter import Arbiter, Burn

PROMISE = ServiceObjective(tpot_p95_ms=10)
FAST, SLOW = {"tpot": [0.002]}, {"tpot": [0.02]}


def model(name: str, sharing: Sharing = Sharing.PROMISE) -> Deployment:
    ask = Ask(name=name, want=Auto(), priority=Priority.HIGH)
    return Deployment(name=name, model="m", ask=ask, sharing=sharing, objective=PROMISE)


def burn(name: str, rate: float, *devices: str) -> Burn:
    return Burn(model=name, rate=rate, devices=frozenset(devices))


def test_the_worst_burn_of_a_gpu_decides_and_others_are_left_alone() -> None:
    arbiter = Arbiter()
    changed = arbiter.press([burn("calm", 0.1, "gpu0", "gpu1"), burn("burning", 3.0, "gpu0")])
    assert {device: pressure.low_share for device, pressure in changed.items()} == {"gpu0": 0.5}
    assert "burning" in (changed["gpu0"].reason or "")
    assert arbiter.pressure == changed


def test_pressure_is_given_back_when_it_is_calm_also_where_the_model_is_gone() -> None:
    arbiter = Arbiter()
    arbiter.press([burn("burning", 3.0, "gpu0")])
    shares = []
    while arbiter.pressure:
        shares += [pressure.low_share for pressure in arbiter.press([]).values()]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert arbiter.press([]) == {}


def test_a_model_that_the_gate_keeps_presses_on_nobody_until_the_gate_is_not_enough() -> None:
    arbiter, chat = Arbiter(), model("chat")
    arbiter.follow({"chat": chat}, {"chat": FAST})
    assert not arbiter.steers("chat"), "no share was written at a gate"
    arbiter.note_gated(["chat"])
    assert arbiter.steers("chat")
    assert arbiter.press([burn("chat", 3.0, "gpu0")]) == {}
    for _ in range(40):
        arbiter.follow({"chat": chat}, {"chat": SLOW})
    assert arbiter.share(chat) == 0
    assert not arbiter.steers("chat")
    assert list(arbiter.press([burn("chat", 3.0, "gpu0")])) == ["gpu0"]


def test_shares_by_what_is_asked_for() -> None:
    arbiter = Arbiter()
    arbiter.follow({"chat": model("chat")}, {"chat": FAST})
    assert arbiter.share(model("fair", Sharing.FAIR)) == 1
    assert arbiter.share(model("strict", Sharing.STRICT)) == 0
    assert arbiter.share(model("chat")) == (promise.share if (promise := arbiter.promise_of("chat")) else None)
    arbiter.follow({}, {})
    assert arbiter.promise_of("chat") is None
