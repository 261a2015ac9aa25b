import io
import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples

from aimgpu.control.sizing_inputs.model_files import find_model_facts
from aimgpu.domain import Exactness
from aimgpu.errors import InvalidModelFile
from aimgpu.sizing import SizingRequest, built_in, estimate_footprint, read_safetensors
from aimgpu.sizing.formats.config import read_config

SMALL = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 256,
    "vocab_size": 128,
    "max_position_embeddings": 512,
}
Make = Callable[..., bytes]


def _folder(path: Path, config: dict[str, object], **shards: bytes) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    for name, data in shards.items():
        (path / f"{name.replace('_', '-')}.safetensors").write_bytes(data)
    return path


def test_a_folder_is_sized_exactly_from_its_headers(tmp_path: Path, make_safetensors: Make) -> None:
    data = make_safetensors({"model.embed_tokens.weight": ("BF16", [128, 64]), "lm_head.weight": ("BF16", [128, 64])})
    facts = find_model_facts(str(_folder(tmp_path / "model", SMALL, model=data)))
    assert facts.parameters == 2 * 128 * 64
    assert facts.tensor_bytes == 2 * 128 * 64 * 2
    assert facts.precision == "bf16"
    assert facts.architecture is not None
    assert not facts.architecture.tied_embeddings
    weights = estimate_footprint(SizingRequest(model=facts, engine="transformers")).terms[0]
    assert (weights.memory_bytes, weights.exactness) == (facts.tensor_bytes, Exactness.EXACT)


def test_weights_that_lie_there_twice_are_counted_once(tmp_path: Path, make_safetensors: Make) -> None:
    shard = make_safetensors({"model.embed_tokens.weight": ("BF16", [128, 64])})
    folder = _folder(tmp_path / "model", SMALL, model_00001=shard, consolidated=shard)
    assert find_model_facts("any/name", folder).tensor_bytes == 128 * 64 * 2
    index = {"weight_map": {"model.embed_tokens.weight": "consolidated.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert find_model_facts("any/name", folder).tensor_bytes == 128 * 64 * 2


def test_packed_weights_are_counted_and_scales_are_not(tmp_path: Path, make_safetensors: Make) -> None:
    data = make_safetensors({"a.qweight": ("I32", [8, 64]), "a.scales": ("F16", [1, 64]), "a.qzeros": ("I32", [1, 8])})
    config = SMALL | {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    facts = find_model_facts("any/name", _folder(tmp_path / "model", config, model=data))
    assert facts.precision == "int4"
    assert facts.parameters == 64 * 64
    assert facts.tensor_bytes == 8 * 64 * 4 + 64 * 2 + 8 * 4


def test_a_split_gguf_is_the_sum_of_its_files(tmp_path: Path, make_gguf: Make) -> None:
    metadata = {"general.architecture": "llama", "llama.block_count": 1}
    for number in (1, 2, 3):
        data = make_gguf(metadata if number == 1 else {"split.no": number}, {f"t{number}": ((32,), 0, 128)})
        (tmp_path / f"big-{number:05d}-of-00003.gguf").write_bytes(data)
    assert find_model_facts(str(tmp_path / "big-00002-of-00003.gguf")).tensor_bytes == 3 * 128
    (tmp_path / "big-00003-of-00003.gguf").unlink()
    with pytest.raises(InvalidModelFile, match=r"00003-of-00003|cannot read"):
        find_model_facts(str(tmp_path / "big-00001-of-00003.gguf"))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 64},
            {"sliding_layers": 1, "sliding_window": 64},
        ),
        ({"sliding_window": 64, "use_sliding_window": False}, {"sliding_layers": 0, "sliding_window": 0}),
        ({"model_type": "gemma2", "sliding_window": 64}, {"sliding_layers": 1}),
        ({"sliding_window": None}, {"sliding_layers": 0}),
        ({"kv_lora_rank": 512, "qk_rope_head_dim": 64}, {"kv_lora_rank": 512, "rope_head_dim": 64}),
        (
            {"num_local_experts": 8, "num_experts_per_tok": 2},
            {"experts": 8, "experts_used": 2, "expert_intermediate_size": 256},
        ),
        ({"n_routed_experts": 64, "moe_intermediate_size": 32}, {"experts": 64, "expert_intermediate_size": 32}),
        ({"head_dim": 128}, {"head_dim": 128}),
        ({}, {"head_dim": 16, "attention_layers": None}),
        ({"layer_types": ["linear_attention", "full_attention"]}, {"attention_layers": 1}),
        ({"model_type": "xlm-roberta"}, {"caching_layers": 0}),
    ],
)
def test_families_say_the_same_thing_in_other_words(config: dict[str, object], expected: dict[str, object]) -> None:
    architecture, _ = read_config(json.dumps(SMALL | config))
    assert {name: getattr(architecture, name) for name in expected} == expected


def test_wide_heads_of_the_layers_that_see_everything_are_told_apart() -> None:
    """As Gemma 4 writes it."""
    text = {
        "model_type": "gemma4_text",
        "num_hidden_layers": 6,
        "hidden_size": 256,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "head_dim": 256,
        "global_head_dim": 512,
        "num_global_key_value_heads": 2,
        "num_kv_shared_layers": 1,
        "sliding_window": 1024,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    }
    architecture, _ = read_config(json.dumps({"text_config": text}))
    assert architecture is not None
    assert (architecture.kv_heads, architecture.head_dim, architecture.sliding_kv_elements) == (2, 512, 4096)
    assert (architecture.caching_layers, architecture.sliding_layers) == (5, 4)


def test_a_nested_text_config_is_the_language_model() -> None:
    architecture, _ = read_config(
        json.dumps({"model_type": "some_vl", "text_config": SMALL, "vision_config": {"hidden_size": 9}})
    )
    assert architecture is not None
    assert (architecture.family, architecture.hidden_size) == ("llama", 64)


def test_the_state_of_a_gated_delta_layer_is_counted() -> None:
    known = built_in().find("Qwen/Qwen3-Next-80B-A3B-Instruct")
    config = SMALL | {
        "num_hidden_layers": 48,
        "full_attention_interval": 4,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
    }
    architecture, _ = read_config(json.dumps(config))
    assert architecture is not None
    assert known is not None
    assert known.architecture is not None
    assert architecture.state_elements == known.architecture.state_elements
    assert architecture.caching_layers == known.architecture.caching_layers == 12


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"a":' * 5000, '{"num_hidden_layers": -1, "hidden_size": 1, "num_attention_heads": 1}']
)
def test_a_config_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(InvalidModelFile):
        read_config(text)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"1234567",
        struct.pack("<Q", 1 << 62),
        struct.pack("<Q", 100) + b"{}",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 10_000) + b"[" * 10_000,
    ],
)
def test_a_safetensors_header_that_lies_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidModelFile):
        read_safetensors(io.BytesIO(data), 1 << 40)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [4], "data_offsets": [0, 1 << 40]},
        {"dtype": "F32", "shape": [1 << 40, 1 << 40], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [-4], "data_offsets": [0, 16]},
        {"dtype": "F99", "shape": [4], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": "many", "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [4]},
        7,
    ],
)
def test_a_tensor_that_cannot_be_is_refused(entry: object) -> None:
    text = json.dumps({"t": entry}).encode()
    with pytest.raises(InvalidModelFile):
        read_safetensors(io.BytesIO(struct.pack("<Q", len(text)) + text + bytes(16)), 8 + len(text) + 16)


@settings(max_examples=examples(150))
@given(data=st.data())
def test_damage_is_read_or_refused_and_nothing_else(make_safetensors: Make, data: st.DataObject) -> None:
    whole = bytearray(make_safetensors({"a": ("BF16", [8, 8]), "b": ("F32", [4])}))
    whole[data.draw(st.integers(0, 150))] = data.draw(st.integers(0, 255))
    try:
        tensors = read_safetensors(io.BytesIO(bytes(whole)), len(whole))
    except InvalidModelFile:
        return
    assert sum(tensor.size_bytes for tensor in tensors) <= len(whole)


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidModelFile, match=r"config\.json"):
        find_model_facts(str(tmp_path))


def test_a_folder_for_llama_cpp_is_sized_as_it_will_be_converted(tmp_path: Path, make_safetensors: Make) -> None:
    """llama.cpp reads no safetensors: the folder tells the model, the wanted type tells the file that is made of it."""
    data = make_safetensors({"model.embed_tokens.weight": ("BF16", [128, 64]), "layers": ("BF16", [1024, 128])})
    facts = find_model_facts(str(_folder(tmp_path / "model", SMALL, model=data)))
    plain, packed = (
        estimate_footprint(SizingRequest(model=facts, engine="llamacpp", precision=precision)) for precision in (None, "q8_0")
    )
    weights = [next(term.memory_bytes for term in each.terms if term.name == "weights") for each in (plain, packed)]
    assert weights[1] == pytest.approx(weights[0] * 34 / 64, rel=0.02)
    assert not any("file at hand" in note for note in packed.notes)
