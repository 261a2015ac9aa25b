"""`args`, `env` and `image` of a stack file: checked against what we set, passed on, secrets never shown."""

from pathlib import Path
from typing import Any

import pytest

from aimgpu.control.stack.stack_file import parse_stack
from aimgpu.domain import Deployment, Footprint, Sharing
from aimgpu.engines.ollama.engine import OllamaEngine
from aimgpu.engines.overrides import check_overrides, with_overrides
from aimgpu.engines.protocols import Command
from aimgpu.engines.vllm.engine import VllmEngine
from aimgpu.engines.vllm.program import parse_help
from aimgpu.errors import InvalidInput, InvalidStackFile

FOOTPRINT = Footprint(
    model="m",
    engine="vllm",
    precision="fp16",
    context_tokens=512,
    concurrency=4,
    terms=(),
    flags={"--kv-cache-memory-bytes": "1024", "--max-num-batched-tokens": "2048"},
)
HELP = """usage: vllm serve [model_tag] [options]

  -h, --help            show this help message and exit
  --headless            Run in headless mode.
  --enable-prefix-caching, --no-enable-prefix-caching
                        Whether to enable prefix caching; see --not-a-flag of the docs.
  --compilation-config, -cc COMPILATION_CONFIG
"""


class ListedVllm(VllmEngine):
    """Whose flags are known without asking the program."""

    def known_flags(self) -> frozenset[str]:
        return parse_help(HELP)


def read(text: str, base: Path | None = None) -> Deployment:
    (deployment,) = parse_stack(f"models:\n  chat:\n    model: m\n    {text}\n", base_directory=base).deployments
    return deployment


def check(text: str, engine: object | None = None, **options: Any) -> None:
    check_overrides(read(text), engine or ListedVllm(), FOOTPRINT, installed=options.get("installed", True))


def test_the_help_names_flags_and_their_aliases() -> None:
    found = parse_help(HELP)
    assert {"help", "headless", "enable-prefix-caching", "no-enable-prefix-caching", "compilation-config"} <= found
    assert "not-a-flag" not in found


def test_flags_values_and_lists_reach_the_engine_as_written() -> None:
    text = """args: {enable_prefix_caching: true, headless: false, compilation-config: '{"mode": 3, "x": "a b"}', x: [1, 2]}"""
    command = with_overrides(Command(argv=("vllm",)), read(text).overrides)
    config = '{"mode": 3, "x": "a b"}'
    assert command.argv == ("vllm", "--enable-prefix-caching", "--compilation-config", config, "--x", "1", "2")


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("args: {max_num_seqs: 8}", "args has --max-num-seqs 8, and aimgpu sets --max-num-seqs 4 itself", "`concurrency`"),
        ("args: {--kv-cache-memory-bytes: 5}", "aimgpu sets --kv-cache-memory-bytes 1024 itself", "`gpu`"),
        ("args: {port: 80}", "aimgpu sets --port ... itself", "Remove 'port'"),
        ("args: {max-num-batched-tokens: 4}", "aimgpu sets --max-num-batched-tokens 2048 itself", "Remove"),
        ("args: {enable-prefix-cachign: true}", "does not take the flag --enable-prefix-cachign", "enable-prefix-caching"),
        ("args: {wibble: 1}", "chat: vllm does not take the flag --wibble", "Remove 'wibble' from `args`"),
        ("image: vllm/vllm-openai:v0.26.0", "'image' is for containers", "launcher: docker"),
        ("env: {HF_TOKEN: {from_variable: AIMGPU_TEST_MISSING}}", "no variable AIMGPU_TEST_MISSING", "Export"),
        ("env: {HF_TOKEN: {from_file: /nowhere/token}}", "cannot read /nowhere/token", "Check the path"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(text: str, message: str, hint: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        check(text)
    assert message in caught.value.message
    assert hint in str(caught.value.hint)


def test_flags_of_an_image_are_not_checked_against_this_machines_program() -> None:
    check("args: {some-newer-flag: 1}", installed=False)
    check("image: vllm/vllm-openai:v0.26.0", installed=False)


def test_ollama_takes_variables_and_no_flags() -> None:
    with pytest.raises(InvalidInput, match="ollama takes no flags"):
        check("args: {verbose: true}", OllamaEngine())
    check("env: {OLLAMA_DEBUG: 1}", OllamaEngine())


def test_a_variable_that_we_set_is_a_conflict_that_names_it() -> None:
    own = Command(argv=("vllm",), environment={"CUDA_VISIBLE_DEVICES": "GPU-1"}, secrets={"VLLM_API_KEY": "s3cret"})
    with pytest.raises(InvalidInput, match="aimgpu sets CUDA_VISIBLE_DEVICES to 'GPU-1' itself"):
        with_overrides(own, read("env: {CUDA_VISIBLE_DEVICES: 0}").overrides)
    with pytest.raises(InvalidInput) as caught:
        with_overrides(own, read("env: {VLLM_API_KEY: mine}").overrides)
    assert "s3cret" not in str(caught.value)


def test_secrets_are_read_at_the_start_and_stand_apart_from_what_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text("hf_file\n")
    monkeypatch.setenv("MY_TOKEN", "hf_variable")
    deployment = read("env: {A: {from_file: token}, B: {from_variable: MY_TOKEN}, C: plain}", tmp_path)
    assert "hf_file" not in repr(deployment)
    assert "hf_variable" not in repr(deployment)
    command = with_overrides(Command(argv=("vllm",)), deployment.overrides)
    assert command.secrets == {"A": "hf_file", "B": "hf_variable"}
    assert command.environment == {"C": "plain"}


@pytest.mark.parametrize(
    "text",
    [
        "args: [a]",
        "args: {'a b': 1}",
        "env: {A: {}}",
        "env: {A: {from_file: a, from_variable: B}}",
        "image: 'a b'",
        "image: 5",
        "image: 1.0",
        "image: true",
        "image: [a, b]",
        "image: {name: a}",
        "image: ''",
        "env: {'1': x}",
    ],
)
def test_what_is_written_wrongly_names_its_line(text: str) -> None:
    with pytest.raises(InvalidStackFile, match="line 4"):
        read(text)


def test_sharing_by_promise_needs_a_promise() -> None:
    with pytest.raises(InvalidStackFile, match="needs a promise"):
        read("sharing: promise")
    kept = read("sharing: promise\n    slo: {tpot_p95: 2.75ms}")
    assert kept.sharing is Sharing.PROMISE
    assert kept.objective is not None
    assert kept.objective.tpot_p95_ms == pytest.approx(2.75)
