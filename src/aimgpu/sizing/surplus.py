"""A grant that is larger than the need: the surplus goes to the KV cache, and to requests at once where those are free."""

from collections.abc import Mapping
from dataclasses import replace

from aimgpu.domain import Footprint, Growth, Term
from aimgpu.sizing.engines.vllm import default_sequences, graph_sizes, sequences_in

_KV_FLAG, _SEQUENCES_FLAG, _TOKENS_FLAG = "--kv-cache-memory-bytes", "--max-num-seqs", "--max-num-batched-tokens"
_GRAPHS_FLAG = "--cudagraph-capture-sizes"
_MOST_SPENT_ON_REQUESTS = 4  # at most 1/4 of the surplus: what is left is what they need


def spend_surplus(footprint: Footprint, granted_bytes: int) -> Footprint:
    """The Footprint that fills the grant; the same one where it already does, or where the engine cannot use more."""
    surplus = granted_bytes - footprint.total_bytes
    if footprint.growth is None or surplus <= 0 or _KV_FLAG not in footprint.flags:
        return footprint
    growth, before = footprint.growth, footprint.concurrency
    sequences = _sequences(footprint, growth, granted_bytes, surplus) if growth.free_sequences else before
    graphs = (len(graph_sizes(sequences)) - len(graph_sizes(before))) * growth.graph_bytes
    activations = _more_activations(footprint, growth, sequences)
    added = {"kv_cache": surplus - graphs - activations, "graphs": graphs, "activations": activations}
    terms = tuple(_enlarged(term, added.get(term.name, 0)) for term in footprint.terms)
    flags = _flags(footprint.flags, terms, sequences)
    return replace(footprint, terms=terms, concurrency=sequences, flags=flags)


def describe_service(footprint: Footprint, granted_bytes: int) -> str | None:
    """What the model serves with so much memory, for people; None where the engine's cache is not known by token."""
    filled = spend_surplus(footprint, granted_bytes)
    if filled.kv_tokens is None:
        return None
    requests = f"{filled.concurrency} request{'s' * (filled.concurrency > 1)} at once"
    return f"{requests}, a KV cache of {filled.kv_tokens:,} tokens"


def _sequences(footprint: Footprint, growth: Growth, granted_bytes: int, surplus: int) -> int:
    tokens = (footprint.term_bytes("kv_cache") + surplus) // growth.token_bytes
    most = sequences_in(tokens, default_sequences(granted_bytes, footprint.gpu))
    best = footprint.concurrency
    while best < most:
        wanted = min(best * 2, most)
        graphs = (len(graph_sizes(wanted)) - len(graph_sizes(footprint.concurrency))) * growth.graph_bytes
        if graphs + _more_activations(footprint, growth, wanted) > surplus // _MOST_SPENT_ON_REQUESTS:
            break
        best = wanted
    return best


def _more_activations(footprint: Footprint, growth: Growth, sequences: int) -> int:
    return max(0, sequences * growth.sequence_bytes - footprint.term_bytes("activations"))


def _enlarged(term: Term, added: int) -> Term:
    if not added:
        return term
    return replace(term, memory_bytes=term.memory_bytes + added, inputs={**term.inputs, "surplus_bytes": added})


def _flags(flags: Mapping[str, str], terms: tuple[Term, ...], sequences: int) -> Mapping[str, str]:
    cache = next(term.memory_bytes for term in terms if term.name == "kv_cache")
    changed = {_KV_FLAG: str(cache), _SEQUENCES_FLAG: str(sequences)}
    changed[_TOKENS_FLAG] = str(max(int(flags.get(_TOKENS_FLAG, "0")), sequences))
    if _GRAPHS_FLAG in flags:
        changed[_GRAPHS_FLAG] = " ".join(map(str, graph_sizes(sequences)))
    return {**flags, **changed}
