import json
import os
import shlex
import signal
import subprocess
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from aimgpu.errors import (
    Conflict,
    DaemonRunning,
    DaemonUnreachable,
    EngineFailed,
    InvalidStackFile,
    ModelUnavailable,
    NotAllowed,
    PlacementRefused,
)

if TYPE_CHECKING:
    from tests.cli.conftest import CommandLine


def read_until(process: subprocess.Popen[str], text: str) -> list[str]:
    """The lines of stdout up to the one that has the text."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if text in line:
            return lines
    pytest.fail(f"never said {text!r}: {lines} {process.stderr.read() if process.stderr else ''}")


def test_up_shows_the_table_the_addresses_and_a_line_to_paste(aimgpu: "CommandLine") -> None:
    process = aimgpu.start("up")
    lines = read_until(process, "Ctrl-C stops it.")
    shown = "".join(lines)
    assert lines[0].startswith("SIMULATED GPU (1 x MI300X)")
    heads = next(line for line in lines if line.startswith("NAME")).split()
    assert heads == ["NAME", "MODEL", "GPU", "MEMORY", "STATE"]
    row = next(line for line in lines if line.startswith("chat"))
    for text in ("m", "gpu0/spx-0", "2GiB", "ready"):
        assert text in row
    record = aimgpu.home.read_daemon()
    assert record is not None
    assert f"OpenAI endpoint  {record.url}/v1" in shown
    assert f"Page             {record.url}/" in shown
    words = shlex.split(next(line for line in lines if line.startswith("curl ")))
    assert words[2] == f"{record.url}/v1/chat/completions"
    assert json.loads(words[words.index("-d") + 1])["model"] == "chat"
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)


def test_a_reader_that_leaves_early_does_not_stop_what_was_to_be_left_running(aimgpu: "CommandLine") -> None:
    with aimgpu.start("up", "--detach") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline().startswith("SIMULATED GPU")
        process.stdout.close()
        process.stderr.read()
    assert aimgpu.run("ps").returncode == 0


@pytest.fixture
def hangups() -> Iterator[None]:
    """Delivered to what is started, also where the tests themselves run under nohup: an ignored signal is inherited."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("hangups")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_the_daemon_and_ends_well(aimgpu: "CommandLine", number: signal.Signals) -> None:
    process = aimgpu.start("up")
    read_until(process, "Ctrl-C stops it.")
    process.send_signal(number)
    out, err = process.communicate(timeout=280)
    assert "Stopped." in out
    assert (process.returncode, "Traceback" in err) == (0, False)
    assert aimgpu.home.read_daemon() is None


def test_progress_is_plain_lines_on_stderr_when_it_is_no_terminal(aimgpu: "CommandLine") -> None:
    done = aimgpu.run("up", "--detach")
    assert "m: 50% of 100MiB" in done.stderr
    assert "chat: loading" in done.stderr
    assert "chat: ready" in done.stderr
    assert "\x1b" not in done.stdout + done.stderr


def test_detach_leaves_it_running_and_down_stops_it(aimgpu: "CommandLine") -> None:
    done = aimgpu.run("up", "--detach")
    assert done.returncode == 0
    assert "aimgpu down" in done.stdout
    assert aimgpu.home.read_daemon() is not None
    assert aimgpu.run("down").stdout == "Stopped.\n"
    assert aimgpu.home.read_daemon() is None
    assert aimgpu.run("down").stdout == "Nothing runs.\n"


def test_what_was_stopped_meanwhile_is_not_said_to_run(aimgpu: "CommandLine") -> None:
    done = aimgpu.run("up", "--detach", scenario="down-later")
    assert done.returncode == Conflict.exit_status
    assert "all of it was stopped meanwhile" in done.stderr
    assert "Running in the background" not in done.stdout


def test_down_says_in_json_what_it_stopped(aimgpu: "CommandLine") -> None:
    aimgpu.run("up", "--detach")
    names = [instance["name"] for instance in json.loads(aimgpu.run("ps", "--json").stdout)["instances"]]
    assert names
    assert json.loads(aimgpu.run("down", "--json").stdout) == {"released": names, "daemon_stopped": True}
    assert json.loads(aimgpu.run("down", "--json").stdout) == {"released": [], "daemon_stopped": False}


def test_a_second_up_refuses_with_the_pid_of_the_first(aimgpu: "CommandLine") -> None:
    aimgpu.run("up", "--detach")
    record = aimgpu.home.read_daemon()
    assert record is not None
    done = aimgpu.run("up")
    assert done.returncode == DaemonRunning.exit_status
    assert f"pid {record.pid}" in done.stderr
    assert "--attach" in done.stderr


def test_attach_applies_to_the_running_daemon(aimgpu: "CommandLine") -> None:
    aimgpu.run("up", "--detach")
    (aimgpu.folder / "more.yaml").write_text("models: {small: {model: org/m}}")
    done = aimgpu.run("up", "--attach", "-f", "more.yaml")
    assert done.returncode == 0
    assert {line.split()[0] for line in done.stdout.splitlines() if line.endswith("  ready")} == {"chat", "code", "small"}


def test_models_that_are_not_in_the_file_are_named_and_removed_when_asked(aimgpu: "CommandLine") -> None:
    aimgpu.run("up", "--detach")
    (aimgpu.folder / "less.yaml").write_text("models:\n  chat: {model: org/m}\n")
    shown = aimgpu.run("up", "-f", "less.yaml", "--attach", "--dry-run")
    assert "Not in this stack, and left as they are: code (--prune removes them)" in shown.stderr
    done = aimgpu.run("up", "-f", "less.yaml", "--attach")
    assert "left as they are: code" in done.stderr
    shown = aimgpu.run("up", "-f", "less.yaml", "--attach", "--prune", "--dry-run")
    assert "stop code" in shown.stdout
    assert "left as they are" not in shown.stderr
    assert "code" in aimgpu.run("ps").stdout, "a dry run changes nothing"
    assert aimgpu.run("up", "-f", "less.yaml", "--attach", "--prune").returncode == 0
    assert "code" not in aimgpu.run("ps").stdout


def test_an_up_that_was_killed_leaves_a_daemon_that_the_next_commands_find(aimgpu: "CommandLine") -> None:
    killed = aimgpu.start("up")
    assert killed.stdout is not None
    while "Ctrl-C stops it." not in killed.stdout.readline():
        assert killed.poll() is None
    killed.kill()
    killed.communicate()
    record = aimgpu.home.read_daemon()
    assert record is not None
    assert "chat" in aimgpu.run("ps").stdout
    again = aimgpu.run("up")
    assert again.returncode != 0
    assert f"a daemon runs already (pid {record.pid}, {record.url})" in again.stderr
    assert " --attach` applies the stack to it, `aimgpu down` stops it." in again.stderr
    assert aimgpu.run("up", "--attach").returncode == 0
    assert aimgpu.run("down").returncode == 0
    assert aimgpu.home.read_daemon() is None


def test_attach_without_a_daemon_starts_one(aimgpu: "CommandLine") -> None:
    assert aimgpu.run("up", "--attach", "--detach").returncode == 0
    assert aimgpu.home.read_daemon() is not None


def test_two_at_once_end_with_one_daemon(aimgpu: "CommandLine") -> None:
    """The one that loses the race hears that the ledger is owned."""
    done = aimgpu.run("up", "--detach", scenario="owned")
    assert done.returncode == Conflict.exit_status
    assert "error: another daemon owns the ledger (pid 1)\nhint: Stop it first.\n" in done.stderr


def test_a_refusal_says_why_and_leaves_nothing_running(aimgpu: "CommandLine") -> None:
    done = aimgpu.run("up", scenario="refuse")
    assert done.returncode == PlacementRefused.exit_status
    assert "gpu0: 192GiB, 12GiB free, 99TiB asked for" in done.stderr
    assert "Ask for 12GiB or less." in done.stderr
    assert aimgpu.home.read_daemon() is None


def test_a_refusal_of_one_model_is_about_the_model(aimgpu: "CommandLine") -> None:
    done = aimgpu.run("run", "smollm2", "hello", scenario="refuse")
    assert done.returncode == PlacementRefused.exit_status
    assert "error: the model does not fit, nothing was started\n" in done.stderr


def test_a_refusal_is_json_when_asked(aimgpu: "CommandLine") -> None:
    done = aimgpu.run("up", "--json", scenario="refuse")
    assert json.loads(done.stderr.splitlines()[-1])["error"]["code"] == "placement_refused"
    assert done.stdout == ""


def test_an_error_of_the_daemon_keeps_its_class(aimgpu: "CommandLine") -> None:
    done = aimgpu.run("up", scenario="error")
    assert done.returncode == ModelUnavailable.exit_status
    assert "error: cannot download m\nhint: Check the network.\n" in done.stderr
    assert aimgpu.home.read_daemon() is None


def test_a_model_that_fails_shows_its_last_lines_and_the_rest_serves(aimgpu: "CommandLine") -> None:
    done = aimgpu.run("up", "--detach", scenario="fail-one")
    assert done.returncode == EngineFailed.exit_status
    assert "chat failed: the engine ended before it was ready\n    cannot load\n    giving up" in done.stderr
    assert aimgpu.home.read_daemon() is not None


def test_when_every_model_fails_nothing_is_left_running(aimgpu: "CommandLine") -> None:
    done = aimgpu.run("up", scenario="fail-all")
    assert done.returncode == EngineFailed.exit_status
    assert aimgpu.home.read_daemon() is None


def test_a_stream_that_breaks_off_is_an_error(aimgpu: "CommandLine") -> None:
    done = aimgpu.run("up", scenario="break")
    assert done.returncode == 10
    assert "daemon" in done.stderr
    assert aimgpu.home.read_daemon() is None


def test_a_daemon_that_crashes_at_start_shows_its_last_lines(aimgpu: "CommandLine") -> None:
    done = aimgpu.run("up", scenario="crash")
    assert done.returncode == 1
    assert "RuntimeError: stand-in crashed" in done.stderr
    assert "daemon.log" in done.stderr


def test_a_typo_is_told_before_anything_starts(aimgpu: "CommandLine") -> None:
    (aimgpu.folder / "stack.yaml").write_text("models:\n  chat:\n    modle: x\n")
    done = aimgpu.run("up")
    assert done.returncode == InvalidStackFile.exit_status
    assert "stack.yaml, line 3: unknown key 'modle' in 'chat'" in done.stderr
    assert not aimgpu.home.path.exists()


def test_a_part_that_does_not_exist_is_told_with_its_line_and_the_nearest(aimgpu: "CommandLine") -> None:
    (aimgpu.folder / "stack.yaml").write_text("models:\n  chat: {model: m}\ngpus:\n  simulated: MI300Y\n")
    done = aimgpu.run("up")
    assert done.returncode == InvalidStackFile.exit_status
    assert "stack.yaml, line 4: 'simulated': 'MI300Y' is not a GPU that can be simulated" in done.stderr
    assert "Did you mean MI300X or " in done.stderr
    assert not aimgpu.home.path.exists()


def test_no_stack_file_says_how_to_name_one(aimgpu: "CommandLine") -> None:
    (aimgpu.folder / "stack.yaml").unlink()
    done = aimgpu.run("up")
    assert done.returncode == InvalidStackFile.exit_status
    assert "--file" in done.stderr


def test_a_stack_may_come_from_stdin(aimgpu: "CommandLine") -> None:
    done = aimgpu.run("up", "-f", "-", "--detach", text="models: {only: {model: m}}")
    assert "only" in done.stdout


def test_dry_run_prints_the_plan_and_leaves_nothing(aimgpu: "CommandLine") -> None:
    done = aimgpu.run("up", "--dry-run")
    assert done.returncode == 0
    assert "deploy  chat  start chat" in done.stdout
    assert not aimgpu.home.path.exists()


def test_dry_run_against_a_running_daemon_changes_nothing(aimgpu: "CommandLine") -> None:
    aimgpu.run("up", "--detach")
    before = aimgpu.run("ps", "--json").stdout
    assert aimgpu.run("up", "--dry-run").returncode == 0
    assert aimgpu.run("ps", "--json").stdout == before


def test_json_gives_one_document(aimgpu: "CommandLine") -> None:
    document = json.loads(aimgpu.run("up", "--detach", "--json").stdout)
    assert document["status"]["simulated"] is True
    assert [step["deployment"] for step in document["plan"]["steps"]] == ["chat", "code"]


def test_the_simulated_part_of_the_stack_reaches_the_daemon(aimgpu: "CommandLine") -> None:
    (aimgpu.folder / "stack.yaml").write_text("gpus: {simulated: MI355X, count: 2}\nmodels: {chat: {model: m}}")
    assert aimgpu.run("up", "--detach").stdout.startswith("SIMULATED GPU (2 x MI355X)")


def test_another_address_needs_a_key(aimgpu: "CommandLine") -> None:
    done = aimgpu.run("up", "--host", "0.0.0.0")
    assert done.returncode == NotAllowed.exit_status
    assert "aimgpu keys add" in done.stderr
    assert aimgpu.home.read_daemon() is None


def test_a_daemon_that_was_killed_is_replaced_to_stop_what_it_left(aimgpu: "CommandLine") -> None:
    aimgpu.run("up", "--detach")
    record = aimgpu.home.read_daemon()
    assert record is not None
    os.kill(record.pid, signal.SIGKILL)
    done = aimgpu.run("down")
    assert done.stdout == "Stopped.\n"
    assert not aimgpu.home.daemon_file.exists()


def test_down_elsewhere_ends_the_up_that_waits(aimgpu: "CommandLine") -> None:
    process = aimgpu.start("up")
    read_until(process, "Ctrl-C stops it.")
    assert aimgpu.run("down").returncode == 0
    out, _ = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "Stopped.\n")


def test_a_daemon_that_is_killed_ends_the_up_that_waits_with_an_error(aimgpu: "CommandLine") -> None:
    process = aimgpu.start("up")
    read_until(process, "Ctrl-C stops it.")
    record = aimgpu.home.read_daemon()
    assert record is not None
    os.kill(record.pid, signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert process.returncode == DaemonUnreachable.exit_status
    assert "aimgpu down" in err


def test_a_model_that_goes_away_meanwhile_gets_a_line(aimgpu: "CommandLine") -> None:
    process = aimgpu.start("up", scenario="fail-later")
    read_until(process, "Ctrl-C stops it.")
    read_until(process, "chat: failed: the engine ended")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)


def test_an_old_log_that_is_large_is_set_aside(aimgpu: "CommandLine") -> None:
    aimgpu.home.create()
    with aimgpu.home.log_file.open("wb") as log:
        log.truncate(11 << 20)
    aimgpu.run("up", "--detach")
    assert aimgpu.home.log_file.stat().st_size < 1 << 20
    assert aimgpu.home.log_file.with_name("daemon.log.1").exists()


def test_a_log_that_cannot_be_written_says_so(aimgpu: "CommandLine") -> None:
    aimgpu.home.log_file.mkdir(parents=True)
    done = aimgpu.run("up")
    assert done.returncode == NotAllowed.exit_status
    assert "daemon.log: Is a directory" in done.stderr
    assert "AIMGPU_HOME" in done.stderr
