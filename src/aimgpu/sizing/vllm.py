"""What vLLM allocates on a GPU."""

from collections.abc import Mapping

from aimgpu.domain import Exactness, Term
from aimgpu.sizing.kv import cache_bytes, round_up, state_bytes
from aimgpu.sizing.model import Architecture
from aimgpu.sizing.precision import kv_element_bytes
from aimgpu.sizing.request import SizingRequest
from aimgpu.sizing.version import at_least
from aimgpu.sizing.weights import weights_term

BLOCK = 16  # tokens of one cache block
BATCHED_TOKENS = 2048  # what the plan asks for: enough to keep a GPU busy in prefill
_HALF = 2
_F32 = 4
# Sorting the logits of every sequence (top-k and top-p) held 9.7 fp32 copies of them; from 0.17 on Triton kernels work in
# place. Two 0.19 logs bound the rest to about half; until measured, half is charged.
_SAMPLER_COPIES = (97, 10)
_SAMPLER_COPIES_SINCE_0_17 = (97, 20)
_LARGEST_GRAPH = 512
_GRAPH_BYTES = 256 << 10  # one captured graph piece: one layer, one batch size


def vllm_terms(request: SizingRequest, precision: str, architecture: Architecture) -> tuple[Term, ...]:
    return (
        weights_term(request.model, precision, tensor_parallel=request.tensor_parallel, on_host=0),
        _kv_term(request, architecture),
        _activation_term(request, architecture),
        _graph_term(request, architecture),
    )


def vllm_flags(request: SizingRequest, kv_bytes: int) -> Mapping[str, str]:
    """With `--kv-cache-memory-bytes` vLLM skips its profiling and holds what the plan says, whoever else starts."""
    flags = {
        "--kv-cache-memory-bytes": str(kv_bytes),
        "--max-model-len": str(request.context),
        "--max-num-seqs": str(request.concurrency),
        "--max-num-batched-tokens": str(batched_tokens(request)),
    }
    if request.kv_precision == "fp8":
        flags["--kv-cache-dtype"] = "fp8"
    if request.tensor_parallel > 1:
        flags["--tensor-parallel-size"] = str(request.tensor_parallel)
    if request.graphs:
        flags["--cuda-graph-sizes"] = " ".join(str(size) for size in graph_sizes(request.concurrency))
    else:
        flags["--enforce-eager"] = ""
    return flags


def batched_tokens(request: SizingRequest) -> int:
    return max(request.batched_tokens or BATCHED_TOKENS, request.concurrency)


def graph_sizes(sequences: int) -> tuple[int, ...]:
    """Batch sizes to capture: powers of two up to 8, then every eighth, the last one the largest batch."""
    sizes = [size for size in (1, 2, 4) if size < sequences]
    largest = min(sequences, _LARGEST_GRAPH)
    return (*sizes, *range(8, largest, 8), largest)


def _kv_term(request: SizingRequest, architecture: Architecture) -> Term:
    element = kv_element_bytes(request.kv_precision or "bf16")
    tokens = request.concurrency * round_up(request.context, BLOCK) + BLOCK  # one block is kept as null
    in_flight = min(architecture.sliding_window - 1 + batched_tokens(request), request.context)
    window = request.concurrency * (round_up(in_flight, BLOCK) + BLOCK) if architecture.sliding_window else 0
    kept = cache_bytes(
        architecture,
        full_tokens=tokens,
        window_tokens=window,
        element=element,
        tensor_parallel=request.tensor_parallel,
    )
    state = state_bytes(architecture, request.concurrency, _F32, request.tensor_parallel)
    return Term(
        name="kv_cache",
        memory_bytes=kept + state,
        exactness=Exactness.EXACT,
        formula="2 x layers x KV heads x head size x tokens in blocks of 16 x bytes per element, per GPU",
        inputs={
            "layers": architecture.caching_layers,
            "kv_heads": architecture.kv_heads,
            "head_dim": architecture.head_dim,
            "tokens": tokens,
            "window_tokens": window,
            "state_bytes": state,
            "bytes_per_element": str(element),
            "tensor_parallel": request.tensor_parallel,
        },
    )


def _activation_term(request: SizingRequest, architecture: Architecture) -> Term:
    tokens, sequences = batched_tokens(request), request.concurrency
    width = 3 * -(-architecture.intermediate_size // request.tensor_parallel) + 3 * architecture.hidden_size
    forward = tokens * width * _HALF
    recent = request.engine_version is None or at_least(request.engine_version, "0.17")
    copies, per = _SAMPLER_COPIES_SINCE_0_17 if recent else _SAMPLER_COPIES
    sampler = copies * sequences * architecture.vocab_size * _F32 // per
    return Term(
        name="activations",
        memory_bytes=max(forward, sampler),
        exactness=Exactness.ESTIMATED,
        formula="larger of: batched tokens x (3 feed-forward + 3 hidden) x 2 B; copies x sequences x vocabulary x 4 B",
        inputs={"batched_tokens": tokens, "forward": forward, "sequences": sequences, "sampler": sampler},
    )


def _graph_term(request: SizingRequest, architecture: Architecture) -> Term:
    sizes = len(graph_sizes(request.concurrency)) if request.graphs else 0
    return Term(
        name="graphs",
        memory_bytes=sizes * (architecture.layers + 1) * _GRAPH_BYTES,
        exactness=Exactness.ESTIMATED if sizes else Exactness.EXACT,
        formula="captured batch sizes x (layers + 1) x 256 KiB",
        inputs={"sizes": sizes, "layers": architecture.layers},
    )
