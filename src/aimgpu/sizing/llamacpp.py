"""What llama.cpp allocates on a GPU with every layer offloaded."""

from collections.abc import Mapping

from aimgpu.domain import Exactness, Term
from aimgpu.sizing.kv import cache_bytes, round_up, state_bytes
from aimgpu.sizing.model import Architecture
from aimgpu.sizing.precision import find_precision, kv_element_bytes
from aimgpu.sizing.request import SizingRequest
from aimgpu.sizing.weights import same_precision, weights_term

UBATCH = 512  # llama.cpp's -ub: tokens whose activations are held at once
_PAD = 256  # cells are padded to this
_F32 = 4
_HALF_TYPES = {"fp16": "f16", "bf16": "bf16"}


def llamacpp_terms(request: SizingRequest, precision: str, architecture: Architecture) -> tuple[Term, ...]:
    return (
        weights_term(
            request.model, precision, tensor_parallel=request.tensor_parallel, on_host=_host_bytes(request, precision)
        ),
        _kv_term(request, architecture),
        _compute_term(request, architecture),
    )


def llamacpp_flags(request: SizingRequest) -> Mapping[str, str]:
    """`-c` is the context of all slots together; the cache is made for exactly that."""
    flags = {
        "--ctx-size": str(cells(request)),
        "--parallel": str(request.concurrency),
        "--ubatch-size": str(ubatch(request)),
        "--n-gpu-layers": "999",
        "--flash-attn": "on" if request.flash_attention else "off",
    }
    if request.kv_precision:
        kind = _HALF_TYPES.get(request.kv_precision, request.kv_precision)
        flags |= {"--cache-type-k": kind, "--cache-type-v": kind}
    return flags


def ollama_variables(request: SizingRequest) -> Mapping[str, str]:
    """Ollama is told by its environment; it gives every parallel request the whole context."""
    variables = {
        "OLLAMA_CONTEXT_LENGTH": str(request.context),
        "OLLAMA_NUM_PARALLEL": str(request.concurrency),
        "OLLAMA_MAX_LOADED_MODELS": "1",
        "OLLAMA_FLASH_ATTENTION": "1" if request.flash_attention else "0",
    }
    if request.kv_precision:
        variables["OLLAMA_KV_CACHE_TYPE"] = _HALF_TYPES.get(request.kv_precision, request.kv_precision)
    return variables


def cells(request: SizingRequest) -> int:
    """Tokens of cache: every slot has its whole context, padded as llama.cpp pads it."""
    return request.concurrency * round_up(request.context, _PAD)


def ubatch(request: SizingRequest) -> int:
    return min(request.batched_tokens or UBATCH, cells(request))


def _host_bytes(request: SizingRequest, precision: str) -> int:
    """The input embedding stays on the host, unless it is the output head too: then the GPU holds it."""
    model, architecture = request.model, request.model.architecture
    if architecture is None or architecture.tied_embeddings:
        return 0
    if model.input_embedding_bytes is not None and same_precision(model.precision, precision):
        return model.input_embedding_bytes
    return round(architecture.embedding_parameters * find_precision(precision).other_bytes)


def _kv_term(request: SizingRequest, architecture: Architecture) -> Term:
    element = kv_element_bytes(request.kv_precision or "fp16")
    window = round_up(architecture.sliding_window * request.concurrency + ubatch(request), _PAD)
    kept = cache_bytes(
        architecture,
        full_tokens=cells(request),
        window_tokens=window,
        element=element,
        tensor_parallel=request.tensor_parallel,
    )
    state = state_bytes(architecture, request.concurrency, _F32, request.tensor_parallel)
    return Term(
        name="kv_cache",
        memory_bytes=kept + state,
        exactness=Exactness.EXACT,
        formula="2 x layers x KV heads x head size x cells x bytes per element (+ constant state of SSM layers)",
        inputs={
            "layers": architecture.caching_layers,
            "kv_heads": architecture.kv_heads,
            "head_dim": architecture.head_dim,
            "cells": cells(request),
            "window_cells": window if architecture.sliding_layers else 0,
            "state_bytes": state,
            "bytes_per_element": str(element),
        },
    )


def _compute_term(request: SizingRequest, architecture: Architecture) -> Term:
    """The scheduler's buffer: the widest moment of the graph for one micro-batch, in fp32."""
    tokens = ubatch(request)
    hidden = tokens * architecture.hidden_size * _F32
    logits = tokens * architecture.vocab_size * _F32 + hidden
    feed_forward = 3 * tokens * max(architecture.intermediate_size, architecture.hidden_size) * _F32 + 2 * hidden
    attention = 4 * tokens * architecture.heads * architecture.head_dim * _F32 + tokens * cells(request) * 2
    if not request.flash_attention:
        attention += tokens * cells(request) * (architecture.heads + 1) * _F32
    return Term(
        name="activations",
        memory_bytes=max(logits, feed_forward, attention),
        exactness=Exactness.ESTIMATED,
        formula="widest of: logits, feed-forward, attention, for one micro-batch in fp32",
        inputs={"ubatch": tokens, "logits": logits, "feed_forward": feed_forward, "attention": attention},
    )
