"""Imports an engine's packages once, then becomes the engine of each start by a fork.

It runs in the engine's interpreter, so it needs nothing but the standard library. The daemon holds the other end of the socket
that is its standard input. It ends with the daemon, when it was idle for long, and when a package on disk has changed.

1. It imports the modules, with what all starts share of the environment, and checks that a fork is safe: after a trial fork one
   thread is left (OpenBLAS ends its threads before a fork), no GPU is open, no child runs.
2. Per start it forks twice, so that the engine becomes a child of the daemon, as in a plain start. The child takes on session,
   log, limits, folder and environment, also in what /proc shows of it, and waits for the word of the launcher.
3. The child attaches the interposer and runs the engine's program as `__main__`. If that cannot be done, it executes the
   program plainly in its place.
4. Before it runs the engine it forks a spare. A process that the engine starts by multiprocessing's `spawn` takes over the
   spare, which has all packages, in place of a new interpreter. Where the environment differs in a variable that is read at
   import, or no spare is left, the spawn is a plain one.
"""

import builtins
import contextlib
import ctypes
import fcntl
import gc
import importlib
import importlib.machinery
import json
import multiprocessing.util
import os
import resource
import select
import socket
import struct
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

LARGEST_MESSAGE = 1 << 20
_MOST_DESCRIPTORS = 250
_METADATA = (".dist-info", ".egg-info", ".pth")
_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri")
_PR_SET_NAME, _PR_SET_MM, _PR_SET_MM_MAP = 15, 35, 14
_PRIVATE_ANONYMOUS, _READ_WRITE = 0x22, 3
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIMITS = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]

Work = Callable[[], object]


class Unusable(Exception):
    """Why no process may be forked from this one."""


class PreparedProgram:
    """The process that waits for starts."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = settings
        self._control = _take_standard_input()
        self._changed: dict[str, tuple[str | None, str | None]] = {}  # by imports, of the environment: before and after

    def run(self) -> Work:
        """Returns in a child that is to become an engine, with what it does then."""
        try:
            before = dict(os.environ)
            _import(self._settings["modules"])
            both = ((name, before.get(name), os.environ.get(name)) for name in {*before, *os.environ})
            self._changed = {name: (old, new) for name, old, new in both if old != new}
            _check_safe_to_fork()
            gc.collect()
            gc.freeze()  # a collection in a child writes into every page otherwise
            memory = _read_memory_bytes(self._settings["most_bytes"])
        except Unusable as error:
            self._leave({"unusable": str(error)})
        packages = _read_packages()
        self._answer({"ready": {"memory_bytes": memory, "modules": len(sys.modules)}})
        while select.select([self._control], [], [], self._settings["idle_seconds"])[0]:
            data, descriptors, _, _ = socket.recv_fds(self._control, LARGEST_MESSAGE, 2, socket.MSG_CMSG_CLOEXEC)
            if not data:
                break
            if _read_packages() != packages:
                self._leave({"unusable": "changed"})
            request = json.loads(data)
            if not descriptors:
                self._answer({"ready": {}})
            elif work := self._fork(request, *descriptors):
                return work
        os._exit(0)

    def _fork(self, request: Mapping[str, Any], gate: int, log: int) -> Work | None:
        """In this process None, once the child is marked; in the child its work."""
        report, marked = os.pipe()
        middle = os.fork()
        if middle == 0:
            try:
                if os.fork() > 0:
                    os._exit(0)
                self._control.close()
                os.close(report)
                return _Engine(self._settings, request, self._changed).become(gate, log, marked)
            except BaseException as error:  # noqa: BLE001 - it must not go on as a second server
                print(f"a prepared process could not become the engine: {error!r}", file=sys.stderr, flush=True)
                os._exit(1)
        for descriptor in (gate, log, marked):
            os.close(descriptor)
        os.waitpid(middle, 0)  # from here on the child belongs to the daemon
        with os.fdopen(report) as file:
            pid = file.read()
        self._answer({"pid": int(pid)} if pid else {"failed": "the child ended"})
        return None

    def _answer(self, message: object) -> None:
        try:
            self._control.send(json.dumps(message).encode())
        except OSError:  # the daemon has ended
            os._exit(0)

    def _leave(self, message: object) -> NoReturn:
        self._answer(message)
        os._exit(0)


class _Engine:
    """The child that becomes the engine of one start."""

    def __init__(
        self, settings: Mapping[str, Any], request: Mapping[str, Any], changed: Mapping[str, tuple[str | None, str | None]]
    ) -> None:
        self._settings = settings
        self._changed = changed
        self._argv: list[str] = request["argv"]
        self._plain: dict[str, str] = request["environment"]
        loaded = {name: os.environ[name] for name in ("LD_PRELOAD",) if name in os.environ}
        self._environment = {**settings["environment"], **self._plain, **loaded}
        self._state = request["state"]

    def become(self, gate: int, log: int, marked: int) -> Work:
        os.setsid()
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        _take_state(self._state, self._environment)
        self._take_changes()
        multiprocessing.current_process().authkey = os.urandom(32)  # siblings would share it
        _show(self._settings["interpreter"] + self._argv, self._environment)
        _LIBC.prctl(_PR_SET_NAME, os.path.basename(self._argv[0]).encode()[:15], 0, 0, 0)
        os.write(marked, str(os.getpid()).encode())
        os.close(marked)
        if os.read(gate, 8) != b"go\n":  # the daemon died before the process was noted
            os._exit(0)
        os.close(gate)
        try:
            return _begin(self._settings, dict(os.environ), self._run)
        except (Unusable, OSError) as error:
            print(f"starts plainly: {error}", file=sys.stderr, flush=True)
            os.execve(self._argv[0], self._argv, self._plain)  # noqa: S606 - the engine itself

    def _take_changes(self) -> None:
        """As if this process had imported, except where the start sets a value of its own."""
        for name, (before, after) in self._changed.items():
            if self._environment.get(name) != before:
                continue
            if after is None:
                del os.environ[name]
            else:
                os.environ[name] = after

    def _run(self) -> None:
        """The program's text as `__main__`, as the interpreter runs it."""
        path = self._argv[0]
        main = types.ModuleType("__main__")
        loader = importlib.machinery.SourceFileLoader("__main__", path)
        main.__dict__.update(__file__=path, __builtins__=builtins, __loader__=loader, __cached__=None)
        sys.modules["__main__"] = main
        sys.argv = list(self._argv)
        exec(compile(Path(path).read_bytes(), path, "exec"), main.__dict__)  # noqa: S102 - the engine's program


# --- before the first start ---


def _take_standard_input() -> socket.socket:
    """The control socket, out of the way of packages that look at standard input."""
    high = fcntl.fcntl(0, fcntl.F_DUPFD_CLOEXEC, 10)
    _close_standard_input()
    return socket.socket(fileno=high)


def _close_standard_input() -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)


def _import(modules: Iterable[str]) -> None:
    """What this version does not have is left out."""
    packages = _read_packages(modules=False)
    for name in modules:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if not error.name or not f"{name}.".startswith(f"{error.name}."):
                raise Unusable(f"{name} cannot be imported: {error}") from error
        except BaseException as error:
            raise Unusable(f"{name} cannot be imported: {error!r}") from error
    if not any(name in sys.modules for name in modules):
        raise Unusable("it has none of the modules to import")
    if packages.items() - _read_packages(modules=False).items():  # an import may add folders
        raise Unusable("its packages changed while it imported them")


def _check_safe_to_fork() -> None:
    trial = os.fork()
    if trial == 0:
        os._exit(0)
    os.waitpid(trial, 0)
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        raise Unusable(f"{threads - 1} threads run after its imports")
    if _read_text(f"/proc/self/task/{os.getpid()}/children").strip():
        raise Unusable("a process that it started runs after its imports")
    if any(device in line for line in _open_files() for device in _DEVICES):
        raise Unusable("its imports opened a GPU")
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is not None and cuda.is_initialized():
        raise Unusable("its imports initialised the GPU")


def _open_files() -> list[str]:
    found = [line for line in _read_text("/proc/self/maps").splitlines() if "/dev/" in line]
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    return found


def _read_packages(*, modules: bool = True) -> dict[str, object]:
    """What a change on disk changes: the names of installed packages, and the files that were imported."""
    found: dict[str, object] = {}
    for folder in sys.path:
        with contextlib.suppress(OSError):
            found[folder] = " ".join(sorted(name for name in os.listdir(folder) if name.endswith(_METADATA)))
    for module in list(sys.modules.values()) if modules else ():
        path = getattr(module, "__dict__", {}).get("__file__")
        if isinstance(path, str):
            found[path] = None
            with contextlib.suppress(OSError):
                now = os.stat(path)
                found[path] = (now.st_mtime_ns, now.st_size, now.st_ino)
    return found


def _read_memory_bytes(most: int) -> int:
    lines = _read_text("/proc/self/smaps_rollup").splitlines()
    found = sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    if found > most:
        raise Unusable(f"it takes {found >> 20} MiB of memory, more than {most >> 20} MiB")
    return found


def _read_text(path: str) -> str:
    return Path(path).read_text(encoding="utf-8", errors="replace")


# --- in a child ---


def _state() -> dict[str, Any]:
    """What a child process inherits, beside descriptors and environment."""
    mask = os.umask(0)
    os.umask(mask)
    return {
        "directory": os.getcwd(),
        "umask": mask,
        "limits": [(number, *resource.getrlimit(number)) for number in _LIMITS],
        "cores": sorted(os.sched_getaffinity(0)),
    }


def _take_state(state: Mapping[str, Any], environment: Mapping[str, str]) -> None:
    os.chdir(state["directory"])
    os.umask(state["umask"])
    for number, soft, hard in state["limits"]:
        if resource.getrlimit(number) != (soft, hard):
            resource.setrlimit(number, (soft, hard))
    os.sched_setaffinity(0, state["cores"])
    os.environ.clear()
    os.environ.update(environment)


def _show(argv: list[str], environment: Mapping[str, str]) -> None:
    """In /proc/PID/cmdline and environ: by them the daemon knows its engines, and people read them. Raises Unusable."""
    words = b"".join(os.fsencode(word) + b"\0" for word in argv)
    variables = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in environment.items())
    _LIBC.mmap.restype = _LIBC.sbrk.restype = ctypes.c_void_p
    size = ctypes.c_size_t(len(words) + len(variables) + 1)
    at = _LIBC.mmap(None, size, _READ_WRITE, _PRIVATE_ANONYMOUS, -1, ctypes.c_long(0))
    if at in (None, ctypes.c_void_p(-1).value):
        raise Unusable("no memory for its command line")
    ctypes.memmove(at, words + variables, len(words) + len(variables))
    fields = _read_text("/proc/self/stat").rpartition(")")[2].split()
    code_start, code_end, stack, data_start, data_end, heap = (int(fields[n - 3]) for n in (26, 27, 28, 45, 46, 47))
    middle, end = at + len(words), at + len(words) + len(variables)
    places = (code_start, code_end, data_start, data_end, heap, _LIBC.sbrk(0), stack, at, middle, middle, end, 0)
    layout = ctypes.create_string_buffer(struct.pack("12QII", *places, 0, 0xFFFF_FFFF), 104)  # struct prctl_mm_map
    if _LIBC.prctl(_PR_SET_MM, _PR_SET_MM_MAP, layout, ctypes.c_ulong(104), ctypes.c_ulong(0)) != 0:
        raise Unusable(f"the kernel shows no other command line: {os.strerror(ctypes.get_errno())}")


def _attach(environment: Mapping[str, str]) -> None:
    """The interposer was loaded without a tenant; from here on its limits hold."""
    if environment.get("AIMGPU_REGION"):
        attach = getattr(ctypes.CDLL(None), "aimgpu_attach", None)
        if attach is None or attach() != 0:
            raise Unusable("the GPU's limits cannot be attached")


# --- processes that the engine spawns ---


class _Spares:
    """Children that wait to become what the engine spawns."""

    def __init__(self, settings: Mapping[str, Any], environment: Mapping[str, str]) -> None:
        self._varying = tuple(settings["varying"])
        self._environment = dict(environment)
        self._owner = os.getpid()
        self._waiting: list[tuple[int, socket.socket]] = []
        self._spawn = multiprocessing.util.spawnv_passfds

    def fork(self) -> socket.socket | None:
        """In the spare its end of the socket."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if pid == 0:
            ours.close()
            for _, other in self._waiting:
                other.close()
            return theirs
        theirs.close()
        self._waiting.append((pid, ours))
        return None

    def serve(self) -> None:
        multiprocessing.util.spawnv_passfds = self._hand_over  # type: ignore[assignment, unused-ignore]
        os.register_at_fork(before=self._end)  # an engine that forks needs none

    def _hand_over(self, path: Any, args: list[Any], passfds: Sequence[int]) -> int:  # noqa: ANN401 - as the standard library
        words, descriptors = [os.fsdecode(word) for word in args], list(passfds)
        if os.fsdecode(path) == sys.executable and words[-1] == "--multiprocessing-fork" and self._is_like_us():
            numbers = [0, 1, 2, *descriptors]
            message = {"words": words, "numbers": numbers, "environment": dict(os.environ), "state": _state()}
            while self._waiting and os.getpid() == self._owner and len(numbers) <= _MOST_DESCRIPTORS:
                pid, its = self._waiting.pop()
                with its, contextlib.suppress(OSError):  # it was killed
                    socket.send_fds(its, [json.dumps(message).encode()], numbers)
                    return pid
        return self._spawn(path, args, passfds)

    def _is_like_us(self) -> bool:
        """Whether packages would be the same if they were imported again."""
        now = dict(os.environ)
        names = {name for name in {*now, *self._environment} if now.get(name) != self._environment.get(name)}
        return all(name.startswith(self._varying) for name in names)

    def _end(self) -> None:
        while self._waiting and os.getpid() == self._owner:
            pid, its = self._waiting.pop()
            its.close()
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def _begin(settings: Mapping[str, Any], environment: Mapping[str, str], run: Work) -> Work:
    """In the engine `run`; in a spare, once it is needed, its own work. A spare holds no place in the interposer's region."""
    spares = _Spares(settings, environment)
    for _ in range(settings["spares"]):
        if (theirs := spares.fork()) is not None:
            return _become_spawned(theirs, settings)
    _attach(environment)
    if "numpy.random" in sys.modules:  # seeded at import, it would give the same numbers in all children
        sys.modules["numpy.random"].seed()
    spares.serve()
    return run


def _become_spawned(theirs: socket.socket, settings: Mapping[str, Any]) -> Work:
    data, descriptors, _, _ = socket.recv_fds(theirs, LARGEST_MESSAGE, _MOST_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
    if not data:  # the engine ended, or needs no spare
        os._exit(0)
    theirs.close()
    request = json.loads(data)
    numbers: list[int] = request["numbers"]
    above = max(numbers + descriptors) + 1
    moved = [fcntl.fcntl(one, fcntl.F_DUPFD_CLOEXEC, above) for one in descriptors]
    for one in descriptors:
        os.close(one)
    for one, number in zip(moved, numbers, strict=True):
        os.dup2(one, number)
        os.close(one)
    words: list[str] = request["words"]

    def run() -> None:
        main = types.ModuleType("__main__")
        main.__dict__["__builtins__"] = builtins
        sys.modules["__main__"] = main
        at = words.index("-c")
        sys.argv = ["-c", *words[at + 2 :]]
        exec(compile(words[at + 1], "<string>", "exec"), main.__dict__)  # noqa: S102 - as a new interpreter

    try:
        _take_state(request["state"], request["environment"])
        _show(words, request["environment"])
        return _begin(settings, request["environment"], run)
    except (Unusable, OSError, ValueError) as error:
        print(f"spawns plainly: {error}", file=sys.stderr, flush=True)
        os.execve(sys.executable, words, request["environment"])  # noqa: S606 - as multiprocessing would


def _preload(settings: Mapping[str, Any]) -> None:
    """Libraries that the engine would preload into what it spawns are loaded now: only an exec preloads one."""
    loaded = os.environ.get("LD_PRELOAD", "")
    for pattern in settings["preload"]:
        stem = pattern.rpartition("/")[2].partition("*")[0]
        found = [str(path) for folder in sys.path for path in sorted(Path(folder or ".").glob(pattern))]
        if found and stem not in loaded:
            loaded = f"{loaded}:{found[0]}" if loaded else found[0]
    if loaded != os.environ.get("LD_PRELOAD", ""):
        os.environ["LD_PRELOAD"] = loaded
        os.execve(sys.executable, [*settings["interpreter"], *sys.argv], os.environ)  # noqa: S606 - this program again


if __name__ == "__main__":
    _settings = json.loads(sys.argv[1])
    sys.path[0] = os.path.dirname(os.path.realpath(_settings["program"]))
    _preload(_settings)
    _only_module = sys.modules["__main__"]  # it would be emptied with its last reference
    _work = PreparedProgram(_settings).run()
    _work()
