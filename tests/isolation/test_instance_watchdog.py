"""The daemon's watchdog against the books: real processes, a real region and ledger, a controller that only keeps notes."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from aimgpu import procfs
from aimgpu.daemon.watchdog import InstanceWatchdog, WatchSources
from aimgpu.domain import (
    Ask,
    Auto,
    Deployment,
    Device,
    DeviceUsage,
    ForeignProcess,
    Grant,
    Instance,
    InstanceState,
    IsolationRequirement,
    Level,
    ProcessIdentity,
    WatchdogPolicy,
)
from aimgpu.hardware.protocols import NoHelperProcesses
from aimgpu.isolation import layout, processes
from aimgpu.isolation.contexts import charge_contexts, read_counted
from aimgpu.isolation.interposer import Interposer
from aimgpu.isolation.watchdog import Violation
from aimgpu.ledger import Ledger
from aimgpu.units import GIB, MIB


class NotingController:
    """As much of a controller as the watchdog talks to."""

    def __init__(self, ledger: Ledger, deployment: Deployment, usage: list[DeviceUsage]) -> None:
        hardware = SimpleNamespace(read_usage=lambda: tuple(usage))
        self.sources = {"ledger": ledger, "hardware": hardware, "helpers": NoHelperProcesses()}
        self._ledger = ledger
        self._deployment = deployment
        self.done: list[tuple[str, str]] = []

    def deployments(self) -> tuple[Deployment, ...]:
        return (self._deployment,)

    def instances(self) -> tuple[Instance, ...]:
        return self._ledger.instances()

    def stop_instance(self, instance_id: str, *, restart: bool, **_: Any) -> None:
        self.done.append(("restart" if restart else "stop", instance_id))


class Scene:
    def __init__(self, folder: Path, device: Device, grant: Grant) -> None:
        self.child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        self.interposer = Interposer(folder, find_library=lambda: Path("/lib.so"), why_not=lambda: None)
        self.grant = replace(grant, level=Level.RUNTIME)
        self.interposer.enforce(self.grant, device, device.layout.partitions[0])
        self.ledger = Ledger.open(folder / "ledger.sqlite3")
        identity = ProcessIdentity(pid=self.child.pid, start_ticks=1, boot_id="boot")
        instance = Instance(
            id="chat-0",
            deployment="chat",
            replica=0,
            model="m",
            engine="e",
            launcher="process",
            state=InstanceState.READY,
            process=identity,
            grants=(self.grant,),
        )
        self.ledger.charge(instance, capacity={grant.partition_id: 80 * GIB})
        self.usage: list[DeviceUsage] = []

    def measure(self, memory_bytes: int, *foreign: int) -> None:
        pids = [(self.child.pid, memory_bytes), *((pid, GIB) for pid in foreign)]
        listed = tuple(ForeignProcess(pid=pid, name=None, memory_bytes=size) for pid, size in pids)
        self.usage[:] = [
            DeviceUsage(
                device_id="gpu0", used_bytes=None, used_bytes_by_partition={}, utilization_percent=None, processes=listed
            )
        ]

    def attach(self) -> None:
        slot = self.interposer.regions()[0]._layout.tenants[0].processes[0]
        slot.pid, slot.start_ticks = self.child.pid, procfs.read_start_ticks(self.child.pid)
        slot.pid_namespace, slot.state = processes.own_pid_namespace(), layout.ACTIVE

    def keeper(self, demand: IsolationRequirement, policy: WatchdogPolicy) -> tuple[InstanceWatchdog, NotingController]:
        deployment = Deployment(name="chat", model="m", ask=Ask(name="chat", want=Auto(), isolation=demand), watchdog=policy)
        controller = NotingController(self.ledger, deployment, self.usage)
        sources = WatchSources(interposer=self.interposer, **cast("Any", controller.sources))
        return InstanceWatchdog(cast("Any", controller), sources), controller


@pytest.fixture
def scene(tmp_path: Path, make_device: Callable[..., Device], make_grant: Callable[..., Grant]) -> Iterator[Scene]:
    device = make_device()
    made = Scene(tmp_path, device, make_grant(device))
    yield made
    made.child.communicate(b"\n")
    made.ledger.close()


def test_a_tenant_that_is_held_and_within_its_grant_is_left_alone(scene: Scene) -> None:
    scene.attach()
    scene.measure(9 * GIB)
    keeper, controller = scene.keeper(IsolationRequirement.ENFORCED, WatchdogPolicy.STOP)
    assert keeper.look() == ()
    assert controller.done == []


def test_one_that_demanded_enforcement_and_has_none_is_stopped(scene: Scene) -> None:
    scene.measure(GIB)
    keeper, controller = scene.keeper(IsolationRequirement.ENFORCED, WatchdogPolicy.WARN)
    (verdict,) = keeper.look()
    assert verdict.finding is Violation.UNHELD
    assert controller.done == [("stop", "chat-0")]


def test_for_others_the_level_falls_to_what_is_true(scene: Scene) -> None:
    scene.measure(GIB)
    keeper, controller = scene.keeper(IsolationRequirement.NONE, WatchdogPolicy.WARN)
    keeper.look()
    assert controller.done == []
    assert [grant.level for grant in scene.ledger.grants()] == [Level.ADVISORY]


def test_a_tenant_whose_region_is_gone_is_not_held(scene: Scene, tmp_path: Path) -> None:
    """The daemon was restarted, and somebody had cleaned up /dev/shm: nothing says that its limits hold."""
    scene.ledger.note_enforcement(replace(scene.grant, mechanisms=("interposer",)))
    (region,) = scene.interposer.regions()
    region.path.unlink()
    scene.interposer = Interposer(tmp_path, find_library=lambda: Path("/lib.so"), why_not=lambda: None)
    scene.measure(GIB)
    keeper, controller = scene.keeper(IsolationRequirement.NONE, WatchdogPolicy.WARN)
    (verdict,) = keeper.look()
    assert verdict.finding is Violation.UNHELD
    assert [grant.level for grant in scene.ledger.grants()] == [Level.ADVISORY]
    assert controller.done == []


def test_the_deployments_policy_decides_what_happens_to_excess(scene: Scene) -> None:
    scene.attach()
    scene.measure(20 * GIB, os.getpid())
    keeper, controller = scene.keeper(IsolationRequirement.NONE, WatchdogPolicy.RESTART)
    found = {verdict.finding for verdict in keeper.look()}
    assert found == {Violation.OVER, Violation.FOREIGN}
    assert controller.done == [("restart", "chat-0")]


def test_a_context_that_costs_more_than_was_thought_is_charged_as_measured(scene: Scene) -> None:
    """The driver says 3 GiB, the library counted 2: the rest is its context, and less is left to allocate."""
    scene.attach()
    slot = scene.interposer.regions()[0]._layout.tenants[0].processes[0]
    slot.used_bytes, slot.context_bytes = 2 * GIB, 620 * MIB
    keeper, _ = scene.keeper(IsolationRequirement.ENFORCED, WatchdogPolicy.STOP)
    scene.measure(3 * GIB)
    assert keeper.look() == ()
    assert (slot.used_bytes, slot.context_bytes) == (2 * GIB, 1 * GIB)
    assert scene.interposer.regions()[0].read_use()[0].used_bytes == 3 * GIB
    scene.measure(2 * GIB + MIB)  # less than a context is thought to cost at least
    keeper.look()
    assert slot.context_bytes == 620 * MIB


def test_what_moved_while_the_driver_was_asked_is_not_taken_for_a_context(scene: Scene) -> None:
    scene.attach()
    region = scene.interposer.regions()[0]
    slot = region._layout.tenants[0].processes[0]
    slot.used_bytes, slot.context_bytes = 2 * GIB, 620 * MIB
    scene.measure(4 * GIB)
    before = read_counted(region)
    slot.used_bytes = 1 * GIB  # freed since
    charge_contexts(region, before, scene.usage)
    assert slot.context_bytes == 620 * MIB
