"""Builds small GGUF files: a real header, tensors of zeros."""

import json
import struct
from collections.abc import Callable, Mapping, Sequence

import pytest

from aimgpu.domain import Device, Layout, Partition, Vendor

Tensors = Mapping[str, tuple[tuple[int, ...], int, int]]  # name -> (shape, ggml type number, bytes)
Value = int | float | str | bool | Sequence[int] | Sequence[str]


@pytest.fixture
def make_gguf() -> Callable[[Mapping[str, Value], Tensors], bytes]:
    return _gguf_bytes


@pytest.fixture
def tiny_gguf() -> bytes:
    """A llama of two layers with tied embeddings, Q8_0 and F32."""
    layers = {"blk.0.weight": ((256, 240), 8, 65280), "blk.1.weight": ((256, 240), 8, 65280)}  # as many as its shape has
    return _gguf_bytes(TINY, {"token_embd.weight": ((64, 128), 8, 8704), "output_norm.weight": ((64,), 0, 256), **layers})


TINY: dict[str, Value] = {
    "general.architecture": "llama",
    "general.name": "tiny",
    "llama.block_count": 2,
    "llama.context_length": 512,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 256,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "tokenizer.ggml.tokens": [f"t{i}" for i in range(128)],
}


def _gguf_bytes(metadata: Mapping[str, Value], tensors: Tensors, version: int = 3) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    head += b"".join(_text(key) + _value(value) for key, value in metadata.items())
    offset = 0
    for name, (shape, kind, size) in tensors.items():
        head += _text(name) + struct.pack("<I", len(shape)) + b"".join(struct.pack("<Q", n) for n in shape)
        head += struct.pack("<IQ", kind, offset)
        offset += -(-size // 32) * 32
    return head + bytes(-len(head) % 32) + bytes(offset)


@pytest.fixture
def make_safetensors() -> Callable[[Mapping[str, tuple[str, list[int]]]], bytes]:
    """Builds a safetensors file of zeros from name -> (dtype, shape)."""
    return _safetensors_bytes


def _safetensors_bytes(tensors: Mapping[str, tuple[str, list[int]]]) -> bytes:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (dtype, shape) in tensors.items():
        size = _DTYPE_BYTES[dtype]
        for length in shape:
            size *= length
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(offset)


_DTYPE_BYTES = {"F32": 4, "BF16": 2, "F16": 2, "I32": 4, "F8_E4M3": 1}


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: Value) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _text(value)
    if value and isinstance(value[0], str):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(_text(str(item)) for item in value)
    return struct.pack("<IIQ", 9, 4, len(value)) + b"".join(struct.pack("<I", int(item)) for item in value)


@pytest.fixture
def mi300x() -> Device:
    """An MI300X with two of its Layouts, by the driver's figures."""
    layouts = tuple(
        Layout(
            name=f"{mode}/NPS1",
            compute_mode=mode,
            memory_mode="NPS1",
            partitions=tuple(
                Partition(
                    id=f"gpu/{mode.lower()}-{index}",
                    device_id="gpu",
                    index=index,
                    kind=mode.lower(),
                    memory_bytes=MI300X_BYTES // count // 4096 * 4096,
                    compute_units=304 // count,
                )
                for index in range(count)
            ),
        )
        for mode, count in (("SPX", 1), ("CPX", 8))
    )
    return Device(
        id="gpu",
        index=0,
        vendor=Vendor.AMD,
        product="MI300X",
        market_name=None,
        memory_bytes=MI300X_BYTES,
        compute_units=304,
        layout=layouts[0],
        layouts=layouts,
    )


MI300X_BYTES = 206_141_652_992
