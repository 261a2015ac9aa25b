"""Hybrid models keep keys and values for their attention layers alone, and a constant state for the others."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.sizing.test_folders import Make

from aimgpu.control.sizing_inputs.model_files import find_model_facts
from aimgpu.domain import Exactness
from aimgpu.errors import InvalidModelFile
from aimgpu.sizing import SizingRequest, estimate_footprint
from aimgpu.sizing.formats.config import read_config, read_precision
from aimgpu.sizing.model import Architecture

BASE = {"num_hidden_layers": 8, "hidden_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 1000}
MAMBA2 = 3 * (2048 + 2 * 1 * 128) + 32 * 64 * 128  # a convolution of 4, 32 heads of 64, one group of 128
GATED = 3 * (2 * 16 * 128 + 32 * 128) + 32 * 128 * 128


def read(**config: Any) -> Architecture:
    architecture, _ = read_config(json.dumps(BASE | config))
    assert architecture is not None
    return architecture


# As the published configs have them; shapes as `MambaStateShapeCalculator` of vLLM 0.33.0 computes them.
FAMILIES: dict[str, tuple[dict[str, Any], tuple[int, int, int]]] = {
    "nemotron_h": (
        {
            "hybrid_override_pattern": "M-M*-ME*",
            "n_groups": 8,
            "mamba_num_heads": 128,
            "mamba_head_dim": 80,
            "ssm_state_size": 128,
            "conv_kernel": 4,
        },
        (2, 3, 3 * (128 * 80 + 2 * 8 * 128) + 128 * 80 * 128),
    ),
    "granitemoehybrid": (
        {
            "layer_types": ["mamba", "mamba", "attention", "mamba"] * 2,
            "mamba_n_groups": 1,
            "mamba_n_heads": 32,
            "mamba_d_head": 64,
            "mamba_d_state": 128,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
        },
        (2, 6, MAMBA2),
    ),
    "bamba": (
        {
            "attn_layer_indices": [3],
            "mamba_n_groups": 1,
            "mamba_n_heads": 32,
            "mamba_d_head": "auto",
            "mamba_d_state": 128,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
        },
        (1, 7, MAMBA2),
    ),
    "falcon_h1": (
        {
            "mamba_d_ssm": 2048,
            "mamba_n_groups": 1,
            "mamba_n_heads": 32,
            "mamba_d_head": 64,
            "mamba_d_state": 128,
            "mamba_d_conv": 4,
        },
        (8, 8, MAMBA2),
    ),
    "zamba2": (
        {
            "layers_block_type": ["mamba", "hybrid", "mamba", "mamba"] * 2,
            "mamba_ngroups": 1,
            "n_mamba_heads": 32,
            "mamba_headdim": 64,
            "mamba_d_state": 128,
            "mamba_d_conv": 4,
        },
        (2, 8, MAMBA2),
    ),
    "zamba2 by the numbers of its layers": (
        {
            "model_type": "zamba2",
            "hybrid_layer_ids": [1, 5],
            "mamba_ngroups": 1,
            "n_mamba_heads": 32,
            "mamba_headdim": 64,
            "mamba_d_state": 128,
            "mamba_d_conv": 4,
        },
        (2, 8, MAMBA2),
    ),
    "jamba": (
        {"attn_layer_period": 8, "attn_layer_offset": 4, "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2},
        (1, 7, 3 * 2048 + 2048 * 16),
    ),
    "lfm2": ({"full_attn_idxs": [2, 5], "conv_L_cache": 3, "conv_dim": 1024}, (2, 6, 2 * 1024)),
    "qwen3_next": (
        {
            "full_attention_interval": 4,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
        },
        (2, 6, GATED),
    ),
    "olmo_hybrid": (
        {
            "layer_types": ["linear_attention", "full_attention"] * 4,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
        },
        (4, 4, GATED),
    ),
    "kimi_linear": (
        {
            "linear_attn_config": {
                "kda_layers": [1, 2, 3, 5, 6, 7],
                "full_attn_layers": [4, 8],
                "num_heads": 32,
                "head_dim": 128,
                "short_conv_kernel_size": 4,
            }
        },
        (2, 6, 3 * 3 * 32 * 128 + 32 * 128 * 128),
    ),
    "minimax_text_01": ({"attn_type_list": [0, 0, 0, 1] * 2, "head_dim": 128}, (2, 6, 8 * 128 * 128)),
    "bailing_moe_linear": ({"layer_group_size": 5, "head_dim": 128}, (1 + 3, 4, 8 * 128 * 128)),
    "mamba2": (
        {
            "num_attention_heads": 0,
            "n_groups": 1,
            "num_heads": 32,
            "head_dim": 64,
            "state_size": 128,
            "conv_kernel": 4,
            "expand": 2,
        },
        (0, 8, MAMBA2),
    ),
    "mamba": (
        {"num_attention_heads": 0, "state_size": 16, "conv_kernel": 4, "expand": 2},
        (0, 8, 3 * 2048 + 2048 * 16),
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_is_counted_as_vllm_counts_it(family: str) -> None:
    config, (attention, states, elements) = FAMILIES[family]
    found = read(**{"model_type": family} | config)
    assert (found.caching_layers, found.stateful_layers) == (attention, states)
    assert found.state_elements == states * elements


def test_a_model_whose_layers_all_attend_is_no_hybrid() -> None:
    for config in ({}, {"layer_types": ["full_attention"] * 8}, {"layer_types": ["sliding_attention", "full_attention"] * 4}):
        found = read(model_type="llama", **config)
        assert (found.attention_layers, found.stateful_layers) == (None, 0)


def test_the_cache_of_a_hybrid_is_a_fraction_of_that_of_its_layers(tmp_path: Path) -> None:
    """Nemotron-H of 52 layers: 4 have attention."""
    config, _ = FAMILIES["nemotron_h"]
    pattern = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
    given = BASE | config | {"model_type": "nemotron_h", "hybrid_override_pattern": pattern, "num_hidden_layers": len(pattern)}
    (tmp_path / "config.json").write_text(json.dumps(given))
    (tmp_path / "plain").mkdir()
    plain = {name: value for name, value in given.items() if name in (*BASE, "hybrid_override_pattern")} | {
        "model_type": "llama"
    }
    del plain["hybrid_override_pattern"]
    (tmp_path / "plain" / "config.json").write_text(json.dumps(plain))

    def cache(path: Path) -> int:
        request = SizingRequest(model=find_model_facts(str(path)), engine="llamacpp", context_tokens=8192)
        inputs = next(term.inputs for term in estimate_footprint(request).terms if term.name == "kv_cache")
        return int(inputs["layers"])

    assert (cache(tmp_path), cache(tmp_path / "plain")) == (4, len(pattern))


def test_a_folder_with_a_config_alone_is_estimated_with_a_note(tmp_path: Path) -> None:
    llama = {
        "model_type": "llama",
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 128256,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(llama))
    facts = find_model_facts(str(tmp_path))
    assert facts.parameters == pytest.approx(8_030_261_248, rel=0.001)  # Llama 3.1 8B
    assert (facts.precision, facts.tensor_bytes) == ("bf16", None)
    assert "no weight files" in facts.remarks[0]
    assert estimate_footprint(SizingRequest(model=facts, engine="vllm")).notes[0].startswith("no weight files")


NEMOTRON = "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-"
PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "mamba-2.8b": (
        {"model_type": "mamba", "num_hidden_layers": 64, "hidden_size": 2560, "vocab_size": 50280, "state_size": 16}
        | {"intermediate_size": 5120, "conv_kernel": 4, "expand": 2, "time_step_rank": 160},
        2_768_345_600,
    ),
    "Mamba-Codestral-7B": (
        {"model_type": "mamba2", "num_hidden_layers": 64, "hidden_size": 4096, "vocab_size": 32768, "state_size": 128}
        | {"n_groups": 8, "num_heads": 128, "head_dim": 64, "conv_kernel": 4, "expand": 2, "tie_word_embeddings": False},
        7_285_403_648,
    ),
    "NVIDIA-Nemotron-Nano-9B-v2": (
        {"model_type": "nemotron_h", "num_hidden_layers": 56, "hidden_size": 4480, "vocab_size": 131072}
        | {"hybrid_override_pattern": NEMOTRON, "intermediate_size": 15680, "num_attention_heads": 40}
        | {"num_key_value_heads": 8, "head_dim": 128, "ssm_state_size": 128, "mamba_num_heads": 128, "mamba_head_dim": 80}
        | {"n_groups": 8, "conv_kernel": 4, "tie_word_embeddings": False},
        8_888_227_328,
    ),
    "Jamba-v0.1": (
        {"model_type": "jamba", "num_hidden_layers": 32, "hidden_size": 4096, "vocab_size": 65536, "intermediate_size": 14336}
        | {"attn_layer_period": 8, "attn_layer_offset": 4, "expert_layer_period": 2, "expert_layer_offset": 1}
        | {"num_experts": 16, "num_experts_per_tok": 2, "num_attention_heads": 32, "num_key_value_heads": 8}
        | {"mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_dt_rank": 256, "tie_word_embeddings": False},
        51_570_323_328,
    ),
    "DeepSeek-V3": (
        {"model_type": "deepseek_v3", "num_hidden_layers": 61, "hidden_size": 7168, "vocab_size": 129280}
        | {"intermediate_size": 18432, "first_k_dense_replace": 3, "n_routed_experts": 256, "n_shared_experts": 1}
        | {"num_experts_per_tok": 8, "moe_intermediate_size": 2048, "num_attention_heads": 128, "num_key_value_heads": 128}
        | {"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
        | {"tie_word_embeddings": False},
        671_026_419_200,
    ),
    "Llama-4-Maverick, its text part": (
        {"model_type": "llama4_text", "num_hidden_layers": 48, "hidden_size": 5120, "vocab_size": 202048}
        | {"intermediate_size": 8192, "intermediate_size_mlp": 16384, "num_local_experts": 128, "num_experts_per_tok": 1}
        | {"interleave_moe_layer_step": 2, "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128}
        | {"tie_word_embeddings": False},
        400_700_000_000,
    ),
    "gemma-3n-E2B, its text part": (
        {"model_type": "gemma3n_text", "num_hidden_layers": 30, "hidden_size": 2048, "vocab_size": 262400}
        | {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "intermediate_size": [8192] * 30}
        | {"vocab_size_per_layer_input": 262144, "hidden_size_per_layer_input": 256, "num_kv_shared_layers": 10},
        4_460_000_000,
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_config_alone_gives_the_parameters_of_layers_that_differ(tmp_path: Path, name: str) -> None:
    config, published = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(config | {"torch_dtype": "bfloat16"}))
    facts = find_model_facts(str(tmp_path))
    assert facts.parameters == pytest.approx(published, rel=0.04)
    terms = {term.name: term for term in estimate_footprint(SizingRequest(model=facts, engine="vllm")).terms}
    assert terms["weights"].exactness is Exactness.ESTIMATED


def test_a_config_alone_that_shows_too_little_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(InvalidModelFile, match="no layers"):
        find_model_facts(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(BASE | {"quantization_config": {"quant_method": "quip"}}))
    with pytest.raises(InvalidModelFile, match="quip"):
        find_model_facts(str(tmp_path))


def test_an_unknown_quantisation_is_said_and_counted_by_the_bytes_of_the_files(tmp_path: Path, make_safetensors: Make) -> None:
    data = make_safetensors({"a.packed": ("I32", [64, 64]), "b.weight": ("BF16", [64, 64])})
    (tmp_path / "model.safetensors").write_bytes(data)
    (tmp_path / "config.json").write_text(json.dumps(BASE | {"quantization_config": {"quant_method": "quip"}}))
    facts = find_model_facts(str(tmp_path))
    assert facts.tensor_bytes == 64 * 64 * (4 + 2)
    assert "not known (quip)" in facts.remarks[0]
    (tmp_path / "config.json").write_text(
        json.dumps(BASE | {"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}})
    )
    assert find_model_facts(str(tmp_path)).precision == "fp8"


QUANTISED: list[tuple[dict[str, Any], str | None]] = [
    ({"quant_method": "modelopt", "quant_algo": "FP8"}, "fp8"),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4"),
    ({"quant_method": "modelopt_fp4"}, "nvfp4"),
    ({"quant_method": "modelopt", "quant_algo": "W4A8_NVFP4_FP8"}, "nvfp4"),
    ({"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"}, "int4"),
    ({"quant_method": "modelopt", "quant_algo": "W8A8_SQ_PER_CHANNEL"}, "int8"),
    ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, None),
    ({"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp8_e4m3"}}}, "fp8"),
    ({"quant_method": "quark", "global_quant_config": {"weight": [{"dtype": "fp4"}]}}, "mxfp4"),
    ({"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "uint4"}}}, "int4"),
    ({"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp4"}}, "layer_quant_config": {"*": {}}}, None),
    ({"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"num_bits": 8, "type": "float"}}}}, "fp8"),
    ({"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"num_bits": 4, "type": "float"}}}}, "nvfp4"),
    ({"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"num_bits": 4, "type": "int"}}}}, "int4"),
    (
        {
            "quant_method": "compressed-tensors",
            "config_groups": {"a": {"weights": {"num_bits": 4}}, "b": {"weights": {"num_bits": 8}}},
        },
        None,
    ),
    ({"quant_method": "gptq", "bits": 8}, "int8"),
    ({"quant_method": "gptq", "bits": 3}, None),
    ({"quant_method": "torchao"}, None),
    ({"quant_method": "modelopt", "quant_algo": ["FP8"]}, "fp8"),
    ({"quant_method": "compressed-tensors", "config_groups": [1]}, None),
    ({"quant_method": "quark", "global_quant_config": {"weight": []}}, None),
]


@pytest.mark.parametrize(("quantised", "precision"), QUANTISED, ids=str)
def test_a_quantisation_is_known_by_its_words_or_said_to_be_unknown(quantised: dict[str, Any], precision: str | None) -> None:
    found, unknown = read_precision(json.dumps(BASE | {"quantization_config": quantised}))
    if precision is not None:
        assert (found, unknown) == (precision, None)
    else:
        assert unknown is not None
        assert unknown.startswith(quantised["quant_method"])
        assert "bits" not in quantised or "3 bits" in unknown
