"""From a Grant to a process in its control group: in a folder that stands in for cgroup v2, and in a real one."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from aimgpu.domain import Device, Grant, Level, Vendor
from aimgpu.engines.launchers.process import ProcessLauncher
from aimgpu.engines.protocols import Command
from aimgpu.errors import EngineFailed
from aimgpu.isolation.dmem import DmemLimits, find_cgroup_root

MakeDevice = Callable[..., Device]
MakeGrant = Callable[..., Grant]
# Says which group it and a child of its own are in, as the first thing that it does.
PROGRAM = """
import pathlib, subprocess, sys
child = subprocess.run(["cat", "/proc/self/cgroup"], capture_output=True, text=True).stdout
pathlib.Path("said.new").write_text(pathlib.Path("/proc/self/cgroup").read_text() + child)
pathlib.Path("said.new").rename("said")
sys.stdin.read()
subprocess.run(["sleep", "120"])
"""


def wait_for(path: Path) -> str:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not come"
        time.sleep(0.01)
    return path.read_text()


def test_the_launcher_writes_the_pid_before_the_engine_runs(tmp_path: Path) -> None:
    group = tmp_path / "group"
    group.mkdir()
    launcher = ProcessLauncher(tmp_path / "home")
    procs = str(group / "cgroup.procs")
    code = f"import pathlib; said = pathlib.Path('said.new'); said.write_text(pathlib.Path({procs!r}).read_text())"
    code += "; said.rename('said')"
    command = Command(argv=(sys.executable, "-c", f"{code}; import time; time.sleep(120)"), control_group=group)
    process = launcher.start("chat-0", command, tmp_path / "run")
    try:
        assert wait_for(tmp_path / "run" / "said") == str(process.pid)
    finally:
        launcher.stop(process, grace_seconds=5)


def test_an_engine_that_cannot_be_put_into_its_group_never_runs(tmp_path: Path) -> None:
    launcher = ProcessLauncher(tmp_path / "home")
    command = Command(argv=(sys.executable, "-c", "open('ran', 'w')"), control_group=tmp_path / "no such group")
    with pytest.raises(EngineFailed, match="cannot put a process into"):
        launcher.start("chat-0", command, tmp_path / "run")
    deadline = time.monotonic() + 60
    while launcher.find_started():  # the shell that waited for the word ends without it
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert not (tmp_path / "run" / "ran").exists()


@pytest.mark.parametrize(
    ("mounts", "root"),
    [
        ("cgroup2 /sys/fs/cgroup cgroup2 rw 0 0\n", "/sys/fs/cgroup"),
        ("cgroup /sys/fs/cgroup/cpu cgroup rw 0 0\ncgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0\n", "/sys/fs/cgroup/unified"),
        ("proc /proc proc rw 0 0\n", "/sys/fs/cgroup"),
    ],
)
def test_cgroup_v2_is_found_where_it_is_mounted(tmp_path: Path, mounts: str, root: str) -> None:
    (tmp_path / "mounts").write_text(mounts)
    assert find_cgroup_root(tmp_path / "mounts") == Path(root)


class WithoutController(DmemLimits):
    """Groups for real, on a kernel whose cgroup v2 has no dmem: what needs the controller is left out."""

    def _make(self, group: Path) -> None:
        self._parent.mkdir(exist_ok=True)
        group.mkdir(exist_ok=True)

    def _missing(self) -> str | None:
        return None

    def _region_of(self, device: Device, partition: object) -> str | None:
        return f"drm/{device.id}/vram"

    def _limit(self, group: Path, region: str, memory_bytes: int) -> None:
        assert group.is_dir()
        assert region
        assert memory_bytes


@pytest.fixture
def parent() -> Iterator[Path]:
    root = find_cgroup_root()
    if not (root / "cgroup.procs").exists() or not os.access(root, os.W_OK):
        pytest.skip("no cgroup v2 that may be written")
    folder = root / f"aimgpu-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError:
        pytest.skip("may not make a control group")
    yield folder
    folder.rmdir()


def test_in_a_real_cgroup_the_engine_and_its_children_are_in_the_group_from_the_start(
    tmp_path: Path, parent: Path, make_device: MakeDevice, make_grant: MakeGrant
) -> None:
    device = replace(make_device(vendor=Vendor.AMD), id="0000:06:00.0")
    grant = make_grant(device, level=Level.DRIVER)
    limits = WithoutController(root=find_cgroup_root(), parent=parent)
    group = limits.enforce(grant, device, device.layout.partitions[0]).control_group
    assert group == parent / "chat-0"
    launcher = ProcessLauncher(tmp_path / "home")
    command = Command(argv=(sys.executable, "-c", PROGRAM), control_group=group)
    process = launcher.start(grant.instance_id, command, tmp_path / "run")
    try:
        said = [line for line in wait_for(tmp_path / "run" / "said").splitlines() if line.startswith("0::")]
        assert said == [f"0::/{parent.name}/chat-0"] * 2
        assert str(process.pid) in (group / "cgroup.procs").read_text().split()
        limits.release(grant)  # its processes live: the group stays
        assert group.exists()
    finally:
        launcher.stop(process, grace_seconds=5)
    limits.release(grant)
    assert not group.exists()
    limits.release(grant)  # safe to call twice
