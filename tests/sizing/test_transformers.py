"""Peaks of torch's allocator that the Qwen documentation publishes (GiB; one GPU, batch 1, an answer of 2048 tokens)."""

import json
from pathlib import Path

import pytest
from benchmarks.sizing_gpu.rows import estimated

from aimgpu.domain import Term
from aimgpu.sizing import SizingRequest, built_in, estimate_footprint
from aimgpu.units import GIB, MIB

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
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
        model=facts,
        engine="transformers",
        engine_version="4.51.3",
        context_tokens=32768,
        prompt_tokens=1,
        gpu="H20-96GB",
    )
    total = sum(term.memory_bytes for term in estimate_footprint(request).terms if term.name in ALLOCATOR)
    assert total / GIB == pytest.approx(12.0283, rel=0.001)


def test_layers_divided_over_gpus_each_need_the_whole_activation() -> None:
    one, two = (_peak_gib("Qwen/Qwen2.5-72B-Instruct", "bf16", 6144, "4.46.0", tensor_parallel=count) for count in (1, 2))
    assert one / 2 < two < one


def test_more_is_needed_without_flash_attention_in_early_versions() -> None:
    fast, slow = (_peak_gib("Qwen/Qwen3-8B", "bf16", 1, "4.51", flash_attention=flash) for flash in (True, False))
    assert slow > fast


# Measured on an H200 with transformers 5.17 and torch 2.11 (benchmarks/results/sizing_gpu.json): prompt, answer, batch, bytes.
@pytest.mark.parametrize(
    ("name", "case", "measured"),
    [
        ("Qwen/Qwen3-0.6B", (16384, 16, 1), 3551020544),
        ("google/gemma-3-1b-it", (4096, 32, 1), 2382217728),  # a mask, two rotary tables, the whole prompt in window layers
        ("google/gemma-3-1b-it", (16384, 16, 1), 3604201984),
        ("google/gemma-3-1b-it", (2048, 16, 8), 3369320960),
        ("microsoft/Phi-3.5-mini-instruct", (16384, 16, 1), 15602427392),  # gate and up in one tensor
        ("microsoft/phi-4", (2048, 16, 8), 35738924544),
    ],
)
def test_a_measured_peak_is_met(name: str, case: tuple[int, int, int], measured: int) -> None:
    prompt, answer, batch = case
    request = _request(name, context_tokens=prompt + answer, prompt_tokens=prompt, concurrency=batch)
    assert _allocated(request) == pytest.approx(measured, rel=0.005)


def test_every_measured_case_is_within_the_bounds() -> None:
    rows = json.loads((RESULTS / "sizing_gpu.json").read_text())["rows"]
    errors = [estimated(row, "5.17.0", "NVIDIA H200")["error_percent"] for row in rows if "measured_bytes" in row]
    assert len(errors) >= 60
    assert sum(map(abs, errors)) / len(errors) < 2
    assert min(errors) > -5


def test_a_window_needs_a_mask_only_from_a_prompt_of_its_length_on() -> None:
    short, long = (_activations("google/gemma-3-1b-it", tokens).inputs["mask_bytes"] for tokens in (511, 512))
    assert (short, long) == (0, 512 * 512)


@pytest.mark.parametrize(("tokens", "measured_mib"), [(30001, 5652.0), (32768, 6253.7)])
def test_the_mask_of_a_long_prompt_is_turned_into_numbers_once(tokens: int, measured_mib: float) -> None:
    """Gemma 3 1B on an H200, an answer of 16 tokens: neither an unaligned mask nor grouped keys are copied."""
    facts = built_in().find("google/gemma-3-1b-it")
    assert facts is not None
    request = SizingRequest(
        model=facts, engine="transformers", precision="bf16", context_tokens=tokens + 16, prompt_tokens=tokens, gpu="H200"
    )
    terms = estimate_footprint(request).terms
    assert sum(term.memory_bytes for term in terms if term.name in ALLOCATOR) / MIB == pytest.approx(measured_mib, abs=3)


def test_flash_attention_needs_no_mask() -> None:
    assert _activations("google/gemma-3-1b-it", 16384, flash_attention=True).inputs["mask_bytes"] == 0


def test_scores_that_no_kernel_can_do_are_written_out() -> None:
    term = _activations("openai/gpt-oss-20b", 4096)
    assert term.memory_bytes > 3 * 64 * 4096**2 * 2


def test_experts_of_all_tokens_run_together_since_5_0() -> None:
    early, late = (_activations("Qwen/Qwen3-30B-A3B", 8192, engine_version=version) for version in ("4.57.0", "5.17.0"))
    assert early.memory_bytes < late.memory_bytes
    assert late.memory_bytes >= 8192 * 8 * 4 * 2048 * 2


def _request(name: str, **more: object) -> SizingRequest:
    facts = built_in().find(name)
    assert facts is not None
    options = {"engine": "transformers", "engine_version": "5.17.0", "precision": "bf16", "gpu": "H200"} | more
    return SizingRequest(model=facts, **options)  # type: ignore[arg-type]  # options of the test


def _allocated(request: SizingRequest) -> int:
    return sum(term.memory_bytes for term in estimate_footprint(request).terms if term.name in ALLOCATOR)


def _activations(name: str, prompt: int, **more: object) -> Term:
    terms = estimate_footprint(_request(name, context_tokens=prompt + 16, prompt_tokens=prompt, **more)).terms
    return next(term for term in terms if term.name == "activations")


@pytest.mark.parametrize(
    ("name", "bytes_per_token"),
    [
        ("deepseek-ai/DeepSeek-V2-Lite-Chat", 27 * 16 * (128 + 64 + 128) * 2),
        ("deepseek-ai/DeepSeek-V3", 61 * 128 * (128 + 64 + 128) * 2),
    ],
)
def test_a_compressed_cache_is_kept_expanded(name: str, bytes_per_token: int) -> None:
    """The model code of MLA hands keys and values of every head to the cache, where vLLM keeps the compressed vector."""
    facts = built_in().find(name)
    assert facts is not None
    footprint = estimate_footprint(SizingRequest(model=facts, engine="transformers", context_tokens=4096))
    (cache,) = (term for term in footprint.terms if term.name == "kv_cache")
    assert cache.memory_bytes == 4096 * bytes_per_token
