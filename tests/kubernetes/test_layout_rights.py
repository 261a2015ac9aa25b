"""Which layouts an agent offers and changes, by what it was allowed and what its container can do."""

import os
from pathlib import Path

import pytest

from aimgpu.errors import NotAllowed
from aimgpu.hardware.simulated import SimulatedHardware
from aimgpu.kubernetes.node.layout_rights import LayoutLimits, LayoutRights, LimitedHardware, read_limits

SYS_MODULE = 1 << 16


@pytest.fixture
def node(tmp_path: Path) -> tuple[Path, Path, Path]:
    """A sysfs with one AMD GPU, a proc of a process that may load modules, and the modules of this kernel."""
    sysfs, proc, modules = tmp_path / "sys", tmp_path / "proc", tmp_path / "modules"
    device = sysfs / "class" / "drm" / "card0" / "device"
    device.mkdir(parents=True)
    (device / "current_compute_partition").write_text("SPX\n")
    (proc / "self" / "attr").mkdir(parents=True)
    (proc / "self" / "status").write_text(f"Name:\tagent\nCapEff:\t{SYS_MODULE:016x}\n")
    (proc / "self" / "attr" / "current").write_text("cri-containerd.apparmor.d (enforce)\n")
    (modules / os.uname().release).mkdir(parents=True)
    return sysfs, proc, modules


def limits(rights: LayoutRights, node: tuple[Path, Path, Path]) -> LayoutLimits:
    sysfs, proc, modules = node
    return read_limits(rights, sysfs, proc=proc, modules=modules)


@pytest.fixture
def modprobe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "modprobe").write_text("")
    (tmp_path / "modprobe").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.mark.usefixtures("modprobe")
def test_an_agent_with_every_right_has_no_limits(node: tuple[Path, Path, Path]) -> None:
    assert limits(LayoutRights.MEMORY, node) == LayoutLimits()


@pytest.mark.usefixtures("modprobe")
def test_a_file_that_cannot_be_written_limits_every_layout_and_names_the_profile(node: tuple[Path, Path, Path]) -> None:
    path = node[0] / "class" / "drm" / "card0" / "device" / "current_compute_partition"
    path.unlink()
    path.mkdir()  # opening it for writing fails for root too
    found = limits(LayoutRights.MEMORY, node)
    assert found.compute == (f"{path} cannot be written: Is a directory, under the profile cri-containerd.apparmor.d (enforce)")
    assert found.memory == found.compute
    assert found.reasons() == (found.compute,)


@pytest.mark.usefixtures("modprobe")
def test_the_check_leaves_the_mode_as_it_is(node: tuple[Path, Path, Path]) -> None:
    limits(LayoutRights.MEMORY, node)
    assert (node[0] / "class" / "drm" / "card0" / "device" / "current_compute_partition").read_text() == "SPX\n"


@pytest.mark.usefixtures("modprobe")
def test_a_memory_mode_needs_the_capability_and_the_modules_of_this_kernel(node: tuple[Path, Path, Path]) -> None:
    _, proc, modules = node
    (modules / os.uname().release).rmdir()
    assert f"{os.uname().release} is not mounted" in str(limits(LayoutRights.MEMORY, node).memory)
    (proc / "self" / "status").write_text(f"CapEff:\t{~SYS_MODULE & 0x1FFFFFFFFFF:016x}\n")
    found = limits(LayoutRights.MEMORY, node)
    assert (found.compute, "lacks the capability SYS_MODULE" in str(found.memory)) == (None, True)


def test_a_memory_mode_needs_modprobe(node: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    assert "the image lacks modprobe" in str(limits(LayoutRights.MEMORY, node).memory)


@pytest.fixture
def simulated(tmp_path: Path) -> SimulatedHardware:
    return SimulatedHardware([("MI300X", 1)], tmp_path / "gpus.json")


def allowed(rights: LayoutRights, hardware: SimulatedHardware) -> LimitedHardware:
    return LimitedHardware(hardware, read_limits(rights, Path("/sys"), real=False))


def test_without_the_right_to_memory_modes_the_others_are_offered_and_changed(simulated: SimulatedHardware) -> None:
    hardware = allowed(LayoutRights.COMPUTE, simulated)
    (device,) = hardware.read_devices()
    assert {layout.name for layout in device.layouts} == {"SPX/NPS1", "DPX/NPS1", "QPX/NPS1", "CPX/NPS1"}
    assert hardware.apply_layout(device.id, "CPX/NPS1").layout.name == "CPX/NPS1"
    with pytest.raises(NotAllowed, match=r"cannot become CPX/NPS4: the agent may not change memory modes") as refused:
        hardware.apply_layout(device.id, "CPX/NPS4", reload_driver=True)
    assert "agent.layouts=memory" in str(refused.value.hint)
    assert simulated.read_devices()[0].layout.name == "CPX/NPS1"


@pytest.mark.parametrize("rights", [LayoutRights.NONE, LayoutRights.VENDOR])
def test_an_agent_without_rights_changes_nothing(rights: LayoutRights, simulated: SimulatedHardware) -> None:
    hardware = allowed(rights, simulated)
    (device,) = hardware.read_devices()
    with pytest.raises(NotAllowed, match=f"agent.layouts is {rights}"):
        hardware.apply_layout(device.id, "CPX/NPS1")
    assert simulated.read_devices()[0].layout.name == device.layout.name
    # The vendor's manager changes them when a plan asks it to, so that they stay in what the plan may ask for.
    assert (len(device.layouts) > 1, hardware.limits.reasons() == ()) == ((rights is LayoutRights.VENDOR,) * 2)


def test_with_every_right_nothing_is_left_out(simulated: SimulatedHardware) -> None:
    hardware = allowed(LayoutRights.MEMORY, simulated)
    assert hardware.read_devices() == simulated.read_devices()
    (device,) = hardware.read_devices()
    assert hardware.apply_layout(device.id, "CPX/NPS4", reload_driver=True).layout.name == "CPX/NPS4"
