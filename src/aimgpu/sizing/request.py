"""What is asked of the sizing."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from aimgpu.domain import Vendor
from aimgpu.errors import InvalidInput
from aimgpu.sizing.adapters import AdapterFacts
from aimgpu.sizing.correction import Correction, MeasuredKind
from aimgpu.sizing.model import ModelFacts, ModelKind
from aimgpu.sizing.precision import find_kv_type, find_precision

ENGINES = ("vllm", "llamacpp", "ollama", "transformers")
DEFAULT_CONTEXT = 8192
_MOST_CONTEXT = 1 << 27
_MOST_CONCURRENCY = 1 << 16
MOST_DEVICES = 64  # that one copy can be divided over


@dataclass(frozen=True, slots=True, kw_only=True)
class SizingRequest:
    """A model and how it will be served. None: the engine's or the model's own default."""

    model: ModelFacts
    engine: str = "vllm"
    engine_version: str | None = None
    precision: str | None = None  # None: as the weights are published or lie on disk
    kv_precision: str | None = None
    context_tokens: int | None = None  # of one request, prompt and answer together
    concurrency: int = 1  # requests at once, each with its whole context
    free_slots: bool = False  # llama.cpp, Ollama: more than `concurrency` may be served where memory is left
    sequences: int | None = None  # vLLM: more requests at once than whole contexts fit; None: as many as `concurrency`
    prompt_tokens: int | None = None  # longest prompt; transformers prefills it in one piece
    batched_tokens: int | None = None  # vLLM: --max-num-batched-tokens; llama.cpp: -ub
    vendor: Vendor = Vendor.NVIDIA
    gpu: str | None = None  # the part, where known: Hopper's libraries take larger workspaces
    device_memory_bytes: int | None = None  # of the device or partition it will run on, if that is decided
    tensor_parallel: int = 1
    graphs: bool = True  # False: vLLM's --enforce-eager
    flash_attention: bool | None = None  # None: on in llama.cpp; in transformers masks are charged as without it
    shared_cache: bool = False  # llama.cpp's --kv-unified: all slots draw on one context
    adapters: tuple[AdapterFacts, ...] = ()  # all loaded at once
    corrections: Mapping[str, Correction] = field(default_factory=dict)  # learned, by the name of the term
    learned_startup_bytes: int | None = None  # what starting this very model took before; None: not known
    learned_startup_runs: int = 0

    def __post_init__(self) -> None:
        if self.engine not in ENGINES:
            raise InvalidInput(f"{self.engine!r} is not an engine that can be sized", hint=f"Known: {', '.join(ENGINES)}.")
        _check("context", self.context_tokens, _MOST_CONTEXT)
        _check("concurrency", self.concurrency, _MOST_CONCURRENCY)
        _check("sequences", self.sequences, _MOST_CONCURRENCY)
        _check("prompt tokens", self.prompt_tokens, _MOST_CONTEXT)
        _check("batched tokens", self.batched_tokens, _MOST_CONTEXT)
        _check("tensor parallel", self.tensor_parallel, MOST_DEVICES)
        if self.kv_precision is not None:
            object.__setattr__(self, "kv_precision", find_kv_type(self.kv_precision, self.engine))
        if self.prompt_tokens is not None and self.prompt_tokens > self.context:
            raise InvalidInput(
                f"a prompt of {self.prompt_tokens} tokens is longer than the context of {self.context}",
                hint="The context holds prompt and answer; give a longer one.",
            )

    @property
    def kind(self) -> MeasuredKind:
        """What measurements must share with this request to correct it."""
        family = self.model.architecture.family if self.model.architecture else "unknown"
        return MeasuredKind(engine=self.engine, engine_version=self.engine_version, family=family, gpu=self.gpu or "unknown")

    def can_divide(self, devices: int) -> bool:
        """Whether the engine can run one copy on that number of devices: vLLM gives each the same number of heads."""
        shape = self.model.architecture
        if self.engine != "vllm" or shape is None or devices == 1:
            return True
        shares = shape.kv_heads > 0 and (shape.kv_heads % devices == 0 or devices % shape.kv_heads == 0)
        return shape.heads % devices == 0 and (shares or shape.kv_lora_rank > 0)

    @property
    def element_bytes(self) -> int:
        """Of what vLLM and transformers compute with: 16 bits, or 32 where that is asked for."""
        asked = self.precision or (None if self.engine == "vllm" else self.model.precision)  # vLLM takes 16 bits by itself
        return 4 if asked is not None and find_precision(asked).name == "fp32" else 2

    @property
    def cache_kind(self) -> str:
        """The KV cache type of vLLM and transformers: that of what they compute with, if none is given."""
        return self.kv_precision or ("fp32" if self.element_bytes > 2 else "bf16")  # noqa: PLR2004 -- 16 bits

    @property
    def requests_at_once(self) -> int:
        """VLLM's --max-num-seqs, the slots of llama.cpp."""
        return self.sequences or self.concurrency

    @property
    def is_encoder(self) -> bool:
        return self.model.architecture is not None and self.model.architecture.kind is ModelKind.ENCODER

    @property
    def context(self) -> int:
        """The context asked for, else 8192 or what the model was trained for, whichever is less."""
        if self.context_tokens is not None:
            return self.context_tokens
        architecture = self.model.architecture
        trained = architecture.max_context if architecture else 0
        return min(DEFAULT_CONTEXT, trained) if trained else DEFAULT_CONTEXT


def _check(what: str, value: int | None, most: int) -> None:
    if value is not None and not 1 <= value <= most:
        raise InvalidInput(f"{what} of {value} is out of range", hint=f"Give a whole number from 1 to {most}.")
