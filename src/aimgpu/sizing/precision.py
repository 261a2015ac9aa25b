"""Bytes per weight and per cached element of every precision, as exact ratios."""

from dataclasses import dataclass
from difflib import get_close_matches
from fractions import Fraction

from aimgpu.errors import InvalidInput
from aimgpu.sizing.formats.gguf_mixes import GGUF_MIXES
from aimgpu.sizing.formats.gguf_types import GGUF_TYPES


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """How the weights of linear layers are stored; embeddings, the head and norms stay at `other_bytes` each."""

    name: str
    weight_bytes: Fraction  # of one linear-layer weight, scales and zeros included
    other_bytes: Fraction  # of one embedding, head or norm weight


# Bytes of one element of the KV cache.
KV_TYPES: dict[str, Fraction] = {
    "fp32": Fraction(4),
    "fp16": Fraction(2),
    "bf16": Fraction(2),
    "fp8": Fraction(1),
    "q8_0": Fraction(34, 32),
    "q5_1": Fraction(24, 32),
    "q5_0": Fraction(22, 32),
    "q4_1": Fraction(20, 32),
    "q4_0": Fraction(18, 32),
    "iq4_nl": Fraction(18, 32),
}

_KV_TYPES_OF = {
    "vllm": ("fp16", "bf16", "fp8"),
    "llamacpp": tuple(name for name in KV_TYPES if name != "fp8"),
    "ollama": ("fp16", "q8_0", "q4_0"),
    "transformers": ("fp32", "fp16", "bf16"),
}

_GROUP = 128  # GPTQ and AWQ publish groups of 128 nearly always
_HALF = Fraction(2)

PRECISIONS: dict[str, Precision] = {
    precision.name: precision
    for precision in (
        Precision(name="fp32", weight_bytes=Fraction(4), other_bytes=Fraction(4)),
        Precision(name="fp16", weight_bytes=_HALF, other_bytes=_HALF),
        Precision(name="bf16", weight_bytes=_HALF, other_bytes=_HALF),
        # one fp32 scale for a block of 128 x 128
        Precision(name="fp8", weight_bytes=1 + Fraction(4, 128 * 128), other_bytes=_HALF),
        # one fp16 scale and one int8 zero a group
        Precision(name="int8", weight_bytes=1 + Fraction(2 + 1, _GROUP), other_bytes=_HALF),
        # one fp16 scale and one int4 zero a group
        Precision(name="int4", weight_bytes=Fraction(1, 2) + Fraction(5, 2) / _GROUP, other_bytes=_HALF),
        Precision(name="awq", weight_bytes=Fraction(1, 2) + Fraction(5, 2) / _GROUP, other_bytes=_HALF),
        # bitsandbytes, double quantisation: an 8-bit scale for 64 weights, an fp32 one for 256 of those
        Precision(name="nf4", weight_bytes=Fraction(1, 2) + Fraction(1, 64) + Fraction(4, 64 * 256), other_bytes=_HALF),
        Precision(name="mxfp4", weight_bytes=Fraction(17, 32), other_bytes=_HALF),
        Precision(name="nvfp4", weight_bytes=Fraction(9, 16), other_bytes=_HALF),
    )
}

_ALIASES = {
    "float32": "fp32",
    "f32": "fp32",
    "float16": "fp16",
    "f16": "fp16",
    "half": "fp16",
    "bfloat16": "bf16",
    "float8": "fp8",
    "w8a8": "int8",
    "gptq-int8": "int8",
    "gptq-int4": "int4",
    "gptq": "int4",
    "w4a16": "int4",
    "awq-int4": "awq",
    "bnb-nf4": "nf4",
    "bnb-4bit": "nf4",
    "4bit": "int4",
    "4-bit": "int4",
    "8bit": "int8",
    "8-bit": "int8",
}


def find_precision(name: str) -> Precision:
    """The precision of this name, in any case; GGUF types are precisions too."""
    wanted = name.strip().lower()
    wanted = _ALIASES.get(wanted, wanted)
    if wanted in PRECISIONS:
        return PRECISIONS[wanted]
    if wanted in GGUF_TYPES or wanted in GGUF_MIXES:
        size = GGUF_MIXES[wanted].whole_file if wanted in GGUF_MIXES else GGUF_TYPES[wanted]
        return Precision(name=wanted, weight_bytes=size, other_bytes=size)
    known = ", ".join([*PRECISIONS, *GGUF_MIXES, *sorted(set(GGUF_TYPES) - set(PRECISIONS) - set(GGUF_MIXES))])
    near = [one for one in GGUF_MIXES if one.startswith(f"{wanted}_k_m")] or get_close_matches(wanted, known.split(", "), n=1)
    meant = f"Did you mean {near[0]!r}? " if near else ""
    raise InvalidInput(f"{name!r} is not a precision", hint=f"{meant}Known: {known}.")


def find_kv_type(name: str, engine: str) -> str:
    """The KV cache type of this name, in any case, that the engine can keep."""
    wanted = name.strip().lower()
    wanted = _ALIASES.get(wanted, wanted)
    if wanted not in KV_TYPES:
        raise InvalidInput(f"{name!r} is not a KV cache type", hint=f"Known: {', '.join(KV_TYPES)}.")
    known = _KV_TYPES_OF.get(engine, tuple(KV_TYPES))
    if wanted not in known:
        raise InvalidInput(f"{engine} keeps no KV cache in {wanted}", hint=f"It knows {', '.join(known)}.")
    return wanted


def kv_element_bytes(name: str) -> Fraction:
    """Bytes per element of the KV cache, for a canonical name."""
    return KV_TYPES[name]
