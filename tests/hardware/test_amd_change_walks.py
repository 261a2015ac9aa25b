"""Any walk through the layouts of AMD GPUs with faults on the way: what is reported is what the driver has."""

import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tests.examples import examples
from tests.hardware.contract import check_identity, check_reading, check_usage
from tests.hardware.emulation.kernel import EmulatedKernel, KernelReloader, TreeSysfs

from aimgpu.domain import Device
from aimgpu.errors import AimGpuError, DriverReloadNeeded, HardwareFailed, PartitionBusy
from aimgpu.hardware.amd import AmdHardware, AmdSmi
from aimgpu.hardware.amd.change import Patience
from aimgpu.hardware.amd.command import CommandResult
from aimgpu.hardware.amd.hardware import ServingAmdHardware
from aimgpu.hardware.amd.reload import ModprobeReloader, wait_until_live
from aimgpu.hardware.busy import processes_in_the_way
from aimgpu.hardware.visible_devices import at_position, join_environment

ERRNOS = [errno.EBUSY, errno.EROFS, errno.EACCES, errno.ENOENT, errno.EPERM, errno.EINVAL, errno.EIO, errno.ENOSPC]
FILES = ["current_compute_partition", "current_memory_partition"]


def raising(number: int) -> Callable[[], None]:
    def fail() -> None:
        raise OSError(number, os.strerror(number))

    return fail


class FaultyReloader(KernelReloader):
    """Fails as often as it is told to, before it does anything or after."""

    def __init__(self, kernel: EmulatedKernel) -> None:
        super().__init__(kernel)
        self.fault: str | None = None

    def reload(self) -> None:
        fault, self.fault = self.fault, None
        if fault == "before":
            raise HardwareFailed("the driver reload failed", hint="Reload it by hand.")
        super().reload()
        if fault == "after":
            raise HardwareFailed("the driver did not come back", hint="Look at the kernel log.")


class WalkWithFaults(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.kernel = EmulatedKernel(["MI300X", "MI300X", "MI350P"])
        self.reloader = FaultyReloader(self.kernel)
        no_tool = AmdSmi(Path("amd-smi"), _no_tool)
        self.hardware = AmdHardware(
            TreeSysfs(self.kernel), reloader=self.reloader, patience=Patience(tries=2, sleep=lambda _: None), smi=no_tool
        )

    def modes(self) -> list[str]:
        return [f"{gpu.compute_mode}/{gpu.memory_mode}" for gpu in self.kernel.machine.gpus]

    def apply(self, number: int, choice: int, *, reload_driver: bool) -> tuple[Device, str, AimGpuError | None]:
        device = self.hardware.read_devices()[number]
        wanted = device.layouts[choice % len(device.layouts)].name
        try:
            return self.hardware.apply_layout(device.id, wanted, reload_driver=reload_driver), wanted, None
        except AimGpuError as error:
            return device, wanted, error

    @rule(number=st.integers(0, 2), choice=st.integers(0, 12), reload_driver=st.booleans())
    def change(self, number: int, choice: int, *, reload_driver: bool) -> None:
        before = self.modes()
        device, wanted, error = self.apply(number, choice, reload_driver=reload_driver)
        if error is not None:
            assert isinstance(error, DriverReloadNeeded)
            assert not reload_driver
            assert self.modes() == before
            return
        assert device.layout.name == wanted == self.modes()[number]
        if wanted.partition("/")[2] == before[number].partition("/")[2]:
            assert [mode for at, mode in enumerate(self.modes()) if at != number] == [
                mode for at, mode in enumerate(before) if at != number
            ]
        else:
            assert self.modes()[2] == before[2] or number == 2, "a GPU of another hive has its modes back"

    @rule(number=st.integers(0, 2), choice=st.integers(0, 12), file=st.sampled_from(FILES), code=st.sampled_from(ERRNOS))
    def change_with_a_file_that_fails(self, number: int, choice: int, file: str, code: int) -> None:
        before = self.modes()
        self.kernel.faults[file] = raising(code)
        _, wanted, error = self.apply(number, choice, reload_driver=True)
        self.kernel.faults.clear()
        if wanted == before[number]:
            assert error is None
        elif error is not None:
            assert error.hint
        self.kernel.pending.clear()  # what could not be withdrawn is said, and left to the next reload

    @rule(number=st.integers(0, 1), choice=st.integers(0, 12), fault=st.sampled_from(["before", "after"]))
    def change_with_a_reload_that_fails(self, number: int, choice: int, fault: str) -> None:
        before = self.modes()
        self.reloader.fault = fault
        _, wanted, error = self.apply(number, choice, reload_driver=True)
        self.reloader.fault = None
        if wanted.partition("/")[2] != before[number].partition("/")[2]:
            assert isinstance(error, HardwareFailed)
            if fault == "before":
                assert self.modes() == before
        assert set(self.kernel.pending.values()) <= {self.modes()[number].partition("/")[2], before[number].partition("/")[2]}
        self.kernel.pending.clear()

    @rule(number=st.integers(0, 2), choice=st.integers(0, 12))
    def change_while_someone_holds_it(self, number: int, choice: int) -> None:
        before = self.modes()
        self.kernel.add_process(os.getpid(), {(number, 0): 1 << 20})
        _, wanted, error = self.apply(number, choice, reload_driver=True)
        self.kernel.end_processes()
        assert self.modes() == before
        assert (error is None) == (wanted == before[number])
        assert error is None or (isinstance(error, PartitionBusy) and f"pid {os.getpid()}" in error.message)

    @invariant()
    def what_is_read_is_what_the_driver_has(self) -> None:
        devices = check_reading(self.hardware)
        assert [device.layout.name for device in devices] == self.modes()
        check_usage(self.hardware, devices)


def _no_tool(argv: Sequence[str], *, timeout_seconds: float, answer: str = "") -> CommandResult:
    return CommandResult(status=1, stdout="", stderr="")


WalkWithFaults.TestCase.settings = settings(max_examples=examples(8), stateful_step_count=8)
TestAnyWalk = WalkWithFaults.TestCase


# --- reloading ---


def test_the_driver_is_unloaded_then_loaded_then_waited_for() -> None:
    kernel, steps, pauses = EmulatedKernel(["MI300X"]), list[list[str]](), list[float]()

    def run(argv: Sequence[str], *, timeout_seconds: float, answer: str = "") -> CommandResult:
        steps.append(list(argv))
        kernel.tree["module/amdgpu/initstate"] = "coming\n"
        return CommandResult(status=0, stdout="", stderr="")

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            kernel.tree["module/amdgpu/initstate"] = "live\n"

    ModprobeReloader(TreeSysfs(kernel), run, sleep=sleep).reload()
    assert steps == [["modprobe", "-r", "amdgpu"], ["modprobe", "amdgpu"]]
    assert len(pauses) == 3


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize(("said", "reason"), [("modprobe: FATAL: in use\n", "in use"), ("", "no reason given")])
def test_a_step_that_fails_is_the_last_and_named_with_its_words(failing: int, said: str, reason: str) -> None:
    steps: list[list[str]] = []

    def run(argv: Sequence[str], *, timeout_seconds: float, answer: str = "") -> CommandResult:
        steps.append(list(argv))
        return CommandResult(status=int(len(steps) == failing + 1), stdout="", stderr=said)

    with pytest.raises(HardwareFailed, match=reason) as caught:
        ModprobeReloader(TreeSysfs(EmulatedKernel([])), run).reload()
    assert " ".join(steps[-1]) in caught.value.message
    assert len(steps) == failing + 1
    assert caught.value.hint


@pytest.mark.parametrize("state", [None, "", "going", "LIVE"])
def test_a_driver_that_is_not_live_is_waited_for_within_the_seconds_given(state: str | None) -> None:
    kernel, pauses = EmulatedKernel([]), list[float]()
    if state is not None:
        kernel.tree["module/amdgpu/initstate"] = state
    else:
        kernel.tree.pop("module/amdgpu/initstate", None)
    with pytest.raises(HardwareFailed, match="within 2s"):
        wait_until_live(TreeSysfs(kernel), 2, pauses.append)
    assert sum(pauses) == 2


# --- where models are started from here ---


@pytest.mark.parametrize("part", ["MI300X", "MI350P"])
def test_without_the_compute_device_file_gpus_are_shown_and_nothing_can_be_given_away(part: str, tmp_path: Path) -> None:
    kernel = EmulatedKernel([part])
    sysfs = TreeSysfs(kernel)
    sysfs.dev = tmp_path
    hardware = ServingAmdHardware(sysfs, smi=AmdSmi(Path("amd-smi"), _no_tool))
    (device,) = hardware.read_devices()
    assert device.memory_bytes > 0
    assert all(layout.partitions == () for layout in (device.layout, *device.layouts))
    (tmp_path / "kfd").touch()
    devices = check_reading(hardware)
    check_identity(hardware, devices)
    assert all(layout.partitions for layout in devices[0].layouts)


# --- several GPUs for one process ---


def test_a_process_on_several_partitions_sees_all_of_them_in_order() -> None:
    environment: dict[str, str] = {}
    for number, uuid in enumerate(("GPU-a", "GPU-b", "GPU-b")):
        more = {"ROCR_VISIBLE_DEVICES": uuid, "HSA_CU_MASK": f"0:{number}-{number + 3}", "AIM_PARTITION_ID": str(number)}
        join_environment(environment, at_position(more, number))
    assert environment["ROCR_VISIBLE_DEVICES"].split(",")[:2] == ["GPU-a", "GPU-b"]
    assert environment["HSA_CU_MASK"] == "0:0-3;1:1-4;2:2-5"
    assert environment["AIM_PARTITION_ID"] == "2"
    assert at_position({"A": "1"}, 3) == {"A": "1"}


def test_processes_in_the_way_are_named_with_what_to_do() -> None:
    error = processes_in_the_way("gpu0", "CPX/NPS1", {7: "python3", 9: None})
    assert isinstance(error, PartitionBusy)
    assert error.message == "cannot set CPX/NPS1 on gpu0: pid 7 (python3), pid 9 in the way"
    assert "Nothing was changed" in str(error.hint)
