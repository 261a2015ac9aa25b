"""Our own MPS server holds the device and is no stranger: it goes before the layout changes and comes back with the tenants."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.control.world import FakeLauncher, Machine, boot, deployment, memory
from tests.hardware_nvidia.fake_nvml import FakeLibrary, nvml_over
from tests.hardware_nvidia.gpus import MIB, FakeGpu, FakeProcess, h200
from tests.hardware_nvidia.test_mps import TENANT, daemon_pid, daemons, pipe_of, root

from aimgpu import wiring
from aimgpu.cli import machine_view
from aimgpu.cli.main import cli
from aimgpu.control.controller import Controller
from aimgpu.domain import InstanceState, ProcessIdentity
from aimgpu.engines.protocols import Command
from aimgpu.errors import PartitionBusy
from aimgpu.hardware.nvidia.hardware import NvidiaHardware
from aimgpu.hardware.nvidia.mps import MpsDaemons
from aimgpu.hardware.nvidia.mps_processes import find_mps_processes, identify
from aimgpu.isolation.boundaries import EngineFlags, HardwareBoundary
from aimgpu.isolation.chooser import MechanismChooser
from aimgpu.isolation.mps_limits import MpsMechanism
from aimgpu.isolation.watchdog import Violation, Watchdog

__all__ = ["daemons", "root"]
HALVES = "3g.71gb@0+3g.71gb@4"


class TenantLauncher(FakeLauncher):
    """Starts real processes that connect to the MPS daemon of their environment, as libcuda would."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine)
        self.started: dict[int, subprocess.Popen[str]] = {}

    def start(self, instance_id: str, command: Command, run_directory: Path) -> ProcessIdentity:
        super().start(instance_id, command, run_directory)
        tenant = subprocess.Popen(
            [sys.executable, "-c", TENANT],
            env={**os.environ, **command.environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert tenant.stdout is not None
        assert tenant.stdout.readline() == "connected\n"
        self.started[tenant.pid] = tenant
        identity = identify(tenant.pid)
        assert identity is not None
        self._machine.live()[instance_id].identity = identity
        return identity

    def stop(self, process: ProcessIdentity, *, grace_seconds: float) -> None:
        self.started[process.pid].kill()
        self.started[process.pid].communicate()
        super().stop(process, grace_seconds=grace_seconds)


@dataclass
class Shown:
    """What NVML shows: the MPS servers of a GPU that are there, and what a test adds."""

    gpu: FakeGpu
    root: Path
    others: list[FakeProcess] = field(default_factory=list)

    def refresh(self, function: str) -> None:
        if "Processes" not in function and "SetMigMode" not in function:
            return
        controls = {int(path.read_text()) for path in self.root.glob("run/*/pipe/nvidia-cuda-mps-control.pid")}
        servers = {one.pid for pipe in self.root.glob("run/*/pipe") for one in find_mps_processes(pipe)} - controls
        self.gpu.processes[:] = [*(FakeProcess(pid, 30 * MIB) for pid in sorted(servers)), *self.others]


@pytest.fixture
def shown(root: Path) -> Shown:
    return Shown(h200(tells_placements_when_off=True), root)


@pytest.fixture
def hardware(shown: Shown, tmp_path: Path) -> NvidiaHardware:
    return NvidiaHardware(nvml_over(FakeLibrary([shown.gpu], on_call=shown.refresh)), pci=tmp_path)


@pytest.fixture
def controller(tmp_path: Path, hardware: NvidiaHardware, daemons: MpsDaemons) -> Iterator[Controller]:
    machine = Machine(root=tmp_path)
    machine.hardware = hardware  # type: ignore[assignment]
    launcher = TenantLauncher(machine)
    parts = replace(
        boot(machine)._dependencies,
        isolator=MechanismChooser([HardwareBoundary(), MpsMechanism(daemons), EngineFlags()]),
        launchers={"process": launcher},
        helpers=daemons,
    )
    found = Controller(parts)
    yield found
    found.close()
    for tenant in launcher.started.values():
        tenant.kill()
        tenant.communicate()


def test_a_change_of_layout_stops_mps_and_brings_it_back_with_the_tenants(
    controller: Controller, daemons: MpsDaemons, shown: Shown, root: Path
) -> None:
    controller.apply([deployment("chat", want=memory(10))])
    (chat,) = controller.instances()
    assert chat.grants[0].mechanism == "mps"
    (usage,) = controller._dependencies.hardware.read_usage()
    assert len(usage.processes) == 1, "the server holds the device"
    before = daemon_pid(root)

    controller.change_layout(shown.gpu.uuid, HALVES)
    (device,) = controller.devices()

    assert device.layout.name == HALVES
    assert identify(before) is None
    (chat,) = controller.instances()
    assert chat.state is InstanceState.READY
    uuids = {part.id: part.uuid for part in device.layout.partitions}
    assert daemons.running() == (uuids[chat.grants[0].partition_id],)


def test_after_a_change_that_fails_mps_serves_the_tenants_again(
    controller: Controller, daemons: MpsDaemons, shown: Shown
) -> None:
    controller.apply([deployment("chat", want=memory(10))])
    shown.gpu.mode_needs_reset = True
    with pytest.raises(Exception, match="reset"):
        controller.change_layout(shown.gpu.uuid, HALVES)
    (chat,) = controller.instances()
    assert (chat.state, chat.grants[0].mechanism) == (InstanceState.READY, "mps")
    assert daemons.running() == (shown.gpu.uuid,)


def test_a_process_that_is_not_ours_is_still_in_the_way_and_nothing_is_stopped_for_it(
    controller: Controller, shown: Shown, root: Path
) -> None:
    controller.apply([deployment("chat", want=memory(10))])
    before = daemon_pid(root)
    shown.others.append(FakeProcess(os.getpid(), 100 * MIB))
    with pytest.raises(PartitionBusy, match=f"pid {os.getpid()} ") as busy:
        controller.change_layout(shown.gpu.uuid, HALVES)
    assert "mps" not in busy.value.message
    assert daemon_pid(root) == before


def test_the_watchdog_names_strangers_and_not_our_mps(controller: Controller, daemons: MpsDaemons, shown: Shown) -> None:
    controller.apply([deployment("chat", want=memory(10))])
    shown.others.append(FakeProcess(os.getpid(), 100 * MIB))
    usage = controller._dependencies.hardware.read_usage
    dog = Watchdog(usage, tuple, lambda *_: None, read_helpers=daemons.pids)
    (verdict,) = dog.look()
    assert (verdict.finding, verdict.pids) == (Violation.FOREIGN, frozenset({os.getpid()}))


def test_without_a_daemon_what_is_left_of_mps_is_ours_and_goes(
    hardware: NvidiaHardware, daemons: MpsDaemons, shown: Shown, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(wiring, "real_backends", lambda: (hardware,))
    for module in (machine_view, wiring):
        monkeypatch.setattr(module, "make_mps", lambda _home: daemons)
    monkeypatch.setenv("AIMGPU_HOME", str(tmp_path / "home"))
    daemons.start(shown.gpu.uuid)
    pipe = pipe_of(shown.root, shown.gpu.uuid)
    tenant = subprocess.Popen(
        [sys.executable, "-c", TENANT],
        env={**os.environ, "CUDA_MPS_PIPE_DIRECTORY": str(pipe)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert tenant.stdout is not None
    tenant.stdout.readline()
    tenant.kill()
    tenant.communicate()  # it left a server behind

    def aimgpu(*words: str) -> str:
        outcome = CliRunner().invoke(cli, words)
        assert outcome.exit_code == 0, outcome
        return outcome.stdout

    (process,) = json.loads(aimgpu("gpus", "--json"))["gpus"][0]["processes"]
    assert process["ours"]
    assert "foreign" not in aimgpu("gpus").lower().splitlines()[-1]
    assert json.loads(aimgpu("partition", "plan", "0", HALVES, "--json"))["in_the_way"] == []
    assert json.loads(aimgpu("partition", "apply", "0", HALVES, "--json"))["after"] == HALVES
    assert daemons.running() == ()
