import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from aimgpu.errors import AimGpuError, HardwareFailed, HardwareUnavailable, InvalidInput, PartitionBusy
from aimgpu.hardware.nvidia.mps import MpsDaemons, limit_environment
from aimgpu.hardware.nvidia.mps_processes import end, find_mps_processes, identify
from aimgpu.units import GIB, MIB

UUID = "GPU-00000000-0000-0000-0000-000000000001"
OTHER = "MIG-00000000-0000-0000-0000-000000000002"
TENANT = """
import os, socket, sys
connection = socket.socket(socket.AF_UNIX)
connection.connect(os.environ["CUDA_MPS_PIPE_DIRECTORY"] + "/control")
connection.sendall(f"client {os.getpid()}".encode())
connection.recv(100)
print("connected", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def root() -> Iterator[Path]:
    """Short: MPS keeps Unix sockets in it."""
    folder = Path(tempfile.mkdtemp(prefix="mps", dir="/tmp"))
    yield folder
    for pipe in folder.glob("run/*/pipe"):
        for process in find_mps_processes(pipe):
            end(process, grace_seconds=0.1)
    shutil.rmtree(folder)


@pytest.fixture
def daemons(root: Path) -> MpsDaemons:
    program = root / "bin" / "nvidia-cuda-mps-control"
    program.parent.mkdir()
    source = Path(__file__).with_name("mps_stand_in.py").read_text()
    for path in (program, program.with_name("nvidia-cuda-mps-server")):
        path.write_text(f"#!{sys.executable}\n{source}")
        path.chmod(0o755)
    return MpsDaemons(root / "run", program=str(program), wait_seconds=20)


@pytest.fixture
def start_tenant(daemons: MpsDaemons) -> Iterator[Callable[[], subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []

    def start() -> subprocess.Popen[str]:
        environment = {**os.environ, **daemons.tenant_environment(UUID, memory_bytes=GIB)}
        tenant = subprocess.Popen(
            [sys.executable, "-c", TENANT], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        started.append(tenant)
        assert tenant.stdout is not None
        assert tenant.stdout.readline() == "connected\n"
        return tenant

    yield start
    for tenant in started:
        tenant.kill()
        tenant.communicate()


def pipe_of(root: Path, uuid: str = UUID) -> Path:
    return root / "run" / uuid / "pipe"


def daemon_pid(root: Path) -> int:
    return int((pipe_of(root) / "nvidia-cuda-mps-control.pid").read_text())


def wait_gone(pid: int) -> None:
    deadline = time.monotonic() + 30
    while identify(pid) is not None and time.monotonic() < deadline:
        time.sleep(0.01)


def test_a_daemon_runs_in_directories_of_its_own_for_one_device(daemons: MpsDaemons, root: Path) -> None:
    daemons.start(UUID)
    assert daemons.running() == (UUID,)
    environ = Path(f"/proc/{daemon_pid(root)}/environ").read_bytes().split(b"\0")
    assert f"CUDA_VISIBLE_DEVICES={UUID}".encode() in environ
    assert f"CUDA_MPS_PIPE_DIRECTORY={pipe_of(root)}".encode() in environ
    assert pipe_of(root).stat().st_mode & 0o077 == 0
    assert (root / "run" / UUID / "log" / "control.log").exists()


def test_starting_twice_keeps_the_daemon_and_two_devices_have_two(daemons: MpsDaemons, root: Path) -> None:
    daemons.start(UUID)
    first = daemon_pid(root)
    daemons.start(UUID)
    daemons.start(OTHER)
    assert daemon_pid(root) == first
    assert daemons.running() == (UUID, OTHER)


def test_stopping_leaves_no_process_and_no_file(daemons: MpsDaemons, root: Path) -> None:
    daemons.start(UUID)
    pid = daemon_pid(root)
    daemons.stop(UUID)
    assert identify(pid) is None
    assert not (root / "run" / UUID).exists()
    daemons.stop(UUID)
    assert daemons.running() == ()


def test_a_tenant_is_given_the_pipe_and_its_limits(daemons: MpsDaemons, root: Path) -> None:
    daemons.start(UUID)
    environment = daemons.tenant_environment(UUID, memory_bytes=3 * GIB + 5, compute_ppm=405_000, yields=True)
    assert environment == {
        "CUDA_MPS_PIPE_DIRECTORY": str(pipe_of(root)),
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=3072M",
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "40",
        "CUDA_MPS_CLIENT_PRIORITY": "1",
    }


def test_without_a_daemon_that_answers_no_tenant_gets_an_environment(daemons: MpsDaemons, root: Path) -> None:
    with pytest.raises(HardwareUnavailable, match="does not answer"):
        daemons.tenant_environment(UUID)
    daemons.start(UUID)
    pid = daemon_pid(root)
    os.kill(pid, signal.SIGKILL)
    wait_gone(pid)
    with pytest.raises(HardwareUnavailable, match="does not answer") as caught:
        daemons.tenant_environment(UUID)
    assert "without limits" in (caught.value.hint or "")


def test_tenants_are_known_by_pid_and_keep_their_daemon(
    daemons: MpsDaemons, start_tenant: Callable[[], subprocess.Popen[str]]
) -> None:
    daemons.start(UUID)
    tenants = [start_tenant(), start_tenant()]
    assert daemons.tenants(UUID) == tuple(sorted(tenant.pid for tenant in tenants))
    with pytest.raises(PartitionBusy, match=f"pid {tenants[0].pid}"):
        daemons.stop(UUID)
    assert daemons.running() == (UUID,)


def test_force_takes_the_daemon_and_its_server_from_under_the_tenants(
    daemons: MpsDaemons, root: Path, start_tenant: Callable[[], subprocess.Popen[str]]
) -> None:
    daemons.start(UUID)
    start_tenant()
    pipe = pipe_of(root)
    assert len(find_mps_processes(pipe)) == 2
    daemons.stop(UUID, force=True)
    assert find_mps_processes(pipe) == ()


def test_after_a_crash_what_is_wanted_is_adopted_and_the_rest_is_ended(daemons: MpsDaemons, root: Path) -> None:
    daemons.start(UUID)
    daemons.start(OTHER)
    survivor = MpsDaemons(root / "run", program=str(root / "bin/nvidia-cuda-mps-control"))
    pid = daemon_pid(root)
    assert survivor.recover({UUID}) == (OTHER,)
    assert survivor.running() == (UUID,)
    assert daemon_pid(root) == pid
    assert find_mps_processes(pipe_of(root, OTHER)) == ()


def test_what_is_in_use_by_grant_or_by_tenant_stays_and_the_rest_is_ended(
    daemons: MpsDaemons, start_tenant: Callable[[], subprocess.Popen[str]], root: Path
) -> None:
    assert not daemons.left_over()
    daemons.start(UUID)
    daemons.start(OTHER)
    tenant = start_tenant()
    assert daemons.left_over()
    assert daemons.end_unused(lambda uuid: uuid == OTHER) == ()
    assert daemons.end_unused(lambda _: False) == (OTHER,)
    tenant.kill()
    tenant.communicate()
    pid = daemon_pid(root)
    assert daemons.end_unused(lambda _: False) == (UUID,)
    assert identify(pid) is None
    assert not daemons.left_over()


def test_a_name_that_a_crash_cut_off_harms_nobody(daemons: MpsDaemons, root: Path) -> None:
    daemons.start(UUID)
    cut_off = root / "run" / OTHER
    cut_off.mkdir()
    (cut_off / "uuid").write_text("")
    assert daemons.recover([UUID]) == ()
    assert daemons.running() == (UUID,)
    daemons.start(OTHER)
    assert set(daemons.running()) == {UUID, OTHER}


def test_a_crash_before_the_daemon_was_noted_leaves_nothing_behind(daemons: MpsDaemons, root: Path) -> None:
    daemons.start(UUID)
    pid = daemon_pid(root)
    (root / "run" / UUID / "daemon.json").unlink()
    assert daemons.running() == ()
    assert daemons.recover(()) == (UUID,)
    assert identify(pid) is None


def test_a_server_that_lost_its_daemon_is_left_to_its_tenants_and_swept_after_them(
    daemons: MpsDaemons, root: Path, start_tenant: Callable[[], subprocess.Popen[str]]
) -> None:
    daemons.start(UUID)
    tenant = start_tenant()
    pid = daemon_pid(root)
    os.kill(pid, signal.SIGKILL)
    wait_gone(pid)
    assert daemons.recover({UUID}) == ()
    with pytest.raises(PartitionBusy):
        daemons.start(UUID)
    tenant.kill()
    tenant.communicate()
    daemons.start(UUID)
    assert daemons.running() == (UUID,)
    assert len(find_mps_processes(pipe_of(root))) == 1


def test_a_pid_that_another_process_has_by_now_is_not_touched(daemons: MpsDaemons, root: Path) -> None:
    """The note names a live process of ours, but not this start of it."""
    daemons.start(UUID)
    note = root / "run" / UUID / "daemon.json"
    me = identify(os.getpid())
    assert me is not None
    note.write_text(json.dumps({"pid": me.pid, "start_ticks": me.start_ticks - 1, "boot_id": me.boot_id}))
    assert daemons.running() == ()
    assert end(replace(me, start_ticks=me.start_ticks - 1), grace_seconds=1)
    daemons.stop(UUID)
    assert find_mps_processes(pipe_of(root)) == ()


def test_a_note_that_was_cut_off_is_no_daemon(daemons: MpsDaemons, root: Path) -> None:
    daemons.start(UUID)
    (root / "run" / UUID / "daemon.json").write_text('{"pid": 1')
    assert daemons.running() == ()
    daemons.start(UUID)
    assert daemons.running() == (UUID,)


def test_a_daemon_that_refuses_to_start_is_an_error_with_its_words(
    daemons: MpsDaemons, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN_FAULT", "refuse")
    with pytest.raises(HardwareUnavailable, match="already running"):
        daemons.start(UUID)
    assert daemons.running() == ()


@pytest.mark.parametrize(
    ("fault", "seconds", "error"),
    [("hang", 0.5, HardwareFailed), ("deaf", 4.0, HardwareUnavailable)],  # the second has to start within its bound
    ids=["hang", "deaf"],
)
def test_a_daemon_that_hangs_is_given_up_after_a_bounded_wait(  # noqa: PLR0913 - what a case has
    root: Path, daemons: MpsDaemons, monkeypatch: pytest.MonkeyPatch, fault: str, *, seconds: float, error: type[AimGpuError]
) -> None:
    monkeypatch.setenv("STAND_IN_FAULT", fault)
    impatient = MpsDaemons(root / "run", program=str(root / "bin/nvidia-cuda-mps-control"), wait_seconds=seconds)
    with pytest.raises(error):
        impatient.start(UUID)
    assert find_mps_processes(pipe_of(root)) == ()


def test_a_daemon_that_ignores_quit_and_sigterm_is_killed(
    root: Path, daemons: MpsDaemons, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN_FAULT", "undying")
    daemons.start(UUID)
    impatient = MpsDaemons(root / "run", program=str(root / "bin/nvidia-cuda-mps-control"), wait_seconds=2)
    impatient.stop(UUID)
    assert find_mps_processes(pipe_of(root)) == ()


def test_without_the_program_there_is_no_mps_and_it_is_said(root: Path) -> None:
    daemons = MpsDaemons(root / "run", program="nvidia-cuda-mps-control-that-is-not-there")
    assert daemons.unavailable_reason() is not None
    with pytest.raises(HardwareUnavailable, match="not installed"):
        daemons.start(UUID)


def test_a_directory_too_long_for_a_socket_is_refused_before_anything_starts(root: Path) -> None:
    with pytest.raises(InvalidInput, match="too long"):
        MpsDaemons(root / ("x" * 60), program="true").start(UUID)


@pytest.mark.parametrize(("memory_bytes", "compute_ppm"), [(MIB - 1, None), (None, 9_999)])
def test_limits_that_mps_cannot_keep_are_refused(memory_bytes: int | None, compute_ppm: int | None) -> None:
    with pytest.raises(InvalidInput):
        limit_environment(memory_bytes, compute_ppm)


def test_no_limits_are_no_variables() -> None:
    assert limit_environment(None, None) == {}
