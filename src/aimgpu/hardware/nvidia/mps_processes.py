"""Processes of an MPS daemon: found by the pipe directory in their environment, ended without hitting another's pid."""

import os
import select
import signal
from collections.abc import Iterator
from pathlib import Path

from aimgpu import procfs
from aimgpu.domain import ProcessIdentity

PIPE_VARIABLE = "CUDA_MPS_PIPE_DIRECTORY"
_NAME = b"nvidia-cuda-mps"  # of nvidia-cuda-mps-control and nvidia-cuda-mps-server, as the kernel cuts it to 15 letters


def find_mps_processes(pipe: Path) -> tuple[ProcessIdentity, ...]:
    """Control daemon and servers that use this pipe directory."""
    return tuple(process for process in _find_users(pipe) if _is_mps(process.pid))


def find_tenants(pipe: Path) -> tuple[ProcessIdentity, ...]:
    """Processes that were started to use this pipe directory, connected or not."""
    return tuple(process for process in _find_users(pipe) if not _is_mps(process.pid))


def identify(pid: int) -> ProcessIdentity | None:
    """None: no such process, or one that has ended and only waits to be buried."""
    process = procfs.read_process(pid)
    if process is None or process.ended:
        return None
    return ProcessIdentity(pid=pid, start_ticks=process.start_ticks, boot_id=process.boot_id)


def end(process: ProcessIdentity, *, grace_seconds: float) -> bool:
    """Terminate, then kill; True once it is gone. A pid that another process has by now is left alone."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return True
    try:
        return not procfs.is_running(process) or any(
            _signal(descriptor, sign, grace_seconds) for sign in (signal.SIGTERM, signal.SIGKILL)
        )
    finally:
        os.close(descriptor)


def wait_until_gone(process: ProcessIdentity, *, seconds: float) -> bool:
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return True
    try:
        return not procfs.is_running(process) or _wait(descriptor, seconds)
    finally:
        os.close(descriptor)


def _signal(descriptor: int, sign: signal.Signals, grace_seconds: float) -> bool:
    try:
        signal.pidfd_send_signal(descriptor, sign)
    except ProcessLookupError:
        return True
    return _wait(descriptor, grace_seconds)


def _wait(descriptor: int, seconds: float) -> bool:
    """A pidfd becomes readable when its process ends."""
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    return bool(poller.poll(seconds * 1000))


def _find_users(pipe: Path) -> Iterator[ProcessIdentity]:
    wanted = f"{PIPE_VARIABLE}={pipe}".encode()
    for pid in _pids():
        if wanted in _read(pid, "environ").split(b"\0") and (process := identify(pid)) is not None:
            yield process


def _is_mps(pid: int) -> bool:
    return _read(pid, "comm").strip() == _NAME


def _pids() -> Iterator[int]:
    for entry in procfs.PROC.iterdir():
        if entry.name.isdecimal():
            yield int(entry.name)


def _read(pid: int, name: str) -> bytes:
    try:
        return (procfs.PROC / str(pid) / name).read_bytes()
    except OSError:  # gone, or someone else's
        return b""
