"""GGUF files that are named by their mix of types, as llama.cpp's quantize makes them (src/llama-quant.cpp, 2026-08).

The header of a file at hand goes before this: it names each tensor's type.
"""

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from aimgpu.sizing.formats.gguf_types import GGUF_TYPES
from aimgpu.sizing.model import Architecture, ModelFacts
from aimgpu.sizing.shape import embedding_parameters, expert_parameters

_F32 = 4
_BLOCK = 256
_SHARED_VALUES = 4  # query heads per value head from which the values get a better type
_EIGHT_EXPERTS = 8  # Mixtral has rules of its own
# The type where a row is not a multiple of 256 weights.
_NARROW = (
    {"q2_k": "iq4_nl", "q3_k": "iq4_nl", "iq3_s": "iq4_nl", "iq4_xs": "iq4_nl"}
    | {
        "q4_k": "q5_0",
        "q5_k": "q5_1",
        "q6_k": "q8_0",
    }
    | dict.fromkeys(("iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "tq1_0", "tq2_0"), "iq4_nl")
)

Part = Callable[[int], Fraction]


def _none(_layers: int) -> Fraction:
    return Fraction(0)


def _every(_layers: int) -> Fraction:
    return Fraction(1)


def _first_eighth(layers: int) -> Fraction:
    return Fraction(layers // 8, layers)


def _first_four(layers: int) -> Fraction:
    return Fraction(min(4, layers), layers)


def _more_bits(layers: int) -> Fraction:
    """Layers with more bits: the first and the last eighth, and every third between."""
    eighth, last = layers // 8, 7 * layers // 8
    return Fraction(eighth + layers - last + max(last - eighth, 0) // 3, layers)


def _middle(layers: int) -> Fraction:
    """All but the first and the last eighth."""
    return Fraction(7 * layers // 8 - layers // 8, layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufMix:
    """The types of a mix; a part of the layers has a better one for the values and the down projections.

    Where a type is empty, it is the base; `embedding` counts where it is not the head too.
    """

    base: str
    values: str = ""
    values_part: Part = _none
    down: str = ""
    down_part: Part = _none
    output: str = ""  # of attention
    head: str = "q6_k"
    embedding: str = ""
    queries: str = ""  # and keys
    gates: str = ""  # gate and up projections of the middle layers
    only_shared_values: bool = False
    unshared_values: str = ""  # where fewer than four query heads share a value head
    whole_file: Fraction  # bytes per weight where no shape is known: what this rule gives for Llama 3.1 8B


def _small(base: str, *, better: str, output: str = "", whole_file: int) -> GgufMix:
    """Files of one and two bits: `better` is the type of the first down projections and of the embedding."""
    return GgufMix(
        base=base,
        values="q4_k",
        values_part=_every,
        unshared_values=better,
        down=better,
        down_part=_first_eighth,
        output=output,
        head="q5_k",
        embedding=better,
        whole_file=Fraction(whole_file, 800),
    )


GGUF_MIXES: dict[str, GgufMix] = {
    "q2_k": GgufMix(
        base="q2_k",
        values="q4_k",
        values_part=_every,
        down="q3_k",
        down_part=_every,
        output="q3_k",
        whole_file=Fraction(316, 800),
    ),
    "q3_k_s": GgufMix(base="q3_k", whole_file=Fraction(364, 800)),
    "q3_k_m": GgufMix(
        base="q3_k",
        values="q4_k",
        values_part=_every,
        down="q4_k",
        down_part=_every,
        output="q4_k",
        whole_file=Fraction(400, 800),
    ),
    "q3_k_l": GgufMix(
        base="q3_k",
        values="q5_k",
        values_part=_every,
        down="q5_k",
        down_part=_every,
        output="q5_k",
        whole_file=Fraction(430, 800),
    ),
    "q4_0": GgufMix(base="q4_0", whole_file=Fraction(464, 800)),
    "q4_1": GgufMix(base="q4_1", whole_file=Fraction(511, 800)),
    "q5_0": GgufMix(base="q5_0", whole_file=Fraction(558, 800)),
    "q5_1": GgufMix(base="q5_1", whole_file=Fraction(604, 800)),
    "q4_k_s": GgufMix(
        base="q4_k", values="q5_k", values_part=_first_four, down="q5_k", down_part=_first_eighth, whole_file=Fraction(467, 800)
    ),
    "q4_k_m": GgufMix(
        base="q4_k", values="q6_k", values_part=_more_bits, down="q6_k", down_part=_more_bits, whole_file=Fraction(489, 800)
    ),
    "q5_k_s": GgufMix(base="q5_k", whole_file=Fraction(557, 800)),
    "q5_k_m": GgufMix(
        base="q5_k", values="q6_k", values_part=_more_bits, down="q6_k", down_part=_more_bits, whole_file=Fraction(570, 800)
    ),
    "q6_k": GgufMix(base="q6_k", whole_file=Fraction(657, 800)),
    "q8_0": GgufMix(base="q8_0", head="q8_0", whole_file=Fraction(850, 800)),
    "iq4_xs": GgufMix(base="iq4_xs", values="q5_k", values_part=_every, only_shared_values=True, whole_file=Fraction(441, 800)),
    "iq4_nl": GgufMix(base="iq4_nl", values="q5_k", values_part=_every, only_shared_values=True, whole_file=Fraction(465, 800)),
    "iq3_m": GgufMix(
        base="iq3_s",
        values="q4_k",
        values_part=_every,
        down="q4_k",
        down_part=_first_eighth,
        output="q4_k",
        whole_file=Fraction(377, 800),
    ),
    "q2_k_s": GgufMix(
        base="q2_k",
        values="q4_k",
        values_part=_every,
        only_shared_values=True,
        down="q4_k",
        down_part=_first_eighth,
        whole_file=Fraction(297, 800),
    ),
    "iq3_s": GgufMix(base="iq3_s", values="q4_k", values_part=_every, only_shared_values=True, whole_file=Fraction(366, 800)),
    "iq3_xs": GgufMix(
        base="iq3_s",
        values="q4_k",
        values_part=_every,
        only_shared_values=True,
        queries="iq3_xxs",
        gates="iq3_xxs",
        whole_file=Fraction(350, 800),
    ),
    "iq3_xxs": GgufMix(
        base="iq3_xxs",
        values="q4_k",
        values_part=_every,
        only_shared_values=True,
        output="iq3_s",
        head="q5_k",
        embedding="iq3_s",
        queries="iq2_s",
        whole_file=Fraction(326, 800),
    ),
    "iq2_m": _small("iq2_s", better="iq3_s", output="iq3_s", whole_file=293),
    "iq2_s": _small("iq2_xs", better="iq3_s", output="iq3_s", whole_file=274),
    "iq2_xs": _small("iq2_xs", better="q2_k", whole_file=259),
    "iq2_xxs": _small("iq2_xxs", better="q2_k", whole_file=239),
    "iq1_m": _small("iq1_m", better="q2_k", output="iq2_xxs", whole_file=215),
    "iq1_s": _small("iq1_s", better="q2_k", output="iq2_xxs", whole_file=201),
    "tq2_0": GgufMix(base="tq2_0", embedding="q4_k", whole_file=Fraction(252, 800)),
    "tq1_0": GgufMix(base="tq1_0", embedding="q4_k", whole_file=Fraction(220, 800)),
}


def mix_bytes(model: ModelFacts, architecture: Architecture, mix: GgufMix) -> int:
    """All tensors, each with its own rule; norms and the routers of experts are stored in fp32."""
    hidden, layers = architecture.hidden_size, architecture.layers
    attending = architecture.caching_layers or layers
    inner = architecture.expert_intermediate_size or architecture.intermediate_size
    values = attending * (architecture.kv_lora_rank or hidden) * architecture.kv_heads * architecture.head_dim
    output = attending * hidden * architecture.heads * architecture.head_dim
    down = expert_parameters(architecture) // 3 or layers * hidden * architecture.intermediate_size
    plain = hidden * (2 * layers + 1) + layers * hidden * architecture.experts
    beside = embedding_parameters(architecture) + architecture.encoder_parameters + plain
    linear = max(model.parameters - beside, 0)
    rest = max(linear - values - output - down, 0)
    types = _types(architecture, mix)
    parts = [
        (values, types["values"], hidden, mix.values_part(layers)),
        (down, mix.down or mix.base, inner, mix.down_part(layers)),
    ]
    stored = sum(
        count * (part * row_bytes(kind, row) + (1 - part) * row_bytes(mix.base, row)) for count, kind, row, part in parts
    )
    stored += output * row_bytes(types["output"], architecture.heads * architecture.head_dim)
    keys = values if architecture.experts == _EIGHT_EXPERTS else 0  # kept at 8 bits there
    stored += keys * GGUF_TYPES["q8_0"] + max(rest - keys, 0) * row_bytes(mix.base, hidden)
    stored += min(values + output, rest) * _difference(mix.queries, mix.base, hidden)
    stored += min(2 * down, rest) * _middle(layers) * _difference(mix.gates, mix.base, hidden)
    return round(stored + _table_bytes(architecture, mix) + plain * _F32 + architecture.encoder_parameters * GGUF_TYPES["f16"])


def _difference(kind: str, base: str, row: int) -> Fraction:
    return row_bytes(kind or base, row) - row_bytes(base, row)


def row_bytes(kind: str, row: int) -> Fraction:
    """Bytes of one weight in rows of this length."""
    return GGUF_TYPES[_NARROW.get(kind, kind) if row % _BLOCK else kind]


def embedding_bytes(architecture: Architecture, mix: GgufMix) -> int:
    """The input embedding, which is hardly better than the rest unless it is the head too."""
    kind = mix.head if architecture.tied_embeddings else mix.embedding or mix.base
    return round(architecture.embedding_parameters * row_bytes(kind, architecture.hidden_size))


def _table_bytes(architecture: Architecture, mix: GgufMix) -> int:
    """Embedding and head."""
    head = architecture.embedding_parameters * row_bytes(mix.head, architecture.hidden_size)
    return round(head) + (0 if architecture.tied_embeddings else embedding_bytes(architecture, mix))


def _types(architecture: Architecture, mix: GgufMix) -> dict[str, str]:
    """The better types of values and attention output, which depend on the shape."""
    shares = architecture.kv_heads > 0 and architecture.heads >= _SHARED_VALUES * architecture.kv_heads
    values = mix.values or mix.base
    if mix.unshared_values and not shares:
        values = mix.unshared_values
    elif mix.only_shared_values and not shares:
        values = mix.base
    elif mix.base == "q2_k" and not shares:
        values = "q3_k"
    if architecture.experts == _EIGHT_EXPERTS:
        return {"values": "q8_0", "output": "q5_k" if mix.base not in ("q5_k", "q6_k", "q8_0") else mix.base}
    return {"values": values, "output": mix.output or mix.base}
