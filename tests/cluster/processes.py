"""Programs of a test cluster as child processes: in its control group, in a node's namespaces, with a log each."""

import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

STOP_SECONDS = 60.0  # what is stopped and not killed is to end by itself, on a loaded machine too
LOG_TAIL = 3000
# Prefix of a command line whose program the kernel kills when the thread that started it ends.
LEASH = ("setpriv", "--pdeathsig", "KILL", "--")


@dataclass(slots=True, kw_only=True)
class Process:
    """One started program."""

    name: str
    log: Path
    command: Sequence[str]
    popen: subprocess.Popen[bytes]
    log_start: int = 0  # bytes that an earlier program of this name had written

    @property
    def pid(self) -> int:
        return self.popen.pid

    @property
    def running(self) -> bool:
        return self.popen.poll() is None

    def kill(self) -> None:
        """End it as a crash would, at once."""
        self.popen.kill()
        self.popen.wait()

    def stop(self) -> None:
        """End it by SIGTERM, and by SIGKILL if it does not follow."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            self.popen.send_signal(number)
            try:
                self.popen.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                continue
            return

    def written(self) -> str:
        """What this program has logged so far, without what was before it in the file."""
        return self.log.read_bytes()[self.log_start :].decode(errors="replace")

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-LOG_TAIL:]


@dataclass(slots=True, kw_only=True)
class Processes:
    """All programs of a cluster, by name."""

    logs: Path
    prefix: list[str]  # joins the control group
    environment: Mapping[str, str]
    started: dict[str, Process] = field(default_factory=dict)

    def start(
        self,
        name: str,
        command: Sequence[str],
        *,
        inside: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        stdin: int = subprocess.DEVNULL,
    ) -> Process:
        """Start a program; it ends with the Python process that started it, whatever ends that."""
        log = self.logs / f"{name}.log"
        full = [*LEASH, *self.prefix, *inside, *command]
        return self._spawn(name, log, full, {**self.environment, **(env or {})}, stdin)

    def restart(self, name: str) -> Process:
        """Start a program again that has ended."""
        old = self.started[name]
        return self._spawn(name, old.log, old.command, self.environment, subprocess.DEVNULL)

    def _spawn(self, name: str, log: Path, command: Sequence[str], env: Mapping[str, str], stdin: int) -> Process:
        with log.open("ab") as output:
            log_start = output.tell()
            popen = subprocess.Popen(
                command, stdin=stdin, stdout=output, stderr=subprocess.STDOUT, env=env, start_new_session=True
            )
        process = Process(name=name, log=log, command=command, popen=popen, log_start=log_start)
        self.started[name] = process
        return process

    def check(self, names: Sequence[str]) -> None:
        """Raise with the end of its log if one of these has ended."""
        for name in names:
            process = self.started[name]
            if not process.running:
                raise RuntimeError(f"{name} ended with status {process.popen.returncode}:\n{process.tail()}")

    def stop(self, names: Sequence[str]) -> None:
        """Ask all of them to end first, then wait for each."""
        chosen = [self.started[name] for name in names if name in self.started]
        for process in chosen:
            process.popen.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + STOP_SECONDS
        for process in chosen:
            try:
                process.popen.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()

    def reap(self) -> None:
        """Collect the status of processes that were killed by other means; end those that were not."""
        for process in self.started.values():
            process.kill()
