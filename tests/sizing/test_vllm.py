"""What vLLM's start-up logs tell, and the flags that hold it to the plan."""

import pytest

from aimgpu.domain import Exactness, Footprint
from aimgpu.sizing import SizingRequest, built_in, estimate_footprint
from aimgpu.units import GIB


def _size(name: str, **more: object) -> Footprint:
    facts = built_in().find(name)
    assert facts is not None
    return estimate_footprint(SizingRequest(model=facts, **more))  # type: ignore[arg-type]  # options of the test


def _bytes(footprint: Footprint, term: str) -> int:
    return next(one.memory_bytes for one in footprint.terms if one.name == term)


def test_weights_are_those_of_the_log_with_the_rotary_table() -> None:
    """vllm-project/vllm#10517: Llama 3.1 8B takes 14.9888 GiB, 32 MiB more than its parameters."""
    assert _bytes(_size("meta-llama/Llama-3.1-8B-Instruct"), "weights") / GIB == pytest.approx(14.9888, abs=0.0005)


def test_padded_experts_are_counted() -> None:
    """gpt-oss-20b in MXFP4 on an A100 with vLLM 0.19: 13.72 GiB."""
    assert _bytes(_size("openai/gpt-oss-20b"), "weights") / GIB == pytest.approx(13.72, rel=0.01)


def test_the_sampler_bounds_many_sequences_and_the_tokens_long_batches() -> None:
    """vllm-project/vllm#10517: 2.07 GiB at 20,000 tokens; other logs of 0.6: 1.19 GiB at 256 sequences."""
    name, version = "meta-llama/Llama-3.1-8B-Instruct", "0.6.4"
    long = _size(name, engine_version=version, batched_tokens=20000, context_tokens=20000, concurrency=1)
    many = _size(name, engine_version=version, batched_tokens=2048, concurrency=256, context_tokens=1024)
    assert _bytes(long, "activations") / GIB == pytest.approx(2.07, rel=0.02)
    assert _bytes(many, "activations") / GIB == pytest.approx(1.19, rel=0.05)
    assert _bytes(_size(name, concurrency=256), "activations") < _bytes(many, "activations")


@pytest.mark.parametrize(
    ("name", "per_token"),
    [
        ("mistralai/Mistral-Small-24B-Instruct-2501", 163_840),
        ("meta-llama/Llama-3.1-8B-Instruct", 131_072),
        ("deepseek-ai/DeepSeek-V3", 61 * (512 + 64) * 2),
        ("Qwen/Qwen3-30B-A3B", 48 * 2 * 4 * 128 * 2),
    ],
)
def test_the_cache_of_a_token_is_exact(name: str, per_token: int) -> None:
    footprint = _size(name, context_tokens=4096, concurrency=2)
    assert _bytes(footprint, "kv_cache") == per_token * (2 * 4096 + 16)


@pytest.mark.parametrize(
    ("name", "version", "block"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", "0.32.0+cpu", 128),
        ("meta-llama/Llama-3.1-8B-Instruct", "0.32.0", 16),
        ("deepseek-ai/DeepSeek-V3", "0.32.0+cpu", 16),
    ],
)
def test_one_whole_context_fits_beside_the_null_block(name: str, version: str, block: int) -> None:
    """vLLM 0.32.0 for the CPU refused to start with 1,040 tokens for a context of 1,024: it keeps them in blocks of 128."""
    (cache,) = (term for term in _size(name, engine_version=version, context_tokens=1000).terms if term.name == "kv_cache")
    assert cache.inputs["block_tokens"] == block
    assert cache.inputs["tokens"] == -(-1000 // block) * block + block


def test_heads_are_divided_over_gpus_and_the_compressed_cache_is_not() -> None:
    for name, divided in (("meta-llama/Llama-3.3-70B-Instruct", True), ("deepseek-ai/DeepSeek-V3", False)):
        one, eight = (_bytes(_size(name, tensor_parallel=count), "kv_cache") for count in (1, 8))
        assert eight == (one // 8 if divided else one)
    two = _bytes(_size("Qwen/Qwen2.5-0.5B-Instruct", tensor_parallel=2), "kv_cache")
    assert _bytes(_size("Qwen/Qwen2.5-0.5B-Instruct", tensor_parallel=8), "kv_cache") == two  # two KV heads: one on each


def test_an_fp8_cache_is_half_and_of_mla_656_bytes_a_token() -> None:
    plain, small = (_bytes(_size("Qwen/Qwen3-8B", kv_precision=kind), "kv_cache") for kind in ("bf16", "fp8"))
    assert plain == 2 * small
    compressed = _size("deepseek-ai/DeepSeek-V3", kv_precision="fp8", context_tokens=4096)
    assert _bytes(compressed, "kv_cache") == 656 * 61 * (4096 + 16)
    assert compressed.flags["--kv-cache-dtype"] == "fp8"


def test_sliding_layers_keep_their_window() -> None:
    short = _bytes(_size("google/gemma-3-27b-it", context_tokens=16384), "kv_cache")
    long = _bytes(_size("google/gemma-3-27b-it", context_tokens=32768), "kv_cache")
    full_layers = 10
    assert long - short == full_layers * 16384 * 2 * 16 * 128 * 2


def test_a_hybrid_pads_its_blocks_to_the_state() -> None:
    """Each of the 12 attention layers keeps whole pages, each of the 36 others one page a request."""
    footprint = _size("Qwen/Qwen3-Next-80B-A3B-Instruct", context_tokens=100)
    cache = next(term for term in footprint.terms if term.name == "kv_cache")
    block = cache.inputs["block_tokens"]
    assert isinstance(block, int)
    assert block % 16 == 0
    assert block * 2 * 2 * 256 * 2 >= (3 * 8192 + 32 * 128 * 128) * 4  # a page holds the state
    assert cache.exactness is Exactness.ESTIMATED
    assert cache.memory_bytes == (12 + 36) * 2 * block * 2 * 2 * 256 * 2


def test_the_flags_hold_the_engine_to_the_plan() -> None:
    footprint = _size("Qwen/Qwen3-8B", context_tokens=4096, concurrency=16, device_memory_bytes=192 * GIB)
    flags = footprint.flags
    assert flags["--kv-cache-memory-bytes"] == str(_bytes(footprint, "kv_cache"))
    assert flags["--max-model-len"] == "4096"
    assert flags["--max-num-seqs"] == "16"
    assert flags["--max-num-batched-tokens"] == "2048"
    assert flags["--cudagraph-capture-sizes"] == "1 2 4 8 16"
    assert float(flags["--gpu-memory-utilization"]) * 192 * GIB >= footprint.total_bytes
    assert "--enforce-eager" in _size("Qwen/Qwen3-8B", graphs=False).flags


@pytest.mark.parametrize(
    ("version", "graphs", "cache"),
    [
        ("0.8.5", "--compilation-config", "--num-gpu-blocks-override"),
        ("0.9.1", "--cuda-graph-sizes", "--num-gpu-blocks-override"),
        ("0.10.2", "--cuda-graph-sizes", "--kv-cache-memory-bytes"),
        ("0.11.0", "--cuda-graph-sizes", "--kv-cache-memory-bytes"),
        ("0.11.1", "--cudagraph-capture-sizes", "--kv-cache-memory-bytes"),
        ("0.32.0", "--cudagraph-capture-sizes", "--kv-cache-memory-bytes"),
    ],
)
def test_every_version_gets_the_flags_that_it_knows(version: str, graphs: str, cache: str) -> None:
    flags = _size("Qwen/Qwen3-8B", engine_version=version, context_tokens=4096, concurrency=4).flags
    known = {"--compilation-config", "--cuda-graph-sizes", "--cudagraph-capture-sizes"}
    assert known & flags.keys() == {graphs}
    assert {"--num-gpu-blocks-override", "--kv-cache-memory-bytes"} & flags.keys() == {cache}
    assert not any(" " in value for name, value in flags.items() if name != graphs)


def test_an_old_version_gets_its_cache_in_blocks() -> None:
    flags = _size("Qwen/Qwen3-8B", engine_version="0.9.1", context_tokens=4096, concurrency=4).flags
    assert flags["--num-gpu-blocks-override"] == str(4 * 4096 // 16 + 1)
    assert _size("BAAI/bge-m3", engine_version="0.9.1").flags["--task"] == "embed"


def test_an_encoder_has_no_cache_and_is_run_for_pooling() -> None:
    footprint = _size("BAAI/bge-m3")
    assert _bytes(footprint, "kv_cache") == 0
    assert footprint.flags["--runner"] == "pooling"
    assert "--kv-cache-memory-bytes" not in footprint.flags


def test_ollama_is_told_by_its_environment() -> None:
    flags = _size("Qwen/Qwen3-8B", engine="ollama", precision="int4", concurrency=2, kv_precision="q8_0").flags
    assert flags["OLLAMA_CONTEXT_LENGTH"] == "8192"
    assert flags["OLLAMA_NUM_PARALLEL"] == "2"
    assert flags["OLLAMA_KV_CACHE_TYPE"] == "q8_0"
