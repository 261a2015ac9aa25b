"""Who is worth keeping: what the gateway saw of each model, as the choice of whom to unload reads it."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.control.world import Machine, boot, deployment

from aimgpu.control.controller import Controller
from aimgpu.control.events import ignore
from aimgpu.control.sleep.eviction_policy import Resident, eviction_cost
from aimgpu.daemon.activator import Activator
from aimgpu.domain import Priority, ServiceObjective
from aimgpu.gateway.records import RequestRecord


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[Controller]:
    controller = boot(Machine(root=tmp_path))
    yield controller
    controller.close()


def answered(model: str, first_byte_seconds: float) -> RequestRecord:
    return RequestRecord(
        model=model,
        instance_id="i",
        caller="c",
        priority=Priority.MEDIUM,
        status=200,
        code=None,
        streamed=True,
        queued_seconds=0.0,
        first_byte_seconds=first_byte_seconds,
        seconds=first_byte_seconds + 1.0,
        output_tokens=10,
    )


def read(residence: Activator) -> dict[str, Resident]:
    return {resident.name: resident for resident in residence.residents()}


def test_a_model_that_breaks_its_promise_is_dearer_to_unload(controller: Controller) -> None:
    promised = ServiceObjective(ttft_p95_ms=500)
    items = [replace(deployment(name, 10, keep_seconds=60), objective=promised) for name in ("late", "quick")]
    controller.apply([*items, deployment("free", 10, keep_seconds=60)])
    clock = Clock()
    residence = Activator(controller, lambda _: False, ignore, clock)
    residence.residents()
    for _ in range(40):
        for name, seconds in (("late", 2.0), ("quick", 0.1), ("free", 2.0)):
            residence.finished(answered(name, seconds))
        clock.now += 1.0
    found = read(residence)
    assert {name: resident.at_risk for name, resident in found.items()} == {"late": True, "quick": False, "free": False}
    late, quick = (replace(found[name], wake_seconds=1.0) for name in ("late", "quick"))  # whatever was measured here
    assert eviction_cost(late) > eviction_cost(quick)
    residence.close()


def test_a_wake_is_expected_to_take_what_it_took_less_what_has_passed(controller: Controller) -> None:
    controller.apply([deployment("chat", 10, keep_seconds=60, engine="sleeper")])
    residence = Activator(controller, lambda _: True, ignore)
    controller.sleep("chat")
    first = residence.wake("chat")
    assert first is not None
    assert first.expected_seconds is None, "it was never seen waking"
    residence.close()
    controller.sleep("chat")
    again = Activator(controller, lambda _: True, ignore)
    second = again.wake("chat")
    assert second is not None
    assert second.expected_seconds is not None, "the books remember how long it took"
    again.close()
    assert again.wake("chat") is None, "nobody is woken by one that is ending"
