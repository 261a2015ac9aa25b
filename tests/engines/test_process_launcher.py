import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from tests.engines.prepared_engine import prepare
from tests.programs.engine import ScriptedEngine

from aimgpu import procfs
from aimgpu.domain import ProcessIdentity
from aimgpu.engines.launchers.process import ProcessLauncher
from aimgpu.engines.launchers.registry import identify
from aimgpu.engines.protocols import Command, HealthState, LaunchRequest
from aimgpu.errors import Conflict, EngineFailed, EngineUnavailable, InvalidInput

MakeRequest = Callable[..., LaunchRequest]
WaitUntil = Callable[..., None]


Start = Callable[..., ProcessIdentity]


@pytest.fixture(params=["plainly", "prepared"])
def start(request: pytest.FixtureRequest, tmp_path: Path) -> Start:
    """Both ways of starting an engine give the same engine."""
    prepared = request.param == "prepared"

    def begin(launcher: ProcessLauncher, request: LaunchRequest, *flags: str) -> ProcessIdentity:
        command = ScriptedEngine(flags=flags).command(request)
        if prepared:
            command = prepare(command, tmp_path / "bin")
            launcher.fetch(command, request.run_directory, lambda _: None, lambda: None)
        process = launcher.start(request.instance.id, command, request.run_directory)
        assert launcher.is_forked(process) == prepared
        return process

    return begin


def wait_for_children(request: LaunchRequest, wait_until: WaitUntil) -> list[int]:
    path = request.run_directory / "children.json"
    wait_until(lambda: path.exists() and path.stat().st_size > 0, "the engine lists its children")
    return [int(pid) for pid in json.loads(path.read_text())]


def is_gone(pid: int) -> bool:
    process = procfs.read_process(pid)
    return process is None or process.ended


def test_an_engine_starts_answers_and_stops(
    start: Start, launcher: ProcessLauncher, make_request: MakeRequest, wait_until: WaitUntil
) -> None:
    request = make_request()
    process = start(launcher, request)
    wait_until(
        lambda: ScriptedEngine().check_health(request.run_directory, "s3cret").state is HealthState.READY, "the engine is ready"
    )
    assert launcher.is_running(process)
    assert launcher.find_started() == {"chat-0": process}
    launcher.stop(process, grace_seconds=10)
    assert not launcher.is_running(process)
    assert launcher.find_started() == {}


def test_an_engine_is_detached_marked_and_sees_no_secrets_of_the_daemon(  # noqa: PLR0913, PLR0917 - fixtures
    start: Start,
    launcher: ProcessLauncher,
    make_request: MakeRequest,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    wait_until: WaitUntil,
) -> None:
    monkeypatch.setenv("AIMGPU_API_KEY", "the daemon's own")
    monkeypatch.setenv("OPENAI_API_KEY", "the user's own")
    request = make_request()
    process = start(launcher, request)
    wait_for_children(request, wait_until)
    environment = procfs.read_environment(process.pid)
    assert environment["AIMGPU_HOME"] == str(tmp_path / "home")
    assert environment["AIMGPU_INSTANCE"] == "chat-0"
    assert environment["HIP_VISIBLE_DEVICES"] == "0"
    assert not {"AIMGPU_API_KEY", "OPENAI_API_KEY"} & set(environment)
    found = procfs.read_process(process.pid)
    assert found is not None
    assert found.session == process.pid
    assert Path(f"/proc/{process.pid}/fd/0").readlink() == Path(os.devnull)


def test_another_launcher_of_the_same_home_finds_and_stops_it(
    start: Start, launcher: ProcessLauncher, make_request: MakeRequest, tmp_path: Path
) -> None:
    process = start(launcher, make_request())
    later = ProcessLauncher(tmp_path / "home")
    assert later.find_started() == {"chat-0": process}
    later.stop(process, grace_seconds=10)
    assert not launcher.is_running(process)


def test_another_home_finds_nothing(start: Start, launcher: ProcessLauncher, make_request: MakeRequest, tmp_path: Path) -> None:
    start(launcher, make_request())
    assert ProcessLauncher(tmp_path / "other").find_started() == {}


def test_without_its_registry_an_engine_is_found_by_its_marks(
    start: Start, launcher: ProcessLauncher, make_request: MakeRequest, tmp_path: Path, wait_until: WaitUntil
) -> None:
    request = make_request()
    process = start(launcher, request, "--children", "2")
    wait_for_children(request, wait_until)
    (tmp_path / "home/processes/chat-0.json").write_text("damaged")
    assert launcher.find_started() == {"chat-0": process}


def test_an_engine_that_ignores_sigterm_is_killed(
    start: Start, launcher: ProcessLauncher, make_request: MakeRequest, wait_until: WaitUntil
) -> None:
    request = make_request()
    process = start(launcher, request, "--ignore-sigterm")
    wait_for_children(request, wait_until)
    launcher.stop(process, grace_seconds=0.2)
    assert not launcher.is_running(process)


def test_children_end_with_the_engine_even_in_sessions_of_their_own(
    start: Start, launcher: ProcessLauncher, make_request: MakeRequest, wait_until: WaitUntil
) -> None:
    request = make_request()
    process = start(launcher, request, "--children", "2", "--detached-children", "1", "--ignore-sigterm")
    children = wait_for_children(request, wait_until)
    launcher.stop(process, grace_seconds=0.2)
    assert [pid for pid in children if not is_gone(pid)] == []


def test_children_that_outlive_their_engine_are_found_and_stopped(
    start: Start, launcher: ProcessLauncher, make_request: MakeRequest, wait_until: WaitUntil
) -> None:
    request = make_request()
    process = start(launcher, request, "--children", "1", "--detached-children", "1")
    children = wait_for_children(request, wait_until)
    os.kill(process.pid, signal.SIGKILL)
    wait_until(lambda: not launcher.is_running(process), "the engine is gone")
    assert launcher.find_started()["chat-0"].pid in children
    launcher.stop(process, grace_seconds=5)
    assert [pid for pid in children if not is_gone(pid)] == []
    assert launcher.find_started() == {}


def test_an_instance_runs_once(start: Start, launcher: ProcessLauncher, make_request: MakeRequest) -> None:
    request = make_request()
    process = start(launcher, request)
    with pytest.raises(Conflict, match=str(process.pid)):
        start(launcher, request)


def test_how_an_engine_ended_is_told(
    start: Start, launcher: ProcessLauncher, make_request: MakeRequest, wait_until: WaitUntil
) -> None:
    process = start(launcher, make_request(), "--die-at-start", "3")
    wait_until(lambda: not launcher.is_running(process), "the engine ended")
    assert launcher.how_it_ended(process) == "it ended with status 3"
    other = start(launcher, make_request(name="other"))
    assert launcher.how_it_ended(other) is None
    os.kill(other.pid, signal.SIGKILL)
    wait_until(lambda: not launcher.is_running(other), "the engine is gone")
    assert str(launcher.how_it_ended(other)).startswith("it was killed by SIGKILL")


def test_a_zombie_is_not_running(
    start: Start, launcher: ProcessLauncher, make_request: MakeRequest, wait_until: WaitUntil
) -> None:
    process = start(launcher, make_request(), "--die-at-start", "3")
    wait_until(lambda: not procfs.is_running(process), "the engine ended")
    assert not launcher.is_running(process)
    assert procfs.read_process(process.pid) is None  # and was reaped
    assert launcher.find_started() == {}


def test_a_reused_pid_is_never_touched(launcher: ProcessLauncher) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True) as bystander:
        real = procfs.read_process(bystander.pid)
        assert real is not None
        for stale in (
            ProcessIdentity(pid=real.pid, start_ticks=real.start_ticks - 1, boot_id=procfs.read_boot_id()),
            ProcessIdentity(pid=real.pid, start_ticks=real.start_ticks, boot_id="another boot"),
        ):
            assert not launcher.is_running(stale)
            launcher.stop(stale, grace_seconds=0)
        assert bystander.poll() is None
        bystander.communicate(b"\n")


def test_a_program_that_is_not_there_is_named(launcher: ProcessLauncher, tmp_path: Path) -> None:
    with pytest.raises(EngineUnavailable, match="no-such-engine"):
        launcher.start("x", Command(argv=("no-such-engine",)), tmp_path / "run")


def test_an_instance_id_cannot_leave_the_registry(launcher: ProcessLauncher, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput):
        launcher.start("../x", Command(argv=(sys.executable, "-V")), tmp_path / "run")


def test_where_the_process_cannot_be_noted_nothing_runs(
    start: Start, launcher: ProcessLauncher, make_request: MakeRequest, tmp_path: Path
) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home/processes").write_text("in the way")
    before = set(psutil.Process().children())
    with pytest.raises(EngineFailed, match="cannot note"):
        start(launcher, make_request())
    (tmp_path / "home/processes").unlink()
    assert launcher.find_started() == {}
    launcher.end_prepared()
    assert set(psutil.Process().children()) <= before  # not even a zombie is left


_DYING_DAEMON = """
import os, signal, sys
from pathlib import Path
from aimgpu.engines.launchers import process, registry
from aimgpu.engines.protocols import Command
at, home, witness = sys.argv[1:]
def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)
if at == "before-note":
    registry.Registry.write = die
elif at == "after-note":
    write = registry.Registry.write
    registry.Registry.write = lambda self, started: (write(self, started), die())
command = Command(argv=("/bin/sh", "-c", f"echo ran > {witness}; exec sleep 3600"))
process.ProcessLauncher(Path(home)).start("chat-0", command, Path(home) / "run")
if at == "after-start":
    die()
"""


@pytest.mark.parametrize("at", ["before-note", "after-note"])
def test_a_daemon_killed_before_the_engine_may_run_leaves_nothing(tmp_path: Path, at: str, wait_until: WaitUntil) -> None:
    home, witness = tmp_path / "home", tmp_path / "witness"
    daemon = subprocess.run([sys.executable, "-c", _DYING_DAEMON, at, str(home), str(witness)], check=False)
    assert daemon.returncode == -signal.SIGKILL
    wait_until(lambda: ProcessLauncher(home).find_started() == {}, "the gate ends by itself")
    assert not witness.exists()


def test_a_daemon_killed_after_the_start_leaves_an_engine_that_is_found(tmp_path: Path) -> None:
    home, witness = tmp_path / "home", tmp_path / "witness"
    daemon = subprocess.run([sys.executable, "-c", _DYING_DAEMON, "after-start", str(home), str(witness)], check=False)
    assert daemon.returncode == -signal.SIGKILL
    later = ProcessLauncher(home)
    found = later.find_started()
    assert set(found) == {"chat-0"}
    later.stop(found["chat-0"], grace_seconds=5)
    assert later.find_started() == {}


def test_garbage_in_the_log_becomes_printable(
    start: Start, launcher: ProcessLauncher, make_request: MakeRequest, wait_until: WaitUntil
) -> None:
    request = make_request()
    process = start(launcher, request, "--garbage", "--say", "the last word", "--die-at-start", "1")
    wait_until(lambda: not launcher.is_running(process), "the engine ended")
    lines = launcher.last_lines(request.run_directory)
    assert lines[-2:] == ("red", "the last word")
    assert all(line.isprintable() for line in lines)


def test_the_log_of_a_restart_does_not_hide_the_one_before(
    start: Start, launcher: ProcessLauncher, make_request: MakeRequest, wait_until: WaitUntil
) -> None:
    request = make_request()
    for word in ("first", "second"):
        start(launcher, request, "--say", word, "--die-at-start", "1")
        wait_until(lambda: launcher.find_started() == {}, "the engine ended")
    assert launcher.last_lines(request.run_directory) == ("second",)
    assert (request.run_directory / "engine.log.1").read_text() == "first\n"
    assert launcher.last_lines(request.run_directory / "nowhere") == ()


_BELOW_A_PROGRAM = """
import os, pathlib, subprocess, sys
from aimgpu import procfs
from aimgpu.engines.launchers.process import ProcessLauncher
from aimgpu.engines.launchers.registry import identify
os.setsid()
engine = subprocess.Popen(["sleep", "300"])
ProcessLauncher(pathlib.Path(sys.argv[1])).stop(identify(procfs.read_process(os.getppid())), grace_seconds=60)
print(engine.poll())
engine.kill()
engine.wait()
"""


def test_a_program_that_started_the_daemon_ends_without_its_engines(tmp_path: Path) -> None:
    words = ["sh", "-c", '"$@"; true', "sh", sys.executable, "-c", _BELOW_A_PROGRAM, str(tmp_path)]
    program = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, start_new_session=True)
    out, _ = program.communicate(timeout=120)
    assert out == "None\n"
    assert program.returncode == -signal.SIGTERM


def test_a_hand_over_that_fails_leaves_its_caller_alone(launcher: ProcessLauncher, tmp_path: Path) -> None:
    caller = subprocess.Popen(["sleep", "300"])
    try:
        found = procfs.read_process(caller.pid)
        assert found is not None
        command = Command(argv=("sleep", "300"), process=identify(found), control_group=tmp_path / "no-such-group")
        with pytest.raises(EngineFailed, match="no-such-group"):
            launcher.start("a-0", command, tmp_path)
        assert launcher.find_started() == {}
        assert caller.poll() is None
    finally:
        caller.kill()
        caller.wait()
