"""What the watchdog may conclude from any list of processes, and the control groups that the kernel's limits live in."""

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples
from tests.isolation.conftest import build_device, build_grant

from aimgpu.domain import Device, DeviceUsage, ForeignProcess, Grant, Level, Vendor, WatchdogPolicy
from aimgpu.errors import HardwareUnavailable, NotAllowed
from aimgpu.isolation.dmem import DmemLimits, find_cgroup_root
from aimgpu.isolation.watchdog import DEFAULT_TOLERANCE_BYTES, Violation, Watchdog, Watched, judge
from aimgpu.units import GIB

DEVICE = build_device()
SIZES = st.one_of(st.none(), st.integers(0, 40 * GIB))
PIDS = st.integers(1, 12)


@st.composite
def usages(draw: st.DrawFn) -> DeviceUsage:
    found = draw(st.dictionaries(PIDS, SIZES, max_size=8))
    return DeviceUsage(
        device_id=draw(st.sampled_from(["gpu0", "gpu1"])),
        used_bytes=None,
        used_bytes_by_partition={},
        utilization_percent=None,
        processes=tuple(ForeignProcess(pid=pid, name=None, memory_bytes=size) for pid, size in found.items()),
    )


@st.composite
def instances(draw: st.DrawFn) -> list[Watched]:
    """Processes belong to one instance at most, as they do."""
    owners = draw(st.dictionaries(PIDS, st.integers(0, 2), max_size=8))
    made = []
    for number in range(3):
        pids = frozenset(pid for pid, owner in owners.items() if owner == number)
        attached = frozenset(draw(st.sets(st.sampled_from(sorted(pids))))) if pids else frozenset[int]()
        grant = build_grant(
            DEVICE,
            id=f"g{number}",
            instance_id=f"i{number}",
            memory_bytes=draw(st.integers(1, 20 * GIB)),
            exclusive=draw(st.booleans()),
            device_id=draw(st.sampled_from(["gpu0", "gpu1"])),
        )
        made.append(
            Watched(
                instance_id=f"i{number}",
                grants=(grant,),
                pids=pids,
                policy=draw(st.sampled_from(WatchdogPolicy)),
                demanded=draw(st.booleans()),
                interposed=draw(st.booleans()),
                attached=attached,
                loose=frozenset(draw(st.sets(st.sampled_from(sorted(pids - attached))))) if pids - attached else frozenset(),
            )
        )
    return made


@settings(max_examples=examples(50))
@given(st.lists(usages(), max_size=2, unique_by=lambda usage: usage.device_id), instances(), st.frozensets(PIDS))
def test_every_judgement_is_about_what_was_measured(
    found: list[DeviceUsage], watched: list[Watched], helpers: frozenset[int]
) -> None:
    by_id = {one.instance_id: one for one in watched}
    ours = helpers.union(*(one.pids for one in watched))
    for verdict in judge(found, watched, helpers=helpers):
        usage = next(one for one in found if one.device_id == verdict.device_id)
        there = {process.pid: process.memory_bytes or 0 for process in usage.processes}
        if verdict.finding is Violation.FOREIGN:
            assert (verdict.instance_id, verdict.action, verdict.level) == (None, None, None)
            assert not verdict.pids & ours
            continue
        instance = by_id[str(verdict.instance_id)]
        assert verdict.pids <= instance.pids
        granted = sum(grant.memory_bytes for grant in instance.grants if grant.device_id == usage.device_id)
        if verdict.finding is Violation.OVER:
            assert sum(there[pid] for pid in verdict.pids) > granted + DEFAULT_TOLERANCE_BYTES
            assert verdict.action is instance.policy
        else:
            assert instance.interposed
            assert not verdict.pids & instance.attached
            assert verdict.level is Level.ADVISORY
            assert not instance.demanded or verdict.action in (WatchdogPolicy.STOP, WatchdogPolicy.RESTART)


@settings(max_examples=examples(30))
@given(usages(), instances())
def test_every_stranger_is_named_once_and_nobody_else_is(usage: DeviceUsage, watched: list[Watched]) -> None:
    ours = frozenset[int]().union(*(one.pids for one in watched))
    strangers = [verdict for verdict in judge([usage], watched) if verdict.finding is Violation.FOREIGN]
    assert sorted(pid for verdict in strangers for pid in verdict.pids) == sorted(
        process.pid for process in usage.processes if process.pid not in ours
    )
    assert judge([usage], watched, helpers=frozenset(range(13))) == tuple(
        verdict for verdict in judge([usage], watched) if verdict.finding is not Violation.FOREIGN
    )


@pytest.mark.parametrize("over", [-1, 0, 1])
def test_the_tolerance_is_exact(over: int) -> None:
    grant = build_grant(DEVICE, memory_bytes=GIB)
    used = GIB + DEFAULT_TOLERANCE_BYTES + over
    usage = DeviceUsage(
        device_id="gpu0",
        used_bytes=used,
        used_bytes_by_partition={},
        utilization_percent=None,
        processes=(ForeignProcess(pid=7, name="a", memory_bytes=used),),
    )
    watched = Watched(instance_id="chat-0", grants=(grant,), pids=frozenset({7}), policy=WatchdogPolicy.STOP)
    assert bool(judge([usage], [watched])) == (over > 0)


def test_a_watchdog_acts_on_each_instance_by_its_own_policy_and_never_on_strangers() -> None:
    usage = DeviceUsage(
        device_id="gpu0",
        used_bytes=None,
        used_bytes_by_partition={},
        utilization_percent=None,
        processes=tuple(ForeignProcess(pid=pid, name="a", memory_bytes=30 * GIB) for pid in (1, 2, 3, 4)),
    )
    policies = {1: WatchdogPolicy.WARN, 2: WatchdogPolicy.STOP, 3: WatchdogPolicy.RESTART}
    watched = [
        Watched(instance_id=f"i{pid}", grants=(build_grant(DEVICE, id=f"g{pid}"),), pids=frozenset({pid}), policy=policy)
        for pid, policy in policies.items()
    ]
    acts: list[tuple[str, WatchdogPolicy]] = []
    dog = Watchdog(lambda: [usage], lambda: watched, lambda *what: acts.append(what))
    assert len(dog.look()) == 4
    assert acts == [("i2", WatchdogPolicy.STOP), ("i3", WatchdogPolicy.RESTART)]


# --- control groups ---


@pytest.fixture
def amd() -> Device:
    return replace(build_device(vendor=Vendor.AMD), id="0000:06:00.0")


@pytest.fixture
def cgroups(tmp_path: Path) -> Path:
    root = tmp_path / "cgroup"
    root.mkdir()
    (root / "cgroup.controllers").write_text("cpu memory dmem\n")
    (root / "dmem.capacity").write_text("drm/0000:06:00.0/vram 206141652992\n")
    return root


def held(limits: DmemLimits, amd: Device, **changes: object) -> Grant:
    grant = build_grant(amd, **changes)  # type: ignore[arg-type]
    limits.enforce(grant, amd, amd.layout.partitions[0])
    return grant


@pytest.mark.parametrize(
    "lines",
    [
        "",
        "cgroup2",
        "none /sys/fs/cgroup tmpfs rw 0 0",
        "cgroup /sys/fs/cgroup/memory cgroup rw 0 0",
        "a b",
        "\udcff\udcfe /x y",
    ],
    ids=repr,
)
def test_mounts_without_cgroup_v2_lead_to_the_usual_place(tmp_path: Path, lines: str) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_bytes(lines.encode(errors="surrogateescape"))
    assert find_cgroup_root(mounts) == find_cgroup_root(tmp_path / "absent") == Path("/sys/fs/cgroup")


def test_a_mount_with_a_name_that_is_no_text_hides_no_control_group(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_bytes(b"//server/\xe4\xf6 /mnt/\xfc cifs rw 0 0\ncgroup2 /run/cgroup2 cgroup2 rw 0 0\n")
    assert find_cgroup_root(mounts) == Path("/run/cgroup2")


@pytest.mark.parametrize(
    ("current", "used"),
    [
        ("drm/0000:06:00.0/vram 123\n", 123),
        ("drm/0000:06:00.0/vram max\n", 0),
        ("drm/0000:05:00.0/vram 9\n", 0),
        ("drm/0000:06:00.0/vram\n", 0),
        ("drm/0000:06:00.0/vram 1 2\n", 0),
        ("", 0),
    ],
)
def test_use_is_that_of_the_grants_own_gpu(cgroups: Path, amd: Device, current: str, used: int) -> None:
    limits = DmemLimits(root=cgroups)
    grant = held(limits, amd)
    (limits.group_of(grant) / "dmem.current").write_text(current)
    assert limits.read_used_bytes(grant) == used


def test_a_group_whose_files_are_gone_is_said_by_the_instance_and_not_read_as_nothing(cgroups: Path, amd: Device) -> None:
    limits = DmemLimits(root=cgroups)
    grant = held(limits, amd)
    for act in (limits.read_used_bytes, lambda one: limits.resize(one, GIB)):
        with pytest.raises(HardwareUnavailable, match="chat-0"):
            act(grant)
    (limits.group_of(grant) / "dmem.max").write_text("drm/a/vram 1\ndrm/b/vram 2\n")
    (limits.group_of(grant) / "dmem.current").write_text("")
    with pytest.raises(HardwareUnavailable, match="2 devices") as caught:
        DmemLimits(root=cgroups).read_used_bytes(grant)  # another daemon does not know which of them is the grant's
    assert caught.value.hint


def test_a_limit_that_the_kernel_did_not_take_is_no_limit(cgroups: Path, amd: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Path.write_text

    def write(path: Path, data: str, *arguments: object) -> int:
        return real(path, "drm/0000:06:00.0/vram max\n" if path.name == "dmem.max" else data)

    monkeypatch.setattr(Path, "write_text", write)
    with pytest.raises(HardwareUnavailable, match="reads 'max'"):
        held(DmemLimits(root=cgroups), amd)


@pytest.mark.parametrize(("kept", "holds"), [(0, True), (4095, True), (4096, False), (-1, False)])
def test_a_limit_may_be_rounded_down_to_a_page_and_no_further(
    cgroups: Path, amd: Device, monkeypatch: pytest.MonkeyPatch, kept: int, *, holds: bool
) -> None:
    real = Path.write_text

    def write(path: Path, data: str, *arguments: object) -> int:
        name, _, size = data.strip().partition(" ")
        return real(path, f"{name} {int(size) - kept}\n" if path.name == "dmem.max" else data)

    monkeypatch.setattr(Path, "write_text", write)
    if holds:
        held(DmemLimits(root=cgroups), amd)
        return
    with pytest.raises(HardwareUnavailable, match="was written"):
        held(DmemLimits(root=cgroups), amd)


def test_a_kernel_that_may_not_be_asked_is_an_error_with_how_to_be_allowed(
    cgroups: Path, amd: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, *arguments: object, **more: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(NotAllowed, match="may not write") as caught:
        held(DmemLimits(root=cgroups), amd)
    assert "AIMGPU_CGROUP" in str(caught.value.hint)


@pytest.mark.parametrize("name", ["../escape", "a/b", "a b", "\x00", "é", "..."])
def test_a_group_lies_in_its_parent_whatever_the_instance_is_called(cgroups: Path, amd: Device, name: str) -> None:
    limits = DmemLimits(root=cgroups)
    group = limits.group_of(build_grant(amd, instance_id=name))
    assert group.parent == cgroups / "aimgpu"


def test_releasing_a_group_twice_or_one_with_files_left_is_no_error(cgroups: Path, amd: Device) -> None:
    limits = DmemLimits(root=cgroups)
    grant = held(limits, amd)
    limits.release(grant)  # has files of ours in it, which a real group cannot have: it stays
    for file in limits.group_of(grant).iterdir():
        file.unlink()
    limits.release(grant)
    limits.release(grant)
    assert not limits.group_of(grant).exists()
    assert limits.read_used_bytes(grant) is None


def test_of_two_cards_of_one_address_none_is_taken(cgroups: Path, amd: Device) -> None:
    (cgroups / "dmem.capacity").write_text("drm/0000:06:00.0/vram 1\nother/0000:06:00.0/vram 2\n")
    offer = DmemLimits(root=cgroups).offer(amd, amd.layout.partitions[0], exclusive=False)
    assert offer.level is None
    assert "does not know" in str(offer.reason)
