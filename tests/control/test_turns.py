"""Engines that measure free memory while they start take turns on a Device."""

from pathlib import Path
from typing import Any

import pytest
from tests.control.side_threads import in_thread, wait_for
from tests.control.world import FakeEngine, Machine, boot, deployment

from aimgpu.control.dependencies import Timing
from aimgpu.control.placing import PlaceRequest
from aimgpu.control.plan.preparation import prepare
from aimgpu.control.reservations import DeploymentClaim
from aimgpu.engines.protocols import Health, HealthState
from aimgpu.hardware.visible_devices import join_environment


class MeasuringEngine(FakeEngine):
    """Ready at its fifth look; remembers how many were starting at each."""

    starts_alone = True

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine)
        self.looks: dict[str, int] = {}
        self.together: set[int] = set()

    def check_health(self, run_directory: Path, api_key: str) -> Health:
        name = run_directory.name
        self.looks[name] = self.looks.get(name, 0) + 1
        self.together.add(sum(1 for count in self.looks.values() if count < 5))
        if self.looks[name] < 5:
            return Health(state=HealthState.LOADING)
        return Health(state=HealthState.READY, endpoint="http://127.0.0.1:1")


def test_an_instance_on_several_devices_sees_all_of_them() -> None:
    """The interposer itself names all regions that the instance has by then."""
    environment = {"ROCR_VISIBLE_DEVICES": "0", "AIMGPU_REGION": "/r/0", "LD_PRELOAD": "/l.so"}
    join_environment(environment, {"ROCR_VISIBLE_DEVICES": "1", "AIMGPU_REGION": "/r/0:/r/1", "LD_PRELOAD": "/l.so"})
    assert environment == {"ROCR_VISIBLE_DEVICES": "0,1", "AIMGPU_REGION": "/r/0:/r/1", "LD_PRELOAD": "/l.so"}


def test_they_start_one_after_the_other(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    controller = boot(machine, timing=Timing(load_timeout_seconds=60, poll_seconds=0.01))
    engine = MeasuringEngine(machine)
    controller._dependencies.engines["llamacpp"] = engine  # type: ignore[index]
    outcome = controller.apply([deployment(name) for name in ("a", "b", "c")])
    assert [instance.state.value for instance in outcome.instances] == ["ready"] * 3
    assert len({grant.device_id for instance in outcome.instances for grant in instance.grants}) == 1
    assert max(engine.together) == 1
    controller.close()


@pytest.mark.parametrize("what", ["wake", "apply"])
def test_what_another_operation_holds_is_waited_for_and_not_asked_for_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    controller = boot(Machine(tmp_path))
    placer, loop, wish = controller._placer, controller._loop, deployment("chat")
    if what == "wake":
        controller.apply([wish])
    item = prepare(controller._dependencies, wish, lambda _: None, may_fetch=False)
    reservations = placer._reservations
    claim = loop.decide(lambda: reservations.claim("chat", "r", 1))
    looks = 0
    find = reservations.claims_on

    def count(names: Any) -> list[DeploymentClaim]:
        nonlocal looks
        looks += 1
        return find(names)

    monkeypatch.setattr(reservations, "claims_on", count)
    request = PlaceRequest(deployments=[wish])
    place = (lambda: placer.place_waking(item, ())) if what == "wake" else (lambda: placer.place(request, lambda _: None))
    placing = in_thread(place)
    wait_for(lambda: looks > 0)
    for _ in range(20):
        loop.decide(lambda: None)  # it looks whether the wait is over, and does not plan again
    assert looks == 1
    assert placing.is_alive()
    loop.decide(lambda: reservations.end_claim(claim))
    placing.join(300)
    assert not placing.is_alive()
    assert looks <= 3
    controller.close()
