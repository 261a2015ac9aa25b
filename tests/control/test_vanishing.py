"""A GPU that goes away between two looks: what is told is an error or a refusal, and the books are right when it is back."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests.control.test_resizing import boot_held, cap_of, grant_of
from tests.control.world import Machine, boot, check_ledger, deployment, memory

from aimgpu.control.controller import Controller
from aimgpu.domain import Device, DeviceUsage
from aimgpu.errors import AimGpuError, HardwareUnavailable
from aimgpu.units import GIB


class Vanishing:
    """The GPUs of a machine, of which the first is gone after so many looks."""

    def __init__(self, hardware: Any) -> None:
        self._hardware = hardware
        self.looks_left: int | None = None
        self.looks = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._hardware, name)

    def read_devices(self) -> tuple[Device, ...]:
        devices: tuple[Device, ...] = self._hardware.read_devices()
        return devices[1:] if self._gone() else devices

    def read_usage(self) -> tuple[DeviceUsage, ...]:
        usage: tuple[DeviceUsage, ...] = self._hardware.read_usage()
        return usage[1:] if self._gone() else usage

    def _gone(self) -> bool:
        self.looks += 1
        if self.looks_left is None:
            return False
        self.looks_left -= 1
        return self.looks_left < 0


ACTS: dict[str, Callable[[Controller], object]] = {
    "apply": lambda controller: controller.apply([deployment("more", want=memory(20)), deployment("fourth", want=memory(100))]),
    "room": lambda controller: controller.apply([deployment("large", gib=150, want=memory(150))], make_room=True),
    "layout": lambda controller: controller.change_layout("0", "CPX"),
    "plan layout": lambda controller: controller.change_layout("0", "CPX", dry_run=True),
    "release": lambda controller: controller.release(["chat"]),
    "sleep and wake": lambda controller: (controller.sleep("chat"), controller.wake("chat")),
    "supervise": lambda controller: (controller.supervise(), controller.supervise(wait=True)),
    "reconcile": lambda controller: controller.reconcile(),
}


@pytest.mark.parametrize("act", ACTS)
def test_whatever_is_done_when_it_vanishes_ends_in_an_error_of_ours_at_most(tmp_path: Path, act: str) -> None:
    moment, looks = 0, 1
    while moment < looks:
        machine = Machine(root=tmp_path / str(moment), gpus=2)
        machine.root.mkdir()
        machine.hardware = hardware = Vanishing(machine.hardware)  # type: ignore[assignment]
        controller = boot(machine)
        controller.apply([deployment("chat", want=memory(10)), deployment("code", want=memory(20))])
        hardware.looks, hardware.looks_left = 0, moment
        with suppress(AimGpuError):
            ACTS[act](controller)
        looks = hardware.looks
        hardware.looks_left = None
        controller.close()
        again = boot(machine)
        again.reconcile()
        check_ledger(machine, again)
        again.close()
        moment += 1


@pytest.mark.parametrize("dry_run", [True, False])
def test_a_share_on_a_gpu_that_vanished_cannot_change(tmp_path: Path, *, dry_run: bool) -> None:
    machine = Machine(root=tmp_path, gpus=1)
    machine.hardware = hardware = Vanishing(machine.hardware)  # type: ignore[assignment]
    controller, interposer = boot_held(machine)
    controller.apply([deployment("chat", want=memory(10))])
    hardware.looks_left = 0
    with pytest.raises(HardwareUnavailable, match="is not there"):
        controller.resize("chat", 12 * GIB, dry_run=dry_run)
    for looks in range(1, 5):
        hardware.looks_left = looks
        with suppress(AimGpuError):
            controller.resize("chat", (12 + looks) * GIB, dry_run=dry_run)
        grant = grant_of(controller, "chat")
        assert cap_of(interposer, grant) == grant.memory_bytes
    controller.close()
