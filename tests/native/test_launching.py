"""From a Grant to a process that is held: the mechanism's variables, the real launcher, the real library."""

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.isolation.conftest import build_device, build_grant

from aimgpu.domain import Level, Priority
from aimgpu.engines.launchers.process import ProcessLauncher
from aimgpu.engines.protocols import Command, PreparedImports
from aimgpu.isolation.interposer import Interposer
from aimgpu.isolation.watchdog import _maps_any, watch_instance
from aimgpu.units import MIB

PROGRAM = """
import ctypes, pathlib, sys, time
lib = ctypes.CDLL("libcuda.so.1")
taken = 0
while lib.cuMemAlloc_v2(ctypes.byref(ctypes.c_uint64()), ctypes.c_size_t(4 << 20)) == 0:
    taken += 4
pathlib.Path(sys.argv[1] + ".new").write_text(str(taken))
pathlib.Path(sys.argv[1] + ".new").rename(sys.argv[1])
time.sleep(120)
"""


@pytest.mark.parametrize("prepared", [False, True], ids=["plainly", "prepared"])
def test_a_launched_instance_is_held_and_seen(rig: Any, tmp_path: Path, *, prepared: bool) -> None:
    device = build_device()
    grant = replace(build_grant(device, level=Level.RUNTIME, priority=Priority.HIGH), memory_bytes=700 * MIB)
    interposer = Interposer(tmp_path / "regions", find_library=lambda: rig.tools.interposer, why_not=lambda: None)
    enforcement = interposer.enforce(grant, device, device.layout.partitions[0])
    environment = {
        **enforcement.environment,
        "LD_LIBRARY_PATH": str(rig.tools.folder),
        "AIMGPU_SOFTWARE_GPU": str(rig.state_path),
    }
    said = tmp_path / "taken"
    program = tmp_path / "program"
    program.write_text(f"#!{sys.executable}\n{PROGRAM}")
    program.chmod(0o755)
    preparation = PreparedImports(modules=("ctypes",)) if prepared else None
    command = Command(argv=(str(program), str(said)), environment=environment, preparation=preparation)
    launcher = ProcessLauncher(tmp_path / "home")
    launcher.fetch(command, tmp_path / "run", lambda _: None, lambda: None)
    assert rig.driver.used == 0
    process = launcher.start(grant.instance_id, command, tmp_path / "run")
    try:
        assert launcher.is_forked(process) == prepared
        deadline = time.monotonic() + 60
        while not said.exists():
            assert time.monotonic() < deadline, launcher.last_lines(tmp_path / "run")
            time.sleep(0.02)
        assert int(said.read_text()) == 80  # 700 MiB less 620 MiB for its context
        seen = watch_instance(grant.instance_id, process.pid, (grant,), interposer.regions())
        assert seen.interposed
        assert len(seen.attached) == 1
        (region,) = interposer.regions()
        assert _maps_any(Path(f"/proc/{next(iter(seen.attached))}"), (f" {region.path}",))
        assert seen.loose == frozenset()
        assert interposer.read_tenants(grant.partition_id)[grant.instance_id].used_bytes == 700 * MIB
    finally:
        launcher.stop(process, grace_seconds=5)
        launcher.end_prepared()
    (region,) = interposer.regions()
    region.reap()
    assert region.read_use()[0].used_bytes == 0
    interposer.release(grant)
    assert region.read_use() == ()
