"""What vLLM allocates on a GPU."""

from dataclasses import replace
from fractions import Fraction

from aimgpu.domain import Exactness, Growth, Term
from aimgpu.sizing.kv import bytes_per_token_and_layer, cache_bytes, kv_formula, kv_inputs, round_up, state_bytes
from aimgpu.sizing.model import Architecture
from aimgpu.sizing.precision import find_precision, kv_element_bytes
from aimgpu.sizing.request import SizingRequest
from aimgpu.sizing.version import at_least
from aimgpu.sizing.weights import weights_term

BLOCK = 16  # tokens of one cache block
_CPU_BLOCK = 128  # in its build for the CPU, except of MLA (platforms/cpu.py in 0.32.0)
BATCHED_TOKENS = 2048  # what the plan asks for: enough to keep a GPU busy in prefill
_F32 = 4
# Sorting the logits of every sequence (top-k and top-p) held 9.85 fp32 copies, by six logs; from 0.17 on Triton kernels work in
# place (vllm-project/vllm#33538). Two 0.19 logs bound the rest to about half; until measured, half is charged.
_SAMPLER_COPIES_PERCENT = 985
_SAMPLER_COPIES_PERCENT_SINCE_0_17 = 493
_LARGEST_GRAPH = 512
CACHE_BYTES_SINCE = "0.10.2"  # --kv-cache-memory-bytes
_LARGE_DEVICE_BYTES, _LARGE_SEQUENCES, _SEQUENCES = 70 << 30, 1024, 256
_TOKENS_PER_SEQUENCE = 256
_GRAPH_BYTES = 256 << 10  # one captured graph piece: one layer, one batch size
# An fp8 cache of MLA keeps 656 B a token and layer: 512 of values, scales, and the positional part in bf16.
_MLA_FP8_RANK = 512
_MLA_FP8 = Fraction(656, 512 + 64)


def vllm_terms(request: SizingRequest, precision: str, architecture: Architecture) -> tuple[Term, ...]:
    """Weights, KV cache, activations and captured graphs."""
    rope_table = architecture.max_context * architecture.head_dim * request.element_bytes  # kept as a buffer beside the weights
    padding = _padding_bytes(architecture, precision) // request.tensor_parallel
    weights = weights_term(request.model, precision, tensor_parallel=request.tensor_parallel, beside=rope_table + padding)
    return (
        weights,
        _kv_term(request, architecture),
        _activation_term(request, architecture),
        _graph_term(request, architecture),
    )


def loaded_in_vllm(request: SizingRequest, asked: str) -> tuple[str, tuple[str, ...]]:
    """fp32 checkpoints are loaded in 16 bits unless fp32 is asked for."""
    if request.precision is None and asked == "fp32":
        return "fp16", ("vLLM loads fp32 weights in 16 bits unless fp32 is asked for",)
    return asked, ()


def vllm_growth(request: SizingRequest, architecture: Architecture) -> Growth | None:
    """A KV cache given in bytes can be of any size; one in blocks (before 0.10.2) and none at all stay as they are."""
    if request.is_encoder or not is_at_least(request, CACHE_BYTES_SINCE):
        return None
    cache = _kv_term(request, architecture)
    return Growth(
        token_bytes=max(1, cache.memory_bytes // int(cache.inputs["tokens"])),
        sequence_bytes=_sampler_bytes(request, architecture),
        graph_bytes=_graph_bytes(architecture) if request.graphs else 0,
        free_sequences=request.sequences is not None,
    )


def with_own_sequences(request: SizingRequest) -> SizingRequest:
    """The engine's own --max-num-seqs, as far as a KV cache of one whole context serves that many; more memory allows more."""
    most = default_sequences(None, request.gpu)
    return replace(request, concurrency=1, sequences=sequences_in(request.context, most))


def default_sequences(memory_bytes: int | None, gpu: str | None) -> int:
    """What vLLM takes for --max-num-seqs by itself: 1024 where it sees 70 GiB or more, except on an A100; else 256."""
    large = memory_bytes is not None and memory_bytes >= _LARGE_DEVICE_BYTES and "A100" not in (gpu or "").upper()
    return _LARGE_SEQUENCES if large else _SEQUENCES


def sequences_in(kv_tokens: int, most: int) -> int:
    """Requests at once that a KV cache of `kv_tokens` serves, counted with short requests; at most `most`."""
    return max(1, min(most, kv_tokens // _TOKENS_PER_SEQUENCE))


def is_at_least(request: SizingRequest, version: str) -> bool:
    """An unknown version is taken for a current one."""
    return request.engine_version is None or at_least(request.engine_version, version)


def batched_tokens(request: SizingRequest) -> int:
    """--max-num-batched-tokens, at least one per request."""
    return max(request.batched_tokens or BATCHED_TOKENS, request.requests_at_once)


def graph_sizes(sequences: int) -> tuple[int, ...]:
    """Batch sizes to capture, as vLLM chooses them: powers of two up to 8, every eighth up to 256, then every sixteenth."""
    largest = min(sequences, _LARGEST_GRAPH)
    small = (size for size in (1, 2, 4, *range(8, 256, 8)) if size < largest)
    return (*small, *range(256, largest, 16), largest)


def _padding_bytes(architecture: Architecture, precision: str) -> int:
    """MXFP4 kernels pad every expert: its inner size to 128, the hidden size to 256."""
    kind = find_precision(precision)
    if kind.name != "mxfp4" or not architecture.experts:
        return 0
    padded = round_up(architecture.expert_intermediate_size, 128) * round_up(architecture.hidden_size, 256)
    extra = padded - architecture.expert_intermediate_size * architecture.hidden_size
    return round(3 * architecture.experts * architecture.layers * extra * kind.weight_bytes)


def _kv_term(request: SizingRequest, architecture: Architecture) -> Term:
    kind = request.cache_kind
    element = kv_element_bytes(kind)
    block = _block_tokens(request, architecture)
    tokens = request.concurrency * round_up(request.context, block) + block  # one block is kept as null
    in_flight = min(architecture.sliding_window - 1 + batched_tokens(request), request.context)
    window = request.concurrency * (round_up(in_flight, block) + block) + block
    kept = cache_bytes(
        architecture,
        full_tokens=tokens,
        window_tokens=window,
        element=_MLA_FP8 if kind == "fp8" and architecture.kv_lora_rank == _MLA_FP8_RANK else element,
        tensor_parallel=request.tensor_parallel,
    )
    state = _state_bytes(request, architecture, block, element)
    return Term(
        name="kv_cache",
        memory_bytes=kept + state,
        exactness=Exactness.ESTIMATED if architecture.state_elements else Exactness.EXACT,
        formula=kv_formula(architecture, "tokens in blocks") + (", + a page a state" if architecture.state_elements else ""),
        inputs=kv_inputs(architecture, tokens, window, element)
        | {"block_tokens": block, "state_bytes": state, "tensor_parallel": request.tensor_parallel},
    )


def _block_tokens(request: SizingRequest, architecture: Architecture) -> int:
    """Hybrids widen the block until a page of attention is as large as one layer's state."""
    linear = architecture.stateful_layers
    if linear <= 0:
        return _CPU_BLOCK if "cpu" in (request.engine_version or "") and not architecture.kv_lora_rank else BLOCK
    element = kv_element_bytes(request.cache_kind)
    page = state_bytes(architecture, 1, _F32, request.tensor_parallel) // linear
    token = bytes_per_token_and_layer(architecture, element, request.tensor_parallel)
    return round_up(-(-page // max(int(token), 1)), BLOCK)


def _state_bytes(request: SizingRequest, architecture: Architecture, block: int, element: Fraction) -> int:
    """Every request holds one padded page for each layer that keeps a state."""
    linear = architecture.stateful_layers
    if not linear:
        return 0
    token = bytes_per_token_and_layer(architecture, element, request.tensor_parallel)
    return round((request.concurrency + 1) * linear * block * token)


def _activation_term(request: SizingRequest, architecture: Architecture) -> Term:
    tokens, sequences = batched_tokens(request), 0 if request.is_encoder else request.requests_at_once
    width = 3 * -(-_feed_forward(architecture) // request.tensor_parallel) + 3 * architecture.hidden_size
    forward = tokens * width * request.element_bytes
    sampler = sequences * _sampler_bytes(request, architecture)
    return Term(
        name="activations",
        memory_bytes=max(forward, sampler),
        exactness=Exactness.ESTIMATED,
        formula="larger of: batched tokens x (3 feed-forward + 3 hidden) x 2 B; copies x sequences x vocabulary x 4 B",
        inputs={"batched_tokens": tokens, "forward_bytes": forward, "sequences": sequences, "sampler_bytes": sampler},
    )


def _sampler_bytes(request: SizingRequest, architecture: Architecture) -> int:
    """For one sequence."""
    percent = _SAMPLER_COPIES_PERCENT_SINCE_0_17 if is_at_least(request, "0.17") else _SAMPLER_COPIES_PERCENT
    return percent * architecture.vocab_size * _F32 // 100


def _feed_forward(architecture: Architecture) -> int:
    """The widest inner layer: an expert layer runs `experts_used` experts for every token."""
    return max(architecture.intermediate_size, architecture.experts_used * architecture.expert_intermediate_size)


def _graph_term(request: SizingRequest, architecture: Architecture) -> Term:
    sizes = len(graph_sizes(request.requests_at_once)) if request.graphs and not request.is_encoder else 0
    return Term(
        name="graphs",
        memory_bytes=sizes * _graph_bytes(architecture),
        exactness=Exactness.ESTIMATED if sizes else Exactness.EXACT,
        formula="captured batch sizes x (layers + 1) x 256 KiB",
        inputs={"sizes": sizes, "layers": architecture.layers},
    )


def _graph_bytes(architecture: Architecture) -> int:
    """Of one captured batch size."""
    return (architecture.layers + 1) * _GRAPH_BYTES
