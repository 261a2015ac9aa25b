"""What a config.json says of a model's shape and of how its weights are quantised."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from aimgpu.errors import InvalidModelFile
from aimgpu.sizing.formats.hybrid import feed_forward_layers, find_layers, find_state
from aimgpu.sizing.model import Architecture, ModelKind

LARGEST_CONFIG = 1 << 20
_MOST_LAYERS = 4096
_LARGEST_NUMBER = 1 << 31
_ENCODER_TYPES = ("bert", "roberta", "xlm-roberta", "nomic_bert", "modernbert", "mpnet", "distilbert", "electra", "deberta-v2")
_WINDOW_EVERY = {
    "gemma2": 2,
    "gemma3_text": 6,
    "gemma3": 6,
    "gpt_oss": 2,
    "cohere2": 4,
}  # one layer in these sees all
_SLIDING = ("sliding_attention", "chunked_attention")
_QUANT_METHODS = {"awq": "awq", "fp8": "fp8", "fbgemm_fp8": "fp8", "mxfp4": "mxfp4", "nvfp4": "nvfp4"}
# In the order in which they are looked for: W4A8_NVFP4_FP8 has its weights in the first.
_QUANT_WORDS = (
    ("mxfp4", "mxfp4"),
    ("fp4", "nvfp4"),
    ("w4a", "int4"),
    ("int4", "int4"),
    ("fp8", "fp8"),
    ("int8", "int8"),
    ("w8a8", "int8"),
)
_DTYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


def read_config(text: str) -> tuple[Architecture | None, str | None]:
    """Shape and quantisation of a config.json; None where it does not say."""
    config, quantised = _read(text)
    return _architecture(config), _quantisation(quantised)


def read_precision(text: str) -> tuple[str, str | None]:
    """The precision that the weights are written in, and the name of a quantisation that is not known here."""
    config, quantised = _read(text)
    method = quantised.get("quant_method") if isinstance(quantised, dict) else None
    found = _quantisation(quantised)
    bits = quantised.get("bits") if isinstance(quantised, dict) else None
    name = f"{method or 'without a name'}{f' of {bits} bits' if isinstance(bits, int) else ''}"
    unknown = name[:64] if quantised and found is None else None
    return found or _DTYPES.get(config.text("torch_dtype", "dtype"), "bf16"), unknown


def _read(text: str) -> tuple["_Config", object]:
    if len(text) > LARGEST_CONFIG:
        raise InvalidModelFile("config.json is larger than 1 MiB", hint="Give the folder of a model.")
    try:
        whole = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidModelFile("config.json is not JSON", hint="Download it again.") from error
    if not isinstance(whole, dict):
        raise InvalidModelFile("config.json is not a JSON object", hint="Download it again.")
    nested: dict[str, Any] = next(
        (whole[key] for key in ("text_config", "llm_config", "language_config") if isinstance(whole.get(key), dict)), {}
    )
    config = _Config({**whole, **nested}, family=str(nested.get("model_type") or whole.get("model_type") or "unknown"))
    return config, whole.get("quantization_config") or nested.get("quantization_config")


class _Config:
    """Numbers under any of the names that families give them."""

    def __init__(self, table: Mapping[str, Any], family: str) -> None:
        self.table = table
        self.family = family[:64]

    def number(self, *names: str, default: int = 0) -> int:
        for name in names:
            value = self.table.get(name)
            if isinstance(value, list):
                value = max((item for item in value if isinstance(item, int)), default=None)
            if isinstance(value, int) and not isinstance(value, bool):
                if not 0 <= value <= _LARGEST_NUMBER:
                    raise InvalidModelFile(f"config.json says {name} = {str(value)[:40]}", hint="Download it again.")
                return value
        return default

    def text(self, *names: str) -> str:
        return next((value for name in names if isinstance(value := self.table.get(name), str)), "").removeprefix("torch.")

    def flag(self, name: str, *, default: bool) -> bool:
        value = self.table.get(name)
        return value if isinstance(value, bool) else default

    def layer_types(self) -> Sequence[str]:
        value = self.table.get("layer_types")
        return [str(item) for item in value[:_MOST_LAYERS]] if isinstance(value, list) else ()


def _architecture(config: _Config) -> Architecture | None:
    layers = config.number("num_hidden_layers", "n_layer", "num_layers")
    hidden = config.number("hidden_size", "n_embd", "d_model")
    heads = config.number("num_attention_heads", "n_head")
    hybrid = find_layers(config.table, config.family, layers)
    if hybrid is not None and not hybrid.attention:
        heads = 1  # of which there are none
    if not layers or not hidden or not heads or layers > _MOST_LAYERS or heads > hidden:
        return None
    states = hybrid.states if hybrid is not None else 0
    state = find_state(config.table, config.family, hidden, heads) if states else None
    attending = hybrid.attention if hybrid is not None else layers
    intermediate = config.number("intermediate_size", "n_inner", "ffn_dim", default=4 * hidden)
    kv_heads = config.number("num_key_value_heads", "num_kv_heads") or heads
    head_dim = config.number("head_dim", "attention_head_dim") or config.number("v_head_dim") or hidden // heads
    wide = config.number("global_head_dim")  # Gemma 4: layers that see everything have heads of their own
    experts = config.number("num_experts", "num_local_experts", "n_routed_experts")
    feeding = feed_forward_layers(config.table, config.family, layers)
    expert_layers = _expert_layers(config, feeding) if experts else 0
    shared = min(config.number("num_kv_shared_layers"), layers - 1)  # such layers use the cache of an earlier one
    return Architecture(
        family=config.family,
        kind=ModelKind.ENCODER if config.family in _ENCODER_TYPES else ModelKind.DECODER,
        layers=layers,
        hidden_size=hidden,
        heads=heads,
        kv_heads=config.number("num_global_key_value_heads", default=kv_heads) if wide else kv_heads,
        head_dim=wide or head_dim,
        intermediate_size=config.number("intermediate_size_mlp", default=intermediate),
        vocab_size=config.number("vocab_size"),
        tied_embeddings=config.flag("tie_word_embeddings", default=True),
        max_context=config.number("max_position_embeddings", "n_positions"),
        sliding_window=_window(config),
        sliding_layers=_sliding_layers(config, attending, shared) if _window(config) else 0,
        sliding_kv_elements=2 * kv_heads * head_dim if wide else 0,
        attention_layers=max(attending - shared, 0) if hybrid is not None or shared else None,
        state_elements=states * state.elements if state else 0,
        further_parameters=(states * state.parameters if state else 0)
        + expert_layers * _shared_expert(config, hidden, intermediate)
        + layers * _per_layer_inputs(config, hidden),
        state_layers=states if hybrid is not None else None,
        feed_forward_layers=feeding,
        kv_lora_rank=config.number("kv_lora_rank"),
        rope_head_dim=config.number("qk_rope_head_dim") if config.number("kv_lora_rank") else 0,
        experts=experts,
        expert_layers=expert_layers if experts else None,
        experts_used=config.number("num_experts_per_tok", "num_experts_per_token", "top_k_experts") if experts else 0,
        expert_intermediate_size=config.number("moe_intermediate_size", default=intermediate) if experts else 0,
    )


def _expert_layers(config: _Config, feeding: int) -> int:
    """Of the layers with a feed-forward part: all from some layer on, or one in so many."""
    every = config.number("expert_layer_period", "interleave_moe_layer_step", "decoder_sparse_step", "moe_layer_interval")
    return max(feeding - config.number("first_k_dense_replace"), 0) // max(every, 1)


def _shared_expert(config: _Config, hidden: int, intermediate: int) -> int:
    """What of one layer with experts every token goes through."""
    width = config.number("shared_expert_intermediate_size", "shared_intermediate_size", "moe_shared_expert_intermediate_size")
    count = config.number("n_shared_experts", "num_shared_experts", default=int(config.family.startswith("llama4")))
    return 3 * hidden * (width or count * config.number("moe_intermediate_size", default=intermediate))


def _per_layer_inputs(config: _Config, hidden: int) -> int:
    """Of one layer: Gemma 3n and the small Gemma 4 have a table of embeddings for each, and projections from and to it."""
    return config.number("hidden_size_per_layer_input") * (config.number("vocab_size_per_layer_input") + 3 * hidden)


def _window(config: _Config) -> int:
    if not config.flag("use_sliding_window", default=True):
        return 0
    return config.number("sliding_window", "attention_chunk_size")


def _sliding_layers(config: _Config, attending: int, shared: int) -> int:
    types = config.layer_types()
    if types:
        return min(sum(kind in _SLIDING for kind in types[: max(len(types) - shared, 0)]), attending)
    every = config.number("sliding_window_pattern", default=_WINDOW_EVERY.get(config.family, 0))
    return attending - attending // every if every else attending


def _quantisation(config: object) -> str | None:
    """The precision that a quantised checkpoint has, by the words of its method. None: not known, or several."""
    if not isinstance(config, dict):
        return None
    method = str(config.get("quant_method", "")).lower()
    if method in _QUANT_METHODS:
        return _QUANT_METHODS[method]
    if method.startswith("modelopt"):
        return _named_precision(str(config.get("quant_algo") or method))
    if method == "quark":  # AMD's; its FP4 is that of MX
        found = _named_precision(str(_quark_type(config)))
        return "mxfp4" if found == "nvfp4" else found
    if method == "bitsandbytes":
        return "nf4" if config.get("load_in_4bit") else "int8"
    weights = _compressed_weights(config)
    bits = config.get("bits") or weights.get("num_bits")
    kinds = {4: "nvfp4", 8: "fp8"} if weights.get("type") == "float" else {4: "int4", 8: "int8"}
    return kinds.get(bits) if isinstance(bits, int) else None


def _named_precision(text: str) -> str | None:
    return next((precision for word, precision in _QUANT_WORDS if word in text.lower()), None)


def _quark_type(config: Mapping[str, Any]) -> object:
    whole = config.get("global_quant_config")
    weights = whole.get("weight") if isinstance(whole, dict) and not config.get("layer_quant_config") else None
    first = next(iter(weights), None) if isinstance(weights, list) else weights
    return first.get("dtype") if isinstance(first, dict) else None


def _compressed_weights(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Of compressed-tensors; empty where groups of layers differ."""
    groups = config.get("config_groups")
    found = [group.get("weights") for group in groups.values() if isinstance(group, dict)] if isinstance(groups, dict) else []
    kinds = [weights for weights in found if isinstance(weights, dict)]
    same = {(str(weights.get("type")), str(weights.get("num_bits"))) for weights in kinds}
    return kinds[0] if len(same) == 1 else {}
