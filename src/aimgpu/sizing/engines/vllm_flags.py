"""The flags that hold vLLM to the plan, by its version.

When a flag came and went was read in the arguments of 0.8.5, 0.9.0, 0.10.0 to 0.10.2, 0.11.0, 0.11.1 and 0.32.0.
"""

import json
from collections.abc import Mapping

from aimgpu.domain import Term
from aimgpu.sizing.adapters import vllm_adapter_flags
from aimgpu.sizing.engines.vllm import BLOCK, CACHE_BYTES_SINCE, batched_tokens, graph_sizes, is_at_least
from aimgpu.sizing.request import SizingRequest

_HALF = 2  # bytes
_RUNNER_SINCE = "0.10.1"
_CAPTURE_SIZES_SINCE = "0.11.1"
_GRAPH_SIZES_SINCE = "0.9.0"


def vllm_flags(request: SizingRequest, terms: tuple[Term, ...]) -> Mapping[str, str]:
    """It still wants the part of the memory that the utilization names to be free: on a known device, the plan's part."""
    cache = next(term for term in terms if term.name == "kv_cache")
    total_bytes = sum(term.memory_bytes for term in terms)
    flags = {
        "--max-model-len": str(request.context),
        "--max-num-seqs": str(request.requests_at_once),
        "--max-num-batched-tokens": str(batched_tokens(request)),
        **vllm_adapter_flags(request.adapters),
    }
    if request.element_bytes > _HALF:
        flags["--dtype"] = "float32"
    if request.device_memory_bytes is not None:
        thousandths = min(-(-total_bytes * 1000 // request.device_memory_bytes), 1000)
        flags["--gpu-memory-utilization"] = f"{thousandths / 1000:.3f}"
    if request.tensor_parallel > 1:
        flags["--tensor-parallel-size"] = str(request.tensor_parallel)
    if request.is_encoder:
        pooling = {"--runner": "pooling"} if is_at_least(request, _RUNNER_SINCE) else {"--task": "embed"}
        return flags | pooling | {"--enforce-eager": ""}
    if request.kv_precision == "fp8":
        flags["--kv-cache-dtype"] = "fp8"
    return flags | _cache_flag(request, cache) | _graph_flag(request)


def _cache_flag(request: SizingRequest, cache: Term) -> dict[str, str]:
    """Given the bytes, vLLM skips its profiling and takes exactly that, whatever else starts. Before, it took blocks."""
    if is_at_least(request, CACHE_BYTES_SINCE):
        return {"--kv-cache-memory-bytes": str(cache.memory_bytes)}
    tokens, block = cache.inputs["tokens"], cache.inputs.get("block_tokens", BLOCK)
    return {"--num-gpu-blocks-override": str(-(-int(tokens) // int(block)))}


def _graph_flag(request: SizingRequest) -> dict[str, str]:
    """Names every graph size that was charged."""
    if not request.graphs:
        return {"--enforce-eager": ""}
    sizes = graph_sizes(request.requests_at_once)
    if not is_at_least(request, _GRAPH_SIZES_SINCE):
        return {"--compilation-config": json.dumps({"cudagraph_capture_sizes": sizes}, separators=(",", ":"))}
    name = "--cudagraph-capture-sizes" if is_at_least(request, _CAPTURE_SIZES_SINCE) else "--cuda-graph-sizes"
    return {name: " ".join(map(str, sizes))}
