"""Changing layouts of AMD GPUs, and every way in which that can fail."""

import errno
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from tests.hardware.emulation.kernel import EmulatedKernel, KernelReloader, TreeSysfs
from tests.hardware.emulation.sysfs_tree import pci_path

from aimgpu.errors import (
    AimGpuError,
    DriverReloadNeeded,
    HardwareFailed,
    HardwareUnavailable,
    LayoutNotApplied,
    NotAllowed,
    PartitionBusy,
    UnknownDevice,
    UnknownLayout,
)
from aimgpu.hardware.amd import AmdHardware, AmdSmi
from aimgpu.hardware.amd.change import Patience
from aimgpu.hardware.amd.command import CommandResult
from aimgpu.hardware.amd.reload import ModprobeReloader, ReloadWay, SelfReload, SmiReloader, choose_reloader, reload_way
from aimgpu.hardware.amd.writers import SmiWriter
from aimgpu.hardware.simulated import find_product

GPU0 = "amd-1122334455660000"
ALL_CAPABILITIES, DOCKERS_CAPABILITIES = 0x1FFFFFFFFFF, 0xA80425FB


def nobody_waits(_: float) -> None:
    """Stands in for sleep."""


QUICK = Patience(tries=3, sleep=nobody_waits)


def hardware_of(kernel: EmulatedKernel, patience: Patience = QUICK) -> AmdHardware:
    return AmdHardware(TreeSysfs(kernel), reloader=KernelReloader(kernel), patience=patience)


def raising(number: int) -> Callable[[], None]:
    def fail() -> None:
        raise OSError(number, os.strerror(number))

    return fail


def test_a_compute_mode_changes_one_gpu_and_is_read_back() -> None:
    kernel = EmulatedKernel(["MI300X", "MI300X"])
    device = hardware_of(kernel).apply_layout(GPU0, "cpx")
    assert device.layout.name == "CPX/NPS1"
    assert len(device.layout.partitions) == 8
    assert [gpu.compute_mode for gpu in kernel.machine.gpus] == ["CPX", "SPX"]


def test_the_layout_that_is_there_is_not_written_again() -> None:
    kernel = EmulatedKernel(["MI300X"])
    hardware_of(kernel).apply_layout(GPU0, "SPX/NPS1")
    assert kernel.writes == []


def test_a_memory_mode_is_refused_without_a_reload_and_nothing_was_written() -> None:
    kernel = EmulatedKernel(["MI300X", "MI300X"])
    with pytest.raises(DriverReloadNeeded) as caught:
        hardware_of(kernel).apply_layout(GPU0, "CPX/NPS4")
    assert "amd-1122334455660100" in str(caught.value.hint)
    assert kernel.writes == []


def test_a_memory_mode_changes_the_hive_and_gives_others_their_compute_mode_back() -> None:
    kernel = EmulatedKernel(["MI300X", "MI300X", "MI350P"])
    kernel.change_gpu(2, compute_mode="DPX")
    device = hardware_of(kernel).apply_layout(GPU0, "QPX/NPS4", reload_driver=True)
    assert device.layout.name == "QPX/NPS4"
    assert [(gpu.compute_mode, gpu.memory_mode) for gpu in kernel.machine.gpus] == [
        ("QPX", "NPS4"),
        ("QPX", "NPS4"),
        ("DPX", "NPS1"),
    ]


def test_who_holds_a_gpu_is_named() -> None:
    kernel = EmulatedKernel(["MI300X"])
    kernel.add_process(os.getpid(), {(0, 0): 0})
    with pytest.raises(PartitionBusy, match=f"pid {os.getpid()} "):
        hardware_of(kernel).apply_layout(GPU0, "CPX")
    with pytest.raises(PartitionBusy, match=f"pid {os.getpid()} "):
        hardware_of(kernel).apply_layout(GPU0, "CPX/NPS4", reload_driver=True)
    assert kernel.machine.gpus[0].compute_mode == "SPX"
    assert kernel.pending == {}


def test_a_process_that_is_just_ending_is_waited_for() -> None:
    kernel = EmulatedKernel(["MI300X"])
    kernel.add_process(1, {(0, 0): 0})
    patience = Patience(tries=3, sleep=lambda _: kernel.end_processes())
    assert hardware_of(kernel, patience).apply_layout(GPU0, "CPX").layout.name == "CPX/NPS1"
    kernel.add_process(1, {(0, 0): 0})
    assert hardware_of(kernel, patience).apply_layout(GPU0, "CPX/NPS4", reload_driver=True).layout.name == "CPX/NPS4"


def test_a_holder_that_cannot_be_seen_is_said_to_be_so() -> None:
    kernel = EmulatedKernel(["MI300X"])
    kernel.faults["current_compute_partition"] = raising(errno.EBUSY)
    with pytest.raises(PartitionBusy, match="cannot be seen"):
        hardware_of(kernel).apply_layout(GPU0, "CPX")


@pytest.mark.parametrize(
    ("number", "error", "words"),
    [
        (errno.EACCES, LayoutNotApplied if os.geteuid() == 0 else NotAllowed, "cannot set CPX"),
        (errno.EROFS, NotAllowed, "read-only"),
        (errno.EPERM, HardwareUnavailable if os.geteuid() == 0 else NotAllowed, "cannot set CPX"),
        (errno.EINVAL, LayoutNotApplied, "refused"),
        (errno.EIO, LayoutNotApplied, "did not come back"),
        (errno.ENOENT, LayoutNotApplied, "does not let"),
        (errno.ENOSPC, HardwareFailed, "No space"),
    ],
)
def test_each_errno_has_its_error_and_its_way_out(number: int, error: type[AimGpuError], words: str) -> None:
    kernel = EmulatedKernel(["MI300X"])
    kernel.faults["current_compute_partition"] = raising(number)
    with pytest.raises(error, match=words) as caught:
        hardware_of(kernel).apply_layout(GPU0, "CPX")
    assert caught.value.hint


def test_an_ordinary_user_is_told_to_use_sudo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    kernel = EmulatedKernel(["MI300X"])
    kernel.faults["current_compute_partition"] = raising(errno.EACCES)
    with pytest.raises(NotAllowed) as caught:
        hardware_of(kernel).apply_layout(GPU0, "CPX")
    assert "sudo" in str(caught.value.hint)


def test_a_virtual_function_is_partitioned_on_its_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    kernel = EmulatedKernel(["MI300X"])
    device = next(path for path in kernel.tree if path.endswith("0000:05:00.0/device"))
    kernel.tree[device] = "0x74b5\n"
    kernel.faults["current_compute_partition"] = raising(errno.EACCES)
    with pytest.raises(NotAllowed, match="virtual function"):
        hardware_of(kernel).apply_layout(GPU0, "CPX")


def test_a_virtual_function_that_offers_one_mode_says_why() -> None:
    kernel = EmulatedKernel(["MI300X"])
    kernel.change_gpu(0, product=replace(find_product("MI300X"), pci_device=0x74B5))
    kernel.tree[f"{pci_path(kernel.machine.gpus[0])}/available_compute_partition"] = "SPX\n"
    with pytest.raises(NotAllowed, match="virtual function") as caught:
        hardware_of(kernel).apply_layout(GPU0, "CPX")
    assert "on the host" in str(caught.value.hint)


def test_a_write_that_was_accepted_and_did_nothing_is_a_failure() -> None:
    kernel = EmulatedKernel(["MI300X"])
    kernel.faults["current_compute_partition"] = lambda: None
    with pytest.raises(LayoutNotApplied, match="is SPX/NPS1 with 1 partitions"):
        hardware_of(kernel).apply_layout(GPU0, "CPX")


def test_a_memory_mode_that_the_firmware_did_not_take_is_a_failure_and_compute_modes_come_back() -> None:
    kernel = EmulatedKernel(["MI300X"])
    kernel.change_gpu(0, compute_mode="DPX")
    kernel.faults["current_memory_partition"] = lambda: None
    with pytest.raises(LayoutNotApplied, match="is DPX/NPS1"):
        hardware_of(kernel).apply_layout(GPU0, "CPX/NPS4", reload_driver=True)


def proc_with(folder: Path, capabilities: int) -> Path:
    """A /proc in which this process has these."""
    (folder / "self").mkdir()
    (folder / "self" / "status").write_text(f"Name:\tx\nCapEff:\t{capabilities:016x}\n")
    return folder


def test_a_reload_that_did_not_happen_is_a_failure_and_the_request_is_withdrawn(tmp_path: Path) -> None:
    kernel = EmulatedKernel(["MI300X", "MI300X"])

    def run(argv: Sequence[str], *, timeout_seconds: float, answer: str = "") -> CommandResult:
        return CommandResult(status=0, stdout="", stderr="")

    reloader = ModprobeReloader(TreeSysfs(kernel), run, proc=proc_with(tmp_path, ALL_CAPABILITIES), sleep=nobody_waits)
    hardware = AmdHardware(TreeSysfs(kernel), reloader=reloader, patience=QUICK)
    with pytest.raises(LayoutNotApplied, match="is SPX/NPS1 after the driver reload"):
        hardware.apply_layout(GPU0, "CPX/NPS4", reload_driver=True)
    assert kernel.pending == {0: "NPS1", 1: "NPS1"}


def test_a_gpu_that_does_not_come_back_is_said_to_be_gone() -> None:
    kernel = EmulatedKernel(["MI300X"])
    kernel.faults["current_compute_partition"] = lambda: kernel.change(gpus=())
    with pytest.raises(LayoutNotApplied, match="is gone"):
        hardware_of(kernel).apply_layout(GPU0, "CPX")


def test_a_failed_reload_withdraws_the_request(tmp_path: Path) -> None:
    kernel = EmulatedKernel(["MI300X", "MI300X"])

    def run(argv: Sequence[str], *, timeout_seconds: float, answer: str = "") -> CommandResult:
        return CommandResult(status=1, stdout="", stderr="modprobe: FATAL: Module amdgpu is in use.")

    reloader = ModprobeReloader(TreeSysfs(kernel), run, proc=proc_with(tmp_path, ALL_CAPABILITIES), sleep=nobody_waits)
    hardware = AmdHardware(TreeSysfs(kernel), reloader=reloader, patience=QUICK)
    with pytest.raises(HardwareFailed, match="in use"):
        hardware.apply_layout(GPU0, "CPX/NPS4", reload_driver=True)
    assert kernel.pending == {0: "NPS1", 1: "NPS1"}


def test_a_driver_that_never_comes_back_is_waited_for_within_bounds(tmp_path: Path) -> None:
    kernel = EmulatedKernel(["MI300X"])
    waits: list[float] = []

    def run(argv: Sequence[str], *, timeout_seconds: float, answer: str = "") -> CommandResult:
        kernel.change(driver_loaded=False)
        return CommandResult(status=0, stdout="", stderr="")

    reloader = ModprobeReloader(
        TreeSysfs(kernel), run, proc=proc_with(tmp_path, ALL_CAPABILITIES), seconds=10, sleep=waits.append
    )
    hardware = AmdHardware(TreeSysfs(kernel), reloader=reloader, patience=QUICK)
    with pytest.raises(HardwareFailed, match="did not come back within 10s"):
        hardware.apply_layout(GPU0, "CPX/NPS4", reload_driver=True)
    assert sum(waits) == pytest.approx(10)


def test_a_container_without_sys_module_is_told_what_it_lacks(tmp_path: Path) -> None:
    kernel = EmulatedKernel(["MI300X"])
    reloader = ModprobeReloader(TreeSysfs(kernel), proc=proc_with(tmp_path, DOCKERS_CAPABILITIES))
    hardware = AmdHardware(TreeSysfs(kernel), reloader=reloader, patience=QUICK)
    with pytest.raises(NotAllowed) as caught:
        hardware.apply_layout(GPU0, "CPX/NPS4", reload_driver=True)
    assert "SYS_MODULE" in str(caught.value.hint)
    assert kernel.pending == {}


@pytest.mark.parametrize("layout", ["TPX", "CPX/NPS2", "SPX/NPS4", "nonsense", "CPX/"])
def test_only_what_the_device_offers_can_be_asked(layout: str) -> None:
    kernel = EmulatedKernel(["MI300X"])
    if layout == "CPX/":  # an empty memory mode means the one that there is
        assert hardware_of(kernel).apply_layout(GPU0, layout).layout.name == "CPX/NPS1"
        return
    with pytest.raises(UnknownLayout) as caught:
        hardware_of(kernel).apply_layout(GPU0, layout, reload_driver=True)
    assert "CPX/NPS4" in str(caught.value.hint)


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(UnknownDevice):
        hardware_of(EmulatedKernel(["MI300X"])).apply_layout("amd-nothing", "CPX")


@pytest.mark.parametrize(
    ("rocm", "way"),
    [
        ((6, 2), ReloadWay.BY_ITSELF),
        ((6, 4), ReloadWay.BY_ITSELF),
        ((7, 0), ReloadWay.SMI_RESET),
        ((7, 11), ReloadWay.SMI_RESET),
        ((7, 12), ReloadWay.MODPROBE),
        ((10, 1), ReloadWay.MODPROBE),
        (None, ReloadWay.MODPROBE),
    ],
)
def test_each_rocm_generation_has_its_way_to_reload(rocm: tuple[int, int] | None, way: ReloadWay) -> None:
    assert reload_way(rocm) is way


@pytest.mark.parametrize(
    ("version", "kind"), [("6.4.1", SelfReload), ("7.2.0", SmiReloader), ("10.1", ModprobeReloader), ("", ModprobeReloader)]
)
def test_the_reloader_follows_the_installed_tool(version: str, kind: type) -> None:
    def run(argv: Sequence[str], *, timeout_seconds: float, answer: str = "") -> CommandResult:
        return CommandResult(status=0, stdout=f"AMDSMI Tool: x | ROCm version: {version} |", stderr="")

    kernel = EmulatedKernel(["MI300X"])
    assert isinstance(choose_reloader(AmdSmi(Path("amd-smi"), run), TreeSysfs(kernel)), kind)


class FakeSmi:
    """A runner that answers `amd-smi set` from the emulated kernel, or with the given words."""

    def __init__(self, kernel: EmulatedKernel, words: str | None = None, status: int = 0) -> None:
        self.kernel = kernel
        self.words = words
        self.status = status
        self.answers: list[str] = []

    def __call__(self, argv: Sequence[str], *, timeout_seconds: float, answer: str = "") -> CommandResult:
        assert timeout_seconds > 0
        self.answers.append(answer)
        if self.words is not None:
            return CommandResult(status=self.status, stdout=self.words, stderr="")
        _, _, _, bdf, option, mode, _ = argv
        name = "current_compute_partition" if option == "-C" else "current_memory_partition"
        self.kernel.write(f"bus/pci/devices/{bdf}/{name}", mode)
        return CommandResult(
            status=0, stdout='Accept? [Y/N] \n[{"gpu": 0, "accelerator_partition": "Successfully set"}]', stderr=""
        )


def through_smi(kernel: EmulatedKernel, run: FakeSmi) -> AmdHardware:
    writer = SmiWriter(AmdSmi(Path("amd-smi"), run))
    return AmdHardware(TreeSysfs(kernel), writer=writer, reloader=KernelReloader(kernel), patience=QUICK)


def test_the_tool_and_the_file_lead_to_the_same_state() -> None:
    by_tool, by_file = EmulatedKernel(["MI300X"]), EmulatedKernel(["MI300X"])
    run = FakeSmi(by_tool)
    for layout in ("CPX/NPS4", "QPX/NPS4", "SPX/NPS1"):
        through_smi(by_tool, run).apply_layout(GPU0, layout, reload_driver=True)
        hardware_of(by_file).apply_layout(GPU0, layout, reload_driver=True)
        assert by_tool.machine.gpus == by_file.machine.gpus
    assert "y\n" in run.answers


@pytest.mark.parametrize(
    ("words", "status", "error"),
    [
        ("AmdSmiLibraryException: Error code:\n\t30 | AMDSMI_STATUS_BUSY - Device busy\n", 1, PartitionBusy),
        ("[AMDSMI_STATUS_SETTING_UNAVAILABLE] Please check", 1, LayoutNotApplied),
        ("AmdSmiPermissionDeniedException: '--compute-partition' requires elevation Error code: -11", 11, NotAllowed),
        ("PermissionError: Command requires elevation", 1, NotAllowed),
        ("[AMDSMI_STATUS_NOT_SUPPORTED] Unable to set compute partition to CPX", 0, LayoutNotApplied),
        ("AmdSmiInvalidParameterValueException: Value 'CPX' is not of valid type", 5, LayoutNotApplied),
        ("[AMDSMI_STATUS_AMDGPU_RESTART_ERR] Could not successfully restart driver", 0, HardwareFailed),
        ("34 | AMDSMI_STATUS_DRIVER_NOT_LOADED", 1, HardwareUnavailable),
        ("AMDSMI_STATUS_SOMETHING_NEW - who knows", 1, HardwareFailed),
        ("Traceback: boom", 1, LayoutNotApplied),
        ("", 1, LayoutNotApplied),
        ("[]", 0, LayoutNotApplied),  # says nothing, did nothing: the read-back tells
    ],
)
def test_what_the_tool_says_in_words_becomes_an_error(words: str, status: int, error: type[AimGpuError]) -> None:
    kernel = EmulatedKernel(["MI300X"])
    with pytest.raises(error) as caught:
        through_smi(kernel, FakeSmi(kernel, words, status)).apply_layout(GPU0, "CPX")
    assert caught.value.hint
    assert kernel.machine.gpus[0].compute_mode == "SPX"


def test_parts_that_fix_their_memory_mode_offer_no_other() -> None:
    for part in ("MI300A", "MI350P"):
        kernel = EmulatedKernel([part])
        with pytest.raises(UnknownLayout):
            hardware_of(kernel).apply_layout(GPU0, "CPX/NPS4", reload_driver=True)
        assert find_product(part).memory_modes == ("NPS1",)
