"""What is wrong with AMD GPUs that reading them cannot raise."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
from tests.hardware.contract import check_reading, check_usage
from tests.hardware.emulation.kernel import EmulatedKernel, TreeSysfs
from tests.hardware.emulation.sysfs_tree import lay_out, pci_path, write_tree

from aimgpu.domain import Ask, Memory, Refusal
from aimgpu.hardware.amd import AmdHardware, AmdSmi, Sysfs
from aimgpu.hardware.protocols import Finding
from aimgpu.hardware.simulated import find_product
from aimgpu.placement import DeviceState, NodeState, Snapshot
from aimgpu.placement.decide import decide
from aimgpu.placement.preemption.planner import plan_all

SMI = AmdSmi(Path("/opt/rocm/bin/amd-smi"))


def findings(sysfs: Sysfs, smi: AmdSmi = SMI) -> dict[str, Finding]:
    return {finding.code: finding for finding in AmdHardware(sysfs, smi=smi).inspect()}


def well(kernel: EmulatedKernel, dev: Path) -> TreeSysfs:
    """With all device files that models need."""
    (dev / "dri").mkdir(parents=True)
    (dev / "kfd").touch()
    for minor in range(128, 192):
        (dev / "dri" / f"renderD{minor}").touch()
    sysfs = TreeSysfs(kernel)
    sysfs.dev = dev
    return sysfs


def hide_nodes(kernel: EmulatedKernel) -> None:
    """As a device cgroup does: the ids of the nodes cannot be read."""
    for path in [path for path in kernel.tree if path.endswith("/gpu_id") and "topology/nodes" in path]:
        del kernel.tree[path]


@pytest.mark.parametrize("part", ["MI300X", "MI300A", "MI350X", "MI308X"])
def test_a_healthy_machine_has_nothing_to_say(part: str, tmp_path: Path) -> None:
    assert findings(well(EmulatedKernel([part, part]), tmp_path / "dev")) == {}


def test_a_machine_without_amd_gpus_has_nothing_to_say(tmp_path: Path) -> None:
    assert findings(Sysfs(tmp_path)) == {}


def test_a_gpu_that_no_driver_has_is_told_with_how_to_load_it(tmp_path: Path) -> None:
    kernel = EmulatedKernel(["MI300X"])
    kernel.change(driver_loaded=False)
    (code, found), *others = findings(well(kernel, tmp_path / "dev")).items()
    assert not others
    assert (code, found.serious, found.subject) == ("no-driver", True, "0000:05:00.0")
    assert "not loaded" in found.text
    assert "modprobe amdgpu" in str(found.hint)


def test_a_gpu_that_its_driver_did_not_take_points_to_the_kernel_log(tmp_path: Path) -> None:
    kernel = EmulatedKernel(["MI300X"])
    kernel.change(driver_loaded=False)
    kernel.tree["module/amdgpu/initstate"] = "live\n"
    assert "dmesg" in str(findings(well(kernel, tmp_path / "dev"))["no-driver"].hint)


def test_a_gpu_that_another_driver_has_is_named_but_a_servers_own_display_is_not(tmp_path: Path) -> None:
    kernel = EmulatedKernel(["MI300X"])
    kernel.change(driver_loaded=False)
    sysfs = well(kernel, tmp_path / "dev")
    uevent = f"{pci_path(kernel.machine.gpus[0])}/uevent"
    kernel.tree[uevent] = "DRIVER=vfio-pci\n"
    assert "vfio-pci" in findings(sysfs)["no-driver"].text
    kernel.tree[uevent] = "DRIVER=radeon\n"
    assert findings(sysfs) == {}


def test_a_container_that_sees_no_gpu_is_told_and_one_that_sees_some_is_only_reminded(tmp_path: Path) -> None:
    kernel = EmulatedKernel(["MI300X", "MI300X"])
    sysfs = well(kernel, tmp_path / "dev")
    node = min((path for path in kernel.tree if path.endswith("/gpu_id") and kernel.tree[path] != "0\n"), key=len)
    del kernel.tree[node]
    assert not findings(sysfs)["hidden"].serious
    hide_nodes(kernel)
    # Without any node the GPUs are known by their driver: listed by their memory, and no model can run on them.
    assert findings(sysfs)["no-kfd"].serious
    for gpu in kernel.machine.gpus:
        del kernel.tree[f"{pci_path(gpu)}/mem_info_vram_total"]
    assert findings(sysfs)["hidden"].serious


def test_without_the_compute_driver_the_gpu_is_not_free_and_nothing_is_planned_on_it(tmp_path: Path) -> None:
    kernel = EmulatedKernel(["MI300X"])
    for path in [path for path in kernel.tree if path.startswith("class/kfd")]:
        del kernel.tree[path]
    hardware = AmdHardware(well(kernel, tmp_path / "dev"), smi=SMI)
    (device,) = hardware.read_devices()
    assert device.layout.partitions == ()
    assert device.layout.memory_bytes == 0
    snapshot = Snapshot(nodes=(NodeState(name="here", devices=(DeviceState(device=device),)),))
    ask = Ask(name="chat", want=Memory(memory_bytes=1))
    decision = decide(snapshot, ask)
    assert isinstance(decision, Refusal)
    assert "no partition that a model could run on" in decision.summary
    assert plan_all(snapshot, [ask]).refusals
    (found,) = hardware.inspect()
    assert found.code == "no-kfd"
    assert "CONFIG_HSA_AMD" in str(found.hint)


def test_device_files_that_are_missing_or_closed_are_named(tmp_path: Path) -> None:
    sysfs = TreeSysfs(EmulatedKernel(["MI300X"]))
    sysfs.dev = tmp_path
    assert str(tmp_path / "kfd") in findings(sysfs)["no-device-file"].text
    if os.geteuid() != 0:
        (tmp_path / "kfd").touch(mode=0)
        assert "usermod" in str(findings(sysfs)["no-permission"].hint)


def test_files_that_this_user_may_not_open_name_the_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sysfs = well(EmulatedKernel(["MI300X"]), tmp_path / "dev")
    monkeypatch.setattr("aimgpu.hardware.amd.findings.os.access", lambda path, _mode: path.name != "kfd")
    found = findings(sysfs)
    assert set(found) == {"no-permission"}
    assert "usermod -aG render,video" in str(found["no-permission"].hint)


def test_a_gpu_in_reset_is_said(tmp_path: Path) -> None:
    kernel = EmulatedKernel(["MI300X"])
    del kernel.tree[f"{pci_path(kernel.machine.gpus[0])}/current_compute_partition"]
    assert "reset" in findings(well(kernel, tmp_path / "dev"))["unreadable"].text


@pytest.mark.parametrize(("text", "errors"), [("ue: 3\nce: 12\n", "3"), ("ue: 0\nce: 12\n", ""), ("", ""), ("ue: many", "")])
def test_memory_that_fails_is_said(tmp_path: Path, text: str, errors: str) -> None:
    kernel = EmulatedKernel(["MI300X", "MI300X"])
    kernel.tree[f"{pci_path(kernel.machine.gpus[1])}/ras/umc_err_count"] = text
    found = findings(well(kernel, tmp_path / "dev"))
    if errors:
        assert found["memory-errors"].subject == AmdHardware(TreeSysfs(kernel), smi=SMI).read_devices()[1].id
        assert f"{errors} uncorrectable" in found["memory-errors"].text
    else:
        assert "memory-errors" not in found


def test_a_virtual_function_points_to_its_host(tmp_path: Path) -> None:
    kernel = EmulatedKernel(["MI300X"])
    kernel.change_gpu(0, product=replace(find_product("MI300X"), pci_device=0x74B5))
    found = findings(well(kernel, tmp_path / "dev"))
    assert set(found) == {"virtual-function"}
    assert not found["virtual-function"].serious


def test_a_container_that_cannot_change_layouts_is_reminded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aimgpu.hardware.amd.findings.os.geteuid", lambda: 0)
    sysfs = well(EmulatedKernel(["MI300X"]), tmp_path / "dev")
    sysfs.read_only = True
    found = findings(sysfs)
    assert set(found) == {"read-only"}
    assert not found["read-only"].serious


def test_a_missing_tool_is_no_trouble(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aimgpu.hardware.amd.smi.find_amd_smi", lambda: None)
    found = findings(well(EmulatedKernel(["MI300X"]), tmp_path / "dev"), AmdSmi())
    assert set(found) == {"no-tool"}
    assert not found["no-tool"].serious


def test_a_tree_that_is_half_there_is_read_as_far_as_it_goes() -> None:
    """Whatever single file is missing, unreadable or garbled: reading, polling and inspecting answer, and ids stay."""
    kernel = EmulatedKernel(["MI300X"])
    kernel.change_gpu(0, compute_mode="DPX")
    kernel.add_process(os.getpid(), {(0, 0): 1 << 20})
    whole = dict(kernel.tree)
    read: set[str] = set()
    sysfs = TreeSysfs(kernel)
    sysfs.before_read = lambda path: read.add(kernel.resolve(path))
    check_usage(reader := AmdHardware(sysfs, smi=SMI), check_reading(reader))
    reader.inspect()
    for path in sorted(read.intersection(whole)):
        for damaged in (None, "", "garbled \x00 \N{SNOWMAN}\n", "-1\n", "0\n"):
            kernel.tree.clear()
            kernel.tree.update(whole if damaged is None else {**whole, path: damaged})
            if damaged is None:
                del kernel.tree[path]
            hardware = AmdHardware(TreeSysfs(kernel), smi=SMI)
            check_usage(hardware, check_reading(hardware))
            hardware.inspect()


def test_a_tree_on_disk_with_unreadable_files_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    kernel = EmulatedKernel(["MI300X", "MI300X"])
    write_tree(tmp_path, lay_out(kernel.machine))
    broken = tmp_path / pci_path(kernel.machine.gpus[0])
    for name in ("unique_id", "current_compute_partition", "mem_info_vram_used"):
        (broken / name).unlink()
        (broken / name).mkdir()  # a read is answered with an error, whoever asks
    hardware = AmdHardware(Sysfs(tmp_path), smi=SMI)
    first, second = hardware.read_devices()
    assert first.id == "amd-0000:05:00.0"
    assert second.layout.name == "SPX/NPS1"
    assert [usage.used_bytes is None for usage in hardware.read_usage()] == [True, False]
