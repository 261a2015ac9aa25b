"""`engine: command`: programs of the user's own behind the gateway, with the real daemon on software GPUs."""

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.daemon.running import ROOT, TestDaemon, wait_for
from tests.gateway.calling import call

from aimgpu.cli.what_if import empty_machine, size_asks
from aimgpu.control.stack.stack_file import parse_stack
from aimgpu.domain import InstanceState, Memory
from aimgpu.units import GIB, MIB

PROGRAM = str(ROOT / "tests/programs/own_server.py")


class SoftwareDaemon(TestDaemon):
    program = "aimgpu.daemon.assembly"
    arguments = ("--simulate", "MI300X", "--software")


class Stage:
    """A daemon, and what is asked of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.daemon = SoftwareDaemon(folder / "home")
        self.daemon.set(AIMGPU_PROMPT_SECONDS="0.2", AIMGPU_CACHE=str(Path.home() / ".cache" / "aimgpu"))
        self.client = self.daemon.start()

    def apply(self, **models: dict[str, Any]) -> list[dict[str, Any]]:
        text = json.dumps({"models": {name: server(**fields) for name, fields in models.items()}})
        return list(self.client.apply(text, str(self.folder), dry_run=False))

    def ask(self, name: str, text: str = "hi", path: str = "/v1/chat/completions") -> Any:
        home = self.daemon.home.read_daemon()
        assert home is not None
        port = int(home.url.rsplit(":", 1)[1])
        body = {"model": name, "messages": [{"role": "user", "content": text}], "input": "a", "query": "a", "documents": ["a"]}
        return call(port, "POST", path, body)

    def told(self, name: str) -> dict[str, Any]:
        answer = self.ask(name)
        assert answer.status == 200, answer.body
        found: dict[str, Any] = json.loads(answer.json["choices"][0]["message"]["content"])
        return found

    def ready_pids(self) -> set[int]:
        instances, _ = self.daemon.books()
        return {one.process.pid for one in instances if one.process is not None and one.state is InstanceState.READY}

    def only(self, name: str) -> dict[str, Any]:
        (found,) = (one for one in self.client.read_status()["instances"] if one["name"] == name)
        return dict(found)


def server(flags: str = "", **fields: Any) -> dict[str, Any]:
    command = [sys.executable, PROGRAM, "--port", "{port}", *flags.split()]
    return {"engine": "command", "command": command, "gpu": {"memory": "1GiB"}, **fields}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    stage = Stage(tmp_path_factory.mktemp("own"))
    yield stage
    stage.daemon.stop()


@pytest.fixture
def stage(running: Stage) -> Iterator[Stage]:
    yield running
    names = [one["name"] for one in running.client.read_status()["deployments"]]
    if names:
        running.client.release(names)


def test_it_serves_in_its_folder_with_the_key_and_under_the_names_it_gives(stage: Stage) -> None:
    events = stage.apply(own={"flags": "--models first,second --key {key}", "aliases": ["gpt-4o"]})
    assert events[-1]["event"] == "done", events
    told = stage.told("own")
    assert (told["model"], told["folder"]) == ("first", str(stage.folder))
    assert stage.told("gpt-4o")["model"] == "first"
    assert stage.told("own:second")["model"] == "second"
    assert stage.ask("own:third").status == 404
    (grant,) = stage.only("own")["grants"]
    assert grant["memory_bytes"] == GIB
    assert stage.only("own")["unused_bytes"] == 0


def test_a_preset_starts_its_program_with_the_part_of_the_memory_that_is_its_own(stage: Stage) -> None:
    folder = stage.folder / "bin"
    folder.mkdir()
    program = folder / "sglang"
    program.write_text(f'#!/bin/sh\necho "$@" > {folder}/given\nexec {sys.executable} {PROGRAM} --port "$7" --key "$9"\n')
    program.chmod(0o755)
    preset = {
        "engine": "sglang",
        "model": "org/m",
        "gpu": {"memory": "1GiB"},
        "env": {"PATH": f"{folder}:{os.environ['PATH']}"},
    }
    text = json.dumps({"models": {"chat": preset}})
    events = list(stage.client.apply(text, str(stage.folder), dry_run=False))
    assert events[-1]["event"] == "done", events
    assert stage.ask("chat").status == 200
    assert (folder / "given").read_text().split()[:3] == ["serve", "--model-path", "org/m"]
    assert (folder / "given").read_text().split()[-2:] == ["--mem-fraction-static", "0.850"], "it sees its grant as the GPU"
    program.unlink()
    stage.client.release(["chat"])
    assert "pip install sglang" in json.dumps(list(stage.client.apply(text, str(stage.folder), dry_run=False)))


def test_what_it_has_no_path_for_is_refused_in_words_and_the_rest_goes_through(stage: Stage) -> None:
    stage.apply(own={"flags": "--no-list"})
    assert stage.told("own")["model"] == "own"
    for path in ("/v1/embeddings", "/v1/rerank", "/v1/images/generations"):
        assert stage.ask("own", path=path).json["path"] == path
    speech = stage.ask("own", path="/v1/audio/speech")
    assert (speech.headers["content-type"], speech.body) == ("audio/wav", b"RIFF" + bytes(range(256)))
    assert stage.ask("own", path="/v1/completions").status == 400


def test_its_memory_is_capped_on_a_software_gpu(stage: Stage) -> None:
    events = stage.apply(own={"flags": f"--takes {64 * MIB}"})
    assert events[-1]["event"] == "done", events
    instance = stage.only("own")
    assert instance["level"] == "runtime"
    assert GIB - 512 * MIB <= stage.told("own")["taken"] <= GIB


def test_a_request_wakes_one_that_was_stopped_when_idle(stage: Stage) -> None:
    stage.apply(own={"keep": "1s", "flags": "--models first,second"})
    first = stage.told("own")["pid"]
    wait_for(lambda: stage.only("own")["state"] == "sleeping", "it sleeps")
    assert stage.only("own")["grants"] == []
    told = stage.told("own:second")
    assert told["pid"] != first
    assert told["model"] == "second", "its names are known when it is up, and the request was held until then"


def test_each_replica_runs_and_one_that_dies_is_started_again(stage: Stage) -> None:
    stage.apply(own={"replicas": 2})
    before = stage.ready_pids()
    assert len(before) == 2
    assert stage.told("own")["pid"] in before
    os.kill(min(before), signal.SIGKILL)
    wait_for(lambda: len(now := stage.ready_pids()) == 2 and min(before) not in now, "two run again")
    assert max(before) in stage.ready_pids()


def test_it_is_ready_when_its_health_path_says_so(stage: Stage) -> None:
    flag = stage.folder / "loaded"
    slow = {"flags": f"--loads-until {flag} --health /v1/ready", "health": "/v1/ready"}
    failed = stage.apply(own=slow | {"ready_timeout": "1s"})
    assert "not ready after 1 s: /v1/ready answers 503" in json.dumps(failed)
    flag.touch()
    assert stage.apply(own=slow)[-1]["event"] == "done"
    broken = stage.apply(own={"flags": "--health /else"})
    assert "/health answers 404" in json.dumps(broken)


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({"command": ["no-such-program", "{port}"]}, "'no-such-program' is not a program"),
        ({"command": ["./missing.sh", "{port}"]}, "'./missing.sh' is not a program"),
        ({"directory": "nowhere"}, "there is no folder"),
        ({"command": [sys.executable, "-c", "raise SystemExit('no weights')", "{port}"]}, "no weights"),
    ],
)
def test_what_cannot_run_is_refused_with_the_reason(stage: Stage, fields: dict[str, Any], shown: str) -> None:
    assert shown in json.dumps(stage.apply(own=fields))


def test_a_plan_without_a_daemon_counts_what_it_asks_for(tmp_path: Path) -> None:
    text = json.dumps({"models": {"own": server(gpu={"memory": "8GiB"})}})
    (sized,) = size_asks(parse_stack(text, base_directory=tmp_path).deployments, empty_machine("MI300X", 1))
    assert (sized.engine, sized.ask.want, sized.ask.footprint_bytes) == ("command", Memory(memory_bytes=8 * GIB), None)
