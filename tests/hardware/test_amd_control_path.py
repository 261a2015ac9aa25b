"""Changes go through the kernel's files, and through amd-smi where those cannot be written."""

import errno
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.hardware.emulation.kernel import EmulatedKernel, KernelReloader, TreeSysfs

from aimgpu.errors import AimGpuError, HardwareFailed, LayoutNotApplied, NotAllowed, PartitionBusy
from aimgpu.hardware.amd import AmdHardware, AmdSmi
from aimgpu.hardware.amd.change import Patience
from aimgpu.hardware.amd.command import CommandResult

GPU0 = "amd-1122334455660000"


class PrivilegedTool:
    """amd-smi of ROCm 7.2 that may write what this process may not; or that answers `set` with the given words."""

    def __init__(self, kernel: EmulatedKernel, words: str | None = None) -> None:
        self.kernel = kernel
        self.words = words
        self.calls: list[str] = []

    def __call__(self, argv: Sequence[str], *, timeout_seconds: float, answer: str = "") -> CommandResult:
        assert timeout_seconds > 0
        self.calls.append(" ".join(argv[1:]))
        match list(argv[1:]):
            case ["version"]:
                return CommandResult(status=0, stdout="AMDSMI Tool: 26.2 | ROCm version: 7.2.0 |", stderr="")
            case ["reset", "-r"]:
                assert answer == "y\n"
                self.kernel.reload()
            case ["set", "-g", bdf, option, mode, "--json"] if self.words is None:
                name = "current_compute_partition" if option == "-C" else "current_memory_partition"
                self.kernel.write(f"bus/pci/devices/{bdf}/{name}", mode)
        return CommandResult(status=0, stdout=self.words or "[]", stderr="")


def machine(kernel: EmulatedKernel, tool: PrivilegedTool | None, *, read_only: bool) -> AmdHardware:
    sysfs = TreeSysfs(kernel)
    sysfs.read_only = read_only
    smi = AmdSmi(Path("amd-smi"), tool) if tool else AmdSmi()
    patience = Patience(tries=2, sleep=lambda _: None)
    return AmdHardware(sysfs, reloader=KernelReloader(kernel), patience=patience, smi=smi)


def test_files_that_can_be_written_leave_the_tool_alone() -> None:
    kernel = EmulatedKernel(["MI300X"])
    tool = PrivilegedTool(kernel)
    assert machine(kernel, tool, read_only=False).apply_layout(GPU0, "CPX/NPS4", reload_driver=True).layout.name == "CPX/NPS4"
    assert tool.calls == []


def test_where_the_files_are_closed_the_tool_changes_both_modes_with_the_reload_of_its_generation() -> None:
    kernel = EmulatedKernel(["MI300X"])
    tool = PrivilegedTool(kernel)
    hardware = machine(kernel, tool, read_only=True)
    assert hardware.apply_layout(GPU0, "CPX").layout.name == "CPX/NPS1"
    assert tool.calls == ["set -g 0000:05:00.0 -C CPX --json"]
    assert hardware.apply_layout(GPU0, "QPX/NPS4", reload_driver=True).layout.name == "QPX/NPS4"
    assert "set -g 0000:05:00.0 -M NPS4 --json" in tool.calls
    assert "reset -r" in tool.calls


@pytest.mark.parametrize("missing", [True, False], ids=["without the tool", "with a tool that is refused too"])
def test_where_nothing_may_write_the_kernels_own_reason_is_told(*, missing: bool) -> None:
    kernel = EmulatedKernel(["MI300X"])
    tool = None if missing else PrivilegedTool(kernel, "AMDSMI_STATUS_UNKNOWN_ERROR")
    with pytest.raises(NotAllowed, match="read-only") as caught:
        machine(kernel, tool, read_only=True).apply_layout(GPU0, "CPX")
    assert "privileged" in str(caught.value.hint)
    assert ("amd-smi" in caught.value.message) is not missing


def test_a_file_that_is_absent_goes_to_the_tool_and_its_read_back_decides() -> None:
    kernel = EmulatedKernel(["MI300X"])
    tool = PrivilegedTool(kernel, "[]")  # garbled, with exit status 0
    with pytest.raises(LayoutNotApplied, match="was asked to become CPX/NPS1 and is SPX/NPS1"):
        machine(kernel, tool, read_only=True).apply_layout(GPU0, "CPX")


def test_a_busy_gpu_is_busy_also_through_the_tool() -> None:
    kernel = EmulatedKernel(["MI300X"])
    kernel.add_process(os.getpid(), {(0, 0): 0})
    tool = PrivilegedTool(kernel, "\t30 | AMDSMI_STATUS_BUSY - Device busy\n")
    with pytest.raises(PartitionBusy, match=f"pid {os.getpid()} "):
        machine(kernel, tool, read_only=True).apply_layout(GPU0, "CPX")


def test_a_request_that_cannot_be_withdrawn_after_a_failed_reload_is_said() -> None:
    class FailingReloader(KernelReloader):
        def reload(self) -> None:
            kernel.faults["current_memory_partition"] = refuse
            raise HardwareFailed("the driver reload failed", hint="Reload it by hand.")

    def refuse() -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    kernel = EmulatedKernel(["MI300X"])
    hardware = AmdHardware(TreeSysfs(kernel), reloader=FailingReloader(kernel))
    with pytest.raises(AimGpuError, match="reload failed; the request stays and takes effect at the next reload"):
        hardware.apply_layout(GPU0, "CPX/NPS4", reload_driver=True)
    assert kernel.pending == {0: "NPS4"}
