"""What `aimgpu doctor` looks at on this machine; each finding says what to do about it."""

import ctypes
import os
import shutil
import socket
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from aimgpu.cli.client import start_line
from aimgpu.cli.views.gpu_names import Rename
from aimgpu.engines.llamacpp.program import VARIABLE as LLAMA_SERVER
from aimgpu.engines.protocols import Availability
from aimgpu.errors import AimGpuError
from aimgpu.hardware.amd.smi import AmdSmi
from aimgpu.hardware.protocols import DeviceReader, Inspector
from aimgpu.home import Home
from aimgpu.units import GIB, format_bytes

_AMD, _NVIDIA = "0x1002", "0x10de"
_GPU_CLASSES = ("0x03", "0x12")  # display controllers and processing accelerators, PCI code and ID assignment
_LEAST_FREE_BYTES = 2 * GIB
_MEMORY_LIMITS = "nvmlDeviceSetMemoryLimits_v1"


class CheckStatus(StrEnum):
    """How serious a check is."""

    OK = "ok"
    NOTE = "note"  # worth knowing, nothing is wrong
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """What was found, and what to do about it."""

    topic: str
    verdict: CheckStatus
    text: str
    action: str | None = None


def find_gpus(root: Path = Path("/")) -> Iterator[Check]:
    """GPUs on the bus and their drivers. What is wrong with them, their backends know: `find_troubles`."""
    counts = _count_gpus(root)
    if not any(counts.values()):
        yield _note("GPU", "no AMD or NVIDIA GPU found", "Nothing to do: `aimgpu up` simulates one MI300X and says so.")
    if counts[_AMD]:
        yield from _find_amd(root, counts[_AMD])
    if counts[_NVIDIA]:
        yield from _find_nvidia(root, counts[_NVIDIA])


def find_devices(readers: Iterable[DeviceReader], rename: Rename = str) -> Iterator[Check]:
    """What each vendor's backend reads; one that cannot read is a problem, one that finds nothing is silent."""
    for reader in readers:
        try:
            devices = reader.read_devices()
        except AimGpuError as error:
            yield _problem("GPU", error.message, error.hint or "Check the driver and its tools.")
            continue
        for device in devices:
            name = device.market_name or device.product
            yield _ok(
                "GPU",
                f"{rename(device.id)}: {name}, {format_bytes(device.memory_bytes)}, layout {device.layout.name} ({device.id})",
            )


def find_troubles(inspectors: Iterable[Inspector], rename: Rename = str) -> Iterator[Check]:
    """What each vendor's backend finds wrong, or worth knowing."""
    for inspector in inspectors:
        for finding in inspector.inspect():
            if finding.serious:
                yield _problem("GPU", rename(finding.text), finding.hint or "Check the driver and its tools.")
            else:
                yield _note("GPU", rename(finding.text), finding.hint)


def find_newer_limits(load: Callable[[str], object] = ctypes.CDLL) -> Iterator[Check]:
    """What NVIDIA's drivers of 2026 (r615, CUDA 13.4) enforce themselves: named where it is, and not used."""
    try:
        library = load("libnvidia-ml.so.1")
    except OSError:
        return
    if getattr(library, _MEMORY_LIMITS, None) is None:
        return
    yield _note(
        "isolation",
        f"this driver has memory limits of its own ({_MEMORY_LIMITS}, MPS v3); not used, since no run on one was seen yet",
        "Nothing to do: the interposer caps memory. Run `aimgpu doctor --verify` and send the report in.",
    )


def find_engines(engines: Mapping[str, Availability]) -> Iterator[Check]:
    """One finding an engine, and a problem when none can run."""
    for name, found in engines.items():
        said = f"{name} {found.version or ''}".rstrip() + (f" ({found.where})" if found.where else "")
        if found.available and found.reason:
            yield _note("engine", f"{said}: {found.reason}", found.hint)
        elif found.available:
            yield _ok("engine", said)
        else:
            yield _note("engine", f"{name}: {found.reason or 'not available'}", found.hint)
    if not any(found.available for found in engines.values()):
        yield _problem("engine", "no engine can run here", "`pip install 'aimgpu[embedded]'` brings llama.cpp.")


def find_named_program(environment: Mapping[str, str]) -> Iterator[Check]:
    """A llama-server that is named and is not there, where no GPU makes the engine look for it."""
    named = environment.get(LLAMA_SERVER)
    if named and shutil.which(named) is None:
        action = "Correct or unset it; without a GPU no llama-server is needed."
        yield _note("engine", f"{LLAMA_SERVER} names {named}, which is not a program", action)


def find_port(host: str, port: int, home: Home) -> Check:
    """Whether the daemon could listen there."""
    record = home.read_daemon()
    if record is not None and record.port == port:
        return _ok("port", f"{port} is held by the daemon that runs (pid {record.pid})")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        return _problem(
            "port", f"{host}:{port}: {error.strerror}", "Use another: `aimgpu up --port 8081`, or AIMGPU_PORT=8081."
        )
    return _ok("port", f"{host}:{port} is free")


def find_daemon(home: Home) -> Check:
    """Whether one runs."""
    record = home.read_daemon()
    if record is not None:
        return _ok("daemon", f"runs at {record.url} (pid {record.pid}); its log is {home.log_file}")
    if home.daemon_file.exists():
        action = "`aimgpu down` stops what it left, `aimgpu up` takes it over."
        return _problem("daemon", "the last daemon was killed, its models may still run", action)
    return _note("daemon", "none runs", f"Start one with `{start_line()}`.")


def find_folder(topic: str, path: Path, *, private: bool, setting: str) -> Iterator[Check]:
    """Whether a folder can be written, is private where it must be, and has space."""
    existing = path
    while not os.path.lexists(existing):  # unlike Path.exists, False where a parent may not be looked into
        existing = existing.parent
    if not os.access(existing, os.W_OK | os.X_OK) or not existing.is_dir():
        yield _problem(topic, f"{path} cannot be written", f"Make it writable, or set {setting} to another folder.")
        return
    if private and path.exists() and stat.S_IMODE(path.stat().st_mode) & 0o077:
        yield _problem(topic, f"{path} can be read by other users", f"chmod 700 {path}")
    free = shutil.disk_usage(existing).free
    if free < _LEAST_FREE_BYTES:
        yield _problem(topic, f"{path}: only {format_bytes(free)} free", f"Free some space, or set {setting} to another disk.")
    else:
        yield _ok(topic, f"{path}, {format_bytes(free)} free")


def count_problems(findings: Iterable[Check]) -> int:
    """Those that must be dealt with."""
    return sum(finding.verdict is CheckStatus.PROBLEM for finding in findings)


def _find_amd(root: Path, count: int) -> Iterator[Check]:
    yield _ok("GPU", f"{count} AMD on the bus")
    if (root / "sys/module/amdgpu").exists():
        version = _read(root / "sys/module/amdgpu/version")
        yield _ok("driver", f"amdgpu {version}" if version else "amdgpu of the kernel")
        yield _layouts_note()


def find_amd_tool(tool: AmdSmi) -> Iterator[Check]:
    """AMD's own tool, if it was found, with its version."""
    if not tool.is_installed:
        yield _note("amd-smi", "not found", "Not needed to read GPUs; set ROCM_PATH where ROCm is installed elsewhere.")
        return
    try:
        version = tool.read_version()
    except AimGpuError as error:
        yield _note("amd-smi", f"{tool.program}: {error.message}", error.hint)
        return
    yield _ok("amd-smi", f"{tool.program}, ROCm {'.'.join(map(str, version)) if version else 'of an unknown version'}")


def _find_nvidia(root: Path, count: int) -> Iterator[Check]:
    yield _ok("GPU", f"{count} NVIDIA on the bus")
    version = _read(root / "proc/driver/nvidia/version")
    if version is not None:
        yield _ok("driver", version.splitlines()[0].removeprefix("NVRM version: "))
        yield _layouts_note()


def _layouts_note() -> Check:
    if os.geteuid() == 0:
        return _ok("permission", "root: layouts of GPUs can be changed")
    return _note(
        "permission", "not root: GPUs can be shared, but their layouts not changed", "Use sudo for `aimgpu partition`."
    )


def _count_gpus(root: Path) -> dict[str, int]:
    counts = {_AMD: 0, _NVIDIA: 0}
    for device in (root / "sys/bus/pci/devices").glob("*"):
        vendor = _read(device / "vendor")
        if vendor in counts and (_read(device / "class") or "").startswith(_GPU_CLASSES):
            counts[vendor] += 1
    return counts


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _ok(topic: str, text: str) -> Check:
    return Check(topic=topic, verdict=CheckStatus.OK, text=text)


def _note(topic: str, text: str, action: str | None) -> Check:
    return Check(topic=topic, verdict=CheckStatus.NOTE, text=text, action=action)


def _problem(topic: str, text: str, action: str) -> Check:
    return Check(topic=topic, verdict=CheckStatus.PROBLEM, text=text, action=action)
