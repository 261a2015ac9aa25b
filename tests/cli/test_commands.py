import json
import signal
import stat
from typing import TYPE_CHECKING

import pytest

from aimgpu.errors import Conflict, DaemonUnreachable, InvalidInput, NotFound, UnknownDeployment

if TYPE_CHECKING:
    from tests.cli.conftest import CommandLine


@pytest.mark.parametrize("arguments", [("ps",), ("logs", "chat"), ("down", "chat")])
def test_without_a_daemon_a_command_says_how_to_start_one(aimgpu: "CommandLine", arguments: tuple[str, ...]) -> None:
    done = aimgpu.run(*arguments)
    assert done.returncode == DaemonUnreachable.exit_status
    assert "aimgpu up" in done.stderr


def test_ps_says_first_that_the_gpu_is_simulated(aimgpu: "CommandLine") -> None:
    aimgpu.run("up", "--detach")
    lines = aimgpu.run("ps").stdout.splitlines()
    assert lines[0].startswith("SIMULATED")
    assert [line.split()[0] for line in lines[2:4]] == ["chat", "code"]
    assert lines[-1].startswith("OpenAI endpoint  http://")


def test_ps_watch_shows_changes_as_lines_of_json(aimgpu: "CommandLine") -> None:
    aimgpu.run("up", "--detach")
    watch = aimgpu.start("ps", "--watch", "--json", "--interval", "0.1")
    assert watch.stdout is not None
    assert len(json.loads(watch.stdout.readline())["instances"]) == 2
    aimgpu.run("down", "chat")
    assert len(json.loads(watch.stdout.readline())["instances"]) == 1
    watch.send_signal(signal.SIGINT)
    _, err = watch.communicate(timeout=60)
    assert (watch.returncode, "Traceback" in err) == (130, False)


def test_down_releases_what_is_named(aimgpu: "CommandLine") -> None:
    aimgpu.run("up", "--detach")
    assert aimgpu.run("down", "chat").stdout == "Stopped chat.\n"
    assert [i["name"] for i in json.loads(aimgpu.run("ps", "--json").stdout)["instances"]] == ["code"]
    done = aimgpu.run("down", "chta", "--json")
    assert done.returncode == UnknownDeployment.exit_status
    assert json.loads(done.stderr)["error"]["code"] == "unknown_deployment"


def test_logs_gives_the_last_lines_of_a_model_or_an_instance(aimgpu: "CommandLine") -> None:
    aimgpu.run("up", "--detach")
    assert aimgpu.run("logs", "chat", "-n", "2").stdout == "chat line 3\nchat line 4\n"
    assert aimgpu.run("logs", "code-0-abc", "-n", "1").stdout == "code line 4\n"
    assert json.loads(aimgpu.run("logs", "chat", "-n", "1", "--json").stdout) == {
        "instance": "chat-0-abc",
        "line": "chat line 4",
    }


def test_logs_of_an_unknown_name_offers_the_nearest(aimgpu: "CommandLine") -> None:
    aimgpu.run("up", "--detach")
    done = aimgpu.run("logs", "chta")
    assert done.returncode == UnknownDeployment.exit_status
    assert "Did you mean `aimgpu logs chat`?" in done.stderr


def test_another_token_is_not_let_in(aimgpu: "CommandLine") -> None:
    aimgpu.run("up", "--detach")
    aimgpu.home.token_file.write_text("wrong")
    done = aimgpu.run("ps")
    assert done.returncode == 5
    assert "wrong token" in done.stderr


def test_a_key_is_shown_once_and_kept_hashed(aimgpu: "CommandLine") -> None:
    key = aimgpu.run("keys", "add", "alice").stdout.strip()
    assert key.startswith("aimgpu-")
    kept = aimgpu.home.keys_file.read_text()
    assert key not in kept
    assert stat.S_IMODE(aimgpu.home.keys_file.stat().st_mode) == 0o600
    listed = aimgpu.run("keys", "list", "--json").stdout
    assert [row["name"] for row in json.loads(listed)["keys"]] == ["alice"]
    assert key not in listed


def test_keys_have_one_name_each_and_can_be_removed(aimgpu: "CommandLine") -> None:
    aimgpu.run("keys", "add", "alice", "--model", "chat")
    assert aimgpu.run("keys", "add", "alice").returncode == Conflict.exit_status
    assert "chat" in aimgpu.run("keys", "list").stdout
    assert aimgpu.run("keys", "remove", "alice").returncode == 0
    assert aimgpu.run("keys", "remove", "alice").returncode == NotFound.exit_status
    assert aimgpu.run("keys", "add", "a/b").returncode == InvalidInput.exit_status


def test_a_damaged_key_file_is_not_taken_for_no_keys(aimgpu: "CommandLine") -> None:
    aimgpu.home.create()
    aimgpu.home.keys_file.write_text("{")
    done = aimgpu.run("keys", "list")
    assert done.returncode == InvalidInput.exit_status
    assert "damaged" in done.stderr


def test_a_short_key_of_ones_own_is_refused(aimgpu: "CommandLine") -> None:
    done = aimgpu.run("up", "--api-key", "secret")
    assert done.returncode == InvalidInput.exit_status
    assert "32 characters" in done.stderr


def test_names_of_running_models_complete(aimgpu: "CommandLine", monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_AIMGPU_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", "aimgpu logs c")
    monkeypatch.setenv("COMP_CWORD", "2")
    assert aimgpu.run().stdout.strip() == ""
    monkeypatch.delenv("_AIMGPU_COMPLETE")
    aimgpu.run("up", "--detach")
    monkeypatch.setenv("_AIMGPU_COMPLETE", "bash_complete")
    assert aimgpu.run().stdout.splitlines() == ["plain,chat", "plain,code"]
