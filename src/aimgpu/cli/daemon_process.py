"""Start the daemon as a process of its own, wait until it answers, stop it."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from aimgpu.cli.client import DaemonClient, error_from_json
from aimgpu.cli.signals import signals_held
from aimgpu.errors import AimGpuError, DaemonUnreachable, LedgerFull, NotAllowed
from aimgpu.home import DaemonRecord, Home
from aimgpu.logs import START_FAILED
from aimgpu.procfs import is_running
from aimgpu.secret_variables import pass_secrets, split_secrets
from aimgpu.units import MIB

PROGRAM: Sequence[str] = (sys.executable, "-m", "aimgpu.daemon")
_START_SECONDS = 120.0
_STOP_SECONDS = 120.0
_POLL_SECONDS = 0.02
_SHOWN_LINES = 20
_MARK = "AIMGPU_INSTANCE"  # in the environment of every program that has a grant
_TENANTS = re.compile(  # what such a program is given
    rf"{_MARK}|AIMGPU_(REGION|TENANT|FAIL|GATE_ALLOWANCE|SOFTWARE_GPU)|LD_PRELOAD|HSA_CU_MASK|CUDA_MPS_.*|.*_VISIBLE_DEVICES"
)
_LARGEST_LOG_BYTES = 10 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonOptions:
    """What a daemon is started with."""

    host: str = "127.0.0.1"
    port: int = 8080
    tls_cert: Path | None = None
    tls_key: Path | None = None
    simulate: str | None = None  # a part; None: the machine's own GPUs
    software: bool = False  # by the software GPU's driver
    simulate_count: int = 1

    def arguments(self, home: Home) -> list[str]:
        """The command line of `aimgpu.daemon.assembly`."""
        arguments = ["--home", str(home.path), "--host", self.host, "--port", str(self.port)]
        for name, path in (("--tls-cert", self.tls_cert), ("--tls-key", self.tls_key)):
            arguments += [name, str(path.absolute())] if path is not None else []
        if self.simulate is not None:
            arguments += ["--simulate", self.simulate, "--count", str(self.simulate_count)]
            arguments += ["--software"] * self.software
        return arguments


@dataclass(slots=True)
class RunningDaemon:
    """A daemon that this command started."""

    process: subprocess.Popen[bytes]
    client: DaemonClient
    record: DaemonRecord
    log_file: Path
    _ours: bool = field(default=True)  # to stop; once asked, or given away, it is not asked again

    def stop(self) -> Mapping[str, Any]:
        """Release everything and wait until the daemon is gone; returns what it answered."""
        answer: Mapping[str, Any] = {}
        if not self._ours:
            return answer
        if not has_ended(self.process):
            try:
                answer = self.client.stop()
            except DaemonUnreachable:
                self.process.terminate()
            except AimGpuError:  # it could not give everything back: the next start does, when it is let
                self.leave_models()
                raise
        self._ours = False
        self.process.wait()
        return answer

    def keep(self) -> None:
        """Leave it running."""
        self._ours = False

    def leave_models(self) -> None:
        """End the daemon alone; a later one takes its models over."""
        self._ours = False
        self.process.terminate()
        self.process.wait()


def start_daemon(home: Home, options: DaemonOptions) -> RunningDaemon:
    """Start it in a session of its own, so that Ctrl-C reaches us and not it; returns once it answers."""
    home.create()
    inside = _MARK in os.environ  # a program of a daemon: this one is not part of it, and sees every GPU
    plain, secrets = split_secrets({k: v for k, v in os.environ.items() if not (inside and _TENANTS.fullmatch(k))})
    process: subprocess.Popen[bytes] | None = None
    try:
        with _open_log(home.log_file) as log:
            start = log.tell()
            with signals_held():  # a signal between the start and the assignment would leave a daemon that is not stopped
                process = subprocess.Popen(  # noqa: S603 -- our own program
                    [*PROGRAM, *options.arguments(home), "--secrets-on-stdin"],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    cwd="/",
                    env=plain | {"PYTHONUNBUFFERED": "1"},
                )
        if process.stdin is not None:
            pass_secrets(process.stdin, secrets)
        record, client = _wait_until_it_answers(home, process, start)
    except BaseException:
        if process is not None:
            _end(process)
        raise
    return RunningDaemon(process, client, record, home.log_file)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.stdin is not None:
        process.stdin.close()
    if not has_ended(process):
        process.terminate()
        process.wait()


def has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Whether it has; safe where a signal raises KeyboardInterrupt at any moment.

    `poll`, and `wait` with a limit, take a lock of the Popen that an exception at that very moment leaves taken: the `wait`
    that comes after it never returns.
    """
    if process.returncode is None:
        try:
            if os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                return False
        except ChildProcessError:  # reaped by someone else
            pass
        process.wait()  # no longer a wait
    return True


def _open_log(path: Path) -> BinaryIO:
    """To append; a large one is set aside first, and one before it is kept, so that they never fill the disk."""
    try:
        if path.exists() and path.stat().st_size > _LARGEST_LOG_BYTES:
            path.replace(path.with_name(path.name + ".1"))
        return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab")
    except OSError as error:
        hint = "Make its folder writable, or set AIMGPU_HOME to another."
        raise NotAllowed(f"cannot write {path}: {error.strerror}", hint=hint) from error


def wait_for_daemon(home: Home, seconds: float) -> DaemonRecord | None:
    """The daemon that another command is starting just now."""
    deadline = time.monotonic() + seconds
    while (record := home.read_daemon()) is None and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    return record


def wait_until_gone(record: DaemonRecord) -> None:
    """For a daemon that was asked to stop."""
    deadline = time.monotonic() + _STOP_SECONDS
    while is_running(record):
        if time.monotonic() > deadline:
            raise DaemonUnreachable(
                f"the daemon (pid {record.pid}) still runs {_STOP_SECONDS:.0f} s after it was asked to stop",
                hint=f"`kill {record.pid}` ends it; its models keep running until the next `aimgpu down`.",
            )
        time.sleep(_POLL_SECONDS)


def _wait_until_it_answers(home: Home, process: subprocess.Popen[bytes], log_start: int) -> tuple[DaemonRecord, DaemonClient]:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        record = home.read_daemon()
        if record is not None and record.pid == process.pid:
            client = DaemonClient(record.url, home.read_token())
            client.read_status()
            return record, client
        if has_ended(process):
            raise _explain_death(process.returncode, home.log_file, log_start)
        time.sleep(_POLL_SECONDS)
    raise DaemonUnreachable(f"the daemon did not answer within {_START_SECONDS:.0f} s", hint=f"Its log is {home.log_file}.")


def _reported_error(line: str) -> AimGpuError | None:
    """The error in a record of the log that says why the daemon did not start."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    if not isinstance(record, dict) or record.get("event") != START_FAILED or not isinstance(record.get("error"), dict):
        return None
    return error_from_json(record["error"])


def _explain_death(status: int, log_file: Path, log_start: int) -> AimGpuError:
    """What the daemon said before it ended, as an error with its own exit status."""
    with log_file.open("rb") as log:
        log.seek(log_start)
        lines = log.read().decode(errors="replace").splitlines()
    reported = next((error for line in reversed(lines) if (error := _reported_error(line)) is not None), None)
    if reported is not None:
        return reported
    free = shutil.disk_usage(log_file.parent).free
    if free < MIB:
        return LedgerFull(f"the disk of {log_file.parent} is full", hint="Free some space, or set AIMGPU_HOME to another disk.")
    shown = "\n".join(f"  {line}" for line in lines[-_SHOWN_LINES:])
    return AimGpuError(f"the daemon ended at start with status {status}\n{shown}".rstrip(), hint=f"Its log is {log_file}.")
