import io
import struct
from collections.abc import Callable
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples

from aimgpu.errors import InvalidModelFile
from aimgpu.sizing import ModelKind, read_gguf
from aimgpu.sizing.kv import cache_bytes


class _Endless(io.RawIOBase):
    """A header that claims everything, over a file of zeros without end; counts what is read of it."""

    def __init__(self, head: bytes) -> None:
        self._head = io.BytesIO(head)
        self.served = 0

    def read(self, size: int = -1, /) -> bytes:
        data = self._head.read(size)
        data += bytes(size - len(data))
        self.served += size
        return data


def test_the_facts_come_from_the_header_and_the_bytes_are_exact(tiny_gguf: bytes) -> None:
    facts = read_gguf(io.BytesIO(tiny_gguf), len(tiny_gguf))
    assert facts.name == "tiny"
    assert facts.parameters == 64 * 128 + 64 + 2 * 256 * 240
    assert facts.tensor_bytes == 8704 + 256 + 2 * 65280
    assert facts.input_embedding_bytes == 8704
    assert facts.precision == "q8_0"
    architecture = facts.architecture
    assert architecture is not None
    assert architecture.kind is ModelKind.DECODER
    assert (architecture.layers, architecture.head_dim, architecture.kv_heads) == (2, 16, 2)
    assert architecture.vocab_size == 128
    assert architecture.tied_embeddings


def test_every_cut_of_a_file_is_refused(tiny_gguf: bytes) -> None:
    for length in range(0, len(tiny_gguf) - 32, 997):
        with pytest.raises(InvalidModelFile):
            read_gguf(io.BytesIO(tiny_gguf[:length]), length)


@pytest.mark.parametrize(
    "head",
    [
        b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0),
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60),
        b"GGUF" + struct.pack("<IQQ", 9, 1, 1),
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1 << 62),
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"k" + struct.pack("<IIQ", 9, 8, 1 << 60),
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"k" + struct.pack("<IIQ", 9, 9, 5),
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"k" + struct.pack("<IQ", 8, 1 << 40),
        b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + struct.pack("<Q", 1) + b"t" + struct.pack("<I", 1 << 30),
        b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + struct.pack("<Q", 1) + b"t" + struct.pack("<IQQ", 2, 1 << 60, 1 << 60),
        b"PK\x03\x04",
    ],
)
def test_a_header_that_lies_is_refused_after_reading_little(head: bytes) -> None:
    stream = _Endless(head)
    with pytest.raises(InvalidModelFile):
        read_gguf(stream, 1 << 45)  # type: ignore[arg-type]  # a raw stream reads as BinaryIO does
    assert stream.served <= 130 << 20


@settings(max_examples=examples(200))
@given(data=st.data())
def test_a_damaged_header_is_read_or_refused_and_nothing_else(tiny_gguf: bytes, data: st.DataObject) -> None:
    damaged = bytearray(tiny_gguf)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, 700))] = data.draw(st.integers(0, 255))
    try:
        facts = read_gguf(io.BytesIO(bytes(damaged)), len(damaged))
    except InvalidModelFile:
        return
    assert facts.tensor_bytes is not None
    assert facts.tensor_bytes <= len(damaged)


def test_layers_without_kv_heads_keep_a_state_instead(make_gguf: Callable[..., bytes]) -> None:
    metadata = {
        "general.architecture": "hybrid",
        "hybrid.block_count": 4,
        "hybrid.embedding_length": 64,
        "hybrid.attention.head_count": 4,
        "hybrid.attention.head_count_kv": [0, 2, 0, 2],
        "hybrid.ssm.inner_size": 128,
        "hybrid.ssm.state_size": 16,
        "hybrid.ssm.conv_kernel": 4,
        "hybrid.ssm.group_count": 1,
    }
    data = make_gguf(metadata, {"a": ((32,), 0, 128)})
    architecture = read_gguf(io.BytesIO(data), len(data)).architecture
    assert architecture is not None
    assert architecture.caching_layers == 2
    assert architecture.state_elements == 2 * (3 * (128 + 2 * 16) + 16 * 128)


def test_window_layers_with_heads_of_their_own_are_counted_by_them(make_gguf: Callable[..., bytes]) -> None:
    """As Gemma 4 writes it: wide heads where a layer sees everything, narrow ones elsewhere, the last layer without a cache."""
    metadata = {
        "general.architecture": "gemma4",
        "gemma4.block_count": 6,
        "gemma4.embedding_length": 256,
        "gemma4.attention.head_count": 8,
        "gemma4.attention.head_count_kv": [8, 8, 2, 8, 8, 2],
        "gemma4.attention.key_length": 512,
        "gemma4.attention.value_length": 512,
        "gemma4.attention.key_length_swa": 256,
        "gemma4.attention.value_length_swa": 256,
        "gemma4.attention.sliding_window": 1024,
        "gemma4.attention.sliding_window_pattern": [1, 1, 0, 1, 1, 0],
        "gemma4.attention.shared_kv_layers": 1,
    }
    data = make_gguf(metadata, {"a": ((32,), 0, 128)})
    architecture = read_gguf(io.BytesIO(data), len(data)).architecture
    assert architecture is not None
    assert (architecture.kv_heads, architecture.head_dim) == (2, 512)
    assert (architecture.sliding_layers, architecture.sliding_kv_elements) == (4, 8 * 512)
    assert architecture.caching_layers == 5
    assert architecture.state_elements == 0
    kept = cache_bytes(architecture, full_tokens=8192, window_tokens=1536, element=Fraction(2))
    assert kept == 8192 * 2 * 2 * 512 * 2 + 4 * 1536 * 8 * 512 * 2
