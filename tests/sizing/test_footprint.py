import pytest
from hypothesis import given
from hypothesis import strategies as st

from aimgpu.domain import Exactness, Vendor
from aimgpu.errors import InvalidInput
from aimgpu.sizing import ENGINES, ModelFacts, SizingRequest, built_in, estimate_footprint
from aimgpu.units import GIB, MIB


def _model(name: str) -> ModelFacts:
    facts = built_in().find(name)
    assert facts is not None
    return facts


LLAMA = _model("meta-llama/Llama-3.1-8B-Instruct")


@pytest.mark.parametrize("engine", ENGINES)
def test_int4_is_charged_as_int4_and_int8_as_int8(engine: str) -> None:
    half, eight, four = (
        estimate_footprint(SizingRequest(model=LLAMA, engine=engine, precision=precision)).terms[0].memory_bytes
        for precision in ("fp16", "int8", "int4")
    )
    assert 0.5 * half < eight < 0.6 * half
    assert 0.25 * half < four < 0.4 * half


def test_the_kv_cache_of_vllm_is_exact_to_the_block() -> None:
    footprint = estimate_footprint(SizingRequest(model=LLAMA, context_tokens=8192, concurrency=4))
    cache = next(term for term in footprint.terms if term.name == "kv_cache")
    assert cache.memory_bytes == 131_072 * (4 * 8192 + 16)
    assert cache.exactness is Exactness.EXACT
    assert footprint.flags["--kv-cache-memory-bytes"] == str(cache.memory_bytes)
    assert footprint.flags["--max-num-seqs"] == "4"


@given(
    engine=st.sampled_from(ENGINES),
    context=st.integers(1, 131_072),
    concurrency=st.integers(1, 64),
    vendor=st.sampled_from(list(Vendor)),
)
def test_more_context_or_more_requests_never_need_less(engine: str, context: int, concurrency: int, vendor: Vendor) -> None:
    def total(context_tokens: int, requests: int) -> int:
        request = SizingRequest(model=LLAMA, engine=engine, context_tokens=context_tokens, concurrency=requests, vendor=vendor)
        return estimate_footprint(request).total_bytes

    here = total(context, concurrency)
    assert total(context + 100, concurrency) >= here
    assert total(context, concurrency + 1) >= here
    assert here > LLAMA.parameters * 2 - GIB * 2


def test_amd_is_charged_its_larger_context() -> None:
    amd, nvidia = (estimate_footprint(SizingRequest(model=LLAMA, vendor=vendor)).total_bytes for vendor in Vendor)
    assert amd > nvidia


def test_llama_cpp_on_nvidia_is_charged_for_cublas_and_its_pool() -> None:
    """An H200 counted 100 to 102 MiB beside buffers and pool; the pool holds 512 tokens in 16 bits, 4096 and 14336 wide."""
    engine = {
        (vendor, gpu): next(
            term.memory_bytes
            for term in estimate_footprint(SizingRequest(model=LLAMA, engine="llamacpp", vendor=vendor, gpu=gpu)).terms
            if term.name == "engine"
        )
        for vendor, gpu in ((Vendor.NVIDIA, "H200-141"), (Vendor.NVIDIA, "A100-80"))
    }
    pool = 512 * (4096 + 14336) * 2
    assert engine[Vendor.NVIDIA, "H200-141"] == 128 * MIB + pool
    assert engine[Vendor.NVIDIA, "H200-141"] - pool >= 102 * MIB
    assert engine[Vendor.NVIDIA, "A100-80"] == 64 * MIB + 12 * MIB + (128 << 10) + pool


def test_a_parameter_count_alone_is_sized_and_says_that_it_is_a_fallback() -> None:
    model = ModelFacts(name="mine", source="given", parameters=7_000_000_000, precision="fp16")
    footprint = estimate_footprint(SizingRequest(model=model))
    assert footprint.exactness is Exactness.ESTIMATED
    assert all(term.exactness is Exactness.ESTIMATED for term in footprint.terms)
    assert "fallback" in footprint.notes[0]
    assert footprint.total_bytes > 14_000_000_000


@pytest.mark.parametrize(
    "wrong", [{"engine": "tensorrt"}, {"context_tokens": 0}, {"concurrency": 0}, {"concurrency": -1}, {"tensor_parallel": 0}]
)
def test_nonsense_is_refused_with_what_would_be_right(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidInput) as caught:
        SizingRequest(model=LLAMA, **wrong)  # type: ignore[arg-type]  # wrong on purpose
    assert caught.value.hint


def test_an_unknown_precision_names_the_known_ones() -> None:
    with pytest.raises(InvalidInput, match="fp17") as caught:
        estimate_footprint(SizingRequest(model=LLAMA, precision="fp17"))
    assert "int4" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("engine", "kind"), [("vllm", "q8_0"), ("llamacpp", "fp8"), ("ollama", "q5_1"), ("transformers", "fp8"), ("vllm", "banana")]
)
def test_a_cache_type_that_the_engine_cannot_keep_is_refused(engine: str, kind: str) -> None:
    with pytest.raises(InvalidInput):
        SizingRequest(model=_model("Qwen/Qwen3-8B"), engine=engine, kv_precision=kind)


def test_a_cache_type_in_capitals_is_the_same_and_has_its_flag() -> None:
    footprint = estimate_footprint(SizingRequest(model=_model("Qwen/Qwen3-8B"), kv_precision="FP8"))
    assert footprint.flags["--kv-cache-dtype"] == "fp8"


def test_a_prompt_longer_than_the_context_is_refused() -> None:
    with pytest.raises(InvalidInput, match="longer than the context"):
        SizingRequest(model=_model("Qwen/Qwen3-8B"), context_tokens=4096, prompt_tokens=4097)


def test_a_number_of_devices_that_does_not_divide_the_heads_is_remarked() -> None:
    """Qwen2.5-7B has 28 heads and 4 KV heads."""
    model = _model("Qwen/Qwen2.5-7B-Instruct")
    by_count = {count: estimate_footprint(SizingRequest(model=model, tensor_parallel=count)).notes for count in (2, 4, 7, 8)}
    assert {count for count, notes in by_count.items() if notes} == {7, 8}


def test_transformers_unpacks_gguf_types() -> None:
    model = _model("Qwen/Qwen3-8B")
    packed, plain = (
        estimate_footprint(SizingRequest(model=model, engine="transformers", precision=kind)) for kind in ("q4_k_m", "fp16")
    )
    assert packed.total_bytes == plain.total_bytes
    assert "unpacks" in packed.notes[0]


@pytest.mark.parametrize("engine", ["vllm", "transformers"])
def test_what_computes_in_32_bits_keeps_its_cache_in_them(engine: str) -> None:
    full, half = (estimate_footprint(SizingRequest(model=LLAMA, engine=engine, precision=kind)) for kind in ("fp32", "bf16"))
    doubled = ("weights", "kv_cache", "activations")
    sizes = zip(full.terms, half.terms, strict=True)
    assert all(one.memory_bytes > 1.9 * other.memory_bytes for one, other in sizes if one.name in doubled)
    assert full.flags.get("--dtype") == ("float32" if engine == "vllm" else None)


def test_vllm_loads_weights_of_32_bits_in_16_unless_told_otherwise() -> None:
    model = _model("BAAI/bge-m3")
    own, half, full = (
        estimate_footprint(SizingRequest(model=model, precision=kind)).terms[0].memory_bytes for kind in (None, "fp16", "fp32")
    )
    assert own == half < full
