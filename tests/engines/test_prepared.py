"""Prepared processes: what an engine inherits, and that whatever is wrong with one leaves a plain start."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from tests.engines.prepared_engine import PREPARATION, write_program

from aimgpu import procfs
from aimgpu.domain import ProcessIdentity
from aimgpu.engines.launchers import process as process_module
from aimgpu.engines.launchers.process import ProcessLauncher
from aimgpu.engines.prepared import processes
from aimgpu.engines.prepared.processes import PreparedBounds, PreparedProcesses
from aimgpu.engines.protocols import Command

WaitUntil = Callable[..., None]

# It writes what it is into the file of its first argument, and waits where the second says so.
ENGINE = """
import json, os, resource, sys, time
import slow_packages

def describe(path, **more):
    shown = [open(f"/proc/self/{name}", "rb").read().decode().split("\\0") for name in ("cmdline", "environ")]
    import multiprocessing
    seen = {
        "key": multiprocessing.current_process().authkey.hex(),
        "pid": os.getpid(), "parent": os.getppid(), "session": os.getsid(0), "argv": sys.argv, "folder": os.getcwd(),
        "imported_by": slow_packages.IMPORTED_BY, "environment": dict(os.environ), "shown": shown,
        "files": {n: os.readlink(f"/proc/self/fd/{n}") for n in ("0", "1", "2")}, "path": sys.path[0],
        "name": open("/proc/self/comm").read(), "limit": resource.getrlimit(resource.RLIMIT_CORE), **more,
    }
    with open(path + ".new", "w") as file:
        json.dump(seen, file)
    os.rename(path + ".new", path)

def work(path, value):
    describe(path, value=value)
    sys.exit(7)

if __name__ == "__main__":
    print("hello", flush=True)
    path, *words = sys.argv[1:]
    if "spawn" in words:
        import multiprocessing
        os.environ["LAZY_SETTING"] = "set late"
        if "other" in words:
            os.environ["READ_AT_IMPORT"] = "set late"
        child = multiprocessing.get_context("spawn").Process(target=work, args=(path + ".spawned", {"a": 1}))
        child.start()
        child.join()
        describe(path, spawned=child.pid, status=child.exitcode)
    else:
        describe(path)
    while "wait" in words:
        time.sleep(1)
"""


class Bench:
    """A launcher and a program of Python, in a folder of their own."""

    def __init__(self, folder: Path, launcher: ProcessLauncher, wait_until: WaitUntil) -> None:
        self.folder, self.launcher, self._wait_until = folder, launcher, wait_until
        self.bin = folder / "bin"
        self._count = 0

    def command(self, *words: str, packages: str = "", **environment: str) -> Command:
        program = write_program(self.bin, ENGINE, packages) if not (self.bin / "engine").exists() else self.bin / "engine"
        return Command(
            argv=(str(program), str(self.folder / f"seen{self._count}"), *words),
            environment={"LAZY_SETTING": "early", **environment},
            preparation=PREPARATION,
        )

    def start(self, command: Command, *, fetch: bool = True) -> ProcessIdentity:
        self._count += 1
        run = self.folder / f"run{self._count}"
        if fetch:
            self.launcher.fetch(command, run, lambda _: None, lambda: None)
        return self.launcher.start(f"chat-{self._count}", command, run)

    def read(self, command: Command, ending: str = "") -> dict[str, object]:
        path = Path(command.argv[1] + ending)
        self._wait_until(path.exists, "the engine says what it is")
        return dict(json.loads(path.read_text()))

    def run(self, *words: str, packages: str = "", **environment: str) -> bool:
        """Start one that answers; whether a prepared process became it."""
        command = self.command(*words, packages=packages, **environment)
        process = self.start(command)
        seen = self.read(command)
        assert seen["pid"] == process.pid
        forked = self.launcher.is_forked(process)
        assert (seen["imported_by"] != process.pid) == forked
        return forked


@pytest.fixture
def bench(tmp_path: Path, launcher: ProcessLauncher, wait_until: WaitUntil) -> Bench:
    return Bench(tmp_path, launcher, wait_until)


def bound(launcher: ProcessLauncher, home: Path, **bounds: float) -> None:
    launcher._prepared = PreparedProcesses(process_module._spawn, home / "prepared", bounds=PreparedBounds(**bounds))  # type: ignore[arg-type]


def test_it_is_what_a_plain_start_gives(bench: Bench) -> None:
    def look(*, prepared: bool) -> dict[str, object]:
        changes = "os.environ |= {'ADDED': 'new', 'CHANGED': 'new'}; os.environ.pop('REMOVED', None)"
        command = bench.command("wait", packages=changes, SETTING="one", CHANGED="old", REMOVED="old")
        process = bench.start(command if prepared else replace(command, preparation=None))
        seen = bench.read(command)
        assert (seen["imported_by"] != process.pid) == prepared
        for changing in ("pid", "imported_by", "key"):
            del seen[changing]
        seen["session"] = seen["session"] == process.pid
        text = json.dumps(seen)
        for number in (1, 2):
            text = text.replace(f"chat-{number}", "chat").replace(f"run{number}", "run").replace(f"seen{number - 1}", "seen")
        seen = dict(json.loads(text))
        seen["shown"] = [sorted(words) for words in seen["shown"]]  # type: ignore[attr-defined]
        return dict(seen)

    plain, forked = look(prepared=False), look(prepared=True)
    for shell_only in ("_", "OLDPWD", "SHLVL"):  # set by /bin/sh, where it is the gate
        plain["environment"].pop(shell_only, None)  # type: ignore[attr-defined]
    plain["environment"].pop("PWD", None)  # type: ignore[attr-defined]
    plain["shown"][1] = [word for word in plain["shown"][1] if not word.startswith(("PWD=", "_=", "OLDPWD=", "SHLVL="))]  # type: ignore[index]
    assert forked == plain


def test_what_it_spawns_comes_from_the_prepared_process_too(bench: Bench) -> None:
    command = bench.command("spawn", "wait", packages="os.environ['ADDED'] = 'new'")
    process = bench.start(command)
    main, spawned = bench.read(command), bench.read(command, ".spawned")
    assert main["imported_by"] == spawned["imported_by"] not in (main["pid"], spawned["pid"])
    assert (spawned["parent"], spawned["session"]) == (process.pid, process.pid)
    assert (main["spawned"], main["status"], spawned["value"]) == (spawned["pid"], 7, {"a": 1})
    assert spawned["environment"]["LAZY_SETTING"] == "set late"  # type: ignore[index]
    assert spawned["key"] == main["key"]
    assert spawned["shown"][0][-2] == "--multiprocessing-fork"  # type: ignore[index]
    bench.launcher.stop(process, grace_seconds=5)
    assert not procfs.is_running(process)


def test_a_spawn_whose_environment_an_import_may_read_is_a_plain_one(bench: Bench) -> None:
    command = bench.command("spawn", "other")
    bench.start(command)
    main, spawned = bench.read(command), bench.read(command, ".spawned")
    assert main["imported_by"] != main["pid"]
    assert spawned["imported_by"] == spawned["pid"]
    assert main["status"] == 7


def test_starts_with_other_settings_share_nothing(bench: Bench) -> None:
    assert bench.run(SETTING="one")
    (first,) = bench.launcher.prepared_pids()
    assert bench.run(SETTING="one", HIP_VISIBLE_DEVICES="3")
    assert bench.launcher.prepared_pids() == (first,)
    assert bench.run(SETTING="two")
    assert len(bench.launcher.prepared_pids()) == 2
    assert bench.run(SETTING="three")
    assert len(bench.launcher.prepared_pids()) == 2, "they are bounded in number: the oldest ends"
    assert first not in bench.launcher.prepared_pids()


def test_starts_share_no_key_of_multiprocessing(bench: Bench) -> None:
    keys = set()
    for _ in range(2):
        process = bench.start(command := bench.command())
        keys.add(bench.read(command)["key"])
        assert bench.launcher.is_forked(process)
    assert len(keys) == 2


def test_what_a_start_sets_itself_is_not_what_an_import_set(bench: Bench) -> None:
    command = bench.command(packages="os.environ.setdefault('HIP_X', 'import')", HIP_X="own")
    process = bench.start(command)
    assert bench.read(command)["environment"]["HIP_X"] == "own"  # type: ignore[index]
    assert bench.launcher.is_forked(process)


def test_a_secret_is_not_in_its_environment(bench: Bench) -> None:
    command = replace(bench.command(SECRET="s3cret"), environment={}, secrets={"SECRET": "s3cret"})
    process = bench.start(command)
    assert bench.read(command)["environment"]["SECRET"] == "s3cret"  # type: ignore[index]
    assert bench.launcher.is_forked(process)
    (pid,) = bench.launcher.prepared_pids()
    assert "SECRET" not in procfs.read_environment(pid)


@pytest.mark.parametrize("change", ["module", "package"])
def test_it_is_replaced_when_packages_change(bench: Bench, change: str) -> None:
    assert bench.run()
    (before,) = bench.launcher.prepared_pids()
    if change == "module":
        (bench.bin / "slow_packages.py").write_text("import os\nIMPORTED_BY = os.getpid()\nNEWER = True\n")
    else:
        (bench.bin / "more-1.0.dist-info").mkdir()
    assert bench.run()
    assert before not in bench.launcher.prepared_pids()
    assert not procfs.read_process(before)


@pytest.mark.parametrize(
    "packages",
    [
        "import threading, time\nthreading.Thread(target=time.sleep, args=(3600,), daemon=True).start()",
        "import subprocess\nif 'AIMGPU_INSTANCE' not in os.environ: subprocess.Popen(['sleep', '3600'])",
        "if 'AIMGPU_INSTANCE' not in os.environ: raise RuntimeError('not now')",
        "if 'AIMGPU_INSTANCE' not in os.environ: os._exit(3)",
        "import signal\nif 'AIMGPU_INSTANCE' not in os.environ: os.kill(os.getpid(), signal.SIGSEGV)",
        "import sys; from types import SimpleNamespace as N; sys.modules['torch'] = N(cuda=N(is_initialized=lambda: True))",
    ],
    ids=["thread", "process", "error", "exit", "crash", "gpu"],
)
def test_where_a_fork_is_unsafe_or_an_import_fails_the_start_is_plain(bench: Bench, packages: str) -> None:
    assert not bench.run(packages=packages)
    assert bench.launcher.prepared_pids() == ()
    assert not bench.run(), "and so are the next ones"


@pytest.mark.parametrize("state", ["killed", "stopped"])
def test_one_that_died_or_hangs_leaves_a_plain_start(bench: Bench, state: str) -> None:
    assert bench.run()
    bench.launcher._prepared._bounds = PreparedBounds(fork_seconds=0.5)
    (pid,) = bench.launcher.prepared_pids()
    os.kill(pid, signal.SIGKILL if state == "killed" else signal.SIGSTOP)
    command = bench.command()
    process = bench.start(command, fetch=False)
    assert not bench.launcher.is_forked(process)
    assert bench.read(command)["imported_by"] == process.pid
    assert bench.launcher.prepared_pids() == ()


def test_an_import_that_takes_too_long_leaves_a_plain_start(bench: Bench) -> None:
    bound(bench.launcher, bench.folder, import_seconds=0.3)
    assert not bench.run(packages="import time\nif 'AIMGPU_INSTANCE' not in os.environ: time.sleep(3600)")
    assert bench.launcher.prepared_pids() == ()


def test_a_wait_can_be_given_up(bench: Bench) -> None:
    class Released(Exception):
        pass

    def give_up() -> None:
        raise Released

    command = bench.command(packages="import time\nif 'AIMGPU_INSTANCE' not in os.environ: time.sleep(3600)")
    with pytest.raises(Released):
        bench.launcher.fetch(command, bench.folder / "run", lambda _: None, give_up)


def test_more_memory_than_its_bound_is_not_kept(bench: Bench) -> None:
    bound(bench.launcher, bench.folder, most_bytes=1)
    assert not bench.run()


@pytest.mark.parametrize("broken", ["_show", "_begin", "_attach"])
def test_a_child_that_cannot_become_the_engine_leaves_a_plain_start(
    bench: Bench, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before its marks are seen it ends, and after its gate opened it executes the program in its place."""
    text = processes.PROGRAM.read_text()
    faulty = bench.folder / "program.py"
    faulty.write_text(
        text.replace(f"\ndef {broken}(", f"\ndef {broken}(*_):\n    raise Unusable('a test')\n\n\ndef _old{broken}(", 1)
    )
    monkeypatch.setattr(processes, "PROGRAM", faulty)
    command = bench.command("wait")
    process = bench.start(command)
    seen = bench.read(command)
    assert (seen["pid"], seen["imported_by"]) == (process.pid, process.pid)
    assert bench.launcher.find_started() == {"chat-1": process}


def test_after_one_that_did_not_get_ready_starts_are_plain(bench: Bench) -> None:
    command = bench.command("wait")
    process = bench.start(command)
    assert bench.launcher.is_forked(process)
    assert bench.launcher.start_otherwise(process)
    bench.launcher.stop(process, grace_seconds=0)
    again = bench.start(command)
    assert not bench.launcher.is_forked(again)
    assert not bench.launcher.start_otherwise(again), "there is no third way"


def test_one_that_was_idle_for_long_ends_and_the_next_start_makes_another(bench: Bench, wait_until: WaitUntil) -> None:
    bound(bench.launcher, bench.folder, idle_seconds=0.2)
    bench.launcher.fetch(bench.command(), bench.folder / "run", lambda _: None, lambda: None)
    (pid,) = bench.launcher.prepared_pids()

    def has_ended() -> bool:
        process = procfs.read_process(pid)
        return process is None or process.ended

    wait_until(has_ended, "it is idle")
    bench.launcher.fetch(bench.command(), bench.folder / "run", lambda _: None, lambda: None)
    (other,) = bench.launcher.prepared_pids()
    assert other != pid


_DAEMON = """
import os, signal, sys
from pathlib import Path
from aimgpu.engines.launchers.process import ProcessLauncher
from aimgpu.engines.protocols import Command, PreparedImports
home, program, seen = map(Path, sys.argv[1:])
command = Command(argv=(str(program), str(seen), "wait"), preparation=PreparedImports(modules=("slow_packages",)))
launcher = ProcessLauncher(home)
launcher.fetch(command, home / "run", lambda _: None, lambda: None)
process = launcher.start("chat-0", command, home / "run")
assert launcher.is_forked(process)
print(*launcher.prepared_pids(), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_it_ends_with_the_daemon_and_its_engine_is_adopted_by_the_next_one(tmp_path: Path, wait_until: WaitUntil) -> None:
    home, seen = tmp_path / "home", tmp_path / "seen"
    program = write_program(tmp_path / "bin", ENGINE)
    done = subprocess.run([sys.executable, "-c", _DAEMON, home, program, seen], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    prepared = int(done.stdout)
    wait_until(lambda: (one := procfs.read_process(prepared)) is None or one.ended, "it ends with the daemon")
    later = ProcessLauncher(home)
    found = later.find_started()
    assert set(found) == {"chat-0"}
    wait_until(seen.exists, "the engine runs on")
    later.stop(found["chat-0"], grace_seconds=5)
    assert later.find_started() == {}


@pytest.mark.parametrize(
    ("text", "python"),
    [
        ("#!/usr/bin/python3\n", ("/usr/bin/python3",)),
        ("#!/opt/my python/bin/python3\n", None),
        ('#!/bin/sh\n\'\'\'exec\' "$(dirname "$0")/python" "$0" "$@"\n', ("{folder}/python",)),
        ("#!/bin/sh\nexec vllm-real\n", None),
        ("#!/usr/bin/env python3\n", None),
        ("\x7fELF", None),
        ("", None),
    ],
)
def test_the_interpreter_is_that_of_the_programs_first_line(tmp_path: Path, text: str, python: tuple[str, ...] | None) -> None:
    program = tmp_path / "program"
    program.write_text(text)
    (tmp_path / "python").touch()
    expected = python and tuple(word.format(folder=tmp_path) for word in python)
    assert processes._find_interpreter(program) == expected


def test_a_program_that_is_not_prepared_for_is_started_plainly(bench: Bench) -> None:
    command: Command = replace(bench.command(), preparation=None)
    environment: Mapping[str, str] = {}
    assert bench.launcher._prepared.fork(command.argv, command, environment, (bench.folder, 0, 1)) is None
