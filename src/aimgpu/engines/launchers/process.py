"""Engines as processes of this machine, detached from the daemon.

The daemon may be killed at any moment, so no engine may ever run that a later daemon cannot find. An engine therefore starts
behind a gate: what is spawned is a shell, already marked by its environment and in its own session, that waits for one word on
its standard input and only then becomes the engine. The word is written after the process was noted in the registry. If the
daemon dies before (between fork and exec, before the note, after it) the shell reads end-of-file and ends by itself; if it
dies after, registry and marks both lead to the engine.

A program that a caller brings is behind a gate too: the caller. It is noted first, and then finds its environment in its run
directory and becomes the program.

Where the command allows it, a prepared process becomes the engine in place of the shell, behind the same gate.
"""

import contextlib
import json
import os
import select
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from aimgpu import procfs
from aimgpu.domain import ProcessIdentity
from aimgpu.engines.launchers.log import LOG_NAME, open_log, read_last_lines
from aimgpu.engines.launchers.registry import Registry, StartedProcess, identify
from aimgpu.engines.prepared.processes import PreparedProcesses
from aimgpu.engines.protocols import Command
from aimgpu.errors import Conflict, EngineFailed, EngineUnavailable
from aimgpu.files import write_private

HOME_MARK = "AIMGPU_HOME"
INSTANCE_MARK = "AIMGPU_INSTANCE"
ENVIRONMENT_NAME = "environment.json"  # for a process that waits to become the program

_GATE = 'IFS= read -r word && [ "$word" = go ] && cd "$1" && shift && exec "$@" </dev/null'
_INHERITED = frozenset({"HOME", "LANG", "LOGNAME", "PATH", "SHELL", "TMPDIR", "TZ", "USER", "VIRTUAL_ENV"})
_INHERITED_PREFIXES = ("LC_", "LD_LIBRARY_PATH", "PYTHON", "SSL_CERT_", "XDG_")
_KILL_SECONDS = 10.0  # after SIGKILL: longer only for a process stuck in the kernel
_SETTLED_SECONDS = 10.0
_MOST_KNOWN = 20_000


class ProcessLauncher:
    """Starts, finds and stops the engines of one home; two homes on one machine never touch each other's."""

    name = "process"
    brings_engines = False
    joins_groups = True

    def __init__(self, home: Path) -> None:
        self._home = str(home.resolve())
        self._marks = _Marks(self._home)
        self._processes = procfs.SharedProcessTable()
        self._registry = Registry(home / "processes")
        self._lock = threading.Lock()  # registry entries are read, compared and removed
        self._statuses: dict[ProcessIdentity, int] = {}  # of our own children that ended by themselves
        self._prepared = PreparedProcesses(_spawn, home / "prepared")
        self._forked: dict[ProcessIdentity, Callable[[], None]] = {}  # from prepared processes: what to do where one fails

    def check(self) -> None:
        """This machine can always start processes."""

    def fetch(
        self, command: Command, run_directory: Path, report: Callable[[int | None], None], give_up: Callable[[], None]
    ) -> None:
        """The packages of its program, in a prepared process. Where that fails the start is a plain one."""
        del run_directory

        def wait() -> None:
            report(None)
            give_up()

        if command.preparation is not None:
            self._prepared.wait_for(_find_program(command), command, self._environment("", command), wait)

    def start(self, instance_id: str, command: Command, run_directory: Path) -> ProcessIdentity:
        """Start it in a session of its own, recorded before its first instruction runs."""
        if command.process is not None:
            return self._hand_over(instance_id, command, command.process, run_directory)
        argv = (_find_program(command), *command.argv[1:])
        environment = self._environment(instance_id, command)
        run_directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._lock, contextlib.ExitStack() as descriptors:
            self._refuse_second(instance_id)
            log = _keep(descriptors, open_log(run_directory / LOG_NAME))
            folder = run_directory.resolve()
            gate, word = _open_gate(descriptors)
            process = prepared = self._fork_prepared(argv, command, environment, (folder, gate, log))
            if process is None:
                gate, word = _open_gate(descriptors)  # nobody else waits at it
                pid = _spawn(("/bin/sh", "-c", _GATE, "aimgpu-gate", str(folder), *argv), environment, gate, log)
                process = procfs.read_process(pid)
            if process is None:  # only possible where something else in this program reaps all children
                raise EngineFailed(f"the process of {instance_id} was gone at once")
            started = StartedProcess(instance_id=instance_id, process=identify(process), run_directory=folder)
            with self._ended_on_failure(started):
                self._registry.write(started)
                if command.control_group is not None:
                    _join(command.control_group, started.process.pid)
                os.write(word, b"go\n")
            if prepared is not None:
                self._forked[started.process] = lambda: self._prepared.distrust(argv[0], command, environment)
        return started.process

    def _hand_over(self, instance_id: str, command: Command, process: ProcessIdentity, run_directory: Path) -> ProcessIdentity:
        """To a process that waits for it. Its descendants are found by the marks in what it is given."""
        marked = {**command.environment, **command.secrets, HOME_MARK: self._home, INSTANCE_MARK: instance_id}
        with self._lock:
            self._refuse_second(instance_id)
            if not procfs.is_running(process):
                raise EngineFailed("its caller ended before it got its grant")
            started = StartedProcess(instance_id=instance_id, process=process, run_directory=run_directory.resolve())
            self._registry.write(started)
            try:
                if command.control_group is not None:
                    _join(command.control_group, process.pid)
                write_private(run_directory / ENVIRONMENT_NAME, json.dumps(marked))
            except BaseException:  # it goes on to say why: nothing may end it as an instance
                self._registry.remove(instance_id)
                raise
        return process

    def start_otherwise(self, process: ProcessIdentity) -> bool:
        """Plainly, where a prepared process became it."""
        distrust = self._forked.pop(process, None)
        if distrust is not None:
            distrust()
        return distrust is not None

    def is_forked(self, process: ProcessIdentity) -> bool:
        """Whether a prepared process became it."""
        return process in self._forked

    def prepared_pids(self) -> tuple[int, ...]:
        """Of the prepared processes: of no instance, without a GPU."""
        return self._prepared.pids()

    def end_prepared(self) -> None:
        """They end with this program in any case."""
        self._prepared.close()

    def is_running(self, process: ProcessIdentity) -> bool:
        """Whether this very process is alive, not another with its pid; one look into /proc while it is."""
        now = procfs.read_process(process.pid)
        if now is not None and now.ended:
            self._reap(process)
            now = procfs.read_process(process.pid)
        alive = now is not None and not now.ended and now.start_ticks == process.start_ticks
        return alive and process.boot_id == procfs.read_boot_id()

    def how_it_ended(self, process: ProcessIdentity) -> str | None:
        """From the exit status, if it was our child."""
        self._reap(process)
        status = self._statuses.get(process)
        if status is None:
            return None
        if not os.WIFSIGNALED(status):
            return f"it ended with status {os.WEXITSTATUS(status)}"
        number = signal.Signals(os.WTERMSIG(status))
        why = " (the kernel does so when memory runs out)" if number is signal.SIGKILL else ""
        return f"it was killed by {number.name}{why}"

    def stop(self, process: ProcessIdentity, *, grace_seconds: float) -> None:
        """SIGTERM to it and its children, then SIGKILL to what is left; also to children that outlived it."""
        started = self._started(process)
        left = self._end(started, signal.SIGTERM, grace_seconds)
        deadline = time.monotonic() + _KILL_SECONDS
        while left and (left := self._end(started, signal.SIGKILL, max(0.1, deadline - time.monotonic()))):
            if time.monotonic() > deadline:
                raise EngineFailed(
                    f"pid {', '.join(str(one.pid) for one in left)} of {started.instance_id} did not end after SIGKILL",
                    hint="It hangs in the kernel, often in a GPU driver: see `dmesg`.",
                )
        with self._lock:
            self._statuses.pop(process, None)
            self._forked.pop(process, None)
            if started.instance_id and self._registry.read(started.instance_id) == started:
                self._registry.remove(started.instance_id)

    def find_started(self) -> Mapping[str, ProcessIdentity]:
        """The main process of each instance, or its oldest child where the main process died and children did not."""
        with self._lock:
            found: dict[str, list[procfs.ProcessEntry]] = {}
            for process, instance_id in self._marked():
                found.setdefault(instance_id, []).append(process)
            result: dict[str, ProcessIdentity] = {}
            for started in list(self._registry.read_all()):
                if procfs.is_running(started.process):
                    result[started.instance_id] = started.process
                elif members := self._members(started):
                    result[started.instance_id] = identify(members[0])
                elif started.instance_id not in found:
                    self._registry.remove(started.instance_id)
        for instance_id, processes in found.items():
            result.setdefault(instance_id, identify(min(processes, key=_leaders_first)))
        return result

    def last_lines(self, run_directory: Path, count: int = 20) -> tuple[str, ...]:
        """From the log in the run directory."""
        return read_last_lines(run_directory / LOG_NAME, count)

    def _environment(self, instance_id: str, command: Command) -> dict[str, str]:
        return {
            **_inherited_environment(),
            **command.environment,
            **command.secrets,
            HOME_MARK: self._home,
            INSTANCE_MARK: instance_id,
        }

    def _fork_prepared(
        self, argv: tuple[str, ...], command: Command, environment: Mapping[str, str], where: tuple[Path, int, int]
    ) -> procfs.ProcessEntry | None:
        """Waiting at the gate, and in all that is looked at as if it had been spawned; None: spawn it."""
        pid = self._prepared.fork(argv, command, environment, where)
        process = procfs.read_process(pid) if pid is not None else None
        if process is None or process.ended or process.session != process.pid or process.parent_pid != os.getpid():
            return None
        return process if procfs.read_environment(process.pid).get(INSTANCE_MARK) == environment[INSTANCE_MARK] else None

    @contextlib.contextmanager
    def _ended_on_failure(self, started: StartedProcess) -> Iterator[None]:
        """A gate that was never opened would end by itself, but only later, and stay a zombie."""
        try:
            yield
        except BaseException:
            self._end(started, signal.SIGKILL, _KILL_SECONDS)
            raise

    def _started(self, process: ProcessIdentity) -> StartedProcess:
        """What is known of it; for a child that outlived its engine, what is known of the engine."""
        for started in self._registry.read_all():
            if started.process == process:
                return started
        instance_id = self._instance_of(process)
        if instance_id and (dead := self._registry.read(instance_id)) and not procfs.is_running(dead.process):
            return dead
        return StartedProcess(instance_id=instance_id, process=process, run_directory=Path("/nonexistent"))

    def _instance_of(self, process: ProcessIdentity) -> str:
        marks = procfs.read_environment(process.pid) if procfs.is_running(process) else {}
        return marks.get(INSTANCE_MARK, "") if marks.get(HOME_MARK) == self._home else ""

    def _refuse_second(self, instance_id: str) -> None:
        if (before := self._registry.read(instance_id)) and (members := self._members(before)):
            raise Conflict(f"{instance_id} still runs (pid {members[0].pid})", hint="Stop it before it is started again.")

    def _end(self, started: StartedProcess, number: signal.Signals, seconds: float) -> list[procfs.ProcessEntry]:
        """Signal all members and wait; returns those that are left, new ones included."""
        with contextlib.ExitStack() as descriptors:
            watched = select.poll()
            waiting = set()
            members = self._members(started)
            for member in members:
                if (handle := _open_handle(member)) is not None:
                    _keep(descriptors, handle)
                    with contextlib.suppress(ProcessLookupError, PermissionError):  # of another user, as below sudo
                        signal.pidfd_send_signal(handle, number)
                    watched.register(handle, select.POLLIN)
                    waiting.add(handle)
            deadline = time.monotonic() + seconds
            while waiting and (left := deadline - time.monotonic()) > 0:
                for handle, _ in watched.poll(left * 1000):
                    watched.unregister(handle)
                    waiting.discard(handle)
        self._reap(started.process)
        return self._members(started) if members else []

    def _reap(self, process: ProcessIdentity) -> None:
        """Where it was our child and ended, let the kernel forget it, and note how."""
        now = procfs.read_process(process.pid)
        if now is None or now.start_ticks != process.start_ticks:
            return
        with contextlib.suppress(ChildProcessError):
            ended, status = os.waitpid(process.pid, os.WNOHANG)
            if ended:
                self._statuses[process] = status

    def _members(self, started: StartedProcess) -> list[procfs.ProcessEntry]:
        """The process, its descendants, its session, and whatever carries its marks; the oldest first."""
        everything = self._processes.read()
        main = everything.get(started.process.pid)
        alive = main is not None and identify(main) == started.process
        others = {os.getpid()}  # a program may have started this daemon: its engines are not the program's
        members = {pid for pid in everything if self._belongs(everything[pid], started, alive=alive)} - others
        grown = True
        while grown:
            children = {pid for pid, one in everything.items() if one.parent_pid in members} - members - others
            members |= children
            grown = bool(children)
        return sorted((everything[pid] for pid in members), key=lambda one: (one.start_ticks, one.pid))

    def _belongs(self, process: procfs.ProcessEntry, started: StartedProcess, *, alive: bool) -> bool:
        if process.kernel_thread or process.start_ticks < started.process.start_ticks:
            return False
        if process.pid == started.process.pid:
            return alive
        if process.session == started.process.pid:
            # A session's number is not reused while it has members, but it may be the session of a later process
            # with the same pid, if ours is dead: then the working directory must be ours.
            return alive or procfs.read_working_directory(process.pid) == started.run_directory
        return bool(started.instance_id) and self._marks.instance_of(process) == started.instance_id

    def _marked(self) -> Iterable[tuple[procfs.ProcessEntry, str]]:
        for process in procfs.read_processes():
            if process.kernel_thread or process.pid == os.getpid():
                continue
            if instance_id := self._marks.instance_of(process):
                yield process, instance_id


class _Marks:
    """Whose a process is, by its environment; read once per process, as reading it is most of the cost with many engines."""

    def __init__(self, home: str) -> None:
        self._home = home
        self._known: dict[tuple[int, int], str] = {}

    def instance_of(self, process: procfs.ProcessEntry) -> str:
        """The instance that it belongs to; empty: none of this home."""
        key = (process.pid, process.start_ticks)
        known = self._known.get(key)
        if known is not None:
            return known
        marks = procfs.read_environment(process.pid)
        found = marks.get(INSTANCE_MARK, "") if marks.get(HOME_MARK) == self._home else ""
        if found or _is_settled(process):
            if len(self._known) >= _MOST_KNOWN:
                self._known = {}
            self._known[key] = found
        return found


def _is_settled(process: procfs.ProcessEntry) -> bool:
    """Whether it has surely done its exec: a program that is just starting may still have its parent's environment."""
    ticks = time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK")
    return ticks - process.start_ticks > _SETTLED_SECONDS * os.sysconf("SC_CLK_TCK")


def _leaders_first(process: procfs.ProcessEntry) -> tuple[bool, int, int]:
    return process.session != process.pid, process.start_ticks, process.pid


def _find_program(command: Command) -> str:
    program = shutil.which(command.argv[0], path=command.environment.get("PATH", os.environ.get("PATH")))
    if program is None:
        raise EngineUnavailable(
            f"{command.argv[0]!r} is not a program on this machine", hint="Install it, or put its folder on PATH."
        )
    return str(Path(program).absolute())


def _inherited_environment() -> dict[str, str]:
    """What any program needs; no keys, tokens or settings of the daemon."""
    return {name: value for name, value in os.environ.items() if name in _INHERITED or name.startswith(_INHERITED_PREFIXES)}


def _spawn(argv: tuple[str, ...], environment: Mapping[str, str], stdin: int, log: int) -> int:
    actions = [
        (os.POSIX_SPAWN_DUP2, stdin, 0),
        (os.POSIX_SPAWN_DUP2, log, 1),
        (os.POSIX_SPAWN_DUP2, log, 2),
        *((os.POSIX_SPAWN_CLOSE, descriptor) for descriptor in _leaking_descriptors()),
    ]
    try:
        return os.posix_spawn(
            argv[0],
            argv,
            environment,
            file_actions=actions,
            setsid=True,
            setsigmask=(),
            setsigdef=signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP},
        )
    except OSError as error:
        raise EngineFailed(f"cannot start a process: {error.strerror}", hint="See `ulimit -u` and free memory.") from error


def _open_gate(stack: contextlib.ExitStack) -> tuple[int, int]:
    gate, word = os.pipe()
    return _keep(stack, gate), _keep(stack, word)


def _join(group: Path, pid: int) -> None:
    """Put the process into the group before its gate opens, so that all its memory and children count to the group."""
    try:
        (group / "cgroup.procs").write_text(str(pid))
    except OSError as error:
        raise EngineFailed(
            f"cannot put a process into {group}: {error.strerror}", hint="Its memory limit would not hold; nothing was started."
        ) from error


def _leaking_descriptors() -> list[int]:
    """Descriptors that C code opened without close-on-exec; Python's own never leak."""
    leaking = []
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - numbers, not paths
        with contextlib.suppress(OSError):
            if int(name) > 2 and os.get_inheritable(int(name)):  # noqa: PLR2004 - above stderr
                leaking.append(int(name))
    return leaking


def _keep(stack: contextlib.ExitStack, descriptor: int) -> int:
    stack.callback(os.close, descriptor)
    return descriptor


def _open_handle(process: procfs.ProcessEntry) -> int | None:
    """A pidfd of exactly this process: opened first, compared after, so that a reused pid shows."""
    try:
        handle = os.pidfd_open(process.pid)
    except OSError:
        return None
    now = procfs.read_process(process.pid)
    if now is None or now.start_ticks != process.start_ticks:
        os.close(handle)
        return None
    return handle
