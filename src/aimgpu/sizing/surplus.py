"""A grant that is larger than the need: the surplus goes to the KV cache.

vLLM's is of any size, and serves more requests at once where their number was not given. llama.cpp and Ollama have one for each
request: they take the largest of the steps that the footprint lists (`engines/llamacpp_growth.py`). What was given stays.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import takewhile

from aimgpu.domain import Exactness, Footprint, Growth, Instance, Term
from aimgpu.sizing.engines.vllm import default_sequences, graph_sizes, sequences_in
from aimgpu.units import MIB, format_bytes

_KV_FLAG, _SEQUENCES_FLAG, _TOKENS_FLAG = "--kv-cache-memory-bytes", "--max-num-seqs", "--max-num-batched-tokens"
_GRAPHS_FLAG = "--cudagraph-capture-sizes"
_MOST_SPENT_ON_REQUESTS = 4  # at most 1/4 of the surplus: what is left is what they need
_LEAST_UNUSED_BYTES = 512 * MIB  # worth a sentence, where it also is
_LEAST_UNUSED_PART = 10  # 1/10 of the grant


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """What a model serves with a grant, and what of the grant its engine has no use for."""

    engine: str
    granted_bytes: int
    concurrency: int
    context_tokens: int
    kv_cache_bytes: int
    kv_tokens: int | None = None  # None: the engine's cache is not known by token
    unused_bytes: int = 0
    in_host_memory: bool = False  # the grant gives it no memory

    @property
    def text(self) -> str | None:
        """For people; None where there is no cache."""
        requests = f"{self.concurrency} request{'s' * (self.concurrency > 1)} at once"
        size = format_bytes(self.kv_cache_bytes, up=True)
        if self.kv_tokens is not None:
            return f"{requests}, a KV cache of {self.kv_tokens:,} tokens ({size})"
        each = " each" * (self.concurrency > 1)
        return f"{requests} of {self.context_tokens:,} tokens{each}, a KV cache of {size}" if self.kv_cache_bytes else None

    @property
    def unused_text(self) -> str | None:
        """What of the grant stays unused, and what to do about it; None where that is little."""
        if self.unused_bytes < max(_LEAST_UNUSED_BYTES, self.granted_bytes // _LEAST_UNUSED_PART):
            return None
        unused = f"{format_bytes(self.unused_bytes)} of {format_bytes(self.granted_bytes, up=True)} unused"
        less = f"ask for {format_bytes(self.granted_bytes - self.unused_bytes, up=True)}"
        if self.in_host_memory:
            return f"{unused}: it runs in host memory here; {less}"
        if not self.kv_cache_bytes:
            return f"{unused}: {self.engine} has no use for it; {less}"
        return f"{unused}: raise context or concurrency, or {less}"


def spend_surplus(footprint: Footprint, granted_bytes: int) -> Footprint:
    """The footprint that fills the grant; the same one where it already does, or where the engine cannot use more."""
    if not footprint.terms:  # nobody could size it: it takes what it is granted
        given = Term(name="given", memory_bytes=granted_bytes, exactness=Exactness.EXACT, formula="what was granted")
        return replace(footprint, terms=(given,))
    if footprint.in_host_memory:
        return footprint
    if footprint.larger:
        return _largest_service(footprint, granted_bytes)
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


def describe_service(footprint: Footprint, granted_bytes: int) -> Service:
    """With this memory on each of its GPUs."""
    filled = spend_surplus(footprint, granted_bytes)
    return Service(
        engine=footprint.engine,
        granted_bytes=granted_bytes,
        concurrency=filled.concurrency,
        context_tokens=filled.context_tokens,
        kv_cache_bytes=filled.term_bytes("kv_cache"),
        kv_tokens=filled.kv_tokens,
        unused_bytes=max(0, granted_bytes - filled.total_bytes),
        in_host_memory=footprint.in_host_memory,
    )


def describe_started(instance: Instance) -> Service | None:
    """Requests and context that an instance was started for; None where that is not known."""
    if instance.sized_bytes is None or instance.context_tokens is None or not instance.grants:
        return None
    granted = min(grant.memory_bytes for grant in instance.grants)
    return Service(
        engine=instance.engine,
        granted_bytes=granted,
        concurrency=instance.concurrency or 1,
        context_tokens=instance.context_tokens,
        kv_cache_bytes=instance.kv_cache_bytes or 0,
        kv_tokens=instance.kv_tokens,
        unused_bytes=max(0, granted - instance.sized_bytes),
        in_host_memory=instance.in_host_memory,
    )


def _largest_service(footprint: Footprint, granted_bytes: int) -> Footprint:
    """The last step of growth that fits, where all before it fit too."""
    fitting = tuple(takewhile(lambda step: step.total_bytes <= granted_bytes, footprint.larger))
    if not fitting:
        return footprint
    found = fitting[-1]
    return replace(
        footprint, concurrency=found.concurrency, context_tokens=found.context_tokens, terms=found.terms, flags=found.flags
    )


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
