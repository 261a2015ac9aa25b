"""What people type who have read nothing: it runs, or the answer has a line that can be pasted and then works."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from aimgpu.cli.main import run_command
from aimgpu.cli.model_names import understand_model
from aimgpu.cli.registry import find_entry
from aimgpu.control.stack.stack_file import parse_stack
from aimgpu.domain import Fraction, Memory
from aimgpu.units import GIB

RUNS = (
    "size qwen2.5-7b",
    "size 'QWEN2.5 7B'",
    "size qwen3:8b",
    "size Qwen3-8b-gguf",
    "size llama-3.1-8b --gpu RTX4090",
    "size llama3.1:8b --gpu 4090",
    "size phi4 --gpu 'Radeon 7900 XTX'",
    "size deepseek-r1",
    "size smollm2",
    "size acme/new --parameters 7B",
    "size llama3:latest",
    "size ollama/llama3",
    "size https://huggingface.co/Qwen/Qwen3-8B/tree/main",
    "size qwen3:8b --precision 4bit",
    "gpus --gpu 'RTX 3090 Ti'",
    "gpus --gpu h100",
    "catalogue list QWEN3",
    "catalogue add acme/model --parameters 7B",
    "partition apply 0 cpx --gpu MI300X --dry-run",
    "keys list",
    "plan qwen3:8b --gpu 'rtx 4090'",
    "plan smollm2 llama3.1:8b --gpu mi300x --count 2",
)
PASTED = (
    "size lama3",
    "size gemma3",
    "size Qwen/Qwen2.5-7B-Instuct",
    "size smolllm2",
    "run tinylama",
    "run smolllm2",
    "run qwen3",
    "run qwn3-8b",
    "up qwen",
    "up mistrl:7b",
    "pull llama3.2",
    "stop chat",
    "list",
    "serve smollm2",
    "status",
    "rm chat",
    "doctr",
    "models",
    "run",
    "logs",
    "ask smollm2 hello",
    "size qwen3:8b --gpu 'RTX 6090'",
    "size qwen3:8b --gpu 'RTX 3080'",
    "size qwen3:8b --gpu 24GiB",
    "size qwen3:8b --gpu 'Tesla P40'",
    "size qwen3:8b --gpu 'Intel Arc A770'",
    "size qwen3:8b --gpu TPU",
    "size smollm2 --context 4k",
    "size qwen3:8b --quantization int8",
    "size qwen3:8b --ctx-size 4096",
    "size qwen3:8b --concurency 4",
    "size Qwen3 8B",
    "help size",
    "nvidia-smi",
    "keys create bob",
    "partition set 0 cpx --gpu MI300X",
    "catalogue ls",
    "resize chat 3 GB",
    "down --all",
    "size RTX4090",
    "up",
    "plan",
    "catalogue add acme/x --parameters 7",
    "partition cpx",
)


@pytest.fixture(autouse=True)
def _machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIMGPU_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("AIMGPU_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("typed", RUNS)
def test_what_can_be_meant_in_one_way_runs(typed: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(shlex.split(typed)) == 0, capsys.readouterr().err
    assert capsys.readouterr().out


@pytest.mark.parametrize("typed", PASTED)
def test_what_cannot_run_is_answered_with_a_line_that_works(typed: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(shlex.split(typed)) != 0
    answer = capsys.readouterr().err
    lines = re.findall(r"(?:^  |`)(aimgpu [^`\n]+)", answer, re.MULTILINE)
    assert lines, answer
    _, command, *rest = shlex.split(lines[0], comments=True)
    assert find_entry(command) is not None
    if command in ("run", "up", "pull") and rest != ["--example"]:
        assert understand_model(rest[0]) == rest[0], "what is proposed is taken as it stands"
    elif command in ("size", "catalogue", "keys", "gpus"):
        assert run_command([command, *rest]) == 0


@pytest.mark.parametrize(
    ("typed", "line"),
    [
        ("resize chat 3 GB", "aimgpu resize chat --memory 3GB"),
        ("chat code what is a GPU", "aimgpu run code 'what is a GPU'"),
        ("size qwen3:8b --quant=q8_0", "aimgpu size qwen3:8b --precision=q8_0"),
        ("size qwen3:8b --context 32k", "aimgpu size qwen3:8b --context 32768"),
        ("down --all", "aimgpu down"),
        ("resize chat 3", "aimgpu resize chat --memory 3GiB"),
        ("partition CPX/NPS1", "aimgpu partition apply gpu0 CPX/NPS1"),
        ("catalogue add acme/x --parameters 7", "aimgpu catalogue add acme/x --parameters 7B"),
        ("up smollm2 --background", "aimgpu up smollm2 --detach"),
        ("keys revoke bob", "aimgpu keys remove bob"),
        ("help partition apply", "aimgpu partition apply --help"),
        ("size smollm2 --memory 8", "aimgpu size smollm2 --memory 8GiB"),
        ("size smollm2 --memory 8000", "aimgpu size smollm2 --memory 8000MiB"),
        ("size smollm2 --memory '8 gigs'", "aimgpu size smollm2 --memory 8GiB"),
        ("size smollm2 --context 8,192", "aimgpu size smollm2 --context 8192"),
        ("size smollm2 --tp 2", "aimgpu size smollm2 --tensor-parallel 2"),
        ("size acme/new --parameters 7", "aimgpu size acme/new --parameters 7B"),
        ("size acme/new --parameters 7billion", "aimgpu size acme/new --parameters 7B"),
        ("resize chat 8000", "aimgpu resize chat --memory 8000MiB"),
        ("exec --memory 8 -- true", "aimgpu exec --memory 8GiB -- true"),
        ("exec --fraction 50 true", "aimgpu exec --fraction 50% true"),
        ("keys add bob --expires 90", "aimgpu keys add bob --expires 90ms"),
        ("keys add 'my key'", "aimgpu keys add my-key"),
        ("keys add bob --priority urgent", "aimgpu keys add bob --priority high"),
        ("partition apply cpx", "aimgpu partition apply gpu0 CPX"),
        ("partition 0 cpx", "aimgpu partition apply 0 cpx"),
        ("plan smollm2 --gpus 2", "aimgpu plan smollm2 --count 2"),
        ("ps --on k8s", "aimgpu ps --on kubernetes"),
        ("PS", "aimgpu ps"),
        ("stop --all", "aimgpu down"),
        ("size smollm2 --count 2", "aimgpu size smollm2 --tensor-parallel 2"),
        ("size smollm2 --gpu MI300X --memory 300GiB", "aimgpu size smollm2 --gpu MI300X --memory 191.9GiB"),
        ("--verbose ps", "aimgpu ps"),
        ("list models", "aimgpu ps"),
        ("show smollm2", "aimgpu size smollm2"),
        ("size smollm2 --precision best", "aimgpu size smollm2"),
        ("size smollm2 --precision=Auto --context 4096", "aimgpu size smollm2 --context 4096"),
        ("top --once", "aimgpu top --count 1"),
        ("gpus --once", "aimgpu gpus"),
        ("catalogue show llama3", "aimgpu catalogue show meta-llama/Meta-Llama-3-8B-Instruct"),
        ("timeslicing recommend llama3.1:8b", "aimgpu timeslicing recommend meta-llama/Llama-3.1-8B-Instruct"),
        ("profiles show smollm2:135m", "aimgpu profiles show HuggingFaceTB/SmolLM2-135M-Instruct-fp16"),
    ],
)
def test_the_line_is_the_one_that_was_typed_with_one_thing_changed(
    typed: str, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(shlex.split(typed)) != 0
    assert f"Did you mean `{line}`?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "then", "asked"),
    [
        ("run smollm2 --memory 2GiB", "--attach --detach && aimgpu run smollm2", Memory(memory_bytes=2 * GIB)),
        ("run --mem=2 c=smollm2 'say hi'", "--attach --detach && aimgpu run c=smollm2 'say hi'", Memory(memory_bytes=2 * GIB)),
        ("run smollm2 --gpu 'RTX 4090'", "--attach --detach && aimgpu run smollm2", None),
        ("up smollm2 --detach --fraction 0.5", "--detach", Fraction(ppm=500_000)),
    ],
)
def test_what_only_a_stack_file_says_is_written_as_one(
    typed: str, then: str, asked: object, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(shlex.split(typed)) != 0
    line = re.search(r"Did you mean `echo (.+) \| aimgpu up -f - (.+)`\?\n$", capsys.readouterr().err)
    assert line is not None
    assert line[2] == then
    stack = parse_stack(*shlex.split(line[1]))
    (model,) = stack.deployments
    assert understand_model(model.model) == model.model, "what is proposed is taken as it stands"
    assert model.ask.want == asked if asked is not None else stack.gpus.simulated == "RTX 4090"


@pytest.mark.parametrize(
    "typed", ["run smollm2 --gpu 0", "run no-such-model --memory 2GiB", "run --memory 2GiB", "run x --compute lots"]
)
def test_a_stack_that_could_not_be_read_is_not_proposed(typed: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(shlex.split(typed)) != 0
    assert capsys.readouterr().err.endswith("hint: `aimgpu run --help` shows what it takes.\n")


def test_what_else_was_typed_stays_in_every_line_that_is_proposed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["run", "smolllm2", "say hi", "--max-tokens", "5"]) != 0
    lines = re.findall(r"^  aimgpu run (.+)$", capsys.readouterr().err, re.MULTILINE)
    assert lines
    assert all(shlex.split(line)[1:] == ["say hi", "--max-tokens", "5"] for line in lines)


@pytest.mark.parametrize(
    ("typed", "line"),
    [
        ("exec python3 train.py --memory 4GiB", "aimgpu exec --memory 4GiB -- python3 train.py"),
        ("exec python3 train.py", "aimgpu exec --memory 8GiB -- python3 train.py"),
        ("size ./none.gguf", "aimgpu size smollm2"),
        ("plan '~nobody-is-called-so/none.gguf' --gpu MI300X", "aimgpu plan smollm2 --gpu MI300X"),
        ("pull ./none.gguf", "aimgpu pull smollm2"),
        ("size smollm2 --gpu 'Steam Deck'", "aimgpu size smollm2 --gpu RTX-3060-12"),
        ("size --gpu H100", "aimgpu size smollm2 --gpu H100"),
        ("size smollm2 --memory lots", "aimgpu size smollm2 --memory 512MiB"),
        ("partition apply gpu7 CPX --dry-run", "aimgpu partition apply 0 CPX --dry-run"),
        ("explain smollm2", "aimgpu plan smollm2"),
        ("exec --memory 4GiB 'ls -l'", "aimgpu exec --memory 4GiB -- ls -l"),
    ],
)
def test_where_nothing_is_like_it_an_example_is_given(typed: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(shlex.split(typed)) != 0
    error = capsys.readouterr().err
    assert f"`{line}`" in error or f"\n  {line}\n" in error


@pytest.mark.parametrize("word", ["push", "login", "cp"])
def test_a_word_of_another_tool_that_means_nothing_here_is_not_taken_for_one_like_it(
    word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command([word, "x"]) != 0
    assert capsys.readouterr().err.endswith("hint: `aimgpu --help` lists the commands.\n")


def test_a_missing_stack_file_is_answered_with_a_line_that_writes_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["capacity", "-f", "my stack.yaml", "--gpu", "MI300X"]) != 0
    line = re.search(r"`(echo [^`]+)`", capsys.readouterr().err)
    assert line is not None
    subprocess.run(line[1], shell=True, check=True, cwd=tmp_path)  # noqa: S602 -- as it would be pasted
    assert run_command(["capacity", "-f", "my stack.yaml", "--gpu", "MI300X"]) == 0


def test_gpus_of_the_maker_that_was_named_are_proposed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["size", "smollm2", "--gpu", "RTX 6090"]) != 0
    lines = re.findall(r"--gpu (\S+)", capsys.readouterr().err)
    assert lines
    assert all(line.startswith("RTX-") for line in lines)


def test_a_stack_file_may_be_named_like_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "my stack.yaml").write_text("models: {chat: {model: smollm2}}\n")
    assert run_command(["plan", "my stack.yaml", "--gpu", "MI300X"]) == 0
    assert "chat-0" in capsys.readouterr().out
    assert run_command(["plan", "my stak.yaml", "--gpu", "MI300X"]) != 0
    assert capsys.readouterr().err.endswith("hint: Did you mean `--file 'my stack.yaml'`?\n")


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("size qwen3-8b --precision q4", "q4_k_m"),
        ("size smollm2 --engine llama.cpp", "llamacpp"),
        ("size smollm2 --engine VLM", "vllm"),
    ],
)
def test_a_word_of_an_option_is_asked_about_and_then_works(typed: str, meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split(typed)
    assert run_command(words) != 0
    line = shlex.join(["aimgpu", *words[:-1], meant])
    assert f"Did you mean `{line}`?" in capsys.readouterr().err
    assert run_command([*words[:-1], meant]) == 0


def test_a_model_without_a_network_is_one_line_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    assert run_command(["pull", "qwen3:8b"]) != 0
    error = capsys.readouterr().err.splitlines()[-2:]
    assert error[0].startswith("error: cannot fetch Qwen/Qwen3-8B-GGUF: http://127.0.0.1:9: ")
    assert error[1].startswith("hint: Check the network")


@pytest.mark.parametrize("command", ["plan -f", "up --dry-run -f"])
@pytest.mark.parametrize("name", ["qwen3:8b", "llama3"])
def test_the_line_proposed_for_a_short_name_in_a_stack_file_can_be_pasted_into_it(
    command: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "stack.yaml"
    file.write_text(f"models:\n  chat:\n    model: {name}\n")
    assert run_command([*command.split(), str(file)]) != 0
    line = re.search(r"`(model: [^`]+)`", capsys.readouterr().err)
    assert line is not None
    file.write_text(f"models:\n  chat:\n    {line[1]}\n")
    assert run_command([*command.split(), str(file)]) == 0, capsys.readouterr().err
