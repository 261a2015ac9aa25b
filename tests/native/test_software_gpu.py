"""The software GPU: what its own meter shows, and what it does when a process ends."""

import signal
from typing import Any

from tests.native.conftest import Puppet

from aimgpu.hardware.software.state import VARIABLE, SoftwareGpu
from aimgpu.units import GIB, MIB


def test_what_a_killed_process_held_is_free_for_the_next_one(rig: Any) -> None:
    rig.driver.device_bytes = 1 * GIB
    rig.admit(cap_bytes=1 * GIB)
    first = Puppet(rig, "tenant")
    assert first.do("allocate 900") == 0
    first.process.send_signal(signal.SIGKILL)
    first.process.wait()
    gpu = SoftwareGpu(rig.state_path)
    assert gpu.read_used_bytes() == (0,)
    rig.region.reap()
    second = Puppet(rig, "tenant")
    assert second.do("allocate 900") == 0
    (process,) = gpu.read_processes()
    assert process.pid == second.pid
    assert process.used_bytes == {0: 900 * MIB}
    assert rig.driver.used == rig.used() == 900 * MIB
    gpu.close()


def test_a_process_that_dies_while_it_counts_leaves_the_sums_right(rig: Any) -> None:
    """The word that says who counts names a process that is gone: the next one takes over and counts again."""
    rig.admit(cap_bytes=1 * GIB)
    first = Puppet(rig, "tenant")
    assert first.do("allocate 100") == 0
    second = Puppet(rig, "tenant")
    assert second.do("allocate 10") == 0
    slot = next(at for at, one in enumerate(rig.driver.processes) if one.pid == first.pid)
    first.process.kill()
    first.process.wait()
    rig.driver.counting = slot + 1
    rig.driver.used_on[0] += 77
    rig.region.reap()
    assert second.do("allocate 10") == 0
    third = Puppet(rig, "tenant")
    assert third.do("allocate 10") == 0
    assert rig.driver.used == rig.driver.used_on[0] == 30 * MIB


def test_devices_may_differ_in_size_and_each_refuses_on_its_own(rig: Any) -> None:
    gpu = SoftwareGpu(rig.state_path, device_bytes=[100 * MIB, 50 * MIB])
    rig.admit(cap_bytes=1 * GIB)
    for device, most in ((0, 100), (1, 50)):
        puppet = Puppet(rig, "tenant", CUDA_VISIBLE_DEVICES=str(device), AIMGPU_REGION="")
        puppet.do("primary 0")
        assert puppet.do(f"allocate {most + 1}") == 2
        assert puppet.do(f"allocate {most}") == 0
    assert gpu.read_used_bytes() == (100 * MIB, 50 * MIB)
    gpu.close()


def test_the_meter_is_a_file_that_the_interposer_does_not_know(rig: Any) -> None:
    """So what is read there was written by the driver alone."""
    library = rig.tools.interposer.read_bytes()
    assert b"AIMGPU_REGION" in library
    assert VARIABLE.encode() not in library
