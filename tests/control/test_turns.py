"""Engines that measure free memory while they start take turns on a Device."""

from pathlib import Path

from tests.control.world import FakeEngine, Machine, boot, deployment

from aimgpu.control.dependencies import Timing
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
