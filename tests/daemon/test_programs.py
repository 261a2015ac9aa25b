"""`aimgpu exec` with real processes, on a software GPU: the program is its caller's, the grant is the daemon's."""

import asyncio
import fcntl
import json
import os
import pty
import re
import signal
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.daemon.running import PATIENCE_SECONDS, ROOT, TestDaemon, wait_for

from aimgpu.cli.client import DaemonClient
from aimgpu.control.controller import ApplyResult, Controller
from aimgpu.control.events import Emit, Event, EventKind, ignore
from aimgpu.control.plan.steps import Plan
from aimgpu.daemon.programs import ProgramLine, started_instance, watch_programs
from aimgpu.domain import (
    Ask,
    Deployment,
    EngineOverrides,
    Instance,
    InstanceState,
    ProcessIdentity,
    Refusal,
    UserProgram,
    Whole,
)
from aimgpu.engines.launchers.registry import identify
from aimgpu.errors import Conflict, EngineFailed, UnknownDeployment
from aimgpu.home import Home
from aimgpu.procfs import is_running, read_process
from aimgpu.units import GIB

TENANT = str(ROOT / "examples/gpu_memory.py")


class SoftwareDaemon(TestDaemon):
    program = "aimgpu.daemon.assembly"
    arguments = ("--simulate", "MI300X", "--software")


class Stage:
    """A daemon, and programs that get their share from it."""

    def __init__(self, folder: Path) -> None:
        self.daemon = SoftwareDaemon(folder / "home")
        self.daemon.set(AIMGPU_CACHE=str(Path.home() / ".cache" / "aimgpu"))
        self.client = self.daemon.start()
        self.environment = {**os.environ, "AIMGPU_HOME": str(self.daemon.home.path), "PYTHONPATH": str(ROOT / "src")}
        self.started: list[subprocess.Popen[str]] = []

    def exec(self, options: str, *program: str, **named: Any) -> "subprocess.Popen[str]":
        command = [sys.executable, "-m", "aimgpu", "exec", *options.split(), "--", *program]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **named}
        process = subprocess.Popen(command, env=self.environment, **pipes)
        self.started.append(process)
        return process

    def finished(self, options: str, *program: str, given: str = "") -> tuple[int, str, str]:
        process = self.exec(options, *program)
        out, err = process.communicate(given, timeout=PATIENCE_SECONDS)
        return process.returncode, out, err

    def running(self, name: str) -> dict[str, Any]:
        """Once it runs."""
        return wait_for(lambda: next((one for one in self.instances() if one["name"] == name), None), f"{name} runs")

    def instances(self) -> list[dict[str, Any]]:
        return [one for one in self.client.read_status()["instances"] if one["state"] == "ready"]

    def found(self, name: str, state: str) -> dict[str, Any] | None:
        status = self.client.read_status()["instances"]
        return next((one for one in status if (one["name"], one["state"]) == (name, state)), None)

    def wait_until_free(self) -> None:
        """Of grants and of what should run."""
        wait_for(lambda: not self.daemon.books()[1] and not self.client.read_status()["deployments"], "all grants are free")

    def restart(self) -> None:
        self.daemon.spawn()
        self.client = self.daemon.wait_until_it_answers()

    def close(self) -> None:
        self.daemon.stop()
        for process in self.started:
            if process.poll() is None:
                process.kill()
            process.communicate()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    stage = Stage(tmp_path_factory.mktemp("programs"))
    yield stage
    stage.close()


@pytest.fixture
def stage(shared: Stage) -> Iterator[Stage]:
    yield shared
    for one in shared.client.read_status()["deployments"]:
        with suppress(UnknownDeployment):  # it ended meanwhile
            shared.client.release([one["name"]])
    shared.wait_until_free()


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Stage]:
    """For those that kill the daemon."""
    stage = Stage(tmp_path)
    yield stage
    stage.close()


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def test_stdin_directory_environment_and_exit_code_are_the_callers(stage: Stage) -> None:
    script = 'cat; pwd; echo "$MINE"; exit 7'
    stage.environment["MINE"] = "kept"
    code, out, _ = stage.finished("--memory 1GiB", "sh", "-c", script, given="typed\n")
    assert (code, out) == (7, f"typed\n{Path.cwd()}\nkept\n")
    stage.wait_until_free()


def test_the_program_is_the_process_that_was_called(stage: Stage) -> None:
    process = stage.exec("--memory 1GiB --name same", "sleep", "300")
    found = stage.running("same")
    assert found["pid"] == process.pid
    wait_for(lambda: Path(f"/proc/{process.pid}/comm").read_text() == "sleep\n" or None, "it became the program")
    assert (found["memory_bytes"], found["level"], found["endpoint"]) == (GIB, "runtime", None)
    stage.client.release(["same"])
    assert process.wait(PATIENCE_SECONDS) == -signal.SIGTERM
    stage.wait_until_free()


def test_it_has_the_callers_terminal_and_ctrl_c_reaches_it(stage: Stage) -> None:
    ours, theirs = pty.openpty()
    try:
        script = "import signal, sys, time; print(sys.stdin.isatty(), flush=True); time.sleep(300)"
        process = stage.exec(
            "--memory 1GiB --name typed",
            sys.executable,
            "-c",
            script,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(theirs)
        assert os.read(ours, 100).strip() == b"True"
        os.write(ours, b"\x03")
        assert process.wait(PATIENCE_SECONDS) == -signal.SIGINT
    finally:
        os.close(ours)
    stage.wait_until_free()


def test_ten_times_its_share_is_refused_at_the_byte(stage: Stage) -> None:
    code, out, err = stage.finished("--memory 1GiB --isolation enforced --name greedy", sys.executable, TENANT, "10")
    assert code == 0, err
    told = json.loads(out)
    assert (told["sees_bytes"], told["asked_bytes"], told["granted"], told["held_bytes"]) == (GIB, 10 * GIB, False, GIB)
    stage.wait_until_free()
    run = json.loads((stage.daemon.home.path / "program-runs" / "greedy.json").read_text())
    assert (run["granted_bytes"], run["peak_bytes"]) == (GIB, GIB)


def test_two_gpus_are_seen_only_where_two_were_granted_and_children_count(stage: Stage) -> None:
    process = stage.exec("--memory 1GiB --name family", "sh", "-c", f"{sys.executable} {TENANT} 1 hold; true")
    assert process.stdout is not None
    assert json.loads(process.stdout.readline())["held_bytes"] == GIB
    (gpu,) = stage.client.read_status()["gpus"]
    assert (gpu["measured_bytes"], gpu["granted_bytes"]) == (GIB, GIB)  # not counted twice, as of a stranger
    assert stage.finished("--memory 1GiB --devices 2", "true")[0] != 0
    stage.client.release(["family"])
    stage.wait_until_free()
    assert process.stdout.read() == ""  # the child is gone too


def test_what_does_not_fit_is_refused_with_the_reason_of_each_gpu(stage: Stage) -> None:
    code, _, err = stage.finished("--memory 1000GiB", "true")
    assert code != 0
    told, why, *hint = err.splitlines()
    assert told == "error: the program does not fit, nothing was started"
    assert why == "true does not fit on gpu0: needs 1000GiB; the GPU has 191.9GiB"
    assert not stage.daemon.books()[0]
    wanted = re.search(r"Request at most (\S+):", "\n".join(hint))
    assert wanted is not None, hint
    assert stage.finished(f"--memory {wanted[1]}", "true")[0] == 0, "what is proposed fits"
    stage.wait_until_free()


@pytest.mark.parametrize(
    ("options", "program", "says"),
    [
        ("", "true", "nobody can size a program"),
        ("--memory 1GiB", "no-such-program-here", "is not a program"),
        ("--memory lots", "true", "lots"),
        ("--memory 1GiB --fraction 0.5", "true", "both"),
        ("--memory 1GiB --env A=1", "true", "--detach"),
        ("--memory 1GiB --launcher docker --image a:1", "true", "--detach and --image"),
        ("--memory 1GiB --launcher docker --detach", "true", "--detach and --image"),
        ("--memory 1GiB --image a:1", "true", "'image' is for containers"),
        ("--memory 1GiB --detach --env HF_TOKEN=1", "true", "from_file"),
    ],
)
def test_a_mistake_is_named_before_anything_is_granted(stage: Stage, options: str, program: str, says: str) -> None:
    code, _, err = stage.finished(options, program)
    assert code != 0
    assert says in err


def test_those_that_wait_go_by_priority_then_age(stage: Stage) -> None:
    holder = stage.exec("--memory 190GiB --name holder", "sleep", "300")
    stage.running("holder")
    order = stage.daemon.home.path / "order"
    waiting = []
    for name, priority in (("low1", "low"), ("low2", "low"), ("high", "high")):
        options = f"--memory 190GiB --wait --priority {priority} --name {name}"
        process = stage.exec(options, "sh", "-c", f"echo {name} >> {order}")
        assert process.stderr is not None
        assert "waits for room" in process.stderr.readline()
        waiting.append(process)
    assert stage.finished("--memory 190GiB --priority low", "true")[0] != 0  # one that does not wait passes nobody by
    kill(holder.pid)
    assert [process.wait(PATIENCE_SECONDS) for process in waiting] == [0, 0, 0]
    assert order.read_text().split() == ["high", "low1", "low2"]
    stage.wait_until_free()


def test_a_wait_ends_after_its_time_or_with_its_caller(stage: Stage) -> None:
    stage.exec("--memory 190GiB --name holder", "sleep", "300")
    stage.running("holder")
    assert stage.finished("--memory 190GiB --wait 1s", "true")[0] != 0
    waits = stage.exec("--memory 190GiB --wait --name gone", "true")
    assert waits.stderr is not None
    waits.stderr.readline()
    kill(waits.pid)
    # The place in line is free again: the next one is refused for want of room, not for those ahead of it.
    wait_for(
        lambda: "ahead" not in (err := stage.finished("--memory 190GiB", "true")[2]) and "before it" not in err, "its place"
    )


def test_a_name_is_numbered_unless_it_was_given(stage: Stage) -> None:
    first = stage.exec("--memory 1GiB", "sleep", "300")
    stage.running("sleep")
    stage.exec("--memory 1GiB", "sleep", "300")
    stage.running("sleep-2")
    code, _, err = stage.finished("--memory 1GiB --name sleep", "true")
    assert code != 0
    assert "runs already" in err
    assert first.poll() is None


def test_it_is_resized_while_it_runs_and_refuses_sigterm_only_for_a_while(stage: Stage) -> None:
    process = stage.exec("--memory 1GiB --name deaf", "sh", "-c", "trap '' TERM; echo deaf; while :; do sleep 1; done")
    assert process.stdout is not None
    assert process.stdout.readline() == "deaf\n"
    stage.client.resize("deaf", 2 * GIB, dry_run=False)
    assert stage.running("deaf")["memory_bytes"] == 2 * GIB
    stage.client.release(["deaf"])
    assert process.wait(PATIENCE_SECONDS) == -signal.SIGKILL


def test_one_that_is_stopped_by_ctrl_z_keeps_its_grant(stage: Stage) -> None:
    process = stage.exec("--memory 1GiB --name paused", "sleep", "300")
    instance = stage.running("paused")["id"]
    os.kill(process.pid, signal.SIGSTOP)
    stage.finished("--memory 1GiB", "sleep", "2")  # two rounds of the supervisor
    assert stage.running("paused")["id"] == instance
    os.kill(process.pid, signal.SIGCONT)


def test_one_that_is_given_to_the_daemon_is_shown_as_ended_with_its_code_and_peak(stage: Stage) -> None:
    program = ("sh", "-c", f"echo began; {sys.executable} {TENANT} 1; exit 5")
    code, out, err = stage.finished("--memory 1GiB --detach --name job --json", *program)
    assert code == 0, err
    assert json.loads(out)["name"] == "job"
    ended = wait_for(lambda: stage.found("job", "ended"), "it ended")
    assert ended["end"] == {"exit_code": 5, "granted_bytes": GIB, "peak_bytes": GIB, "seconds": ended["end"]["seconds"]}
    assert next(iter(stage.client.read_log(ended["id"], follow=False, lines=10))) == "began"
    assert not stage.daemon.books()[1]
    shown = subprocess.run(
        [sys.executable, "-m", "aimgpu", "ps"], env=stage.environment, capture_output=True, text=True, check=True
    )
    assert "ended (5)" in shown.stdout
    assert "held at most 1GiB of 1GiB" in shown.stdout
    assert "began" in list(stage.client.read_log(ended["id"], follow=True, lines=10))  # and it comes to an end
    sizing = [sys.executable, "-m", "aimgpu", "size", "--from-run", "job"]
    sized = subprocess.run(sizing, env=stage.environment, capture_output=True, text=True, check=True)
    assert sized.stdout.startswith("job held all of its 1GiB in ")


def test_programs_of_a_stack_run_in_their_folder_once_and_fail_again_as_often_as_they_may(stage: Stage) -> None:
    folder = stage.daemon.home.path / "work"
    folder.mkdir()
    often = ["sh", "-c", "echo x >> tries; [ $(wc -l < tries) -ge 3 ]"]
    programs = {
        "once": {"command": "sh -c 'pwd > here; echo $MINE > mine'", "gpu": {"memory": "1GiB"}, "env": {"MINE": "given"}},
        "often": {"command": often, "gpu": {"memory": "1GiB"}, "restart": "on-failure"},
    }
    for _ in range(2):  # applied again it changes nothing
        events = list(stage.client.apply(json.dumps({"programs": programs}), str(folder)))
        assert events[-1]["event"] == "done", events
        wait_for(lambda: stage.found("once", "ended"), "it ended")
        assert wait_for(lambda: stage.found("often", "ended"), "it ended well")["end"]["exit_code"] == 0
    assert (folder / "here").read_text() == f"{folder}\n"
    assert (folder / "mine").read_text() == "given\n"
    assert (folder / "tries").read_text() == "x\n" * 3
    sizing = [sys.executable, "-m", "aimgpu", "size", "--from-run", "once"]
    sized = subprocess.run(sizing, env=stage.environment, capture_output=True, text=True, check=True)
    assert sized.stdout.startswith("once held nothing of its 1GiB in ")


def test_a_program_after_another_starts_once_that_ended_well_and_holds_nothing_before(stage: Stage) -> None:
    folder = stage.daemon.home.path / "order-of-jobs"
    folder.mkdir()
    programs = {
        "second": {"command": "sh -c 'cat made > read'", "gpu": {"memory": "1GiB"}, "after": ["first"]},
        "third": {"command": "true", "gpu": {"memory": "1GiB"}, "after": ["broken"]},
        "first": {"command": ["sh", "-c", "until [ -e go ]; do sleep 0.1; done; echo x > made"], "gpu": {"memory": "1GiB"}},
        "broken": {"command": "false", "gpu": {"memory": "1GiB"}},
    }
    events = list(stage.client.apply(json.dumps({"programs": programs}), str(folder)))
    assert events[-1]["event"] == "done", events
    assert {one["name"] for one in stage.client.read_status()["waiting"]} == {"second", "third"}
    wait_for(lambda: stage.found("broken", "ended"), "it ended badly")
    assert {grant.deployment for grant in stage.daemon.books()[1]} == {"first"}
    (folder / "go").touch()
    assert wait_for(lambda: stage.found("second", "ended"), "it came after")["end"]["exit_code"] == 0
    assert (folder / "read").read_text() == "x\n"
    why = "it comes after broken (it ended with status 1)"
    wait_for(lambda: any(why in one["reason"] for one in stage.client.read_status()["waiting"]) or None, "why the third waits")


def test_one_of_the_daemon_goes_on_without_it_and_its_end_is_known_to_the_next(own: Stage) -> None:
    folder = own.daemon.home.path
    program = {"command": ["sh", "-c", "until [ -e go ]; do sleep 0.1; done; exit 4"], "gpu": {"memory": "1GiB"}}
    list(own.client.apply(json.dumps({"programs": {"job": program}}), str(folder)))
    pid = own.running("job")["pid"]
    own.daemon.kill()
    (folder / "go").touch()
    wait_for(lambda: not is_alive(pid), "it ended")
    own.restart()
    assert wait_for(lambda: own.found("job", "ended"), "its end is known")["end"]["exit_code"] == 4
    assert not own.daemon.books()[1]


@pytest.mark.parametrize("state", [None, InstanceState.QUEUED, InstanceState.DRAINING, InstanceState.FAILED])
def test_one_that_is_released_while_it_starts_is_no_grant(state: InstanceState | None) -> None:
    ask = Ask(name="a", want=Whole())
    instance = Instance(
        id="a-0", deployment="a", replica=0, model="a", engine="program", launcher="process", state=state or InstanceState.READY
    )
    with pytest.raises(EngineFailed, match="a was not started"):
        started_instance(Deployment(name="a", model="a", ask=ask), [] if state is None else [instance])


class Room:
    """A controller whose answers are written here."""

    def __init__(self, *refusals: Refusal) -> None:
        self.changes = SimpleNamespace(version=0, wait=lambda seen, _: seen, notify=lambda: None)
        self.refusals = refusals
        self.known: list[Deployment] = []
        self.released: list[str] = []
        self.meanwhile: Callable[[], None] = lambda: None

    def deployments(self) -> tuple[Deployment, ...]:
        return tuple(self.known)

    def instances(self) -> tuple[Instance, ...]:
        return ()

    def apply(self, deployments: Sequence[Deployment], *, emit: Emit) -> ApplyResult:
        del emit
        meanwhile, self.meanwhile = self.meanwhile, lambda: None
        meanwhile()
        (one,) = deployments
        return ApplyResult(
            plan=Plan(operation="apply", refusals=self.refusals), instances=() if self.refusals else (ready(one.name),)
        )

    def release(self, names: Sequence[str]) -> None:
        self.released += names


def ready(name: str) -> Instance:
    state = InstanceState.READY
    return Instance(id=name, deployment=name, replica=0, model=name, engine="program", launcher="process", state=state)


def wanted(name: str) -> Deployment:
    program = UserProgram(argv=("true",))
    return Deployment(name=name, model=name, ask=Ask(name=name, want=Whole()), overrides=EngineOverrides(program=program))


def ourselves() -> ProcessIdentity:
    found = read_process(os.getpid())
    assert found is not None
    return identify(found)


def line_of(room: Room, folder: Path) -> ProgramLine:
    return ProgramLine(cast("Controller", room), folder)


def ask(line: ProgramLine, name: str, wait_seconds: float = 0.0) -> list[Event]:
    told: list[Event] = []
    line.run(wanted(name), wait_seconds, told.append, named=True, asker=ourselves())
    return told


def test_one_that_is_only_being_started_is_ahead_of_nobody(tmp_path: Path) -> None:
    room = Room()
    line, seen = line_of(room, tmp_path), list[Event]()
    room.meanwhile = lambda: seen.extend(ask(line, "second"))
    assert [event.kind for event in ask(line, "first")] == [EventKind.GRANTED]
    assert [event.deployment for event in seen] == ["second"]


def test_one_that_waits_takes_no_name_that_was_applied_meanwhile(tmp_path: Path) -> None:
    room = Room(Refusal(ask="a", summary="full", reasons=()))
    room.meanwhile = lambda: room.known.append(replace(wanted("a"), overrides=EngineOverrides()))
    with pytest.raises(Conflict, match="runs already"):
        ask(line_of(room, tmp_path), "a", 60.0)
    assert room.released == []


def test_one_that_waits_leaves_the_line_with_the_process_that_asked(tmp_path: Path) -> None:
    room = Room(Refusal(ask="a", summary="full", reasons=()))
    line = line_of(room, tmp_path)
    gone = replace(ourselves(), start_ticks=0)
    with pytest.raises(EngineFailed, match="its caller ended"):
        line.run(wanted("a"), 10**9, ignore, named=True, asker=gone)
    assert line.asking() == frozenset()


def test_ends_are_watched_on_after_a_look_that_failed(tmp_path: Path) -> None:
    room, looks = Room(), list[int]()

    def instances() -> tuple[Instance, ...]:
        looks.append(1)
        if len(looks) == 1:
            raise RuntimeError("can't start new thread")
        return ()

    room.instances = instances  # type: ignore[method-assign]

    async def watch() -> None:
        reconciled = asyncio.Event()
        reconciled.set()
        task = asyncio.create_task(watch_programs(cast("Controller", room), line_of(room, tmp_path), reconciled))
        async with asyncio.timeout(PATIENCE_SECONDS):
            while len(looks) < 2 and not task.done():  # noqa: ASYNC110 - looks come from threads
                await asyncio.sleep(0.05)
        assert not task.done()
        task.cancel()
        await asyncio.wait([task])

    asyncio.run(watch())


def test_words_and_variables_reach_a_detached_program_as_they_are(stage: Stage) -> None:
    out = stage.daemon.home.path / "words.json"
    script = f"import json, os, sys; json.dump([sys.argv[1:], os.environ['MINE']], open({str(out)!r}, 'w'))"
    words = ["", "g++", " two  words ", "- a: {b}", *["x"] * 300]
    code, _, err = stage.finished("--memory 1GiB --detach --env MINE= --name words", sys.executable, "-c", script, *words)
    assert code == 0, err
    assert wait_for(lambda: stage.found("words", "ended"), "it ended")["end"]["exit_code"] == 0
    assert json.loads(out.read_text()) == [words, ""]


def test_no_model_makes_room_by_ending_a_program(stage: Stage) -> None:
    process = stage.exec("--memory 150GiB --priority low --name stays", "sleep", "300")
    stage.running("stays")
    urgent = {"command": "true", "gpu": {"memory": "150GiB"}, "priority": "high"}
    events = list(stage.client.apply(json.dumps({"programs": {"urgent": urgent}}), "/", make_room=True))
    assert events[0]["steps"] == []
    assert events[0]["refusals"]
    assert process.poll() is None
    assert stage.running("stays")


def test_a_preemptible_program_goes_when_a_model_wakes_and_starts_again_when_that_sleeps(own: Stage) -> None:
    folder = own.daemon.home.path
    serve = [sys.executable, str(ROOT / "tests/programs/own_server.py"), "--port", "{port}"]
    stack = {
        "models": {"chat": {"engine": "command", "command": serve, "gpu": {"memory": "150GiB"}, "keep": "10m"}},
        "programs": {
            "train": {
                "command": ["sh", "-c", "echo x >> starts; trap '' TERM; while :; do sleep 0.1; done"],
                "gpu": {"memory": "150GiB"},
                "priority": "low",
                "preemptible": True,
            }
        },
    }
    events = list(own.client.apply(json.dumps(stack), str(folder)))
    assert events[-1]["event"] == "done", events
    own.running("chat")
    wait_for(lambda: own.found("train", "sleeping"), "it has no room yet")
    (folder / "starts").touch()
    for starts in (1, 2):
        own.client._json("POST", "/models/chat/sleep", {})
        pid = own.running("train")["pid"]
        wait_for(lambda: (folder / "starts").read_text() == "x\n" * starts or None, "it runs")  # noqa: B023 -- at once
        own.client._json("POST", "/models/chat/wake", {})
        own.running("chat")
        assert not is_alive(pid)
        assert {grant.deployment for grant in own.daemon.books()[1]} == {"chat"}
    assert wait_for(lambda: own.found("train", "sleeping"), "it waits for room")


def test_a_daemon_that_exec_started_outlives_its_program(tmp_path: Path) -> None:
    home = Home(tmp_path)
    environment = {
        **os.environ,
        "AIMGPU_HOME": str(tmp_path),
        "AIMGPU_PORT": "0",
        "AIMGPU_CACHE": str(Path.home() / ".cache" / "aimgpu"),
        "PYTHONPATH": str(ROOT / "src"),
    }
    command = [sys.executable, "-m", "aimgpu", "exec", "--software", "MI300X", "--memory", "1GiB", "--name", "a"]
    process = subprocess.Popen([*command, "--", "sleep", "300"], env=environment)
    try:
        record = wait_for(home.read_daemon, "the daemon runs")
        client = DaemonClient(record.url, home.read_token())
        wait_for(lambda: [one for one in client.read_status()["instances"] if one["state"] == "ready"], "the program runs")
        daemon = read_process(record.pid)
        assert daemon is not None
        assert daemon.parent_pid != process.pid
        client.release(["a"])
        assert process.wait(PATIENCE_SECONDS) == -signal.SIGTERM
        assert client.read_status()["instances"] == []
        client.stop()
        wait_for(lambda: not is_running(record), "the daemon is gone")
    finally:
        process.kill()
        process.wait()
        if (left := home.read_daemon()) is not None:
            kill(left.pid)


@pytest.mark.parametrize(
    "order",
    [
        "daemon shell program",
        *(pytest.param(each, marks=pytest.mark.rest) for each in ("program daemon shell", "shell daemon program")),
    ],
)
def test_a_kill_of_shell_program_and_daemon_in_any_order_frees_the_grant(own: Stage, order: str) -> None:
    program = f"{sys.executable} -m aimgpu exec --memory 1GiB --name inside -- sh -c 'sleep 300 & sleep 300; true'; true"
    shell = subprocess.Popen(["sh", "-c", program], env=own.environment)
    pid = own.running("inside")["pid"]
    children = wait_for(lambda: found if len(found := children_of(pid)) == 2 else None, "its children run")
    kills = {"program": lambda: kill(pid), "daemon": own.daemon.kill, "shell": shell.kill}
    for name in order.split():
        kills[name]()
    shell.wait()
    own.restart()
    own.wait_until_free()
    wait_for(lambda: not any(is_alive(child) for child in children), "its children are gone")


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_alive(pid: int) -> bool:
    entry = read_process(pid)
    return entry is not None and not entry.ended


@pytest.mark.rest
def test_a_later_daemon_adopts_it_and_its_end_frees_the_grant(own: Stage) -> None:
    process = own.exec("--memory 1GiB --name kept", "sleep", "300")
    instance = own.running("kept")["id"]
    own.daemon.kill()
    own.restart()
    assert own.running("kept")["id"] == instance
    assert own.running("kept")["pid"] == process.pid
    assert process.poll() is None
    kill(process.pid)
    own.wait_until_free()


def run_shells(stage: Stage, count: int, each: int) -> Sequence["subprocess.Popen[str]"]:
    call = f"{sys.executable} -m aimgpu exec --memory 40GiB --wait -- {sys.executable} {TENANT} 1"
    command = ["sh", "-c", f"for i in $(seq {each}); do {call} || exit 1; done"]
    return [subprocess.Popen(command, env=stage.environment, stdout=subprocess.DEVNULL, text=True) for _ in range(count)]


@pytest.mark.slow
@pytest.mark.rest
def test_many_from_several_shells_share_exactly_what_there_is(stage: Stage) -> None:
    shells = run_shells(stage, 8, 12)
    try:
        while any(shell.poll() is None for shell in shells):
            (gpu,) = stage.client.read_status()["gpus"]
            assert gpu["measured_bytes"] <= gpu["memory_bytes"]
            assert gpu["granted_bytes"] <= gpu["memory_bytes"]
            assert gpu["granted_bytes"] % (40 * GIB) == 0
        assert [shell.returncode for shell in shells] == [0] * 8
    finally:
        for shell in shells:
            shell.kill()
            shell.wait()
    stage.wait_until_free()
