"""Every command that takes the name of a model refuses one that is not there alike: what is meant, what there is, a status."""

import json
import shlex
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from tests.cli.canned import CannedDaemon

from aimgpu.cli.main import run_command
from aimgpu.errors import UnknownDeployment, UnknownModel
from aimgpu.home import Home

COMMANDS = (
    ("slo", "NAME"),
    ("slo", "code", "NAME"),
    ("logs", "NAME"),
    ("logs", "NAME", "-n", "0"),
    ("explain", "NAME"),
    ("resize", "NAME", "--memory", "3GiB"),
    ("down", "NAME"),
    ("down", "code", "NAME"),
    ("chat", "NAME"),
)
QUEUE: dict[str, Any] = {"longest_wait_seconds": {}, "most_queued": {}, "running": {}, "per_gpu": None}
KNOWN = {"chat", "code", "late"}  # the last waits for room
STATUS = {
    "gpus": [],
    "deployments": [{"name": name, "replicas": 1} for name in sorted(KNOWN)],
    "instances": [{"id": f"{name}-0-abc", "name": name, "state": "ready"} for name in ("chat", "code")],
    "waiting": [{"name": "late"}],
}


@pytest.fixture
def refusing(daemon: CannedDaemon, home: Home, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> CannedDaemon:
    """As the daemon answers where it decides itself: by the same error."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "stack.yaml").write_text("models: {chat: {model: org/m}, code: {model: org/m}, late: {model: org/m}}")
    daemon.answer("GET /status", STATUS)
    daemon.answer("GET /slo", {"models": {}, "pressure": {}, "queue": QUEUE})
    daemon.answer("GET /v1/models", {"data": [{"id": name} for name in sorted(KNOWN)]})
    return daemon


def refuse(daemon: CannedDaemon, name: str) -> None:
    error = {"error": UnknownDeployment.of(name, known=KNOWN).to_json()}
    for route in ("POST /release", "POST /resize"):
        daemon.answer(route, error, status=404)
    missing = {"error": {"code": "model_not_found", "message": "There is no such model here.", "hint": None}}
    daemon.answer(f"GET /v1/models/{name}", missing, status=404)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
@pytest.mark.parametrize(("name", "near"), [("caht", "chat"), ("Code", "code"), ("xyz", None), ("", None)])
def test_an_unknown_model_is_an_error_with_the_nearest_name_and_all_others(
    refusing: CannedDaemon, command: tuple[str, ...], name: str, near: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    refuse(refusing, name)
    words = [name if word == "NAME" else word for word in command]
    if command[0] == "explain":
        words += ["--gpu", "MI300X"]
    assert run_command(words) == UnknownDeployment.exit_status
    out, err = capsys.readouterr()
    assert out == ""
    assert repr(name) in err.splitlines()[0]
    assert all(one in err for one in KNOWN)
    assert ("Did you mean" in err) == (near is not None)
    meant = shlex.join(["aimgpu", *(near if word == name else word for word in words)]) if near else ""
    assert near is None or f"Did you mean `{meant}`?" in err
    assert run_command([*words, "--json"]) == UnknownDeployment.exit_status
    out, err = capsys.readouterr()
    assert (out, json.loads(err)["error"]["code"]) == ("", "unknown_deployment")


def test_a_model_without_a_promise_is_no_unknown_one(refusing: CannedDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["slo", "late"]) == 0
    assert "Nothing was promised to late: add" in capsys.readouterr().out


def test_the_log_of_a_model_that_waits_is_not_said_to_be_of_an_unknown_one(
    refusing: CannedDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["logs", "late"]) == UnknownDeployment.exit_status
    assert "no instance of 'late' runs" in capsys.readouterr().err


def test_a_name_that_the_gateway_does_not_list_may_still_be_one_of_its_models(
    refusing: CannedDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", StringIO())
    refusing.answer("GET /v1/models/CHAT%3Alatest", {"id": "chat"})
    assert run_command(["chat", "CHAT:latest"]) == 0


def test_forgetting_what_was_never_measured_is_an_error(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["measurements", "forget", "nope"]) == UnknownModel.exit_status
    assert "Measured: nothing." in capsys.readouterr().err


@pytest.mark.parametrize("command", [("catalogue", "add", "", "--parameters", "7B"), ("keys", "add", ""), ("size", "")])
def test_an_empty_name_names_nothing(home: Home, command: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(list(command)) not in (0, 1)
    assert capsys.readouterr().err.startswith("error: ")


def test_long_lists_and_names_are_cut() -> None:
    error = UnknownDeployment.of("x" * 1000, known=(f"model-{number:03}" for number in range(80)))
    assert len(error.message) < 200
    assert error.hint is not None
    assert "model-049 and 30 more." in error.hint
