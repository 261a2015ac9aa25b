"""GGUF files of real shapes whose tensors are a hole in the file: llama.cpp maps them, nobody reads them."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_TYPES = {"f32": (0, 1, 4), "q8_0": (8, 32, 34), "q4_k": (12, 256, 144)}  # ggml's number, weights and bytes of a block
_ROTARY = 64
_QUERY_RANK = 768
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]

Value = int | float | str | bool | Sequence[str] | Sequence[float] | Sequence[int]


@dataclass(frozen=True, kw_only=True)
class Shape:
    family: str
    layers: int = 4
    hidden: int = 1024
    heads: int = 16
    kv_heads: int = 4
    head_dim: int = 128
    inner: int = 3072
    vocabulary: int = 32000
    tied: bool = False
    quant: str = "q8_0"
    experts: int = 0
    experts_used: int = 0
    expert_inner: int = 0
    window: int = 0
    has_biases: bool = False
    norms_heads: bool = False
    norms_after: bool = False
    has_sinks: bool = False  # as gpt-oss has them, with biases everywhere
    latent: int = 0  # width of a compressed key and value, as DeepSeek has it


def write_model(path: Path, shape: Shape) -> Path:
    metadata, tensors = _metadata(shape), _tensors(shape)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    head += b"".join(_text(key) + _value(value) for key, value in metadata.items())
    offset = 0
    for name, (dimensions, kind) in tensors.items():
        number, weights, size = _TYPES[kind]
        count = 1
        for length in dimensions:
            count *= length
        head += _text(name) + struct.pack("<I", len(dimensions)) + b"".join(struct.pack("<Q", n) for n in dimensions)
        head += struct.pack("<IQ", number, offset)
        offset += -(-count // weights * size // 32) * 32
    with path.open("wb") as file:
        file.write(head + bytes(-len(head) % 32))
        file.truncate(file.tell() + offset)
    return path


def _metadata(shape: Shape) -> dict[str, Value]:
    numbers: dict[str, Value] = {
        "block_count": shape.layers,
        "context_length": 131072,
        "embedding_length": shape.hidden,
        "feed_forward_length": shape.inner,
        "attention.head_count": shape.heads,
        "attention.head_count_kv": shape.kv_heads,
        "attention.key_length": shape.head_dim,
        "attention.value_length": shape.head_dim,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.dimension_count": shape.head_dim,
    }
    if shape.experts:
        numbers |= {
            "expert_count": shape.experts,
            "expert_used_count": shape.experts_used,
            "expert_feed_forward_length": shape.expert_inner,
        }
    if shape.window:
        numbers["attention.sliding_window"] = shape.window
    if shape.latent:
        numbers |= _latent_numbers(shape)
    words = ["<unk>", "<s>", "</s>", *_BYTES, *(f"t{number}" for number in range(shape.vocabulary - 259))]
    return {
        "general.architecture": shape.family,
        "general.name": shape.family,
        **{f"{shape.family}.{key}": value for key, value in numbers.items()},
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": words,
        "tokenizer.ggml.scores": [0.0] * shape.vocabulary,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * (shape.vocabulary - 259),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def _latent_numbers(shape: Shape) -> dict[str, Value]:
    return {
        "attention.head_count_kv": 1,
        "attention.key_length": shape.latent + _ROTARY,
        "attention.value_length": shape.latent,
        "attention.key_length_mla": shape.head_dim + _ROTARY,
        "attention.value_length_mla": shape.head_dim,
        "attention.kv_lora_rank": shape.latent,
        "attention.q_lora_rank": _QUERY_RANK,
        "rope.dimension_count": _ROTARY,
        "leading_dense_block_count": 0,
        "expert_shared_count": 1,
        "expert_weights_scale": 1.0,
        "expert_gating_func": 1,
        "vocab_size": shape.vocabulary,
    }


def _tensors(shape: Shape) -> dict[str, tuple[tuple[int, ...], str]]:
    hidden, kind = shape.hidden, shape.quant
    tensors: dict[str, tuple[tuple[int, ...], str]] = {
        "token_embd.weight": ((hidden, shape.vocabulary), kind),
        "output_norm.weight": ((hidden,), "f32"),
    }
    if not shape.tied:
        tensors["output.weight"] = ((hidden, shape.vocabulary), kind)
    for layer in range(shape.layers):
        attention = _latent_attention(shape) if shape.latent else _attention(shape)
        own = {**attention, **(_experts(shape) if shape.experts else _feed_forward(shape))}
        tensors |= {f"blk.{layer}.{name}": tensor for name, tensor in own.items()}
    return tensors


def _attention(shape: Shape) -> dict[str, tuple[tuple[int, ...], str]]:
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    tensors: dict[str, tuple[tuple[int, ...], str]] = {
        "attn_norm.weight": ((shape.hidden,), "f32"),
        "attn_q.weight": ((shape.hidden, queries), shape.quant),
        "attn_k.weight": ((shape.hidden, keys), shape.quant),
        "attn_v.weight": ((shape.hidden, keys), shape.quant),
        "attn_output.weight": ((queries, shape.hidden), shape.quant),
        "ffn_norm.weight": ((shape.hidden,), "f32"),
    }
    if shape.has_biases:
        tensors |= {f"attn_{name}.bias": ((width,), "f32") for name, width in (("q", queries), ("k", keys), ("v", keys))}
    if shape.norms_heads:
        tensors |= {f"attn_{name}_norm.weight": ((shape.head_dim,), "f32") for name in ("q", "k")}
    if shape.norms_after:
        tensors |= {f"post_{name}_norm.weight": ((shape.hidden,), "f32") for name in ("attention", "ffw")}
    if shape.has_sinks:
        del tensors["ffn_norm.weight"]
        tensors |= {"attn_sinks.weight": ((shape.heads,), "f32"), "attn_output.bias": ((shape.hidden,), "f32")}
        tensors["post_attention_norm.weight"] = ((shape.hidden,), "f32")
    return tensors


def _latent_attention(shape: Shape) -> dict[str, tuple[tuple[int, ...], str]]:
    heads, width, rank = shape.heads, shape.head_dim, shape.latent
    return {
        "attn_norm.weight": ((shape.hidden,), "f32"),
        "attn_q_a.weight": ((shape.hidden, _QUERY_RANK), shape.quant),
        "attn_q_a_norm.weight": ((_QUERY_RANK,), "f32"),
        "attn_q_b.weight": ((_QUERY_RANK, heads * (width + _ROTARY)), shape.quant),
        "attn_kv_a_mqa.weight": ((shape.hidden, rank + _ROTARY), shape.quant),
        "attn_kv_a_norm.weight": ((rank,), "f32"),
        "attn_k_b.weight": ((width, rank, heads), shape.quant),
        "attn_v_b.weight": ((rank, width, heads), shape.quant),
        "attn_output.weight": ((heads * width, shape.hidden), shape.quant),
        "ffn_norm.weight": ((shape.hidden,), "f32"),
    }


def _feed_forward(shape: Shape) -> dict[str, tuple[tuple[int, ...], str]]:
    return {
        "ffn_gate.weight": ((shape.hidden, shape.inner), shape.quant),
        "ffn_up.weight": ((shape.hidden, shape.inner), shape.quant),
        "ffn_down.weight": ((shape.inner, shape.hidden), shape.quant),
    }


def _experts(shape: Shape) -> dict[str, tuple[tuple[int, ...], str]]:
    inner, hidden, experts = shape.expert_inner, shape.hidden, shape.experts
    tensors: dict[str, tuple[tuple[int, ...], str]] = {
        "ffn_gate_inp.weight": ((hidden, experts), "f32"),
        "ffn_gate_exps.weight": ((hidden, inner, experts), shape.quant),
        "ffn_up_exps.weight": ((hidden, inner, experts), shape.quant),
        "ffn_down_exps.weight": ((inner, hidden, experts), shape.quant),
    }
    if shape.latent:  # one expert that every token uses
        tensors |= {f"ffn_{name}_shexp.weight": ((hidden, inner), shape.quant) for name in ("gate", "up")}
        tensors["ffn_down_shexp.weight"] = ((inner, hidden), shape.quant)
    if shape.has_sinks:
        tensors |= {f"ffn_{name}_exps.bias": ((inner, experts), "f32") for name in ("gate", "up")}
        tensors |= {"ffn_down_exps.bias": ((hidden, experts), "f32"), "ffn_gate_inp.bias": ((experts,), "f32")}
    return tensors


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: Value) -> bytes:
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _text(value)
    if isinstance(value[0], str):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(_text(str(item)) for item in value)
    code, number = (6, "f") if isinstance(value[0], float) else (5, "i")
    return struct.pack("<IIQ", 9, code, len(value)) + struct.pack(f"<{len(value)}{number}", *value)
