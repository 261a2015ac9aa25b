"""What LoRA adapters take beside their model, all of them loaded at once."""

from collections.abc import Mapping
from dataclasses import dataclass

from aimgpu.domain import Exactness, Term
from aimgpu.sizing.model import Architecture

NAME = "adapters"
_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM takes for --max-lora-rank
_HALF = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFacts:
    """Of one adapter, from its files."""

    name: str  # as callers call it
    rank: int  # the largest of its tensors
    targets: tuple[str, ...]  # kinds of tensors that it changes
    tensor_bytes: int


def adapter_term(engine: str, adapters: tuple[AdapterFacts, ...], architecture: Architecture, tensor_parallel: int) -> Term:
    """llama.cpp loads the tensors as they are; vLLM reserves room for every target of every layer at the largest rank."""
    ranks = {f"rank_{each.name}": each.rank for each in adapters}
    if engine != "vllm":
        return Term(
            name=NAME,
            memory_bytes=sum(each.tensor_bytes for each in adapters),
            exactness=Exactness.EXACT,
            formula="tensors of the adapters' files",
            inputs=ranks,
        )
    rank = vllm_rank(adapters)
    heads, kv_heads = architecture.heads * architecture.head_dim, architecture.kv_heads * architecture.head_dim
    hidden, inner = architecture.hidden_size, architecture.intermediate_size
    inputs = 3 * hidden + heads + 2 * hidden + inner  # of queries, keys and values; output; gate and up; down
    outputs = heads + 2 * kv_heads + hidden + 2 * inner + hidden
    elements = architecture.layers * rank * len(adapters) * (inputs + -(-outputs // tensor_parallel))
    return Term(
        name=NAME,
        memory_bytes=elements * _HALF,
        exactness=Exactness.ESTIMATED,
        formula="adapters x layers x largest rank x (inputs + outputs of all targets) x 2 B",
        inputs={**ranks, "adapters": len(adapters), "max_rank": rank, "layers": architecture.layers},
    )


def vllm_rank(adapters: tuple[AdapterFacts, ...]) -> int:
    """The smallest --max-lora-rank that takes them all."""
    largest = max(each.rank for each in adapters)
    return next((rank for rank in _RANKS if rank >= largest), largest)


def vllm_adapter_flags(adapters: tuple[AdapterFacts, ...]) -> Mapping[str, str]:
    """All can be used at once."""
    if not adapters:
        return {}
    count = str(len(adapters))
    return {"--enable-lora": "", "--max-loras": count, "--max-cpu-loras": count, "--max-lora-rank": str(vllm_rank(adapters))}
