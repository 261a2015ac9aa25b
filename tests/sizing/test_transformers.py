"""Peaks of torch's allocator that the Qwen documentation publishes (GiB; one GPU, batch 1, an answer of 2048 tokens)."""

import pytest

from aimgpu.sizing import SizingRequest, built_in, estimate_footprint
from aimgpu.units import GIB

ALLOCATOR = ("weights", "kv_cache", "activations", "engine")


def _peak_gib(name: str, precision: str, prompt: int, version: str, **more: object) -> float:
    facts = built_in().find(name)
    assert facts is not None
    request = SizingRequest(
        model=facts,
        engine="transformers",
        engine_version=version,
        precision=precision,
        context_tokens=prompt + 2048,
        prompt_tokens=prompt,
        **more,  # type: ignore[arg-type]  # options of the test
    )
    return sum(term.memory_bytes for term in estimate_footprint(request).terms if term.name in ALLOCATOR) / GIB


@pytest.mark.parametrize(
    ("name", "precision", "prompt", "measured"),
    [
        ("Qwen/Qwen2.5-0.5B-Instruct", "bf16", 30720, 2.34),
        ("Qwen/Qwen2.5-1.5B-Instruct", "int8", 6144, 2.30),
        ("Qwen/Qwen2.5-3B-Instruct", "int4", 14336, 3.58),
        ("Qwen/Qwen2.5-3B-Instruct", "bf16", 1, 5.95),  # matrices of 43 MiB count as 44
        ("Qwen/Qwen2.5-3B-Instruct", "awq", 1, 2.50),  # the peak is in loading: a head of its own before it is tied
    ],
)
def test_a_prompt_in_one_piece_is_within_a_hundredth(name: str, precision: str, prompt: int, measured: float) -> None:
    assert _peak_gib(name, precision, prompt, "4.46.0", gpu="A100-80GB") == pytest.approx(measured, rel=0.01)


def test_an_answer_alone_needs_weights_cache_and_workspace() -> None:
    """Qwen3-4B on an H20, decoding at 32,768 tokens: 12.0283 in bf16."""
    facts = built_in().find("Qwen/Qwen3-4B")
    assert facts is not None
    request = SizingRequest(
        model=facts, engine="transformers", engine_version="4.51.3", context_tokens=32768, prompt_tokens=1, gpu="H20-96GB"
    )
    total = sum(term.memory_bytes for term in estimate_footprint(request).terms if term.name in ALLOCATOR)
    assert total / GIB == pytest.approx(12.0283, rel=0.001)


def test_layers_divided_over_gpus_each_need_the_whole_activation() -> None:
    one, two = (_peak_gib("Qwen/Qwen2.5-72B-Instruct", "bf16", 6144, "4.46.0", tensor_parallel=count) for count in (1, 2))
    assert one / 2 < two < one


def test_more_is_needed_without_flash_attention_in_early_versions() -> None:
    fast, slow = (_peak_gib("Qwen/Qwen3-8B", "bf16", 1, "4.51", flash_attention=flash) for flash in (True, False))
    assert slow > fast
