"""Llama models of real shapes with random weights, for GPUs on machines without a network.

    python benchmarks/random_gguf.py TOKENIZER.gguf OUT_FOLDER [SHAPE ...]

The tokenizer and the chat template are taken from the metadata of TOKENIZER.gguf, of which the first few MiB are enough. What
such a model says has no sense; what it takes and how fast it is are those of its shape.
"""

import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

_F32, _F16, _Q8_0 = 0, 1, 8  # of tensors
_UINT32, _STRING, _ARRAY = 4, 8, 9
_QUANTISED_BLOCK = 32  # numbers, with one scale
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # bytes of GGUF's value types
_ALIGNMENT = 32
_POOL = 1 << 24  # random numbers are drawn once and repeated: drawing 10^9 of them takes longer than loading the model
_SCALE = 0.02
_STEP = 241 * 34  # bytes in the pool between the beginnings of two tensors; a block of Q8_0 has 34


@dataclass(frozen=True, kw_only=True)
class Shape:
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    inner: int
    head_dim: int = 64
    quantised: bool = False  # Q8_0 instead of f16


SHAPES = {
    "135m": Shape(layers=30, hidden=576, heads=9, kv_heads=3, inner=1536),  # SmolLM2 135M
    "1b": Shape(layers=16, hidden=2048, heads=32, kv_heads=8, inner=8192),  # Llama 3.2 1B
    "3b": Shape(layers=28, hidden=3072, heads=24, kv_heads=8, inner=8192, head_dim=128),  # Llama 3.2 3B
    "3b-q8": Shape(layers=28, hidden=3072, heads=24, kv_heads=8, inner=8192, head_dim=128, quantised=True),
    "8b-q8": Shape(layers=32, hidden=4096, heads=32, kv_heads=8, inner=14_336, head_dim=128, quantised=True),  # Llama 3.1 8B
}


def write_random_model(tokenizer: Path, path: Path, shape: Shape) -> Path:
    kept = {key: value for key, value in read_metadata(tokenizer).items() if not key.startswith(("llama.", "general."))}
    words = struct.unpack_from("<Q", kept["tokenizer.ggml.tokens"], 8)[0]
    metadata = {**_metadata(shape, words), **kept}
    tensors = dict(_tensors(shape, words))
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    head += b"".join(_text(key) + value for key, value in metadata.items())
    offset, kind = 0, _Q8_0 if shape.quantised else _F16
    for name, dimensions in tensors.items():
        head += _text(name) + struct.pack(f"<I{len(dimensions)}Q", len(dimensions), *dimensions)
        head += struct.pack("<IQ", _F32 if len(dimensions) == 1 else kind, offset)
        offset += _padded(_bytes_of(dimensions, kind))
    pool = _pool(kind)
    with path.open("wb") as file:
        file.write(head + bytes(-len(head) % _ALIGNMENT))
        for number, dimensions in enumerate(tensors.values()):
            size = _bytes_of(dimensions, kind)
            file.writelines(_weights(dimensions, size, pool, number))
            file.write(bytes(_padded(size) - size))
    return path


def _pool(kind: int) -> bytes:
    numbers = np.random.default_rng(1).standard_normal(_POOL, dtype=np.float32) * _SCALE
    if kind == _F16:
        return numbers.astype(np.float16).tobytes()
    blocks = np.zeros(_POOL // _QUANTISED_BLOCK, dtype=[("scale", "<f2"), ("numbers", "i1", _QUANTISED_BLOCK)])
    blocks["scale"] = 4 * _SCALE / 127
    blocks["numbers"] = np.clip(numbers / (4 * _SCALE) * 127, -127, 127).reshape(-1, _QUANTISED_BLOCK)
    return blocks.tobytes()


def read_metadata(path: Path) -> dict[str, bytes]:
    """Key -> its type and value, as they stand in the file."""
    with path.open("rb") as file:
        data = file.read(16 << 20)
    if data[:4] != b"GGUF":
        raise ValueError(f"{path} is not GGUF")
    found, at = {}, 24
    for _ in range(struct.unpack_from("<Q", data, 16)[0]):
        length = struct.unpack_from("<Q", data, at)[0]
        key = data[at + 8 : at + 8 + length].decode()
        begin = at + 8 + length
        at = _end_of_value(data, begin + 4, struct.unpack_from("<I", data, begin)[0])
        found[key] = data[begin:at]
    return found


def _end_of_value(data: bytes, at: int, kind: int) -> int:
    if kind == _STRING:
        return at + 8 + int(struct.unpack_from("<Q", data, at)[0])
    if kind != _ARRAY:
        return at + _SIZES[kind]
    item, count = struct.unpack_from("<IQ", data, at)
    at += 12
    if item != _STRING:
        return at + int(count) * _SIZES[item]
    for _ in range(count):
        at += 8 + int(struct.unpack_from("<Q", data, at)[0])
    return at


def _metadata(shape: Shape, words: int) -> dict[str, bytes]:
    numbers = {
        "block_count": shape.layers,
        "context_length": 131072,
        "embedding_length": shape.hidden,
        "feed_forward_length": shape.inner,
        "attention.head_count": shape.heads,
        "attention.head_count_kv": shape.kv_heads,
        "attention.key_length": shape.head_dim,
        "attention.value_length": shape.head_dim,
        "rope.dimension_count": shape.head_dim,
        "vocab_size": words,
    }
    return {
        "general.architecture": struct.pack("<I", _STRING) + _text("llama"),
        "general.name": struct.pack("<I", _STRING) + _text("random"),
        **{f"llama.{key}": struct.pack("<II", _UINT32, value) for key, value in numbers.items()},
        "llama.attention.layer_norm_rms_epsilon": struct.pack("<If", 6, 1e-5),
        "llama.rope.freq_base": struct.pack("<If", 6, 500000.0),
    }


def _tensors(shape: Shape, words: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, queries, keys = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    yield "token_embd.weight", (hidden, words)
    yield "output_norm.weight", (hidden,)
    for layer in range(shape.layers):
        own: dict[str, tuple[int, ...]] = {
            "attn_norm": (hidden,),
            "attn_q": (hidden, queries),
            "attn_k": (hidden, keys),
            "attn_v": (hidden, keys),
            "attn_output": (queries, hidden),
            "ffn_norm": (hidden,),
            "ffn_gate": (hidden, shape.inner),
            "ffn_up": (hidden, shape.inner),
            "ffn_down": (shape.inner, hidden),
        }
        yield from ((f"blk.{layer}.{name}.weight", dimensions) for name, dimensions in own.items())


def _weights(dimensions: tuple[int, ...], size: int, pool: bytes, number: int) -> Iterator[bytes]:
    if len(dimensions) == 1:
        yield struct.pack("<f", 1.0) * dimensions[0]
        return
    left, at = size, number * _STEP % len(pool)
    while left:
        piece = pool[at : at + left]
        yield piece
        left, at = left - len(piece), 0


def _bytes_of(dimensions: tuple[int, ...], kind: int) -> int:
    if len(dimensions) == 1:
        return dimensions[0] * 4
    count = dimensions[0] * dimensions[1]
    return count * 2 if kind == _F16 else count // _QUANTISED_BLOCK * (_QUANTISED_BLOCK + 2)


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def main(arguments: list[str]) -> int:
    tokenizer, folder = Path(arguments[0]), Path(arguments[1])
    for name in arguments[2:] or SHAPES:
        sys.stdout.write(f"{write_random_model(tokenizer, folder / f'{name}.gguf', SHAPES[name])}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
