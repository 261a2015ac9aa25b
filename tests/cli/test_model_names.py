"""Models as people type them: what is meant is taken and said, what may be meant is a line to paste."""

from pathlib import Path

import pytest

from aimgpu.cli.main import run_command
from aimgpu.cli.stack_source import source_of_models
from aimgpu.errors import UnknownModel


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIMGPU_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize(
    ("typed", "deployed"),
    [
        ("qwen3:8b", "Qwen/Qwen3-8B-GGUF:Q4_K_M"),
        ("QWEN2.5 7B", "Qwen/Qwen2.5-7B-Instruct-GGUF:Q4_K_M"),
        ("llama3", "bartowski/Meta-Llama-3-8B-Instruct-GGUF:Q4_K_M"),
        ("smollm2", "smollm2"),
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B"),
        ("./mine.gguf", "./mine.gguf"),
    ],
)
def test_a_part_of_a_name_is_deployed_as_files_that_an_engine_here_reads(typed: str, deployed: str) -> None:
    [deployment] = source_of_models((f"m={typed}",)).stack.deployments
    assert deployment.model in (deployed, str(Path(deployed).absolute()))


def test_what_was_taken_is_said_beside_the_answer(capsys: pytest.CaptureFixture[str]) -> None:
    source_of_models(("qwen3:8b",))
    assert capsys.readouterr().err == "qwen3:8b is taken as Qwen/Qwen3-8B-GGUF:Q4_K_M.\n"


@pytest.mark.parametrize("command", ["run", "up", "pull"])
def test_a_typo_ends_in_lines_that_can_be_pasted(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command([command, "smolllm2"]) == UnknownModel.exit_status
    error, hint, *lines = capsys.readouterr().err.splitlines()
    assert (error, hint) == ("error: there is no model 'smolllm2'", "hint: Did you mean one of these?")
    assert lines[0] == f"  aimgpu {command} HuggingFaceTB/SmolLM2-135M-Instruct"
    for line in lines:
        [_, _, model] = line.split()
        assert source_of_models((model,)).stack.deployments[0].model == model


def test_a_family_is_asked_about_with_what_chats_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["run", "qwen3"]) == UnknownModel.exit_status
    assert "aimgpu run Qwen/Qwen3-0.6B-GGUF:Q8_0" in capsys.readouterr().err.splitlines()[2]


def test_a_name_like_no_other_says_what_can_be_given(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["run", "xyzzy"]) == UnknownModel.exit_status
    assert "`aimgpu catalogue list`" in capsys.readouterr().err


def test_a_size_follows_the_engine_that_would_run_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["size", "smollm2"]) == 0
    assert "HuggingFaceTB/SmolLM2-135M-Instruct: llamacpp" in capsys.readouterr().out
    assert run_command(["size", "smollm2", "--engine", "vllm"]) == 0
    assert "HuggingFaceTB/SmolLM2-135M-Instruct: vllm" in capsys.readouterr().out


def test_a_size_for_an_engine_that_is_not_here_names_what_would_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["size", "qwen2.5-7b"]) == 0
    out = capsys.readouterr().out
    assert "Note: qwen2.5-7b is taken as Qwen/Qwen2.5-7B-Instruct" in out
    assert "`aimgpu size Qwen/Qwen2.5-7B-Instruct-GGUF:Q4_K_M` is what would" in out


def test_a_size_for_another_gpu_is_that_of_the_engine_made_for_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["size", "qwen3:8b", "--gpu", "RTX 4090"]) == 0
    out = capsys.readouterr().out
    assert "Qwen/Qwen3-8B: vllm" in out
    assert "does not run on this machine" not in out
