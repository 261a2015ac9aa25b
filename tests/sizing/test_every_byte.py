"""Model files damaged at every byte: read as a model that can be sized, or refused as a model file; nothing else."""

import contextlib
import io
import json
import struct
from collections.abc import Callable, Iterator, Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples

from aimgpu.domain import Footprint
from aimgpu.errors import InvalidModelFile
from aimgpu.sizing import ModelFacts, SizingRequest, estimate_footprint, facts_from_folder, read_gguf, read_safetensors
from aimgpu.sizing.formats.config import read_config
from aimgpu.sizing.formats.gguf_types import TENSOR_TYPES
from aimgpu.sizing.formats.safetensors import DTYPE_BITS, SafeTensor

Make = Callable[..., bytes]
SMALL: dict[str, object] = {
    "general.architecture": "llama",
    "general.name": "tiny",
    "general.alignment": 32,
    "llama.block_count": 2,
    "llama.context_length": 512,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 256,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": [2, 1],
    "llama.attention.sliding_window": 128,
    "llama.attention.shared_kv_layers": 1,
    "llama.ssm.state_size": 4,
    "llama.expert_count": 2,
    "llama.expert_used_count": 1,
    "tokenizer.ggml.tokens": ["a", "b", "c"],
}
TENSORS = {"token_embd.weight": ((64, 32), 8, 2176), "blk.0.ffn_up_exps.weight": ((64, 4), 0, 1024), "norm": ((64,), 1, 128)}


@contextlib.contextmanager
def refused_with_hint(word: str = "") -> Iterator[None]:
    """It may be refused; then with this word and what to do."""
    caught = None
    try:
        yield
    except InvalidModelFile as error:
        caught = error
    if caught is not None:
        assert caught.hint
        assert word in caught.message


def sized(facts: ModelFacts) -> Iterator[Footprint]:
    for engine in ("llamacpp", "vllm", "transformers"):
        yield estimate_footprint(SizingRequest(model=facts, engine=engine, context_tokens=4096, concurrency=2))


def check(facts: ModelFacts, file_bytes: int) -> None:
    """Whatever stands in the header, nothing that follows from it is below nothing."""
    assert facts.tensor_bytes is not None
    assert 0 <= facts.tensor_bytes <= file_bytes
    assert facts.parameters >= 0
    shape = facts.architecture
    if shape is not None:
        assert shape.layers > 0
        assert shape.caching_layers >= 0
        assert shape.sliding_layers >= 0
        assert shape.state_elements >= 0
    for footprint in sized(facts):
        assert all(term.memory_bytes >= 0 for term in footprint.terms), footprint.terms


def header_length(data: bytes, tensors: Mapping[str, tuple[tuple[int, ...], int, int]]) -> int:
    return len(data) - sum(-(-size // 32) * 32 for _, _, size in tensors.values())


@pytest.mark.parametrize("damage", [0x00, 0xFF, 0x80, 0x01])
def test_a_gguf_with_any_one_byte_changed(make_gguf: Make, damage: int) -> None:
    whole = make_gguf(SMALL, TENSORS)
    read = 0
    for offset in range(header_length(whole, TENSORS)):
        byte = damage if damage in (0x00, 0xFF) else whole[offset] ^ damage
        data = whole[:offset] + bytes([byte]) + whole[offset + 1 :]
        with refused_with_hint():
            check(read_gguf(io.BytesIO(data), len(data)), len(data))
            read += 1
    assert read > 100  # names and numbers that are as good as others


def test_a_gguf_cut_at_any_byte_of_its_header_or_short_by_one_is_refused(make_gguf: Make) -> None:
    whole = make_gguf(SMALL, TENSORS)
    for length in (*range(header_length(whole, TENSORS)), len(whole) - 32):
        with pytest.raises(InvalidModelFile):
            read_gguf(io.BytesIO(whole[:length]), length)
    check(read_gguf(io.BytesIO(whole), len(whole)), len(whole))


def test_a_file_that_is_shorter_than_its_size_was_said_to_be_is_refused(make_gguf: Make) -> None:
    """As one that another program truncates while it is read."""
    whole = make_gguf(SMALL, TENSORS)
    for length in (0, 3, 24, 200):
        with pytest.raises(InvalidModelFile, match="ends inside its header"):
            read_gguf(io.BytesIO(whole[:length]), len(whole))


@pytest.mark.parametrize("key", [key for key in SMALL if key.startswith("llama.")])
@pytest.mark.parametrize("value", [0, 1, 3, 1 << 16, (1 << 32) - 1, "text", True, 2.5, [], [1 << 20], ["a"]], ids=repr)
def test_a_gguf_with_any_one_value_replaced(make_gguf: Make, key: str, value: object) -> None:
    data = make_gguf(SMALL | {key: value}, TENSORS)
    with refused_with_hint(key.removeprefix("llama.")):
        check(read_gguf(io.BytesIO(data), len(data)), len(data))


@settings(max_examples=examples(60))
@given(values=st.dictionaries(st.sampled_from(sorted(SMALL)[1:]), st.integers(0, 40) | st.lists(st.integers(0, 5))))
def test_a_gguf_with_any_values_together(make_gguf: Make, values: dict[str, object]) -> None:
    data = make_gguf(SMALL | values, TENSORS)
    try:
        facts = read_gguf(io.BytesIO(data), len(data))
    except InvalidModelFile:
        return
    check(facts, len(data))


@pytest.mark.parametrize("version", [0, 1, 4, 0x03000000])
def test_a_version_that_is_not_known_is_refused_by_its_number(make_gguf: Make, version: int) -> None:
    data = make_gguf(SMALL, TENSORS, version)
    with pytest.raises(InvalidModelFile, match=f"version is {version}"):
        read_gguf(io.BytesIO(data), len(data))


@pytest.mark.parametrize(("number", "entry"), TENSOR_TYPES.items(), ids=[entry[0] for entry in TENSOR_TYPES.values()])
def test_every_type_of_tensor_takes_what_its_blocks_take(make_gguf: Make, number: int, entry: tuple[str, int, int]) -> None:
    name, block, size = entry
    data = make_gguf({"general.architecture": "x"}, {"a": ((block * 3,), number, size * 3)})
    facts = read_gguf(io.BytesIO(data), len(data))
    assert (facts.tensor_bytes, facts.precision, facts.architecture) == (size * 3, name, None)
    if block > 1:
        odd = make_gguf({}, {"a": ((block * 3 - 1,), number, size * 3)})
        with pytest.raises(InvalidModelFile, match=f"blocks of {block}"):
            read_gguf(io.BytesIO(odd), len(odd))


@pytest.mark.parametrize("alignment", [0, (1 << 20) + 1, "32", 32.0, [32]], ids=repr)
def test_an_alignment_that_no_file_has_is_refused(make_gguf: Make, alignment: object) -> None:
    data = make_gguf({"general.alignment": alignment}, TENSORS)
    if isinstance(alignment, list):  # kept as one of a list, which is no number
        with pytest.raises(InvalidModelFile, match="alignment"):
            read_gguf(io.BytesIO(data), len(data))
        return
    with pytest.raises(InvalidModelFile, match="alignment"):
        read_gguf(io.BytesIO(data), len(data))


def test_strings_and_arrays_that_no_fact_needs_are_passed_over_and_counted(make_gguf: Make) -> None:
    many = SMALL | {
        "tokenizer.chat_template": "x" * 5000,
        "tokenizer.ggml.tokens": [f"token {number}" * (number % 7) for number in range(3000)],
        "tokenizer.ggml.scores": list(range(2000)),
    }
    data = make_gguf(many, TENSORS)
    facts = read_gguf(io.BytesIO(data), len(data))
    assert facts.architecture is not None
    assert facts.architecture.vocab_size == 3000


# --- safetensors ---


@pytest.mark.parametrize("damage", [0x00, 0xFF, ord("9"), ord('"'), ord("}")])
def test_a_safetensors_file_with_any_one_byte_of_its_header_changed(make_safetensors: Make, damage: int) -> None:
    whole = make_safetensors({"model.embed_tokens.weight": ("BF16", [32, 4]), "b.scales": ("F32", [4]), "c": ("I32", [2])})
    (length,) = struct.unpack("<Q", whole[:8])
    for offset in range(8 + length):
        data = whole[:offset] + bytes([damage]) + whole[offset + 1 :]
        tensors: tuple[SafeTensor, ...] = ()
        with refused_with_hint():
            tensors = read_safetensors(io.BytesIO(data), len(data))
        if not tensors:
            continue
        assert sum(tensor.size_bytes for tensor in tensors) == len(whole) - 8 - length
        check(facts_from_folder("m", json.dumps(CONFIG), tensors), len(data))


@pytest.mark.parametrize(("dtype", "bits"), DTYPE_BITS.items())
@pytest.mark.parametrize("shape", [[], [0], [8], [2, 4], [1, 1, 1, 8]], ids=repr)
def test_a_tensor_of_every_type_and_shape_takes_its_bits(dtype: str, bits: int, shape: list[int]) -> None:
    elements = 1
    for length in shape:
        elements *= length
    size = elements * bits // 8
    text = json.dumps({"t": {"dtype": dtype, "shape": shape, "data_offsets": [0, size]}}).encode()
    data = struct.pack("<Q", len(text)) + text + bytes(size)
    assert read_safetensors(io.BytesIO(data), len(data)) == (SafeTensor("t", dtype, elements, size),)
    for wrong in (data[:-1] if size else data + b"\0", data + b"\0"):
        with pytest.raises(InvalidModelFile):
            read_safetensors(io.BytesIO(wrong), len(wrong))


# --- config.json ---

CONFIG: dict[str, object] = {
    "model_type": "gemma4",
    "num_hidden_layers": 6,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "intermediate_size": 256,
    "vocab_size": 128,
    "max_position_embeddings": 4096,
    "sliding_window": 128,
    "num_kv_shared_layers": 1,
    "layer_types": ["sliding_attention", "full_attention", "linear_attention"] * 2,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "tie_word_embeddings": False,
    "quantization_config": {"quant_method": "awq", "bits": 4},
}
VALUES: list[object] = [
    *(None, 0, 1, 5, 100_000, (1 << 31) + 1, -1, 1.5, True, "7", "", [], [3, "x"], {}, {"bits": 4}),
    *(["linear_attention"] * 6, ["sliding_attention"] * 9, [None], {"quant_method": ["awq"]}, {"config_groups": {"a": 1}}),
]
TABLE = (SafeTensor("model.embed_tokens.weight", "BF16", 8192, 16384), SafeTensor("layers", "BF16", 8192, 16384))


@pytest.mark.parametrize("key", CONFIG)
def test_a_config_with_any_one_value_replaced(key: str) -> None:
    for value in VALUES:
        with refused_with_hint(key):
            check(facts_from_folder("m", json.dumps(CONFIG | {key: value}), TABLE), 32768)


@settings(max_examples=examples(100))
@given(values=st.dictionaries(st.sampled_from(sorted(CONFIG)), st.sampled_from(VALUES)), nested=st.booleans())
def test_a_config_with_any_values_together(values: dict[str, object], *, nested: bool) -> None:
    config = {"text_config": CONFIG | values, "num_hidden_layers": 3} if nested else CONFIG | values
    try:
        shape, quantised = read_config(json.dumps(config))
    except InvalidModelFile:
        return
    assert quantised in (None, "awq", "int4", "int8")
    if shape is not None:
        check(ModelFacts(name="m", source="t", parameters=10**6, precision="bf16", architecture=shape, tensor_bytes=1), 1)
