"""Names as people type them: any part, another case, a short name, a typo; and repositories of GGUF files."""

import pytest

from aimgpu.sizing import built_in, combine, read_rows
from aimgpu.sizing.catalogue import resolve, search

ROWS = built_in().rows


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("qwen2.5-7b", "Qwen/Qwen2.5-7B-Instruct"),
        ("QWEN2.5 7B", "Qwen/Qwen2.5-7B-Instruct"),
        ("qwen3:8b", "Qwen/Qwen3-8B"),
        ("llama3", "meta-llama/Meta-Llama-3-8B-Instruct"),
        ("llama3.2:3b", "meta-llama/Llama-3.2-3B-Instruct"),
        ("phi4", "microsoft/phi-4"),
        ("gemma3:4b", "google/gemma-3-4b-it"),
        ("tinyllama", "TinyLlama/TinyLlama-1.1B-Chat-v1.0"),
        ("smollm2-135m", "HuggingFaceTB/SmolLM2-135M-Instruct"),
        ("HuggingfaceTB/smollm2-360m-instruct", "HuggingFaceTB/SmolLM2-360M-Instruct"),
        ("odestral", "mistralai/Codestral-22B-v0.1"),
    ],
)
def test_a_part_of_one_models_name_is_that_model(typed: str, meant: str) -> None:
    found = resolve(ROWS, typed)
    assert found is not None
    assert found.facts.name == meant


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("smolllm2", "HuggingFaceTB/SmolLM2-135M-Instruct"),
        ("tinylama", "TinyLlama/TinyLlama-1.1B-Chat-v1.0"),
        ("Qwen/Qwen2.5-7B-Instuct", "Qwen/Qwen2.5-7B-Instruct"),
        ("qwn3-8b", "Qwen/Qwen3-8B"),
    ],
)
def test_a_typo_is_asked_about_and_never_taken(typed: str, meant: str) -> None:
    assert resolve(ROWS, typed) is None
    assert meant in built_in().near(typed)


@pytest.mark.parametrize("typed", ["qwen3", "llama3.2", "mistral:7b", "7b", "", "gpt5", "../etc/passwd", "%s"])
def test_what_several_or_no_models_are_called_is_none_of_them(typed: str) -> None:
    assert resolve(ROWS, typed) is None


def test_the_smallest_that_chats_comes_first_where_nothing_is_typed() -> None:
    found = search(ROWS, "")
    assert len(found) == len(ROWS)
    assert found[0].facts.name == "HuggingFaceTB/SmolLM2-135M-Instruct"


def test_a_repository_of_gguf_files_is_sized_as_the_model_that_it_is_named_after() -> None:
    plain = built_in().find("Qwen/Qwen3-8B")
    packed = built_in().find("Qwen/Qwen3-8B-GGUF")
    other = built_in().find("somebody/Qwen3-8B-GGUF:Q8_0")
    assert plain is not None
    assert packed is not None
    assert other is not None
    assert (packed.parameters, packed.precision, packed.in_gguf) == (plain.parameters, "q4_k_m", True)
    assert other.precision == "q8_0"
    assert built_in().find("somebody/Their-Own-8B-GGUF") is None
    assert built_in().find("Qwen/Qwen3-8B-GGUF:NO_SUCH_MIX") is None


def test_every_listed_repository_of_gguf_files_can_be_sized() -> None:
    listed = [row for row in ROWS if row.gguf]
    assert len(listed) > 50
    for row in listed:
        facts = built_in().find(row.gguf or "")
        assert facts is not None
        assert facts.parameters == row.facts.parameters


def test_the_users_own_models_are_found_too() -> None:
    mine = combine(ROWS, read_rows("id,parameters,gguf\nacme/Rocket-9B,9B,acme/rocket-files-gguf:Q6_K\n"))
    row = resolve(mine.rows, "rocket")
    assert row is not None
    assert row.facts.name == "acme/Rocket-9B"
    facts = mine.find("acme/rocket-files-gguf")
    assert facts is not None
    assert facts.precision == "q6_k"
