import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import click
import pytest

from aimgpu.cli.main import cli, run_command
from aimgpu.cli.output import json_option
from aimgpu.cli.registry import SECTIONS, Entry, command_names, find_entry
from aimgpu.errors import PartitionBusy

HEAVY = ["aiohttp", "starlette", "numpy", "pydantic", "rich", "xllamacpp", "uvicorn", "structlog", "yaml"]


def run_aimgpu(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "aimgpu.cli.main", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | environment,
    )


def all_commands() -> Iterator[tuple[str, click.Command]]:
    """Every registered command, and the commands inside its groups."""
    context = click.Context(cli, info_name="aimgpu")
    for name in command_names():
        command = cli.get_command(context, name)
        assert command is not None, name
        yield from walk(name, command)


def walk(path: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    if isinstance(command, click.Group):
        for name, child in command.commands.items():
            yield from walk(f"{path} {name}", child)
    else:
        yield path, command


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], None]], str]:
    """Makes a function a command, found through the registry as every other."""

    def add(function: Callable[[], None]) -> str:
        def run(*, as_json: bool) -> None:
            function()

        module = ModuleType("commands_of_this_test")
        module.command = click.command()(json_option(run))  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setitem(SECTIONS, "Test", {"probe": Entry(f"{module.__name__}:command", "Probe.")})
        return "probe"

    return add


def test_help_imports_nothing_heavy() -> None:
    program = (
        "import sys\nfrom aimgpu.cli.main import run_command\nstatus = run_command(['--help'])\n"
        f"heavy = [name for name in {HEAVY!r} if name in sys.modules]\n"
        "print(heavy, file=sys.stderr)\nsys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"
    assert "version" in done.stdout


def test_help_lists_every_command_with_its_line() -> None:
    text = run_aimgpu("--help").stdout
    for name in command_names():
        entry = find_entry(name)
        assert entry is not None
        assert name in text
        assert entry.help.split()[0] in text


def test_every_command_takes_json_and_shows_examples() -> None:
    for path, command in all_commands():
        options = {option for parameter in command.params for option in parameter.opts}
        assert "--json" in options, f"aimgpu {path} has no --json"
        assert command.epilog, f"aimgpu {path} has no epilog"
        assert f"aimgpu {path}" in command.epilog, f"aimgpu {path} has no example of itself"
        assert command.help, f"aimgpu {path} has no help"


def test_no_command_is_registered_twice() -> None:
    assert len(command_names()) == len(set(command_names()))


def test_an_unknown_command_names_the_nearest() -> None:
    done = run_aimgpu("versoin")
    assert done.returncode == 2
    assert "error: there is no command 'versoin'" in done.stderr
    assert "hint: Did you mean `aimgpu version`?" in done.stderr
    assert done.stdout == ""


def test_an_unknown_option_is_a_usage_error_also_in_json() -> None:
    done = run_aimgpu("version", "--bogus", "--json")
    assert done.returncode == 2
    error = json.loads(done.stderr)["error"]
    assert error["code"] == "usage"
    assert "--bogus" in error["message"]
    assert "aimgpu version --help" in error["hint"]


def test_version_agrees_in_all_its_forms() -> None:
    facts = json.loads(run_aimgpu("version", "--json").stdout)
    assert facts["version"] in run_aimgpu("--version").stdout
    assert facts["version"] in run_aimgpu("version").stdout


def raise_busy() -> None:
    raise PartitionBusy("gpu3 is busy", hint="Stop pid 411.")


def raise_interrupt() -> None:
    raise KeyboardInterrupt


def test_an_error_becomes_its_exit_status_with_the_hint(
    register: Callable[[Callable[[], None]], str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command([register(raise_busy)]) == PartitionBusy.exit_status
    assert capsys.readouterr() == ("", "error: gpu3 is busy\nhint: Stop pid 411.\n")


def test_an_error_is_json_on_stderr_when_json_was_asked_for(
    register: Callable[[Callable[[], None]], str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command([register(raise_busy), "--json"]) == PartitionBusy.exit_status
    out, err = capsys.readouterr()
    assert out == ""
    assert json.loads(err) == {"error": {"code": "partition_busy", "message": "gpu3 is busy", "hint": "Stop pid 411."}}


@pytest.mark.parametrize("command", [["ps"], ["keys", "list"], ["down"]])
def test_a_file_that_cannot_be_read_is_an_error_with_a_hint_and_no_traceback(tmp_path: Path, command: list[str]) -> None:
    for name in ("daemon.json", "keys.json"):
        (tmp_path / name).mkdir()
    result = run_aimgpu(*command, AIMGPU_HOME=str(tmp_path))
    assert result.returncode == 1
    assert result.stderr.startswith("error: Is a directory: ")
    assert "hint: " in result.stderr
    assert "Traceback" not in result.stderr


def test_an_interrupt_ends_with_130_and_no_traceback(
    register: Callable[[Callable[[], None]], str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command([register(raise_interrupt)]) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_a_reader_that_leaves_early_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as closed_pipe:
        done = subprocess.run(
            [sys.executable, "-m", "aimgpu.cli.main", "--help"], stdout=closed_pipe, stderr=subprocess.PIPE, check=False
        )
    assert done.stderr == b""


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script(shell: str) -> None:
    done = run_aimgpu("completion", shell)
    assert done.returncode == 0
    assert "_AIMGPU_COMPLETE" in done.stdout


def test_bash_completes_commands_and_options() -> None:
    commands = run_aimgpu(_AIMGPU_COMPLETE="bash_complete", COMP_WORDS="aimgpu ver", COMP_CWORD="1")
    assert "plain,version" in commands.stdout
    options = run_aimgpu(_AIMGPU_COMPLETE="bash_complete", COMP_WORDS="aimgpu version --", COMP_CWORD="2")
    assert "plain,--json" in options.stdout


@pytest.mark.parametrize(
    ("typed", "command"),
    [("list", "ps"), ("status", "ps"), ("stop x", "down x"), ("rm 'a b'", "down 'a b'"), ("serve m", "up m")],
)
def test_a_word_of_another_tool_is_answered_with_the_command(
    typed: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(shlex.split(typed)) == 2
    assert f"Did you mean `aimgpu {command}`?" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "handler"), [("OTHER", "default_int_handler"), ("_AIMGPU_COMPLETE", "SIG_DFL")])
def test_ctrl_c_ends_a_completion_without_a_traceback(name: str, handler: str) -> None:
    show = "main.main = lambda: print(repr(signal.getsignal(signal.SIGINT)))"
    look = f"import signal; from aimgpu.cli import entry, main; {show}; entry.main()"
    environment = {**os.environ, name: "bash_complete"}
    shown = subprocess.run([sys.executable, "-c", look], env=environment, capture_output=True, text=True, check=True)
    assert handler in shown.stdout
