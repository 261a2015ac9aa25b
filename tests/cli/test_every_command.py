"""Every command, found through the registry: its examples parse, and what it cannot take is a usage error with a hint."""

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from tests.cli.test_main import all_commands

from aimgpu.cli.main import cli, run_command

COMMANDS = dict(all_commands())
USAGE = 2
EXAMPLE = re.compile(r"^\s*(?:\w+=\S+ )*(?:.*\|\s*)?(?:eval \"\$\()?(aimgpu .*)$")


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIMGPU_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)


def groups() -> Iterator[tuple[str, click.Group]]:
    context = click.Context(cli, info_name="aimgpu")
    for name in cli.list_commands(context):
        found = cli.get_command(context, name)
        if isinstance(found, click.Group):
            yield name, found


def examples_of(command: click.Command) -> list[list[str]]:
    """The words after `aimgpu` of each example; comments, pipes, redirections and what stands for more are cut off."""
    found = []
    for line in (command.epilog or "").splitlines():
        match = EXAMPLE.match(line)
        if match:
            text = re.split(r"\s+(?:[|>]|&&)|\)\"|\s{2,}#|\s\.\.\.", match[1])[0]
            found.append(shlex.split(text, comments=True)[1:])
    return found


def parse(words: list[str]) -> click.Context:
    """As far as the command's own parameters; raises a usage error for what it does not take. Nothing is run."""
    context = cli.make_context("aimgpu", words)
    arguments = [*context._protected_args, *context.args]
    while isinstance(context.command, click.Group):
        name, command, rest = context.command.resolve_command(context, arguments)
        assert command is not None
        context = command.make_context(name, rest, parent=context)
        arguments = [*context._protected_args, *context.args]
    return context


def fails(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, str]:
    """The error, which must be the same as text and as JSON."""
    assert run_command(list(arguments)) == USAGE, arguments
    text = capsys.readouterr()
    assert run_command([*arguments, "--json"]) == USAGE, arguments
    as_json = capsys.readouterr()
    assert (text.out, as_json.out) == ("", "")
    error: dict[str, str] = json.loads(as_json.err)["error"]
    assert text.err == f"error: {error['message']}\nhint: {error['hint']}\n"
    return error


@pytest.mark.parametrize("path", COMMANDS)
def test_the_examples_in_the_help_parse(path: str) -> None:
    examples = examples_of(COMMANDS[path])
    assert examples, path
    for words in examples:
        assert parse(words).command is not None


@pytest.mark.parametrize("name", [name for name, _ in groups()])
def test_the_examples_of_a_group_parse(name: str) -> None:
    examples = examples_of(dict(groups())[name])
    assert examples, name
    for words in examples:
        assert words[0] == name
        parse(words)


@pytest.mark.parametrize("path", COMMANDS)
def test_an_unknown_option_names_the_command_whose_help_to_read(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    error = fails(capsys, *path.split(), "--no-such-option")
    assert error["code"] == "usage"
    assert "--no-such-option" in error["message"]
    assert error["hint"] == f"`aimgpu {path} --help` shows what it takes."


@pytest.mark.parametrize("path", COMMANDS)
def test_too_many_words_are_refused_where_a_command_takes_a_number_of_them(
    path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [parameter for parameter in COMMANDS[path].params if isinstance(parameter, click.Argument)]
    if any(argument.nargs == -1 for argument in arguments):
        return
    words = [_fitting(argument.type) for argument in arguments]
    error = fails(capsys, *path.split(), *words, "one-too-many")
    required = [parameter for parameter in COMMANDS[path].params if isinstance(parameter, click.Option) and parameter.required]
    assert "one-too-many" in error["message"] or required


def _fitting(kind: click.ParamType[Any]) -> str:
    return str(kind.choices[0]) if isinstance(kind, click.Choice) else "word"


@pytest.mark.parametrize("path", COMMANDS)
def test_words_that_are_missing_are_named(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    required = [parameter for parameter in COMMANDS[path].params if parameter.required]
    if required:
        error = fails(capsys, *path.split())
        names = [parameter.human_readable_name for parameter in required] + [opt for each in required for opt in each.opts]
        names += [str(choice) for each in required if isinstance(each.type, click.Choice) for choice in each.type.choices]
        assert any(name in error["message"] for name in names)


def bounded_options() -> Iterator[tuple[str, str, click.ParamType[Any]]]:
    for path, command in COMMANDS.items():
        for parameter in command.params:
            if isinstance(parameter, click.Option) and isinstance(
                parameter.type, click.types._NumberRangeBase | click.types.FloatParamType | click.Choice
            ):
                yield path, parameter.opts[-1], parameter.type


@pytest.mark.parametrize(
    ("path", "option", "kind"), list(bounded_options()), ids=lambda value: str(value) if isinstance(value, str) else ""
)
def test_a_value_outside_of_its_range_is_refused_with_the_range(
    path: str, option: str, kind: click.ParamType[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [p for p in COMMANDS[path].params if isinstance(p, click.Argument)]
    words = [_fitting(argument.type) for argument in arguments]
    wrong = ["nonsense"]
    if isinstance(kind, click.types._NumberRangeBase):
        wrong += [str(kind.min - 1)] if kind.min is not None else []
        wrong += [str(kind.max + 1)] if kind.max is not None else []
        wrong += ["nan", "inf"]
    for value in wrong:
        error = fails(capsys, *path.split(), option, value, *words)
        assert option in error["message"]
        if isinstance(kind, click.Choice):
            assert all(str(choice) in error["message"] for choice in kind.choices)


@pytest.mark.parametrize("name", [name for name, _ in groups()])
def test_a_group_without_a_command_shows_its_commands(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    status = run_command([name])
    shown = capsys.readouterr()
    assert status in (0, USAGE)
    for command in dict(groups())[name].commands:
        assert command in shown.out + shown.err


@pytest.mark.parametrize("name", [name for name, _ in groups()])
def test_a_word_that_is_no_command_of_a_group_is_named(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    error = fails(capsys, name, "no-such-command")
    assert "no-such-command" in error["message"]


@pytest.mark.parametrize("path", COMMANDS)
def test_help_explains_every_option(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command([*path.split(), "--help"]) == 0
    text = capsys.readouterr().out
    for parameter in COMMANDS[path].params:
        if isinstance(parameter, click.Option) and not parameter.hidden:
            assert parameter.opts[-1] in text
            assert parameter.help or parameter.show_default, f"aimgpu {path} {parameter.opts[-1]} is not explained"


def test_help_has_a_short_name() -> None:
    """Of a command that no other test runs without its group: click keeps the names of the first run."""
    assert run_command(["-h"]) == 0


ON_A_MACHINE = ("--kubeconfig", "--kube-context", "--namespace")


@pytest.mark.parametrize("path", [path for path, command in COMMANDS.items() if any(p.name == "on" for p in command.params)])
@pytest.mark.parametrize("option", ON_A_MACHINE)
def test_where_a_cluster_is_means_nothing_on_this_machine(path: str, option: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [p for p in COMMANDS[path].params if isinstance(p, click.Argument) and p.required]
    needed = [p.opts[0] for p in COMMANDS[path].params if isinstance(p, click.Option) and p.required]
    words = ["word" for _ in arguments] + [word for name in needed for word in (name, "1GiB")]
    assert run_command([*path.split(), *words, option, "x"]) == USAGE
    assert "Add --on kubernetes." in capsys.readouterr().err


NEEDS_A_DAEMON = (
    ["ps"],
    ["slo"],
    ["top"],
    ["logs", "chat"],
    ["resize", "chat", "--memory", "1GiB"],
    ["down", "chat"],
    ["chat"],
)


@pytest.mark.parametrize("arguments", NEEDS_A_DAEMON, ids=lambda arguments: arguments[0])
def test_without_a_daemon_the_error_is_the_same_as_text_and_as_json(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(arguments) == 10
    text = capsys.readouterr()
    assert run_command([*arguments, "--json"]) == 10
    error = json.loads(capsys.readouterr().err)["error"]
    assert text.err == f"error: {error['message']}\nhint: {error['hint']}\n"
    assert error["code"] == "daemon_unreachable"
    assert "aimgpu up" in error["hint"]
