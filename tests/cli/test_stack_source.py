"""Where a stack comes from: names on the command line, the example, a file."""

from io import BytesIO, TextIOWrapper
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.cli.conftest import CommandLine

from aimgpu.cli.main import cli
from aimgpu.cli.stack_source import EXAMPLE, choose_source, name_of, parse_source, read_source, source_of_models
from aimgpu.control.stack.stack_file import LARGEST_FILE
from aimgpu.errors import InvalidInput, InvalidStackFile

EXAMPLE_FILE = Path(__file__).resolve().parents[2] / "examples" / "stack.yaml"


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("smollm2", "smollm2"),
        ("Qwen/Qwen3-4B", "Qwen3-4B"),
        ("qwen3:4b", "qwen3-4b"),
        ("models/tiny model.gguf", "tiny-model"),
        ("/data/Llama-3.1-8B/", "Llama-3.1-8B"),
    ],
)
def test_a_model_is_named_for_what_it_is(model: str, name: str) -> None:
    assert name_of(model) == name


def test_models_become_deployments_that_are_sized_by_themselves() -> None:
    stack = source_of_models(("smollm2", "code=Qwen/Qwen3-4B")).stack
    assert [(one.name, one.model, one.context_tokens) for one in stack.deployments] == [
        ("smollm2", "smollm2", None),
        ("code", "Qwen/Qwen3-4B", None),
    ]


@pytest.mark.parametrize("models", [("a/x", "b/x"), ("=x",), ("x=",)])
def test_models_that_cannot_be_told_apart_or_named_are_refused(models: tuple[str, ...]) -> None:
    with pytest.raises(InvalidInput):
        source_of_models(models)


def test_a_name_cannot_break_out_of_the_stack() -> None:
    hostile = '/x"}, evil: {model: y'
    [deployment] = source_of_models((f"ok={hostile}",)).stack.deployments
    assert deployment.model == hostile


def test_the_example_is_the_one_in_examples() -> None:
    assert parse_source(EXAMPLE, "example", Path.cwd()).stack.deployments == read_source(EXAMPLE_FILE).stack.deployments


@pytest.mark.parametrize("command", ["plan", "explain chat", "capacity --gpu MI300X", "compose"])
def test_every_command_that_reads_a_stack_takes_it_from_stdin(command: str) -> None:
    outcome = CliRunner().invoke(cli, [*command.split(), "-f", "-"], input=EXAMPLE)
    assert (outcome.exit_code, "chat" in outcome.stdout) == (0, True), outcome.output + repr(outcome.exception)


@pytest.mark.parametrize(
    ("data", "reason"), [(b"\xff\xfe", "not UTF-8"), (b"#" * (LARGEST_FILE + 1), "more than 4194304 bytes")]
)
def test_what_is_no_stack_on_stdin_is_refused_with_the_reason(
    data: bytes, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", TextIOWrapper(BytesIO(data)))
    with pytest.raises(InvalidStackFile, match=reason):
        read_source(Path("-"))


def test_a_file_and_models_exclude_each_other(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="exclude"):
        choose_source(tmp_path / "stack.yaml", ("smollm2",), example=False)


def test_without_anything_to_serve_up_offers_the_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidStackFile) as raised:
        choose_source(None, (), example=False)
    assert "aimgpu up --example" in (raised.value.hint or "")


def test_up_serves_named_models_without_a_file(aimgpu: CommandLine) -> None:
    (aimgpu.folder / "stack.yaml").unlink()
    done = aimgpu.run("up", "smollm2", "--detach")
    assert done.returncode == 0, done.stderr
    assert "nothing to serve" in aimgpu.run("up").stderr
