"""What is known of a model before it is loaded."""

from dataclasses import dataclass
from enum import StrEnum


class ModelKind(StrEnum):
    DECODER = "decoder"  # generates text; keeps a KV cache
    ENCODER = "encoder"  # embeds or ranks; no KV cache


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """The numbers of a config.json or GGUF header that memory follows from. 0: the model has no such part."""

    family: str  # `model_type` of config.json, `general.architecture` of GGUF
    kind: ModelKind = ModelKind.DECODER
    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int  # from the config, not hidden_size / heads: Qwen3 and Gemma differ
    intermediate_size: int
    vocab_size: int
    tied_embeddings: bool = False
    max_context: int = 0
    sliding_window: int = 0
    sliding_layers: int = 0  # attention layers that look back only `sliding_window` tokens
    sliding_kv_elements: int = 0  # keys and values of one token in such a layer; 0: as in the others
    attention_layers: int | None = None  # None: every layer; fewer in hybrids, whose others keep a constant state
    state_elements: int = 0  # per sequence, all linear-attention or SSM layers together
    further_parameters: int = 0  # where they are known: of such layers, shared experts, inputs per layer
    feed_forward_layers: int | None = None  # None: every layer
    state_layers: int | None = None  # layers with such a state; None: those without attention
    kv_lora_rank: int = 0  # MLA: the compressed KV vector
    rope_head_dim: int = 0  # MLA: the part of a key that carries the position
    experts: int = 0
    experts_used: int = 0
    expert_intermediate_size: int = 0
    expert_layers: int | None = None  # None: all that have a feed-forward part; the others have a plain one
    encoder_parameters: int = 0  # vision or audio tower

    @property
    def caching_layers(self) -> int:
        """Layers that keep keys and values."""
        if self.kind is ModelKind.ENCODER:
            return 0
        return self.layers if self.attention_layers is None else self.attention_layers

    @property
    def stateful_layers(self) -> int:
        """Layers that keep a constant state for each sequence."""
        if not self.state_elements:
            return 0
        return self.layers - self.caching_layers if self.state_layers is None else self.state_layers

    @property
    def embedding_parameters(self) -> int:
        return self.vocab_size * self.hidden_size


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """A model, with where the facts come from. `architecture` None: only the size is known, and estimates say so."""

    name: str
    source: str
    parameters: int
    precision: str  # of the published or local weights
    active_parameters: int | None = None  # MoE: used per token; the memory follows `parameters`
    architecture: Architecture | None = None
    tensor_bytes: int | None = None  # exact sum over the tensors of the files, at `precision`
    counted: bool = True  # False: `parameters` is an estimate by the shape
    ranks: bool = False  # its files say that it scores documents for a query, and makes neither text nor vectors
    in_gguf: bool = False  # the files are as llama.cpp and Ollama load them; others are converted first
    remarks: tuple[str, ...] = ()  # doubts about the facts, for people
    input_embedding_bytes: int | None = None  # exact, of `tensor_bytes`: what llama.cpp leaves on the host
    listed_memory: tuple[tuple[str, int], ...] = ()  # precision and bytes in all, as the user listed them: never sized below
