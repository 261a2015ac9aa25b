"""Models of which some layers keep a constant state instead of keys and values: which layers, and how large a state.

Checked against vLLM 0.33.0: `vllm/model_executor/layers/mamba/mamba_utils.py` (MambaStateShapeCalculator) has the shapes,
`get_mamba_state_shape_from_config` of each model the names of its numbers, `vllm/config/model.py` how layers are distinguished.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_MOST_LAYERS = 4096
_STATE_KINDS = frozenset({"linear_attention", "mamba", "mamba2", "conv", "recurrent", "kda", "m"})
_BOTH_KINDS = frozenset({"hybrid"})  # Zamba 2: attention beside the state
_NEITHER_KINDS = frozenset({"mlp", "moe", "-", "e"})
_EVERY_LAYER_BOTH = ("falcon_h1",)
_PURE = ("mamba", "mamba2", "falcon_mamba")
_PLAIN_LINEAR = ("minimax", "minimax_text_01", "bailing_moe_linear", "bailing_hybrid")  # a square state for each head


@dataclass(frozen=True, slots=True)
class HybridLayers:
    """`attention` keep keys and values, `states` a constant state; a layer may do both, or neither."""

    attention: int
    states: int


@dataclass(frozen=True, slots=True)
class StateLayer:
    """`elements`: what it keeps for one sequence, the window of its convolution and the state."""

    elements: int
    parameters: int


class Numbers:
    """Numbers of a config under any of the names that families give them; 0: not there."""

    def __init__(self, table: Mapping[str, Any]) -> None:
        self.table = table

    def __call__(self, *names: str) -> int:
        for name in names:
            value = self.table.get(name)
            if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= 1 << 31:
                return value
        return 0


def find_layers(table: Mapping[str, Any], family: str, layers: int) -> HybridLayers | None:
    """None: every layer has attention, and none a state."""
    if family in _PURE:
        return HybridLayers(0, layers)
    if family in _EVERY_LAYER_BOTH:
        return HybridLayers(layers, layers)
    kinds = _listed_kinds(table)[:layers]
    if kinds:
        states = sum(kind in _STATE_KINDS or kind in _BOTH_KINDS for kind in kinds)
        attention = sum(kind not in _STATE_KINDS and kind not in _NEITHER_KINDS for kind in kinds)
        if family == "zamba2":  # its hybrid layers have both, and all have a state
            states = layers
        return HybridLayers(attention, states) if attention < layers or states else None
    counted = _counted(table, layers)
    if counted is None:
        return None
    return HybridLayers(counted, layers if family == "zamba2" else layers - counted)


def feed_forward_layers(table: Mapping[str, Any], family: str, layers: int) -> int:
    """How many have a feed-forward part: of some families it is a layer of its own, or beside attention only."""
    if family in _PURE:
        return 0
    kinds = _listed_kinds(table)[:layers]
    if any(kind in _NEITHER_KINDS for kind in kinds):
        return sum(kind in _NEITHER_KINDS for kind in kinds)
    hybrid = find_layers(table, family, layers) if family == "zamba2" else None
    return hybrid.attention if hybrid is not None else layers


def find_state(table: Mapping[str, Any], family: str, hidden: int, heads: int) -> StateLayer:
    """What one layer with a state has."""
    number, linear = Numbers(table), table.get("linear_attn_config")
    if isinstance(linear, dict) or family.startswith(("bailing_moe_v3", "alice")):  # Kimi's delta attention
        own = Numbers(linear if isinstance(linear, dict) else table)
        count = own("num_heads", "linear_num_key_heads", "num_attention_heads") or heads
        size = own("head_dim", "linear_key_head_dim") or hidden // heads
        window = (own("short_conv_kernel_size", "linear_conv_kernel_dim") or 4) - 1
        gates = 2 * size * (hidden + count * size) + hidden * count
        return StateLayer(window * 3 * count * size + count * size * size, 4 * hidden * count * size + gates)
    if family in _PLAIN_LINEAR:
        size = number("head_dim") or hidden // heads
        return StateLayer(heads * size * size, 5 * hidden * heads * size)
    if table.get("conv_L_cache") is not None:
        inner = number("conv_dim") or hidden
        return StateLayer(max(number("conv_L_cache") - 1, 0) * inner, 4 * hidden * inner)
    if value_heads := number("linear_num_value_heads"):  # gated delta net
        keys = number("linear_num_key_heads") * number("linear_key_head_dim")
        values = value_heads * number("linear_value_head_dim")
        return StateLayer(
            _window(number) * (2 * keys + values) + values * number("linear_key_head_dim"),
            hidden * (2 * keys + 3 * values + 2 * value_heads),
        )
    return _mamba(number, hidden)


def _mamba(number: Numbers, hidden: int) -> StateLayer:
    inner = number("mamba_d_ssm") or (number("mamba_expand", "expand") or 2) * hidden
    state = number("mamba_d_state", "ssm_state_size", "state_size") or 128
    heads = number("mamba_num_heads", "mamba_n_heads", "n_mamba_heads", "num_heads")
    if not heads:  # the first Mamba
        inner = number("mamba_intermediate_size") or inner
        rank = number("mamba_dt_rank", "time_step_rank") or -(-hidden // 16)
        parameters = inner * (3 * hidden + 2 * rank + 3 * state)
        return StateLayer(_window(number) * inner + inner * state, parameters)
    size = number("mamba_head_dim", "mamba_d_head", "mamba_headdim", "head_dim") or inner // heads
    groups = number("mamba_n_groups", "mamba_ngroups", "n_groups") or 1
    inner = max(heads * size, number("mamba_d_ssm"))
    convolved = inner + 2 * groups * state
    parameters = hidden * (2 * inner + convolved + heads)
    return StateLayer(_window(number) * convolved + heads * size * state, parameters)


def _window(number: Numbers) -> int:
    return (number("linear_conv_kernel_dim", "mamba_d_conv", "conv_kernel", "conv_kernel_size", "d_conv") or 4) - 1


def _listed_kinds(table: Mapping[str, Any]) -> list[str]:
    pattern = table.get("hybrid_override_pattern")
    if isinstance(pattern, str):
        return ["attention" if letter == "*" else letter.lower() for letter in pattern[:_MOST_LAYERS]]
    kinds = table.get("attn_type_list")
    if isinstance(kinds, list):  # MiniMax: 1 is attention
        return ["attention" if kind == 1 else "linear_attention" for kind in kinds[:_MOST_LAYERS]]
    for name in ("layers_block_type", "layer_types", "block_types"):
        if isinstance(table.get(name), list):
            return [str(kind).lower() for kind in table[name][:_MOST_LAYERS]]
    return []


def _counted(table: Mapping[str, Any], layers: int) -> int | None:
    """Layers with attention where a rule or their numbers are given; None: there is none."""
    number, linear = Numbers(table), table.get("linear_attn_config")
    if isinstance(linear, dict) and isinstance(linear.get("kda_layers"), list):
        return max(layers - len(linear["kda_layers"]), 0)
    for name in ("attn_layer_indices", "full_attn_idxs", "hybrid_layer_ids"):
        if isinstance(table.get(name), list):
            return min(len(table[name]), layers)
    if (group := number("layer_group_size")) > 1:
        return layers // group + layers % group
    every = number("full_attention_interval", "attn_layer_period")
    if every > 1:
        offset = number("attn_layer_offset")
        return len(range(offset, layers, every)) if number("attn_layer_period") else layers // every
    return None
