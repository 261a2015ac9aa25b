"""Writes a GGUF file of a BERT with one layer and random weights: enough for an engine to embed and to rank with it."""

import random
import struct
import sys
from collections.abc import Mapping
from pathlib import Path

WIDTH, HEADS, INNER, CONTEXT = 32, 4, 64, 128
_SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
TOKENS = [*_SPECIAL, *(f"\u2581{letter}" for letter in _LETTERS), *_LETTERS]
_NORMAL, _CONTROL = 1, 3
_MEAN, _RANK = 1, 4
_ALIGNMENT = 32
_FLOAT32 = 0


def write_encoder(path: Path, *, ranks: bool) -> None:
    """`ranks`: with the head that turns a query and a document into a score."""
    tensors = _tensors(ranks=ranks)
    metadata = _metadata(_RANK if ranks else _MEAN)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    head += b"".join(_text(name) + value for name, value in metadata.items())
    offset = 0
    for name, shape in tensors.items():
        head += _text(name) + struct.pack("<I", len(shape)) + b"".join(struct.pack("<Q", size) for size in shape)
        head += struct.pack("<IQ", _FLOAT32, offset)
        offset += _padded(4 * _count(shape))
    chance = random.Random(7)  # weights, not secrets
    with path.open("wb") as file:
        file.write(head + bytes(-len(head) % _ALIGNMENT))
        for name, shape in tensors.items():
            count = _count(shape)
            one = 1.0 if name.endswith("norm.weight") else 0.0
            data = struct.pack(f"<{count}f", *(one + chance.gauss(0, 0.3) for _ in range(count)))
            file.write(data + bytes(_padded(len(data)) - len(data)))


def _tensors(*, ranks: bool) -> Mapping[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (WIDTH, len(TOKENS)),
        "token_types.weight": (WIDTH, 2),
        "position_embd.weight": (WIDTH, CONTEXT),
    }
    shapes = {"token_embd_norm": None} | {f"blk.0.{name}": None for name in ("attn_output_norm", "layer_output_norm")}
    linear = {f"blk.0.attn_{name}": (WIDTH, WIDTH) for name in ("q", "k", "v", "output")}
    linear |= {"blk.0.ffn_up": (WIDTH, INNER), "blk.0.ffn_down": (INNER, WIDTH)}
    if ranks:
        linear |= {"cls": (WIDTH, WIDTH), "cls.output": (WIDTH, 1)}
    for name in shapes:
        found |= {f"{name}.weight": (WIDTH,), f"{name}.bias": (WIDTH,)}
    for name, (width, height) in linear.items():
        found |= {f"{name}.weight": (width, height), f"{name}.bias": (height,)}
    return found


def _metadata(pooling: int) -> Mapping[str, bytes]:
    kinds = [_CONTROL if token in _SPECIAL else _NORMAL for token in TOKENS]
    numbers = {
        "bert.block_count": 1,
        "bert.context_length": CONTEXT,
        "bert.embedding_length": WIDTH,
        "bert.feed_forward_length": INNER,
        "bert.attention.head_count": HEADS,
        "bert.pooling_type": pooling,
        "tokenizer.ggml.token_type_count": 2,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.unknown_token_id": 1,
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.cls_token_id": 2,
        "tokenizer.ggml.eos_token_id": 3,
        "tokenizer.ggml.seperator_token_id": 3,
        "tokenizer.ggml.mask_token_id": 4,
    }
    return {
        "general.architecture": struct.pack("<I", 8) + _text("bert"),
        "general.name": struct.pack("<I", 8) + _text("tiny encoder"),
        **{name: struct.pack("<II", 4, value) for name, value in numbers.items()},
        "bert.attention.layer_norm_epsilon": struct.pack("<If", 6, 1e-12),
        "bert.attention.causal": struct.pack("<IB", 7, 0),
        "tokenizer.ggml.model": struct.pack("<I", 8) + _text("bert"),
        "tokenizer.ggml.tokens": struct.pack("<IIQ", 9, 8, len(TOKENS)) + b"".join(map(_text, TOKENS)),
        "tokenizer.ggml.token_type": struct.pack("<IIQ", 9, 5, len(kinds)) + struct.pack(f"<{len(kinds)}i", *kinds),
    }


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


if __name__ == "__main__":
    write_encoder(Path(sys.argv[1]), ranks=len(sys.argv) > 2)
