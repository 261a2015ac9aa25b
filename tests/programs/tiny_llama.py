"""Writes GGUF files of a llama with two layers and random weights, of adapters for it, and of the two merged."""

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

Weights = Mapping[str, Any]  # name -> array of float32, rows first

WIDTH, HEADS, INNER, LAYERS, CONTEXT = 64, 4, 128, 2, 512
_NEWLINE, _SPACE = "<0x0A>", "\u2581"
_LETTERS = [chr(number) for number in range(ord("!"), ord("~") + 1)]
TOKENS = ["<unk>", "<s>", "</s>", _NEWLINE, _SPACE, *_LETTERS]  # an answer's text has one character for each token
_NORMAL, _UNKNOWN, _CONTROL, _BYTE = 1, 2, 3, 6
_ALIGNMENT = 32
_UINT32, _FLOAT32, _STRING, _ARRAY, _INT32 = 4, 6, 8, 9, 5


def make_weights(seed: int = 7) -> dict[str, Any]:
    chance = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (len(TOKENS), WIDTH), "output.weight": (len(TOKENS), WIDTH)}
    norms = ["output_norm.weight"]
    for layer in range(LAYERS):
        shapes |= {f"blk.{layer}.attn_{name}.weight": (WIDTH, WIDTH) for name in ("q", "k", "v", "output")}
        shapes |= {f"blk.{layer}.ffn_{name}.weight": (INNER, WIDTH) for name in ("gate", "up")}
        shapes[f"blk.{layer}.ffn_down.weight"] = (WIDTH, INNER)
        norms += [f"blk.{layer}.attn_norm.weight", f"blk.{layer}.ffn_norm.weight"]
    found: dict[str, Any] = {name: chance.normal(0, 0.3, shape).astype(np.float32) for name, shape in shapes.items()}
    return found | {name: np.ones(WIDTH, np.float32) for name in norms}


def make_adapter(seed: int, rank: int = 4, *, width: int = WIDTH) -> dict[str, Any]:
    """Of the queries and values of every layer."""
    chance = np.random.default_rng(seed)
    found = {}
    for layer in range(LAYERS):
        for name in ("attn_q", "attn_v", "ffn_down"):
            inner = INNER if name == "ffn_down" else width
            found[f"blk.{layer}.{name}.weight.lora_a"] = chance.normal(0, 0.5, (rank, inner)).astype(np.float32)
            found[f"blk.{layer}.{name}.weight.lora_b"] = chance.normal(0, 0.5, (WIDTH, rank)).astype(np.float32)
    return found


def merge(weights: Weights, adapter: Weights) -> dict[str, Any]:
    """With an adapter's alpha equal to its rank."""
    merged = dict(weights)
    for name in weights:
        if f"{name}.lora_a" in adapter:
            merged[name] = weights[name] + adapter[f"{name}.lora_b"] @ adapter[f"{name}.lora_a"]
    return merged


def write_model(path: Path, weights: Weights) -> Path:
    numbers = {
        "llama.block_count": LAYERS,
        "llama.context_length": CONTEXT,
        "llama.embedding_length": WIDTH,
        "llama.feed_forward_length": INNER,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": HEADS,
        "llama.rope.dimension_count": WIDTH // HEADS,
        "llama.vocab_size": len(TOKENS),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    kinds = [_UNKNOWN, _CONTROL, _CONTROL, _BYTE, *[_NORMAL] * (len(TOKENS) - 4)]
    metadata = {
        "general.architecture": _string("llama"),
        "general.name": _string("tiny llama"),
        **{name: struct.pack("<II", _UINT32, value) for name, value in numbers.items()},
        "llama.attention.layer_norm_rms_epsilon": struct.pack("<If", _FLOAT32, 1e-5),
        "tokenizer.ggml.model": _string("llama"),
        "tokenizer.ggml.tokens": struct.pack("<IIQ", _ARRAY, _STRING, len(TOKENS)) + b"".join(map(_text, TOKENS)),
        "tokenizer.ggml.scores": struct.pack("<IIQ", _ARRAY, _FLOAT32, len(TOKENS)) + bytes(4 * len(TOKENS)),
        "tokenizer.ggml.token_type": struct.pack("<IIQ", _ARRAY, _INT32, len(kinds)) + struct.pack(f"<{len(kinds)}i", *kinds),
    }
    return _write(path, metadata, weights)


def write_adapter(path: Path, adapter: Weights, *, alpha: float = 4.0, architecture: str = "llama") -> Path:
    metadata = {
        "general.architecture": _string(architecture),
        "general.type": _string("adapter"),
        "adapter.type": _string("lora"),
        "adapter.lora.alpha": struct.pack("<If", _FLOAT32, alpha),
    }
    return _write(path, metadata, adapter)


def _write(path: Path, metadata: Mapping[str, bytes], tensors: Weights) -> Path:
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    head += b"".join(_text(name) + value for name, value in metadata.items())
    offset = 0
    for name, array in tensors.items():
        head += (
            _text(name) + struct.pack("<I", array.ndim) + b"".join(struct.pack("<Q", size) for size in reversed(array.shape))
        )
        head += struct.pack("<IQ", 0, offset)
        offset += array.nbytes + -array.nbytes % _ALIGNMENT
    with path.open("wb") as file:
        file.write(head + bytes(-len(head) % _ALIGNMENT))
        for array in tensors.values():
            file.write(array.tobytes() + bytes(-array.nbytes % _ALIGNMENT))
    return path


def _string(text: str) -> bytes:
    return struct.pack("<I", _STRING) + _text(text)


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data
