"""The prepared processes of a daemon: few, bounded in memory, each for one program with one environment.

A start that comes first waits for the import, which it would do itself otherwise. Whatever goes wrong ends the prepared
process, is logged, and leaves the next minutes to plain starts.
"""

import contextlib
import ctypes
import json
import logging
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aimgpu.engines.launchers.log import open_log
from aimgpu.engines.protocols import Command, PreparedImports
from aimgpu.errors import EngineFailed
from aimgpu.units import GIB, MIB

PROGRAM = Path(__file__).with_name("program.py")
_PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None, use_errno=True)
# What a start sets that no package reads at import.
_ALWAYS_VARYING = ("AIMGPU_", "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "HSA_CU_MASK", "ROCR_VISIBLE_DEVICES")
_LATER = "later"  # native/region.c: the tenant is named when the interposer is attached
_SPACE = MIB
_REAP_SECONDS = 10.0  # longer only for a process stuck in the kernel
_LIMITS = tuple(getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_"))

Spawn = Callable[[tuple[str, ...], Mapping[str, str], int, int], int]  # argv, environment, standard input, log -> pid
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedBounds:
    """What prepared processes may take."""

    most: int = 2
    most_bytes: int = 8 * GIB  # each, without what it shares
    idle_seconds: float = 900.0
    import_seconds: float = 300.0
    fork_seconds: float = 30.0
    pause_seconds: float = 600.0  # plain starts after one went wrong


@dataclass(slots=True)
class _Process:
    pid: int
    control: socket.socket
    used: float
    ready: bool = False
    ended: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)  # one talks with it at a time


@dataclass(frozen=True, slots=True)
class _Key:
    """Starts that one prepared process can serve."""

    interpreter: tuple[str, ...]
    program: str
    preparation: PreparedImports
    environment: tuple[tuple[str, str], ...]


class PreparedProcesses:
    """Kept by the launcher of processes; they end with it."""

    def __init__(self, spawn: Spawn, folder: Path, *, bounds: PreparedBounds | None = None) -> None:
        self._spawn = spawn
        self._folder = folder
        self._bounds = bounds or PreparedBounds()
        self._lock = threading.Lock()  # the table; held for moments
        self._processes: dict[_Key, _Process] = {}
        self._plain_until: dict[_Key, float] = {}

    def wait_for(self, program: str, command: Command, environment: Mapping[str, str], give_up: Callable[[], None]) -> None:
        """Returns when one can be forked, or when the start is to be a plain one. Raises only what `give_up` raises."""
        key = _key_of(program, command, environment)
        deadline = time.monotonic() + self._bounds.import_seconds
        while key is not None and time.monotonic() < deadline:
            process = self._find_or_make(key)
            if process is None:
                return
            with _held(process.lock, give_up):
                if process.ended:
                    continue  # another waiter found it so
                try:
                    answer = self._ask_ready(process, give_up, deadline)
                except (OSError, ValueError) as error:
                    self._give_up_on(key, process, f"it did not get ready: {error!r}")
                    return
                if "ready" in answer:
                    process.ready = True
                    if answer["ready"]:
                        log.info("prepared.ready", extra={"data": {"program": program, **answer["ready"]}})
                    return
                reason = str(answer.get("unusable", answer))
                if reason != "changed":
                    self._give_up_on(key, process, reason)
                    return
                self._end(key, process)

    def fork(
        self, argv: tuple[str, ...], command: Command, environment: Mapping[str, str], where: tuple[Path, int, int]
    ) -> int | None:
        """The pid of a child of this program that becomes the engine; None: start it plainly. `where`: folder, gate, log."""
        key = _key_of(argv[0], command, environment)
        process = self._processes.get(key) if key else None
        if key is None or process is None or not process.ready:
            return None
        directory, gate, log_file = where
        with process.lock, _adopting():
            try:
                if process.ended:
                    return None
                request = json.dumps({"argv": argv, "environment": dict(environment), "state": _state(directory)}).encode()
                process.control.settimeout(self._bounds.fork_seconds)
                socket.send_fds(process.control, [request], [gate, log_file])
                answer = json.loads(process.control.recv(_SPACE))
                process.used = time.monotonic()
                if isinstance(answer.get("pid"), int):
                    return int(answer["pid"])
                reason = str(answer.get("unusable") or answer.get("failed") or answer)
            except ConnectionError:  # it was idle for long: the next start makes another
                reason = "changed"
            except (OSError, ValueError, IndexError) as error:
                reason = repr(error)
            if reason == "changed":
                self._end(key, process)
            else:
                self._give_up_on(key, process, reason)
            return None

    def distrust(self, program: str, command: Command, environment: Mapping[str, str]) -> None:
        """What it became did not start: plain starts for a while."""
        key = _key_of(program, command, environment)
        process = self._processes.get(key) if key else None
        if key is not None and process is not None:
            with process.lock:
                self._give_up_on(key, process, "an engine that it became did not start")

    def close(self) -> None:
        """End all of them; engines that they became run on."""
        for key, process in list(self._processes.items()):
            self._end(key, process)

    def pids(self) -> tuple[int, ...]:
        """Of those that live, as far as known."""
        return tuple(process.pid for process in self._processes.values() if not process.ended)

    def _find_or_make(self, key: _Key) -> _Process | None:
        with self._lock:
            if self._plain_until.get(key, 0.0) > time.monotonic():
                return None
            if (known := self._processes.get(key)) is not None:
                return known
            others = sorted(self._processes.items(), key=lambda item: item[1].used)
        while len(others) >= self._bounds.most:
            oldest, process = others.pop(0)
            if not process.ready or not process.lock.acquire(blocking=False):
                return None  # it is being imported for others: this start is a plain one
            with contextlib.ExitStack() as held:
                held.callback(process.lock.release)
                self._end(oldest, process)
        with self._lock:
            if key not in self._processes:
                try:
                    self._processes[key] = self._make(key)
                except (OSError, EngineFailed) as error:
                    self._pause(key, str(error))
                    return None
            return self._processes[key]

    def _make(self, key: _Key) -> _Process:
        wanted = key.preparation
        settings = {
            "interpreter": list(key.interpreter),
            "program": key.program,
            "modules": wanted.modules,
            "varying": (*_ALWAYS_VARYING, *wanted.varying),
            "environment": dict(wanted.environment),
            "preload": wanted.preload,
            "spares": wanted.spawns,
            "most_bytes": self._bounds.most_bytes,
            "idle_seconds": self._bounds.idle_seconds,
        }
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        output = open_log(self._folder / f"{Path(key.program).name}.log")
        try:
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SPACE)
            argv = (*key.interpreter, str(PROGRAM), json.dumps(settings))
            pid = self._spawn(argv, dict(key.environment), theirs.fileno(), output)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
            os.close(output)
        return _Process(pid, ours, time.monotonic())

    def _ask_ready(self, process: _Process, give_up: Callable[[], None], deadline: float) -> dict[str, Any]:
        """Its answer; the first comes by itself. Raises OSError where none comes."""
        if process.ready:
            try:
                process.control.send(b"{}")
            except ConnectionError:
                return {"unusable": "changed"}
        process.control.settimeout(0.2)
        while True:
            with contextlib.suppress(TimeoutError):
                data = process.control.recv(_SPACE)
                if not data and process.ready:
                    return {"unusable": "changed"}  # it was idle for long: another one is made
                if not data:
                    raise OSError("it ended")
                return dict(json.loads(data))
            if time.monotonic() > deadline:
                raise TimeoutError("its imports take too long")
            give_up()

    def _give_up_on(self, key: _Key, process: _Process, reason: str) -> None:
        self._end(key, process)
        self._pause(key, reason)

    def _pause(self, key: _Key, reason: str) -> None:
        self._plain_until[key] = time.monotonic() + self._bounds.pause_seconds
        log.warning("prepared.unusable", extra={"data": {"program": key.program, "reason": reason}})

    def _end(self, key: _Key, process: _Process) -> None:
        process.ended = True
        process.control.close()
        if self._processes.get(key) is process:
            del self._processes[key]
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # with what its imports started; not yet waited for, so the pid is its own
        deadline = time.monotonic() + _REAP_SECONDS
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(process.pid, os.WNOHANG) == (0, 0) and time.monotonic() < deadline:
                time.sleep(0.005)


def _key_of(program: str, command: Command, environment: Mapping[str, str]) -> _Key | None:
    """None: nothing can be prepared for this command."""
    preparation = command.preparation
    interpreter = _find_interpreter(Path(program)) if preparation is not None else None
    if preparation is None or interpreter is None:
        return None
    shared = {
        name: value
        for name, value in {**dict(preparation.environment), **environment}.items()
        if not name.startswith((*_ALWAYS_VARYING, *preparation.varying)) and name not in command.secrets
    }
    if environment.get("AIMGPU_REGION"):
        shared["AIMGPU_REGION"] = _LATER
    return _Key(interpreter, program, preparation, tuple(sorted(shared.items())))


def _find_interpreter(program: Path) -> tuple[str, ...] | None:
    """From the first line of a script that pip or uv installed; None: it is no Python program."""
    try:
        with program.open("rb") as file:
            first, second = (os.fsdecode(file.readline(4096)).rstrip("\n") for _ in range(2))
    except OSError:
        return None
    words = first.removeprefix("#!").split()
    if first.startswith("#!/") and "python" in Path(words[0]).name:
        return tuple(words)
    beside = program.resolve().parent / "python"
    return (str(beside),) if words == ["/bin/sh"] and second.startswith("'''exec'") and beside.exists() else None


def _state(directory: Path) -> dict[str, Any]:
    """What a plain start would inherit from this program."""
    status = Path("/proc/self/status").read_text(encoding="utf-8", errors="replace")
    mask = int(status.partition("\nUmask:")[2].split()[0], 8)
    limits = [(number, *resource.getrlimit(number)) for number in _LIMITS]
    return {"directory": str(directory), "umask": mask, "limits": limits, "cores": sorted(os.sched_getaffinity(0))}


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    """Within it an orphan below this process becomes its child, whose status it can read, as that of a plain start."""
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


@contextlib.contextmanager
def _held(lock: threading.Lock, give_up: Callable[[], None]) -> Iterator[None]:
    while not lock.acquire(timeout=0.2):
        give_up()
    try:
        yield
    finally:
        lock.release()
