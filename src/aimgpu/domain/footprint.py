"""What a model needs, term by term."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Exactness(StrEnum):
    EXACT = "exact"
    ESTIMATED = "estimated"
    MEASURED = "measured"


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """One part of a footprint, with what it was computed from."""

    name: str  # weights | kv_cache | activations | graphs | engine | context | startup | listed | adapters | given
    memory_bytes: int
    exactness: Exactness
    formula: str
    inputs: Mapping[str, int | str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """What an engine can make of more memory than its model needs: a larger KV cache, and more requests at once."""

    token_bytes: int  # of the KV cache, per token
    sequence_bytes: int = 0  # activations of one more request at once
    graph_bytes: int = 0  # of one more captured batch size
    free_sequences: bool = False  # the number of requests at once was left to the engine


@dataclass(frozen=True, slots=True, kw_only=True)
class LargerService:
    """The same model with more requests at once or a longer context, where its engine keeps a cache for each request."""

    concurrency: int
    context_tokens: int
    terms: tuple[Term, ...]
    flags: Mapping[str, str]

    @property
    def total_bytes(self) -> int:
        return sum(term.memory_bytes for term in self.terms)


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Everything one instance needs on its device, and the engine flags that make it so."""

    model: str
    engine: str
    precision: str
    context_tokens: int
    concurrency: int
    terms: tuple[Term, ...]
    flags: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # each fallback is named here
    engine_version: str | None = None  # with the next two, what a measurement of it can teach later estimates
    family: str | None = None  # of the model's architecture
    gpu: str | None = None  # the part it was sized for
    growth: Growth | None = None  # None: the KV cache is not one that is given in bytes
    larger: tuple[LargerService, ...] = ()  # what more memory is good for, step by step; empty: everything was given
    in_host_memory: bool = False  # its GPU is simulated, or its engine runs on the CPU: a grant gives it no memory
    divided: tuple[tuple[int, int], ...] = ()  # (devices, bytes on each), where one device is too small for it

    @property
    def total_bytes(self) -> int:
        return sum(term.memory_bytes for term in self.terms)

    def term_bytes(self, name: str) -> int:
        """Of the term of this name; 0 where there is none."""
        return sum(term.memory_bytes for term in self.terms if term.name == name)

    @property
    def kv_tokens(self) -> int | None:
        """Tokens that the KV cache holds, where the engine's bytes per token are known."""
        return self.term_bytes("kv_cache") // self.growth.token_bytes if self.growth else None

    @property
    def least_bytes(self) -> int:
        """Bytes without the KV cache: the least that any context and concurrency need."""
        return sum(term.memory_bytes for term in self.terms if term.name != "kv_cache")

    @property
    def exactness(self) -> Exactness:
        """As exact as its least exact term."""
        ranks = [Exactness.EXACT, Exactness.MEASURED, Exactness.ESTIMATED]
        return max((term.exactness for term in self.terms), key=ranks.index, default=Exactness.EXACT)
