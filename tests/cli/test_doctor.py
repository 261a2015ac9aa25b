import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from tests.hardware.emulation.kernel import EmulatedKernel, TreeSysfs

from aimgpu.cli.doctor_checks import (
    Check,
    CheckStatus,
    count_problems,
    find_daemon,
    find_devices,
    find_engines,
    find_folder,
    find_gpus,
    find_newer_limits,
    find_port,
    find_troubles,
)
from aimgpu.cli.main import run_command
from aimgpu.cli.views.gpu_names import names_of
from aimgpu.domain import Device
from aimgpu.engines.protocols import Availability
from aimgpu.errors import HardwareUnavailable
from aimgpu.hardware.amd import AmdHardware, find_amd_smi
from aimgpu.hardware.nvidia import NvidiaHardware
from aimgpu.hardware.nvidia.nvml import LIBRARY_NOT_FOUND, Nvml, NvmlFailure
from aimgpu.hardware.simulated import SimulatedHardware
from aimgpu.home import Home

if TYPE_CHECKING:
    from tests.cli.conftest import CommandLine

_NOBODY = 65534


def add_gpu(root: Path, address: str, vendor: str, kind: str) -> None:
    folder = root / "sys/bus/pci/devices" / address
    folder.mkdir(parents=True)
    (folder / "vendor").write_text(f"{vendor}\n")
    (folder / "class").write_text(f"{kind}\n")


def texts(findings: list[Check], verdict: CheckStatus) -> str:
    return "\n".join(f"{finding.text} -> {finding.action}" for finding in findings if finding.verdict is verdict)


def test_a_machine_without_gpus_is_told_about_simulation(tmp_path: Path) -> None:
    add_gpu(tmp_path, "0000:00:02.0", "0x8086", "0x030000")
    add_gpu(tmp_path, "0000:01:00.1", "0x10de", "0x040300")  # the sound device of a graphics card
    (finding,) = find_gpus(tmp_path)
    assert finding.verdict is CheckStatus.NOTE
    assert "simulates" in (finding.action or "")


def test_an_amd_gpu_without_its_driver_says_how_to_load_it() -> None:
    kernel = EmulatedKernel(["MI300X"])
    kernel.change(driver_loaded=False)
    assert "modprobe amdgpu" in texts(list(find_troubles([AmdHardware(TreeSysfs(kernel))])), CheckStatus.PROBLEM)


def test_an_amd_gpu_with_all_it_needs_is_well(tmp_path: Path) -> None:
    add_gpu(tmp_path, "0000:01:00.0", "0x1002", "0x120000")
    (tmp_path / "sys/module/amdgpu").mkdir(parents=True)
    (tmp_path / "sys/module/amdgpu/version").write_text("6.12.12\n")
    findings = list(find_gpus(tmp_path))
    assert count_problems(findings) == 0
    assert "amdgpu 6.12.12" in texts(findings, CheckStatus.OK)


def test_an_nvidia_gpu_in_a_container_without_its_devices_is_a_problem(tmp_path: Path) -> None:
    add_gpu(tmp_path, "0000:01:00.0", "0x10de", "0x030200")
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/version").write_text("NVRM version: NVIDIA UNIX 580.1\nGCC version: 12\n")
    assert "NVIDIA UNIX 580.1" in texts(list(find_gpus(tmp_path)), CheckStatus.OK)
    hardware = NvidiaHardware(Nvml(no_library), pci=tmp_path / "sys/bus/pci/devices", dev=tmp_path / "dev")
    assert "container toolkit" in texts(list(find_troubles([hardware])), CheckStatus.PROBLEM)


def no_library() -> None:
    raise NvmlFailure("nvmlInit", LIBRARY_NOT_FOUND, "libnvidia-ml.so.1 is not here")


def test_what_is_only_worth_knowing_is_no_problem() -> None:
    hardware = AmdHardware(TreeSysfs(EmulatedKernel(["MI300X"])))
    findings = [finding for finding in find_troubles([hardware]) if "amd-smi" in finding.text]
    assert [finding.verdict for finding in findings] == ([] if find_amd_smi() else [CheckStatus.NOTE])


class BrokenReader:
    """A driver whose library does not load."""

    def read_devices(self) -> tuple[Device, ...]:
        raise HardwareUnavailable("NVML does not answer", hint="Reload the driver.")


def test_devices_are_named_as_read_and_a_backend_that_cannot_read_is_a_problem(tmp_path: Path) -> None:
    simulated = SimulatedHardware([("MI300X", 1)], tmp_path / "gpus.json")
    findings = list(find_devices([simulated, BrokenReader()], names_of(simulated.read_devices())))
    found = texts(findings, CheckStatus.OK)
    assert "gpu0: " in found
    assert "layout SPX/NPS1 (sim-mi300x-0)" in found
    assert "NVML does not answer -> Reload the driver." in texts(findings, CheckStatus.PROBLEM)


def test_limits_of_newer_nvidia_drivers_are_named_and_said_to_be_unused() -> None:
    def missing(name: str) -> object:
        raise OSError(name)

    newer = SimpleNamespace(nvmlDeviceSetMemoryLimits_v1=object())
    (found,) = find_newer_limits(lambda _: newer)
    assert found.verdict is CheckStatus.NOTE
    assert "nvmlDeviceSetMemoryLimits_v1, MPS v3); not used" in found.text
    assert list(find_newer_limits(lambda _: SimpleNamespace())) == []
    assert list(find_newer_limits(missing)) == []


def test_no_engine_at_all_is_a_problem_and_one_is_enough() -> None:
    missing = Availability(available=False, reason="not installed", hint="pip install vllm")
    there = Availability(available=True, version="1.0")
    assert "no engine" in texts(list(find_engines({"vllm": missing})), CheckStatus.PROBLEM)
    findings = list(find_engines({"vllm": missing, "llamacpp": there}))
    assert count_problems(findings) == 0
    assert "vllm: not installed -> pip install vllm" in texts(findings, CheckStatus.NOTE)


def test_the_program_that_is_used_is_named_and_running_on_the_cpu_is_a_note() -> None:
    program = Availability(available=True, version="b11549", where="/usr/bin/llama-server")
    cpu = Availability(available=True, version="1.0", reason="runs on the CPU: no llama-server found", hint="Install one.")
    assert "llamacpp b11549 (/usr/bin/llama-server)" in texts(list(find_engines({"llamacpp": program})), CheckStatus.OK)
    note = texts(list(find_engines({"llamacpp": cpu})), CheckStatus.NOTE)
    assert "llamacpp 1.0: runs on the CPU: no llama-server found -> Install one." in note


def test_a_llama_server_that_is_named_and_missing_is_reported_without_a_gpu_too(
    home: Home, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aimgpu.wiring.has_gpu", lambda: False)
    monkeypatch.setenv("AIMGPU_LLAMA_SERVER", str(tmp_path / "none"))
    run_command(["doctor", "--port", "0"])
    assert f"AIMGPU_LLAMA_SERVER names {tmp_path}/none, which is not a program" in capsys.readouterr().out
    monkeypatch.setenv("AIMGPU_LLAMA_SERVER", "/bin/sh")
    run_command(["doctor", "--port", "0"])
    assert "AIMGPU_LLAMA_SERVER" not in capsys.readouterr().out


def test_a_port_in_use_is_a_problem(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert find_port("127.0.0.1", port, Home(tmp_path)).verdict is CheckStatus.PROBLEM
    assert find_port("127.0.0.1", port, Home(tmp_path)).verdict is CheckStatus.OK


def test_a_daemon_that_was_killed_is_a_problem(tmp_path: Path) -> None:
    home = Home(tmp_path)
    assert find_daemon(home).verdict is CheckStatus.NOTE
    home.daemon_file.write_text("{}")
    assert find_daemon(home).verdict is CheckStatus.PROBLEM


def test_a_folder_that_others_can_read_is_a_problem(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    findings = list(find_folder("state", tmp_path, private=True, setting="AIMGPU_HOME"))
    assert f"chmod 700 {tmp_path}" in texts(findings, CheckStatus.PROBLEM)
    assert count_problems(find_folder("cache", tmp_path, private=False, setting="AIMGPU_CACHE")) == 0


def test_a_folder_under_a_file_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    findings = list(find_folder("state", tmp_path / "file" / "home", private=True, setting="AIMGPU_HOME"))
    assert "set AIMGPU_HOME" in texts(findings, CheckStatus.PROBLEM)


def test_a_folder_of_another_user_cannot_be_written() -> None:
    with as_an_ordinary_user():
        findings = list(find_folder("state", Path("/root/x"), private=True, setting="AIMGPU_HOME"))
    assert count_problems(findings) == 1


@contextmanager
def as_an_ordinary_user() -> Iterator[None]:
    """Root may write everywhere. The saved user stays root, so that the way back is open."""
    if os.geteuid() != 0:
        yield
        return
    os.setresuid(_NOBODY, _NOBODY, 0)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)


def test_the_command_works_without_a_daemon(aimgpu: "CommandLine") -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    done = aimgpu.run("doctor", "--json", "--port", str(port))
    document = json.loads(done.stdout)
    topics = {finding["topic"] for finding in document["findings"]}
    assert {"Python", "GPU", "engine", "daemon", "port", "state", "cache"} <= topics
    assert done.returncode == (1 if document["problems"] else 0)
    assert all(f["action"] for f in document["findings"] if f["verdict"] == "problem")


def test_the_table_ends_with_the_number_of_problems(aimgpu: "CommandLine") -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        done = aimgpu.run("doctor", "--port", str(server.getsockname()[1]))
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1] == "1 problem."


def test_a_path_is_not_cut_on_a_narrow_terminal(
    home: Home, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "60")
    run_command(["doctor", "--port", "0"])
    assert f"state: {home.path}, " in capsys.readouterr().out
