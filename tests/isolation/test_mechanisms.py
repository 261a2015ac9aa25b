import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aimgpu.domain import Device, Grant, Level, Priority, Vendor
from aimgpu.errors import HardwareUnavailable, NotAllowed, RegionUnusable, ShareInUse
from aimgpu.home import Home
from aimgpu.isolation import building
from aimgpu.isolation.boundaries import EngineFlags, HardwareBoundary
from aimgpu.isolation.chooser import MechanismChooser
from aimgpu.isolation.cu_masks import CuMasks, choose_units, format_mask
from aimgpu.isolation.dmem import DmemLimits
from aimgpu.isolation.interposer import Interposer, regions_directory
from aimgpu.isolation.mps_limits import MpsMechanism
from aimgpu.isolation.processes import own_pid_namespace
from aimgpu.units import GIB, MIB, PPM
from aimgpu.wiring import make_isolator

MakeDevice = Callable[..., Device]
MakeGrant = Callable[..., Grant]


def library() -> Path:
    return Path("/somewhere/libaimgpu.so")


def no_compiler() -> str | None:
    return "no C compiler to build the interposer with"


def nothing_missing() -> str | None:
    return None


def interposer_in(folder: Path) -> Interposer:
    return Interposer(folder, find_library=library, why_not=nothing_missing)


# --- the interposer ---


def test_a_shared_grant_gets_a_region_a_tenant_and_the_variables(
    tmp_path: Path, make_device: MakeDevice, make_grant: MakeGrant, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    device = make_device()
    interposer = interposer_in(tmp_path)
    chooser = MechanismChooser([HardwareBoundary(), interposer, EngineFlags()])
    grant = make_grant(device, level=Level.RUNTIME, priority=Priority.HIGH, compute_ppm=500_000)
    got = chooser.enforce(grant, device, device.layout.partitions[0])
    assert (got.level, got.mechanism) == (Level.RUNTIME, "interposer")
    assert got.environment == {
        "LD_PRELOAD": "/somewhere/libaimgpu.so",
        "AIMGPU_REGION": str(tmp_path / "gpu0_whole-0.region"),
        "AIMGPU_TENANT": "chat-0",
        "AIMGPU_FAIL": "closed",
    }
    (region,) = interposer.regions()
    (use,) = region.read_use()
    assert (use.name, use.cap_bytes, use.priority, use.compute_ppm) == ("chat-0", 10 * GIB, Priority.HIGH, 500_000)
    assert region._layout.tenants[0].context_bytes == 620 * MIB
    chooser.release(grant)
    chooser.release(grant)
    assert region.read_use() == ()


def test_who_demanded_nothing_fails_open_and_keeps_its_own_preload(
    tmp_path: Path, make_device: MakeDevice, make_grant: MakeGrant, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_PRELOAD", "/usr/lib/theirs.so")
    device = make_device()
    got = interposer_in(tmp_path).enforce(make_grant(device), device, device.layout.partitions[0])
    assert got.environment["AIMGPU_FAIL"] == "open"
    assert got.environment["LD_PRELOAD"] == "/somewhere/libaimgpu.so:/usr/lib/theirs.so"


def test_an_instance_on_two_partitions_names_both_regions(
    tmp_path: Path, make_device: MakeDevice, make_grant: MakeGrant
) -> None:
    device = make_device(partitions=2)
    interposer = interposer_in(tmp_path)
    for partition in device.layout.partitions:
        got = interposer.enforce(make_grant(device, id=partition.id, partition_id=partition.id), device, partition)
    names = [f"gpu0_part-{index}.region" for index in range(2)]
    assert [Path(path).name for path in got.environment["AIMGPU_REGION"].split(":")] == names


def test_without_a_compiler_the_level_is_advisory_and_the_reason_is_told(
    tmp_path: Path, make_device: MakeDevice, make_grant: MakeGrant
) -> None:
    device = make_device()
    chooser = MechanismChooser([HardwareBoundary(), Interposer(tmp_path, why_not=no_compiler), EngineFlags()])
    partition = device.layout.partitions[0]
    assert chooser.available_levels(device, partition, exclusive=False) == {Level.ADVISORY, Level.NONE}
    with pytest.raises(NotAllowed, match="no C compiler"):
        chooser.enforce(make_grant(device, level=Level.RUNTIME), device, partition)


def test_a_simulated_device_has_no_interposer(tmp_path: Path, make_device: MakeDevice) -> None:
    device = make_device(simulated=True)
    offer = interposer_in(tmp_path).offer(device, device.layout.partitions[0], exclusive=False)
    assert offer.level is None


def test_a_running_instance_is_resized_but_not_below_its_use(
    tmp_path: Path, make_device: MakeDevice, make_grant: MakeGrant
) -> None:
    device = make_device()
    interposer = interposer_in(tmp_path)
    grant = make_grant(device)
    interposer.enforce(grant, device, device.layout.partitions[0])
    interposer.resize(grant, 12 * GIB)
    tenant = interposer.regions()[0]._layout.tenants[0]
    assert tenant.cap_bytes == 12 * GIB
    slot = tenant.processes[0]
    slot.state, slot.pid, slot.used_bytes, slot.pid_namespace = 1, os.getpid(), 11 * GIB, own_pid_namespace()
    slot.start_ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    with pytest.raises(ShareInUse):
        interposer.resize(grant, 10 * GIB)


def test_the_library_is_built_once_and_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AIMGPU_INTERPOSER", raising=False)
    target = tmp_path / building.source_hash(building.find_sources()) / building.LIBRARY
    target.parent.mkdir()
    target.write_bytes(b"built before")
    assert building.find_interposer(tmp_path) == target
    monkeypatch.setenv("PATH", str(tmp_path))
    assert building.why_unavailable(tmp_path) is None  # built before: no compiler is needed
    assert building.why_unavailable(tmp_path / "empty") == "no C compiler to build the interposer with"
    monkeypatch.setenv("AIMGPU_INTERPOSER", str(tmp_path / "nothing"))
    assert "not there" in str(building.why_unavailable(tmp_path))
    with pytest.raises(HardwareUnavailable, match="not there"):
        building.find_interposer(tmp_path)
    monkeypatch.setenv("AIMGPU_INTERPOSER", str(target))
    assert building.find_interposer(tmp_path) == target


def test_without_a_compiler_building_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(HardwareUnavailable, match="no C compiler") as missing:
        building.build(building.find_sources(), tmp_path / "out" / "lib.so")
    assert missing.value.hint


def test_source_that_does_not_compile_says_so_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "bad.c").write_text("this is not C")
    with pytest.raises(HardwareUnavailable, match="does not compile"):
        building.build(tmp_path, tmp_path / "out" / "lib.so")
    assert list((tmp_path / "out").iterdir()) == []


def test_a_directory_of_somebody_else_is_not_used(tmp_path: Path, make_device: MakeDevice, make_grant: MakeGrant) -> None:
    device = make_device()
    (tmp_path / "theirs").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "theirs")
    with pytest.raises(RegionUnusable, match="is a link"):
        interposer_in(tmp_path / "link").enforce(make_grant(device), device, device.layout.partitions[0])


def test_every_home_has_its_own_regions(tmp_path: Path) -> None:
    assert regions_directory(tmp_path / "a") != regions_directory(tmp_path / "b")
    assert regions_directory(tmp_path / "a") == regions_directory(tmp_path / "a")


# --- CU masks ---


def test_half_of_an_mi300x_is_19_units_on_each_die() -> None:
    units = choose_units(304, 8, (), 500_000)
    assert format_mask(0, units) == "0:0-151"
    assert {sum(unit % 8 == die for unit in units) for die in range(8)} == {19}


@given(
    shares=st.lists(st.integers(10_000, PPM), min_size=1, max_size=8),
    xccs=st.sampled_from([1, 2, 4, 8]),
    rows=st.integers(8, 40),
)
def test_masks_never_overlap_and_never_pass_the_device(shares: list[int], xccs: int, rows: int) -> None:
    total, taken = rows * xccs, set[int]()
    for ppm in shares:
        try:
            units = choose_units(total, xccs, taken, ppm)
        except NotAllowed:
            continue
        assert not units & taken
        assert units <= set(range(total))
        assert {unit % xccs for unit in units} == set(range(xccs))  # no die without a unit
        assert len(units) <= max(xccs, (total * ppm + PPM // 1000) // PPM)
        assert len(units) > total * ppm / PPM - 1  # never below the share by a whole unit
        taken |= units


def test_masks_survive_a_restart_and_are_given_back(tmp_path: Path, make_device: MakeDevice, make_grant: MakeGrant) -> None:
    device = make_device(vendor=Vendor.AMD)
    partition = device.layout.partitions[0]
    first = make_grant(device, id="a", compute_ppm=500_000)
    assert CuMasks(tmp_path / "masks.json").enforce(first, device, partition).environment == {"HSA_CU_MASK": "0:0-151"}
    again = CuMasks(tmp_path / "masks.json")
    assert again.enforce(first, device, partition).environment == {"HSA_CU_MASK": "0:0-151"}
    second = make_grant(device, id="b", compute_ppm=500_000)
    assert again.enforce(second, device, partition).environment == {"HSA_CU_MASK": "0:152-303"}
    with pytest.raises(NotAllowed, match="0 are free"):
        again.enforce(make_grant(device, id="c", compute_ppm=100_000), device, partition)
    again.release(first)
    again.release(first)
    assert again.enforce(make_grant(device, id="c", compute_ppm=100_000), device, partition).environment


def test_a_mask_accompanies_the_interposer(tmp_path: Path, make_device: MakeDevice, make_grant: MakeGrant) -> None:
    device = make_device(vendor=Vendor.AMD)
    masks = CuMasks(tmp_path / "masks.json")
    chooser = MechanismChooser([interposer_in(tmp_path)], companions=[masks])
    got = chooser.enforce(make_grant(device, compute_ppm=250_000), device, device.layout.partitions[0])
    assert (got.level, got.mechanisms) == (Level.RUNTIME, ("interposer", "CU mask"))
    assert got.environment["HSA_CU_MASK"] == "0:0-75"
    assert "AIMGPU_REGION" in got.environment


def test_masks_are_for_shared_amd_devices_only(tmp_path: Path, make_device: MakeDevice) -> None:
    masks = CuMasks(tmp_path / "masks.json")
    for device in (make_device(), make_device(vendor=Vendor.AMD, simulated=True)):
        assert masks.offer(device, device.layout.partitions[0], exclusive=False).level is None
    amd = make_device(vendor=Vendor.AMD)
    assert masks.offer(amd, amd.layout.partitions[0], exclusive=True).level is None


def test_tenants_that_start_side_by_side_get_one_region_and_a_slot_each(
    tmp_path: Path, make_device: MakeDevice, make_grant: MakeGrant
) -> None:
    """Twelve at once on a Partition that had no region yet, ten times over."""
    device = make_device()
    for attempt in range(10):
        interposer = interposer_in(tmp_path / str(attempt))
        grants = [make_grant(device, id=f"g{n}", instance_id=f"tenant-{n}") for n in range(12)]
        barrier = threading.Barrier(len(grants))

        def enforce(grant: Grant, interposer: Interposer = interposer, barrier: threading.Barrier = barrier) -> None:
            barrier.wait()
            interposer.enforce(grant, device, device.layout.partitions[0])

        with ThreadPoolExecutor(len(grants)) as pool:
            list(pool.map(enforce, grants))
        found = interposer_in(tmp_path / str(attempt)).read_tenants(device.layout.partitions[0].id)
        assert set(found) == {grant.instance_id for grant in grants}


def test_tenants_that_start_side_by_side_get_units_of_their_own(
    tmp_path: Path, make_device: MakeDevice, make_grant: MakeGrant
) -> None:
    device = make_device(vendor=Vendor.AMD)
    masks = CuMasks(tmp_path / "masks.json")
    grants = [make_grant(device, id=f"g{n}", compute_ppm=PPM // 10) for n in range(10)]
    barrier = threading.Barrier(len(grants))

    def enforce(grant: Grant) -> str:
        barrier.wait()
        return masks.enforce(grant, device, device.layout.partitions[0]).environment["HSA_CU_MASK"]

    with ThreadPoolExecutor(len(grants)) as pool:
        given = list(pool.map(enforce, grants))
    assert len(set(given)) == len(grants)


# --- dmem ---


@pytest.fixture
def cgroups(tmp_path: Path) -> Path:
    root = tmp_path / "cgroup"
    root.mkdir()
    (root / "cgroup.controllers").write_text("cpu memory dmem\n")
    (root / "dmem.capacity").write_text("drm/0000:05:00.0/vram 206141652992\ndrm/0000:06:00.0/vram 206141652992\n")
    return root


def amd_at(make_device: MakeDevice, address: str, **more: Any) -> Device:
    return replace(make_device(vendor=Vendor.AMD, **more), id=address)


def test_dmem_writes_the_limit_of_the_right_card_and_reads_it_back(
    cgroups: Path, make_device: MakeDevice, make_grant: MakeGrant
) -> None:
    device = amd_at(make_device, "0000:06:00.0")
    limits = DmemLimits(root=cgroups)
    partition = device.layout.partitions[0]
    assert limits.offer(device, partition, exclusive=False).level is Level.DRIVER
    grant = make_grant(device, level=Level.DRIVER)
    assert limits.enforce(grant, device, partition).level is Level.DRIVER
    group = cgroups / "aimgpu" / "chat-0"
    assert limits.enforce(grant, device, partition).control_group == group
    assert (group / "dmem.max").read_text() == f"drm/0000:06:00.0/vram {10 * GIB}\n"
    for above in (cgroups, cgroups / "aimgpu"):
        assert (above / "cgroup.subtree_control").read_text() == "+dmem"


def test_dmem_finds_the_card_behind_a_render_node(
    tmp_path: Path, cgroups: Path, make_device: MakeDevice, make_grant: MakeGrant
) -> None:
    """A real card's id is its serial number; the kernel names cards by their PCI address."""
    link = tmp_path / "sys/class/drm/renderD129/device"
    link.parent.mkdir(parents=True)
    link.symlink_to("../../../0000:06:00.0")
    device = amd_at(make_device, "amd-00a1b2c3d4e5f607")
    partition = replace(device.layout.partitions[0], render_node="/dev/dri/renderD129")
    limits = DmemLimits(root=cgroups, sysfs=tmp_path / "sys")
    assert limits.offer(device, partition, exclusive=False).level is Level.DRIVER
    group = limits.enforce(make_grant(device), device, partition).control_group
    assert group is not None
    assert (group / "dmem.max").read_text().startswith("drm/0000:06:00.0/vram ")
    hidden = replace(partition, render_node="/dev/dri/renderD130")
    assert limits.offer(device, hidden, exclusive=False).level is None


def test_dmem_limits_change_while_the_tenant_runs(cgroups: Path, make_device: MakeDevice, make_grant: MakeGrant) -> None:
    device = amd_at(make_device, "0000:06:00.0")
    limits, grant = DmemLimits(root=cgroups), make_grant(device)
    assert limits.read_used_bytes(grant) is None
    limits.resize(grant, GIB)  # not held here: nothing to do
    limits.enforce(grant, device, device.layout.partitions[0])
    group = limits.group_of(grant)
    (group / "dmem.current").write_text(f"drm/0000:05:00.0/vram 0\ndrm/0000:06:00.0/vram {6 * GIB}\n")
    again = DmemLimits(root=cgroups)  # another daemon
    assert again.read_used_bytes(grant) == 6 * GIB
    with pytest.raises(ShareInUse, match="uses 6GiB"):
        again.resize(grant, 5 * GIB)
    again.resize(grant, 12 * GIB)
    assert (group / "dmem.max").read_text() == f"drm/0000:06:00.0/vram {12 * GIB}\n"


def test_with_dmem_the_interposer_goes_beside_it_unless_no_group_is_joined(
    tmp_path: Path, cgroups: Path, make_device: MakeDevice, make_grant: MakeGrant
) -> None:
    device = amd_at(make_device, "0000:06:00.0")
    dmem, interposer = DmemLimits(root=cgroups), interposer_in(tmp_path / "regions")
    chooser = MechanismChooser([HardwareBoundary(), dmem, interposer, EngineFlags()], partners={dmem.name: interposer})
    grant, partition = make_grant(device, level=Level.RUNTIME), device.layout.partitions[0]
    got = chooser.enforce(grant, device, partition)
    assert (got.level, got.mechanisms) == (Level.DRIVER, ("dmem", "interposer"))
    assert got.control_group == cgroups / "aimgpu" / "chat-0"
    assert "LD_PRELOAD" in got.environment
    held = replace(grant, mechanisms=got.mechanisms)
    (cgroups / "aimgpu" / "chat-0" / "dmem.current").write_text(f"drm/0000:06:00.0/vram {GIB}\n")
    assert chooser.read_used_bytes(held) == GIB
    chooser.resize(held, 3 * GIB)
    assert interposer.read_tenants(partition.id)["chat-0"].cap_bytes == 3 * GIB
    assert (cgroups / "aimgpu" / "chat-0" / "dmem.max").read_text() == f"drm/0000:06:00.0/vram {3 * GIB}\n"
    alone = chooser.enforce(grant, device, partition, grouped=False)
    assert (alone.level, alone.mechanism, alone.control_group) == (Level.RUNTIME, "interposer", None)
    with pytest.raises(NotAllowed):
        chooser.enforce(replace(grant, level=Level.DRIVER), device, partition, grouped=False)


def test_a_group_that_was_delegated_is_used(cgroups: Path, make_device: MakeDevice, make_grant: MakeGrant) -> None:
    parent = cgroups / "user.slice" / "ours"
    parent.mkdir(parents=True)
    device = amd_at(make_device, "0000:06:00.0")
    limits = DmemLimits(root=cgroups, parent=parent)
    got = limits.enforce(make_grant(device), device, device.layout.partitions[0])
    assert got.control_group == parent / "chat-0"
    assert (cgroups / "user.slice" / "cgroup.subtree_control").read_text() == "+dmem"


@pytest.mark.parametrize("missing", ["controllers", "card", "partitioned", "vendor", "no cgroup"])
def test_dmem_says_why_it_cannot_be_had(cgroups: Path, make_device: MakeDevice, make_grant: MakeGrant, missing: str) -> None:
    device = amd_at(
        make_device, "0000:09:00.0" if missing == "card" else "0000:05:00.0", partitions=8 if missing == "partitioned" else 1
    )
    if missing == "vendor":
        device = make_device()
    if missing == "controllers":
        (cgroups / "cgroup.controllers").write_text("cpu memory\n")
    if missing == "no cgroup":
        (cgroups / "cgroup.controllers").unlink()
    offer = DmemLimits(root=cgroups).offer(device, device.layout.partitions[0], exclusive=False)
    assert offer.level is None
    assert offer.reason
    if missing in ("controllers", "card"):
        with pytest.raises(HardwareUnavailable):
            DmemLimits(root=cgroups).enforce(make_grant(device), device, device.layout.partitions[0])


# --- MPS ---


class MpsStandIn:
    def __init__(self, reason: str | None = None) -> None:
        self.reason = reason
        self.started: list[str] = []

    def unavailable_reason(self) -> str | None:
        return self.reason

    def start(self, uuid: str) -> None:
        self.started.append(uuid)

    def tenant_environment(
        self, uuid: str, *, memory_bytes: int | None = None, compute_ppm: int | None = None, yields: bool = False
    ) -> Mapping[str, str]:
        return {"UUID": uuid, "LIMIT": f"{memory_bytes} {compute_ppm} {yields}"}


def test_mps_limits_come_from_a_daemon_that_was_started(make_device: MakeDevice, make_grant: MakeGrant) -> None:
    device, control = make_device(), MpsStandIn()
    grant = make_grant(device, level=Level.DRIVER, compute_ppm=400_000, priority=Priority.LOW)
    got = MechanismChooser([MpsMechanism(control), EngineFlags()]).enforce(grant, device, device.layout.partitions[0])
    assert (got.level, control.started) == (Level.DRIVER, ["GPU-0"])
    assert got.environment == {"UUID": "GPU-0", "LIMIT": f"{10 * GIB} 400000 True"}


def test_with_mps_the_gate_goes_beside_it(tmp_path: Path, make_device: MakeDevice, make_grant: MakeGrant) -> None:
    device, interposer = make_device(), interposer_in(tmp_path / "regions")
    mps = MpsMechanism(MpsStandIn())
    chooser = MechanismChooser([HardwareBoundary(), mps, interposer, EngineFlags()], partners={mps.name: interposer})
    got = chooser.enforce(make_grant(device), device, device.layout.partitions[0])
    assert (got.level, got.mechanisms) == (Level.DRIVER, ("mps", "interposer"))
    assert {"UUID", "LD_PRELOAD", "AIMGPU_REGION"} <= got.environment.keys()


def test_the_daemon_uses_mps_only_when_told_to(
    tmp_path: Path, make_device: MakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = make_device()
    for setting, expected in (("0", False), ("1", True)):
        monkeypatch.setenv("AIMGPU_MPS", setting)
        isolator = make_isolator(Home(tmp_path))
        assert isinstance(isolator, MechanismChooser)
        names = [choice.mechanism for choice in isolator.explain(device, device.layout.partitions[0], exclusive=False)]
        assert ("mps" in names) is expected
        assert "interposer" in names


def test_mps_says_why_it_cannot_be_had(make_device: MakeDevice) -> None:
    device = make_device()
    assert (
        MpsMechanism(MpsStandIn("not installed")).offer(device, device.layout.partitions[0], exclusive=False).reason
        == "not installed"
    )
    amd = make_device(vendor=Vendor.AMD)
    assert MpsMechanism(MpsStandIn()).offer(amd, amd.layout.partitions[0], exclusive=False).level is None
    assert MpsMechanism(MpsStandIn()).offer(device, device.layout.partitions[0], exclusive=True).level is None


def test_what_tenants_use_is_read_without_the_driver(tmp_path: Path, make_device: MakeDevice, make_grant: MakeGrant) -> None:
    device = make_device()
    interposer = interposer_in(tmp_path)
    grant = make_grant(device)
    assert interposer.read_tenants(grant.partition_id) == {}
    interposer.enforce(grant, device, device.layout.partitions[0])
    assert interposer.read_tenants(grant.partition_id)["chat-0"].cap_bytes == 10 * GIB
    (tmp_path / "gpu0_other-0.region").write_bytes(b"noise")
    assert interposer.read_tenants("gpu0/other-0") == {}
